// The maps of all heads of a layer for one query, small, each over the pictures.
import { createScale, paintLevels } from "./colorScale.js";
import { el } from "./dom.js";
import { formatShort } from "./format.js";
import { mapLevels, paintOverlay } from "./pictureView.js";

const HEIGHT = 120; // pixels of a canvas
const OPACITY = 0.7;

// `onChoose(head)` is called if a map is clicked.
export function createHeadMaps({ pictures, onChoose }) {
  const box = el("div", { id: "head-maps", role: "group", "aria-label": "Heads" });
  let layer = null, cells = [], drawing = 0;

  function setLayer(next, heads) {
    layer = next;
    const widths = layer.images.map(({ image }) => Math.max(1, Math.round((HEIGHT * pictures[image].width) / pictures[image].height)));
    cells = heads.map(({ head, name }) => {
      const canvas = el("canvas", { width: widths.reduce((a, b) => a + b, 0), height: HEIGHT, "aria-hidden": "true" }), caption = el("span");
      const node = el("button", { type: "button", onclick: () => onChoose(head) }, canvas, caption);
      node.dataset.head = head;
      return { head, name, node, canvas, caption, widths };
    });
    box.replaceChildren(...cells.map(({ node }) => node));
  }

  async function show({ query, head: chosen, isLog, colors }) {
    const number = ++drawing;
    for (const { head, node } of cells) node.setAttribute("aria-pressed", String(head === chosen));
    for (const { head, name, canvas, caption, widths } of cells) {
      const weights = await layer.row(head, query, { urgent: false });
      if (number !== drawing) return;
      const onPatches = layer.images.map((grid) => (weights ? weights.subarray(grid.before, grid.before + grid.rows * grid.columns) : []));
      const top = onPatches.reduce((best, part) => part.reduce((a, b) => (b > a ? b : a), best), 0);
      const scale = createScale(layer.shape[1], top || 1, isLog), context = canvas.getContext("2d");
      let x = 0;
      layer.images.forEach((grid, n) => {
        const map = weights ? paintLevels(mapLevels(grid, weights, scale), grid.columns, colors) : null;
        paintOverlay(context, pictures[grid.image].grey, map, OPACITY, x, 0, widths[n], HEIGHT);
        x += widths[n];
      });
      caption.textContent = weights ? `${name}, up to ${formatShort(top)}` : `${name}, not stored`;
      caption.dataset.top = weights ? top : "";
    }
  }
  return { node: box, setLayer, show };
}
