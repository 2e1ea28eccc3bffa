// A survey: the answer in words, every head as a number, heads by what they do, and the documents behind them.
import { atlasOf } from "./atlas.js";
import { el, record, scrolling, token } from "./dom.js";
import { fragment, keep } from "./fragment.js";
import { brief, counted, percent, place } from "./figures.js";
import { headCard } from "./headcard.js";
import { partOf } from "./weights.js";

const data = record();

// Parts stand before the script, so they are there.
const part = (given) => partOf(given.kind, document.getElementById(`part${given.part}`).textContent);

for (const measure of data.measures) {
  measure.edges = measure.edges.map(Number);
  [measure.means, measure.counts] = await Promise.all([part(measure.means), part(measure.counts)]);
  for (const end of measure.ends) {
    end.keep = end.values.shape[1];
    [end.values, end.documents] = await Promise.all([part(end.values), part(end.documents)]);
  }
}
const count = data.heads.length, bins = data.far ? data.far.shape[1] : 0;
const [inWindow, keptToo, far] = await Promise.all([part(data.within), part(data.kept), data.far ? part(data.far) : null]);

const heads = data.heads.map((head, at) => ({
  at, head, layer: data.layers[at], kv: data.kv_heads[at], module: data.modules[data.layers[at]],
  behaviour: data.behaviours.find((each) => each.heads.includes(at)),
  far: far ? far.subarray(at * bins, (at + 1) * bins) : null,
}));

// -- What is looked at --

const NEAREST = 128;
const first = data.measures.findIndex((each) => each.name === "distance");
const nearest = data.windows.reduce((best, each, i) =>
  (Math.abs(each.window - NEAREST) < Math.abs(data.windows[best].window - NEAREST) ? i : best), 0);
const state = { measure: Math.max(first, 0), order: "layers", head: heads[0], window: nearest, level: data.level };

function readState() {
  const given = fragment(), among = (found, otherwise) => (found >= 0 ? found : otherwise);
  state.measure = among(data.measures.findIndex((each) => each.name === given.measure), Math.max(first, 0));
  state.order = ["largest", "smallest"].includes(given.order) ? given.order : "layers";
  state.head = heads.find((each) => `${each.layer}` === given.layer && `${each.head}` === given.head) ?? heads[0];
  state.window = among(data.windows.findIndex((each) => `${each.window}` === given.window), nearest);
  state.level = among(data.levels.findIndex((each) => `${each}` === given.share), data.level);
}

function writeState() {
  keep({
    measure: data.measures[state.measure].name, order: state.order === "layers" ? null : state.order,
    layer: state.head.layer, head: state.head.head,
    window: data.windows.length ? data.windows[state.window].window : null, share: data.levels[state.level],
  });
}

// -- The answer --

const masses = (array, window) => array.subarray(window * count, (window + 1) * count);
const atLeast = (array, window, level) => masses(array, window).reduce((sum, mass) => sum + (mass >= level), 0);
const known = (window) => masses(inWindow, window).reduce((sum, mass) => sum + !Number.isNaN(mass), 0);

function chooser(id, label, texts, changed) {
  return el("select", { id, "aria-label": label, onchange: (event) => changed(event.target.selectedIndex) },
    texts.map((text) => el("option", {}, text)));
}

const level = chooser("level", "Share of the weight", data.levels.map(percent), (i) => set({ level: i }));
const window_ = chooser("window", "Window", data.windows.map((each) => each.window.toLocaleString("en")), (i) => set({ window: i }));
const fitting = el("b", { id: "fitting" }), all = el("span", {}), more = el("p", { id: "more" });
const rows = el("tbody", { id: "windows" });

function answerNode() {
  if (!data.windows.length) {
    return el("section", { class: "card", "aria-label": "The answer" }, el("p", { id: "answer" },
      "No document has more than 64 tokens, or distances were not measured: of windows nothing can be told."));
  }
  const table = el("table", { class: "figures" },
    el("thead", {}, el("tr", {}, ["window", "documents that are longer", "heads", "with the first token kept"]
      .map((name) => el("th", { scope: "col" }, name)))), rows);
  return el("section", { class: "card", "aria-label": "The answer" },
    el("p", { id: "answer" }, fitting, " of ", all, " heads have at least ", level, " of their weight within ", window_, " tokens."),
    more,
    el("details", {}, el("summary", {}, "Every window"), scrolling("Heads by window", table),
      el("p", { class: "soft" }, "A window of 128 holds the token itself and what is less than 128 tokens away. Means over documents, each counting the same, that are longer than the window: of a shorter one all is inside.")),
    everyHead());
}

function answer() {
  if (!data.windows.length) return;
  const { window, documents } = data.windows[state.window], share = data.levels[state.level], last = data.windows.length - 1;
  [level.selectedIndex, window_.selectedIndex] = [state.level, state.window];
  fitting.textContent = atLeast(inWindow, state.window, share).toLocaleString("en");
  all.textContent = known(state.window).toLocaleString("en");
  const widest = data.windows[last].window, wide = known(last) - atLeast(inWindow, last, share);
  more.replaceChildren(
    `${atLeast(keptToo, state.window, share).toLocaleString("en")} do if the first token is kept besides. `,
    `${wide.toLocaleString("en")} need more than ${widest.toLocaleString("en")}, the widest window that some document exceeds. `,
    el("span", { class: "soft" }, `Over the ${counted(documents, "document")} with more than ${window.toLocaleString("en")} tokens.`));
  rows.replaceChildren(...data.windows.map((each, i) => el("tr", { "aria-current": i === state.window ? "true" : null },
    [each.window, each.documents, atLeast(inWindow, i, share), atLeast(keptToo, i, share)].map((n) => el("td", {}, n.toLocaleString("en"))))));
}

// Every head at every window; made when somebody opens it.
function everyHead() {
  const box = el("div", {});
  const fill = () => {
    if (box.firstChild) return;
    const names = data.windows.map((each) => el("th", { scope: "col" }, each.window.toLocaleString("en")));
    const lines = heads.map((head) => el("tr", { "data-head": place(head) }, el("th", { scope: "row" }, place(head)),
      data.windows.map((_, i) => shade(el("td", { class: "shade" }, brief(masses(inWindow, i)[head.at])), masses(inWindow, i)[head.at]))));
    box.append(scrolling("Weight within each window", el("table", { class: "figures masses" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "layer.head"), names)), el("tbody", {}, lines))));
  };
  return el("details", { id: "masses", ontoggle: (event) => event.target.open && fill() }, el("summary", {}, "Every head at every window"), box);
}

function shade(node, strength) {
  node.style.setProperty("--strength", `${Number.isNaN(strength) ? 0 : strength}`);
  return node;
}

// -- The atlas, and one head of it --

const measure = el("select", { id: "measure", onchange: () => set({ measure: measure.selectedIndex }) },
  data.measures.map((each) => el("option", {}, each.name)));
const order = el("select", { id: "order", "aria-label": "Order", onchange: () => set({ order: order.value }) },
  [["layers", "by layer"], ["largest", "largest first"], ["smallest", "smallest first"]].map(([value, text]) => el("option", { value }, text)));
const meaning = el("p", { class: "soft", id: "meaning" });
const atlas = atlasOf({ heads, modules: data.modules, open: (head) => set({ head }) });
const card = headCard({ heads, measures: data.measures, documents: data.documents });

function set(change) {
  Object.assign(state, change);
  draw();
  writeState();
  if ("head" in change) card.arrive();
}

function draw() {
  const shown = data.measures[state.measure];
  answer();
  [measure.selectedIndex, order.value] = [state.measure, state.order];
  const told = Array.from(shown.means).filter((mean) => !Number.isNaN(mean));
  meaning.textContent = shown.meaning + (told.length
    ? ` Means over documents; the palest head has ${brief(Math.min(...told))}, the strongest ${brief(Math.max(...told))}.` : " Nothing to tell.");
  atlas.draw(shown, state.order, state.head);
  card.draw(state.head, state.measure);
}

// -- Heads by what they do --

function behaviourNode(each) {
  const buttons = each.heads.map((at) => el("button", { type: "button", class: "small", "data-head": place(heads[at]),
    "aria-label": `Layer ${heads[at].layer}, head ${heads[at].head}`, onclick: () => set({ head: heads[at] }) }, place(heads[at])));
  return el("div", { class: "behaviour", "data-name": each.name },
    el("h3", {}, each.name, " ", el("span", { class: "soft" }, counted(each.heads.length, "head"))),
    el("p", { class: "soft" }, `${each.rule[0].toUpperCase()}${each.rule.slice(1)}. ${each.source}`),
    buttons.length ? el("p", { class: "where" }, buttons) : []);
}

function behavioursNode() {
  return el("section", { id: "behaviours", "aria-label": "Heads by what they do" }, el("h2", {}, "Heads by what they do"),
    el("p", { class: "soft" }, "By plain rules on the means over documents: the first that fits, in this order."), data.behaviours.map(behaviourNode));
}

// -- What was not measured, and what was --

function quarantineNode() {
  const { kinds, shown } = data.quarantined;
  if (!shown.length) return [];
  const total = data.about.quarantined;
  const table = el("table", {}, el("thead", {}, el("tr", {}, ["document", "kind", "reason"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, shown.map((each) => el("tr", {}, el("td", {}, token(each.document)), el("td", {}, each.kind), el("td", {}, token(each.reason))))));
  return el("details", { id: "quarantine" },
    el("summary", {}, `${counted(total, "document")} set aside: ${kinds.map(([kind, n]) => `${n.toLocaleString("en")} ${kind}`).join(", ")}`),
    scrolling("Documents set aside", table), total > shown.length ? el("p", { class: "soft" }, `The first ${shown.length}; Survey.quarantined has all.`) : []);
}

function lead() {
  const { documents, tokens, max_tokens: most, complete, committed, shards } = data.about;
  const soFar = complete ? "" : ` Not finished: ${committed.toLocaleString("en")} of ${shards.toLocaleString("en")} shards so far.`;
  return `${counted(documents, "document")}, ${counted(tokens, "token")}, each read up to ${most.toLocaleString("en")}; ` +
    `${counted(data.modules.length, "layer")}, ${counted(count, "head")}.${soFar}`;
}

document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title), el("p", { class: "lead" }, lead())),
  answerNode(),
  el("section", { id: "atlas", "aria-label": "Every head" }, el("h2", {}, "Every head"),
    el("div", { class: "controls" }, el("label", { for: "measure" }, "Measure"), measure, order), meaning,
    el("div", { class: "both" }, atlas.node, card.node, behavioursNode())),
  quarantineNode(),
);
addEventListener("hashchange", () => {
  readState();
  draw();
});
readState();
draw();
document.getElementById("app").dataset.ready = "";
