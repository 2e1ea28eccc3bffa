// Two or more curves over the values of a slider. The curves stretch with the page, the text does not.
import { el, svgElement } from "./dom.js";

// `xs` ascend, from 1 if the axis is logarithmic; `onSelect(index)` is called when a point of the chart is selected.
export function createLineChart(id, xs, ticks, onSelect, isLinear = false) {
  const position = isLinear ? (x) => x - xs[0] : Math.log;
  const across = (x) => (100 * position(x)) / (position(xs.at(-1)) || 1);
  const lines = svgElement("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const area = el("div", { class: "area" });
  const top = el("span", { class: "top" });
  const tickLabels = ticks.map((x) => {
    const tick = el("span", { class: "tick" }, `${x}`);
    tick.style.left = `${across(x)}%`;
    return tick;
  });
  const node = el("div", { class: "chart", id, role: "img" }, top, el("span", { class: "zero" }, "0"), area, tickLabels);

  const select = (event) => {
    const box = area.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    const distance = (index) => Math.abs(across(xs[index]) - at);
    onSelect(xs.reduce((best, _, index) => (distance(index) < distance(best) ? index : best), 0));
  };
  area.addEventListener("pointerdown", select);
  area.addEventListener("pointermove", (event) => event.buttons === 1 && select(event));

  // Each curve has a `kind` for its colour and a y for each x; the `main` one is drawn on top.
  function draw({ curves, main, highest, highestText, index, label }) {
    const down = (y) => 100 - (100 * Math.min(y, highest)) / (highest || 1);
    const ordered = [...curves].sort((a, b) => (a.kind === main) - (b.kind === main));
    lines.replaceChildren(...ordered.map(({ kind, ys }) => {
      const points = ys.map((y, i) => [across(xs[i]), down(y)]).filter(([, y]) => Number.isFinite(y));
      return svgElement("polyline", { class: `curve ${kind}${kind === main ? " main" : ""}`, points: points.join(" ") });
    }));
    const rule = el("span", { class: "rule" });
    rule.style.left = `${across(xs[index])}%`;
    const points = ordered.map(({ kind, ys }) => {
      const point = el("span", { class: `point ${kind}${kind === main ? " main" : ""}` });
      point.style.left = `${across(xs[index])}%`;
      point.style.top = `${down(ys[index])}%`;
      return point;
    });
    area.replaceChildren(rule, lines, ...points);
    top.textContent = highestText;
    node.setAttribute("aria-label", label);
  }
  return { node, draw };
}
