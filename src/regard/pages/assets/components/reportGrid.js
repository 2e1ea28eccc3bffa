// The heads of a survey as a grid of numbers and shades, ordered by layer or by number. The grid is one tab stop.
import { el } from "./dom.js";
import { formatShort, formatTiny } from "./format.js";

// A head in a few characters.
export function headId({ layer, head }) {
  return `${layer}.${head}`;
}

export function createReportGrid({ heads, modules, onOpen }) {
  const box = el("div", { class: "report-grid", id: "heads", role: "group", "aria-label": "Heads: arrow keys move, Enter opens" });
  const cells = heads.map((head) => {
    const value = el("b", {}), name = el("span", {});
    const node = el("button", { type: "button", class: "cell shade", tabindex: "-1", "data-head": headId(head), onclick: () => onOpen(head) }, value, name);
    return { head, node, value, name };
  });
  const widest = Math.max(...heads.map((head) => head.head)) + 1;
  box.style.setProperty("--columns", `${widest}`);
  let shown = cells, currentOrder = "";

  // The cell above or below.
  function neighbour(cell, step) {
    const columns = getComputedStyle(shown[0].node.parentNode).gridTemplateColumns.split(" ").length;
    if (currentOrder !== "layers") return shown[shown.indexOf(cell) + step * columns] ?? cell;
    const next = cells.filter(({ head }) => head.layer === cell.head.layer + step);
    return next[Math.min(cell.head.head, next.length - 1)] ?? cell;
  }

  box.addEventListener("keydown", (event) => {
    const cell = cells.find(({ node }) => node === event.target);
    if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
    const at = shown.indexOf(cell), target = {
      ArrowLeft: () => shown[Math.max(at - 1, 0)],
      ArrowRight: () => shown[Math.min(at + 1, shown.length - 1)],
      ArrowUp: () => neighbour(cell, -1),
      ArrowDown: () => neighbour(cell, 1),
      Home: () => shown[0],
      End: () => shown.at(-1),
    }[event.key];
    if (!target) return;
    event.preventDefault();
    target().node.focus();
  });

  function arrange(order, means) {
    const value = ({ head }) => means[head.index];
    const known = cells.filter((cell) => !Number.isNaN(value(cell)));
    known.sort((a, b) => (order === "largest" ? value(b) - value(a) : value(a) - value(b)));
    shown = order === "layers" ? cells : [...known, ...cells.filter((cell) => Number.isNaN(value(cell)))];
    currentOrder = order;
    box.classList.toggle("sorted", order !== "layers");
    if (order !== "layers") return box.replaceChildren(...shown.map((cell) => cell.node));
    box.replaceChildren(...modules.map((module, layer) => el("div", { class: "row" },
      el("span", { class: "label", title: module }, `layer ${layer}`),
      el("div", { class: "cells" }, cells.filter((cell) => cell.head.layer === layer).map((cell) => cell.node)))));
  }

  // The shades span `range`, by default from the smallest to the largest number.
  function draw({ name, means, range = null }, order, selected) {
    const focused = cells.find((cell) => cell.node === document.activeElement);
    if (order !== currentOrder || order !== "layers") arrange(order, means);
    const known = Array.from(means).filter((mean) => !Number.isNaN(mean));
    const [low, high] = range ?? [Math.min(...known), Math.max(...known)], span = high - low;
    for (const cell of cells) {
      const mean = means[cell.head.index], isSelected = cell.head === selected;
      cell.value.textContent = formatTiny(mean);
      cell.name.textContent = order === "layers" ? `${cell.head.head}` : headId(cell.head);
      cell.node.dataset.value = `${mean}`;
      cell.node.style.setProperty("--strength", Number.isNaN(mean) || !span ? "0" : `${(mean - low) / span}`);
      cell.node.setAttribute("aria-label", `Layer ${cell.head.layer}, head ${cell.head.head}: ${name} ${formatShort(mean)}`);
      cell.node.setAttribute("aria-pressed", `${isSelected}`);
      cell.node.tabIndex = isSelected ? 0 : -1;
    }
    focused?.node.focus();
  }
  return { node: box, draw };
}
