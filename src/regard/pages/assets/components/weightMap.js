// A zoomable map of weights, from the whole matrix to single cells with tokens and numbers. If a point stands for many weights,
// it shows their maximum, so that no weight is hidden, or their mean; the map says which, and when a mean is that of a sample.
import { loadArray } from "../matrix/matrixClient.js";
import { levelWeights, poolCells, widenLarge } from "../matrix/overview.js";
import { createTileCache, PROBES, TILE_CELLS } from "../matrix/tileCache.js";
import { colorLevel, createPalette, createScale, paintLevels, scaleLegend } from "./colorScale.js";
import { radioGroup } from "./controls.js";
import { el, viewHeight } from "./dom.js";
import { formatCount } from "./format.js";
import { drawAxes, drawCellWeights, drawMarks, MIN_LABEL_SIZE } from "./mapAxes.js";
import { listenToPointers } from "./pointerInput.js";

export const REDUCTIONS = ["max", "mean"]; // what a point may show, the first by default
const NAMES = { max: "maximum", mean: "mean" };
const MAX_EXACT_WEIGHTS = 64; // weights of a point whose maximum the page computes; a larger point shows a whole cell of the overview
const LARGE_WEIGHT = 0.5; // in a picture of maxima drawn wider than its point, if that is smaller than …
const SMALL_POINT = 2; // pixels
const MAX_CELL = 72; // pixels of a cell
const MIN_CELL = 16; // pixels of a cell along the shorter side of a matrix whose sides differ by more than …
const MAX_ASPECT = 4;
const GO_TO_CELL = 28; // pixels of a cell after going to it
const TOP_MARGIN = 26; // pixels above the map, without tokens
const SLOW_ANSWER = 150; // milliseconds after which a cell is shown without its weight
const LINEAR_KEYS = 64; // keys up to which colours are proportional to the weight

const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// size: [rows, columns]. tokens name the keys, queries the rows; either may be null. overview: a record of `encode_overview`, or
// null. view: { row, column, zoom, query, key, reduce }, any of them missing or null. `onView(view)` is called when the view changes,
// `onCell(i, j, { weight, masked })` when a cell is selected, with null while its weight is being computed, and `onOpen(i, j)` when
// it is clicked, or chosen with Enter. Returns the node, goTo(row, column), show(view), setHead(head, overview), setMarks(marks),
// setText(size, tokens, queries) for another text, which setHead draws, and `ready`, a promise of the first picture.
export function createWeightMap({ matrix, head = 0, size, tokens, queries, overview = null, view = {}, onCell, onView, onOpen = null }) {
  let [rows, columns] = size;
  const canvas = el("canvas", { class: "map", tabindex: "0", role: "application", "aria-describedby": "map-status" });
  const labelMap = () => canvas.setAttribute("aria-label", `Map of ${formatCount(rows)} queries down and ${formatCount(columns)} keys across. `
    + `Arrow keys select a cell, ${onOpen ? "Enter shows how its weight was computed, " : ""}plus and minus zoom, Home shows the whole map.`);
  const box = el("div", { class: "map-box" }, canvas);
  const status = el("p", { class: "map-status", id: "map-status", role: "status" });
  const range = el("span", { class: "map-range" });
  const legend = el("span");
  const at = { row: rows / 2, column: columns / 2, zoom: 0 }; // the centre, and pixels per weight
  const cell = { query: null, key: null };
  const createTiles = (newSize) => createTileCache({ matrix, size: newSize, render: renderTile, onChange: draw, onError: fail });
  let tiles = createTiles(size);
  let scale = null, colors = null, levels = null, overviewImage = null, frame = null, cellRequest = null, failure = "";
  let marks = { rows: null, columns: null };
  let overviewScale = 0; // the width in pixels that the overview was painted for
  let reduce = view.reduce ?? REDUCTIONS[0], isWidened = false;

  // -- Layout --

  // Pixels of a cell and of the margins at a zoom. Cells are square, unless one side of the matrix is much longer.
  function marginsAt(zoom) {
    const width = canvas.clientWidth, height = canvas.clientHeight, narrow = width < 480;
    const left = queries ? (narrow ? 72 : 104) : narrow ? 56 : 72;
    const [fitAcross, fitDown] = [(width - left) / columns, (height - TOP_MARGIN) / rows];
    const across = fitAcross > MAX_ASPECT * fitDown ? Math.max(zoom, Math.min(fitAcross, MIN_CELL)) : zoom;
    const top = tokens && across >= MIN_LABEL_SIZE ? (narrow ? 72 : 96) : TOP_MARGIN;
    const down = fitDown > MAX_ASPECT * fitAcross ? Math.max(zoom, Math.min((height - top) / rows, MIN_CELL)) : zoom;
    return { width, height, left, top, across, down };
  }

  // The zoom at which the whole matrix is in view.
  function minZoom() {
    const { width, height, left } = marginsAt(0);
    const fit = Math.min((width - left) / columns, (height - TOP_MARGIN) / rows, MAX_CELL);
    return fit < MIN_LABEL_SIZE ? fit : Math.min(fit, (height - marginsAt(fit).top) / rows);
  }
  const isZoomedOut = () => at.zoom <= minZoom() * 1.001;

  // Margins, the first row and column in view, and the number of both. A map smaller than its box is at its top left.
  function layout() {
    const margins = marginsAt(at.zoom);
    const wide = Math.min((margins.width - margins.left) / margins.across, columns);
    const high = Math.min((margins.height - margins.top) / margins.down, rows);
    const first = clamp(at.column - wide / 2, 0, columns - wide), upper = clamp(at.row - high / 2, 0, rows - high);
    return { ...margins, wide, high, first, upper };
  }

  // The number of weights along a side that a point stands for: a point has at least a pixel of the page and of the screen.
  const stepAt = (pixels) => {
    const size = pixels * Math.min(1, devicePixelRatio || 1);
    return size >= 1 ? 1 : 2 ** Math.ceil(-Math.log2(size));
  };

  // Call `action(i, j)` with the cell at a pixel, if there is one.
  function withCellAt(x, y, action) {
    const { left, top, across, down, first, upper } = layout();
    const j = Math.floor(first + (x - left) / across), i = Math.floor(upper + (y - top) / down);
    if (x >= left && y >= top && i < rows && j < columns) action(i, j);
  }

  function resize() {
    const width = box.clientWidth, cap = Math.max(280, Math.min(width, 0.74 * viewHeight()));
    const fit = (width - marginsAt(0).left) / columns;
    const margin = tokens && fit >= MIN_LABEL_SIZE ? 96 : TOP_MARGIN;
    const high = margin + rows * clamp(fit, Math.min(MIN_CELL, (cap - TOP_MARGIN) / rows), MAX_CELL);
    canvas.style.height = `${Math.round(clamp(high, Math.min(cap, 150), cap))}px`;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    const { across, down } = marginsAt(minZoom());
    choice.hidden = stepAt(across) * stepAt(down) === 1; // every weight has its own point in all views
    updateView(false);
  }

  // -- Moving --

  // Keep the view within the matrix, and draw it.
  function updateView(notify = true) {
    at.zoom = clamp(at.zoom, minZoom(), MAX_CELL);
    const { wide, high, first, upper } = layout();
    Object.assign(at, { row: upper + high / 2, column: first + wide / 2 });
    canvas.style.touchAction = isZoomedOut() ? "pan-y" : "none";
    if (notify) onView?.(currentView());
    draw();
  }

  function currentView() {
    const [row, column] = [at.row, at.column].map((x) => (isZoomedOut() ? null : Number(x.toFixed(2))));
    return { row, column, zoom: isZoomedOut() ? null : Number(at.zoom.toPrecision(4)), ...cell,
      reduce: reduce === REDUCTIONS[0] ? null : reduce };
  }

  // Zoom around the pixel (x, y).
  function zoomBy(factor, x, y) {
    const before = layout();
    const column = before.first + (x - before.left) / before.across, row = before.upper + (y - before.top) / before.down;
    at.zoom = clamp(at.zoom * factor, minZoom(), MAX_CELL);
    const after = marginsAt(at.zoom);
    at.column = column + ((after.width + after.left) / 2 - x) / after.across;
    at.row = row + ((after.height + after.top) / 2 - y) / after.down;
    updateView();
  }

  // Zoom around the selected cell if it is in view, else around the centre.
  function zoomAtCell(factor) {
    const { left, top, across, down, first, upper, wide, high } = layout(), { query, key } = cell;
    const inside = query !== null && key >= first && key < first + wide && query >= upper && query < upper + high;
    const [i, j] = inside ? [query + 0.5, key + 0.5] : [upper + high / 2, first + wide / 2];
    zoomBy(factor, left + (j - first) * across, top + (i - upper) * down);
  }

  function move(x, y) {
    const { across, down } = layout();
    at.column += x / across;
    at.row += y / down;
    updateView();
  }

  // -- The selected cell --

  // `keep`: write the cell to the address.
  async function selectCell(i, j, keep) {
    if (i === cell.query && j === cell.key && !keep) return;
    Object.assign(cell, { query: i, key: j });
    if (keep) onView?.(currentView());
    draw();
    cellRequest?.abort();
    cellRequest = new AbortController();
    const { signal } = cellRequest, slow = setTimeout(() => signal.aborted || onCell?.(i, j, null), SLOW_ANSWER);
    const answer = await matrix.cell(head, i, j, { signal }).catch(fail);
    clearTimeout(slow);
    if (answer && !signal.aborted) onCell?.(i, j, answer);
  }

  // Select a cell, and move the view to it if it is outside.
  function selectAndFollow(i, j) {
    const row = clamp(i, 0, rows - 1), column = clamp(j, 0, columns - 1), { first, upper, wide, high } = layout();
    if (column < first || column + 1 > first + wide) at.column = column + 0.5;
    if (row < upper || row + 1 > upper + high) at.row = row + 0.5;
    updateView(false);
    return selectCell(row, column, true);
  }

  function goTo(row, column) {
    Object.assign(at, { row: row + 0.5, column: column + 0.5, zoom: Math.max(at.zoom, GO_TO_CELL) });
    updateView(false);
    return selectCell(row, column, true);
  }

  // -- Drawing --

  function draw() {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      if (canvas.clientWidth) paint();
    });
  }

  function paint() {
    const place = layout(), { left, top, across, down, first, upper, wide, high } = place;
    const context = canvas.getContext("2d"), style = getComputedStyle(canvas);
    context.clearRect(0, 0, place.width, place.height);
    context.imageSmoothingEnabled = false;
    context.save();
    context.beginPath();
    context.rect(left, top, wide * across, high * down);
    context.clip();
    if (levels) {
      updateOverviewImage(columns * across, rows * down);
      context.drawImage(overviewImage, left - first * across, top - upper * down, columns * across, rows * down);
    }
    const rowStep = stepAt(down), columnStep = stepAt(across), single = rowStep * columnStep === 1;
    const isFiner = single || !overview || rowStep < overview.block[0] || columnStep < overview.block[1];
    const useTiles = isFiner && (!overview || reduce === "mean" || rowStep * columnStep <= MAX_EXACT_WEIGHTS);
    const missing = useTiles ? tiles.paint(context, place, rowStep, columnStep) : Number(!levels);
    if (!useTiles) tiles.abortRequests();
    if (single) drawCellWeights(context, style, place, tiles.weightAt, scale, colors);
    drawSelection(context, style, place);
    context.restore();
    drawAxes(context, style, place, { queries, tokens });
    drawMarks(context, style, place, marks);
    updateStatus(useTiles, rowStep, columnStep, missing, place);
  }

  function renderTile({ weights, width, height }) {
    const square = new Uint8Array(TILE_CELLS * TILE_CELLS);
    for (let i = 0; i < height; i++) {
      for (let j = 0; j < width; j++) square[i * TILE_CELLS + j] = colorLevel(scale, weights[i * width + j]);
    }
    return paintLevels(square, TILE_CELLS, colors);
  }

  // The overview on an area of the page, at most a point for each pixel of the screen.
  function updateOverviewImage(width, height) {
    const ratio = devicePixelRatio || 1, fit = (count, pixels) => clamp(Math.floor(pixels * ratio + 1e-6), 1, count);
    const [pointsDown, pointsAcross] = [fit(overview.size[0], height), fit(overview.size[1], width)];
    if (overviewImage?.height === pointsDown && overviewImage.width === pointsAcross && overviewScale === width) return;
    overviewScale = width;
    const table = levelWeights(overview[shownReduce()]), weights = Float64Array.from(levels, (level) => table[level]);
    let pooled = poolCells(weights, overview.size, pointsDown, pointsAcross, shownReduce());
    isWidened = shownReduce() === "max" && Math.min(width / pointsAcross, height / pointsDown) < SMALL_POINT;
    if (isWidened) pooled = widenLarge(pooled, pointsAcross, LARGE_WEIGHT, Math.max(1, Math.round(ratio)));
    overviewImage = paintLevels(Uint8Array.from(pooled, (weight) => colorLevel(scale, weight)), pointsAcross, colors);
  }

  // A picture of single weights has no means.
  const shownReduce = () => (overview?.[reduce] ? reduce : "max");

  function drawSelection(context, style, { left, top, across, down, first, upper, wide, high }) {
    if (cell.query === null) return;
    const x = left + (cell.key - first) * across, y = top + (cell.query - upper) * down;
    context.strokeStyle = context.fillStyle = style.getPropertyValue("--mark");
    context.globalAlpha = 0.55; // lines lead to a cell that is too small to be found
    if (across < 8) context.fillRect(x + across / 2 - 0.5, top, 1, high * down);
    if (down < 8) context.fillRect(left, y + down / 2 - 0.5, wide * across, 1);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    const margin = Math.max(0, (9 - Math.min(across, down)) / 2);
    context.strokeRect(x - margin, y - margin, across + 2 * margin, down + 2 * margin);
  }

  // Say what a pixel shows, and what is in view.
  function updateStatus(useTiles, rowStep, columnStep, missing, { first, upper, wide, high }) {
    const text = failure || (missing ? "Computing the weights of this view …" : describePixel(useTiles, rowStep, columnStep));
    if (status.textContent !== text) status.textContent = text;
    box.setAttribute("data-missing", `${missing}`);
    const span = (from, length) => `${formatCount(Math.floor(from))} to ${formatCount(Math.ceil(from + length) - 1)}`;
    range.textContent = `queries ${span(upper, high)}, keys ${span(first, wide)}`;
  }

  function describePixel(useTiles, rowStep, columnStep) {
    const points = [overviewImage?.height, overviewImage?.width], cells = points.map((count, n) => overview?.size[n] / count);
    const sides = useTiles ? [rowStep, columnStep] : overview.block.map((length, n) => length * Math.ceil(cells[n]));
    const [high, wide] = sides.map(Math.ceil);
    // Blocks differ if they, or the cells of a point, do not divide evenly.
    const upTo = sides.every(Number.isInteger) && (useTiles || cells.every(Number.isInteger)) ? "" : "up to ";
    const block = `${upTo}${formatCount(high)} × ${formatCount(wide)} weights`;
    if (high * wide === 1) return "Every weight of this view has its own cell.";
    const isExact = reduce === "max" || !useTiles || (rowStep <= PROBES && columnStep <= PROBES);
    const where = useTiles ? "all computed in this page" : "computed when the page was built";
    const overHeads = !useTiles && overview.heads && reduce === "max" ? `the mean over ${overview.heads} heads of ` : "";
    const widened = !useTiles && isWidened ? ` Weights from ${LARGE_WEIGHT} are drawn larger.` : "";
    if (isExact) return `Each point is ${overHeads}the ${NAMES[reduce]} of ${block}, ${where}.${widened}`;
    return `A sample: each point is the mean of ${Math.min(rowStep, PROBES) * Math.min(columnStep, PROBES)} weights chosen at `
      + `random from ${block}.`;
  }

  function fail(error) {
    failure = `The weights could not be computed: ${error.message}`;
    draw();
    return null;
  }

  // -- Pointers and keys --

  listenToPointers(canvas, {
    onHover: (x, y) => withCellAt(x, y, (i, j) => selectCell(i, j, false)),
    onSelect: (x, y) => withCellAt(x, y, (i, j) => {
      selectCell(i, j, true);
      onOpen?.(i, j);
    }),
    onMove: move,
    onZoom: zoomBy,
    isZoomedOut,
  });

  canvas.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const place = layout(), far = event.shiftKey ? 16 : 1, page = Math.max(1, Math.floor(place.high / 2));
    const i = cell.query ?? Math.floor(at.row), j = cell.key ?? Math.floor(at.column);
    const down = stepAt(place.down) * far, across = stepAt(place.across) * far;
    const target = {
      ArrowUp: [i - down, j], ArrowDown: [i + down, j], ArrowLeft: [i, j - across], ArrowRight: [i, j + across],
      PageUp: [i - page, j], PageDown: [i + page, j],
    }[event.key];
    const factor = { "+": 2, "=": 2, "-": 0.5, Home: 0 }[event.key];
    const isOpened = event.key === "Enter" && onOpen && cell.query !== null;
    if (!target && factor === undefined && !isOpened) return;
    event.preventDefault();
    if (isOpened) onOpen(cell.query, cell.key);
    else if (target) selectAndFollow(...target);
    else zoomAtCell(factor);
  });

  // -- The component --

  const button = (text, label, factor) =>
    el("button", { type: "button", "aria-label": label, title: label, onclick: () => zoomAtCell(factor) }, text);
  const choice = radioGroup("points", "Each point shows the", REDUCTIONS.map((name) => NAMES[name]), (n) => {
    setReduce(REDUCTIONS[n]);
    onView?.(currentView());
  });
  const logBox = el("input", { type: "checkbox", onchange: (event) => setColors(event.target.checked) });
  const node = el("div", { class: "map-part" },
    el("div", { class: "map-tools" }, button("+", "Zoom in", 2), button("−", "Zoom out", 0.5),
      button("Whole map", "Show the whole map", 0), range),
    box,
    status,
    el("div", { class: "map-below" }, el("span", { class: "map-legend" }, "weight", legend),
      el("span", { class: "map-legend" }, el("span", { class: "swatch", "aria-hidden": "true" }), "masked"),
      el("label", { class: "switch" }, logBox, "logarithmic colours"), choice));

  function setColors(isLog) {
    logBox.checked = isLog;
    const single = overview && overview.block[0] * overview.block[1] === 1;
    scale = createScale(columns, single ? overview.max.top : 1, isLog);
    colors = createPalette();
    legend.replaceChildren(scaleLegend(scale));
    tiles.rerender();
    overviewImage = null;
    draw();
  }

  async function loadLevels() {
    [levels, overviewImage] = [null, null];
    tiles.reset(head, reduce);
    draw();
    const requested = overview && overview[shownReduce()];
    const loaded = requested && (await (requested.load ? requested.load() : loadArray(requested.levels)).catch(fail));
    if (requested !== (overview && overview[shownReduce()])) return;
    levels = loaded;
    draw();
  }

  function setReduce(newReduce) {
    choice.querySelectorAll("input")[REDUCTIONS.indexOf(newReduce)].checked = true;
    if (newReduce === reduce) return null;
    reduce = newReduce;
    return loadLevels();
  }

  function setText(newSize, newTokens, newQueries) {
    [[rows, columns], tokens, queries, tiles] = [newSize, newTokens, newQueries, createTiles(newSize)];
    Object.assign(at, { row: rows / 2, column: columns / 2, zoom: 0 });
    Object.assign(cell, { query: null, key: null });
    labelMap();
    resize();
  }

  async function setHead(newHead, newOverview) {
    [head, overview] = [newHead, newOverview];
    setColors(scale ? scale.isLog : columns > LINEAR_KEYS);
    await loadLevels();
    if (head === newHead && cell.query !== null) selectCell(cell.query, cell.key, true);
  }

  function show({ row = null, column = null, zoom = null, query = null, key = null, reduce: newReduce = null }) {
    setReduce(newReduce ?? REDUCTIONS[0]);
    Object.assign(at, { row: row ?? at.row, column: column ?? at.column, zoom: zoom ?? at.zoom });
    updateView(false);
    if (query !== null && key !== null) selectCell(query, key, true);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setColors(scale.isLog));
  let shown = false;
  new ResizeObserver(() => {
    resize();
    if (!shown) show(view); // sizes are known once the node is in the page
    shown = true;
  }).observe(box);
  // Mark rows and columns at the edges of the map: { rows, columns }, each a list or null.
  function setMarks(newMarks) {
    marks = newMarks;
    draw();
  }
  labelMap();
  return { node, goTo, show, setHead, setMarks, setText, ready: setHead(head, overview) };
}
