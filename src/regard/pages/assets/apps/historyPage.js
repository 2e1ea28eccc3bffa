// A training run: every head at each monitored step. A slider moves the time, and one head is drawn over all steps.
import { bringIntoView } from "../components/bringIntoView.js";
import { slider } from "../components/controls.js";
import { el, pageHeader, readRecord, svgElement } from "../components/dom.js";
import { formatCount, formatShort } from "../components/format.js";
import { createReportGrid, headId } from "../components/reportGrid.js";
import { decodeArray } from "../matrix/payload.js";

const data = readRecord();
const steps = data.steps, last = steps.length - 1;

for (const column of data.columns) {
  const { array, encoding } = column.values;
  column.values = await decodeArray(encoding, document.getElementById(`array${array}`).textContent);
  const known = column.values.filter((value) => Number.isFinite(value));
  column.range = [known.reduce((a, b) => Math.min(a, b), 0), known.reduce((a, b) => Math.max(a, b), 0)];
}
const heads = data.heads.map((head, index) => ({ ...head, index, module: data.modules[head.layer] }));
const state = { column: data.columns[0], step: last, head: heads[0] };

const valueAt = (head, step) => state.column.values[head.index * steps.length + step];
const alarmsOf = (head) => data.alarms.filter((alarm) => alarm.layer === head.layer && alarm.head === head.head);

// -- Controls and grid --

const columnSelect = el("select", { id: "column", onchange: (event) => {
  state.column = data.columns[event.target.selectedIndex];
  draw();
} }, data.columns.map(({ name }) => el("option", {}, name)));
const time = slider("Step", "time", steps.map((step) => formatCount(step)), state.step, (step) => {
  state.step = step;
  draw();
});
time.input.addEventListener("change", () => bringIntoView(grid.node, card)); // after the slider is released
const caption = el("p", { class: "soft", id: "caption" });
const grid = createReportGrid({ heads, modules: data.modules, onOpen: (head) => {
  state.head = head;
  draw();
  bringIntoView(card, grid.node);
} });

// -- One head over time --

const card = el("section", { class: "card", id: "head", "aria-live": "polite" });

function timeline(head) {
  const [low, high] = state.column.range, span = high - low || 1;
  const across = (step) => (100 * steps[step]) / (steps[last] || 1);
  const points = steps.map((_, step) => [across(step), 100 - (100 * (valueAt(head, step) - low)) / span]).filter(([, y]) => Number.isFinite(y));
  const line = svgElement("polyline", { points: points.join(" ") });
  const rule = (kind, step) => {
    const node = el("span", { class: kind });
    node.style.left = `${step}%`;
    return node;
  };
  const select = (event) => {
    const box = node.getBoundingClientRect(), at = (100 * (event.clientX - box.left)) / box.width;
    const nearest = steps.reduce((best, _, step) => (Math.abs(across(step) - at) < Math.abs(across(best) - at) ? step : best), 0);
    state.step = nearest;
    time.set(nearest);
    draw();
  };
  const node = el("div", { class: "timeline", role: "img", "aria-label": `${state.column.name} over ${formatCount(steps.length, "monitored step")}`,
    onpointerdown: select },
  svgElement("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" }, line),
  rule("now", across(state.step)), alarmsOf(head).map((alarm) => rule("fired", (100 * alarm.step) / (steps[last] || 1))),
  el("span", { class: "edge high" }, formatShort(high)), el("span", { class: "edge low" }, formatShort(low)),
  el("span", { class: "edge start" }, `step ${formatCount(steps[0])}`), el("span", { class: "edge end" }, formatCount(steps[last])));
  return node;
}

function drawCard() {
  const { head, step, column } = state, fired = alarmsOf(head);
  card.replaceChildren(
    el("h2", {}, `Layer ${head.layer}, head ${head.head}`),
    el("p", { class: "soft" }, head.module),
    el("p", { id: "value", "data-value": `${valueAt(head, step)}` }, `${column.name} ${formatShort(valueAt(head, step))} at step ${formatCount(steps[step])}`),
    timeline(head),
    ...fired.map((alarm) => el("p", { class: "own-alarm" }, el("b", {}, `Step ${formatCount(alarm.step)}, ${alarm.kind}: `), alarm.text)),
  );
}

// -- Alarms --

function alarmsSection() {
  const items = data.alarms.map((alarm) => el("li", {}, el("button", { type: "button", onclick: () => {
    state.head = heads.find((head) => head.layer === alarm.layer && head.head === alarm.head) ?? state.head;
    state.step = Math.max(steps.indexOf(alarm.step), 0);
    time.set(state.step);
    draw();
    bringIntoView(card, grid.node);
  } }, `step ${formatCount(alarm.step)}, layer ${alarm.layer}, head ${alarm.head}`), ` ${alarm.kind}`));
  const more = data.num_alarms - items.length;
  return el("section", { id: "alarms", "aria-label": "Alarms" }, el("h2", {}, "Alarms"),
    items.length ? el("ol", {}, items) : el("p", {}, "No alarm was raised."),
    more > 0 ? el("p", { class: "soft" }, `… and ${formatCount(more)} more`) : []);
}

function draw() {
  const { column, step } = state;
  caption.textContent = `${column.caption}. Shades go from ${formatShort(column.range[0])} to ${formatShort(column.range[1])}, the same at every step.`;
  grid.draw({ name: column.name, means: heads.map((head) => valueAt(head, step)), range: column.range }, "layers", state.head);
  const fired = new Set(data.alarms.filter((alarm) => alarm.step <= steps[step]).map(headId));
  for (const node of grid.node.querySelectorAll(".cell")) node.classList.toggle("alarm", fired.has(node.dataset.head));
  drawCard();
}

document.getElementById("app").append(
  pageHeader(data.title, `${formatCount(steps.length, "monitored step")}, ${formatCount(data.modules.length, "layer")}, ${formatCount(heads.length, "head")}, ${formatCount(data.num_alarms, "alarm")}.`),
  el("section", { id: "all-heads", "aria-label": "All heads" },
    el("div", { class: "controls" }, el("label", { for: "column" }, "Measure"), columnSelect), caption, el("div", { class: "card time stays-on-top" }, time.node),
    el("div", { class: "both" }, grid.node, card)),
  alarmsSection(),
);
draw();
document.getElementById("app").dataset.ready = "";
