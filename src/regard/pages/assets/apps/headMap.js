// One head of a long context: a map from the whole matrix to a single cell, a search in it, and the running text.
import { bringIntoView } from "../components/bringIntoView.js";
import { createCellDetails } from "../components/cellDetails.js";
import { radioGroup } from "../components/controls.js";
import { el, pageHeader, readRecord } from "../components/dom.js";
import { describeError } from "../components/errorStatement.js";
import { formatCount } from "../components/format.js";
import { createPairSearch } from "../components/pairSearch.js";
import { createTextView } from "../components/textView.js";
import { parseInRange, readUrlState, updateUrlState } from "../components/urlState.js";
import { createWeightMap, REDUCTIONS } from "../components/weightMap.js";
import { createStoredSteps } from "../components/weightSteps.js";
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
  const { row, column, zoom, query, key, reduce, direction } = readUrlState();
  return {
    row: parseInRange(row, 0, rowCount),
    column: parseInRange(column, 0, columnCount),
    zoom: parseInRange(zoom, 1e-6, 1e3),
    query: parseIndex(query, rowCount),
    key: parseIndex(key, columnCount),
    reduce: REDUCTIONS.includes(reduce) ? reduce : null,
    direction: direction === "received" ? direction : null,
  };
}

const tokens = data.tokens, queries = data.shared_tokens ? tokens : data.query_tokens;
const hasText = Boolean(tokens && queries);
const state = viewOfAddress();
function onView(change) {
  Object.assign(state, change);
  updateUrlState(change);
}
const common = { matrix, head: 0, size: data.matrix.size, tokens, queries };
const details = createCellDetails({ matrix, tokens, queries, goTo: (i, j) => map.goTo(i, j) });
const steps = createStoredSteps({ explain: (i, j) => matrix.explain(0, i, j),
  names: () => ({ query: (n) => queries?.[n] ?? `query ${n}`, key: (n) => tokens?.[n] ?? `key ${n}` }) });
const map = createWeightMap({ ...common, overview: data.overview, view: state, onCell: details.show, onView, onOpen: steps.show });

// -- The running text, if queries and keys have tokens --

const textDetails = createCellDetails({ matrix, tokens, queries, hasList: false,
  hint: "Click a token to colour the text by it. Point at another token, or move to it with the arrow keys, to see the weight between the two." });
const stage = el("div", { class: "stage" }, map.node), side = el("div", {}, details.node);
stage.addEventListener("keyup", ({ key }) => key.startsWith("Arrow") && bringIntoView(side.firstChild, stage));
let text = null;
const views = radioGroup("view", "View", ["Map", "Text"], (n) => {
  updateUrlState({ view: n ? "text" : null });
  showView(n === 1);
}, true);

function showView(isText) {
  views.querySelectorAll("input")[isText ? 1 : 0].checked = true;
  if (isText) {
    text ??= createTextView({ ...common, first: data.shared_tokens ? 0 : null, view: state, onCell: textDetails.show, onView });
    text.show(state);
  }
  stage.replaceChildren(isText ? text.node : map.node);
  side.replaceChildren(isText ? textDetails.node : details.node);
}

// -- Search --

const search = createPairSearch({ ...common, onFound: map.setMarks, onSearch: (from, to) => updateUrlState({ from: from || null, to: to || null }),
  onOpen: openCell });

function openCell(i, j) {
  showView(false);
  updateUrlState({ view: null });
  map.goTo(i, j);
  bringIntoView(stage, side);
}

function restoreState() {
  const { view, from = "", to = "" } = readUrlState(), current = search.current();
  Object.assign(state, viewOfAddress());
  showView(view === "text" && hasText);
  if (from !== current.from || to !== current.to) search.run(from.slice(0, 500), to.slice(0, 500), true);
}
addEventListener("hashchange", () => {
  restoreState();
  if (map.node.isConnected) map.show(state);
});

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
  else openCell(...cell);
}

document.getElementById("app").append(
  pageHeader(data.title, `${formatCount(rowCount, "query", "queries")} down, ${formatCount(columnCount, "key")} across. `
    + "Each point shows how much a token (the query, its row) attends to another (the key, its column). Zoom with the wheel or "
    + "two fingers until each weight has its own cell; drag to move."),
  search.node, hasText ? views : "",
  el("div", { class: "beside" }, stage, side), steps.node,
  el("div", { class: "go", role: "group", "aria-label": "Go to a cell" }, fields.map((field) => field.node),
    el("button", { type: "button", onclick: goToCell }, "Go to this cell")),
  el("section", { class: "exact" }, el("h2", {}, "About this page"), el("p", {}, data.description), el("p", {}, describeError(data.matrix.error))),
);
restoreState();
// Send the arrays to the worker before the first request needs them.
map.ready.then(() => matrix.cell(0, 0, 0, { urgent: false }));
