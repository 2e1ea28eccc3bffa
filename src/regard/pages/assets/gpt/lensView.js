// The guess after every layer: for the selected letter as a table, and for all letters as a picture.
import { formatShare, letterName, letterSign } from "./letters.js";
import { weightBar } from "../components/controls.js";
import { el, scrollBox } from "../components/dom.js";

const CELL = 20, ROW = 24; // pixels
const BEST = 3; // guesses of a row of the table

const placeName = (place) => (place === 0 ? "letter itself" : `layer ${Math.ceil(place / 2)} ${place % 2 ? "attention" : "MLP"}`);

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// `onSelect(position)` is called when a column of the picture is selected.
export function createLensView(onSelect) {
  const canvas = el("canvas", { id: "lens-picture", role: "img" });
  const labels = el("div", { class: "lens-labels", "aria-hidden": "true" });
  const box = scrollBox("Guesses of every layer for every letter", el("div", { class: "lens-rows" }, labels, canvas));
  const table = el("tbody");
  const header = el("th", { scope: "col", class: "wide" });
  const node = el("div", { class: "lens" },
    scrollBox("Guesses for the selected letter",
      el("table", { id: "lens-table" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "read after"), el("th", { scope: "col" }, "best guesses"), header)), table)),
    box);
  let last = null;

  canvas.addEventListener("click", (event) => {
    const column = Math.floor(event.offsetX / CELL);
    if (last && column >= 0 && column < last.bytes.length) onSelect(column);
  });

  function drawTable({ all }, vocabulary, final) {
    const places = all.length / vocabulary;
    table.replaceChildren(...Array.from({ length: places }, (_, place) => {
      const guess = all.subarray(place * vocabulary, (place + 1) * vocabulary);
      const order = [...guess.keys()].sort((a, b) => guess[b] - guess[a] || a - b).slice(0, BEST);
      const best = order.map((byte) => el("span", { class: byte === final ? "guess final" : "guess" }, el("b", { class: "sign" }, letterSign(byte)), ` ${formatShare(guess[byte])}`));
      return el("tr", { "data-place": `${place}` }, el("th", { scope: "row" }, placeName(place)), el("td", {}, best),
        el("td", { class: "bars", "data-probability": `${guess[final]}` }, weightBar(guess[final]), el("span", { class: "visually-hidden" }, formatShare(guess[final]))));
    }));
    header.replaceChildren("probability of ", el("b", { class: "sign" }, letterSign(final)));
  }

  // One column for each letter, one row for each layer. The shade is the probability of the guess.
  function drawPicture({ best, probability }, bytes, position) {
    const n = bytes.length, rows = best.length / n / 2 + 0.5, ratio = devicePixelRatio || 1;
    const width = CELL * n, height = ROW * (rows + 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), [ink, hot, onAccent, line] = ["--ink", "--hot", "--on-accent", "--line"].map(color);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.font = "14px ui-monospace, Menlo, monospace";
    for (let i = 0; i < n; i++) {
      const x = CELL * i;
      context.fillStyle = ink;
      context.fillText(letterSign(bytes[i]), x + CELL / 2, ROW / 2);
      for (let row = 0; row < rows; row++) {
        const share = probability[2 * row * n + i];
        context.globalAlpha = share < 0.5 ? 0.8 * share : 0.72 + 0.56 * (share - 0.5);
        context.fillStyle = hot;
        context.fillRect(x + 0.5, ROW * (row + 1) + 0.5, CELL - 1, ROW - 1);
        context.globalAlpha = 1;
        context.fillStyle = share < 0.5 ? ink : onAccent;
        context.fillText(letterSign(best[2 * row * n + i]), x + CELL / 2, ROW * (row + 1.5));
      }
    }
    context.strokeStyle = line;
    context.strokeRect(0.5, ROW + 0.5, CELL * n - 1, ROW * rows - 1);
    context.strokeStyle = ink;
    context.lineWidth = 2;
    context.strokeRect(CELL * position, 1, CELL, height - 2);
    canvas.setAttribute("aria-label", `Best guess for the next letter after each of ${n} letters and each layer. The table above has the numbers for ${letterName(bytes[position])}.`);
    labels.replaceChildren(...Array.from({ length: rows + 1 }, (_, row) => el("span", {}, row === 0 ? "text" : row === 1 ? "start" : `layer ${row - 1}`)));
    if (position === n - 1) box.scrollLeft = box.scrollWidth;
  }

  // lens: the worker's answer; final: the byte whose probability the bars show.
  function draw(lens, bytes, position, vocabulary, final) {
    last = { bytes };
    drawTable(lens, vocabulary, final);
    drawPicture(lens, bytes, position);
  }
  return { node, draw };
}
