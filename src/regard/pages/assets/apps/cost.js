// Attention, one multiplication at a time. Steps and counters come from the library; the page plays them back.
import { bringIntoBox, bringIntoView } from "../components/bringIntoView.js";
import { radioGroup, slider } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { createCostGrowth } from "../components/costGrowth.js";
import { commonFormat, formatFactor, formatNumber, formatVector, parseNumbers } from "../components/format.js";
import { createMatrixProduct } from "../components/matrixProduct.js";
import { createStory } from "../components/story.js";

const PHASES = { scores: "Compare", weights: "Normalise", output: "Aggregate" };
const COUNTERS = ["multiply-adds for scores", "multiply-adds for output", "exponentials", "additions", "comparisons", "divisions"];
const SPEEDS = [0.25, 0.5, 1, 2, 4, 8, 16]; // steps per second
const STORY_SPEED = 1, PRODUCT_SPEED = 3; // indices of the speeds to start with

const data = readRecord();
const [query, key, value, weights] = ["query", "key", "value", "weights"].map((name) => parseNumbers(data[name]));
const moments = data.moments.map(([table, row, column, term, total, ...counters]) =>
  ({ table, row, column, term, total: Number(total), counters }));
const [queryCount, keyCount, dim, valueDim] = [query.length, key.length, key[0].length, value[0].length];
// `done` moments have happened; the last of them is shown. In the story, `stop` is the sentence that is being told.
const state = { done: 0, speed: STORY_SPEED, isStory: true, stop: 0 };
const story = createStory({ moments, query, key, value, weights, queries: data.queries, tokens: data.tokens, masked: data.masked });

const sameCell = (a, b) => a && b && a.table === b.table && a.row === b.row && a.column === b.column;
const endsCell = (i) => !sameCell(moments[i], moments[i + 1]);
const startOf = Object.fromEntries(Object.keys(PHASES).map((table) => [table, moments.findIndex((m) => m.table === table)]));
const currentMoment = () => moments[state.done - 1];
const phase = () => currentMoment()?.table ?? "scores";

// For each cell of a table, the moments that changed it.
const momentsOfCell = new Map();
moments.forEach((moment, i) => {
  const name = `${moment.table} ${moment.row} ${moment.column}`;
  momentsOfCell.set(name, [...(momentsOfCell.get(name) ?? []), i]);
});

// One format for each matrix, with every number that its cells go through.
const formats = Object.fromEntries(Object.entries({ query, key, value, weights, scores: [], output: [] }).map(([name, rows]) =>
  [name, commonFormat([...rows.flat(), ...moments.filter((moment) => moment.table === name).map((moment) => moment.total)])]));

// The text of a cell of scores or output at the current moment; null before its first term.
function cellText(table, i, j) {
  const times = momentsOfCell.get(`${table} ${i} ${j}`);
  if (!times) return table === "scores" ? "masked" : formats.output(0); // every term is masked
  const last = times.findLast((time) => time < state.done);
  return last === undefined ? null : formats[table](moments[last].total);
}

// -- The two products --

const products = {
  scores: createMatrixProduct(
    { name: "query", rows: data.queries, columns: null, shape: [queryCount, dim] },
    { name: "key, transposed", rows: null, columns: data.tokens, shape: [dim, keyCount] },
    { name: "scores", rows: data.queries, columns: data.tokens, shape: [queryCount, keyCount] },
  ),
  output: createMatrixProduct(
    { name: "weights", rows: data.queries, columns: data.tokens, shape: [queryCount, keyCount] },
    { name: "value", rows: data.tokens, columns: null, shape: [keyCount, valueDim] },
    { name: "output", rows: data.queries, columns: null, shape: [queryCount, valueDim] },
  ),
};

function drawProduct() {
  const now = currentMoment(), table = phase() === "scores" ? "scores" : "output";
  const weightsKnown = (i) => state.done > startOf.weights + i;
  const text = (part, i, j) => {
    if (part === "result") return cellText(table, i, j);
    if (table === "scores") return part === "left" ? formats.query(query[i][j]) : formats.key(key[j][i]);
    if (part === "right") return formats.value(value[i][j]);
    return weightsKnown(i) ? formats.weights(weights[i][j]) : null;
  };
  const kind = (part, i, j) => {
    const maskable = (part === "result" && table === "scores") || (part === "left" && table === "output");
    const masked = maskable && data.masked[i][j] ? "masked-key " : "";
    const introduced = state.isStory ? story.stops[state.stop].introduces : null;
    if (introduced) return masked + (part === introduced ? "line" : "");
    if (!now) return masked;
    if (now.table === "weights") return masked + (part === "left" && i === now.row ? "at-work" : "");
    const [along, across] = { left: [i === now.row, j === now.term], right: [j === now.column, i === now.term],
      result: [i === now.row && j === now.column, true] }[part];
    if (part === "result") return masked + (along ? "at-work" : "");
    return masked + (along && (across || state.isStory) ? "factor" : along ? "line" : "");
  };
  if (!productBox.contains(products[table].node)) productBox.replaceChildren(scrollBox("Matrix product", products[table].node));
  products[table].draw(text, kind);
  bringIntoBox(productBox.querySelector(".at-work"));
}

// -- Texts --

function describeMoment() {
  const now = currentMoment();
  const stop = state.isStory ? story.stops[state.stop] : null;
  if (stop && stop.sum !== null) return stop;
  if (!now) return { title: ["Nothing is computed yet"], sum: "Press Step or Play.", words: [] };
  return { ...describeProduct(now), words: stop ? stop.words : story.narrate(now) };
}

function describeProduct(now) {
  const { table, row, column, term } = now, of = tokenElement(data.queries[row]);
  if (table === "weights") {
    const raw = data.tokens.map((_, j) => cellText("scores", row, j));
    return { title: ["Weights of ", of], sum: `softmax([${shorten(raw)}] / √${dim}) = ${formatVector(weights[row])}` };
  }
  const [a, b] = table === "scores" ? [query[row][term], key[column][term]] : [weights[row][term], value[term][column]];
  const before = sameCell(moments[state.done - 2], now) ? `${formatNumber(moments[state.done - 2].total)} + ` : "";
  return {
    title: table === "scores" ? ["Score of ", of, " → ", tokenElement(data.tokens[column])] : ["Output of ", of, `, entry ${column}`],
    sum: `${before}${formatFactor(a)} · ${formatFactor(b)} = ${formatNumber(now.total)}`,
  };
}

const shorten = (texts) => (texts.length > 8 ? [...texts.slice(0, 6), "…", texts.at(-1)] : texts).join(", ");

const productBox = el("div", { id: "product" });
const title = el("h2", { id: "walk-title" });
const sum = el("p", { class: "sum", id: "sum" });
const words = el("p", { id: "words" });
const announcement = el("p", { class: "visually-hidden", role: "status" });
const counterValues = COUNTERS.map(() => el("b"));
const totals = moments.at(-1)?.counters ?? COUNTERS.map(() => 0);
const counters = el("dl", { class: "counters", id: "counters" }, COUNTERS.map((name, i) =>
  el("div", {}, el("dt", {}, name), el("dd", {}, counterValues[i], ` of ${totals[i]}`))));

function draw() {
  drawProduct();
  const said = describeMoment();
  title.replaceChildren(...said.title);
  sum.textContent = said.sum;
  words.replaceChildren(...said.words);
  counterValues.forEach((node, i) => (node.textContent = `${currentMoment()?.counters[i] ?? 0}`));
  if (!timer) announcement.textContent = `${stepText(place())}. ${title.textContent}: ${said.sum} ${words.textContent}`;
  phases.forEach(({ button, table }) => {
    if (table === phase()) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  back.disabled = place() === 0;
  forward.disabled = cell.disabled = place() === lastPlace();
  cell.hidden = state.isStory;
  play.textContent = timer ? "Pause" : "Play";
}

// -- Moving --

let timer = null;

function pause() {
  clearInterval(timer);
  timer = null;
}

// A place is a stop of the story, or the number of multiplications done.
const place = () => (state.isStory ? state.stop : state.done);
const lastPlace = () => (state.isStory ? story.stops.length - 1 : moments.length);

function go(target) {
  const at = Math.min(Math.max(target, 0), lastPlace());
  if (state.isStory) Object.assign(state, { stop: at, done: story.stops[at].done });
  else state.done = at;
  if (at === lastPlace()) pause();
  steps.set(at);
  draw();
}

function goAndShow(target) {
  go(target);
  showWork();
}

const showWork = () => bringIntoView(productBox.querySelector(".at-work") ?? texts, texts, player, productBox);

const pauseAndGo = (target) => {
  pause();
  goAndShow(target());
};
const nextCell = () => {
  if (state.isStory) return state.stop + 1;
  const ahead = moments.findIndex((_, i) => i >= state.done && endsCell(i));
  return ahead < 0 ? moments.length : ahead + 1;
};
const previousCell = () => (state.isStory ? state.stop - 1 : moments.findLastIndex((_, i) => i < state.done - 1 && endsCell(i)) + 1);

// The place at which a number of moments have happened, or the last before it.
const placeAfter = (done) => (state.isStory ? story.stops.findLastIndex((stop) => stop.done <= done) : done);

function start() {
  timer = setInterval(() => goAndShow(place() + 1), 1000 / SPEEDS[state.speed]);
  goAndShow(place() === lastPlace() ? 0 : place() + 1);
}

function playOrPause() {
  if (timer) pauseAndGo(place);
  else start();
}

function setMode(isStory) {
  pause();
  const isAtStart = state.done === 0;
  state.isStory = isStory;
  state.stop = isStory ? (isAtStart ? 0 : placeAfter(state.done)) : state.stop;
  state.speed = isStory ? STORY_SPEED : PRODUCT_SPEED;
  speed.set(state.speed);
  showSlider();
  goAndShow(place());
}

const button = (id, text, onclick, kind = "") => el("button", { type: "button", id, class: kind, onclick }, text);
const back = button("back", "← Back", () => pauseAndGo(() => place() - 1));
const forward = button("step", "Step →", () => pauseAndGo(() => place() + 1), "primary");
const cell = button("cell", "Next cell", () => pauseAndGo(nextCell));
const play = button("play", "Play", playOrPause);
const stepText = (i) => (state.isStory ? `step ${i + 1} of ${story.stops.length}` : `step ${i} of ${moments.length}`);
const sliderBox = el("div");
let steps = null;

function showSlider() {
  const texts = Array.from({ length: lastPlace() + 1 }, (_, i) => stepText(i));
  steps = slider("progress", "steps", texts, place(), (target) => {
    pause();
    go(target);
  });
  steps.input.addEventListener("change", showWork); // after the slider is released
  sliderBox.replaceChildren(steps.node);
}
const speed = slider("steps per second", "speed", SPEEDS.map(String), state.speed, (index) => {
  state.speed = index;
  if (timer) {
    pause();
    start();
  }
});
const phases = Object.entries(PHASES).map(([table, name], i) => ({
  table,
  button: el("button", { type: "button", onclick: () => pauseAndGo(() => (i === 0 ? 0 : placeAfter(startOf[table] + 1 || moments.length))) },
    el("span", { class: "count" }, `${i + 1}`), name),
}));

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const box = event.target.closest(".scroll");
  if (event.target.matches("input") || (box && box.scrollWidth > box.clientWidth)) return; // these use the arrow keys themselves
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) pauseAndGo(() => (event.shiftKey ? (by > 0 ? nextCell() : previousCell()) : place() + by));
  else if (event.key === " " && !event.target.closest("button, summary")) playOrPause();
  else return;
  event.preventDefault();
});

const texts = el("div", {}, title, sum, words);
const player = el("div", { class: "player" }, el("div", { class: "controls" }, back, forward, cell, play), speed.node, sliderBox);
document.getElementById("app").append(
  pageHeader("The cost of attention",
    `${data.shape}. Follow the story, or every single multiplication. ← and → step, with Shift by a cell; Space plays.`),
  radioGroup("mode", "Walk", [`the story, ${story.stops.length} steps`, `every multiplication, ${moments.length} steps`], (i) => setMode(i === 0), true),
  el("nav", { "aria-label": "Phases" }, el("ol", { class: "steps" }, phases.map(({ button }) => el("li", {}, button)))),
  el("section", { id: "panel", "aria-labelledby": "walk-title" }, texts, productBox, player, counters),
  createCostGrowth(data.lengths, [dim, valueDim]),
  announcement,
);
showSlider();
draw();
