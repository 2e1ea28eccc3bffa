// The maps of all heads for the reader's text: small ones to choose from, and the chosen one with its weights.
import { describeHabit } from "./headHabits.js";
import { formatShare, letterName } from "./letters.js";
import { createPalette } from "../components/colorScale.js";
import { el } from "../components/dom.js";
import { createLetterStrip } from "./letterStrip.js";

const nameOf = (pair, heads) => `layer ${Math.floor(pair / heads) + 1}, head ${(pair % heads) + 1}`;

// Paint the lower triangle of a map (n, n) with one pixel for each weight; the colour goes with the square root of the weight.
function paint(canvas, map, n, colors) {
  canvas.width = canvas.height = n;
  const context = canvas.getContext("2d"), image = context.createImageData(n, n);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j <= i; j++) {
      const level = 2 + Math.round(253 * Math.sqrt(map[i * n + j])), at = 4 * (i * n + j);
      for (let c = 0; c < 3; c++) image.data[at + c] = colors[3 * level + c];
      image.data[at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

// `onHead(pair)`, `onSwitch(pair, isOn)` and `onSelect(position)` are called when the reader chooses.
export function createHeadMaps({ layers, heads }, { onHead, onSwitch, onSelect }) {
  const cards = Array.from({ length: layers * heads }, (_, pair) => {
    const canvas = el("canvas", { width: "1", height: "1", "aria-hidden": "true" });
    const effect = el("span", { class: "effect" });
    const button = el("button", { type: "button", class: "head-button", "data-pair": `${pair}`, onclick: () => onHead(pair) }, canvas, effect);
    const input = el("input", { type: "checkbox", checked: true, "data-pair": `${pair}`, "aria-label": `${nameOf(pair, heads)} is on`, onchange: (event) => onSwitch(pair, event.target.checked) });
    return { canvas, effect, button, input, node: el("div", { class: "head-card" }, button, el("label", { class: "switch" }, input, "on")) };
  });
  const grid = el("div", { class: "head-table" }, Array.from({ length: layers }, (_, layer) => [
    el("span", { class: "layer-name" }, `layer ${layer + 1}`), cards.slice(layer * heads, (layer + 1) * heads).map((card) => card.node)]));
  grid.style.setProperty("--heads", `${heads}`);
  const title = el("h3", { id: "head-title" }), habit = el("p", { id: "habit" }), status = el("p", { class: "map-note", id: "cell" });
  const map = el("canvas", { id: "head-map", role: "img" });
  const strip = createLetterStrip("head-strip", "Weights of the head, by letter", "weight", onSelect);
  const stripNote = el("p", { class: "map-note", id: "strip-note" });
  const rowMark = el("span", { class: "row-mark", "aria-hidden": "true" });
  const detail = el("div", { class: "head-detail" }, title, habit, stripNote, strip.node, el("div", { class: "map-frame" }, map, rowMark), status);
  let shown = null;

  const cellAt = (event) => {
    const size = map.clientWidth / shown.n;
    return [Math.floor(event.offsetY / size), Math.floor(event.offsetX / size)].map((x) => Math.min(Math.max(x, 0), shown.n - 1));
  };
  map.addEventListener("click", (event) => shown && onSelect(cellAt(event)[0]));
  map.addEventListener("pointermove", (event) => {
    if (!shown) return;
    const [i, j] = cellAt(event), { bytes, weights, n } = shown;
    status.textContent = j > i ? "White: a letter cannot look at letters that come after it."
      : `${letterName(bytes[i])} looks at ${letterName(bytes[j])}, ${i - j === 0 ? "itself" : `${i - j} before`}: ${formatShare(weights[i * n + j])}`;
  });

  // maps: (layers · heads, n, n); off: 1 for each head that is switched off.
  function draw({ maps, bytes, position, pair, off }) {
    const n = bytes.length, colors = createPalette(), weights = maps.subarray(pair * n * n, (pair + 1) * n * n);
    shown = { bytes, weights, n };
    cards.forEach(({ canvas, button, input, node }, index) => {
      paint(canvas, maps.subarray(index * n * n, (index + 1) * n * n), n, colors);
      input.checked = !off[index];
      node.classList.toggle("off", off[index] === 1);
      button.setAttribute("aria-pressed", `${index === pair}`);
      button.setAttribute("aria-label", `Show ${nameOf(index, heads)}`);
    });
    paint(map, weights, n, colors);
    rowMark.style.top = `${(100 * position) / n}%`;
    rowMark.style.height = `${100 / n}%`;
    const found = describeHabit(weights, bytes), row = weights.subarray(position * n, position * n + n);
    title.textContent = `Layer ${Math.floor(pair / heads) + 1}, head ${(pair % heads) + 1}${off[pair] ? " (switched off)" : ""}`;
    habit.replaceChildren("In this text it looks mostly at ", el("b", {}, found.text), `: ${formatShare(found.share)} of its weight.`);
    map.setAttribute("aria-label", `Map of ${nameOf(pair, heads)}: each row is a letter, each column a letter it may look at`);
    stripNote.replaceChildren(`Where ${letterName(bytes[position])} (letter ${position + 1}) looks:`);
    strip.draw(bytes, row, position, (i) => (i > position ? ", later" : `, weight ${formatShare(row[i])}`));
    status.textContent = "Rows: the letter that looks. Columns: the letter it looks at. The darker, the more weight.";
  }

  // effects: the change of a probability for each head, or null for none.
  function drawEffects(effects) {
    const most = effects && Math.max(...effects.map((x) => Math.abs(x ?? 0)));
    cards.forEach(({ effect, node }, pair) => {
      const change = effects?.[pair];
      const share = change === undefined || change === null ? "" : formatShare(Math.abs(change));
      effect.textContent = share === "" || share === "0 %" ? share : `${change > 0 ? "+" : "−"}${share}`;
      node.classList.toggle("matters", Boolean(change) && Math.abs(change) === most && most > 0.005);
    });
  }
  return { grid, detail, draw, drawEffects };
}
