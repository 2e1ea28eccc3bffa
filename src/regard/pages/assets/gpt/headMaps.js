// The maps of all heads for the reader's text: small ones to choose from, and the chosen one with its weights.
import { describeHabit } from "./headHabits.js";
import { formatPoints, formatShare } from "./tokens.js";
import { bringIntoView } from "../components/bringIntoView.js";
import { createPalette } from "../components/colorScale.js";
import { el } from "../components/dom.js";
import { createWeightMap } from "../components/weightMap.js";
import { MASKED } from "../matrix/weights.js";
import { createTokenStrip } from "./tokenStrip.js";

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

// The methods of a matrix that a map needs, for maps (layers · heads, n, n) as `current()` returns them.
function createMatrix(current) {
  const weightOf = (pair, i, j) => {
    const { maps, n } = current();
    return j > i ? MASKED : maps[(pair * n + i) * n + j];
  };
  return {
    cell: async (pair, i, j) => ({ weight: Math.max(weightOf(pair, i, j), 0), masked: j > i }),
    // The largest weight of each point; in a narrow window a point may be several weights.
    async picture(pair, top, down, height, left, across, width) {
      const { maps, n } = current();
      return maps && Float32Array.from({ length: height * width }, (_, at) => {
        const i = top + Math.floor(at / width) * down, j = left + (at % width) * across;
        let most = MASKED;
        for (let a = i; a < Math.min(i + down, n); a++) for (let b = j; b < Math.min(j + across, n); b++) most = Math.max(most, weightOf(pair, a, b));
        return most;
      });
    },
  };
}

// `onHead(pair)`, `onSwitch(pair, isOn)`, `onSelect(position)` and `onOpen(i, j)`, for a cell of the map, are called when the reader chooses.
export function createHeadMaps({ layers, heads }, tokenizer, { onHead, onSwitch, onSelect, onOpen }) {
  const nameOf = (pair) => `layer ${Math.floor(pair / heads) + 1}, head ${(pair % heads) + 1}`;
  const cards = Array.from({ length: layers * heads }, (_, pair) => {
    const canvas = el("canvas", { width: "1", height: "1", "aria-hidden": "true" });
    const effect = el("span", { class: "effect" });
    const button = el("button", { type: "button", class: "head-button", "data-pair": `${pair}`, "aria-label": `Show ${nameOf(pair)}`, onclick: () => chooseHead(pair) }, canvas, effect);
    const input = el("input", { type: "checkbox", checked: true, "data-pair": `${pair}`, "aria-label": `${nameOf(pair)} is on`, onchange: (event) => onSwitch(pair, event.target.checked) });
    return { canvas, effect, button, input, node: el("div", { class: "head-card" }, button, el("label", { class: "switch" }, input, "on")) };
  });
  const grid = el("div", { class: "head-table" }, Array.from({ length: layers }, (_, layer) => [
    el("span", { class: "layer-name" }, `layer ${layer + 1}`), el("div", { class: "layer-heads" }, cards.slice(layer * heads, (layer + 1) * heads).map((card) => card.node))]));
  grid.style.setProperty("--heads", `${heads}`);
  const title = el("h3", { id: "head-title" }), habit = el("p", { id: "habit" }), status = el("p", { class: "map-note", id: "cell" });
  const strip = createTokenStrip("head-strip", "Weights of the head, by token", "weight", tokenizer, onSelect);
  const stripNote = el("p", { class: "map-note", id: "strip-note" });
  const isMark = (token) => /^[.,!?]$/.test(tokenizer.sign(token));
  let shown = { tokens: [], maps: null, n: 1, pair: 0 };
  const map = createWeightMap({ matrix: createMatrix(() => shown), size: [1, 1], tokens: [""], queries: [""], onOpen, onCell: (i, j, answer) => {
    if (!answer || i >= shown.n) return;
    const name = (position) => tokenizer.name(shown.tokens[position]);
    status.textContent = answer.masked ? "A token cannot look at tokens that come after it." : `${name(i)} looks at ${name(j)}, ${i - j === 0 ? "itself" : `${i - j} before`}: ${formatShare(answer.weight)}`;
  } });
  const picture = map.node.querySelector("canvas");
  picture.addEventListener("keyup", ({ key }) => key.startsWith("Arrow") && bringIntoView(status, picture));
  const detail = el("div", { class: "head-detail" }, title, habit,
    el("p", { class: "map-note" }, "Rows: the token that looks. Columns: the token it looks at. Click a cell, or press Enter on it, to see how its weight was computed."), map.node, status, stripNote, strip.node);

  function chooseHead(pair) {
    bringIntoView(title, picture, grid);
    onHead(pair);
  }

  // maps: (layers · heads, n, n); off: 1 for each head that is switched off.
  function draw({ maps, tokens, position, pair, off }) {
    const n = tokens.length, colors = createPalette(), weights = maps.subarray(pair * n * n, (pair + 1) * n * n);
    const isNewText = tokens !== shown.tokens, isNew = maps !== shown.maps || pair !== shown.pair;
    shown = { tokens, maps, n, pair };
    if (isNewText) map.setText([n, n], ...[0, 1].map(() => Array.from(tokens, tokenizer.sign)));
    if (isNew) map.setHead(pair, null);
    map.setMarks({ rows: [position], columns: null });
    cards.forEach(({ canvas, button, input, node }, index) => {
      paint(canvas, maps.subarray(index * n * n, (index + 1) * n * n), n, colors);
      input.checked = !off[index];
      node.classList.toggle("off", off[index] === 1);
      button.setAttribute("aria-pressed", `${index === pair}`);
    });
    const found = describeHabit(weights, tokens, isMark), row = weights.subarray(position * n, position * n + n);
    title.textContent = `Layer ${Math.floor(pair / heads) + 1}, head ${(pair % heads) + 1}${off[pair] ? " (switched off)" : ""}`;
    habit.replaceChildren("In this text it looks mostly at ", el("b", {}, found.text), `: ${formatShare(found.share)} of its weight.`);
    stripNote.replaceChildren(`Where ${tokenizer.name(tokens[position])} (token ${position}) looks:`);
    strip.draw(tokens, row, position, (i) => (i > position ? ", later" : `, weight ${formatShare(row[i])}`));
    if (isNewText) status.textContent = "";
  }

  // effects: the change of a probability for each head, or null for none.
  function drawEffects(effects) {
    const most = effects && Math.max(...effects.map((x) => Math.abs(x ?? 0)));
    cards.forEach(({ effect, node }, pair) => {
      const change = effects?.[pair] ?? null, points = change === null ? "" : formatPoints(Math.abs(change));
      effect.textContent = points === "" || points === "0" ? points : `${change > 0 ? "+" : "−"}${points}`;
      node.classList.toggle("matters", Boolean(change) && Math.abs(change) === most && most > 0.005);
    });
  }
  return { grid, detail, draw, drawEffects };
}
