// What a longer sequence costs: the board of n × n cells and the table of `learn.cost_table`, row by row.
import { slider } from "./controls.js";
import { el, scrolling } from "./dom.js";

const HEADS = ["length", "cells", "growth", "memory", "multiply-adds"];
const LINES_UP_TO = 100; // more cells are too small to be told apart

// `lengths` are rows of texts as in HEADS; `dims` are d_k and d_v.
export function growth(lengths, dims) {
  const rows = lengths.map((row) =>
    el("tr", {}, row.map((text, i) => (i === 0 ? el("th", { scope: "row" }, text) : el("td", {}, text)))));
  const board = el("div", { class: "board", role: "img" }, el("div", { class: "before" }));
  const formula = el("p", { class: "formula", id: "growth-formula" });
  const caption = el("p", { id: "board-says" });

  function draw(place) {
    const [length, cells, , , multiplyAdds] = lengths[place];
    const n = Number(length.replaceAll(",", ""));
    board.style.setProperty("--cells", n);
    board.classList.toggle("lined", n <= LINES_UP_TO);
    board.classList.toggle("first", place === 0);
    const quarter = place === 0 ? "" : ` The quarter in the corner is the board of ${lengths[place - 1][0]}.`;
    const small = n <= LINES_UP_TO ? "" : " They are too small to be seen one by one.";
    caption.textContent = `${cells} cells, one for each query and key.${quarter}${small}`;
    board.setAttribute("aria-label", `A board of ${length} × ${length} cells.`);
    formula.textContent = `${length}² · (${dims.join(" + ")}) = ${multiplyAdds} multiply-adds`;
    rows.forEach((row, i) => {
      if (i === place) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }

  const length = slider("length n", "length", lengths.map(([text]) => text), 0, draw);
  draw(0);
  const table = el("table", { id: "lengths" },
    el("caption", {}, "One head without a mask, numbers of 8 bytes"),
    el("thead", {}, el("tr", {}, HEADS.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows));
  return el("section", { class: "card", id: "growth", "aria-labelledby": "growth-title" },
    el("h2", { id: "growth-title" }, "Twice the tokens, four times the work"), length.node, formula,
    el("div", { class: "grown" }, el("div", {}, board, caption), scrolling("What each length costs", table)));
}
