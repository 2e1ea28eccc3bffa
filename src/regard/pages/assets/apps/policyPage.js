// A verified cache policy: the verdict, the heads by window, lost weight and effect, and the worst documents.
import { bringIntoView } from "../components/bringIntoView.js";
import { el, readRecord } from "../components/dom.js";
import { formatCount, formatShort } from "../components/format.js";
import { createReportGrid, headId } from "../components/reportGrid.js";
import { readUrlState, updateUrlState } from "../components/urlState.js";

const data = readRecord();
const measures = data.measures.map(({ name, caption, means }) => ({ name, caption, means: means.map((mean) => (mean === null ? NaN : Number(mean))) }));
const heads = data.heads.map((head, index) => ({ index, head, layer: data.layers[index] }));
const orders = [["layers", "by layer"], ["largest", "largest first"], ["smallest", "smallest first"]];
const given = readUrlState();
const state = {
  measure: measures.find(({ name }) => name === given.measure) ?? measures[0],
  order: orders.some(([name]) => name === given.order) ? given.order : "layers",
  head: heads.find((head) => headId(head) === given.head) ?? heads[0],
};

function select(id, label, options, onchange) {
  const node = el("select", { id, onchange: () => onchange(node.value) }, options.map(([value, text]) => el("option", { value }, text)));
  return { node, parts: [el("label", { for: id }, label), node] };
}

const measureSelect = select("measure", "Show", measures.map(({ name }) => [name, name]),
  (value) => setState({ measure: measures.find(({ name }) => name === value) }));
const orderSelect = select("order", "Order", orders, (order) => setState({ order }));
const caption = el("p", { class: "soft", id: "caption" });
const line = el("p", { id: "selected", role: "status" });
const grid = createReportGrid({ heads, modules: data.modules, onOpen: (head) => setState({ head }) });

function setState(change) {
  Object.assign(state, change);
  draw();
  bringIntoView(line, grid.node);
  updateUrlState({
    measure: state.measure === measures[0] ? null : state.measure.name,
    order: state.order === "layers" ? null : state.order,
    head: headId(state.head),
  });
}

function draw() {
  const { index, layer, head } = state.head;
  measureSelect.node.value = state.measure.name;
  orderSelect.node.value = state.order;
  caption.textContent = state.measure.caption;
  grid.draw(state.measure, state.order, state.head);
  const values = measures.map(({ name, means }) => `${name} ${Number.isNaN(means[index]) ? "–" : formatShort(means[index])}`);
  line.replaceChildren(el("b", {}, `Layer ${layer}, head ${head}`), `: ${values.join(", ")}`, el("span", { class: "soft" }, ` (${data.modules[layer]})`));
}

function table(columns, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Worst documents" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, typeof cell === "number" ? formatShort(cell) : cell)))))));
}

document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title)),
  el("p", { class: "verdict", id: "verdict" }, data.verdict),
  el("table", { id: "facts" }, el("tbody", {}, data.facts.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))))),
  el("h2", {}, formatCount(heads.length, "head")),
  el("div", { class: "controls" }, ...measureSelect.parts, ...orderSelect.parts), caption, grid.node, line,
  el("h2", {}, "Worst documents"),
  table(["document", "tokens", "KL", "agreement", "loss", "with the policy"], data.documents));
draw();
document.getElementById("app").dataset.ready = "";
