// A matrix product in the layout used by hand: the left factor before the result, the right factor above it, so that a
// cell of the result is where its row and its column meet.
import { el, tokenElement } from "./dom.js";

// A matrix is { name, rows, columns, shape }: names of its rows and columns (null for none), and [height, width].
function createGrid(kind, { name, rows, columns, shape: [height, width] }) {
  const cells = Array.from({ length: height }, () => Array.from({ length: width }, () => el("td")));
  const header = (names, i, scope) =>
    el("th", { scope, class: names ? "" : "unnamed" }, names ? tokenElement(names[i]) : `${i}`);
  const top = el("tr", {}, el("td", { class: "corner" }), cells[0].map((_, j) => header(columns, j, "col")));
  const body = cells.map((row, i) => el("tr", {}, header(rows, i, "row"), row));
  const node = el("table", { class: kind }, el("caption", {}, name), el("thead", {}, top), el("tbody", {}, body));
  return { node, cells };
}

export function createMatrixProduct(left, right, result) {
  const grids = { left: createGrid("left", left), right: createGrid("right", right), result: createGrid("product-result", result) };
  const node = el("div", { class: "product" }, grids.right.node, grids.left.node, grids.result.node);

  // `text(part, i, j)` is the text of a cell, null if it is not known yet; `kind(part, i, j)` is its class.
  function draw(text, kind) {
    for (const [name, { cells }] of Object.entries(grids)) {
      cells.forEach((row, i) => row.forEach((cell, j) => {
        const cellText = text(name, i, j);
        if (cell.textContent !== (cellText ?? "·")) cell.textContent = cellText ?? "·";
        cell.className = cellText === null ? `unknown ${kind(name, i, j)}` : kind(name, i, j);
      }));
    }
  }
  return { node, draw };
}
