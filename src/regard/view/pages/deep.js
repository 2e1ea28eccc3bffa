// The deep map: one head of a long context, from the whole to a single cell.
import { el, header, record } from "./dom.js";
import { exactness } from "./exactness.js";
import { fragment, keep, within } from "./fragment.js";
import { openMatrix } from "./lazy.js";
import { counted, mapOf } from "./map.js";
import { readingOf } from "./reading.js";

const data = record();
const [rowCount, columnCount] = data.matrix.size;
const matrix = openMatrix(data.matrix);

// -- The view that the address asks for, where it makes sense --

const asked = fragment();
const place = (text, most) => {
  const value = within(text, 0, most - 1);
  return value === null ? null : Math.floor(value);
};
const view = {
  row: place(asked.row, rowCount),
  column: place(asked.column, columnCount),
  zoom: within(asked.zoom, 1e-6, 1e3),
  query: place(asked.query, rowCount),
  key: place(asked.key, columnCount),
};

const reading = readingOf({ matrix, tokens: data.tokens, queries: data.queries, go: (i, j) => map.go(i, j) });
const map = mapOf({
  matrix, size: data.matrix.size, tokens: data.tokens, queries: data.queries, overview: data.overview, view,
  onCell: reading.tell, onView: keep,
});

// -- Going to a cell by its numbers --

function field(name, most) {
  const id = `to-${name}`;
  const input = el("input", { type: "number", id, min: "0", max: `${most - 1}`, step: "1", required: true, inputmode: "numeric" });
  return { input, node: el("label", { for: id }, name, input) };
}
const query = field("query", rowCount), key = field("key", columnCount);
const form = el("form", {
  class: "go",
  onsubmit: (event) => {
    event.preventDefault();
    map.go(Number(query.input.value), Number(key.input.value));
  },
}, query.node, key.node, el("button", { type: "submit" }, "Go to this cell"));

document.getElementById("app").append(
  header(data.title, `${counted(rowCount)} queries down, ${counted(columnCount)} keys across: each point tells how much a `
    + "token (the query, its row) attends to another (the key, its column). Zoom with the wheel or two fingers until each "
    + "weight has a cell of its own; drag to move."),
  el("div", { class: "beside" }, map.node, reading.node),
  form,
  el("section", { class: "exact" }, el("h2", {}, "What this page is"), el("p", {}, data.words), el("p", {}, exactness(data.matrix.error))),
);
