// What d_k does to the weights, scaled and not. What the page opens with is the library's own; what a slider changes
// is computed here, from the dot products that the library made.
import { chart } from "./chart.js";
import { bar, choices, slider, toggle } from "./controls.js";
import { el, header, record, scrolling, token } from "./dom.js";
import { number, numbers, unpacked } from "./numbers.js";
import { deviation, mean, sharpness } from "./sharpness.js";
import { softmax } from "./softmax.js";

const MEASURES = {
  largest: { name: "largest weight", highest: () => 1 },
  entropy: { name: "entropy", highest: () => evenly },
  gradient: { name: "gradient", highest: () => 0.5 }, // a row of two equal weights has the most
};

const data = record();
const dots = unpacked(data.dots);
const predicted = numbers(data.predicted);
const opening = {
  row: Object.fromEntries(Object.entries(data.opening.row).map(([name, x]) => [name, numbers(x)])),
  deviation: Number(data.opening.deviation),
  curves: [data.opening.scaled, data.opening.unscaled].map((rows) =>
    rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, Number(x)])))),
};
const keyCount = data.tokens.length, queryCount = data.queries.length;
const evenly = Math.log(keyCount);
const one = { sigma: data.sigmas.indexOf(1), temperature: data.temperatures.indexOf(1) };
const state = { place: data.start, scaled: true, query: 0, measure: "largest", ...one };

const sigma = () => data.sigmas[state.sigma];
const temperature = () => data.temperatures[state.temperature];
const untouched = () => state.sigma === one.sigma && state.temperature === one.temperature;
const atStart = () => untouched() && state.scaled && state.place === data.start;

// -- The numbers --

// What a dot product of standard normal entries is multiplied with.
function factor(place, scaled) {
  return sigma() ** 2 / (scaled ? Math.sqrt(data.sizes[place]) : 1);
}

function scoresOf(query, place, scaled) {
  const from = (place * queryCount + query) * keyCount, by = factor(place, scaled);
  return Array.from(dots.subarray(from, from + keyCount), (dot) => dot * by);
}

function rowOf(query, place, scaled) {
  const scores = scoresOf(query, place, scaled);
  const { weights } = softmax(scores.map((score) => score / temperature()));
  return { scores, weights, ...sharpness(weights) };
}

const everyQuery = data.queries.map((_, query) => query);

// The means over all queries for each d_k, scaled and not; they stay until σ or the temperature moves.
let known = { at: "", curves: null };
function curves() {
  if (untouched()) return opening.curves;
  const at = `${state.sigma} ${state.temperature}`;
  if (known.at !== at) {
    known = { at, curves: [true, false].map((scaled) => data.sizes.map((_, place) => {
      const rows = everyQuery.map((query) => rowOf(query, place, scaled));
      const over = (name) => mean(rows.map((row) => row[name]));
      return { largest: over("largest"), entropy: over("entropy"), gradient: over("gradient") };
    })) };
  }
  return known.curves;
}

function measured() {
  if (atStart()) return opening.deviation;
  return deviation(everyQuery.flatMap((query) => scoresOf(query, state.place, state.scaled)));
}

// -- The page --

const panel = el("section", { class: "card", id: "row", "aria-labelledby": "row-title" });
const facts = el("div", { class: "card", id: "facts" });
const announced = el("p", { class: "visually-hidden", role: "status" });
const pairs = (listed) => listed.map(([name, id, ...says]) => [el("dt", {}, name), el("dd", { id }, ...says)]);

const dk = () => el("span", { class: "var" }, "d", el("sub", {}, "k"));

function says() {
  if (!data.drawn) {
    return state.scaled
      ? ["Divided by √", dk(), ". Were the entries independent, the scores would spread as far at every ", dk(), "."]
      : ["Not divided: with more entries the scores spread further apart, and softmax sees their distances only."];
  }
  return state.scaled
    ? ["Divided by √", dk(), " the scores spread as far at every ", dk(), ", and the weights stay as even."]
    : ["The scores spread like √", dk(), ". Softmax sees their distances only, so one key comes to have everything."];
}

function formula() {
  const divisor = state.scaled ? ` / √${data.sizes[state.place]}` : "";
  return [`score = query · key${divisor}`, `weight = softmax(score${temperature() === 1 ? "" : ` / ${temperature()}`})`];
}

function drawRow(row) {
  const body = data.tokens.map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, token(name)), el("td", {}, number(row.scores[j])),
      el("td", { class: "result" }, number(row.weights[j])), el("td", { class: "bars" }, bar(row.weights[j]))));
  const heads = ["key", "score", "weight"].map((head) => el("th", { scope: "col" }, head));
  const name = token(data.queries[state.query]);
  panel.className = `card ${state.scaled ? "scaled" : "unscaled"}`;
  panel.replaceChildren(
    el("h2", { id: "row-title" }, "The weights of ", data.named ? ["“", name, "”"] : name),
    el("p", { id: "says" }, says()),
    el("p", { class: "formula" }, formula()[0], el("br"), formula()[1]),
    scrolling("Scores and weights for each key", el("table", {},
      el("thead", {}, el("tr", {}, heads, el("td", {}))), el("tbody", {}, body))),
  );
}

function drawFacts(row) {
  const expected = predicted[state.place] * factor(state.place, state.scaled);
  facts.replaceChildren(
    el("p", { class: "label" }, "largest weight"),
    el("p", { class: "weight", id: "largest" }, number(row.largest)),
    el("dl", {}, pairs([
      ["entropy, in nats", "entropy", `${number(row.entropy)} of log ${keyCount} = ${number(evenly)}`],
      ["gradient, largest entry", "slope", `${number(row.slope)} of at most 0.25`],
      ["gradient, its size", "gradient", number(row.gradient)],
      ["standard deviation of all scores", "deviation", `${number(measured())} measured`],
      [data.drawn ? ["predicted, ", state.scaled ? "σ²" : ["√", dk(), " · σ²"]] : "predicted for independent entries of mean 0",
        "predicted", number(expected)],
    ])),
  );
}

const measure = () => MEASURES[state.measure];

function drawCurves() {
  const [scaled, unscaled] = curves().map((rows) => rows.map((row) => row[state.measure]));
  const highest = measure().highest(), at = (ys) => number(ys[state.place]);
  const d = data.sizes[state.place];
  picture.draw({
    curves: [{ kind: "scaled", ys: scaled }, { kind: "unscaled", ys: unscaled }],
    main: state.scaled ? "scaled" : "unscaled",
    highest,
    highestText: number(highest),
    place: state.place,
    says: `Mean ${measure().name} over d_k. At d_k ${d}: scaled ${at(scaled)}, not scaled ${at(unscaled)}.`,
  });
  legend.replaceChildren(
    el("span", { class: "key scaled" }, "divided by √", dk(), " ", el("b", { id: "mean-scaled" }, at(scaled))),
    el("span", { class: "key unscaled" }, "not scaled ", el("b", { id: "mean-unscaled" }, at(unscaled))),
  );
}

function draw() {
  const row = atStart() && state.query === 0 ? opening.row : rowOf(state.query, state.place, state.scaled);
  drawRow(row);
  drawFacts(row);
  drawCurves();
  announced.textContent = `d_k ${data.sizes[state.place]}, ${state.scaled ? "scaled" : "not scaled"}: largest weight `
    + `${number(row.largest)}, entropy ${number(row.entropy)}`;
}

function change(part) {
  Object.assign(state, part);
  draw();
}

const size = slider([dk(), ", the entries that count"], "size", data.sizes.map(String), state.place, (place) => change({ place }));
const spread = slider(`σ, ${data.drawn ? "standard deviation of the entries" : "times every entry"}`, "sigma", data.sigmas.map(number), state.sigma, (sigma) => change({ sigma }));
const heat = slider("temperature", "temperature", data.temperatures.map(number), state.temperature,
  (temperature) => change({ temperature }));
const queries = el("select", { id: "query", onchange: (event) => change({ query: Number(event.target.value) }) },
  data.queries.map((name, i) => el("option", { value: `${i}` }, name)));

const every = data.sizes.at(-1) > 64 ? 2 : 1; // power of two, as many as there is room for
const powers = data.sizes.filter((d) => Number.isInteger(Math.log2(d) / every));
const picture = chart("curves", data.sizes, powers, (place) => {
  size.set(place);
  change({ place });
});
const legend = el("div", { class: "keys" });
const names = Object.keys(MEASURES);
const texts = names.map((name) => MEASURES[name].name);
const measures = choices("measure", "Measure", texts, (i) => change({ measure: names[i] }), true);

const about = data.drawn
  ? `${queryCount} random queries, ${keyCount} random keys for each.`
  : `${data.shape}; as many of the first count as you say.`;
document.getElementById("app").append(
  header(["Why scores are divided by √", dk()],
    [`${about} Slide `, dk(), ", switch the scaling off, and watch what the weights do."]),
  el("div", { class: "card sliders" }, size.node, spread.node, heat.node,
    el("div", { class: "choices" }, toggle(el("span", {}, "divide by √", dk()), "scaled", true, (scaled) => change({ scaled })),
      el("span", {}, el("label", { for: "query" }, "Query"), queries))),
  el("div", { class: "beside" }, panel, facts),
  el("section", { class: "card", "aria-labelledby": "curves-title" },
    el("h2", { id: "curves-title" }, "The mean over all queries"),
    measures, picture.node, el("p", { class: "axis" }, dk()), legend),
  announced,
);
draw();
