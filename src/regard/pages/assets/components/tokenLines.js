// A short text as two columns of tokens, with a line from each query to each key, as strong as the weight. Pointing at a
// token shows only its own lines; a click pins it.
import { el, tokenElement } from "./dom.js";
import { formatNumber } from "./format.js";

const MIN_WEIGHT = 0.01; // of a line
const LINE_HEIGHT = 28;

// Arguments and methods as in `createWeightMap`, without a view.
export function createTokenLines({ matrix, head, size, tokens, queries: rows, onCell }) {
  const defaultNames = (count, word) => Array.from({ length: count }, (_, n) => `${word} ${n}`);
  const queries = rows ?? defaultNames(size[0], "query"), keys = tokens ?? defaultNames(size[1], "key");
  const canvas = el("canvas", { "aria-hidden": "true" });
  const middle = el("div", { class: "between" }, canvas);
  let weights = null, pinned = null, hovered = null, lastRequest = 0;

  const column = (names, side, word) => names.map((name, i) => {
    const value = el("span", { class: "value" });
    const node = el("button", { type: "button", class: "end", tabindex: i ? "-1" : "0", "aria-pressed": "false",
      "aria-label": `${word} ${i}: ${name}`,
      onpointerenter: () => hover({ side, i }), onpointerleave: () => hover(null),
      onfocus: (event) => onFocus(event.target, side, i), onblur: () => hover(null),
      onclick: () => pin({ side, i }) }, tokenElement(name), value);
    return { node, value };
  });
  const columns = [column(queries, 0, "query"), column(keys, 1, "key")];
  const lists = columns.map((items, side) =>
    el("div", { class: `ends side${side}`, role: "group", "aria-label": side ? "Keys" : "Queries" }, items.map((item) => item.node)));
  const node = el("div", { class: "lines" }, el("p", { class: "side0" }, "Query"), el("p", { class: "side1" }, "Key"),
    lists[0], middle, lists[1], el("p", { class: "left-out" }, `Weights below ${MIN_WEIGHT} have no line.`));

  const same = (a, b) => Boolean(a && b) && a.side === b.side && a.i === b.i;
  const weightAt = (i, j) => weights[i * keys.length + j];

  function onFocus(target, side, i) {
    for (const { node } of columns[side]) node.tabIndex = node === target ? 0 : -1;
    if (target.matches(":focus-visible")) hover({ side, i });
  }

  function hover(at) {
    hovered = at;
    paint();
    if (at && !pinned) reportLargest(at);
  }

  function pin(at) {
    pinned = same(pinned, at) ? null : at;
    for (const [side, items] of columns.entries()) {
      items.forEach((item, i) => item.node.setAttribute("aria-pressed", String(same(pinned, { side, i }))));
    }
    paint();
    if (pinned) reportLargest(pinned);
  }

  // Report the largest weight of a query, or of a key.
  function reportLargest({ side, i }) {
    if (!weights) return;
    const others = (side ? queries : keys).map((_, o) => (side ? weightAt(o, i) : weightAt(i, o)));
    const best = others.indexOf(others.reduce((a, b) => (b > a ? b : a), 0));
    if (best >= 0) onCell(...(side ? [best, i] : [i, best]), { weight: others[best], masked: false });
  }

  node.addEventListener("keydown", (event) => {
    const side = lists.findIndex((list) => list.contains(event.target));
    if (side < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const i = columns[side].findIndex(({ node }) => node === event.target);
    const target = {
      ArrowUp: [side, i - 1], ArrowDown: [side, i + 1], ArrowLeft: [0, i], ArrowRight: [1, i],
      Home: [side, 0], End: [side, columns[side].length - 1],
    }[event.key];
    if (!target) return;
    event.preventDefault();
    const items = columns[target[0]];
    items[Math.min(Math.max(target[1], 0), items.length - 1)].node.focus();
  });

  function drawLine(context, width, i, j, opacity) {
    const from = (i + 0.5) * LINE_HEIGHT, to = (j + 0.5) * LINE_HEIGHT;
    context.globalAlpha = Math.min(1, opacity);
    context.beginPath();
    context.moveTo(0, from);
    context.bezierCurveTo(width * 0.45, from, width * 0.55, to, width, to);
    context.stroke();
  }

  function paint() {
    const at = pinned && hovered && pinned.side !== hovered.side ? pinned : hovered || pinned;
    const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const width = canvas.clientWidth;
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!weights) return;
    context.strokeStyle = style.getPropertyValue("--accent");
    for (let i = 0; i < queries.length; i++) {
      for (let j = 0; j < keys.length; j++) {
        const w = weightAt(i, j), own = at && (at.side ? at.i === j : at.i === i);
        if (!(w >= MIN_WEIGHT) || (at && !own)) continue;
        context.lineWidth = 0.75 + 3.25 * w;
        drawLine(context, width, i, j, own ? 0.25 + 0.75 * w : 0.1 + 0.9 * w);
      }
    }
    columns.forEach((items, side) => items.forEach((item, o) => {
      const other = at && at.side !== side ? (side ? weightAt(at.i, o) : weightAt(o, at.i)) : null;
      item.node.style.setProperty("--share", other > 0 ? other : 0);
      item.node.classList.toggle("chosen", same(at, { side, i: o }));
      item.value.textContent = other === null ? "" : other > 0 && other < 0.001 ? "<0.001" : formatNumber(Number(other.toFixed(3)));
    }));
  }

  function resize() {
    const ratio = window.devicePixelRatio || 1, height = LINE_HEIGHT * Math.max(queries.length, keys.length);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(middle.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
  }

  async function setHead(next) {
    const request = ++lastRequest, tile = await matrix.tile(next, 0, 1, queries.length, 0, 1, keys.length);
    if (request !== lastRequest) return;
    weights = tile;
    paint();
    node.dataset.ready = String(next);
  }

  function show({ query }) {
    if (query === null) return;
    pinned = null;
    pin({ side: 0, i: query });
  }

  new ResizeObserver(resize).observe(middle);
  return { node, setHead, show, goTo: (query) => show({ query }), repaint: paint, ready: setHead(head) };
}
