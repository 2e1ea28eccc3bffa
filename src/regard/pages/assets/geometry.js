// One query among its keys, as arrows. What the page opens with is the library's own; once the reader has moved an
// arrow or a switch, the same is computed here.
import { bar, choices, toggle } from "./controls.js";
import { el, header, record, scrolling, token } from "./dom.js";
import { number, numbers, vector } from "./numbers.js";
import { apart, arrow, dot, handle, label, plane, segment, svg } from "./plane.js";
import { softmax } from "./softmax.js";

const LARGEST_DOT = 17; // of a weight of 1; the area is the weight
const PERPENDICULARS_UP_TO = 12; // more are a thicket

const data = record();
const rows = data.rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, numbers(x)])));
const given = { keys: numbers(data.key), queries: rows.map((row) => row.query) };
const values = numbers(data.value);
const state = { query: 0, scaled: true, normalised: false, ...given };

const length = ([x, y]) => Math.hypot(x, y);
const product = (a, b) => a[0] * b[0] + a[1] * b[1];
const times = (factor, [x, y]) => [factor * x, factor * y];
const plus = (a, b) => [a[0] + b[0], a[1] + b[1]];
const unit = (a) => (length(a) === 0 ? a : a.map((x) => x / length(a)));
const replaced = (list, i, item) => list.map((old, j) => (j === i ? item : old));
const radius = (weight) => Math.max(3.5, LARGEST_DOT * Math.sqrt(weight || 0));

// The row as the arrows and the switches are now.
function current() {
  const row = rows[state.query];
  const untouched = state.keys === given.keys && state.queries[state.query] === row.query;
  if (untouched && state.scaled && !state.normalised) {
    return { ...row, keys: given.keys, lengths: numbers(data.lengths) };
  }
  const shape = state.normalised ? unit : (a) => a;
  const query = shape(state.queries[state.query]), keys = state.keys.map(shape);
  const hidden = row.scores.map((score) => score === -Infinity);
  const scores = keys.map((key, j) => (hidden[j] ? -Infinity : product(query, key) * (state.scaled ? data.scale : 1)));
  const { weights } = softmax(scores);
  const contributions = values && values.map((value, j) => times(weights[j], value));
  return {
    query, keys, scores, weights, contributions,
    length: length(query),
    lengths: keys.map(length),
    cosines: keys.map((key) => product(unit(query), unit(key))),
    output: values && contributions.reduce(plus, [0, 0]),
  };
}

// -- The plane of query and keys --

const compare = plane({ id: "compare", role: "group", "aria-label": "Query and keys: arrow keys move the one in focus" });
const largest = Math.max(...[...given.keys, ...given.queries].flat().map(Math.abs));
const reach = largest > 1e-100 ? 1.25 * largest : 1; // less is nothing

// With lengths of one, moving an arrow turns it; it keeps its length for when that is switched off.
function moved(old, to) {
  return state.normalised ? (length(to) === 0 ? old : times(length(old), unit(to))) : to;
}

const queryHandle = handle(compare, "query", (to) => {
  const old = state.queries[state.query];
  change({ queries: replaced(state.queries, state.query, moved(old, to)) });
});
const keyHandles = data.tokens.map((name, j) =>
  handle(compare, `key ${name}`, (to) => change({ keys: replaced(state.keys, j, moved(state.keys[j], to)) })),
);
compare.front.append(...keyHandles.map((h) => h.node), queryHandle.node);

function drawCompare(row) {
  compare.look([0, 0], state.normalised ? 1.4 : reach);
  const along = unit(row.query), seen = (j) => row.scores[j] !== -Infinity;
  const shown = [], feet = [];
  // A key has its name on the left as one looks along it, the query on the right.
  const aside = ([x, y], left) => [-left * y, -left * x];
  const names = [label(compare, row.query, data.queries[state.query], aside(row.query, -1), 24, "of-query")];
  if (state.normalised) shown.push(dot(compare, [0, 0], "circle", compare.point([1, 0])[0] - compare.point([0, 0])[0]));
  if (length(along) > 0) {
    const far = 3 * reach;
    shown.push(segment(compare, times(-far, along), times(far, along), "line-of-query"));
    row.keys.forEach((key, j) => {
      if (row.keys.length > PERPENDICULARS_UP_TO || !seen(j)) return;
      const foot = times(product(along, key), along);
      shown.push(segment(compare, key, foot, "perpendicular"));
      feet.push(dot(compare, foot, "foot", 2.5));
    });
  }
  row.keys.forEach((key, j) => {
    shown.push(segment(compare, [0, 0], key, seen(j) ? "key" : "key hidden", 1.5 + 2.5 * (row.weights[j] || 0)));
    shown.push(dot(compare, key, seen(j) ? "weighed" : "weighed hidden", radius(row.weights[j])));
  });
  shown.push(arrow(compare, [0, 0], row.query, "query", 3));
  shown.push(feet, row.keys.map((key) => dot(compare, key, "tip", 2.5))); // seen even below the query
  row.keys.forEach((key, j) => {
    names.push(label(compare, key, data.tokens[j], aside(key, 1), radius(row.weights[j]) + 8, seen(j) ? "" : "soft"));
  });
  compare.draw(shown, apart(names));

  const top = row.weights.indexOf(Math.max(...row.weights));
  const most = row.weights[top] > 0 ? `most weight on ${data.tokens[top]}, ${number(row.weights[top])}` : "sees no key";
  queryHandle.show(row.query, 11, `${vector(row.query)}, ${most}`);
  keyHandles.forEach((each, j) => {
    const says = seen(j) ? `weight ${number(row.weights[j])}` : "hidden";
    each.show(row.keys[j], Math.max(13, radius(row.weights[j])), `${vector(row.keys[j])}, ${says}`);
  });
  return most;
}

// -- The plane of the values --

const mix = values && plane({ id: "mix", role: "img", "aria-label": "Values and output" });

// The corners of the smallest polygon around the points, one after the other.
function hull(points) {
  const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const turn = (o, a, b) => (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0]);
  const half = (list) => {
    const chain = [];
    for (const p of list) {
      while (chain.length > 1 && turn(chain.at(-2), chain.at(-1), p) <= 0) chain.pop();
      chain.push(p);
    }
    return chain.slice(0, -1);
  };
  return sorted.length < 2 ? sorted : [...half(sorted), ...half(sorted.reverse())];
}

function drawMix(row) {
  const seen = (j) => row.scores[j] !== -Infinity;
  const corners = hull(values.filter((_, j) => seen(j))), centre = mix.centre;
  const away = (at) => [at[0] - centre[0], centre[1] - at[1]];
  const shown = [svg("polygon", { class: "hull", points: corners.map((c) => mix.point(c).join()).join(" ") })];
  values.forEach((value, j) => shown.push(dot(mix, value, seen(j) ? "weighed" : "weighed hidden", radius(row.weights[j]))));
  let from = [0, 0];
  row.contributions.forEach((part, j) => {
    const to = plus(from, part);
    if (row.weights[j] > 0) shown.push(segment(mix, from, to, "path", 2), dot(mix, to, "stop", 3));
    from = to;
  });
  shown.push(dot(mix, row.output, "output", 7));
  const names = values.map((value, j) =>
    label(mix, value, data.tokens[j], away(value), radius(row.weights[j]) + 9, seen(j) ? "" : "soft"),
  );
  names.push(label(mix, row.output, "output", [-row.output[1], -row.output[0]], 16, "of-query"));
  mix.draw(shown, apart(names));
  mix.root.setAttribute("aria-label", `The values, and the output among them at ${vector(row.output)}`);
}

if (mix) {
  const points = [[0, 0], ...values], most = (axis) => Math.max(...points.map((p) => p[axis]));
  const least = (axis) => Math.min(...points.map((p) => p[axis]));
  mix.centre = [0, 1].map((axis) => (least(axis) + most(axis)) / 2);
  const span = Math.max(most(0) - least(0), most(1) - least(1));
  mix.look(mix.centre, span > 1e-100 ? 0.8 * span : 1);
}

// -- The numbers, and the page --

const numbersBox = el("div", { class: "card" });
const queryLine = el("p", { class: "formula", id: "query" });
const outputLine = el("p", { class: "formula", id: "output" });
const announced = el("p", { class: "visually-hidden", role: "status" });

function table(row) {
  const heads = ["key", "length", "cosine", "score", "weight"].map((head) => el("th", { scope: "col" }, head));
  const body = data.tokens.map((name, j) => {
    const cells = [row.lengths[j], row.cosines[j]].map((x) => el("td", {}, number(x)));
    const hidden = row.scores[j] === -Infinity;
    return el("tr", {}, el("th", { scope: "row" }, token(name), " ", el("span", { class: "entries" }, vector(row.keys[j]))), cells,
      hidden ? el("td", { class: "hidden-key" }, "hidden") : el("td", {}, number(row.scores[j])),
      el("td", { class: "result" }, number(row.weights[j])), el("td", { class: "bars" }, bar(row.weights[j])));
  });
  return el("table", { class: "snug" }, el("thead", {}, el("tr", {}, heads, el("td", { class: "bars" }))), el("tbody", {}, body));
}

function says() {
  if (state.normalised) return "Every arrow is one long: only the angles are left, and a long key has no advantage.";
  if (!state.scaled) return "Scaling is off: all scores are larger by the same factor, and the weights sharper.";
  return "A score grows with both lengths, not with the angle alone: a long key may beat one that points the query’s way.";
}

function draw() {
  const row = current(), most = drawCompare(row);
  if (mix) drawMix(row);
  queryLine.textContent = `query = ${vector(row.query)}, length ${number(row.length)}`;
  outputLine.textContent = mix ? `output = ${vector(row.output)}` : "";
  numbersBox.replaceChildren(
    el("p", { id: "says" }, says()),
    el("p", { class: "formula", id: "formula" },
      `score = ${number(row.length)} × length × cosine${state.scaled ? ` × ${number(data.scale)}` : ""}`),
    scrolling("Numbers for each key", table(row)),
  );
  return `${data.queries[state.query]}: ${most}${mix ? `; output ${vector(row.output)}` : ""}`;
}

function change(part) {
  Object.assign(state, part);
  const told = draw();
  if (!("keys" in part) || "queries" in part) announced.textContent = told; // a moved key tells its own weight
  reset.disabled = state.keys === given.keys && state.queries === given.queries;
}

const reset = el("button", { type: "button", id: "reset", disabled: true, onclick: () => change({ ...given }) }, "Put back");
const caption = (title, text) => el("figcaption", {}, el("strong", {}, title), " ", text);

document.getElementById("app").append(
  header("Attention in the plane", `${data.shape}. Drag an arrow’s tip, or use Tab and the arrow keys.`),
  ...(data.queries.length > 1
    ? [choices("query", "Query", data.queries.map(token), (query) => change({ query }))]
    : []),
  el("div", { class: mix ? "planes" : "planes alone" },
    el("figure", { class: "card" }, compare.root, queryLine,
      caption("Query and keys.", "The larger the dot, the larger the weight. A dotted line drops each key on the query’s line: the farther out it lands, the higher the score.")),
    mix ? el("figure", { class: "card" }, mix.root, outputLine,
      caption("Values.", "The path adds up weight · value. It ends at the output, a mean of the values, so never outside the shape they span.")) : []),
  el("div", { class: "controls" }, reset,
    el("div", { class: "switches" }, toggle("scale", "scaled", true, (scaled) => change({ scaled })),
      toggle("normalise", "normalised", false, (normalised) => change({ normalised })))),
  numbersBox,
  announced,
);
announced.textContent = draw();
