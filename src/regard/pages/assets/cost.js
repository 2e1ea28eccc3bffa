// Attention one multiplication at a time. The steps and the counters are the library's own; the page only turns them
// over, forwards and back.
import { slider } from "./controls.js";
import { el, header, record, scrolling, token } from "./dom.js";
import { growth } from "./growth.js";
import { number, numbers, vector } from "./numbers.js";
import { product } from "./product.js";

const PHASES = { scores: "Compare", weights: "Normalise", output: "Aggregate" };
const COUNTERS = ["multiply-adds for scores", "multiply-adds for output", "exponentials", "additions", "comparisons", "divisions"];
const SPEEDS = [1, 2, 4, 8, 16];

const data = record();
const [query, key, value, weights] = ["query", "key", "value", "weights"].map((name) => numbers(data[name]));
const moments = data.moments.map(([table, row, column, term, total, ...counters]) =>
  ({ table, row, column, term, total: Number(total), counters }));
const [queryCount, keyCount, dim, valueDim] = [query.length, key.length, key[0].length, value[0].length];
const state = { done: 0, speed: 1 }; // of the moments, `done` have happened; the last of them is shown

const sameCell = (a, b) => a && b && a.table === b.table && a.row === b.row && a.column === b.column;
const endsCell = (i) => !sameCell(moments[i], moments[i + 1]);
const startOf = Object.fromEntries(Object.keys(PHASES).map((table) => [table, moments.findIndex((m) => m.table === table)]));
const current = () => moments[state.done - 1];
const phase = () => current()?.table ?? "scores";

// When each cell of a table got its first and its last term, and each row its weights.
const heldAt = new Map();
moments.forEach((moment, i) => {
  const name = `${moment.table} ${moment.row} ${moment.column}`;
  heldAt.set(name, [...(heldAt.get(name) ?? []), i]);
});

// What a cell of scores or output holds by now; null before its first term.
function held(table, i, j) {
  const times = heldAt.get(`${table} ${i} ${j}`);
  if (!times) return table === "scores" ? "hidden" : number(0); // a mask left nothing to add
  const last = times.findLast((time) => time < state.done);
  return last === undefined ? null : number(moments[last].total);
}

// -- The two products --

const boards = {
  scores: product(
    { name: "query", rows: data.queries, columns: null, shape: [queryCount, dim] },
    { name: "key, in columns", rows: null, columns: data.tokens, shape: [dim, keyCount] },
    { name: "scores", rows: data.queries, columns: data.tokens, shape: [queryCount, keyCount] },
  ),
  output: product(
    { name: "weights", rows: data.queries, columns: data.tokens, shape: [queryCount, keyCount] },
    { name: "value", rows: data.tokens, columns: null, shape: [keyCount, valueDim] },
    { name: "output", rows: data.queries, columns: null, shape: [queryCount, valueDim] },
  ),
};

function drawProduct() {
  const now = current(), table = phase() === "scores" ? "scores" : "output";
  const weightsKnown = (i) => state.done > startOf.weights + i;
  const text = (part, i, j) => {
    if (part === "result") return held(table, i, j);
    if (table === "scores") return number(part === "left" ? query[i][j] : key[j][i]);
    if (part === "right") return number(value[i][j]);
    return weightsKnown(i) ? number(weights[i][j]) : null;
  };
  const kind = (part, i, j) => {
    const hidden = (part === "result" && table === "scores") || (part === "left" && table === "output");
    const passed = hidden && data.hidden[i][j] ? "hidden-key " : "";
    if (!now) return passed;
    if (now.table === "weights") return passed + (part === "left" && i === now.row ? "at-work" : "");
    const [along, across] = { left: [i === now.row, j === now.term], right: [j === now.column, i === now.term],
      result: [i === now.row && j === now.column, true] }[part];
    if (part === "result") return passed + (along ? "at-work" : "");
    return passed + (along && across ? "factor" : along ? "line" : "");
  };
  if (!place.contains(boards[table].node)) place.replaceChildren(scrolling("The product", boards[table].node));
  boards[table].draw(text, kind);
}

// -- What is told --

function told() {
  const now = current();
  if (!now) return { title: ["Nothing is computed yet"], sum: "Step, or let it play." };
  const { table, row, column, term } = now, of = token(data.queries[row]);
  if (table === "weights") {
    const raw = data.tokens.map((_, j) => held("scores", row, j));
    return { title: ["Weights of ", of], sum: `softmax([${shorter(raw)}] / √${dim}) = ${vector(weights[row])}` };
  }
  const [a, b] = table === "scores" ? [query[row][term], key[column][term]] : [weights[row][term], value[term][column]];
  const before = sameCell(moments[state.done - 2], now) ? `${number(moments[state.done - 2].total)} + ` : "";
  return {
    title: table === "scores" ? ["Score of ", of, " → ", token(data.tokens[column])] : ["Output of ", of, `, entry ${column}`],
    sum: `${before}${number(a)} · ${number(b)} = ${number(now.total)}`,
  };
}

const shorter = (texts) => (texts.length > 8 ? [...texts.slice(0, 6), "…", texts.at(-1)] : texts).join(", ");

const place = el("div", { id: "product" });
const title = el("h2", { id: "walk-title" });
const sum = el("p", { class: "sum", id: "sum" });
const announced = el("p", { class: "visually-hidden", role: "status" });
const counted = COUNTERS.map(() => el("b"));
const most = moments.at(-1)?.counters ?? COUNTERS.map(() => 0);
const counters = el("dl", { class: "counters", id: "counters" }, COUNTERS.map((name, i) =>
  el("div", {}, el("dt", {}, name), el("dd", {}, counted[i], ` of ${most[i]}`))));

function draw() {
  drawProduct();
  const says = told();
  title.replaceChildren(...says.title);
  sum.textContent = says.sum;
  counted.forEach((node, i) => (node.textContent = `${current()?.counters[i] ?? 0}`));
  if (!timer) announced.textContent = `${stepText(state.done)}. ${title.textContent}: ${says.sum}`;
  phases.forEach(({ button, table }) => {
    if (table === phase()) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  back.disabled = state.done === 0;
  forth.disabled = cell.disabled = state.done === moments.length;
  play.textContent = timer ? "Pause" : "Play";
}

// -- Moving --

let timer = null;

function pause() {
  clearInterval(timer);
  timer = null;
}

function go(done) {
  state.done = Math.min(Math.max(done, 0), moments.length);
  if (state.done === moments.length) pause();
  steps.set(state.done);
  draw();
}

const moved = (to) => {
  pause();
  go(to());
};
const nextCell = () => {
  const ahead = moments.findIndex((_, i) => i >= state.done && endsCell(i));
  return ahead < 0 ? moments.length : ahead + 1;
};
const cellBefore = () => moments.findLastIndex((_, i) => i < state.done - 1 && endsCell(i)) + 1;

function start() {
  timer = setInterval(() => go(state.done + 1), 1000 / SPEEDS[state.speed]);
  go(state.done === moments.length ? 0 : state.done + 1);
}

function playOrPause() {
  if (timer) moved(() => state.done);
  else start();
}

const button = (id, text, onclick, kind = "") => el("button", { type: "button", id, class: kind, onclick }, text);
const back = button("back", "← Back", () => moved(() => state.done - 1));
const forth = button("step", "Step →", () => moved(() => state.done + 1), "primary");
const cell = button("cell", "Next cell", () => moved(nextCell));
const play = button("play", "Play", playOrPause);
const stepText = (i) => `step ${i} of ${moments.length}`;
const steps = slider("through all steps", "steps", Array.from({ length: moments.length + 1 }, (_, i) => stepText(i)), 0,
  (done) => moved(() => done));
const speed = slider("steps per second", "speed", SPEEDS.map(String), state.speed, (chosen) => {
  state.speed = chosen;
  if (timer) {
    pause();
    start();
  }
});
const phases = Object.entries(PHASES).map(([table, name], i) => ({
  table,
  button: el("button", { type: "button", onclick: () => moved(() => (i === 0 ? 0 : startOf[table] + 1 || moments.length)) },
    el("span", { class: "count" }, `${i + 1}`), name),
}));

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const box = event.target.closest(".scroll");
  if (event.target.type === "range" || (box && box.scrollWidth > box.clientWidth)) return; // they use the keys themselves
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) moved(() => (event.shiftKey ? (by > 0 ? nextCell() : cellBefore()) : state.done + by));
  else if (event.key === " " && !event.target.closest("button, summary")) playOrPause();
  else return;
  event.preventDefault();
});

document.getElementById("app").append(
  header("What attention costs",
    `${data.shape}. One multiplication at a time: ← and → step, with Shift to the next cell, Space plays.`),
  el("nav", { "aria-label": "Phases" }, el("ol", { class: "steps" }, phases.map((each) => el("li", {}, each.button)))),
  el("section", { id: "panel", "aria-labelledby": "walk-title" },
    title, sum, place, counters),
  el("div", { class: "player" }, el("div", { class: "controls" }, back, forth, cell, play), speed.node, steps.node),
  growth(data.lengths, [dim, valueDim]),
  announced,
);
draw();
