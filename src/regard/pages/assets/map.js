// A zoomable map of weights, from the whole to single cells with their tokens and numbers. Every weight on it is worked
// out in the page; where a pixel stands for many, the map says whether it is their mean or a sample of them.
import { axes, cellTexts, LABELS_FROM } from "./axes.js";
import { el } from "./dom.js";
import { handsOn } from "./hands.js";
import { numbersOf } from "./lazy.js";
import { legendOf, levelOf, painted, palette, scaleOf } from "./ramp.js";
import { PROBES, tilesOf } from "./tiles.js";

const LARGEST = 72; // pixels of a cell
const LEAST = 16; // pixels of a cell along the shorter side of a matrix that is longer the other way by more than …
const LONG = 4;
const BESIDE = 28; // pixels of a cell that one goes to
const EDGE = 26; // pixels above the map, without tokens
const PATIENCE = 150; // milliseconds after which a cell is told without its weight, which is still to come
const FEW = 64; // keys up to which colours follow the weight itself

const clamped = (x, low, high) => Math.min(Math.max(x, low), high);
export const counted = (n) => n.toLocaleString("en-GB");

// size: [rows, columns]. tokens name the keys, queries the rows; either may be null. overview is a record of the library's
// means, or null. view is { row, column, zoom, query, key }, any of them left out or null; `onView(view)` is told when it
// changes, `onCell(i, j, { weight, hidden })` which cell is pointed at (with null where its weight takes a while). What comes
// back: the node, go(row, column) to a cell, show(view), setHead(head, overview), and `ready`, a promise of the first picture.
export function mapOf({ matrix, head = 0, size, tokens, queries, overview = null, view = {}, onCell, onView }) {
  const [rows, columns] = size;
  const canvas = el("canvas", { class: "map", tabindex: "0", role: "application", "aria-describedby": "drawn",
    "aria-label": `Map of ${counted(rows)} queries down and ${counted(columns)} keys across. `
      + "Arrow keys choose a cell, plus and minus zoom, Home shows the whole." });
  const box = el("div", { class: "map-box" }, canvas);
  const drawn = el("p", { class: "drawn", id: "drawn", role: "status" });
  const zoomed = el("span", { class: "zoomed" });
  const legend = el("span");
  const at = { row: rows / 2, column: columns / 2, zoom: 0 }; // the centre, and pixels per weight
  const cell = { query: null, key: null };
  const tiles = tilesOf(matrix, size, draw, fail);
  let scale = null, colours = null, levels = null, whole = null, frame = null, asking = null, failure = "";

  // -- Where things are --

  // Pixels of a cell and of the margins, for a zoom. Cells are square, but for a matrix many times longer than wide.
  function roomAt(zoom) {
    const width = canvas.clientWidth, height = canvas.clientHeight, narrow = width < 480;
    const left = queries ? (narrow ? 72 : 104) : narrow ? 56 : 72;
    const [fitAcross, fitDown] = [(width - left) / columns, (height - EDGE) / rows];
    const across = fitAcross > LONG * fitDown ? Math.max(zoom, Math.min(fitAcross, LEAST)) : zoom;
    const top = tokens && across >= LABELS_FROM ? (narrow ? 72 : 96) : EDGE;
    const down = fitDown > LONG * fitAcross ? Math.max(zoom, Math.min((height - top) / rows, LEAST)) : zoom;
    return { width, height, left, top, across, down };
  }

  function smallest() {
    const { width, height, left } = roomAt(0);
    const fit = Math.min((width - left) / columns, (height - EDGE) / rows, LARGEST);
    return fit < LABELS_FROM ? fit : Math.min(fit, (height - roomAt(fit).top) / rows);
  }
  const isWhole = () => at.zoom <= smallest() * 1.001;

  // … and the first row and column in view, and how many of each. What is smaller than its room stands at its beginning.
  function layout() {
    const room = roomAt(at.zoom);
    const wide = Math.min((room.width - room.left) / room.across, columns);
    const high = Math.min((room.height - room.top) / room.down, rows);
    const first = clamped(at.column - wide / 2, 0, columns - wide), upper = clamped(at.row - high / 2, 0, rows - high);
    return { ...room, wide, high, first, upper };
  }

  // How many weights a pixel stands for, along a side.
  const step = (pixels) => (pixels >= 1 ? 1 : 2 ** Math.ceil(-Math.log2(pixels)));

  function under(x, y, does) {
    const { left, top, across, down, first, upper } = layout();
    const j = Math.floor(first + (x - left) / across), i = Math.floor(upper + (y - top) / down);
    if (x >= left && y >= top && i < rows && j < columns) does(i, j);
  }

  function resize() {
    const width = box.clientWidth, cap = Math.max(280, Math.min(width, 0.74 * innerHeight));
    const fitting = (width - roomAt(0).left) / columns;
    const margin = tokens && fitting >= LABELS_FROM ? 96 : EDGE;
    const high = margin + rows * clamped(fitting, Math.min(LEAST, (cap - EDGE) / rows), LARGEST);
    canvas.style.height = `${Math.round(clamped(high, Math.min(cap, 150), cap))}px`;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    settle(false);
  }

  // -- Moving --

  function settle(tell = true) {
    at.zoom = clamped(at.zoom, smallest(), LARGEST);
    const { wide, high, first, upper } = layout();
    Object.assign(at, { row: upper + high / 2, column: first + wide / 2 });
    canvas.style.touchAction = isWhole() ? "pan-y" : "none";
    if (tell) onView?.(kept());
    draw();
  }

  function kept() {
    const [row, column] = [at.row, at.column].map((x) => (isWhole() ? null : Number(x.toFixed(2))));
    return { row, column, zoom: isWhole() ? null : Number(at.zoom.toPrecision(4)), ...cell };
  }

  // The place under (x, y) stays where it is.
  function zoomBy(factor, x, y) {
    const before = layout();
    const column = before.first + (x - before.left) / before.across, row = before.upper + (y - before.top) / before.down;
    at.zoom = clamped(at.zoom * factor, smallest(), LARGEST);
    const after = roomAt(at.zoom);
    at.column = column + ((after.width + after.left) / 2 - x) / after.across;
    at.row = row + ((after.height + after.top) / 2 - y) / after.down;
    settle();
  }

  // … or the chosen cell, or the middle.
  function zoomHere(factor) {
    const { left, top, across, down, first, upper, wide, high } = layout(), { query, key } = cell;
    const inside = query !== null && key >= first && key < first + wide && query >= upper && query < upper + high;
    const [i, j] = inside ? [query + 0.5, key + 0.5] : [upper + high / 2, first + wide / 2];
    zoomBy(factor, left + (j - first) * across, top + (i - upper) * down);
  }

  function move(x, y) {
    const { across, down } = layout();
    at.column += x / across;
    at.row += y / down;
    settle();
  }

  // -- The cell pointed at --

  async function point(i, j, keeps) {
    if (i === cell.query && j === cell.key && !keeps) return;
    Object.assign(cell, { query: i, key: j });
    if (keeps) onView?.(kept());
    draw();
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking, slow = setTimeout(() => signal.aborted || onCell?.(i, j, null), PATIENCE);
    const answer = await matrix.cell(head, i, j, { signal }).catch(fail);
    clearTimeout(slow);
    if (answer && !signal.aborted) onCell?.(i, j, answer);
  }

  // Choose a cell, and follow it where it leaves the view.
  function choose(i, j) {
    const row = clamped(i, 0, rows - 1), column = clamped(j, 0, columns - 1), { first, upper, wide, high } = layout();
    if (column < first || column + 1 > first + wide) at.column = column + 0.5;
    if (row < upper || row + 1 > upper + high) at.row = row + 0.5;
    settle(false);
    return point(row, column, true);
  }

  function go(row, column) {
    Object.assign(at, { row: row + 0.5, column: column + 0.5, zoom: Math.max(at.zoom, BESIDE) });
    settle(false);
    return point(row, column, true);
  }

  // -- Drawing --

  function draw() {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      if (canvas.clientWidth) paint();
    });
  }

  function paint() {
    const where = layout(), { left, top, across, down, first, upper, wide, high } = where;
    const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
    context.clearRect(0, 0, where.width, where.height);
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    context.rect(left, top, wide * across, high * down);
    context.clip();
    if (levels) {
      whole ??= painted(overviewLevels(), overview.size[1], colours);
      context.drawImage(whole, left - first * across, top - upper * down, columns * across, rows * down);
    }
    const a = step(down), b = step(across), single = a * b === 1;
    const fine = !overview || single || a < overview.block[0] || b < overview.block[1];
    const missing = fine ? tiles.paint(context, where, a, b) : Number(!levels);
    if (!fine) tiles.drop();
    if (single) cellTexts(context, style, where, tiles.weightAt, scale);
    mark(context, style, where);
    context.restore();
    axes(context, style, where, { queries, tokens });
    say(fine, a, b, missing, where);
  }

  function overviewLevels() {
    const ratio = Math.log(overview.top / overview.floor) / 253, table = new Uint8Array(256);
    for (let n = 1; n < 256; n++) table[n] = levelOf(scale, n === 1 ? 0 : overview.floor * Math.exp(ratio * (n - 2)));
    return levels.map((n) => table[n]);
  }

  function mark(context, style, { left, top, across, down, first, upper, wide, high }) {
    if (cell.query === null) return;
    const x = left + (cell.key - first) * across, y = top + (cell.query - upper) * down;
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--mark");
    context.globalAlpha = 0.55; // a cell too small to be found has lines that lead to it
    if (across < 8) context.fillRect(x + across / 2 - 0.5, top, 1, high * down);
    if (down < 8) context.fillRect(left, y + down / 2 - 0.5, wide * across, 1);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    const room = Math.max(0, (9 - Math.min(across, down)) / 2);
    context.strokeRect(x - room, y - room, across + 2 * room, down + 2 * room);
  }

  // What a pixel is, in words; and what is in view.
  function say(fine, a, b, missing, { first, upper, wide, high }) {
    const text = failure || (missing ? "Working out the weights of this view …" : told(fine, a, b));
    if (drawn.textContent !== text) drawn.textContent = text;
    box.setAttribute("data-missing", `${missing}`);
    const range = (from, length) => `${counted(Math.floor(from))} to ${counted(Math.ceil(from + length) - 1)}`;
    zoomed.textContent = `queries ${range(upper, high)}, keys ${range(first, wide)}`;
  }

  function told(fine, a, b) {
    const sides = fine ? [a, b] : overview.block, [high, wide] = sides.map(Math.ceil);
    const upTo = sides.every(Number.isInteger) ? "" : "up to "; // blocks differ by one where they do not fit evenly
    const block = `${upTo}${counted(high)} × ${counted(wide)} weights`;
    if (high * wide === 1) return "Every weight of this view has a cell of its own.";
    if (!fine && overview.taken) {
      return `Each point is a mean, made by the library: over ${overview.taken} of ${upTo || "each "}${counted(high)} queries, `
        + `drawn by lot, and all of ${upTo}${counted(wide)} keys.`;
    }
    if (!fine) return `Each point is the mean of ${block}, made by the library.`;
    if (a <= PROBES && b <= PROBES) return `Each point is the mean of ${block}, all of them worked out here.`;
    return `A sample: each point is the mean of ${Math.min(a, PROBES) * Math.min(b, PROBES)} weights drawn by lot from `
      + `${block}; the others were not looked at.`;
  }

  function fail(error) {
    failure = `The numbers of this page could not be worked out: ${error.message}`;
    draw();
    return null;
  }

  // -- Hands and keys --

  handsOn(canvas, {
    hover: (x, y) => under(x, y, (i, j) => point(i, j, false)),
    pick: (x, y) => under(x, y, (i, j) => point(i, j, true)),
    move,
    zoom: zoomBy,
    whole: isWhole,
  });

  canvas.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const where = layout(), far = event.shiftKey ? 16 : 1, page = Math.max(1, Math.floor(where.high / 2));
    const i = cell.query ?? Math.floor(at.row), j = cell.key ?? Math.floor(at.column);
    const a = step(where.down) * far, b = step(where.across) * far;
    const to = {
      ArrowUp: [i - a, j], ArrowDown: [i + a, j], ArrowLeft: [i, j - b], ArrowRight: [i, j + b],
      PageUp: [i - page, j], PageDown: [i + page, j],
    }[event.key];
    const factor = { "+": 2, "=": 2, "-": 0.5, Home: 0 }[event.key];
    if (!to && factor === undefined) return;
    event.preventDefault();
    if (to) choose(...to);
    else zoomHere(factor);
  });

  // -- The whole component --

  const button = (text, label, factor) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: () => zoomHere(factor) }, text);
  const byLog = el("input", { type: "checkbox", onchange: (event) => recolour(event.target.checked) });
  const node = el("div", { class: "map-part" },
    el("div", { class: "map-tools" }, button("+", "Zoom in", 2), button("−", "Zoom out", 0.5),
      button("Whole", "Show the whole map", 0), zoomed),
    box,
    drawn,
    el("div", { class: "map-below" }, el("span", { class: "map-legend" }, "weight", legend),
      el("span", { class: "map-legend" }, el("span", { class: "swatch", "aria-hidden": "true" }), "hidden by the mask"),
      el("label", { class: "switch" }, byLog, "logarithmic colours")));

  function recolour(log) {
    byLog.checked = log;
    const single = overview && overview.block[0] * overview.block[1] === 1;
    scale = scaleOf(columns, single ? overview.top : 1, log);
    colours = palette();
    legend.replaceChildren(legendOf(scale));
    tiles.recolour(scale, colours);
    whole = null;
    draw();
  }

  async function setHead(number, picture) {
    [head, overview, levels] = [number, picture, null];
    tiles.setHead(head);
    recolour(scale ? scale.log : columns > FEW);
    const got = picture && (await numbersOf(picture.levels).catch(fail));
    if (overview !== picture || head !== number) return;
    levels = got;
    draw();
    if (cell.query !== null) point(cell.query, cell.key, true);
  }

  function show({ row = null, column = null, zoom = null, query = null, key = null }) {
    Object.assign(at, { row: row ?? at.row, column: column ?? at.column, zoom: zoom ?? at.zoom });
    settle(false);
    if (query !== null && key !== null) point(query, key, true);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => recolour(scale.log));
  let begun = false;
  new ResizeObserver(() => {
    resize();
    if (!begun) show(view); // sizes are known once the node is in the page
    begun = true;
  }).observe(box);
  return { node, go, show, setHead, ready: setHead(head, overview) };
}
