// The cost of a longer sequence: a board of n × n cells, and the table of `learn.cost_table`.
import { bringIntoView } from "./bringIntoView.js";
import { slider } from "./controls.js";
import { el, scrollBox } from "./dom.js";

const HEADERS = ["length", "cells", "growth", "memory", "multiply-adds"];
const MAX_GRID_LINES = 100; // more cells are too small to be distinguished

// `lengths` are rows of texts under HEADERS; `dims` are d_k and d_v.
export function createCostGrowth(lengths, dims) {
  const rows = lengths.map((row) =>
    el("tr", {}, row.map((text, i) => (i === 0 ? el("th", { scope: "row" }, text) : el("td", {}, text)))));
  const board = el("div", { class: "board", role: "img" }, el("div", { class: "before" }));
  const formula = el("p", { class: "formula", id: "growth-formula" });
  const caption = el("p", { id: "board-caption" });

  function draw(index) {
    const [length, cells, , , multiplyAdds] = lengths[index];
    const n = Number(length.replaceAll(",", ""));
    board.style.setProperty("--cells", n);
    board.classList.toggle("lined", n <= MAX_GRID_LINES);
    board.classList.toggle("first", index === 0);
    const quarter = index === 0 ? "" : ` The quarter in the corner is the board of ${lengths[index - 1][0]}.`;
    const small = n <= MAX_GRID_LINES ? "" : " They are too small to be drawn one by one.";
    caption.textContent = `${cells} cells, one for each query and key.${quarter}${small}`;
    board.setAttribute("aria-label", `A board of ${length} × ${length} cells.`);
    formula.textContent = `${length}² · (${dims.join(" + ")}) = ${multiplyAdds} multiply-adds`;
    rows.forEach((row, i) => {
      if (i === index) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }

  const length = slider("length n", "length", lengths.map(([text]) => text), 0, draw);
  length.input.addEventListener("change", () => bringIntoView(caption, length.node));
  draw(0);
  const table = el("table", { id: "lengths" },
    el("caption", {}, "One head without a mask, numbers of 8 bytes"),
    el("thead", {}, el("tr", {}, HEADERS.map((header) => el("th", { scope: "col" }, header)))), el("tbody", {}, rows));
  return el("section", { class: "card", id: "growth", "aria-labelledby": "growth-title" },
    el("h2", { id: "growth-title" }, "Twice the tokens, four times the work"), length.node, formula,
    el("div", { class: "grown" }, el("div", {}, board, caption), scrollBox("Cost of each length", table)));
}
