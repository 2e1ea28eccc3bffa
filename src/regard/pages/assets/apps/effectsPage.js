// The effect of an edit of each head on a metric: a grid of layers × heads, and the head that is selected.
import { bringIntoView } from "../components/bringIntoView.js";
import { el, readRecord } from "../components/dom.js";
import { formatCount, formatShort } from "../components/format.js";
import { createReportGrid, headId } from "../components/reportGrid.js";
import { readUrlState, updateUrlState } from "../components/urlState.js";

const data = readRecord();
const effects = data.effects.map(Number), metrics = data.metrics.map(Number);
const heads = data.heads.map((head, index) => ({ index, head, layer: data.layers[index] }));
const orders = [["layers", "by layer"], ["largest", "largest first"], ["smallest", "smallest first"]];
const given = readUrlState();
const state = {
  order: orders.some(([name]) => name === given.order) ? given.order : "layers",
  head: heads.find((head) => headId(head) === given.head) ?? heads[0],
};

const orderSelect = el("select", { id: "order", "aria-label": "Order", onchange: () => setState({ order: orderSelect.value }) },
  orders.map(([value, text]) => el("option", { value }, text)));
const line = el("p", { id: "selected", role: "status" });
const grid = createReportGrid({ heads, modules: data.modules, onOpen: (head) => setState({ head }) });

function setState(change) {
  Object.assign(state, change);
  draw();
  bringIntoView(line, grid.node);
  updateUrlState({ order: state.order === "layers" ? null : state.order, head: headId(state.head) });
}

function draw() {
  const { index, layer, head } = state.head;
  orderSelect.value = state.order;
  grid.draw({ name: "effect", means: effects }, state.order, state.head);
  line.replaceChildren(el("b", {}, `Layer ${layer}, head ${head}`),
    `: ${formatShort(metrics[index])} instead of ${formatShort(Number(data.clean))}, a change of ${formatShort(effects[index])}`,
    el("span", { class: "soft" }, ` (${data.modules[layer]})`));
}

const low = Math.min(...effects), high = Math.max(...effects);
document.getElementById("app").append(
  el("header", {}, el("h1", {}, data.title)),
  el("p", {}, `Each of ${formatCount(heads.length, "head")} was edited separately: ${data.edit}. The number is the change of the metric, ${data.metric}, which is ${formatShort(Number(data.clean))} without an edit.`),
  el("p", { class: "soft" }, `From ${formatShort(low)} (palest) to ${formatShort(high)}. A head that changes nothing on its own may still matter together with others.`),
  el("div", { class: "controls" }, el("label", { for: "order" }, "Order"), orderSelect), grid.node, line);
draw();
document.getElementById("app").dataset.ready = "";
