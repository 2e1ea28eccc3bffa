// The guess after every layer: for the selected token as a table, and for all tokens as a picture.
import { rankTokens } from "./sampling.js";
import { formatShare } from "./tokens.js";
import { weightBar } from "../components/controls.js";
import { el, scrollBox } from "../components/dom.js";

const MIN_COLUMN = 24, MAX_COLUMN = 110, ROW = 24; // pixels
const FONT = "14px ui-monospace, Menlo, monospace";
const BEST = 3; // guesses of a row of the table

const placeName = (place) => (place === 0 ? "token itself" : `layer ${Math.ceil(place / 2)} ${place % 2 ? "attention" : "MLP"}`);

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// `onSelect(position)` is called when a column of the picture is selected.
export function createLensView(tokenizer, onSelect) {
  const canvas = el("canvas", { id: "lens-picture", role: "img" });
  const labels = el("div", { class: "lens-labels", "aria-hidden": "true" });
  const box = scrollBox("Guesses of every layer for every token", el("div", { class: "lens-rows" }, labels, canvas));
  const table = el("tbody");
  const header = el("th", { scope: "col", class: "wide" });
  const node = el("div", { class: "lens" },
    scrollBox("Guesses for the selected token",
      el("table", { id: "lens-table" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "read after"), el("th", { scope: "col" }, "best guesses"), header)), table)),
    box);
  let edges = []; // of the columns of the picture, in pixels

  canvas.addEventListener("click", (event) => {
    const column = edges.findLastIndex((x) => x <= event.offsetX);
    if (column >= 0 && column < edges.length - 1) onSelect(column);
  });

  function drawTable({ all }, vocabulary, final) {
    const places = all.length / vocabulary;
    table.replaceChildren(...Array.from({ length: places }, (_, place) => {
      const guess = all.subarray(place * vocabulary, (place + 1) * vocabulary);
      const best = Array.from(rankTokens(guess).subarray(0, BEST), (token) => el("span", { class: token === final ? "guess final" : "guess" }, el("b", { class: "sign" }, tokenizer.sign(token)), ` ${formatShare(guess[token])}`));
      return el("tr", { "data-place": `${place}` }, el("th", { scope: "row" }, placeName(place)), el("td", {}, best),
        el("td", { class: "bars", "data-probability": `${guess[final]}` }, weightBar(guess[final]), el("span", { class: "visually-hidden" }, formatShare(guess[final]))));
    }));
    header.replaceChildren("probability of ", el("b", { class: "sign" }, tokenizer.sign(final)), " at temperature 1");
  }

  // One column for each token, one row for each layer. The shade is the probability of the guess.
  function drawPicture({ best, probability }, tokens, position) {
    const n = tokens.length, rows = best.length / n, ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
    const signs = Array.from(tokens, (token, i) => [token, ...Array.from({ length: rows }, (_, row) => best[row * n + i])].map(tokenizer.sign));
    context.font = FONT;
    edges = [0];
    for (const column of signs) edges.push(edges.at(-1) + Math.min(MAX_COLUMN, Math.max(MIN_COLUMN, ...column.map((text) => Math.ceil(context.measureText(text).width) + 8))));
    const width = edges.at(-1), height = ROW * (rows + 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const [ink, hot, onAccent, line] = ["--ink", "--hot", "--on-accent", "--line"].map(color);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.font = FONT;
    for (let i = 0; i < n; i++) {
      const x = edges[i], wide = edges[i + 1] - x, write = (row) => context.fillText(signs[i][row], x + wide / 2, ROW * (row + 0.5), wide - 6);
      context.fillStyle = ink;
      write(0);
      for (let row = 0; row < rows; row++) {
        const share = probability[row * n + i];
        context.globalAlpha = share < 0.5 ? 0.8 * share : 0.72 + 0.56 * (share - 0.5);
        context.fillStyle = hot;
        context.fillRect(x + 0.5, ROW * (row + 1) + 0.5, wide - 1, ROW - 1);
        context.globalAlpha = 1;
        context.fillStyle = share < 0.5 ? ink : onAccent;
        write(row + 1);
      }
    }
    context.strokeStyle = line;
    context.strokeRect(0.5, ROW + 0.5, width - 1, ROW * rows - 1);
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.strokeRect(edges[position], 1, edges[position + 1] - edges[position], height - 2);
    canvas.setAttribute("aria-label", `Best guess for the next token after each of ${n} tokens and each layer. The table above has the numbers for ${tokenizer.name(tokens[position])}.`);
    labels.replaceChildren(...Array.from({ length: rows + 1 }, (_, row) => el("span", {}, row === 0 ? "text" : row === 1 ? "start" : `layer ${row - 1}`)));
    if (position === n - 1) box.scrollLeft = box.scrollWidth;
  }

  // lens: the worker's answer; final: the token whose probability the bars show.
  function draw(lens, tokens, position, vocabulary, final) {
    drawTable(lens, vocabulary, final);
    drawPicture(lens, tokens, position);
  }
  return { node, draw };
}
