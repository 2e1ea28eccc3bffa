// All heads of a model: a grid of thumbnails, one head opened, a search over all heads, and the findings of the diagnosis.
import { el, readRecord } from "../components/dom.js";
import { describeError } from "../components/errorStatement.js";
import { capitalise, formatShort } from "../components/format.js";
import { createHeadGrid, headName } from "../components/headGrid.js";
import { createHeadSearch } from "../components/headSearch.js";
import { createHeadView, findingElement, VIEWS } from "../components/headView.js";
import { flushUrlState, parseInRange, readUrlState, updateUrlState } from "../components/urlState.js";
import { REDUCTIONS } from "../components/weightMap.js";
import { loadArray, openMatrix } from "../matrix/matrixClient.js";
import { averageLevels, averageOverviews } from "../matrix/overview.js";
import { MEAN } from "../matrix/weights.js";

const data = readRecord();
const texts = data.texts;

// -- The record as cells, one for each head --

function createCells(layer) {
  layer.findings = data.findings.filter(({ module, here }) => module === layer.module && here);
  const { size } = layer.thumbnails, count = size[0] * size[1], { payload } = layer, loaded = {};
  let matrix = null;
  const openLayer = () => (matrix ??= openMatrix(payload));
  const pictureOf = (reduce) => layer.thumbnails[reduce] ?? layer.thumbnails.max; // a picture of single weights has no means
  const loadThumbnail = async (n, reduce) => {
    loaded[reduce] ??= loadArray(pictureOf(reduce).levels);
    return (await loaded[reduce]).subarray(n * count, (n + 1) * count);
  };
  const heads = layer.heads.map((head, n) => {
    const pair = payload ? payload.heads.indexOf(head) : -1;
    return {
      layer, head, pair, hasWeights: pair >= 0, isMean: false,
      thumbnail: { size, levels: (reduce) => loadThumbnail(n, reduce) },
      overview: payload?.overviews?.[pair] ?? null,
      measures: Object.fromEntries(data.measures.map((name) => [name, Number(layer.measures[name][n])])),
      findings: layer.findings.filter(({ heads }) => !heads.length || heads.includes(head)),
      matrix: openLayer,
    };
  });
  if (heads.length === 1) return heads;
  // Beside the single heads, their mean; it has weights if all of them have.
  const averageThumbnail = (reduce) => averageLevels(heads.map(() => pictureOf(reduce)),
    () => Promise.all(heads.map((_, n) => loadThumbnail(n, reduce)))).load();
  const hasWeights = heads.every((cell) => cell.hasWeights);
  return [...heads, {
    layer, head: MEAN, pair: MEAN, hasWeights, isMean: true, matrix: openLayer, measures: {}, findings: [],
    thumbnail: { size, levels: averageThumbnail },
    overview: hasWeights ? averageOverviews(heads.map((cell) => cell.overview), loadArray) : null,
  }];
}
const cells = data.layers.flatMap(createCells);

// -- The state of the page, which the address keeps, so that a link restores it --

const state = { cell: null, singleHead: null, view: "map", query: null, key: null, row: null, column: null, zoom: null, direction: null, reduce: null, sort: "", descending: true, from: "", to: "" };

function parseState() {
  const given = readUrlState(), parseIndex = (text, last) => (/^\d{1,9}$/.test(text ?? "") ? parseInRange(text, 0, last) : null);
  const [layerNumber, headIndex, call] = [given.layer, given.head, given.call ?? "0"].map((text) => parseIndex(text, Infinity));
  const headNumber = given.head === MEAN ? MEAN : headIndex;
  const cell = cells.find(({ layer, head }) => layer.layer === layerNumber && head === headNumber && layer.call === call) ?? null;
  const [qLen, kvLen] = cell ? cell.layer.shape : [0, 0];
  return {
    cell,
    view: VIEWS.includes(given.view) ? given.view : "map",
    direction: given.direction === "received" ? given.direction : null,
    query: parseIndex(given.query, qLen - 1),
    key: parseIndex(given.key, kvLen - 1),
    row: parseInRange(given.row, 0, qLen),
    column: parseInRange(given.column, 0, kvLen),
    zoom: parseInRange(given.zoom, 0, 1000),
    reduce: REDUCTIONS.slice(1).includes(given.reduce) ? given.reduce : null,
    sort: data.measures.includes(given.sort) ? given.sort : "",
    descending: given.order !== "smallest",
    from: (given.from ?? "").slice(0, 500),
    to: (given.to ?? "").slice(0, 500),
  };
}

function writeState() {
  const { cell, view, reduce, sort, descending, from, to } = state, ofCell = (name) => (cell ? state[name] : null);
  updateUrlState({
    layer: cell && cell.layer.layer,
    call: cell && cell.layer.calls > 1 ? cell.layer.call : null,
    head: cell && cell.head,
    view: cell && view !== "map" ? view : null,
    ...Object.fromEntries(["query", "key", "row", "column", "zoom", "direction"].map((name) => [name, ofCell(name)])),
    reduce,
    sort: sort || null,
    order: sort && !descending ? "smallest" : null,
    from: from && to ? from : null,
    to: from && to ? to : null,
  });
}

// Add an entry to the history, to which the back button returns.
function pushHistory() {
  flushUrlState();
  try {
    history.pushState(null, "", location.hash || "#");
  } catch {
    // A frame without an address of its own has no history.
  }
}

// -- Grid, search and one head --

// "within_16" as "within 16".
function measureLabel(name) {
  return name.replaceAll("_", " ");
}

const measuresLine = el("p", { id: "head-measures", class: "soft", "aria-hidden": "true" });
const grid = createHeadGrid({ cells, onOpen: (cell) => openHead(cell), onPoint: (cell) => {
  if (cell.isMean) return measuresLine.replaceChildren(el("b", {}, capitalise(headName(cell))));
  const values = Object.entries(cell.measures).filter(([, value]) => !Number.isNaN(value)).map(([name, value]) => `${measureLabel(name)} ${formatShort(value)}`);
  return measuresLine.replaceChildren(el("b", {}, capitalise(headName(cell))), `: ${values.join(", ")}`);
} });
const measuresHelp = el("details", { id: "measures-help" }, el("summary", {}, "What these numbers mean"),
  el("dl", {}, data.measures.map((name) => el("div", {}, el("dt", {}, measureLabel(name)), el("dd", {}, data.captions[name])))));

const sortSelect = el("select", { id: "sort", onchange: () => sortHeads(sortSelect.value, state.descending) },
  el("option", { value: "" }, "layer"), data.measures.map((name) => el("option", { value: name }, measureLabel(name))));
const orderSelect = el("select", { id: "order", "aria-label": "Order", onchange: () => sortHeads(state.sort, orderSelect.value === "largest") },
  el("option", { value: "largest" }, "largest first"), el("option", { value: "smallest" }, "smallest first"));
const caption = el("span", { class: "soft", id: "measure-caption" });

function sortHeads(measure, descending) {
  Object.assign(state, { sort: measure, descending });
  [sortSelect.value, orderSelect.value, orderSelect.hidden] = [measure, descending ? "largest" : "smallest", !measure];
  caption.textContent = measure ? data.captions[measure] : "";
  grid.arrange(measure, descending);
  writeState();
}

const thumbnailSelect = el("select", { id: "thumbnails", onchange: () => {
  state.reduce = thumbnailSelect.value === REDUCTIONS[0] ? null : thumbnailSelect.value;
  drawThumbnails();
  writeState();
} }, el("option", { value: "max" }, "the maximum"), el("option", { value: "mean" }, "the mean"));
const thumbnailCaption = el("p", { class: "soft", id: "thumbnail-caption" });
const block = data.layers[0].thumbnails.block.map((n) => Math.ceil(n)), isSingle = block.every((n) => n === 1);

function drawThumbnails() {
  const reduce = state.reduce ?? REDUCTIONS[0];
  thumbnailSelect.value = reduce;
  grid.setReduce(reduce);
  thumbnailCaption.textContent = "Queries down, keys across. "
    + (isSingle ? "Each cell of a thumbnail is a weight"
      : `Each cell of a thumbnail is the ${reduce === "max" ? "maximum" : "mean"} of a block of ${block.join(" × ")} weights`)
    + ". Colours follow the square root, up to the largest value of each thumbnail. "
    + (cells.some((cell) => cell.isMean) ? `The last thumbnail of a layer is the mean over its heads${isSingle || reduce !== "max" ? "" : ", of these maxima"}.` : "");
}

const gridSection = el("section", { id: "grid", "aria-label": "All heads" },
  el("div", { class: "controls" }, el("label", { for: "sort" }, "Sort heads by"), sortSelect, orderSelect, caption,
    isSingle ? [] : [el("label", { for: "thumbnails" }, "Cells show"), thumbnailSelect]),
  grid.node, measuresLine, measuresHelp, thumbnailCaption);

const headView = createHeadView({
  cells,
  texts,
  onBack: () => closeHead(),
  onStep: (by) => {
    const shown = grid.shown(), place = shown.indexOf(state.cell);
    openHead(shown[(place + by + shown.length) % shown.length], {}, { focus: false });
  },
  onMean: () => {
    const own = cells.filter(({ layer }) => layer === state.cell.layer);
    openHead(state.cell.isMean ? own.find(({ head }) => head === state.singleHead) ?? own[0] : own.at(-1), {}, { focus: false });
  },
  onView: (change) => {
    Object.assign(state, change);
    writeState();
    if ("reduce" in change) drawThumbnails();
    if ("view" in change) headView.show(state.cell, state);
  },
});
const search = createHeadSearch({
  cells: cells.filter((cell) => !cell.isMean),
  texts,
  onOpen: (cell, query, key) => openHead(cell, { query, key }, { focus: true, goTo: true }),
  onSearch: (from, to) => {
    Object.assign(state, { from, to });
    writeState();
  },
});

// The selected query and key stay if the head has them too.
function openHead(cell, change = {}, options = { focus: true }) {
  const [qLen, kvLen] = cell.layer.shape, keepIndex = (index, length) => (index === null || index < length ? index : null);
  if (!state.cell) pushHistory();
  Object.assign(state, { cell, singleHead: cell.isMean ? state.singleHead : cell.head }, change);
  Object.assign(state, { query: keepIndex(state.query, qLen), key: keepIndex(state.key, kvLen) });
  writeState();
  drawState(options);
}

function closeHead() {
  const closed = state.cell;
  pushHistory();
  state.cell = null;
  writeState();
  drawState();
  closed?.node.focus();
}

function drawState(options) {
  gridSection.hidden = state.cell !== null;
  headView.node.hidden = state.cell === null;
  if (state.cell) headView.show(state.cell, state, options);
}

// -- Findings --

// Where a finding is, with buttons that open its heads.
function findingLocation(finding) {
  const layer = data.layers.find(({ module }) => module === finding.module);
  if (!layer) return el("p", { class: "soft" }, finding.where);
  const own = cells.filter((cell) => cell.layer === layer && finding.heads.includes(cell.head));
  const buttons = (own.length ? own : cells.filter((cell) => cell.layer === layer).slice(0, 1)).slice(0, 12)
    .map((cell) => el("button", { type: "button", class: "small", onclick: () => openHead(cell, finding.rows.length ? { query: finding.rows[0], key: null } : {}) },
      own.length ? `${cell.layer.layer}.${cell.head}` : `layer ${cell.layer.layer}`));
  return el("p", { class: "where" }, el("span", { class: "soft" }, finding.where), " ", buttons);
}

function findingsElement() {
  const list = data.findings, summary = `Diagnosis: ${data.summary[0].toLowerCase()}${data.summary.slice(1)}`;
  if (!list.length) return el("p", { id: "findings", class: "soft" }, summary);
  return el("details", { id: "findings", open: list.some(({ severity }) => severity === "error") },
    el("summary", {}, summary), list.map((finding) => findingElement(finding, findingLocation(finding))));
}

function restoreState() {
  const next = parseState();
  Object.assign(state, next);
  sortHeads(next.sort, next.descending);
  drawThumbnails();
  search.run(next.from, next.to, true);
  drawState();
}

document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title), el("p", { class: "lead" }, data.lead)),
  search.node, findingsElement(), gridSection, headView.node,
  el("footer", {}, el("p", { class: "soft", id: "error" }, data.error ? describeError(data.error) : "This page has thumbnails and measures, but no weights.")),
);
addEventListener("hashchange", restoreState);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  grid.repaint();
  headView.repaint();
});
restoreState();
