// All heads as thumbnails, ordered by layer or by a measure. The grid is one tab stop: arrow keys move, Enter opens.
import { el, whenPointedAt } from "./dom.js";
import { capitalise, formatShort } from "./format.js";
import { paintThumbnail } from "./thumbnails.js";

const SEVERITIES = ["error", "warning", "note"]; // the most severe first
const MANY_HEADS = 16; // of a layer, which are placed closer together
const SIGNS = { error: "!", warning: "!", note: "i" };

export function headName({ layer, head, isMean }) {
  const call = layer.calls > 1 ? `, call ${layer.call}` : "";
  return `layer ${layer.layer}${call}, ${isMean ? `mean of ${layer.heads.length} heads` : `head ${head}`}`;
}

export function headKey({ layer, head }) {
  return `${layer.layer}.${layer.call}.${head}`;
}

// The order of `Table.sort`: NaN last, equal values in their old order. Measures belong to single heads, so means are left out.
function sortCells(cells, measure, descending) {
  const value = (cell) => cell.measures[measure];
  const heads = cells.filter((cell) => !cell.isMean), known = heads.filter((cell) => !Number.isNaN(value(cell)));
  known.sort((a, b) => (descending ? value(b) - value(a) : value(a) - value(b)));
  return [...known, ...heads.filter((cell) => Number.isNaN(value(cell)))];
}

// `onOpen(cell)` is called when a head is opened, `onPoint(cell)` when it is pointed at or focused.
export function createHeadGrid({ cells, onOpen, onPoint }) {
  const box = el("div", { class: "heads", id: "heads", role: "group", "aria-label": "Heads: arrow keys move, Enter opens" });
  const visibility = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) paint(target);
  }, { rootMargin: "300px" });
  const cellOfNode = new WeakMap();
  let reduce = "max";

  async function paint(canvas) {
    visibility.unobserve(canvas);
    const painted = reduce, levels = await cellOfNode.get(canvas.parentNode).thumbnail.levels(painted);
    if (painted !== reduce) return;
    paintThumbnail(canvas, levels);
    canvas.dataset.reduce = painted;
  }

  for (const cell of cells) {
    const [rows, columns] = cell.thumbnail.size;
    const canvas = el("canvas", { width: columns, height: rows, class: Math.max(rows, columns) < 40 ? "few" : null });
    const worst = SEVERITIES.find((severity) => cell.findings.some((finding) => finding.severity === severity && finding.heads.length));
    const sign = worst ? el("span", { class: `sign ${worst}`, "aria-hidden": "true" }, SIGNS[worst]) : [];
    cell.caption = el("span", { class: "caption" });
    cell.node = el("button", { type: "button", class: cell.isMean ? "head mean" : "head", tabindex: "-1", onclick: () => onOpen(cell),
      onfocus: () => onFocus(cell), onpointerenter: whenPointedAt(() => onPoint(cell)) }, canvas, sign, cell.caption);
    cell.node.dataset.head = headKey(cell);
    if (!cell.hasWeights) cell.node.classList.add("no-weights");
    cellOfNode.set(cell.node, cell);
    visibility.observe(canvas);
  }

  let shown = cells;
  function onFocus(cell) {
    for (const other of cells) other.node.tabIndex = other === cell ? 0 : -1;
    onPoint(cell);
  }

  // The cell above or below, for any number of columns.
  function neighbour(cell, step) {
    const here = cell.node.getBoundingClientRect(), middle = here.left + here.width / 2;
    let best = null;
    for (const other of shown) {
      const there = other.node.getBoundingClientRect();
      const down = step * (there.top - here.top), across = Math.abs(there.left + there.width / 2 - middle);
      if (down > 1 && (!best || down < best.down - 1 || (down < best.down + 1 && across < best.across))) {
        best = { other, down, across };
      }
    }
    return best ? best.other : cell;
  }

  box.addEventListener("keydown", (event) => {
    const cell = cellOfNode.get(event.target);
    if (!cell || event.altKey || event.ctrlKey || event.metaKey) return;
    const place = shown.indexOf(cell), last = shown.length - 1;
    const target = {
      ArrowLeft: () => shown[Math.max(place - 1, 0)],
      ArrowRight: () => shown[Math.min(place + 1, last)],
      ArrowUp: () => neighbour(cell, -1),
      ArrowDown: () => neighbour(cell, 1),
      Home: () => shown[0],
      End: () => shown[last],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    target().node.focus();
  });

  function label(cell, measure) {
    const value = measure ? `, ${measure} ${formatShort(cell.measures[measure])}` : "";
    const findings = cell.findings.filter(({ heads }) => heads.length).map(({ severity, kind }) => `; ${severity}: ${kind}`).join("");
    return `${capitalise(headName(cell))}${value}${findings}${cell.hasWeights ? "" : "; map only"}`;
  }

  // In the order of the layers without a measure.
  function arrange(measure, descending) {
    shown = measure ? sortCells(cells, measure, descending) : cells;
    for (const cell of shown) {
      cell.node.setAttribute("aria-label", label(cell, measure));
      const name = `${cell.layer.layer}${cell.layer.calls > 1 ? `.${cell.layer.call}` : ""}.${cell.head}`;
      const value = measure ? cell.measures[measure] : null;
      cell.caption.replaceChildren(...(measure
        ? [el("b", {}, formatShort(value)), ` ${name}`]
        : [String(cell.head)])); // a number, or "mean"
    }
    box.classList.toggle("sorted", Boolean(measure));
    if (measure) box.replaceChildren(...shown.map((cell) => cell.node));
    else box.replaceChildren(...layerRows());
    onFocus(shown[0]);
  }

  function layerRows() {
    const rows = [];
    for (const cell of cells) {
      if (!rows.length || rows.at(-1).layer !== cell.layer) rows.push({ layer: cell.layer, nodes: [] });
      rows.at(-1).nodes.push(cell.node);
    }
    const most = Math.max(...rows.map(({ nodes }) => nodes.length));
    box.classList.toggle("many", most > MANY_HEADS);
    return rows.map(({ layer, nodes }) => {
      const layerFindings = layer.findings.filter(({ heads }) => !heads.length);
      const title = [el("span", {}, `layer ${layer.layer}`), layer.calls > 1 ? el("span", {}, `call ${layer.call}`) : [],
        layer.stack ? el("span", { class: "kind" }, layer.stack) : [],
        layerFindings.map(({ severity, kind }) => el("span", { class: `flag ${severity}` }, kind))];
      const row = el("div", { class: "maps" }, nodes);
      row.style.setProperty("--count", most);
      return el("div", { class: "layer" }, el("p", { class: "label", title: layer.module }, title), row);
    });
  }

  function repaint() {
    for (const cell of cells) visibility.observe(cell.node.firstChild);
  }
  function setReduce(newReduce) {
    if (newReduce === reduce) return;
    reduce = newReduce;
    repaint();
  }
  return { node: box, arrange, repaint, setReduce, shown: () => shown };
}
