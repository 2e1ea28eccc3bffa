// Bytes between the slow and the fast memory: the four steps one after the other, and a fused kernel with tiles.
import { bringIntoView } from "../components/bringIntoView.js";
import { slider, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox } from "../components/dom.js";
import { formatCount, formatNumber } from "../components/format.js";

const data = readRecord();
const state = { n: data.lengths.indexOf(2048), d: data.dims.indexOf(64), rows: data.rows.indexOf(128) };

// The trips to the slow memory, each with its bytes.
function textbookTrips(n, d) {
  const vectors = data.itemsize * n * d, matrix = data.itemsize * n * n;
  return [["read Q and K", 2 * vectors], ["write the scores", matrix], ["read the scores", matrix], ["write the weights", matrix],
    ["read the weights and V", matrix + vectors], ["write the output", vectors]];
}

function fusedTrips(n, d, rows) {
  const vectors = data.itemsize * n * d, passes = Math.ceil(n / rows);
  return [["read Q", vectors], [`read K and V, ${formatCount(passes, "time")}`, 2 * vectors * passes], ["write the output", vectors]];
}

// A tile of queries, of keys and of values, and in float32 its scores and its output.
const tileBytes = (d, rows) => data.itemsize * (rows + 2 * data.columns) * d + 4 * rows * (data.columns + d);
const sum = (trips) => trips.reduce((total, [, bytes]) => total + bytes, 0);

const results = el("div", { id: "results" });
const verdict = el("p", { id: "verdict", role: "status" });

function tripTable(id, title, trips, largest) {
  const row = (name, bytes) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, formatCount(bytes)),
    el("td", { class: "bars" }, weightBar(bytes / largest)));
  const total = sum(trips);
  return scrollBox(title, el("table", { id }, el("caption", {}, title), el("tbody", {}, trips.map(([name, bytes]) => row(name, bytes))),
    el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "bytes in total"), el("td", { class: "total" }, formatCount(total)),
      el("td", {}, `${formatNumber((1e6 * total) / data.bandwidth)} µs`)))));
}

function draw() {
  const n = data.lengths[state.n], d = data.dims[state.d], rows = data.rows[state.rows];
  const textbook = textbookTrips(n, d), fused = fusedTrips(n, d, rows);
  const largest = Math.max(...[...textbook, ...fused].map(([, bytes]) => bytes));
  results.replaceChildren(tripTable("textbook", "Step by step", textbook, largest), tripTable("fused", "Fused", fused, largest));
  const ratio = sum(textbook) / sum(fused), tile = tileBytes(d, rows);
  verdict.replaceChildren("Step by step moves ", el("b", { id: "ratio" }, formatNumber(ratio)), " times the bytes of the fused kernel. A tile needs ",
    el("b", { id: "tile" }, formatCount(tile)), ` of ${formatCount(data.fast)} bytes of fast memory: it ${tile <= data.fast ? "fits" : "does not fit"}.`);
}

const choose = (name, label, values) => slider(label, name, values.map((value) => formatCount(value)), state[name], (index) => {
  state[name] = index;
  draw();
}).node;
const settings = el("section", { class: "card sliders" }, choose("n", "tokens", data.lengths), choose("d", "entries of a head", data.dims),
  choose("rows", "queries in a tile", data.rows));
settings.addEventListener("change", () => bringIntoView(verdict, settings, results)); // after a slider is released
document.getElementById("app").append(
  pageHeader("Bytes that attention moves", `One head, ${data.itemsize} bytes for each number, tiles of ${data.columns} keys. The times are the bytes divided by ${formatNumber(data.bandwidth / 1e12)} TB a second.`),
  settings,
  el("section", { class: "card" }, verdict, results),
);
draw();
