// Copies of cells that fly to the cell they are combined in. Readers who prefer less motion see none.
import { el } from "./dom.js";

const MAX_COPIES = 10; // more would hide each other
const reduced = matchMedia("(prefers-reduced-motion: reduce)");

// A layer over `box`. `fly` lets copies of cells fly to a target within some milliseconds, then marks the target.
export function createFlights(box) {
  const layer = el("div", { class: "flights", "aria-hidden": "true" });
  box.append(layer);

  function fly(cells, target, duration) {
    stop();
    if (reduced.matches || !layer.animate) return;
    const origin = layer.getBoundingClientRect(), end = target.getBoundingClientRect();
    const moving = cells.filter((cell) => cell.dataset.value !== "").slice(0, MAX_COPIES);
    moving.forEach((cell, i) => {
      const start = cell.getBoundingClientRect();
      const copy = el("span", {}, cell.textContent);
      Object.assign(copy.style, {
        left: `${start.left - origin.left}px`, top: `${start.top - origin.top}px`,
        width: `${start.width}px`, height: `${start.height}px`, lineHeight: `${start.height}px`,
      });
      layer.append(copy);
      const [x, y] = [end.left - start.left, end.top - start.top];
      const flight = copy.animate(
        [
          { transform: "none", opacity: 1 },
          { transform: `translate(${x / 2}px, ${y / 2 - 12}px) scale(1.1)`, opacity: 1, offset: 0.6 },
          { transform: `translate(${x}px, ${y}px) scale(0.6)`, opacity: 0 },
        ],
        { duration: 0.75 * duration, delay: (i / moving.length) * 0.2 * duration, easing: "ease-in-out", fill: "backwards" },
      );
      flight.onfinish = () => copy.remove();
    });
    if (moving.length) target.animate([{ scale: 1 }, { scale: 1.18 }, { scale: 1 }], { duration: 0.3 * duration, delay: 0.7 * duration });
  }

  function stop() {
    layer.replaceChildren();
  }
  return { fly, stop };
}
