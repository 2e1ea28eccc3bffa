// One query and its keys as arrows. The first numbers come from the library; after an arrow or a switch is moved, the page
// computes them.
import { bringIntoView } from "../components/bringIntoView.js";
import { checkbox, radioGroup, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox, svgElement, tokenElement } from "../components/dom.js";
import { commonFormat, formatNumber, formatVector, parseNumbers } from "../components/format.js";
import { arrow, createHandle, createVectorPlane, dot, label, segment, separateHandles, spreadLabels } from "../components/vectorPlane.js";
import { softmax } from "../matrix/softmax.js";

const MAX_RADIUS = 17; // of the dot of a weight of 1; its area is proportional to the weight
const MAX_PERPENDICULARS = 12; // more would hide each other

const data = readRecord();
const rows = data.rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, parseNumbers(x)])));
const initial = { keys: parseNumbers(data.key), queries: rows.map((row) => row.query) };
const values = parseNumbers(data.value);
const state = { query: 0, scaled: true, normalised: false, ...initial };

const norm = ([x, y]) => Math.hypot(x, y);
const dotProduct = (a, b) => a[0] * b[0] + a[1] * b[1];
const scaleBy = (factor, [x, y]) => [factor * x, factor * y];
const add = (a, b) => [a[0] + b[0], a[1] + b[1]];
const unit = (a) => (norm(a) === 0 ? a : a.map((x) => x / norm(a)));
const replaceAt = (list, i, item) => list.map((old, j) => (j === i ? item : old));
const radius = (weight) => Math.max(3.5, MAX_RADIUS * Math.sqrt(weight || 0));

// The numbers of the selected query with the current arrows and switches.
function currentRow() {
  const row = rows[state.query];
  const isUnchanged = state.keys === initial.keys && state.queries[state.query] === row.query;
  if (isUnchanged && state.scaled && !state.normalised) {
    return { ...row, keys: initial.keys, lengths: parseNumbers(data.lengths) };
  }
  const shape = state.normalised ? unit : (a) => a;
  const query = shape(state.queries[state.query]), keys = state.keys.map(shape);
  const masked = row.scores.map((score) => score === -Infinity);
  const scores = keys.map((key, j) => (masked[j] ? -Infinity : dotProduct(query, key) * (state.scaled ? data.scale : 1)));
  const { weights } = softmax(scores);
  const contributions = values && values.map((value, j) => scaleBy(weights[j], value));
  return {
    query, keys, scores, weights, contributions,
    length: norm(query),
    lengths: keys.map(norm),
    cosines: keys.map((key) => dotProduct(unit(query), unit(key))),
    output: values && contributions.reduce(add, [0, 0]),
  };
}

// -- The plane of query and keys --

const compare = createVectorPlane({ id: "compare", role: "group", "aria-label": "Query and keys: arrow keys move the focused arrow" });
const largest = Math.max(...[...initial.keys, ...initial.queries].flat().map(Math.abs));
const reach = largest > 1e-100 ? 1.25 * largest : 1; // smaller vectors count as zero

// If vectors are normalised, moving an arrow rotates it, and keeps the length that it has without normalising.
function moveArrow(old, to) {
  return state.normalised ? (norm(to) === 0 ? old : scaleBy(norm(old), unit(to))) : to;
}

const queryHandle = createHandle(compare, "query", (to) => {
  const old = state.queries[state.query];
  setState({ queries: replaceAt(state.queries, state.query, moveArrow(old, to)) });
});
const samePlace = el("p", { id: "same-place", class: "soft" });
const keyHandles = data.tokens.map((name, j) =>
  createHandle(compare, `key ${name}`, (to) => setState({ keys: replaceAt(state.keys, j, moveArrow(state.keys[j], to)) })),
);
queryHandle.node.classList.add("of-query");
compare.front.append(...keyHandles.map((h) => h.node), queryHandle.node);

function drawCompare(row) {
  compare.setView([0, 0], state.normalised ? 1.4 : reach);
  const along = unit(row.query), isLive = (j) => row.scores[j] !== -Infinity;
  const shapes = [], feet = [];
  // Looking along a vector, the label of a key is on its left, and the label of the query on its right.
  const beside = ([x, y], left) => [-left * y, -left * x];
  const labels = [label(compare, row.query, data.queries[state.query], beside(row.query, -1), 24, "of-query")];
  if (state.normalised) shapes.push(dot(compare, [0, 0], "circle", compare.toPicture([1, 0])[0] - compare.toPicture([0, 0])[0]));
  if (norm(along) > 0) {
    const far = 3 * reach;
    shapes.push(segment(compare, scaleBy(-far, along), scaleBy(far, along), "line-of-query"));
    row.keys.forEach((key, j) => {
      if (row.keys.length > MAX_PERPENDICULARS || !isLive(j)) return;
      const foot = scaleBy(dotProduct(along, key), along);
      shapes.push(segment(compare, key, foot, "perpendicular"));
      feet.push(dot(compare, foot, "foot", 2.5));
    });
  }
  row.keys.forEach((key, j) => {
    shapes.push(segment(compare, [0, 0], key, isLive(j) ? "key" : "key masked", 1.5 + 2.5 * (row.weights[j] || 0)));
    shapes.push(dot(compare, key, isLive(j) ? "weighed" : "weighed masked", radius(row.weights[j])));
  });
  shapes.push(arrow(compare, [0, 0], row.query, "query", 3));
  shapes.push(feet, row.keys.map((key) => dot(compare, key, "tip", 2.5))); // on top, so that the query does not cover them
  row.keys.forEach((key, j) => {
    labels.push(label(compare, key, data.tokens[j], beside(key, 1), radius(row.weights[j]) + 8, isLive(j) ? "" : "soft"));
  });
  compare.draw(shapes, spreadLabels(labels));

  const top = row.weights.indexOf(Math.max(...row.weights));
  const summary = row.weights[top] > 0 ? `largest weight ${formatNumber(row.weights[top])} on ${data.tokens[top]}` : "every key is masked";
  const offsets = separateHandles(compare, [...row.keys, row.query]);
  queryHandle.show(row.query, 11, `${formatVector(row.query)}, ${summary}`, offsets.at(-1));
  keyHandles.forEach((handle, j) => {
    const text = isLive(j) ? `weight ${formatNumber(row.weights[j])}` : "masked";
    handle.show(row.keys[j], Math.max(13, radius(row.weights[j])), `${formatVector(row.keys[j])}, ${text}`, offsets[j]);
  });
  const shared = [...data.tokens, data.queries[state.query]].filter((_, i) => offsets[i].some((part) => part !== 0));
  samePlace.replaceChildren(...(shared.length
    ? [...shared.flatMap((name, i) => [i ? ", " : "", "“", tokenElement(name), "”"]), " ends where another arrow ends. Drag it by the ring beside it."] : []));
  return summary;
}

// -- The plane of the values --

const mix = values && createVectorPlane({ id: "mix", role: "img", "aria-label": "Values and output" });

// The corners of the convex hull of points, in order.
function convexHull(points) {
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
  const isLive = (j) => row.scores[j] !== -Infinity;
  const corners = convexHull(values.filter((_, j) => isLive(j))), centre = mix.centre;
  const away = (at) => [at[0] - centre[0], centre[1] - at[1]];
  const shapes = [svgElement("polygon", { class: "hull", points: corners.map((c) => mix.toPicture(c).join()).join(" ") })];
  values.forEach((value, j) => shapes.push(dot(mix, value, isLive(j) ? "weighed" : "weighed masked", radius(row.weights[j]))));
  let from = [0, 0];
  row.contributions.forEach((contribution, j) => {
    const to = add(from, contribution);
    if (row.weights[j] > 0) shapes.push(segment(mix, from, to, "path", 2), dot(mix, to, "stop", 3));
    from = to;
  });
  shapes.push(dot(mix, row.output, "output", 7));
  const labels = values.map((value, j) =>
    label(mix, value, data.tokens[j], away(value), radius(row.weights[j]) + 9, isLive(j) ? "" : "soft"),
  );
  labels.push(label(mix, row.output, "output", [-row.output[1], -row.output[0]], 16, "of-query"));
  mix.draw(shapes, spreadLabels(labels));
  mix.root.setAttribute("aria-label", `Values, and the output at ${formatVector(row.output)}`);
}

if (mix) {
  const points = [[0, 0], ...values], most = (axis) => Math.max(...points.map((p) => p[axis]));
  const least = (axis) => Math.min(...points.map((p) => p[axis]));
  mix.centre = [0, 1].map((axis) => (least(axis) + most(axis)) / 2);
  const span = Math.max(most(0) - least(0), most(1) - least(1));
  mix.setView(mix.centre, span > 1e-100 ? 0.8 * span : 1);
}

// -- The numbers, and the page --

const numbersBox = el("div", { class: "card" });
const queryLine = el("p", { class: "formula", id: "query" });
const outputLine = el("p", { class: "formula", id: "output" });
const announcement = el("p", { class: "visually-hidden", role: "status" });

function keyTable(row) {
  const headers = ["key", "length", "cosine", "score", "weight"].map((header) => el("th", { scope: "col" }, header));
  const entries = commonFormat(row.keys.flat());
  const [lengths, cosines, scores, weights] = [row.lengths, row.cosines, row.scores, row.weights].map((numbers) => [numbers, commonFormat(numbers)]);
  const body = data.tokens.map((name, j) => {
    const text = ([numbers, format]) => format(numbers[j]);
    const masked = row.scores[j] === -Infinity;
    return el("tr", {}, el("th", { scope: "row" }, tokenElement(name), " ", el("span", { class: "entries" }, formatVector(row.keys[j], entries))),
      [lengths, cosines].map((column) => el("td", {}, text(column))),
      masked ? el("td", { class: "masked-key" }, "masked") : el("td", {}, text(scores)),
      el("td", { class: "result" }, text(weights)), el("td", { class: "bars" }, weightBar(row.weights[j])));
  });
  return el("table", { class: "snug" }, el("thead", {}, el("tr", {}, headers, el("td", { class: "bars" }))), el("tbody", {}, body));
}

function describe() {
  if (state.normalised) return "Every arrow has length 1: only the angles count, and a long key has no advantage.";
  if (!state.scaled) return "Scaling is off: all scores are larger by the same factor, and the weights are sharper.";
  return "A score depends on both lengths, not only on the angle: a long key may score higher than one in the query’s direction.";
}

function draw() {
  const row = currentRow(), summary = drawCompare(row);
  if (mix) drawMix(row);
  queryLine.textContent = `query = ${formatVector(row.query)}, length ${formatNumber(row.length)}`;
  outputLine.textContent = mix ? `output = ${formatVector(row.output)}` : "";
  numbersBox.replaceChildren(
    el("p", { id: "description" }, describe()),
    el("p", { class: "formula", id: "formula" },
      `score = ${formatNumber(row.length)} × length × cosine${state.scaled ? ` × ${formatNumber(data.scale)}` : ""}`),
    scrollBox("Numbers for each key", keyTable(row)),
  );
  return `${data.queries[state.query]}: ${summary}${mix ? `; output ${formatVector(row.output)}` : ""}`;
}

function setState(change) {
  Object.assign(state, change);
  const summary = draw();
  if (!("keys" in change) || "queries" in change) announcement.textContent = summary; // the handle of a key announces its weight
  reset.disabled = state.keys === initial.keys && state.queries === initial.queries;
}

function setAndShow(change, ...parts) {
  setState(change);
  bringIntoView(...parts);
}

const reset = el("button", { type: "button", id: "reset", disabled: true, onclick: () => setAndShow({ ...initial }, compare.root, reset) }, "Reset");
const switches = el("div", { class: "switches" },
  checkbox("scale", "scaled", true, (scaled) => setAndShow({ scaled }, numbersBox, switches)),
  checkbox("normalise", "normalised", false, (normalised) => setAndShow({ normalised }, numbersBox, switches)));
compare.root.addEventListener("keydown", () => bringIntoView(compare.root, queryLine));
const caption = (title, text) => el("figcaption", {}, el("strong", {}, title), " ", text);

document.getElementById("app").append(
  pageHeader("Attention in the plane", `${data.shape}. Drag an arrow’s tip, or use Tab and the arrow keys.`),
  ...(data.queries.length > 1
    ? [radioGroup("query", "Query", data.queries.map(tokenElement), (query) => setAndShow({ query }, compare.root, queryLine))]
    : []),
  el("div", { class: mix ? "planes" : "planes alone" },
    el("figure", { class: "card" }, compare.root, queryLine, samePlace,
      caption("Query and keys.", "The larger the dot, the larger the weight. A dotted line projects each key onto the query’s direction: the farther out it ends, the higher the score.")),
    mix ? el("figure", { class: "card" }, mix.root, outputLine,
      caption("Values.", "The path adds up weight · value. It ends at the output, a weighted mean of the values, so never outside their convex hull.")) : []),
  el("div", { class: "controls" }, reset, switches),
  numbersBox,
  announcement,
);
announcement.textContent = draw();
