// What the current product is for, in words, and the product in numbers.
import { formatFactor, formatNumber, sumOfProducts } from "./format.js";
import { percent, quote } from "./rowSentence.js";

export const STEP_NAMES = ["Compare", "Scale", "Normalise", "Aggregate"];

// The keys of a row in the order of their weights, with those shares that are worth a word.
function favourites(weights, tokens) {
  return weights.map((weight, j) => ({ weight, name: tokens[j] })).sort((a, b) => b.weight - a.weight);
}

function describeCompare({ row, column, tokens, query }) {
  return {
    words: ["How well does ", quote(tokens[column]), " fit what ", quote(query), " looks for? ",
      "Multiply the numbers in pairs and add up. The larger the sum, the better the match."],
    formula: `${sumOfProducts(row.query, row.keys[column])} = ${formatNumber(row.raw_scores[column])}`,
  };
}

function describeScale({ row, column, tokens, scale, dim, query }) {
  const j = column ?? 0, masked = row.scores[j] === -Infinity;
  const isOn = scale !== 1 || dim === 1;
  return {
    words: masked && column !== null
      ? [quote(query), " must not look at ", quote(tokens[j]), ": the mask replaces the score by minus infinity."]
      : [isOn ? "Multiply every score by one factor, so that scores do not grow with the number of entries."
        : "Scaling is off: the sums are the scores, and grow with the number of entries."],
    formula: masked ? `${formatNumber(row.raw_scores[j])} → −∞` : `${formatFactor(row.raw_scores[j])} × ${formatNumber(scale)} = ${formatNumber(row.scores[j])}`,
  };
}

function describeNormalise({ row, column, tokens, query }) {
  const live = row.scores.some((score) => score !== -Infinity);
  if (!live) return { words: ["Every key is masked for ", quote(query), ": its weights are zeros."], formula: "weight = 0" };
  const [first] = favourites(row.weights, tokens), j = column ?? row.weights.indexOf(first.weight);
  return {
    words: ["Turn the scores of ", quote(query), row.sink > 0 ? ` into shares. With that of the sink, ${percent(row.sink)}, they add up to 1. The largest share of a key, ` : " into shares that add up to 1. The largest share, ", percent(first.weight), ", goes to ", quote(first.name), "."],
    formula: row.scores[j] === -Infinity ? "masked: weight = 0"
      : `exp(${formatNumber(row.scores[j])} − ${formatFactor(row.shift)}) / ${formatNumber(row.total)} = ${formatNumber(row.weights[j])}`,
  };
}

function describeAggregate({ row, column, tokens, query, values }) {
  const [first, second] = favourites(row.weights, tokens);
  if (!first || first.weight === 0) {
    return { words: ["Every key is masked for ", quote(query), ": its output is zeros."], formula: "output = 0" };
  }
  const also = second && second.weight > 0 ? [", ", percent(second.weight), " of ", quote(second.name)] : [];
  const live = row.weights.map((weight, j) => [weight, values[j][column]]).filter((_, j) => row.scores[j] !== -Infinity);
  return {
    words: ["What ", quote(query), " takes along, number ", `${column}: `, percent(first.weight), " of ", quote(first.name), also,
      row.weights.length > 2 ? " and a little of the rest." : "."],
    formula: `${sumOfProducts(live.map(([weight]) => weight), live.map(([, x]) => x))} = ${formatNumber(row.output[column])}`,
  };
}

// `at` is { step, column }; `numbers` has the row of the query with the keys, and names, scale, dim and values.
export function describeProduct({ step, column }, numbers) {
  const describe = [describeCompare, describeScale, describeNormalise, describeAggregate][step];
  return describe({ ...numbers, column });
}

// What a changed number did, in a sentence.
export function describeChange({ name, i, j }, { rows, tokens, queries }) {
  if (name === "V") return ["Values are not compared, so no weight moves: only column ", `${j} of the output changes.`];
  if (name === "Q") {
    const [first] = favourites(rows[i].weights, tokens);
    return [quote(queries[i]), " now takes most from ", quote(first.name), ": ", percent(first.weight), "."];
  }
  const fans = rows.filter((row) => row.weights[j] > 0 && row.weights[j] === Math.max(...row.weights)).length;
  return [quote(tokens[j]), ` is now the first choice of ${fans} of ${rows.length}.`];
}
