// A product of matrices laid out as it is done by hand: the left one before, the right one above the result, so that
// a cell stands where its row and its column meet.
import { el, token } from "./dom.js";

// A matrix is { name, rows, columns, shape }: the names of its rows and columns (null for those without), [height, width].
function grid(kind, { name, rows, columns, shape: [height, width] }) {
  const cells = Array.from({ length: height }, () => Array.from({ length: width }, () => el("td")));
  const head = (names, i, scope) =>
    el("th", { scope, class: names ? "" : "unnamed" }, names ? token(names[i]) : `${i}`);
  const top = el("tr", {}, el("td", { class: "corner" }), cells[0].map((_, j) => head(columns, j, "col")));
  const body = cells.map((row, i) => el("tr", {}, head(rows, i, "row"), row));
  const node = el("table", { class: kind }, el("caption", {}, name), el("thead", {}, top), el("tbody", {}, body));
  return { node, cells };
}

export function product(left, right, result) {
  const parts = { left: grid("left", left), right: grid("right", right), result: grid("made", result) };
  const node = el("div", { class: "product" }, parts.right.node, parts.left.node, parts.result.node);

  // `text(part, i, j)` is what a cell says, null for what is not yet known; `kind(part, i, j)` how it is marked.
  function draw(text, kind) {
    for (const [name, { cells }] of Object.entries(parts)) {
      cells.forEach((row, i) => row.forEach((cell, j) => {
        const says = text(name, i, j);
        if (cell.textContent !== (says ?? "·")) cell.textContent = says ?? "·";
        cell.className = says === null ? `unknown ${kind(name, i, j)}` : kind(name, i, j);
      }));
    }
    keepInView(node.querySelector(".at-work"), node.closest(".scroll"));
  }
  return { node, draw };
}

// Sideways only: the page itself stays where it is.
function keepInView(cell, box) {
  if (!cell || !box) return;
  const [inner, outer] = [cell, box].map((node) => node.getBoundingClientRect());
  box.scrollLeft += Math.min(inner.left - outer.left, 0) + Math.max(inner.right - outer.right, 0);
}
