// The weights as a picture: queries down, keys across. The pointer or the arrow keys choose a cell, and the
// computation behind it is told beside it. All numbers are the library's own.
import { el, header, record, scrolling, token } from "./dom.js";
import { number, numbers, sumOfProducts, unpacked } from "./numbers.js";

const TABLE_UP_TO = 24; // longer rows are no help as a table
const LABELS_FROM = 14; // pixels of a cell that leave room for its token
const LABEL_ROOM = 112;
const NUMBERS_FROM = 52;
const PAGE_OF_ROWS = 16;

const data = record();
const [rowCount, columnCount] = data.size;
const weights = unpacked(data.weights);
const scores = unpacked(data.scores);
const rawScores = unpacked(data.raw_scores);
const queries = unpacked(data.query);
const keys = unpacked(data.key);
const shifts = numbers(data.shift);
const totals = numbers(data.total);
const at = { row: 0, column: 0, byRow: false };

const entry = (matrix) => matrix[at.row * columnCount + at.column];
const slice = (matrix, i) => matrix.subarray(i * data.head_dim, (i + 1) * data.head_dim);

function largestOf(array) {
  let largest = 0;
  for (const x of array) if (x > largest && x < Infinity) largest = x;
  return largest;
}
const largest = largestOf(weights);
const largestOfRow = Array.from({ length: rowCount }, (_, i) =>
  largestOf(weights.subarray(i * columnCount, (i + 1) * columnCount)),
);

// -- The picture: one pixel for each weight, made once, then drawn as large as there is room --

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function strength(i, j) {
  const top = at.byRow ? largestOfRow[i] : largest;
  const weight = weights[i * columnCount + j];
  return top > 0 && weight >= 0 ? Math.min(weight / top, 1) : 0;
}

function pixels() {
  const image = new ImageData(columnCount, rowCount);
  const cool = colour("--cool"), hot = colour("--hot"), card = colour("--card");
  for (let i = 0, p = 0; i < rowCount; i++) {
    for (let j = 0; j < columnCount; j++, p += 4) {
      const part = strength(i, j), hidden = scores[p / 4] === -Infinity;
      for (let c = 0; c < 3; c++) image.data[p + c] = hidden ? card[c] : cool[c] + part * (hot[c] - cool[c]);
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
  "aria-label": `Weights: ${rowCount} queries down, ${columnCount} keys across. Arrow keys choose a cell.`,
  "aria-describedby": "cell",
});
const box = el("div", { class: "picture" }, canvas);
let image = null;
let layout = { cell: 1, left: 0, top: 0 };

function fitted(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

function widest(names) {
  const context = canvas.getContext("2d");
  context.font = `14px ${getComputedStyle(document.body).fontFamily}`;
  return Math.ceil(Math.max(...names.map((name) => context.measureText(name).width)));
}

function resize() {
  const room = box.clientWidth - 8; // its padding, which the ring of the focus needs
  const labelled = (room - LABEL_ROOM) / columnCount >= LABELS_FROM && rowCount <= 64;
  const left = labelled ? Math.min(LABEL_ROOM, widest(data.queries) + 12) : 0;
  const top = labelled ? (columnCount <= 8 ? 28 : Math.min(LABEL_ROOM, widest(data.tokens) + 12)) : 0;
  const cell = Math.max(1, Math.min(Math.floor((room - left - 2) / columnCount), 96)); // whole pixels, all alike
  layout = { cell, left, top, labelled };
  const ratio = window.devicePixelRatio || 1;
  const width = left + cell * columnCount + 2, height = top + cell * rowCount + 2;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  paint();
}

function labels(context, style) {
  const { cell, left, top } = layout;
  context.fillStyle = style.getPropertyValue("--soft");
  context.font = `14px ${style.fontFamily}`;
  context.textBaseline = "middle";
  context.textAlign = "right";
  data.queries.forEach((name, i) => context.fillText(fitted(context, name, left - 12), left - 8, top + (i + 0.5) * cell));
  data.tokens.forEach((name, j) => {
    const x = left + (j + 0.5) * cell;
    if (columnCount <= 8) {
      context.textAlign = "center";
      context.fillText(fitted(context, name, cell - 4), x, top - 12);
      return;
    }
    context.save();
    context.translate(x, top - 6);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(fitted(context, name, top - 12), 0, 0);
    context.restore();
  });
}

function cellNumbers(context, style) {
  const { cell, left, top } = layout;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `${cell >= 72 ? 16 : 13}px ${style.fontFamily}`;
  for (let i = 0; i < rowCount; i++) {
    for (let j = 0; j < columnCount; j++) {
      const hidden = scores[i * columnCount + j] === -Infinity;
      const ink = hidden ? "--soft" : strength(i, j) > 0.6 ? "--card" : "--ink";
      context.fillStyle = style.getPropertyValue(ink);
      const weight = weights[i * columnCount + j];
      // Cut to the cell, 1.288e-04 would read as 1.288.
      const text = hidden ? "hidden" : weight > 0 && weight < 1e-3 ? "<0.001" : number(weight);
      context.fillText(fitted(context, text, cell - 4), left + (j + 0.5) * cell, top + (i + 0.5) * cell);
    }
  }
}

function paint() {
  image ??= pixels();
  const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
  const { cell, left, top, labelled } = layout;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, left + 1, top + 1, cell * columnCount, cell * rowCount);
  if (labelled) labels(context, style);
  if (cell >= NUMBERS_FROM) cellNumbers(context, style);
  // A long row's cell is a pixel: two lines lead to it.
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

// -- What is told of the cell --

const told = el("div", { class: "card", id: "cell", role: "status" });

function tell() {
  const hidden = entry(scores) === -Infinity;
  const step = (name, ...text) => [el("dt", {}, name), el("dd", {}, ...text)];
  const raw = number(entry(rawScores));
  const computed = [
    step("Compare", `${sumOfProducts(slice(queries, at.row), slice(keys, at.column))} = ${raw}`),
    step("Scale", hidden ? "the mask hides this key" : `${raw} × ${number(data.scale)} = ${number(entry(scores))}`),
    hidden
      ? []
      : step("Normalise", `exp(${number(entry(scores))} − ${number(shifts[at.row])}) / ${number(totals[at.row])}`,
          ` = ${number(entry(weights))}`),
  ];
  told.replaceChildren(...[
    el("p", { class: "pair" }, token(data.queries[at.row]), " → ", token(data.tokens[at.column])),
    el("p", { class: "weight" }, number(entry(weights))),
    data.named ? el("p", { class: "place" }, `query ${at.row}, key ${at.column}`) : [],
    el("dl", {}, computed),
  ].flat());
}

function go(row, column) {
  at.row = Math.min(Math.max(row, 0), rowCount - 1);
  at.column = Math.min(Math.max(column, 0), columnCount - 1);
  paint();
  tell();
}

canvas.addEventListener("pointermove", point);
canvas.addEventListener("pointerdown", point);
function point(event) {
  const { cell, left, top } = layout;
  const row = Math.floor((event.offsetY - top - 1) / cell), column = Math.floor((event.offsetX - left - 1) / cell);
  const inside = row >= 0 && row < rowCount && column >= 0 && column < columnCount;
  if (inside && (row !== at.row || column !== at.column)) go(row, column);
}

canvas.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const to = {
    ArrowUp: [at.row - 1, at.column],
    ArrowDown: [at.row + 1, at.column],
    ArrowLeft: [at.row, at.column - 1],
    ArrowRight: [at.row, at.column + 1],
    Home: [at.row, 0],
    End: [at.row, columnCount - 1],
    PageUp: [at.row - PAGE_OF_ROWS, at.column],
    PageDown: [at.row + PAGE_OF_ROWS, at.column],
  }[event.key];
  if (!to) return;
  event.preventDefault();
  go(...to);
});

// -- The page --

function repaint() {
  image = null;
  paint();
}

function asTable() {
  if (rowCount > TABLE_UP_TO || columnCount > TABLE_UP_TO) return [];
  const head = el("tr", {}, el("td", {}), data.tokens.map((name) => el("th", { scope: "col" }, token(name))));
  const body = data.queries.map((name, i) =>
    el("tr", {}, el("th", { scope: "row" }, token(name)),
      data.tokens.map((_, j) => el("td", {}, number(weights[i * columnCount + j])))),
  );
  const table = el("table", {}, el("caption", {}, "Weights: a row for each query, a column for each key"),
    el("thead", {}, head), el("tbody", {}, body));
  return [el("details", {}, el("summary", {}, "As a table"), scrolling("Weights as a table", table))];
}

function legend() {
  const scale = el("span", { class: "ramp", "aria-hidden": "true" });
  const top = el("span", { id: "top" }, number(largest));
  const byRow = el("input", {
    type: "checkbox",
    id: "by-row",
    onchange: (event) => {
      at.byRow = event.target.checked;
      top.textContent = at.byRow ? "largest of the row" : number(largest);
      repaint();
    },
  });
  return el("div", { class: "controls" }, el("span", { class: "legend" }, "0", scale, top),
    el("div", { class: "switches" }, el("label", { class: "switch" }, byRow, "colour each row by its own largest")));
}

document.getElementById("app").append(
  header("Who attends to whom", `${data.shape}. Queries down, keys across; point at a cell or use the arrow keys.`),
  el("div", { class: "beside" }, el("div", {}, box, legend()), told),
  ...asTable(),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new ResizeObserver(resize).observe(box);
resize();
tell();
