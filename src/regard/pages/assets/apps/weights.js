// The weights as a picture: queries down, keys across, and the output beside it. The selected cell is computed step by step.
// The first numbers come from the library; with the causal switch the page computes them.
import { bringIntoView } from "../components/bringIntoView.js";
import { createPalette, paletteColor, readColor } from "../components/colorScale.js";
import { checkbox, radioGroup } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { commonFormat, formatFactor, formatNumber, formatVector, parseNumbers, sumOfProducts } from "../components/format.js";
import { createHeatPicture } from "../components/heatPicture.js";
import { rowSentence } from "../components/rowSentence.js";
import { decodeFloat32 } from "../matrix/payload.js";
import { softmax } from "../matrix/softmax.js";

const MAX_TABLE_SIZE = 24; // longer rows are not shown as a table, nor in a list of sentences
const MAX_OUTPUT_WIDTH = 0.45; // of the room, beside the weights
const GAP = 20;
const MIN_ROOM_BESIDE = 480; // pixels; below, the output is under the weights
const MAX_HEIGHT_BELOW = 36; // pixels of a row of the output there

const data = readRecord();
const [rowCount, columnCount] = data.size;
const rawScores = decodeFloat32(data.raw_scores);
const queries = decodeFloat32(data.query);
const keys = decodeFloat32(data.key);
const values = data.value && decodeFloat32(data.value);
const [dim, valueDim] = [data.head_dim, data.value_dim];
const given = {
  scores: decodeFloat32(data.scores), weights: decodeFloat32(data.weights), output: data.output && decodeFloat32(data.output),
  shifts: parseNumbers(data.shift), totals: parseNumbers(data.total),
};
let shown = given;
// `column` is that of the picture that was used last: a key, or an entry of the output.
const at = { row: 0, column: 0, isOutput: false, byRow: false, causal: false, kind: "weights" };

const rowOf = (matrix, i, size) => matrix.subarray(i * size, (i + 1) * size);
const entry = (matrix, i, j) => matrix[i * columnCount + j];
const isLive = (i, j) => entry(shown.scores, i, j) !== -Infinity;

// The numbers with a causal mask in addition to the mask of the matrix.
function computeCausal() {
  const scores = given.scores.map((score, at) => (at % columnCount > Math.floor(at / columnCount) ? -Infinity : score));
  const weights = new Float32Array(scores.length), output = values && new Float32Array(rowCount * valueDim);
  const shifts = [], totals = [];
  for (let i = 0; i < rowCount; i++) {
    const row = softmax(Array.from(rowOf(scores, i, columnCount)));
    weights.set(row.weights, i * columnCount);
    shifts.push(row.shift);
    totals.push(row.total);
    if (values) row.weights.forEach((weight, j) => {
      if (scores[i * columnCount + j] === -Infinity) return;
      for (let c = 0; c < valueDim; c++) output[i * valueDim + c] += weight * values[j * valueDim + c];
    });
  }
  return { scores, weights, output, shifts, totals };
}

// Smallest and largest finite number of an array; weights start at 0.
function rangeOf(array) {
  let low = Infinity, high = -Infinity;
  for (const x of array) {
    if (!Number.isFinite(x)) continue;
    low = Math.min(low, x);
    high = Math.max(high, x);
  }
  return high === -Infinity ? [0, 0] : [at.kind === "weights" ? 0 : low, high];
}

// -- Colours and formats: values below zero have another colour --

let palette = null, colors = {}, range = [0, 1], rowRanges = [], outputSize = 1, formatEntry = formatNumber, formatOutput = formatNumber;

function prepareCells() {
  palette = createPalette();
  colors = Object.fromEntries(["card", "mark"].map((name) => [name, readColor(`--${name}`)]));
  [formatEntry, formatOutput] = [shown[at.kind], shown.output ?? []].map(commonFormat);
  const matrix = shown[at.kind];
  range = rangeOf(matrix);
  rowRanges = Array.from({ length: rowCount }, (_, i) => rangeOf(rowOf(matrix, i, columnCount)));
  outputSize = shown.output ? Math.max(...shown.output.map((x) => (Number.isFinite(x) ? Math.abs(x) : 0))) || 1 : 1;
}

const mix = (from, to, part) => from.map((x, c) => x + part * (to[c] - x));
const cellText = (x) => (at.kind === "weights" && x > 0 && x < 1e-3 ? "<0.001" : formatEntry(x)); // 1.288e-04 cut to the cell would read as 1.288

function paintWeight(i, j) {
  if (!isLive(i, j)) return { color: colors.card, text: null };
  const [low, high] = at.byRow ? rowRanges[i] : range, x = entry(shown[at.kind], i, j);
  const part = high > low && x >= low ? Math.min((x - low) / (high - low), 1) : 0;
  return { color: paletteColor(palette, part), text: cellText(x) };
}

function paintOutput(i, c) {
  const x = shown.output[i * valueDim + c];
  const part = Number.isFinite(x) ? Math.min(Math.abs(x) / outputSize, 1) * 0.85 : 0;
  return { color: x < 0 ? mix(paletteColor(palette, 0), colors.mark, part) : paletteColor(palette, part), text: formatOutput(x) };
}

// -- The pictures --

const box = el("div", { class: "picture" });
const picture = createHeatPicture({
  id: "picture", rows: data.queries, columns: data.tokens, shape: [rowCount, columnCount], paintCell: paintWeight,
  label: `Weights: ${rowCount} queries down, ${columnCount} keys across. Arrow keys select a cell.`,
  at: () => ({ row: at.row, column: at.isOutput ? null : at.column }),
  onSelect: (row, column, isChosen) => select({ row, column, isOutput: false }, isChosen),
});
const outputPicture = values && createHeatPicture({
  id: "output", rows: data.queries, columns: null, shape: [rowCount, valueDim], paintCell: paintOutput,
  label: `Output: ${rowCount} queries down, ${valueDim} entries across. Arrow keys select a cell.`,
  at: () => ({ row: at.row, column: at.isOutput ? at.column : null }),
  onSelect: (row, column, isChosen) => select({ row, column, isOutput: true }, isChosen),
});
box.append(el("figure", {}, picture.canvas, ...(values ? [el("figcaption", { id: "map-name" }, "weights")] : [])));
if (values) box.append(el("figure", {}, outputPicture.canvas, el("figcaption", {}, "output")));

const singleColumn = matchMedia("(max-width: 42rem)");

function resize() {
  const room = box.clientWidth - 8; // without the padding for the focus ring
  const isBeside = values && room >= MIN_ROOM_BESIDE;
  box.classList.toggle("is-beside", Boolean(isBeside));
  // In a single column the selected cell is explained right below the weights.
  if (singleColumn.matches !== box.contains(details)) (singleColumn.matches ? picture.canvas.parentNode : leftColumn).after(details);
  if (!isBeside) {
    picture.resize(room);
    outputPicture?.resize(room, { maxHeight: MAX_HEIGHT_BELOW });
    return;
  }
  const outputRoom = Math.min(MAX_OUTPUT_WIDTH, valueDim / (valueDim + columnCount)) * (room - GAP);
  const size = picture.resize(room - GAP - outputRoom);
  outputPicture.resize(Math.min(outputRoom, Math.max(size.cell, 2) * valueDim + 2), { fixed: size });
}

function repaint() {
  prepareCells();
  picture.repaint();
  outputPicture?.repaint();
}

// -- The selected cell --

const details = el("div", { class: "card", id: "cell", role: "status" });
const step = (name, ...text) => [el("dt", {}, name), el("dd", {}, ...text)];

function weightSteps({ row, column }) {
  const raw = formatNumber(entry(rawScores, row, column)), score = formatNumber(entry(shown.scores, row, column));
  const weight = formatNumber(entry(shown.weights, row, column)), masked = !isLive(row, column);
  const value = values && rowOf(values, column, valueDim);
  return [
    step("Compare", `${sumOfProducts(rowOf(queries, row, dim), rowOf(keys, column, dim))} = ${raw}`),
    step("Scale", masked ? "this key is masked" : `${formatFactor(entry(rawScores, row, column))} × ${formatNumber(data.scale)} = ${score}`),
    masked ? [] : step("Normalise", `exp(${score} − ${formatFactor(shown.shifts[row])}) / ${formatNumber(shown.totals[row])}`, ` = ${weight}`),
    masked || !values ? [] : step("Aggregate", `adds ${weight} · ${formatVector(value)}`,
      ` = ${formatVector(value.map((x) => entry(shown.weights, row, column) * x))}`),
  ];
}

function outputSteps({ row, column }) {
  const live = data.tokens.map((_, j) => j).filter((j) => isLive(row, j));
  const terms = sumOfProducts(live.map((j) => entry(shown.weights, row, j)), live.map((j) => values[j * valueDim + column]));
  return [step("Aggregate", `${terms} = ${formatNumber(shown.output[row * valueDim + column])}`)];
}

const selfIndex = (i) => (data.named && rowCount === columnCount ? i : -1);
const sentenceOf = (i) => rowSentence(data.queries[i], rowOf(shown.weights, i, columnCount), data.tokens, (j) => isLive(i, j), selfIndex(i));

function showDetails() {
  const { row, column, isOutput } = at;
  const number = isOutput ? shown.output[row * valueDim + column] : entry(shown.weights, row, column);
  details.replaceChildren(...[
    el("p", { class: "pair" }, tokenElement(data.queries[row]), " → ", isOutput ? `output, entry ${column}` : tokenElement(data.tokens[column])),
    el("p", { class: "weight" }, formatNumber(number)),
    data.named && !isOutput ? el("p", { class: "place" }, `query ${row}, key ${column}`) : [],
    el("p", { id: "sentence" }, sentenceOf(row)),
    el("dl", {}, isOutput ? outputSteps(at) : weightSteps(at)),
  ].flat());
  sentences.forEach((item, i) => {
    if (i === row) item.setAttribute("aria-current", "true");
    else item.removeAttribute("aria-current");
  });
}

function select(change, isChosen = true) {
  Object.assign(at, change);
  picture.paint();
  outputPicture?.paint();
  showDetails();
  if (isChosen) bringIntoView(details, (at.isOutput ? outputPicture : picture).canvas);
}

// -- The page --

const isShort = rowCount <= MAX_TABLE_SIZE && columnCount <= MAX_TABLE_SIZE;
const sentences = isShort ? data.queries.map((_, i) => el("button", { type: "button", onclick: () => select({ row: i }) })) : [];
const tableBox = el("div");

function matrixTable(caption, columns, width, matrix) {
  const format = commonFormat(matrix), head = el("tr", {}, el("td", {}), columns.map((name) => el("th", { scope: "col" }, name)));
  const body = data.queries.map((name, i) =>
    el("tr", {}, el("th", { scope: "row" }, tokenElement(name)), columns.map((_, j) => el("td", {}, format(matrix[i * width + j])))));
  return scrollBox(`${caption} as a table`, el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)));
}

// Everything that follows from the numbers.
function showNumbers() {
  shown = at.causal ? computeCausal() : given;
  repaint();
  low.textContent = formatNumber(range[0]);
  top.textContent = at.byRow ? "row maximum" : formatNumber(range[1]);
  if (at.byRow && at.kind === "scores") low.textContent = "row minimum";
  sentences.forEach((item, i) => item.replaceChildren(...sentenceOf(i)));
  if (isShort) {
    tableBox.replaceChildren(
      matrixTable("Weights: a row for each query, a column for each key", data.tokens.map((name) => tokenElement(name)), columnCount, shown.weights),
      ...(values && valueDim <= MAX_TABLE_SIZE
        ? [matrixTable("Output: a row for each query", Array.from({ length: valueDim }, (_, c) => `${c}`), valueDim, shown.output)] : []));
  }
  const name = document.getElementById("map-name");
  if (name) name.textContent = at.kind;
  showDetails();
}

const change = (what) => {
  Object.assign(at, what);
  showNumbers();
  bringIntoView(picture.canvas.parentNode, legend);
};
const low = el("span", { id: "low" }), top = el("span", { id: "top" });
const legend = el("div", { class: "controls" },
  radioGroup("kind", "Show", ["weights", "scores"], (i) => change({ kind: ["weights", "scores"][i] }), true),
  el("span", { class: "legend" }, low, el("span", { class: "ramp", "aria-hidden": "true" }), top),
  el("div", { class: "switches" },
    data.causal ? checkbox("causal mask", "causal", false, (causal) => change({ causal })) : [],
    checkbox("scale colours to each row", "by-row", false, (byRow) => change({ byRow }))));

const leftColumn = el("div", {}, legend, box);
document.getElementById("app").classList.toggle("wide", Boolean(values));
document.getElementById("app").append(
  pageHeader("Attention weights", `${data.shape}. Queries down, keys across. Point at a cell or use the arrow keys.`),
  el("div", { class: "beside" }, leftColumn, details),
  ...(isShort ? [
    el("h2", { class: "rows-title" }, "Row by row"),
    el("ol", { class: "rows", id: "rows" }, sentences.map((item) => el("li", {}, item))),
    el("details", {}, el("summary", {}, "Show as a table"), tableBox)] : []),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
prepareCells();
new ResizeObserver(resize).observe(box);
resize();
showNumbers();
