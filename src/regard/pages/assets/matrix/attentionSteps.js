// The four steps of one query, computed as `regard` computes them: masked keys have the score −Infinity, and their values
// are left out, whatever they are.
import { softmax } from "./softmax.js";

const SHOWN_KEYS = 8; // of a row that is summarised
const LEAST_SINK = 1e-6; // below, a weight of the sink is rounding: the lse is stored as float32

export function dotProduct(a, b) {
  return a.reduce((sum, x, i) => sum + x * b[i], 0);
}

// What each value contributes to the output; null without values.
export function weightValues({ scores, weights }, values) {
  return values && values.map((value, j) => value.map((x) => (scores[j] === -Infinity ? 0 : weights[j] * x)));
}

// `masked[j]` is true for keys that the query must not use. `values` may be null. `rawScores` are the dot products, if they
// are known already.
export function attentionRow({ query, keys, values, scale, masked, rawScores = null }) {
  const raw = rawScores ?? keys.map((key) => dotProduct(query, key));
  const scaled = raw.map((score) => score * scale);
  const scores = scaled.map((score, j) => (masked[j] ? -Infinity : score));
  const row = { query, raw_scores: raw, scaled_scores: scaled, scores, ...softmax(scores) };
  const contributions = weightValues(row, values);
  if (values === null) return { ...row, contributions, output: null };
  const output = values[0].map((_, c) => contributions.reduce((sum, part) => sum + part[c], 0));
  return { ...row, contributions, output };
}

// A row of scores (−Infinity where masked) around key j: score and weight of j; scores, exponentials and weights of the `keys` that
// are shown, those with the largest weights and j, in the order of the text; shift and total of the softmax; the number of other
// keys that are not masked, and the rest of the weight, on them. With a sink, `lse` gives the total, and the weight of the sink.
export function summariseRow(scores, j, lse = null) {
  const { shift, exponentials, ...sums } = softmax(scores), total = lse === null ? sums.total : Math.exp(lse - shift);
  const live = [...scores.keys()].filter((key) => scores[key] !== -Infinity && key !== j).sort((a, b) => scores[b] - scores[a] || a - b);
  const keys = [...live.slice(0, SHOWN_KEYS - 1), j].sort((a, b) => a - b), take = (numbers) => keys.map((key) => numbers[key]);
  const weights = exponentials.map((x, key) => (scores[key] === -Infinity ? 0 : x / total)), sum = (numbers) => numbers.reduce((a, b) => a + b, 0), shown = take(weights);
  const left = lse === null ? 0 : 1 - sum(weights);
  return {
    score: scores[j], weight: weights[j], keys, scores: take(scores), exponentials: take(exponentials), weights: shown,
    shift, total, others: live.length + 1 - keys.length, rest: sum(weights) - sum(shown), sink: left > LEAST_SINK ? left : 0,
  };
}
