// The map of one head of a long context, from the whole matrix to a single cell.
import { createCellDetails } from "../components/cellDetails.js";
import { el, pageHeader, readRecord } from "../components/dom.js";
import { describeError } from "../components/errorStatement.js";
import { formatCount } from "../components/format.js";
import { parseInRange, readUrlState, updateUrlState } from "../components/urlState.js";
import { createWeightMap, REDUCTIONS } from "../components/weightMap.js";
import { openMatrix } from "../matrix/matrixClient.js";

const data = readRecord();
const [rowCount, columnCount] = data.matrix.size;
const matrix = openMatrix(data.matrix);

// -- The view in the address, as far as it is valid --

const parseIndex = (text, length) => {
  const value = parseInRange(text, 0, length - 1);
  return value === null ? null : Math.floor(value);
};
function viewOfAddress() {
  const { row, column, zoom, query, key, reduce } = readUrlState();
  return {
    row: parseInRange(row, 0, rowCount),
    column: parseInRange(column, 0, columnCount),
    zoom: parseInRange(zoom, 1e-6, 1e3),
    query: parseIndex(query, rowCount),
    key: parseIndex(key, columnCount),
    reduce: REDUCTIONS.includes(reduce) ? reduce : null,
  };
}

const tokens = data.tokens, queries = data.shared_tokens ? tokens : data.query_tokens;
const details = createCellDetails({ matrix, tokens, queries, goTo: (i, j) => map.goTo(i, j) });
const map = createWeightMap({
  matrix, size: data.matrix.size, tokens, queries, overview: data.overview, view: viewOfAddress(),
  onCell: details.show, onView: updateUrlState,
});
addEventListener("hashchange", () => map.show(viewOfAddress()));

// -- Going to a cell by its numbers; not a form, which a sandboxed frame must not submit --

function createField(name, length) {
  const id = `to-${name}`;
  const input = el("input", {
    type: "number", id, min: "0", max: `${length - 1}`, step: "1", onkeydown: (event) => event.key === "Enter" && goToCell(),
  });
  return { input, node: el("label", { for: id }, name, input), value: () => parseIndex(input.value, length) };
}
const fields = [createField("query", rowCount), createField("key", columnCount)];
function goToCell() {
  const cell = fields.map((field) => field.value());
  if (cell.includes(null)) fields[cell.indexOf(null)].input.focus();
  else map.goTo(...cell);
}

document.getElementById("app").append(
  pageHeader(data.title, `${formatCount(rowCount, "query", "queries")} down, ${formatCount(columnCount, "key")} across. `
    + "Each point shows how much a token (the query, its row) attends to another (the key, its column). Zoom with the wheel or "
    + "two fingers until each weight has its own cell; drag to move."),
  el("div", { class: "beside" }, map.node, details.node),
  el("div", { class: "go", role: "group", "aria-label": "Go to a cell" }, fields.map((field) => field.node),
    el("button", { type: "button", onclick: goToCell }, "Go to this cell")),
  el("section", { class: "exact" }, el("h2", {}, "About this page"), el("p", {}, data.description), el("p", {}, describeError(data.matrix.error))),
);
// Send the arrays to the worker before the first request needs them.
map.ready.then(() => matrix.cell(0, 0, 0, { urgent: false }));
