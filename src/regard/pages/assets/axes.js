// What stands in the margins of a map and in its cells: tokens where there is room, else positions; and numbers.
import { levelOf } from "./ramp.js";

export const LABELS_FROM = 15; // pixels of a cell that leave room for its token
const NUMBERS_FROM = 46; // … and for its weight
const LYING_FROM = 64; // … and for its token along the top without turning it
const APART = 76; // pixels between positions

function fittedTo(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text.slice(0, 200));
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

// 1, 2 or 5 times a power of ten, at least so many.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) ?? 10 * power;
}

function ticks(from, length, pixels, apart) {
  const step = roundStep(apart / pixels), found = [];
  for (let n = Math.ceil(from / step - 1e-6) * step; n < from + length; n += step) found.push(n + 0); // no −0
  return found;
}

export function axes(context, style, { width, left, top, across, down, first, upper, wide, high }, { queries, tokens }) {
  context.fillStyle = style.getPropertyValue("--soft");
  context.strokeStyle = style.getPropertyValue("--line");
  context.lineWidth = 1;
  context.strokeRect(left - 0.5, top - 0.5, wide * across + 1, high * down + 1);
  context.font = `13px ${style.fontFamily}`;
  context.textBaseline = "middle";
  // A cell cut by the edge has its token where its middle is in view.
  const inView = (n, from, length) => n + 0.5 > from && n + 0.5 < from + length;
  context.textAlign = "right";
  if (queries && down >= LABELS_FROM) {
    for (let i = Math.floor(upper); i < upper + high; i++) {
      if (!inView(i, upper, high)) continue;
      context.fillText(fittedTo(context, queries[i], left - 14), left - 7, top + (i + 0.5 - upper) * down);
    }
  } else {
    for (const i of ticks(upper, high, down, 44)) {
      const y = top + (i + (down >= LABELS_FROM ? 0.5 : 0) - upper) * down;
      context.fillText(i.toLocaleString("en-GB"), left - 9, Math.max(y, top + 6));
      context.fillRect(left - 5, y - 0.5, 5, 1);
    }
  }
  if (tokens && across >= LABELS_FROM) {
    for (let j = Math.floor(first); j < first + wide; j++) {
      if (!inView(j, first, wide)) continue;
      context.save();
      context.translate(left + (j + 0.5 - first) * across, top - 7);
      const lying = across >= LYING_FROM;
      if (!lying) context.rotate(-Math.PI / 2);
      context.textAlign = lying ? "center" : "left";
      context.fillText(fittedTo(context, tokens[j], lying ? across - 6 : top - 14), 0, lying ? -6 : 0);
      context.restore();
    }
  } else {
    for (const j of ticks(first, wide, across, APART)) {
      const x = left + (j + (across >= LABELS_FROM ? 0.5 : 0) - first) * across;
      const text = j.toLocaleString("en-GB"), half = context.measureText(text).width / 2;
      context.textAlign = "center";
      context.fillText(text, Math.min(Math.max(x, left + half), width - half), top - 14);
      context.fillRect(x - 0.5, top - 5, 1, 5);
    }
  }
}

// In as many digits as a cell has room for; 1.288e-04 cut off would read as 1.288.
function short(weight) {
  if (weight === -1) return "hidden";
  if (Number.isNaN(weight)) return "nan";
  if (weight === 0) return "0";
  return weight >= 0.001 ? weight.toFixed(3) : weight.toExponential(0).replace("-", "−");
}

// The weight in each cell that is large enough; `weightAt(i, j)` may not know it yet.
export function cellTexts(context, style, { left, top, across, down, first, upper, wide, high }, weightAt, scale) {
  if (across < NUMBERS_FROM || down < 16) return;
  const [pale, dark] = ["--on-pale", "--on-dark"].map((name) => style.getPropertyValue(name));
  context.font = `${across >= 60 ? 14 : 12}px ${style.fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (let i = Math.floor(upper); i < Math.ceil(upper + high); i++) {
    for (let j = Math.floor(first); j < Math.ceil(first + wide); j++) {
      const weight = weightAt(i, j);
      if (weight === null || Number.isNaN(weight)) continue;
      const level = levelOf(scale, weight);
      context.fillStyle = weight === -1 ? style.getPropertyValue("--soft") : level > 140 ? dark : pale;
      context.fillText(short(weight), left + (j + 0.5 - first) * across, top + (i + 0.5 - upper) * down);
    }
  }
}
