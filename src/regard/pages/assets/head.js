// One head: its map or its lines, the numbers of the row that is pointed at, its measures and what was found.
import { choices } from "./controls.js";
import { el } from "./dom.js";
import { brief, headName } from "./grid.js";
import { linesOf } from "./lines.js";
import { mapOf } from "./map.js";
import { readingOf } from "./reading.js";
import { paintLevels } from "./small.js";

const LINES_UP_TO = 64; // tokens, so that both columns can be read
const LINES_HINT = "Point at a token, or choose one with the arrow keys: here stands its largest weight, with both tokens.";

export function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

export function findingNode(finding, where) {
  return el("div", { class: "finding" },
    el("p", {}, el("span", { class: `flag ${finding.severity}` }, finding.severity), " ", el("b", {}, finding.kind), ". ", finding.what),
    where, finding.evidence ? el("p", { class: "soft" }, finding.evidence) : [], finding.hint ? el("p", {}, finding.hint) : []);
}

// One map serves all heads of a shape, so that what is looked at stays while heads change: its heads are the cells.
function every(cells) {
  const methods = ["cell", "row", "tile", "strongest", "picture"].map((what) =>
    [what, (n, ...args) => cells[n].matrix()[what](cells[n].place, ...args)]);
  return Object.fromEntries(methods);
}

// `changed` is told what is looked at: view, query, key, and where the map is.
export function headView({ cells, texts, back, step, changed }) {
  const title = el("h2", { tabindex: "-1", id: "which" }), module = el("p", { class: "soft module" });
  const stage = el("div", { class: "stage" }), side = el("div"), told = el("div", { class: "told" });
  const move = (by, text, label) => el("button", { type: "button", "aria-label": label, title: label, onclick: () => step(by) }, text);
  const views = choices("view", "View", ["Map", "Lines"], (n) => changed({ view: n ? "lines" : "map" }), true);
  const node = el("section", { id: "head", "aria-labelledby": "which", hidden: true },
    el("div", { class: "headbar" }, el("button", { type: "button", id: "back", onclick: () => back() }, "All heads"),
      move(-1, "‹", "Previous head"), move(1, "›", "Next head"), el("div", { class: "title" }, title, module), views),
    el("div", { class: "beside" }, stage, el("div", {}, side, told)));
  const matrix = every(cells), made = new Map();

  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") back();
  });

  // Map or lines of a shape and its texts, and what is read from them: made once, for the first head that needs them.
  function partOfShape(cell, lines, view) {
    const { shape, first, query_text, key_text } = cell.entry, shift = first ?? 0;
    const name = JSON.stringify([lines, shape, shift, query_text, key_text]);
    if (!made.has(name)) {
      const queries = texts[query_text]?.slice(shift, shift + shape[0]) ?? null, tokens = texts[key_text]?.slice(0, shape[1]) ?? null;
      const head = cells.indexOf(cell);
      const reading = readingOf({ matrix, head, tokens, queries, go: (i, j) => part.go(i, j), ...(lines && { hint: LINES_HINT }) });
      const onCell = (query, key, answer) => {
        reading.tell(query, key, answer);
        changed({ query, key });
      };
      const part = (lines ? linesOf : mapOf)({ matrix, head, size: shape, tokens, queries, overview: cell.overview, view, onCell, onView: changed });
      made.set(name, { part, reading, head, fresh: true });
    }
    return made.get(name);
  }

  function measuresOf(cell) {
    return el("dl", { class: "numbers" }, Object.entries(cell.measures).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, brief(value)))));
  }

  function closed(cell) {
    const [height, width] = cell.map.size;
    const canvas = el("canvas", { class: "still", width, height, role: "img", "aria-label": "The small map of this head" });
    cell.map.levels().then((levels) => paintLevels(canvas, levels));
    const { why, module: name } = cell.entry, less = el("code", {}, `seen.page(tokens, layers="${name}", heads=[${cell.head}])`);
    const said = why ? [`its weights cannot be worked out in a page. ${why}`]
      : ["not its weights: with them it would be larger than was asked for. They come with ", less];
    return el("div", {}, el("p", { id: "closed" }, "This page has the map of this head and its measures, but ", said), canvas);
  }

  // Where a text is short, lines too; the chosen view stays while heads change.
  function show(cell, looked, { focus = false, go = false } = {}) {
    const short = Math.max(...cell.entry.shape) <= LINES_UP_TO && cell.opens, lines = short && looked.view === "lines";
    title.textContent = capital(headName(cell));
    module.textContent = cell.entry.module;
    told.replaceChildren(el("h3", {}, "This head"), measuresOf(cell), ...cell.findings.map((each) => findingNode(each, [])));
    views.hidden = !short;
    views.querySelectorAll("input")[lines ? 1 : 0].checked = true;
    if (cell.opens) open(cell, looked, lines, go);
    else {
      stage.replaceChildren(closed(cell));
      side.replaceChildren();
    }
    if (focus) title.focus();
  }

  async function open(cell, looked, lines, go) {
    const head = cells.indexOf(cell), at = { ...looked }; // what is asked for now, whatever the map tells until then
    const own = partOfShape(cell, lines, at), { part, reading } = own;
    stage.replaceChildren(part.node);
    side.replaceChildren(reading.node);
    const as = own.head === head && own.fresh;
    Object.assign(own, { head, fresh: false });
    if (!as) reading.setHead(head);
    await (as ? part.ready : part.setHead(head, cell.overview));
    if (go) part.go(at.query, at.key);
    else part.show(at);
  }

  return { node, show, repaint: () => made.forEach(({ part }) => part.repaint?.()) };
}
