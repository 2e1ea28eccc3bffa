// Every number of one step of one query, as a table with a row for each key.
import { weightBar } from "./controls.js";
import { el, scrollBox, tokenElement } from "./dom.js";
import { commonFormat, formatFactor, formatNumber, formatVector, sumOfProducts } from "./format.js";

const cell = (text, kind = "") => el("td", { class: kind }, text);
const maskedCell = () => el("td", { class: "masked-key" }, "masked");

// Formula, column headers, the cells of one key, and a footer.
function stepContent(step, { row, keys, values, scale, masks }) {
  const isLive = (j) => row.scores[j] !== -Infinity;
  const factor = formatNumber(scale);
  const column = (numbers) => commonFormat(numbers.flat());
  const sums = column(row.raw_scores), scores = column(row.scores), weights = column(row.weights);
  if (step === 0) {
    const entries = column(keys);
    return {
      formula: `query = ${formatVector(row.query)}`,
      headers: ["key", "query · key", "sum"],
      cells: (j) => [
        cell(formatVector(keys[j], entries)),
        cell(sumOfProducts(row.query, keys[j])),
        cell(sums(row.raw_scores[j]), "result"),
      ],
    };
  }
  if (step === 1) {
    return {
      formula: [scale === 1 ? "score = sum" : `score = sum × ${factor}`, ...masks].join(", then "),
      headers: ["sum", "factor", "score"],
      cells: (j) => [
        cell(sums(row.raw_scores[j])),
        cell(`× ${factor}`),
        isLive(j) ? cell(scores(row.scores[j]), "result") : maskedCell(),
      ],
    };
  }
  if (step === 2) {
    const exponentials = column(row.exponentials);
    return {
      formula: `weight = exp(score − ${formatFactor(row.shift)}) / ${formatNumber(row.total)}`,
      headers: ["score", "exp", "weight", ""],
      cells: (j) => [
        isLive(j) ? cell(scores(row.scores[j])) : maskedCell(),
        cell(exponentials(row.exponentials[j])),
        cell(weights(row.weights[j]), "result"),
        el("td", { class: "bars" }, weightBar(row.weights[j])),
      ],
    };
  }
  const entries = column(values), contributions = column([...row.contributions, row.output]);
  return {
    formula: `output = ${formatVector(row.output)}`,
    headers: ["weight", "value", "weight · value"],
    cells: (j) => [
      cell(weights(row.weights[j])),
      cell(formatVector(values[j], entries)),
      cell(formatVector(row.contributions[j], contributions), "result"),
    ],
    footer: ["", "", formatVector(row.output, contributions)],
  };
}

// `numbers` has the row of the query, keys, values, tokens, scale and the names of the masks.
export function stepTable(step, numbers) {
  const content = stepContent(step, numbers);
  const headers = ["token", ...content.headers].map((header) =>
    header ? el("th", { scope: "col" }, header) : el("td", {}),
  );
  const body = numbers.tokens.map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, tokenElement(name)), content.cells(j)),
  );
  const footer = content.footer
    ? [el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "output"), content.footer.map((x) => cell(x, "result"))))]
    : [];
  const table = el("table", {}, el("thead", {}, el("tr", {}, headers)), el("tbody", {}, body), footer);
  return [el("p", { class: "formula", id: "row-formula" }, content.formula), scrollBox("Numbers for each key", table)];
}
