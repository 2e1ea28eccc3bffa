// Heads at the checkpoints of a training run: a slider moves through the steps, with the loss beside the map of a head.
import { bringIntoView } from "../components/bringIntoView.js";
import { createPalette, paletteColor } from "../components/colorScale.js";
import { radioGroup, slider } from "../components/controls.js";
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { formatNumber, parseNumbers } from "../components/format.js";
import { createHeatPicture } from "../components/heatPicture.js";
import { createLineChart } from "../components/lineChart.js";
import { rowSentence } from "../components/rowSentence.js";
import { decodeFloat32 } from "../matrix/payload.js";

const MAX_TICKS = 6;

const data = readRecord();
const all = decodeFloat32(data.weights);
const losses = Object.entries(data.loss).map(([name, ys], i) => ({ name, kind: `loss-${i}`, ys: parseNumbers(ys) }));
const [headCount, rowCount, columnCount] = data.size;
const state = { place: 0, head: 0, row: rowCount - 1, column: 0 };

function rowWeights(i) {
  const from = ((state.place * headCount + state.head) * rowCount + i) * columnCount;
  return all.subarray(from, from + columnCount);
}

// -- The map of a head --

let palette = createPalette();
const box = el("div", { class: "picture" });
const picture = createHeatPicture({
  id: "picture", rows: data.queries, columns: data.tokens, shape: [rowCount, columnCount],
  paintCell: (i, j) => ({ color: paletteColor(palette, Math.min(Math.max(rowWeights(i)[j], 0), 1) || 0), text: formatNumber(rowWeights(i)[j]) }),
  label: `Weights: ${rowCount} queries down, ${columnCount} keys across. Arrow keys select a cell.`,
  at: () => state,
  onSelect: (row, column) => setState({ row, column }),
});
box.append(picture.canvas);

// -- The loss --

const every = Math.ceil((data.steps.length - 1) / (MAX_TICKS - 1)) || 1;
const chart = createLineChart("loss", data.steps, data.steps.filter((_, i) => i % every === 0), (place) => {
  steps.set(place);
  setState({ place });
}, true);
const highest = Math.max(...losses.flatMap(({ ys }) => ys.filter(Number.isFinite)), 0);
const keys = el("div", { class: "keys" });

function drawLoss() {
  const texts = losses.map(({ name, ys }) => [name, formatNumber(ys[state.place])]);
  chart.draw({
    curves: losses, main: losses[0].kind, highest, highestText: formatNumber(highest), index: state.place,
    label: `Loss over the training steps. At step ${data.steps[state.place]}: ${texts.map((pair) => pair.join(" ")).join(", ")}.`,
  });
  keys.replaceChildren(...losses.map(({ kind }, i) =>
    el("span", { class: `key ${kind}` }, tokenElement(texts[i][0]), " ", el("b", { id: kind }, texts[i][1]))));
}

// -- The page --

const cell = el("div", { id: "cell", role: "status" });

function showCell() {
  const weights = rowWeights(state.row), isSquare = rowCount === columnCount;
  cell.replaceChildren(
    el("p", { class: "pair" }, tokenElement(data.queries[state.row]), " → ", tokenElement(data.tokens[state.column]), " ",
      el("b", { class: "weight" }, formatNumber(weights[state.column]))),
    el("p", { id: "sentence" }, rowSentence(data.queries[state.row], weights, data.tokens, (j) => weights[j] > 0, isSquare ? state.row : -1)),
  );
}

function setState(change) {
  const isNewMap = "place" in change || "head" in change;
  Object.assign(state, change);
  if (isNewMap) picture.repaint();
  else picture.paint();
  if ("place" in change) drawLoss();
  showCell();
}

const steps = slider("training step", "step", data.steps.map(String), 0, (place) => setState({ place }));
const heads = radioGroup("head", "Head", data.heads, (head) => {
  setState({ head });
  bringIntoView(box, heads);
});
steps.input.addEventListener("change", () => bringIntoView(box, steps.node)); // after the slider is released
document.getElementById("app").append(
  pageHeader("Attention while it learns", "Queries down, keys across. Slide through the training steps, and point at a cell."),
  el("section", { class: "card" }, steps.node),
  el("div", { class: "beside" },
    el("section", { class: "card", "aria-label": "Map" }, heads, box,
      el("p", { class: "legend" }, "0", el("span", { class: "ramp", "aria-hidden": "true" }), "1"), cell),
    el("section", { class: "card", "aria-labelledby": "loss-title" },
      el("h2", { id: "loss-title" }, "Loss"), chart.node, el("p", { class: "axis" }, "step"), keys)),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  palette = createPalette();
  picture.repaint();
});
const resize = () => picture.resize(box.clientWidth - 8); // without the padding for the focus ring
new ResizeObserver(resize).observe(box);
resize();
drawLoss();
showCell();
