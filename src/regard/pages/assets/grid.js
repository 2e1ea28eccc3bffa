// All heads as small maps: in the order of the layers, or of a measure. One stop of the Tab key; arrows move, Enter opens.
import { el } from "./dom.js";
import { paintLevels } from "./small.js";

const WORST = ["error", "warning", "note"];
const MANY = 16; // heads of a layer that stand close together
const SIGN = { error: "!", warning: "!", note: "i" };

export function headName({ entry, head }) {
  const call = entry.calls > 1 ? `, call ${entry.call}` : "";
  return `layer ${entry.layer}${call}, head ${head}`;
}

export function brief(value) {
  return Number.isNaN(value) ? "–" : Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

export function headPlace({ entry, head }) {
  return `${entry.layer}.${entry.call}.${head}`;
}

// As `Table.by` orders rows: NaN last, equals as they were.
export function ordered(cells, measure, largest) {
  const value = (cell) => cell.measures[measure];
  const known = cells.filter((cell) => !Number.isNaN(value(cell)));
  known.sort((a, b) => (largest ? value(b) - value(a) : value(a) - value(b)));
  return [...known, ...cells.filter((cell) => Number.isNaN(value(cell)))];
}

export function gridOf({ cells, open, tell }) {
  const box = el("div", { class: "heads", id: "heads", role: "group", "aria-label": "Heads: arrow keys move, Enter opens" });
  const drawn = new IntersectionObserver((seen) => {
    for (const { isIntersecting, target } of seen) if (isIntersecting) paint(target);
  }, { rootMargin: "300px" });
  const ofNode = new WeakMap();

  async function paint(canvas) {
    drawn.unobserve(canvas);
    paintLevels(canvas, await ofNode.get(canvas.parentNode).map.levels());
  }

  for (const cell of cells) {
    const [rows, columns] = cell.map.size;
    const canvas = el("canvas", { width: columns, height: rows, class: Math.max(rows, columns) < 40 ? "few" : null });
    const worst = WORST.find((severity) => cell.findings.some((each) => each.severity === severity && each.heads.length));
    const sign = worst ? el("span", { class: `sign ${worst}`, "aria-hidden": "true" }, SIGN[worst]) : [];
    cell.caption = el("span", { class: "caption" });
    cell.node = el("button", { type: "button", class: "head", tabindex: "-1", onclick: () => open(cell),
      onfocus: () => arrived(cell), onpointerenter: () => tell(cell) }, canvas, sign, cell.caption);
    cell.node.dataset.place = headPlace(cell);
    if (!cell.opens) cell.node.classList.add("closed");
    ofNode.set(cell.node, cell);
    drawn.observe(canvas);
  }

  let shown = cells;
  function arrived(cell) {
    for (const each of cells) each.node.tabIndex = each === cell ? 0 : -1;
    tell(cell);
  }

  // What stands above and below, whatever the number of columns is just now.
  function beside(cell, step) {
    const here = cell.node.getBoundingClientRect(), middle = here.left + here.width / 2;
    let best = null;
    for (const each of shown) {
      const there = each.node.getBoundingClientRect();
      const down = step * (there.top - here.top), across = Math.abs(there.left + there.width / 2 - middle);
      if (down > 1 && (!best || down < best.down - 1 || (down < best.down + 1 && across < best.across))) {
        best = { each, down, across };
      }
    }
    return best ? best.each : cell;
  }

  box.addEventListener("keydown", (event) => {
    const cell = ofNode.get(event.target);
    if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
    const place = shown.indexOf(cell), last = shown.length - 1;
    const to = {
      ArrowLeft: () => shown[Math.max(place - 1, 0)],
      ArrowRight: () => shown[Math.min(place + 1, last)],
      ArrowUp: () => beside(cell, -1),
      ArrowDown: () => beside(cell, 1),
      Home: () => shown[0],
      End: () => shown[last],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    to().node.focus();
  });

  function label(cell, measure) {
    const value = measure ? `, ${measure} ${brief(cell.measures[measure])}` : "";
    const found = cell.findings.filter((each) => each.heads.length).map((each) => `; ${each.severity}: ${each.kind}`).join("");
    const name = headName(cell);
    return `${name[0].toUpperCase()}${name.slice(1)}${value}${found}${cell.opens ? "" : "; map only"}`;
  }

  function arrange(measure, largest) {
    shown = measure ? ordered(cells, measure, largest) : cells;
    for (const cell of shown) {
      cell.node.setAttribute("aria-label", label(cell, measure));
      const place = `${cell.entry.layer}${cell.entry.calls > 1 ? `.${cell.entry.call}` : ""}.${cell.head}`;
      const value = measure ? cell.measures[measure] : null;
      cell.caption.replaceChildren(...(measure
        ? [el("b", {}, brief(value)), ` ${place}`]
        : [String(cell.head)]));
    }
    box.classList.toggle("sorted", Boolean(measure));
    if (measure) box.replaceChildren(...shown.map((cell) => cell.node));
    else box.replaceChildren(...layers());
    arrived(shown[0]);
  }

  function layers() {
    const rows = [];
    for (const cell of cells) {
      if (!rows.length || rows.at(-1).entry !== cell.entry) rows.push({ entry: cell.entry, nodes: [] });
      rows.at(-1).nodes.push(cell.node);
    }
    const most = Math.max(...rows.map((each) => each.nodes.length));
    box.classList.toggle("many", most > MANY);
    return rows.map(({ entry, nodes }) => {
      const marks = entry.findings.filter((each) => !each.heads.length);
      const title = [el("span", {}, `layer ${entry.layer}`), entry.calls > 1 ? el("span", {}, `call ${entry.call}`) : [],
        entry.kind ? el("span", { class: "kind" }, entry.kind) : [],
        marks.map((each) => el("span", { class: `flag ${each.severity}` }, each.kind))];
      const row = el("div", { class: "maps" }, nodes);
      row.style.setProperty("--count", most);
      return el("div", { class: "layer" }, el("p", { class: "label", title: entry.module }, title), row);
    });
  }

  function repaint() {
    for (const cell of cells) drawn.observe(cell.node.firstChild);
  }
  return { node: box, arrange, repaint, shown: () => shown };
}
