// All heads of a model: a grid of small maps, one head opened, a search over all of them, and what was found wrong.
import { el, record } from "./dom.js";
import { exactness } from "./exactness.js";
import { fragment, keep, keepNow, within } from "./fragment.js";
import { brief, gridOf, headName } from "./grid.js";
import { capital, findingNode, headView } from "./head.js";
import { numbersOf, openMatrix } from "./lazy.js";
import { searchOf } from "./search.js";

const data = record();
const texts = data.texts;

// -- The record as cells, one for each head --

function cellsOf(entry) {
  entry.findings = data.findings.filter((each) => each.module === entry.module && each.here);
  const { size, levels } = entry.maps, count = size[0] * size[1];
  let matrix = null, maps = null;
  const read = () => (maps ??= numbersOf(levels));
  return entry.heads.map((head, n) => {
    const place = entry.carried ? entry.carried.heads.indexOf(head) : -1;
    return {
      entry, head, place, opens: place >= 0,
      map: { size, levels: async () => (await read()).subarray(n * count, (n + 1) * count) },
      overview: entry.carried?.overviews?.[place] ?? null,
      measures: Object.fromEntries(data.measures.map((name) => [name, Number(entry.measures[name][n])])),
      findings: entry.findings.filter((each) => !each.heads.length || each.heads.includes(head)),
      matrix: () => (matrix ??= openMatrix(entry.carried)),
    };
  });
}
const cells = data.entries.flatMap(cellsOf);

// -- The fragment: what is looked at, so that a link opens it again --

const state = { cell: null, view: "map", query: null, key: null, row: null, column: null, zoom: null, sort: "", largest: true, from: "", to: "" };

function readFragment() {
  const given = fragment(), whole = (text, most) => (/^\d{1,9}$/.test(text ?? "") ? within(text, 0, most) : null);
  const [layer, number, call] = [given.layer, given.head, given.call ?? "0"].map((text) => whole(text, Infinity));
  const cell = cells.find(({ entry, head: own }) => entry.layer === layer && own === number && entry.call === call) ?? null;
  const [q_len, kv_len] = cell ? cell.entry.shape : [0, 0];
  return {
    cell,
    view: given.view === "lines" ? "lines" : "map",
    query: whole(given.query, q_len - 1),
    key: whole(given.key, kv_len - 1),
    row: within(given.row, 0, q_len),
    column: within(given.column, 0, kv_len),
    zoom: within(given.zoom, 0, 1000),
    sort: data.measures.includes(given.sort) ? given.sort : "",
    largest: given.order !== "smallest",
    from: (given.from ?? "").slice(0, 500),
    to: (given.to ?? "").slice(0, 500),
  };
}

function writeFragment() {
  const { cell, view, sort, largest, from, to } = state, place = (name) => (cell ? state[name] : null);
  keep({
    layer: cell && cell.entry.layer,
    call: cell && cell.entry.calls > 1 ? cell.entry.call : null,
    head: cell && cell.head,
    view: cell && view === "lines" ? view : null,
    ...Object.fromEntries(["query", "key", "row", "column", "zoom"].map((name) => [name, place(name)])),
    sort: sort || null,
    order: sort && !largest ? "smallest" : null,
    from: from && to ? from : null,
    to: from && to ? to : null,
  });
}

// The way back leads here.
function stepForth() {
  keepNow();
  try {
    history.pushState(null, "", location.hash || "#");
  } catch {
    // A frame without an address of its own has no way back.
  }
}

// -- The parts --

const aboutHead = el("p", { id: "about", class: "soft", "aria-hidden": "true" });
const grid = gridOf({ cells, open: (cell) => openHead(cell), tell: (cell) => {
  const values = Object.entries(cell.measures).filter(([, value]) => !Number.isNaN(value)).map(([name, value]) => `${name} ${brief(value)}`);
  aboutHead.replaceChildren(el("b", {}, capital(headName(cell))), `: ${values.join(", ")}`);
} });

const sort = el("select", { id: "sort", onchange: () => arrange(sort.value, state.largest) },
  el("option", { value: "" }, "layers"), data.measures.map((name) => el("option", { value: name }, name)));
const order = el("select", { id: "order", "aria-label": "Largest or smallest first", onchange: () => arrange(state.sort, order.value === "largest") },
  el("option", { value: "largest" }, "largest first"), el("option", { value: "smallest" }, "smallest first"));
const meaning = el("span", { class: "soft", id: "meaning" });

function arrange(measure, largest) {
  Object.assign(state, { sort: measure, largest });
  [sort.value, order.value, order.hidden] = [measure, largest ? "largest" : "smallest", !measure];
  meaning.textContent = measure ? data.meanings[measure] : "";
  grid.arrange(measure, largest);
  writeFragment();
}

function aboutMaps() {
  const blocks = data.entries[0].maps.block.map((n) => Math.ceil(n)), every = blocks.every((n) => n === 1);
  return "Queries down, keys across. " +
    (every ? "Each small map has every weight" : `Each small map is of means of blocks of ${blocks.join(" × ")} weights`) +
    ", coloured by its square root, up to the map's own largest.";
}

const gridSection = el("section", { id: "grid", "aria-label": "All heads" },
  el("div", { class: "controls" }, el("label", { for: "sort" }, "Heads by"), sort, order, meaning),
  grid.node, aboutHead, el("p", { class: "soft" }, aboutMaps()));

const headPart = headView({
  cells,
  texts,
  back: () => closeHead(),
  step: (by) => {
    const shown = grid.shown(), place = shown.indexOf(state.cell);
    openHead(shown[(place + by + shown.length) % shown.length], {}, { focus: false });
  },
  changed: (what) => {
    Object.assign(state, what);
    writeFragment();
    if ("view" in what) headPart.show(state.cell, state);
  },
});
const search = searchOf({ cells, texts, open: (cell, query, key) => openHead(cell, { query, key }, { focus: true, go: true }),
  changed: (from, to) => {
    Object.assign(state, { from, to });
    writeFragment();
  } });

// What was looked at stays, where the next head has it too.
function openHead(cell, looked = {}, how = { focus: true }) {
  const [q_len, kv_len] = cell.entry.shape, fits = (place, length) => (place === null || place < length ? place : null);
  if (!state.cell) stepForth();
  Object.assign(state, { cell }, looked);
  Object.assign(state, { query: fits(state.query, q_len), key: fits(state.key, kv_len) });
  writeFragment();
  drawState(how);
}

function closeHead() {
  const was = state.cell;
  stepForth();
  state.cell = null;
  writeFragment();
  drawState();
  was?.node.focus();
}

function drawState(how) {
  gridSection.hidden = state.cell !== null;
  headPart.node.hidden = state.cell === null;
  if (state.cell) headPart.show(state.cell, state, how);
}

// -- What was found --

function placesOf(finding) {
  const entry = data.entries.find((each) => each.module === finding.module);
  if (!entry) return el("p", { class: "soft" }, finding.where);
  const own = cells.filter((cell) => cell.entry === entry && finding.heads.includes(cell.head));
  const buttons = (own.length ? own : cells.filter((cell) => cell.entry === entry).slice(0, 1)).slice(0, 12)
    .map((cell) => el("button", { type: "button", class: "small", onclick: () => openHead(cell, finding.rows.length ? { query: finding.rows[0], key: null } : {}) },
      own.length ? `${cell.entry.layer}.${cell.head}` : `layer ${cell.entry.layer}`));
  return el("p", { class: "where" }, el("span", { class: "soft" }, finding.where), " ", buttons);
}

function findingsNode() {
  const list = data.findings, found = `Diagnosis: ${data.found[0].toLowerCase()}${data.found.slice(1)}`;
  if (!list.length) return el("p", { id: "findings", class: "soft" }, found);
  return el("details", { id: "findings", open: list.some((each) => each.severity === "error") },
    el("summary", {}, found), list.map((each) => findingNode(each, placesOf(each))));
}

function apply() {
  const next = readFragment();
  Object.assign(state, next);
  arrange(next.sort, next.largest);
  search.run(next.from, next.to, true);
  drawState();
}

document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title), el("p", { class: "lead" }, data.lead)),
  search.node, findingsNode(), gridSection, headPart.node,
  el("footer", {}, el("p", { class: "soft", id: "error" }, data.error ? exactness(data.error) : "No head is carried in full: this page has maps and measures only.")),
);
addEventListener("hashchange", apply);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  grid.repaint();
  headPart.repaint();
});
apply();
