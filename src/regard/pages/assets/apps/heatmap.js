// The weights as a picture: queries down, keys across. The pointer or the arrow keys select a cell, whose computation is
// shown beside it. All numbers come from the library.
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { formatNumber, parseNumbers, sumOfProducts } from "../components/format.js";
import { decodeFloat32 } from "../matrix/payload.js";

const MAX_TABLE_SIZE = 24; // longer rows are not shown as a table
const MIN_LABEL_SIZE = 14; // pixels of a cell that leave room for its token
const LABEL_WIDTH = 112;
const MIN_NUMBER_SIZE = 52; // pixels of a cell that leave room for its weight
const ROWS_PER_PAGE = 16;

const data = readRecord();
const [rowCount, columnCount] = data.size;
const weights = decodeFloat32(data.weights);
const scores = decodeFloat32(data.scores);
const rawScores = decodeFloat32(data.raw_scores);
const queries = decodeFloat32(data.query);
const keys = decodeFloat32(data.key);
const shifts = parseNumbers(data.shift);
const totals = parseNumbers(data.total);
const at = { row: 0, column: 0, byRow: false };

const entryOf = (matrix) => matrix[at.row * columnCount + at.column];
const rowOf = (matrix, i) => matrix.subarray(i * data.head_dim, (i + 1) * data.head_dim);

function largestOf(array) {
  let largest = 0;
  for (const x of array) if (x > largest && x < Infinity) largest = x;
  return largest;
}
const largest = largestOf(weights);
const rowLargest = Array.from({ length: rowCount }, (_, i) =>
  largestOf(weights.subarray(i * columnCount, (i + 1) * columnCount)),
);

// -- The picture: one pixel for each weight, rendered once and then scaled --

function readColor(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// The weight relative to the largest, 0 … 1.
function relativeWeight(i, j) {
  const top = at.byRow ? rowLargest[i] : largest;
  const weight = weights[i * columnCount + j];
  return top > 0 && weight >= 0 ? Math.min(weight / top, 1) : 0;
}

function renderPixels() {
  const image = new ImageData(columnCount, rowCount);
  const cool = readColor("--cool"), hot = readColor("--hot"), card = readColor("--card");
  for (let i = 0, p = 0; i < rowCount; i++) {
    for (let j = 0; j < columnCount; j++, p += 4) {
      const part = relativeWeight(i, j), masked = scores[p / 4] === -Infinity;
      for (let c = 0; c < 3; c++) image.data[p + c] = masked ? card[c] : cool[c] + part * (hot[c] - cool[c]);
      image.data[p + 3] = 255;
    }
  }
  const small = el("canvas", { width: columnCount, height: rowCount });
  small.getContext("2d").putImageData(image, 0, 0);
  return small;
}

const canvas = el("canvas", {
  id: "picture",
  tabindex: "0",
  role: "application",
  "aria-label": `Weights: ${rowCount} queries down, ${columnCount} keys across. Arrow keys select a cell.`,
  "aria-describedby": "cell",
});
const box = el("div", { class: "picture" }, canvas);
let image = null;
let layout = { cell: 1, left: 0, top: 0 };

// Shorten a text to a width in pixels.
function fitText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

function maxTextWidth(names) {
  const context = canvas.getContext("2d");
  context.font = `14px ${getComputedStyle(document.body).fontFamily}`;
  return Math.ceil(Math.max(...names.map((name) => context.measureText(name).width)));
}

function resize() {
  const room = box.clientWidth - 8; // without the padding for the focus ring
  const hasLabels = (room - LABEL_WIDTH) / columnCount >= MIN_LABEL_SIZE && rowCount <= 64;
  const left = hasLabels ? Math.min(LABEL_WIDTH, maxTextWidth(data.queries) + 12) : 0;
  const top = hasLabels ? (columnCount <= 8 ? 28 : Math.min(LABEL_WIDTH, maxTextWidth(data.tokens) + 12)) : 0;
  const cell = Math.max(1, Math.min(Math.floor((room - left - 2) / columnCount), 96)); // whole pixels, so that all cells have one size
  layout = { cell, left, top, hasLabels };
  const ratio = window.devicePixelRatio || 1;
  const width = left + cell * columnCount + 2, height = top + cell * rowCount + 2;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  paint();
}

function drawLabels(context, style) {
  const { cell, left, top } = layout;
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = `14px ${style.fontFamily}`;
  context.textBaseline = "middle";
  context.textAlign = "right";
  data.queries.forEach((name, i) => context.fillText(fitText(context, name, left - 12), left - 8, top + (i + 0.5) * cell));
  data.tokens.forEach((name, j) => {
    const x = left + (j + 0.5) * cell;
    if (columnCount <= 8) {
      context.textAlign = "center";
      context.fillText(fitText(context, name, cell - 4), x, top - 12);
      return;
    }
    context.save();
    context.translate(x, top - 6);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(fitText(context, name, top - 12), 0, 0);
    context.restore();
  });
}

function drawCellWeights(context, style) {
  const { cell, left, top } = layout;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${cell >= 72 ? 16 : 13}px ${style.fontFamily}`;
  for (let i = 0; i < rowCount; i++) {
    for (let j = 0; j < columnCount; j++) {
      const masked = scores[i * columnCount + j] === -Infinity;
      const ink = masked ? "--soft" : relativeWeight(i, j) > 0.6 ? "--card" : "--ink";
      context.fillStyle = style.getPropertyValue(ink);
      const weight = weights[i * columnCount + j];
      // Cut to the cell, 1.288e-04 would read as 1.288.
      const text = masked ? "masked" : weight > 0 && weight < 1e-3 ? "<0.001" : formatNumber(weight);
      context.fillText(fitText(context, text, cell - 4), left + (j + 0.5) * cell, top + (i + 0.5) * cell);
    }
  }
}

function paint() {
  image ??= renderPixels();
  const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const { cell, left, top, hasLabels } = layout;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, left + 1, top + 1, cell * columnCount, cell * rowCount);
  if (hasLabels) drawLabels(context, style);
  if (cell >= MIN_NUMBER_SIZE) drawCellWeights(context, style);
  // Two lines lead to a cell that is too small to be found.
  const x = left + 1 + at.column * cell, y = top + 1 + at.row * cell;
  context.fillStyle = context.strokeStyle = style.getPropertyValue("--mark");
  if (cell < 8) {
    context.globalAlpha = 0.35;
    context.fillRect(left + 1, y, cell * columnCount, cell);
    context.fillRect(x, top + 1, cell, cell * rowCount);
    context.globalAlpha = 1;
  }
  const margin = cell < 8 ? 3 : -1;
  context.lineWidth = cell < 8 ? 1.5 : 3;
  context.strokeRect(x - margin, y - margin, cell + 2 * margin, cell + 2 * margin);
}

// -- The selected cell --

const details = el("div", { class: "card", id: "cell", role: "status" });

function showDetails() {
  const masked = entryOf(scores) === -Infinity;
  const step = (name, ...text) => [el("dt", {}, name), el("dd", {}, ...text)];
  const raw = formatNumber(entryOf(rawScores));
  const steps = [
    step("Compare", `${sumOfProducts(rowOf(queries, at.row), rowOf(keys, at.column))} = ${raw}`),
    step("Scale", masked ? "this key is masked" : `${raw} × ${formatNumber(data.scale)} = ${formatNumber(entryOf(scores))}`),
    masked
      ? []
      : step("Normalise", `exp(${formatNumber(entryOf(scores))} − ${formatNumber(shifts[at.row])}) / ${formatNumber(totals[at.row])}`,
          ` = ${formatNumber(entryOf(weights))}`),
  ];
  details.replaceChildren(...[
    el("p", { class: "pair" }, tokenElement(data.queries[at.row]), " → ", tokenElement(data.tokens[at.column])),
    el("p", { class: "weight" }, formatNumber(entryOf(weights))),
    data.named ? el("p", { class: "place" }, `query ${at.row}, key ${at.column}`) : [],
    el("dl", {}, steps),
  ].flat());
}

function selectCell(row, column) {
  at.row = Math.min(Math.max(row, 0), rowCount - 1);
  at.column = Math.min(Math.max(column, 0), columnCount - 1);
  paint();
  showDetails();
}

canvas.addEventListener("pointermove", onPointer);
canvas.addEventListener("pointerdown", onPointer);
function onPointer(event) {
  const { cell, left, top } = layout;
  const row = Math.floor((event.offsetY - top - 1) / cell), column = Math.floor((event.offsetX - left - 1) / cell);
  const inside = row >= 0 && row < rowCount && column >= 0 && column < columnCount;
  if (inside && (row !== at.row || column !== at.column)) selectCell(row, column);
}

canvas.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const target = {
    ArrowUp: [at.row - 1, at.column],
    ArrowDown: [at.row + 1, at.column],
    ArrowLeft: [at.row, at.column - 1],
    ArrowRight: [at.row, at.column + 1],
    Home: [at.row, 0],
    End: [at.row, columnCount - 1],
    PageUp: [at.row - ROWS_PER_PAGE, at.column],
    PageDown: [at.row + ROWS_PER_PAGE, at.column],
  }[event.key];
  if (!target) return;
  event.preventDefault();
  selectCell(...target);
});

// -- The page --

function repaint() {
  image = null;
  paint();
}

function tableElements() {
  if (rowCount > MAX_TABLE_SIZE || columnCount > MAX_TABLE_SIZE) return [];
  const head = el("tr", {}, el("td", {}), data.tokens.map((name) => el("th", { scope: "col" }, tokenElement(name))));
  const body = data.queries.map((name, i) =>
    el("tr", {}, el("th", { scope: "row" }, tokenElement(name)),
      data.tokens.map((_, j) => el("td", {}, formatNumber(weights[i * columnCount + j])))),
  );
  const table = el("table", {}, el("caption", {}, "Weights: a row for each query, a column for each key"),
    el("thead", {}, head), el("tbody", {}, body));
  return [el("details", {}, el("summary", {}, "Show as a table"), scrollBox("Weights as a table", table))];
}

function legendElement() {
  const scale = el("span", { class: "ramp", "aria-hidden": "true" });
  const top = el("span", { id: "top" }, formatNumber(largest));
  const byRow = el("input", {
    type: "checkbox",
    id: "by-row",
    onchange: (event) => {
      at.byRow = event.target.checked;
      top.textContent = at.byRow ? "row maximum" : formatNumber(largest);
      repaint();
    },
  });
  return el("div", { class: "controls" }, el("span", { class: "legend" }, "0", scale, top),
    el("div", { class: "switches" }, el("label", { class: "switch" }, byRow, "scale colours to each row")));
}

document.getElementById("app").append(
  pageHeader("Attention weights", `${data.shape}. Queries down, keys across. Point at a cell or use the arrow keys.`),
  el("div", { class: "beside" }, el("div", {}, box, legendElement()), details),
  ...tableElements(),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(resize).observe(box);
resize();
showDetails();
