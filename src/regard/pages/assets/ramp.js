// Weights as colours: from nothing to one by the logarithm, or by the weight itself; hidden ones have a colour of their own.
import { el } from "./dom.js";
import { number } from "./numbers.js";

const STOPS = 5;

function rgb(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Colours of levels 2 … 255, which go from low to high; level 0 is hidden, 1 no number.
export function palette() {
  const stops = Array.from({ length: STOPS }, (_, i) => rgb(`--ramp-${i}`)), colours = new Uint8ClampedArray(256 * 3);
  colours.set(rgb("--hidden"), 0);
  colours.set(rgb("--mark"), 3);
  for (let level = 2; level < 256; level++) {
    const place = ((level - 2) / 253) * (STOPS - 1), low = Math.min(Math.floor(place), STOPS - 2);
    for (let c = 0; c < 3; c++) colours[3 * level + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
  }
  return colours;
}

// By the logarithm, a colour means the same wherever one looks: from a tenth of an even share, rounded down, to 1.
export function scaleOf(keys, top, log) {
  return { log, low: log ? 10 ** (Math.floor(Math.log10(1 / keys)) - 1) : 0, high: log ? 1 : top };
}

// 0 … 1 along the ramp.
export function strength(scale, weight) {
  const place = scale.log ? Math.log(weight / scale.low) / Math.log(scale.high / scale.low) : weight / scale.high;
  return Math.min(Math.max(place, 0), 1);
}

export function levelOf(scale, weight) {
  return weight === -1 ? 0 : Number.isNaN(weight) ? 1 : 2 + Math.round(253 * strength(scale, weight));
}

// A canvas with a pixel for each level.
export function painted(levels, width, colours) {
  const image = new ImageData(width, levels.length / width);
  for (let i = 0; i < levels.length; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colours[3 * levels[i] + c];
    image.data[4 * i + 3] = 255;
  }
  const canvas = el("canvas", { width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function powers(exponent) {
  const digits = Array.from(String(exponent), (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return exponent > -4 ? number(10 ** exponent) : `10${digits.join("")}`;
}

// The scale as a bar with its numbers below it.
export function legendOf(scale) {
  const decades = Math.round(Math.log10(scale.high / scale.low));
  const every = Math.ceil(decades / 4);
  const marks = scale.log
    ? Array.from({ length: decades + 1 }, (_, i) => i).filter((i) => i % every === 0)
      .map((i) => [1 - i / decades, powers(-i), i === decades])
    : [0, 0.5, 1].map((part) => [part, number(Number((part * scale.high).toPrecision(2)))]);
  return el("span", { class: "scale" },
    el("span", { class: "colours", "aria-hidden": "true" }),
    el("span", { class: "marks" }, marks.map(([part, text]) => {
      const mark = el("span", {}, text);
      mark.style.insetInlineStart = `${100 * part}%`;
      return mark;
    })));
}
