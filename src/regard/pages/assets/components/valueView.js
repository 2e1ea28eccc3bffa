// Recorded values: a text, the entries of an array, or named parts.
import { el, tokenElement } from "./dom.js";
import { formatNumber } from "./format.js";

const NOT_FINITE = ["Infinity", "-Infinity", "NaN"]; // JSON has no literals for them

function formatEntry(x) {
  return typeof x === "number" || NOT_FINITE.includes(x) ? formatNumber(Number(x)) : x;
}

// "float64 5 × 5": type and shape.
export function describeType(value) {
  return value.shape ? `${value.type} ${value.shape.join(" × ")}` : value.type;
}

// `names` label the rows of an array with as many rows, and its columns if it has as many.
function arrayElement(value, before, names) {
  const comparable = before && before.cells && before.shape.join() === value.shape.join();
  const changed = (i, j) => comparable && before.cells[i][j] !== value.cells[i][j];
  const [hasRowNames, hasColumnNames] = [0, 1].map((axis) => value.shape.length === 2 && names?.length === value.shape[axis]);
  const label = (i, scope) => el("th", { scope, class: "entry" }, tokenElement(names[i]));
  const row = (cells, i) => el("tr", {}, hasRowNames ? label(i, "row") : [],
    cells.map((x, j) => el("td", { class: changed(i, j) ? "entry new" : "entry" }, formatEntry(x))));
  const head = hasRowNames && hasColumnNames ? el("thead", {}, el("tr", {}, el("td"), names.map((_, j) => label(j, "col")))) : [];
  const table = el("table", { class: "matrix" }, head, el("tbody", {}, value.cells.map(row)));
  const leading = value.shape.length - 2;
  return leading > 0 ? [el("p", { class: "kind" }, `the first of ${value.shape.slice(0, leading).join(" × ")}`), table] : table;
}

// The value itself. Entries that differ from `before` are highlighted, if both have the same shape; `names` label the rows
// and columns of arrays that have as many.
export function valueElement(value, before = null, names = null) {
  if (value.cells) return value.cells.length ? arrayElement(value, before, names) : el("span", { class: "text" }, "empty");
  if (!value.parts) return el("span", { class: "text" }, tokenElement(String(formatEntry(value.text))));
  const old = new Map(before && before.parts ? before.parts : []);
  const parts = value.parts.map(([name, part]) => {
    const isNew = old.has(name) && JSON.stringify(old.get(name)) !== JSON.stringify(part);
    return el("div", { class: isNew && !part.cells ? "part new" : "part" }, el("dt", {}, tokenElement(name)),
      el("dd", {}, valueElement(part, old.get(name), names)));
  });
  const rest = value.left_out ? el("p", { class: "kind" }, `and ${value.left_out} more`) : [];
  return [el("dl", { class: "parts" }, parts), rest].flat();
}

// A short text for a screen reader.
export function describeValue(value) {
  return value.cells || value.parts ? describeType(value) : String(formatEntry(value.text));
}
