// A matrix of numbers in which a cell can be selected and, if it is an input, changed: type, or press Enter, or click the
// selected cell. Arrow keys move; the matrix is one tab stop.
import { cellFormat, parseCell } from "./cellNumber.js";
import { el, tokenElement } from "./dom.js";
import { createPalette, paletteColor, textColor } from "./colorScale.js";
import { formatNumber } from "./format.js";

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -Infinity], End: [0, Infinity] };

function shadeCell(cell, colors, share) {
  const color = paletteColor(colors, share);
  cell.style.setProperty("--shade", `rgb(${color})`);
  cell.style.setProperty("--on-shade", textColor(color));
}

// `rows` and `columns` are names, or null. `onSelect(i, j)` is called when a cell gets the focus or is clicked, and
// `onEdit(i, j, number)` after a change; without it the cells cannot be changed.
export function createNumberGrid({ id, symbol, meaning, rows, columns, shape: [height, width], onSelect, onEdit = null }) {
  let roving = [0, 0], editor = null, format = cellFormat([]);
  const header = (names, i, scope) =>
    el("th", { scope, class: names ? "" : "unnamed" }, names ? tokenElement(names[i]) : `${i}`);
  const cells = Array.from({ length: height }, (_, i) => Array.from({ length: width }, (_, j) => {
    const cell = el("td", { tabindex: i + j === 0 ? "0" : "-1" });
    cell.addEventListener("focus", () => focusCell(i, j));
    cell.addEventListener("click", () => {
      if (cell.classList.contains("selected") && onEdit) startEdit(i, j);
      else cell.focus();
      onSelect(i, j);
    });
    return cell;
  }));
  const top = el("tr", {}, el("td", { class: "corner" }), cells[0].map((_, j) => header(columns, j, "col")));
  const body = cells.map((row, i) => el("tr", {}, header(rows, i, "row"), row));
  const table = el("table", { id, class: `grid ${onEdit ? "editable" : "computed"}`, role: "grid", "aria-labelledby": `${id}-name`, "aria-readonly": onEdit ? "false" : "true" },
    el("thead", {}, top), el("tbody", {}, body));
  // Not a caption: a long one would widen the table.
  const node = el("div", { class: "grid-box" }, el("p", { class: "grid-name", id: `${id}-name` }, el("b", {}, symbol), " ", el("span", {}, meaning)), table);

  function focusCell(i, j) {
    const [a, b] = roving;
    if (a === i && b === j) return;
    cells[a][b].tabIndex = -1;
    cells[i][j].tabIndex = 0;
    roving = [i, j];
  }

  function startEdit(i, j, first = null) {
    if (editor) return;
    const cell = cells[i][j];
    const input = el("input", { type: "text", inputmode: "text", autocomplete: "off", "aria-label": `${symbol}, row ${i}, column ${j}` });
    const before = cell.dataset.value ?? "";
    input.value = first ?? (before === "" ? "" : formatNumber(Number(before)));
    editor = input;
    cell.replaceChildren(input);
    input.focus();
    if (first === null) input.select();
    // End once: a blur follows when the input is removed.
    const finish = (isKept, move) => {
      if (editor !== input) return;
      editor = null;
      const number = isKept ? parseCell(input.value) : null;
      input.remove();
      cell.textContent = before === "" ? "" : format(Number(before));
      if (number !== null && number !== Number(before)) onEdit(i, j, number);
      if (move) select(i + move[0], j + move[1]);
    };
    input.addEventListener("blur", () => finish(true, null));
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      const move = { Enter: [0, 0], Escape: [0, 0], ArrowUp: [-1, 0], ArrowDown: [1, 0], Tab: [0, event.shiftKey ? -1 : 1] }[event.key];
      if (!move) return;
      const leaves = event.key === "Tab" && (j + move[1] < 0 || j + move[1] >= width);
      if (!leaves) event.preventDefault();
      finish(event.key !== "Escape", leaves ? null : move);
    });
  }

  function select(i, j) {
    const at = [Math.min(Math.max(i, 0), height - 1), Math.min(Math.max(j, 0), width - 1)];
    cells[at[0]][at[1]].focus();
    onSelect(...at);
  }

  table.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || editor) return;
    const [i, j] = roving, move = MOVES[event.key];
    if (move) {
      event.preventDefault();
      event.stopPropagation();
      select(i + move[0], j + move[1]);
    } else if (event.key === "Enter" || (onEdit && event.key === "F2")) {
      event.preventDefault();
      onSelect(i, j);
      if (onEdit) startEdit(i, j);
    } else if (onEdit && /^[-−\d.,]$/.test(event.key)) {
      event.preventDefault();
      onSelect(i, j);
      startEdit(i, j, event.key);
    }
  });

  // `value(i, j)` is a number, or null if it is not known yet; `kind(i, j)` its classes, `share(i, j)` 0 … 1 its colour if
  // there is one.
  function draw(value, kind, share = null) {
    const colors = share && createPalette();
    format = cellFormat(cells.flatMap((row, i) => row.map((_, j) => value(i, j))).filter((x) => x !== null));
    cells.forEach((row, i) => row.forEach((cell, j) => {
      const x = value(i, j);
      const text = x === null ? "·" : format(x);
      cell.dataset.value = x === null ? "" : String(x);
      if (!(editor && cell.contains(editor)) && cell.textContent !== text) cell.textContent = text;
      cell.className = `${x === null ? "unknown " : x === -Infinity ? "masked-key " : ""}${kind(i, j)}`;
      cell.setAttribute("aria-selected", String(cell.classList.contains("selected")));
      if (share) shadeCell(cell, colors, x === null ? 0 : Math.min(share(i, j) || 0, 1));
    }));
  }

  return { node, cells, draw, select };
}

// -- Vectors below each other, too long for a line --

// Named rows of numbers, in tables of at most `fold` columns: { node, cells }, where cells[row][column] is a cell. `names` are those
// of the columns, or null.
export function createNumberRows({ id, rows, length, fold, names = null }) {
  const cells = rows.map(() => Array.from({ length }, () => el("td")));
  const starts = Array.from({ length: Math.ceil(length / fold) }, (_, n) => n * fold);
  const node = el("div", { id, class: "folded" }, starts.map((start) => {
    const columns = Array.from({ length: Math.min(fold, length - start) }, (_, n) => start + n);
    return el("table", { class: "grid" },
      el("thead", {}, el("tr", {}, el("td", {}), columns.map((k) => el("th", { scope: "col" }, names ? tokenElement(names[k]) : `${k}`)))),
      el("tbody", {}, rows.map((name, i) => el("tr", {}, el("th", { scope: "row" }, name), columns.map((k) => cells[i][k])))));
  }));
  return { node, cells };
}

// Write numbers into such rows, each row in its own format; those of the row `shaded` are coloured by their size.
export function fillRows(cells, rows, shaded = -1) {
  const colors = createPalette();
  cells.forEach((row, i) => {
    const numbers = Array.from(rows[i]), format = cellFormat(numbers), most = Math.max(...numbers.map(Math.abs)) || 1;
    row.forEach((cell, k) => {
      cell.dataset.value = `${numbers[k]}`;
      cell.textContent = format(numbers[k]);
      if (i === shaded) shadeCell(cell, colors, Math.abs(numbers[k]) / most);
    });
  });
}
