// Q, Kᵀ, scores, weights, V and output on one screen, laid out as products are written by hand: a cell of a result is where
// the row on its left and the column above it meet.
import { el, scrollBox } from "./dom.js";
import { createFlights } from "./flights.js";
import { formatNumber } from "./format.js";
import { createNumberGrid } from "./numberGrid.js";

// `problem` has tokens, queries, Q, K, V (V may be null). `onSelect(name, i, j)` and `onEdit(name, i, j, number)` are
// called with the name of a matrix and a cell of it as it is drawn: Kᵀ has a column for each key. `desk` is below the two
// products if they fit in a line, and between them otherwise, so that it is near both.
export function createMatrixScreen({ tokens, queries, Q, K, V }, desk, onSelect, onEdit) {
  const [n, m, dim, valueDim] = [queries.length, tokens.length, K[0].length, V ? V[0].length : 0];
  const grid = (name, symbol, meaning, rows, columns, shape, isInput) => createNumberGrid({
    id: `grid-${name}`, symbol, meaning, rows, columns, shape,
    onSelect: (i, j) => onSelect(name, i, j),
    onEdit: isInput ? (i, j, number) => onEdit(name, i, j, number) : null,
  });
  const grids = {
    K: grid("K", "Kᵀ", "what each offers", null, tokens, [dim, m], true),
    Q: grid("Q", "Q", "what each looks for", queries, null, [n, dim], true),
    scores: grid("scores", "scores", "how well they match", queries, tokens, [n, m], false),
    ...(V ? { V: grid("V", "V", "what each hands over", tokens, null, [m, valueDim], true) } : {}),
    weights: grid("weights", "weights", "shares of 1", queries, tokens, [n, m], false),
    ...(V ? { output: grid("output", "output", "what each becomes", queries, null, [n, valueDim], false) } : {}),
  };
  const factor = el("span", { id: "factor" });
  const arrow = el("p", { class: "between", "aria-hidden": "true" }, factor, el("span", { class: "arrow" }), el("span", {}, "softmax"));
  const place = (name) => (grids[name] ? el("div", { class: `place-${name}` }, grids[name].node) : []);
  const products = [["K", "Q", "scores"], ["V", "weights", "output"]].map((names) => el("div", { class: "product" }, names.map(place)));
  const node = el("div", { class: "matrices" },
    scrollBox("Queries, keys and scores", products[0]), arrow, scrollBox("Weights, values and output", products[1]), desk);
  node.style.setProperty("--columns", `${dim + 2 * m + valueDim}`);

  // At another width only: a page that is shorter while this is measured would scroll.
  let width = null;
  function chooseLayout() {
    if (node.clientWidth === width) return;
    width = node.clientWidth;
    node.classList.remove("tall");
    node.classList.toggle("tall", node.scrollWidth > node.clientWidth);
  }
  new ResizeObserver(chooseLayout).observe(node);
  const flights = createFlights(node);

  // `value(name, i, j)`, `kind(name, i, j)` are those of the grids; weights are coloured by their size.
  function draw(value, kind, scale) {
    const largest = Math.max(...grids.weights.cells.flatMap((row, i) => row.map((_, j) => value("weights", i, j) || 0)));
    for (const [name, it] of Object.entries(grids)) {
      const share = name === "weights" ? (i, j) => value(name, i, j) / largest : null;
      it.draw((i, j) => value(name, i, j), (i, j) => kind(name, i, j), share);
    }
    factor.textContent = scale === 1 ? "" : `× ${formatNumber(scale)}`;
  }

  const rowCells = (name, i) => grids[name].cells[i];
  const columnCells = (name, j) => grids[name].cells.map((row) => row[j]);

  // Let the factors of the current product fly into its result.
  function animate({ row, step, column }, duration) {
    if (step === 0) {
      const pairs = rowCells("Q", row).flatMap((cell, d) => [cell, grids.K.cells[d][column]]);
      flights.fly(pairs, grids.scores.cells[row][column], duration);
    } else if (step === 2) {
      const target = grids.weights.cells[row];
      flights.fly(rowCells("scores", row), target[column ?? Math.floor(target.length / 2)], duration);
    } else if (step === 3) {
      const pairs = rowCells("weights", row).flatMap((cell, j) => [cell, columnCells("V", column)[j]]);
      flights.fly(pairs, grids.output.cells[row][column], duration);
    } else flights.stop();
  }

  return { node, chooseLayout, draw, animate };
}

// The classes of a cell for the current product: its factors, and the cells that are being computed.
export function productKind({ row, step, column }, name, i, j) {
  if (step === 0) {
    if (name === "Q" && i === row) return "factor";
    if (name === "K" && j === column) return "factor";
    return name === "scores" && i === row && j === column ? "at-work" : "";
  }
  if (step === 1) return name === "scores" && i === row ? "at-work" : "";
  if (step === 2) {
    if (name === "scores" && i === row) return "factor";
    return name === "weights" && i === row && (column === null || column === j) ? "at-work" : "";
  }
  if (name === "weights" && i === row) return "factor";
  if (name === "V" && j === column) return "factor";
  return name === "output" && i === row && j === column ? "at-work" : "";
}

// Whether a cell of a result depends on an input: a query changes its row, a key its column of the scores and all weights
// of the row, a value its column of the output.
export function dependsOn(selected, name, i, j) {
  if (selected.name === "Q") return ["scores", "weights", "output"].includes(name) && i === selected.i;
  if (selected.name === "K") return (name === "scores" && j === selected.j) || name === "weights" || name === "output";
  return name === "output" && j === selected.j;
}
