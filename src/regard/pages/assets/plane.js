// A plane to draw in: a square picture with a grid, arrows, dots and names, and points to take hold of.

const SIDE = 400; // units of the picture, which the browser makes as large as there is room
const LONGEST_NAME = 18;
const LINE = 16; // from one name to the next below it
// A page holds no address, not even the one that is the name of SVG: a parsed element knows it.
const NAMESPACE = new DOMParser().parseFromString("<svg>", "text/html").querySelector("svg").namespaceURI;

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  setAll(node, attributes);
  node.append(...children.flat(Infinity));
  return node;
}

export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

// 1, 2 or 5 times a power of ten, so that about eight lines cross the picture.
function spacing(reach) {
  const rough = reach / 4, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((step) => step * power >= rough * 0.999);
}

// A picture of the square around `middle` that goes `reach` to every side; `look` shows another.
export function plane(attributes) {
  const back = svg("g", { "aria-hidden": "true" }), front = svg("g");
  const root = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, class: "plane", ...attributes }, back, front);
  let middle = [0, 0], reach = 1;
  const point = ([x, y]) => [
    (SIDE / 2) * (1 + (x - middle[0]) / reach),
    (SIDE / 2) * (1 - (y - middle[1]) / reach),
  ];

  function grid() {
    const step = spacing(reach), nodes = [];
    const [left, bottom] = middle.map((x) => x - reach), [right, top] = middle.map((x) => x + reach);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const from = Math.ceil(Math.min(left, bottom) / step), to = Math.floor(Math.max(right, top) / step);
    const [zeroX, zeroY] = point([0, 0]).map((x, axis) => Math.min(Math.max(x, axis ? 14 : 2), SIDE - (axis ? 4 : 26)));
    for (let i = from; i <= to; i++) {
      const kind = i === 0 ? "axis" : "grid", [x, y] = point([i * step, i * step]);
      if (x >= 0 && x <= SIDE) nodes.push(svg("line", { class: kind, x1: x, x2: x, y1: 0, y2: SIDE }));
      if (y >= 0 && y <= SIDE) nodes.push(svg("line", { class: kind, x1: 0, x2: SIDE, y1: y, y2: y }));
      if (i === 0) continue;
      const text = (i * step).toFixed(digits).replace("-", "−");
      if (x > 12 && x < SIDE - 12) nodes.push(svg("text", { class: "tick", x: x + 3, y: zeroY - 4 }, text));
      if (y > 16 && y < SIDE - 12) nodes.push(svg("text", { class: "tick", x: zeroX + 3, y: y - 4 }, text));
    }
    return nodes;
  }

  return {
    root,
    front,
    point,
    look: (newMiddle, newReach) => ([middle, reach] = [newMiddle, newReach]),
    step: () => 10 ** Math.floor(Math.log10(reach) + 1e-9) / 10,
    draw: (...nodes) => back.replaceChildren(...grid(), ...nodes.flat(Infinity)),
    inside: (at) => at.map((x, axis) => Math.min(Math.max(x, middle[axis] - reach), middle[axis] + reach)),
    place(event) {
      const box = root.getBoundingClientRect();
      const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
      return [middle[0] + reach * (2 * across - 1), middle[1] + reach * (1 - 2 * down)];
    },
  };
}

export function segment(where, from, to, kind, width = 1.5) {
  const [[x1, y1], [x2, y2]] = [from, to].map(where.point);
  return svg("line", { class: kind, x1, y1, x2, y2, "stroke-width": width });
}

export function dot(where, at, kind, r) {
  const [cx, cy] = where.point(at);
  return svg("circle", { class: kind, cx, cy, r });
}

// A line that ends in a head, which is left out where there is no room for it.
export function arrow(where, from, to, kind, width) {
  const [[x1, y1], [x2, y2]] = [from, to].map(where.point);
  const length = Math.hypot(x2 - x1, y2 - y1), size = 5 + 2.2 * width;
  if (length < size) return segment(where, from, to, kind, width);
  const [ux, uy] = [(x2 - x1) / length, (y2 - y1) / length], [bx, by] = [x2 - ux * size, y2 - uy * size];
  const head = [[x2, y2], [bx - uy * size * 0.45, by + ux * size * 0.45], [bx + uy * size * 0.45, by - ux * size * 0.45]];
  return svg("g", { class: kind },
    svg("line", { x1, y1, x2: bx, y2: by, "stroke-width": width }),
    svg("polygon", { points: head.map((p) => p.join()).join(" ") }));
}

// A name beside a point, `gap` away from it towards `side`, a direction of the picture; above or below where there
// is no room at that side.
export function label(where, at, text, side, gap, kind) {
  const letters = Array.from(text);
  const short = letters.length > LONGEST_NAME ? `${letters.slice(0, LONGEST_NAME - 1).join("")}…` : text;
  const [x, y] = where.point(at), size = Math.hypot(...side) || 1, room = 8.5 * Math.min(letters.length, LONGEST_NAME);
  let [dx, dy] = side.map((part) => (part / size) * gap);
  const fits = Math.abs(dx) < gap / 5 || (dx > 0 ? x + dx + room < SIDE : x + dx > room);
  if (!fits) [dx, dy] = [0, dy > 0 ? gap + 4 : -gap];
  const anchor = Math.abs(dx) < gap / 5 ? "middle" : dx > 0 ? "start" : "end";
  const middled = Math.max(Math.min(x, SIDE - 4 - room / 2), 4 + room / 2);
  const baseline = Math.min(Math.max(y + dy + 5, 16), SIDE - 6), start = anchor === "middle" ? middled : x + dx;
  const node = svg("text", { class: `name ${kind}`, x: start, y: baseline, "text-anchor": anchor }, short);
  const left = start - { start: 0, middle: room / 2, end: room }[anchor];
  return { node, left, right: left + room, baseline, line: dy > 0 ? LINE : -LINE };
}

// The names, those that would cover another moved up or down by lines.
export function apart(names) {
  names.forEach((name, i) => {
    const covers = (other) =>
      name.left < other.right && other.left < name.right && Math.abs(name.baseline - other.baseline) < LINE;
    // One line on, one back, two on, … from where it stood.
    for (let n = 1; n < 9 && names.slice(0, i).some(covers); n++) name.baseline += n * (n % 2 ? name.line : -name.line);
    name.node.setAttribute("y", name.baseline);
  });
  return names.map((name) => name.node);
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
const tidy = (x) => Number(x.toPrecision(12)) + 0; // 0.1 + 0.2 is 0.3 for a reader, and there is no −0

// A point to take hold of: the pointer drags it along a fine grid, the arrow keys move it, ten times as far with Shift.
export function handle(where, name, moved) {
  const spot = svg("circle", { class: "spot" });
  const node = svg("g", { class: "handle", tabindex: "0", role: "slider", "aria-label": name,
    "aria-valuemin": "-180", "aria-valuemax": "180" }, spot);
  let at = [0, 0], held = null;
  const to = (target) => moved(where.inside(target).map(tidy));
  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    node.focus();
    node.setPointerCapture(event.pointerId);
    held = where.place(event).map((x, axis) => x - at[axis]);
  });
  node.addEventListener("pointermove", (event) => {
    if (held === null) return;
    const step = where.step();
    const target = where.place(event).map((x, axis) => Math.round((x - held[axis]) / step) * step);
    if (target.some((x, axis) => Math.abs(x - at[axis]) >= step / 2)) to(target);
  });
  for (const end of ["pointerup", "pointercancel"]) node.addEventListener(end, () => (held = null));
  node.addEventListener("keydown", (event) => {
    const by = ARROWS[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const step = where.step() * (event.shiftKey ? 10 : 1);
    to(at.map((x, axis) => x + by[axis] * step));
  });
  return {
    node,
    show(newAt, radius, says) {
      at = newAt;
      const [cx, cy] = where.point(at);
      setAll(spot, { cx, cy, r: radius });
      setAll(node, { "aria-valuenow": Math.round((Math.atan2(at[1], at[0]) * 180) / Math.PI), "aria-valuetext": says });
    },
  };
}
