// Scroll to what the reader's action changed, as little as possible.
import { windowAround } from "./dom.js";

const MARGIN = 8; // pixels
const SETTLING = 60_000; // milliseconds, in which a worker of a busy machine may answer and move what was shown
const reduced = matchMedia("(prefers-reduced-motion: reduce)");

// How far to scroll so that start … end is within low … high; if it is longer, its start is.
function distance(start, end, low, high) {
  if (start < low) return start - low;
  return Math.max(Math.min(end - high, start - low), 0);
}

function scrollWithin(box, node) {
  const inner = node.getBoundingClientRect(), outer = box.getBoundingClientRect();
  box.scrollBy({
    left: distance(inner.left, inner.right, outer.left, outer.right),
    top: distance(inner.top, inner.bottom, outer.top, outer.bottom),
    behavior: "instant",
  });
}

const isScrollable = (box) => (box.scrollHeight > box.clientHeight || box.scrollWidth > box.clientWidth)
  && /auto|scroll/.test(getComputedStyle(box).overflow);

// Scroll the boxes around a node, and not the page, so that the node is inside them.
export function bringIntoBox(node) {
  for (let box = node?.parentElement; box && box !== document.body; box = box.parentElement) {
    if (isScrollable(box)) scrollWithin(box, node);
  }
}

// The bar that stays at the top of the window and covers what is below it.
function findBar() {
  return [...document.querySelectorAll(".stays-on-top")].find((bar) => bar.offsetHeight && getComputedStyle(bar).position === "sticky");
}

// In a frame that is as high as its page, the page around it is asked to scroll.
function scrollToNodes(nodes) {
  const around = windowAround(), bar = around ? null : findBar();
  const [first, ...others] = nodes.filter((node) => node !== bar && node?.getClientRects().length);
  if (!first) return;
  bringIntoBox(first);
  const low = MARGIN + (bar?.offsetHeight ?? 0), high = (around ?? innerHeight) - MARGIN;
  const shown = others.reduce((whole, node) => {
    const own = node.getBoundingClientRect(), top = Math.min(own.top, whole.top), bottom = Math.max(own.bottom, whole.bottom);
    return bottom - top <= high - low ? { top, bottom } : whole;
  }, first.getBoundingClientRect());
  if (around) parent.postMessage({ regardShow: [shown.top - MARGIN, shown.bottom + MARGIN] }, "*");
  else scrollBy({ top: distance(shown.top, shown.bottom, low, high), behavior: reduced.matches ? "instant" : "smooth" });
}

// Bring nodes into view, the most important first. A node that does not fit in the window together with those before it
// is left out. They stay in view while the page settles, until the reader does something else.
let followed = null;
export function bringIntoView(...nodes) {
  followed = { nodes, until: performance.now() + SETTLING };
  scrollToNodes(nodes);
}

new ResizeObserver(() => followed && performance.now() < followed.until && scrollToNodes(followed.nodes)).observe(document.body);
for (const type of ["pointerdown", "touchmove", "wheel", "keydown"]) {
  addEventListener(type, () => (followed = null), { capture: true, passive: true });
}
