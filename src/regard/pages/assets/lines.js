// A short text as two columns of tokens: a line from each query to each key, as strong as its weight. Pointing at a
// token leaves its own lines; a click keeps it so.
import { el, token } from "./dom.js";
import { number } from "./numbers.js";

const LEAST_DRAWN = 0.01;
const LINE_HEIGHT = 28;

// As `mapOf` has it, without a view to keep: tokens name the keys, queries the rows, either may be null.
export function linesOf({ matrix, head, size, tokens, queries: rows, onCell }) {
  const numbered = (count, word) => Array.from({ length: count }, (_, n) => `${word} ${n}`);
  const queries = rows ?? numbered(size[0], "query"), keys = tokens ?? numbered(size[1], "key");
  const canvas = el("canvas", { "aria-hidden": "true" });
  const middle = el("div", { class: "between" }, canvas);
  let weights = null, pinned = null, pointed = null, asked = 0;

  const column = (names, side, word) => names.map((name, i) => {
    const value = el("span", { class: "value" });
    const node = el("button", { type: "button", class: "end", tabindex: i ? "-1" : "0", "aria-pressed": "false",
      "aria-label": `${word} ${i}: ${name}`,
      onpointerenter: () => point({ side, i }), onpointerleave: () => point(null),
      onfocus: (event) => arrived(event.target, side, i), onblur: () => point(null),
      onclick: () => pin({ side, i }) }, token(name), value);
    return { node, value };
  });
  const ends = [column(queries, 0, "query"), column(keys, 1, "key")];
  const lists = ends.map((nodes, side) =>
    el("div", { class: `ends side${side}`, role: "group", "aria-label": side ? "Keys" : "Queries" }, nodes.map((each) => each.node)));
  const node = el("div", { class: "lines" }, el("p", { class: "side0" }, "from, the query"), el("p", { class: "side1" }, "to, the key"),
    lists[0], middle, lists[1], el("p", { class: "left-out" }, `Weights below ${LEAST_DRAWN} have no line.`));

  const same = (a, b) => Boolean(a && b) && a.side === b.side && a.i === b.i;
  const weight = (i, j) => weights[i * keys.length + j];

  function arrived(target, side, i) {
    for (const each of ends[side]) each.node.tabIndex = each.node === target ? 0 : -1;
    if (target.matches(":focus-visible")) point({ side, i });
  }

  function point(at) {
    pointed = at;
    paint();
    if (at && !pinned) read(at);
  }

  function pin(at) {
    pinned = same(pinned, at) ? null : at;
    for (const [side, nodes] of ends.entries()) {
      nodes.forEach((each, i) => each.node.setAttribute("aria-pressed", String(same(pinned, { side, i }))));
    }
    paint();
    if (pinned) read(pinned);
  }

  // Of a query, the key that it weighs most; of a key, the query that weighs it most.
  function read({ side, i }) {
    if (!weights) return;
    const others = (side ? queries : keys).map((_, o) => (side ? weight(o, i) : weight(i, o)));
    const best = others.indexOf(others.reduce((a, b) => (b > a ? b : a), 0));
    if (best >= 0) onCell(...(side ? [best, i] : [i, best]), { weight: others[best], hidden: false });
  }

  node.addEventListener("keydown", (event) => {
    const side = lists.findIndex((list) => list.contains(event.target));
    if (side < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const i = ends[side].findIndex((each) => each.node === event.target);
    const to = {
      ArrowUp: [side, i - 1], ArrowDown: [side, i + 1], ArrowLeft: [0, i], ArrowRight: [1, i],
      Home: [side, 0], End: [side, ends[side].length - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    ends[to[0]][Math.min(Math.max(to[1], 0), ends[to[0]].length - 1)].node.focus();
  });

  function stroke(context, width, i, j, strength) {
    const from = (i + 0.5) * LINE_HEIGHT, to = (j + 0.5) * LINE_HEIGHT;
    context.globalAlpha = Math.min(1, strength);
    context.beginPath();
    context.moveTo(0, from);
    context.bezierCurveTo(width * 0.45, from, width * 0.55, to, width, to);
    context.stroke();
  }

  function paint() {
    const at = pinned && pointed && pinned.side !== pointed.side ? pinned : pointed || pinned;
    const context = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const width = canvas.clientWidth;
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (!weights) return;
    context.strokeStyle = style.getPropertyValue("--accent");
    for (let i = 0; i < queries.length; i++) {
      for (let j = 0; j < keys.length; j++) {
        const w = weight(i, j), own = at && (at.side ? at.i === j : at.i === i);
        if (!(w >= LEAST_DRAWN) || (at && !own)) continue;
        context.lineWidth = 0.75 + 3.25 * w;
        stroke(context, width, i, j, own ? 0.25 + 0.75 * w : 0.1 + 0.9 * w);
      }
    }
    ends.forEach((nodes, side) => nodes.forEach((each, o) => {
      const other = at && at.side !== side ? (side ? weight(at.i, o) : weight(o, at.i)) : null;
      each.node.style.setProperty("--share", other > 0 ? other : 0);
      each.node.classList.toggle("chosen", same(at, { side, i: o }));
      each.value.textContent = other === null ? "" : other > 0 && other < 0.001 ? "<0.001" : number(Number(other.toFixed(3)));
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
    const mine = ++asked, found = await matrix.tile(next, 0, 1, queries.length, 0, 1, keys.length);
    if (mine !== asked) return;
    weights = found;
    paint();
    node.dataset.ready = String(next);
  }

  function show({ query }) {
    if (query === null) return;
    pinned = null;
    pin({ side: 0, i: query });
  }

  new ResizeObserver(resize).observe(middle);
  return { node, setHead, show, go: (query) => show({ query }), repaint: paint, ready: setHead(head) };
}
