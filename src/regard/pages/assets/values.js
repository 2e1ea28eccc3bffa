// Values as they were recorded: a text, the entries of an array, or named parts.
import { el, token } from "./dom.js";
import { number } from "./numbers.js";

const NOT_FINITE = ["Infinity", "-Infinity", "NaN"]; // JSON has no word for them

export function entry(x) {
  return typeof x === "number" || NOT_FINITE.includes(x) ? number(Number(x)) : x;
}

// "float64 5 × 5": what it is and how large.
export function kindOf(value) {
  return value.shape ? `${value.type} ${value.shape.join(" × ")}` : value.type;
}

function matrix(value, before) {
  const comparable = before && before.cells && before.shape.join() === value.shape.join();
  const changed = (i, j) => comparable && before.cells[i][j] !== value.cells[i][j];
  const row = (cells, i) =>
    el("tr", {}, cells.map((x, j) => el("td", { class: changed(i, j) ? "entry new" : "entry" }, entry(x))));
  const table = el("table", { class: "matrix" }, el("tbody", {}, value.cells.map(row)));
  const lead = value.shape.length - 2;
  return lead > 0 ? [el("p", { class: "kind" }, `the first of ${value.shape.slice(0, lead).join(" × ")}`), table] : table;
}

// The value itself; entries that differ from `before`, where that is of the same shape, are marked.
export function shown(value, before = null) {
  if (value.cells) return value.cells.length ? matrix(value, before) : el("span", { class: "text" }, "empty");
  if (!value.parts) return el("span", { class: "text" }, token(String(entry(value.text))));
  const old = new Map(before && before.parts ? before.parts : []);
  const parts = value.parts.map(([name, part]) => {
    const isNew = old.has(name) && JSON.stringify(old.get(name)) !== JSON.stringify(part);
    return el("div", { class: isNew && !part.cells ? "part new" : "part" }, el("dt", {}, token(name)),
      el("dd", {}, shown(part, old.get(name))));
  });
  const rest = value.left_out ? el("p", { class: "kind" }, `and ${value.left_out} more`) : [];
  return [el("dl", { class: "parts" }, parts), rest].flat();
}

// In a few words, for the ear.
export function spoken(value) {
  return value.cells || value.parts ? kindOf(value) : String(entry(value.text));
}
