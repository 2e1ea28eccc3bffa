// A matrix as a picture of coloured cells, with names beside it and numbers in it if there is room. The pointer or the arrow
// keys select a cell.
import { textColor } from "./colorScale.js";
import { el } from "./dom.js";

const MIN_LABEL_SIZE = 14; // pixels of a cell that leave room for its name
const MIN_NUMBER_SIZE = 52; // pixels of a cell that leave room for its number
const MAX_NAMED_ROWS = 64;
const MAX_FLAT_NAMES = 8; // more columns have upright names
const ROWS_PER_PAGE = 16;
export const LABEL_WIDTH = 112;
export const MAX_CELL = 96;

// Shorten a text to a width in pixels.
function fitText(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

export function maxTextWidth(names) {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.font = `14px ${getComputedStyle(document.body).fontFamily}`;
  return Math.ceil(Math.max(...names.map((name) => context.measureText(name).width)));
}

// `rows` and `columns` are names; `columns` may be null. `paintCell(i, j)` gives { color: [r, g, b], text },
// where text is null for a masked cell. `at` is the selected
// { row, column }, which the page shares between pictures; column is null if only the row is selected here.
// `onSelect(row, column, isChosen)` is called with a cell within the matrix; it is chosen by a click, a tap or a key.
export function createHeatPicture({ id, label, rows, columns, shape: [rowCount, columnCount], paintCell, at, onSelect }) {
  const canvas = el("canvas", { id, tabindex: "0", role: "application", "aria-label": label, "aria-describedby": "cell" });
  let image = null, layout = { width: 1, height: 1, left: 0, top: 0, hasLabels: false };

  // One pixel for each cell, rendered once and then scaled.
  function renderPixels() {
    const pixels = new ImageData(columnCount, rowCount);
    for (let i = 0, p = 0; i < rowCount; i++) {
      for (let j = 0; j < columnCount; j++, p += 4) {
        pixels.data.set(paintCell(i, j).color, p);
        pixels.data[p + 3] = 255;
      }
    }
    const small = el("canvas", { width: columnCount, height: rowCount });
    small.getContext("2d").putImageData(pixels, 0, 0);
    return small;
  }

  // Choose the size of the cells for a room in pixels, at most `maxHeight` high. `fixed` are { cell, top } of the picture
  // beside it.
  function resize(room, { fixed = null, maxHeight = MAX_CELL } = {}) {
    const hasLabels = (room - LABEL_WIDTH) / columnCount >= MIN_LABEL_SIZE && rowCount <= MAX_NAMED_ROWS;
    const left = hasLabels && !fixed ? Math.min(LABEL_WIDTH, maxTextWidth(rows) + 12) : 0;
    const flatTop = !columns || columnCount <= MAX_FLAT_NAMES;
    const ownTop = hasLabels ? (flatTop ? 28 : Math.min(LABEL_WIDTH, maxTextWidth(columns) + 12)) : 0;
    const fitting = Math.max(1, Math.min(Math.floor((room - left - 2) / columnCount), MAX_CELL)); // whole pixels, so that all cells have one size
    layout = { width: fitting, height: fixed?.cell ?? Math.min(fitting, maxHeight), left, top: fixed?.top ?? ownTop, hasLabels };
    const ratio = window.devicePixelRatio || 1;
    const width = layout.left + layout.width * columnCount + 2, height = layout.top + layout.height * rowCount + 2;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
    return { cell: layout.height, top: layout.top };
  }

  function drawLabels(context, style) {
    const { width, height, left, top } = layout;
    context.fillStyle = style.getPropertyValue("--soft");
    context.font = `14px ${style.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    if (left) rows.forEach((name, i) => context.fillText(fitText(context, name, left - 12), left - 8, top + (i + 0.5) * height));
    if (!top) return;
    for (let j = 0; j < columnCount; j++) {
      const x = left + (j + 0.5) * width, name = columns ? columns[j] : `${j}`;
      if (!columns || columnCount <= MAX_FLAT_NAMES) {
        context.textAlign = "center";
        context.fillText(fitText(context, name, width - 4), x, top - 12);
        continue;
      }
      context.save();
      context.translate(x, top - 6);
      context.rotate(-Math.PI / 2);
      context.textAlign = "left";
      context.fillText(fitText(context, name, top - 12), 0, 0);
      context.restore();
    }
  }

  function drawNumbers(context, style) {
    const { width, height, left, top } = layout;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${width >= 72 ? 16 : 13}px ${style.fontFamily}`;
    for (let i = 0; i < rowCount; i++) {
      for (let j = 0; j < columnCount; j++) {
        const { text, color } = paintCell(i, j);
        context.fillStyle = text === null ? style.getPropertyValue("--soft") : textColor(color);
        context.fillText(fitText(context, text ?? "masked", width - 4), left + (j + 0.5) * width, top + (i + 0.5) * height);
      }
    }
  }

  function paint() {
    image ??= renderPixels();
    const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const { width, height, left, top, hasLabels } = layout, { row, column } = at();
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, left + 1, top + 1, width * columnCount, height * rowCount);
    if (hasLabels) drawLabels(context, style);
    if (width >= MIN_NUMBER_SIZE && height >= 20) drawNumbers(context, style);
    // Two lines lead to a cell that is too small to be found.
    const x = left + 1 + (column ?? 0) * width, y = top + 1 + row * height, isSmall = width < 8 || height < 8;
    context.fillStyle = context.strokeStyle = style.getPropertyValue("--mark");
    if (isSmall) {
      context.globalAlpha = 0.35;
      context.fillRect(left + 1, y, width * columnCount, height);
      if (column !== null) context.fillRect(x, top + 1, width, height * rowCount);
      context.globalAlpha = 1;
    }
    const margin = isSmall ? 3 : -1;
    context.lineWidth = isSmall || column === null ? 1.5 : 3;
    context.strokeRect(x - margin, y - margin, (column === null ? width * columnCount : width) + 2 * margin, height + 2 * margin);
  }

  function onPointer(event) {
    const isChosen = event.type === "click";
    const { width, height, left, top } = layout;
    const row = Math.floor((event.offsetY - top - 1) / height), column = Math.floor((event.offsetX - left - 1) / width);
    const isInside = row >= 0 && row < rowCount && column >= 0 && column < columnCount;
    if (isInside && (isChosen || row !== at().row || column !== at().column)) onSelect(row, column, isChosen);
  }
  for (const type of ["pointermove", "pointerdown", "click"]) canvas.addEventListener(type, onPointer);
  canvas.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { row, column: selected } = at(), column = selected ?? 0;
    const target = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
      Home: [row, 0],
      End: [row, columnCount - 1],
      PageUp: [row - ROWS_PER_PAGE, column],
      PageDown: [row + ROWS_PER_PAGE, column],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    onSelect(Math.min(Math.max(target[0], 0), rowCount - 1), Math.min(Math.max(target[1], 0), columnCount - 1), true);
  });

  // Paint again after the colours changed.
  function repaint() {
    image = null;
    paint();
  }
  return { canvas, resize, paint, repaint };
}
