// Layers by heads, a number and a shade in each; in the order of the layers or of the numbers. One stop of the Tab key.
import { el } from "./dom.js";
import { brief, place, tight } from "./figures.js";

export function atlasOf({ heads, modules, open }) {
  const box = el("div", { class: "atlas", id: "heads", role: "group", "aria-label": "Heads: arrow keys move, Enter opens" });
  const cells = heads.map((head) => {
    const value = el("b", {}), name = el("span", {});
    const node = el("button", { type: "button", class: "cell shade", tabindex: "-1", "data-head": place(head), onclick: () => open(head) }, value, name);
    return { head, node, value, name };
  });
  const widest = Math.max(...heads.map((head) => head.head)) + 1;
  box.style.setProperty("--columns", `${widest}`);
  let shown = cells, laid = "";

  function beside(cell, step) {
    const columns = getComputedStyle(shown[0].node.parentNode).gridTemplateColumns.split(" ").length;
    if (laid !== "layers") return shown[shown.indexOf(cell) + step * columns] ?? cell;
    const next = cells.filter((each) => each.head.layer === cell.head.layer + step);
    return next[Math.min(cell.head.head, next.length - 1)] ?? cell;
  }

  box.addEventListener("keydown", (event) => {
    const cell = cells.find((each) => each.node === event.target);
    if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
    const at = shown.indexOf(cell), to = {
      ArrowLeft: () => shown[Math.max(at - 1, 0)],
      ArrowRight: () => shown[Math.min(at + 1, shown.length - 1)],
      ArrowUp: () => beside(cell, -1),
      ArrowDown: () => beside(cell, 1),
      Home: () => shown[0],
      End: () => shown.at(-1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    to().node.focus();
  });

  function lay(order, means) {
    const value = ({ head }) => means[head.at];
    const known = cells.filter((cell) => !Number.isNaN(value(cell)));
    known.sort((a, b) => (order === "largest" ? value(b) - value(a) : value(a) - value(b)));
    shown = order === "layers" ? cells : [...known, ...cells.filter((cell) => Number.isNaN(value(cell)))];
    laid = order;
    box.classList.toggle("sorted", order !== "layers");
    if (order !== "layers") return box.replaceChildren(...shown.map((cell) => cell.node));
    box.replaceChildren(...modules.map((module, layer) => el("div", { class: "row" },
      el("span", { class: "label", title: module }, `layer ${layer}`),
      el("div", { class: "cells" }, cells.filter((cell) => cell.head.layer === layer).map((cell) => cell.node)))));
  }

  function draw({ name, means }, order, chosen) {
    const focused = cells.find((cell) => cell.node === document.activeElement);
    if (order !== laid || order !== "layers") lay(order, means);
    const told = Array.from(means).filter((mean) => !Number.isNaN(mean));
    const low = Math.min(...told), wide = Math.max(...told) - low;
    for (const cell of cells) {
      const mean = means[cell.head.at], here = cell.head === chosen;
      cell.value.textContent = tight(mean);
      cell.name.textContent = order === "layers" ? `${cell.head.head}` : place(cell.head);
      cell.node.dataset.value = `${mean}`;
      cell.node.style.setProperty("--strength", Number.isNaN(mean) || !wide ? "0" : `${(mean - low) / wide}`);
      cell.node.setAttribute("aria-label", `Layer ${cell.head.layer}, head ${cell.head.head}: ${name} ${brief(mean)}`);
      cell.node.setAttribute("aria-pressed", `${here}`);
      cell.node.tabIndex = here ? 0 : -1;
    }
    focused?.node.focus();
  }
  return { node: box, draw };
}
