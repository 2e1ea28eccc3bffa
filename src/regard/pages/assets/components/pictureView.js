// A picture with the map of a head over it: a patch is chosen by a click, a tap or the keyboard.
import { colorLevel, paintLevels } from "./colorScale.js";
import { el, viewHeight } from "./dom.js";
import { formatCount } from "./format.js";

const MAX_HEIGHT = 0.72; // of the window
const SHARP = 4; // times that a picture is enlarged and still smoothed
const MIN_DOT = 7; // pixels of a patch in which a dot is drawn

// The token of a patch, as `regard.images.PatchGrid.positions` has it.
export function patchPosition({ rows, columns, before, block }, row, column) {
  const across = columns / block, down = Math.floor(row / block), right = Math.floor(column / block);
  return before + (down * across + right) * block * block + (row % block) * block + (column % block);
}

// The patch of a token, or null if it is none of this grid.
export function patchAt({ rows, columns, before, block }, position) {
  const n = position - before, across = columns / block;
  if (n < 0 || n >= rows * columns) return null;
  const number = Math.floor(n / (block * block)), within = n % (block * block);
  return {
    row: Math.floor(number / across) * block + Math.floor(within / block),
    column: (number % across) * block + (within % block),
  };
}

// The levels of a map, row after row.
export function mapLevels(grid, weights, scale) {
  const levels = new Uint8Array(grid.rows * grid.columns);
  for (let row = 0, n = 0; row < grid.rows; row++) {
    for (let column = 0; column < grid.columns; column++, n++) levels[n] = colorLevel(scale, weights[patchPosition(grid, row, column)]);
  }
  return levels;
}

export function paintOverlay(context, picture, map, opacity, x, y, width, height) {
  context.imageSmoothingEnabled = width < SHARP * picture.width;
  context.globalAlpha = 1;
  context.drawImage(picture, x, y, width, height);
  if (!map) return;
  context.imageSmoothingEnabled = false;
  context.globalAlpha = opacity;
  context.drawImage(map, x, y, width, height);
  context.globalAlpha = 1;
}

// `onPoint(patch)` is called with the patch under the pointer or the cursor, null without one; `onChoose(patch)` if it is chosen.
export function createPictureView({ picture, name, onPoint, onChoose }) {
  const canvas = el("canvas", { class: "picture", tabindex: "0", role: "application", "aria-describedby": "patch-status" });
  const caption = el("figcaption", { class: "soft" }, el("bdi", {}, name));
  const node = el("figure", {}, canvas, caption);
  let view = null, cursor = null, frame = 0;

  const sizeOf = () => [canvas.clientWidth, canvas.clientHeight];

  function resize() {
    const aspect = picture.width / picture.height;
    canvas.style.aspectRatio = `${picture.width} / ${picture.height}`;
    canvas.style.width = `min(100%, ${Math.round(MAX_HEIGHT * viewHeight() * aspect)}px)`;
    const ratio = devicePixelRatio || 1, [width, height] = sizeOf();
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
  }

  function boxOf({ row, column }) {
    const [width, height] = sizeOf(), { rows, columns } = view.grid;
    return [(width * column) / columns, (height * row) / rows, width / columns, height / rows];
  }

  function outline(context, patch, color, dashes) {
    const [x, y, width, height] = boxOf(patch);
    for (const [style, line, dash] of [["#000000", 4, []], [color, 2, dashes]]) {
      context.strokeStyle = style;
      context.lineWidth = line;
      context.setLineDash(dash);
      context.strokeRect(x, y, width, height);
    }
    context.setLineDash([]);
  }

  function paint() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => {
      const context = canvas.getContext("2d"), [width, height] = sizeOf();
      if (!view || !width) return;
      paintOverlay(context, view.isGrey ? picture.grey : picture.colour, view.map, view.opacity, 0, 0, width, height);
      const [, , wide, high] = boxOf({ row: 0, column: 0 });
      if (Math.min(wide, high) >= MIN_DOT) view.stored.forEach((patch) => dot(context, patch));
      if (view.query) outline(context, view.query, "#ffffff", []);
      if (cursor) outline(context, cursor, "#5ce1ff", [4, 3]);
    });
  }

  // Patches whose maps are stored, if not all are.
  function dot(context, patch) {
    const [x, y, wide, high] = boxOf(patch);
    context.beginPath();
    context.arc(x + wide / 2, y + high / 2, 2.5, 0, 7);
    context.fillStyle = "#ffffff";
    context.fill();
    context.strokeStyle = "#000000";
    context.lineWidth = 1;
    context.stroke();
  }

  function patchUnder({ offsetX, offsetY }) {
    const [width, height] = sizeOf(), { rows, columns } = view.grid;
    const clamp = (n, last) => Math.min(Math.max(n, 0), last);
    return { row: clamp(Math.floor((offsetY / height) * rows), rows - 1), column: clamp(Math.floor((offsetX / width) * columns), columns - 1) };
  }

  function point(patch) {
    if (cursor?.row === patch?.row && cursor?.column === patch?.column) return;
    cursor = patch;
    paint();
    onPoint(patch);
  }

  canvas.addEventListener("pointermove", (event) => point(patchUnder(event)));
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && document.activeElement !== canvas && point(null));
  canvas.addEventListener("click", (event) => {
    const patch = patchUnder(event);
    point(patch);
    onChoose(patch);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { rows, columns } = view.grid, at = cursor ?? view.query ?? { row: 0, column: 0 };
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (event.key === "Enter" || event.key === " ") onChoose(at);
    else if (event.key === "Home") point({ row: 0, column: 0 });
    else if (event.key === "End") point({ row: rows - 1, column: columns - 1 });
    else if (steps[event.key]) {
      const [down, right] = cursor ? steps[event.key] : [0, 0]; // the first key shows the cursor
      point({ row: Math.min(Math.max(at.row + down, 0), rows - 1), column: Math.min(Math.max(at.column + right, 0), columns - 1) });
    } else return;
    event.preventDefault();
  });
  new ResizeObserver(resize).observe(node);
  addEventListener("resize", resize);

  // view: { grid, weights (or null), scale, colors, opacity, isGrey, query (a patch, or null), stored (patches), label }
  function show(next) {
    const isNew = !view || view.grid !== next.grid;
    view = { ...next, map: next.weights ? paintLevels(mapLevels(next.grid, next.weights, next.scale), next.grid.columns, next.colors) : null };
    if (isNew) cursor = null;
    canvas.setAttribute("aria-label", `${name}, ${formatCount(view.grid.rows)} × ${formatCount(view.grid.columns)} patches. ${view.label} `
      + "Arrow keys move to a patch, Enter chooses it.");
    node.hidden = false;
    if (!canvas.style.width) resize();
    paint();
  }

  return { node, show, hide: () => (node.hidden = true), cursor: () => cursor };
}
