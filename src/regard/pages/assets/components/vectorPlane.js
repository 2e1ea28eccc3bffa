// A plane to draw vectors in: a square picture with a grid, arrows, dots and labels, and handles to drag.
import { setAttributes, svgElement } from "./dom.js";

const SIDE = 400; // units of the picture, which the browser scales to the space there is
const MAX_LABEL_LENGTH = 18;
const LINE_HEIGHT = 16; // from one label to the next below it
const SAME_PLACE = 6; // points closer than this look like one
const HANDLE_DISTANCE = 34;

// 1, 2 or 5 times a power of ten, so that about eight grid lines cross the picture.
function gridSpacing(reach) {
  const rough = reach / 4, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((step) => step * power >= rough * 0.999);
}

// A picture of the square around `centre` with half-width `reach`; `setView` changes both.
export function createVectorPlane(attributes) {
  const back = svgElement("g", { "aria-hidden": "true" }), front = svgElement("g");
  const root = svgElement("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", ...attributes }, back, front);
  let centre = [0, 0], reach = 1;
  const toPicture = ([x, y]) => [
    (SIDE / 2) * (1 + (x - centre[0]) / reach),
    (SIDE / 2) * (1 - (y - centre[1]) / reach),
  ];

  function gridLines() {
    const step = gridSpacing(reach), nodes = [];
    const [left, bottom] = centre.map((x) => x - reach), [right, top] = centre.map((x) => x + reach);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const from = Math.ceil(Math.min(left, bottom) / step), to = Math.floor(Math.max(right, top) / step);
    const [zeroX, zeroY] = toPicture([0, 0]).map((x, axis) => Math.min(Math.max(x, axis ? 14 : 2), SIDE - (axis ? 4 : 26)));
    for (let i = from; i <= to; i++) {
      const kind = i === 0 ? "axis" : "grid", [x, y] = toPicture([i * step, i * step]);
      if (x >= 0 && x <= SIDE) nodes.push(svgElement("line", { class: kind, x1: x, x2: x, y1: 0, y2: SIDE }));
      if (y >= 0 && y <= SIDE) nodes.push(svgElement("line", { class: kind, x1: 0, x2: SIDE, y1: y, y2: y }));
      if (i === 0) continue;
      const text = (i * step).toFixed(digits).replace("-", "−");
      if (x > 12 && x < SIDE - 12) nodes.push(svgElement("text", { class: "tick", x: x + 3, y: zeroY - 4 }, text));
      if (y > 16 && y < SIDE - 12) nodes.push(svgElement("text", { class: "tick", x: zeroX + 3, y: y - 4 }, text));
    }
    return nodes;
  }

  return {
    root,
    front,
    toPicture,
    setView: (newCentre, newReach) => ([centre, reach] = [newCentre, newReach]),
    dragStep: () => 10 ** Math.floor(Math.log10(reach) + 1e-9) / 10,
    draw: (...nodes) => back.replaceChildren(...gridLines(), ...nodes.flat(Infinity)),
    clampToView: (at) => at.map((x, axis) => Math.min(Math.max(x, centre[axis] - reach), centre[axis] + reach)),
    fromEvent(event) {
      const box = root.getBoundingClientRect();
      const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
      return [centre[0] + reach * (2 * across - 1), centre[1] + reach * (1 - 2 * down)];
    },
  };
}

export function segment(plane, from, to, kind, width = 1.5) {
  const [[x1, y1], [x2, y2]] = [from, to].map(plane.toPicture);
  return svgElement("line", { class: kind, x1, y1, x2, y2, "stroke-width": width });
}

export function dot(plane, at, kind, r) {
  const [cx, cy] = plane.toPicture(at);
  return svgElement("circle", { class: kind, cx, cy, r });
}

// A line with an arrowhead, which is left out if the line is shorter than it.
export function arrow(plane, from, to, kind, width) {
  const [[x1, y1], [x2, y2]] = [from, to].map(plane.toPicture);
  const length = Math.hypot(x2 - x1, y2 - y1), size = 5 + 2.2 * width;
  if (length < size) return segment(plane, from, to, kind, width);
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length], [bx, by] = [x2 - ux * size, y2 - uy * size];
  const head = [[x2, y2], [bx - uy * size * 0.45, by + ux * size * 0.45], [bx + uy * size * 0.45, by - ux * size * 0.45]];
  return svgElement("g", { class: kind },
    svgElement("line", { x1, y1, x2: bx, y2: by, "stroke-width": width }),
    svgElement("polygon", { points: head.map((p) => p.join()).join(" ") }));
}

// A label beside a point, `gap` away from it in the direction `side`; above or below the point if it does not fit there.
export function label(plane, at, text, side, gap, kind) {
  const letters = Array.from(text);
  const short = letters.length > MAX_LABEL_LENGTH ? `${letters.slice(0, MAX_LABEL_LENGTH - 1).join("")}…` : text;
  const [x, y] = plane.toPicture(at), size = Math.hypot(...side) || 1, room = 8.5 * Math.min(letters.length, MAX_LABEL_LENGTH);
  let [dx, dy] = side.map((part) => (part / size) * gap);
  const fits = Math.abs(dx) < gap / 5 || (dx > 0 ? x + dx + room < SIDE : x + dx > room);
  if (!fits) [dx, dy] = [0, dy > 0 ? gap + 4 : -gap];
  const anchor = Math.abs(dx) < gap / 5 ? "middle" : dx > 0 ? "start" : "end";
  const centred = Math.max(Math.min(x, SIDE - 4 - room / 2), 4 + room / 2);
  const baseline = Math.min(Math.max(y + dy + 5, 16), SIDE - 6), start = anchor === "middle" ? centred : x + dx;
  const node = svgElement("text", { class: `name ${kind}`, x: start, y: baseline, "text-anchor": anchor }, short);
  const left = start - { start: 0, middle: room / 2, end: room }[anchor];
  return { node, left, right: left + room, baseline, line: dy > 0 ? LINE_HEIGHT : -LINE_HEIGHT };
}

// The nodes of labels; one that would cover another is moved up or down by lines.
export function spreadLabels(labels) {
  labels.forEach((own, i) => {
    const covers = (other) =>
      own.left < other.right && other.left < own.right && Math.abs(own.baseline - other.baseline) < LINE_HEIGHT;
    // One line on, one back, two on, … from its first position.
    for (let n = 1; n < 9 && labels.slice(0, i).some(covers); n++) own.baseline += n * (n % 2 ? own.line : -own.line);
    own.node.setAttribute("y", own.baseline);
  });
  return labels.map(({ node }) => node);
}

// Offsets that keep the handles of points at the same place apart: later ones move away from the origin, or towards it at
// the edge of the picture.
export function separateHandles(plane, points) {
  const places = points.map(plane.toPicture), origin = plane.toPicture([0, 0]);
  return places.map(([x, y], i) => {
    const before = places.slice(0, i).filter(([a, b]) => Math.hypot(a - x, b - y) < SAME_PLACE).length;
    if (!before) return [0, 0];
    const [dx, dy] = [x - origin[0], y - origin[1]], length = Math.hypot(dx, dy), [ux, uy] = length > 1 ? [dx / length, dy / length] : [1, 0];
    const away = HANDLE_DISTANCE * before, fits = [x + ux * away, y + uy * away].every((part) => part > 12 && part < SIDE - 12);
    return [ux, uy].map((part) => (fits ? part : -part) * away);
  });
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
const roundOff = (x) => Number(x.toPrecision(12)) + 0; // 0.1 + 0.2 becomes 0.3, and −0 becomes 0

// A handle to drag: it snaps to a fine grid; the arrow keys move it too, ten times as far with Shift.
export function createHandle(plane, name, onMove) {
  const spot = svgElement("circle", { class: "spot" }), leader = svgElement("line", { class: "leader", "aria-hidden": "true" });
  const node = svgElement("g", { class: "handle", tabindex: "0", role: "slider", "aria-label": name,
    "aria-valuemin": "-180", "aria-valuemax": "180" }, leader, spot);
  let at = [0, 0], grip = null; // the pointer's distance from the handle while it is dragged
  const moveTo = (target) => onMove(plane.clampToView(target).map(roundOff));
  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    node.focus();
    node.setPointerCapture(event.pointerId);
    grip = plane.fromEvent(event).map((x, axis) => x - at[axis]);
  });
  node.addEventListener("pointermove", (event) => {
    if (grip === null) return;
    const step = plane.dragStep();
    const target = plane.fromEvent(event).map((x, axis) => Math.round((x - grip[axis]) / step) * step);
    if (target.some((x, axis) => Math.abs(x - at[axis]) >= step / 2)) moveTo(target);
  });
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, () => (grip = null));
  node.addEventListener("keydown", (event) => {
    const by = ARROWS[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const step = plane.dragStep() * (event.shiftKey ? 10 : 1);
    moveTo(at.map((x, axis) => x + by[axis] * step));
  });
  return {
    node,
    // `offset` in units of the picture moves the handle away from its point, with a line that leads to it.
    show(newAt, radius, text, offset = [0, 0]) {
      at = newAt;
      const [x, y] = plane.toPicture(at), isApart = offset.some((part) => part !== 0);
      const [cx, cy] = [x + offset[0], y + offset[1]];
      node.classList.toggle("apart", isApart);
      setAttributes(leader, { x1: x, y1: y, x2: cx, y2: cy });
      setAttributes(spot, { cx, cy, r: isApart ? Math.min(radius, 10) : radius });
      setAttributes(node, { "aria-valuenow": Math.round((Math.atan2(at[1], at[0]) * 180) / Math.PI), "aria-valuetext": text });
    },
  };
}
