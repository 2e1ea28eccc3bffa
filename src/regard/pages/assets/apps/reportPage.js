// The report of a survey: how many heads fit a window, every head as a number, heads by behaviour, and the documents.
import { bringIntoView } from "../components/bringIntoView.js";
import { el, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { capitalise, formatCount, formatPercent, formatShort } from "../components/format.js";
import { createHeadCard } from "../components/headCard.js";
import { createReportGrid, headId } from "../components/reportGrid.js";
import { readUrlState, updateUrlState } from "../components/urlState.js";
import { decodeArray } from "../matrix/payload.js";

const data = readRecord();

// The arrays of a report are before the script, so they are loaded.
const loadArray = ({ array, encoding }) => decodeArray(encoding, document.getElementById(`array${array}`).textContent);

for (const measure of data.measures) {
  measure.edges = measure.edges.map(Number);
  [measure.means, measure.counts] = await Promise.all([loadArray(measure.means), loadArray(measure.counts)]);
  for (const end of measure.ends) {
    end.count = end.values.shape[1];
    [end.values, end.documents] = await Promise.all([loadArray(end.values), loadArray(end.documents)]);
  }
}
const headCount = data.heads.length, bins = data.distances ? data.distances.shape[1] : 0;
const [inWindow, withFirst, distances] = await Promise.all([
  loadArray(data.within), loadArray(data.within_or_first), data.distances ? loadArray(data.distances) : null]);

const heads = data.heads.map((head, index) => ({
  index, head, layer: data.layers[index], kvHead: data.kv_heads[index], module: data.modules[data.layers[index]],
  behaviour: data.behaviours.find((behaviour) => behaviour.heads.includes(index)),
  distances: distances ? distances.subarray(index * bins, (index + 1) * bins) : null,
}));

// -- The state of the page --

const DEFAULT_WINDOW = 128;
const defaultMeasure = Math.max(data.measures.findIndex(({ name }) => name === "distance"), 0);
const defaultWindow = data.windows.reduce((best, { window }, i) =>
  (Math.abs(window - DEFAULT_WINDOW) < Math.abs(data.windows[best].window - DEFAULT_WINDOW) ? i : best), 0);
const state = { measure: defaultMeasure, order: "layers", head: heads[0], window: defaultWindow, level: data.level };

function readState() {
  const given = readUrlState(), orDefault = (index, fallback) => (index >= 0 ? index : fallback);
  state.measure = orDefault(data.measures.findIndex(({ name }) => name === given.measure), defaultMeasure);
  state.order = ["largest", "smallest"].includes(given.order) ? given.order : "layers";
  state.head = heads.find(({ layer, head }) => `${layer}` === given.layer && `${head}` === given.head) ?? heads[0];
  state.window = orDefault(data.windows.findIndex(({ window }) => `${window}` === given.window), defaultWindow);
  state.level = orDefault(data.levels.findIndex((level) => `${level}` === given.share), data.level);
}

function writeState() {
  updateUrlState({
    measure: data.measures[state.measure].name, order: state.order === "layers" ? null : state.order,
    layer: state.head.layer, head: state.head.head,
    window: data.windows.length ? data.windows[state.window].window : null, share: data.levels[state.level],
  });
}

// -- The answer: heads that fit a window --

const ofWindow = (array, window) => array.subarray(window * headCount, (window + 1) * headCount);
const countFitting = (array, window, level) => ofWindow(array, window).reduce((sum, mass) => sum + (mass >= level), 0);
const countKnown = (window) => ofWindow(inWindow, window).reduce((sum, mass) => sum + !Number.isNaN(mass), 0);

function createSelect(id, label, texts, onChange) {
  return el("select", { id, "aria-label": label, onchange: (event) => onChange(event.target.selectedIndex) },
    texts.map((text) => el("option", {}, text)));
}

const levelSelect = createSelect("level", "Share of the weight", data.levels.map(formatPercent), (level) => setState({ level }));
const windowSelect = createSelect("window", "Window", data.windows.map(({ window }) => formatCount(window)), (window) => setState({ window }));
const fitting = el("b", { id: "fitting" }), known = el("span", {}), more = el("p", { id: "more" });
const windowRows = el("tbody", { id: "windows" });

function answerSection() {
  if (!data.windows.length) {
    return el("section", { class: "card", "aria-label": "The answer" }, el("p", { id: "answer" },
      "No document has more than 64 tokens, or distances were not measured: there is no window to compare with."));
  }
  const table = el("table", { class: "figures" },
    el("thead", {}, el("tr", {}, ["window", "longer documents", "heads", "heads if the first token is kept"]
      .map((name) => el("th", { scope: "col" }, name)))), windowRows);
  return el("section", { class: "card", "aria-label": "The answer" },
    el("p", { id: "answer" }, fitting, " of ", known, " heads have at least ", levelSelect, " of their weight within ", windowSelect, " tokens."),
    more,
    el("details", {}, el("summary", {}, "All windows"), scrollBox("Heads by window", table),
      el("p", { class: "soft" }, "A window of 128 contains the token itself and the keys less than 128 tokens away. The numbers are means over the documents that are longer than the window, each with the same weight.")),
    windowDetails());
}

function drawAnswer() {
  if (!data.windows.length) return;
  const { window, documents } = data.windows[state.window], share = data.levels[state.level], last = data.windows.length - 1;
  [levelSelect.selectedIndex, windowSelect.selectedIndex] = [state.level, state.window];
  fitting.textContent = formatCount(countFitting(inWindow, state.window, share));
  known.textContent = formatCount(countKnown(state.window));
  const widest = data.windows[last].window, wider = countKnown(last) - countFitting(inWindow, last, share);
  more.replaceChildren(
    `${formatCount(countFitting(withFirst, state.window, share), "head does", "heads do")} if the first token is kept as well. `,
    `${wider ? formatCount(wider, "head needs", "heads need") : "No head needs"} more than ${formatCount(widest)} tokens, the widest window that a document exceeds. `,
    el("span", { class: "soft" }, `Over the ${formatCount(documents, "document")} with more than ${formatCount(window)} tokens.`));
  windowRows.replaceChildren(...data.windows.map((row, i) => el("tr", { "aria-current": i === state.window ? "true" : null },
    [row.window, row.documents, countFitting(inWindow, i, share), countFitting(withFirst, i, share)].map((n) => el("td", {}, formatCount(n))))));
}

// Every head at every window; filled when it is opened.
function windowDetails() {
  const box = el("div", {});
  const fill = () => {
    if (box.firstChild) return;
    const headers = data.windows.map(({ window }) => el("th", { scope: "col" }, formatCount(window)));
    const rows = heads.map((head) => el("tr", { "data-head": headId(head) }, el("th", { scope: "row" }, headId(head)),
      data.windows.map((_, i) => shadedCell(ofWindow(inWindow, i)[head.index]))));
    box.append(scrollBox("Weight within each window", el("table", { class: "figures masses" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "layer.head"), headers)), el("tbody", {}, rows))));
  };
  return el("details", { id: "masses", ontoggle: (event) => event.target.open && fill() }, el("summary", {}, "Every head at every window"), box);
}

function shadedCell(share) {
  const node = el("td", { class: "shade" }, formatShort(share));
  node.style.setProperty("--strength", `${Number.isNaN(share) ? 0 : share}`);
  return node;
}

// -- The grid, and one head of it --

const measureSelect = el("select", { id: "measure", onchange: () => setState({ measure: measureSelect.selectedIndex }) },
  data.measures.map(({ name }) => el("option", {}, name)));
const orderSelect = el("select", { id: "order", "aria-label": "Order", onchange: () => setState({ order: orderSelect.value }) },
  [["layers", "by layer"], ["largest", "largest first"], ["smallest", "smallest first"]].map(([value, text]) => el("option", { value }, text)));
const caption = el("p", { class: "soft", id: "measure-caption" });
const grid = createReportGrid({ heads, modules: data.modules, onOpen: (head) => setState({ head }) });
const card = createHeadCard({ heads, measures: data.measures, documents: data.documents });

function setState(change) {
  Object.assign(state, change);
  draw();
  writeState();
  if ("head" in change) bringIntoView(card.node, grid.node);
}

function draw() {
  const shown = data.measures[state.measure];
  drawAnswer();
  [measureSelect.selectedIndex, orderSelect.value] = [state.measure, state.order];
  const means = Array.from(shown.means).filter((mean) => !Number.isNaN(mean));
  caption.textContent = shown.caption + (means.length
    ? ` Means over documents, from ${formatShort(Math.min(...means))} (palest) to ${formatShort(Math.max(...means))}.` : " No values.");
  grid.draw(shown, state.order, state.head);
  card.draw(state.head, state.measure);
}

// -- Heads by behaviour --

function behaviourElement({ name, heads: indices, rule, source }) {
  const buttons = indices.map((index) => heads[index]).map((head) => el("button", { type: "button", class: "small",
    "data-head": headId(head), "aria-label": `Layer ${head.layer}, head ${head.head}`, onclick: () => setState({ head }) }, headId(head)));
  return el("div", { class: "behaviour", "data-name": name },
    el("h3", {}, name, " ", el("span", { class: "soft" }, formatCount(indices.length, "head"))),
    el("p", { class: "soft" }, `${capitalise(rule)}. ${source}`),
    buttons.length ? el("p", { class: "where" }, buttons) : []);
}

function behavioursSection() {
  return el("section", { id: "behaviours", "aria-label": "Heads by behaviour" }, el("h2", {}, "Heads by behaviour"),
    el("p", { class: "soft" }, "Each head has the first behaviour whose rule its means over documents satisfy."), data.behaviours.map(behaviourElement));
}

// -- Documents that were not measured, and the header --

function quarantineElement() {
  const { kinds, shown } = data.quarantined;
  if (!shown.length) return [];
  const total = data.about.quarantined;
  const table = el("table", {}, el("thead", {}, el("tr", {}, ["document", "kind", "reason"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, shown.map(({ document: name, kind, reason }) =>
      el("tr", {}, el("td", {}, tokenElement(name)), el("td", {}, kind), el("td", {}, tokenElement(reason))))));
  return el("details", { id: "quarantine" },
    el("summary", {}, `${formatCount(total, "document")} quarantined: ${kinds.map(([kind, n]) => `${formatCount(n)} ${kind}`).join(", ")}`),
    scrollBox("Quarantined documents", table), total > shown.length ? el("p", { class: "soft" }, `The first ${shown.length}; Survey.quarantined lists all of them.`) : []);
}

function leadText() {
  const { documents, tokens, max_tokens: maxTokens, complete, committed, shards } = data.about;
  const soFar = complete ? "" : ` Not finished: ${formatCount(committed)} of ${formatCount(shards)} shards so far.`;
  return `${formatCount(documents, "document")}, ${formatCount(tokens, "token")}, at most ${formatCount(maxTokens)} per document; ` +
    `${formatCount(data.modules.length, "layer")}, ${formatCount(headCount, "head")}.${soFar}`;
}

document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title), el("p", { class: "lead" }, leadText())),
  answerSection(),
  el("section", { id: "all-heads", "aria-label": "All heads" }, el("h2", {}, "All heads"),
    el("div", { class: "controls" }, el("label", { for: "measure" }, "Measure"), measureSelect, orderSelect), caption,
    el("div", { class: "both" }, grid.node, card.node, behavioursSection())),
  quarantineElement(),
);
addEventListener("hashchange", () => {
  readState();
  draw();
});
readState();
draw();
document.getElementById("app").dataset.ready = "";
