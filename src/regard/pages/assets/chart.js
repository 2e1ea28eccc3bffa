// Two or more curves over the places of a slider. The lines stretch with the page; the letters do not.
import { el } from "./dom.js";

// The browser knows the namespace; written out it would be the one address in a page that must have none.
const LINES = new DOMParser().parseFromString("<svg>", "text/html").body.firstChild.namespaceURI;

function drawn(tag, attributes) {
  const node = document.createElementNS(LINES, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// `xs` are above 0 and shown by their logarithm; `chosen(place)` is called when a point of the chart is.
export function chart(id, xs, ticks, chosen) {
  const widest = Math.log(xs.at(-1)) || 1;
  const across = (x) => (100 * Math.log(x)) / widest;
  const lines = drawn("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const area = el("div", { class: "area" });
  const top = el("span", { class: "top" });
  const marks = ticks.map((x) => {
    const tick = el("span", { class: "tick" }, `${x}`);
    tick.style.left = `${across(x)}%`;
    return tick;
  });
  const node = el("div", { class: "chart", id, role: "img" }, top, el("span", { class: "zero" }, "0"), area, marks);

  const pick = (event) => {
    const box = area.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    const far = (place) => Math.abs(across(xs[place]) - at);
    chosen(xs.reduce((best, _, place) => (far(place) < far(best) ? place : best), 0));
  };
  area.addEventListener("pointerdown", pick);
  area.addEventListener("pointermove", (event) => event.buttons === 1 && pick(event));

  // Each curve has a `kind` for its colour and a y for each x; the `main` one is drawn on top, with its point.
  function draw({ curves, main, highest, highestText, place, says }) {
    const down = (y) => 100 - (100 * Math.min(y, highest)) / (highest || 1);
    const ordered = [...curves].sort((a, b) => (a.kind === main) - (b.kind === main));
    lines.replaceChildren(...ordered.map(({ kind, ys }) => {
      const points = ys.map((y, i) => [across(xs[i]), down(y)]).filter(([, y]) => Number.isFinite(y));
      return drawn("polyline", { class: `curve ${kind}${kind === main ? " main" : ""}`, points: points.join(" ") });
    }));
    const rule = el("span", { class: "rule" });
    rule.style.left = `${across(xs[place])}%`;
    const points = ordered.map(({ kind, ys }) => {
      const point = el("span", { class: `point ${kind}${kind === main ? " main" : ""}` });
      point.style.left = `${across(xs[place])}%`;
      point.style.top = `${down(ys[place])}%`;
      return point;
    });
    area.replaceChildren(rule, lines, ...points);
    top.textContent = highestText;
    node.setAttribute("aria-label", says);
  }
  return { node, draw };
}
