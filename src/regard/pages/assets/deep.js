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

const place = (text, most) => {
  const value = within(text, 0, most - 1);
  return value === null ? null : Math.floor(value);
};
function asked() {
  const { row, column, zoom, query, key } = fragment();
  return {
    row: within(row, 0, rowCount),
    column: within(column, 0, columnCount),
    zoom: within(zoom, 1e-6, 1e3),
    query: place(query, rowCount),
    key: place(key, columnCount),
  };
}

const tokens = data.tokens, queries = data.same ? tokens : data.queries; // often the same, and then carried once
const reading = readingOf({ matrix, tokens, queries, go: (i, j) => map.go(i, j) });
const map = mapOf({
  matrix, size: data.matrix.size, tokens, queries, overview: data.overview, view: asked(), onCell: reading.tell, onView: keep,
});
addEventListener("hashchange", () => map.show(asked()));

// -- Going to a cell by its numbers; not a form, which a sandbox would not let go --

function field(name, most) {
  const id = `to-${name}`;
  const input = el("input", {
    type: "number", id, min: "0", max: `${most - 1}`, step: "1", onkeydown: (event) => event.key === "Enter" && goThere(),
  });
  return { input, node: el("label", { for: id }, name, input), value: () => place(input.value, most) };
}
const fields = [field("query", rowCount), field("key", columnCount)];
function goThere() {
  const to = fields.map((each) => each.value());
  if (to.includes(null)) fields[to.indexOf(null)].input.focus();
  else map.go(...to);
}

const several = (n, one, many) => `${counted(n)} ${n === 1 ? one : many}`;
document.getElementById("app").append(
  header(data.title, `${several(rowCount, "query", "queries")} down, ${several(columnCount, "key", "keys")} across: each point tells how much a `
    + "token (the query, its row) attends to another (the key, its column). Zoom with the wheel or two fingers until each "
    + "weight has a cell of its own; drag to move."),
  el("div", { class: "beside" }, map.node, reading.node),
  el("div", { class: "go", role: "group", "aria-label": "Go to a cell" }, fields.map((each) => each.node),
    el("button", { type: "button", onclick: goThere }, "Go to this cell")),
  el("section", { class: "exact" }, el("h2", {}, "What this page is"), el("p", {}, data.words), el("p", {}, exactness(data.matrix.error))),
);
// The numbers are unpacked while the reader looks at the whole, so that the first question need not wait for it.
map.ready.then(() => matrix.cell(0, 0, 0, { urgent: false }));
