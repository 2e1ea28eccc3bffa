// Tokens beside a picture, each with its weight. The list is one tab stop: arrow keys move, Enter chooses.
import { el, tokenElement } from "./dom.js";
import { formatShort } from "./format.js";

// items: [{ index, name }]. `onChoose(index)` is called if a token is chosen; without it, tokens are only shown.
export function createTokenButtons({ label, items, onChoose }) {
  const nodes = items.map(({ index, name }) => {
    const number = el("span", { class: "number" }), bar = el("span", { class: "level", "aria-hidden": "true" });
    const content = [tokenElement(name), number, bar];
    const node = onChoose
      ? el("button", { type: "button", class: "token-button", tabindex: "-1", onclick: () => onChoose(index), onfocus: () => setStop(node) }, content)
      : el("span", { class: "token-button" }, content);
    node.dataset.token = index;
    return Object.assign(node, { number, bar });
  });
  const box = el("div", { class: "token-buttons", role: "group", "aria-label": label }, nodes);

  function setStop(stop) {
    for (const node of nodes) node.tabIndex = node === stop ? 0 : -1;
  }
  if (onChoose) {
    if (nodes.length) nodes[0].tabIndex = 0;
    box.addEventListener("keydown", (event) => {
      const place = nodes.indexOf(event.target.closest(".token-button")), last = nodes.length - 1;
      const next = { ArrowLeft: place - 1, ArrowUp: place - 1, ArrowRight: place + 1, ArrowDown: place + 1, Home: 0, End: last }[event.key];
      if (place < 0 || next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      nodes[Math.min(Math.max(next, 0), last)].focus();
    });
  }

  // `weightOf(index)` returns a weight, or null for none; bars are proportional to it, up to `top`.
  function show(weightOf, top, chosen) {
    nodes.forEach((node, n) => {
      const weight = weightOf(items[n].index);
      node.number.textContent = weight === null ? "" : formatShort(weight);
      node.dataset.weight = weight ?? "";
      node.bar.style.width = `${100 * Math.min(1, (weight ?? 0) / (top || 1))}%`;
      if (onChoose) node.setAttribute("aria-pressed", String(items[n].index === chosen));
    });
  }
  return { node: box, show };
}
