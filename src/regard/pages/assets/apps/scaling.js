// How d_k changes the weights, with and without scaling. The first numbers come from the library; after a slider is moved,
// the page computes them from the library's dot products.
import { bringIntoView } from "../components/bringIntoView.js";
import { createLineChart } from "../components/lineChart.js";
import { checkbox, radioGroup, slider, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { commonFormat, formatNumber, parseNumbers } from "../components/format.js";
import { decodeFloat32 } from "../matrix/payload.js";
import { mean, rowStats, standardDeviation } from "../matrix/rowStats.js";
import { softmax } from "../matrix/softmax.js";

const MEASURES = {
  largest: { name: "largest weight", highest: () => 1 },
  entropy: { name: "entropy", highest: () => maxEntropy },
  gradient: { name: "gradient", highest: () => 0.5 }, // of a row of two equal weights
};

const data = readRecord();
const dots = decodeFloat32(data.dots);
const predicted = parseNumbers(data.predicted);
const opening = {
  row: Object.fromEntries(Object.entries(data.opening.row).map(([name, x]) => [name, parseNumbers(x)])),
  deviation: Number(data.opening.deviation),
  curves: [data.opening.scaled, data.opening.unscaled].map((rows) =>
    rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, Number(x)])))),
};
const keyCount = data.tokens.length, queryCount = data.queries.length;
const maxEntropy = Math.log(keyCount);
const neutral = { sigma: data.sigmas.indexOf(1), temperature: data.temperatures.indexOf(1) };
const state = { place: data.start, scaled: true, query: 0, measure: "largest", ...neutral };

const sigma = () => data.sigmas[state.sigma];
const temperature = () => data.temperatures[state.temperature];
const isUnchanged = () => state.sigma === neutral.sigma && state.temperature === neutral.temperature;
const isInitial = () => isUnchanged() && state.scaled && state.place === data.start;

// -- The numbers --

// The factor of a dot product of standard normal entries. A place is an index of `data.sizes`.
function scoreFactor(place, scaled) {
  return sigma() ** 2 / (scaled ? Math.sqrt(data.sizes[place]) : 1);
}

function scoresOf(query, place, scaled) {
  const from = (place * queryCount + query) * keyCount, by = scoreFactor(place, scaled);
  return Array.from(dots.subarray(from, from + keyCount), (dot) => dot * by);
}

function computeRow(query, place, scaled) {
  const scores = scoresOf(query, place, scaled);
  const { weights } = softmax(scores.map((score) => score / temperature()));
  return { scores, weights, ...rowStats(weights) };
}

const allQueries = data.queries.map((_, query) => query);

// The means over all queries for each d_k, scaled and not; cached until σ or the temperature changes.
let cache = { key: "", curves: null };
function curves() {
  if (isUnchanged()) return opening.curves;
  const key = `${state.sigma} ${state.temperature}`;
  if (cache.key !== key) {
    cache = { key, curves: [true, false].map((scaled) => data.sizes.map((_, place) => {
      const rows = allQueries.map((query) => computeRow(query, place, scaled));
      const meanOf = (name) => mean(rows.map((row) => row[name]));
      return { largest: meanOf("largest"), entropy: meanOf("entropy"), gradient: meanOf("gradient") };
    })) };
  }
  return cache.curves;
}

function scoreDeviation() {
  if (isInitial()) return opening.deviation;
  return standardDeviation(allQueries.flatMap((query) => scoresOf(query, state.place, state.scaled)));
}

// -- The page --

const panel = el("section", { class: "card", id: "row", "aria-labelledby": "row-title" });
const facts = el("div", { class: "card", id: "facts" });
const announcement = el("p", { class: "visually-hidden", role: "status" });
const definitions = (items) => items.map(([name, id, ...text]) => [el("dt", {}, name), el("dd", { id }, ...text)]);

const dkElement = () => el("span", { class: "var" }, "d", el("sub", {}, "k"));

function describe() {
  if (!data.drawn) {
    return state.scaled
      ? ["Divided by √", dkElement(), ". If the entries were independent, the spread of the scores would be the same at every ", dkElement(), "."]
      : ["Not scaled: with more entries the scores spread further apart, and the softmax depends only on their differences."];
  }
  return state.scaled
    ? ["Divided by √", dkElement(), ", the scores have the same spread at every ", dkElement(), ", and the weights stay equally even."]
    : ["The spread of the scores grows like √", dkElement(), ". The softmax depends only on their differences, so one key gets nearly all the weight."];
}

function formula() {
  const divisor = state.scaled ? ` / √${data.sizes[state.place]}` : "";
  return [`score = query · key${divisor}`, `weight = softmax(score${temperature() === 1 ? "" : ` / ${temperature()}`})`];
}

function drawRow(row) {
  const scores = commonFormat(row.scores), weights = commonFormat(row.weights);
  const body = data.tokens.map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, tokenElement(name)), el("td", {}, scores(row.scores[j])),
      el("td", { class: "result" }, weights(row.weights[j])), el("td", { class: "bars" }, weightBar(row.weights[j]))));
  const headers = ["key", "score", "weight"].map((header) => el("th", { scope: "col" }, header));
  const name = tokenElement(data.queries[state.query]);
  panel.className = `card ${state.scaled ? "scaled" : "unscaled"}`;
  panel.replaceChildren(
    el("h2", { id: "row-title" }, "Weights of ", data.named ? ["“", name, "”"] : name),
    el("p", { id: "description" }, describe()),
    el("p", { class: "formula" }, formula()[0], el("br"), formula()[1]),
    scrollBox("Scores and weights for each key", el("table", {},
      el("thead", {}, el("tr", {}, headers, el("td", {}))), el("tbody", {}, body))),
  );
}

function drawFacts(row) {
  const expected = predicted[state.place] * scoreFactor(state.place, state.scaled);
  facts.replaceChildren(
    el("p", { class: "label" }, "largest weight"),
    el("p", { class: "weight", id: "largest" }, formatNumber(row.largest)),
    el("dl", {}, definitions([
      ["entropy, in nats", "entropy", `${formatNumber(row.entropy)} of log ${keyCount} = ${formatNumber(maxEntropy)}`],
      ["largest entry of the gradient", "slope", `${formatNumber(row.slope)} of at most 0.25`],
      ["norm of the gradient", "gradient", formatNumber(row.gradient)],
      ["standard deviation of all scores", "deviation", `${formatNumber(scoreDeviation())} measured`],
      [data.drawn ? ["predicted, ", state.scaled ? "σ²" : ["√", dkElement(), " · σ²"]] : "predicted for independent entries of mean 0",
        "predicted", formatNumber(expected)],
    ])),
  );
}

const measure = () => MEASURES[state.measure];

function drawCurves() {
  const [scaled, unscaled] = curves().map((rows) => rows.map((row) => row[state.measure]));
  const highest = measure().highest(), at = (ys) => formatNumber(ys[state.place]);
  const d = data.sizes[state.place];
  lineChart.draw({
    curves: [{ kind: "scaled", ys: scaled }, { kind: "unscaled", ys: unscaled }],
    main: state.scaled ? "scaled" : "unscaled",
    highest,
    highestText: formatNumber(highest),
    index: state.place,
    label: `Mean ${measure().name} over d_k. At d_k ${d}: scaled ${at(scaled)}, not scaled ${at(unscaled)}.`,
  });
  legend.replaceChildren(
    el("span", { class: "key scaled" }, "divided by √", dkElement(), " ", el("b", { id: "mean-scaled" }, at(scaled))),
    el("span", { class: "key unscaled" }, "not scaled ", el("b", { id: "mean-unscaled" }, at(unscaled))),
  );
}

function draw() {
  const row = isInitial() && state.query === 0 ? opening.row : computeRow(state.query, state.place, state.scaled);
  drawRow(row);
  drawFacts(row);
  drawCurves();
  announcement.textContent = `d_k ${data.sizes[state.place]}, ${state.scaled ? "scaled" : "not scaled"}: largest weight `
    + `${formatNumber(row.largest)}, entropy ${formatNumber(row.entropy)}`;
}

function setState(change) {
  Object.assign(state, change);
  draw();
}

const size = slider([dkElement(), ", the number of entries used"], "size", data.sizes.map(String), state.place, (place) => setState({ place }));
const spread = slider(`σ, ${data.drawn ? "standard deviation of the entries" : "factor of every entry"}`, "sigma", data.sigmas.map(formatNumber), state.sigma, (sigma) => setState({ sigma }));
const heat = slider("temperature", "temperature", data.temperatures.map(formatNumber), state.temperature,
  (temperature) => setState({ temperature }));
const queries = el("select", { id: "query", onchange: (event) => setState({ query: Number(event.target.value) }) },
  data.queries.map((name, i) => el("option", { value: `${i}` }, name)));

const tickStep = data.sizes.at(-1) > 64 ? 2 : 1; // powers of two between ticks, so that their labels fit
const ticks = data.sizes.filter((d) => Number.isInteger(Math.log2(d) / tickStep));
const lineChart = createLineChart("curves", data.sizes, ticks, (place) => {
  size.set(place);
  setState({ place });
});
const legend = el("div", { class: "keys" });
const names = Object.keys(MEASURES);
const texts = names.map((name) => MEASURES[name].name);
const measures = radioGroup("measure", "Measure", texts, (i) => {
  setState({ measure: names[i] });
  bringIntoView(lineChart.node, measures, legend);
}, true);

const about = data.drawn
  ? `${queryCount} random queries, ${keyCount} random keys for each.`
  : `${data.shape}. Only the first entries are used.`;
const settings = el("div", { class: "card sliders" }, size.node, spread.node, heat.node,
  el("div", { class: "choices" }, checkbox(el("span", {}, "divide by √", dkElement()), "scaled", true, (scaled) => setState({ scaled })),
    el("span", {}, el("label", { for: "query" }, "Query"), queries)));
settings.addEventListener("change", () => bringIntoView(panel.querySelector("table"), settings)); // after a slider is released
document.getElementById("app").append(
  pageHeader(["Why scores are divided by √", dkElement()],
    [`${about} Slide `, dkElement(), ", switch the scaling off, and watch the weights."]),
  settings,
  el("div", { class: "beside" }, panel, facts),
  el("section", { class: "card", "aria-labelledby": "curves-title" },
    el("h2", { id: "curves-title" }, "Mean over all queries"),
    measures, lineChart.node, el("p", { class: "axis" }, dkElement()), legend),
  announcement,
);
draw();
