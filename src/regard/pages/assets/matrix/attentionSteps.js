// The four steps of one query, computed as `regard` computes them: masked keys have the score −Infinity, and their values
// are left out, whatever they are.
import { softmax } from "./softmax.js";

function dotProduct(a, b) {
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
