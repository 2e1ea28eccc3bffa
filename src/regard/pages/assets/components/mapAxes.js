// The axes of a map, with tokens if they fit and otherwise positions, and the numbers in its cells.
import { MASKED } from "../matrix/weights.js";
import { colorLevel, textColor } from "./colorScale.js";

// Pixels of a cell from which on there is room …
export const MIN_LABEL_SIZE = 15; // for its token
const MIN_NUMBER_SIZE = 46; // for its weight
const MIN_HORIZONTAL_SIZE = 64; // for its token along the top without rotating it
const TICK_DISTANCE = 76; // pixels between positions

// Shorten a text to a width in pixels.
function fitText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text.slice(0, 200));
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

// 1, 2 or 5 times a power of ten, not below `least`.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) ?? 10 * power;
}

function ticks(from, length, pixels, distance) {
  const step = roundStep(distance / pixels), positions = [];
  for (let n = Math.ceil(from / step - 1e-6) * step; n < from + length; n += step) positions.push(n + 0); // no −0
  return positions;
}

export function drawAxes(context, style, { width, left, top, across, down, first, upper, wide, high }, { queries, tokens }) {
  context.fillStyle = style.getPropertyValue("--soft");
  context.strokeStyle = style.getPropertyValue("--line");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, wide * across + 1, high * down + 1);
  context.font = `13px ${style.fontFamily}`;
  context.textBaseline = "middle";
  // A cell at the edge is labelled if its centre is in view.
  const inView = (n, from, length) => n + 0.5 > from && n + 0.5 < from + length;
  context.textAlign = "right";
  if (queries && down >= MIN_LABEL_SIZE) {
    for (let i = Math.floor(upper); i < upper + high; i++) {
      if (!inView(i, upper, high)) continue;
      context.fillText(fitText(context, queries[i], left - 14), left - 7, top + (i + 0.5 - upper) * down);
    }
  } else {
    for (const i of ticks(upper, high, down, 44)) {
      const y = top + (i + (down >= MIN_LABEL_SIZE ? 0.5 : 0) - upper) * down;
      context.fillText(i.toLocaleString("en-GB"), left - 9, Math.max(y, top + 6));
      context.fillRect(left - 5, y - 0.5, 5, 1);
    }
  }
  if (tokens && across >= MIN_LABEL_SIZE) {
    for (let j = Math.floor(first); j < first + wide; j++) {
      if (!inView(j, first, wide)) continue;
      context.save();
      context.translate(left + (j + 0.5 - first) * across, top - 7);
      const horizontal = across >= MIN_HORIZONTAL_SIZE;
      if (!horizontal) context.rotate(-Math.PI / 2);
      context.textAlign = horizontal ? "center" : "left";
      context.fillText(fitText(context, tokens[j], horizontal ? across - 6 : top - 14), 0, horizontal ? -6 : 0);
      context.restore();
    }
  } else {
    for (const j of ticks(first, wide, across, TICK_DISTANCE)) {
      const x = left + (j + (across >= MIN_LABEL_SIZE ? 0.5 : 0) - first) * across;
      const text = j.toLocaleString("en-GB"), half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(Math.max(x, left + half), width - half), top - 14);
      context.fillRect(x - 0.5, top - 5, 1, 5);
    }
  }
}

// Mark rows on the left and columns on the top edge; `marks`: { rows, columns }, each a list or null.
export function drawMarks(context, style, { left, top, across, down, first, upper, wide, high }, { rows, columns }) {
  context.fillStyle = style.getPropertyValue("--mark");
  for (const i of rows ?? []) {
    if (i + 1 > upper && i < upper + high) context.fillRect(left - 7, top + (i - upper) * down, 7, Math.max(1, down));
  }
  for (const j of columns ?? []) {
    if (j + 1 > first && j < first + wide) context.fillRect(left + (j - first) * across, top - 7, Math.max(1, across), 7);
  }
}

// In as many digits as fit into a cell; 1.288e-04 cut off would read as 1.288.
function formatCellWeight(weight) {
  if (weight === MASKED) return "masked";
  if (Number.isNaN(weight)) return "nan";
  if (weight === 0) return "0";
  return weight >= 0.001 ? weight.toFixed(3) : weight.toExponential(0).replace("-", "−");
}

// Write the weight in each cell that is large enough; `weightAt(i, j)` is null if it is not known yet.
export function drawCellWeights(context, style, { left, top, across, down, first, upper, wide, high }, weightAt, scale, colors) {
  if (across < MIN_NUMBER_SIZE || down < 16) return;
  context.font = `${across >= 60 ? 14 : 12}px ${style.fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = Math.floor(upper); i < Math.ceil(upper + high); i++) {
    for (let j = Math.floor(first); j < Math.ceil(first + wide); j++) {
      const weight = weightAt(i, j);
      if (weight === null || Number.isNaN(weight)) continue;
      const level = colorLevel(scale, weight);
      context.fillStyle = weight === MASKED ? style.getPropertyValue("--soft") : textColor(Array.from(colors.subarray(3 * level, 3 * level + 3)));
      context.fillText(formatCellWeight(weight), left + (j + 0.5 - first) * across, top + (i + 0.5 - upper) * down);
    }
  }
}
