// Colours of weights: on a logarithmic scale, or proportional to the weight. Masked cells have a colour of their own.
import { MASKED } from "../matrix/weights.js";
import { el } from "./dom.js";
import { formatNumber } from "./format.js";

const STOPS = 5;

export function readColor(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// The colours of 256 levels: 0 is masked, 1 is NaN, and 2 … 255 go from low to high.
export function createPalette() {
  const stops = Array.from({ length: STOPS }, (_, i) => readColor(`--ramp-${i}`)), colors = new Uint8ClampedArray(256 * 3);
  colors.set(readColor("--masked"), 0);
  colors.set(readColor("--mark"), 3);
  for (let level = 2; level < 256; level++) {
    const place = ((level - 2) / 253) * (STOPS - 1), low = Math.min(Math.floor(place), STOPS - 2);
    for (let c = 0; c < 3; c++) colors[3 * level + c] = stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c]);
  }
  return colors;
}

// The colour of a part of the scale, 0 … 1.
export function paletteColor(colors, part) {
  const level = 2 + Math.round(253 * part);
  return Array.from(colors.subarray(3 * level, 3 * level + 3));
}

// Black or white, whichever is easier to read on a colour.
export function textColor(color) {
  const [r, g, b] = color.map((x) => (x <= 10.31 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff"; // relative luminance of equal contrast
}

// The logarithmic scale goes from a tenth of an even share, rounded down to a power of ten, to 1: it does not depend on
// the view.
export function createScale(keys, top, isLog) {
  return { isLog, low: isLog ? 10 ** (Math.floor(Math.log10(1 / keys)) - 1) : 0, high: isLog ? 1 : top };
}

// The position of a weight on the scale, 0 … 1.
function scalePosition(scale, weight) {
  const place = scale.isLog ? Math.log(weight / scale.low) / Math.log(scale.high / scale.low) : weight / scale.high;
  return Math.min(Math.max(place, 0), 1);
}

export function colorLevel(scale, weight) {
  return weight === MASKED ? 0 : Number.isNaN(weight) ? 1 : 2 + Math.round(253 * scalePosition(scale, weight));
}

// A canvas with one pixel for each level.
export function paintLevels(levels, width, colors) {
  const image = new ImageData(width, levels.length / width);
  for (let i = 0; i < levels.length; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colors[3 * levels[i] + c];
    image.data[4 * i + 3] = 255;
  }
  const canvas = el("canvas", { width, height: image.height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function formatPower(exponent) {
  const digits = Array.from(String(exponent), (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return exponent > -4 ? formatNumber(10 ** exponent) : `10${digits.join("")}`;
}

// The scale as a bar with numbers below it.
export function scaleLegend(scale) {
  const decades = Math.round(Math.log10(scale.high / scale.low));
  const every = Math.ceil(decades / 4);
  const marks = scale.isLog
    ? Array.from({ length: decades + 1 }, (_, i) => i).filter((i) => i % every === 0)
      .map((i) => [1 - i / decades, formatPower(-i)])
    : [0, 0.5, 1].map((part) => [part, formatNumber(Number((part * scale.high).toPrecision(2)))]);
  return el("span", { class: "scale" },
    el("span", { class: "colors", "aria-hidden": "true" }),
    el("span", { class: "marks" }, marks.map(([part, text]) => {
      const mark = el("span", {}, text);
      mark.style.insetInlineStart = `${100 * part}%`;
      return mark;
    })));
}
