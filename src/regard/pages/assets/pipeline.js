// One query's four steps. What the page opens with is the library's own; only a changed switch is computed here.
import { bar, choices, toggle } from "./controls.js";
import { el, header, record, scrolling, token } from "./dom.js";
import { number, numbers, sumOfProducts, vector } from "./numbers.js";
import { softmax } from "./softmax.js";

const STEPS = ["Compare", "Scale", "Normalise", "Aggregate"];

const data = record();
const keys = numbers(data.key);
const values = numbers(data.value);
const rows = data.rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, numbers(x)])));
const steps = values === null ? STEPS.slice(0, 3) : STEPS;
const state = { query: 0, step: 0, scaled: true, causal: false };

// The row as it is with the switches as they are: scores, shift, exponentials, total, weights, contributions, output.
function current() {
  const row = rows[state.query];
  if (state.scaled && !state.causal) return row;
  const hidden = row.scores.map((s, j) => s === -Infinity || (state.causal && !data.causal[state.query][j]));
  const unmasked = state.scaled ? row.scaled_scores : row.raw_scores;
  const scores = unmasked.map((s, j) => (hidden[j] ? -Infinity : s));
  const result = { ...row, scores, ...softmax(scores) };
  if (values !== null) {
    result.contributions = values.map((v, j) => v.map((x) => (hidden[j] ? 0 : result.weights[j] * x)));
    result.output = values[0].map((_, i) => result.contributions.reduce((sum, c) => sum + c[i], 0));
  }
  return result;
}

const cell = (text, kind = "") => el("td", { class: kind }, text);
const hiddenCell = () => el("td", { class: "hidden-key" }, "hidden");

// Each step: a sentence, the heads of the columns, the cells of one key, and what stands below.
function told(step, row) {
  const seen = (j) => row.scores[j] !== -Infinity;
  const seesAny = row.scores.some((_, j) => seen(j));
  const factor = number(data.scale);
  const masks = state.causal ? [...data.masks, "causal()"] : data.masks;
  if (step === 0) {
    return {
      says: "Multiply query and key entry by entry and add up. The larger the sum, the better the match.",
      formula: `query = ${vector(row.query)}`,
      heads: ["key", "query · key", "sum"],
      cells: (j) => [
        cell(vector(keys[j])),
        cell(sumOfProducts(row.query, keys[j])),
        cell(number(row.raw_scores[j]), "result"),
      ],
    };
  }
  if (step === 1) {
    return {
      says: state.scaled
        ? "Multiply every sum by one factor, so that scores do not grow with the number of entries."
        : "Scaling is off: the sums are the scores, and grow with the number of entries.",
      formula: [state.scaled ? `score = sum × ${factor}` : "score = sum", ...masks].join(", then "),
      heads: ["sum", "factor", "score"],
      cells: (j) => [
        cell(number(row.raw_scores[j])),
        cell(state.scaled ? `× ${factor}` : "× 1"),
        seen(j) ? cell(number(row.scores[j]), "result") : hiddenCell(),
      ],
    };
  }
  if (step === 2) {
    return {
      says: seesAny
        ? "Take the exponential of each score and divide by the sum of all: positive weights that add up to 1."
        : "This query sees no key: its weights are zeros.",
      formula: `weight = exp(score − ${number(row.shift)}) / ${number(row.total)}`,
      heads: ["score", "exp", "weight", ""],
      cells: (j) => [
        seen(j) ? cell(number(row.scores[j])) : hiddenCell(),
        cell(number(row.exponentials[j])),
        cell(number(row.weights[j]), "result"),
        el("td", { class: "bars" }, bar(row.weights[j])),
      ],
    };
  }
  return {
    says: seesAny
      ? "Multiply each value by its weight and add up: the output is a mean of the values."
      : "This query sees no key: its output is zeros.",
    formula: `output = ${vector(row.output)}`,
    heads: ["weight", "value", "weight · value"],
    cells: (j) => [
      cell(number(row.weights[j])),
      cell(vector(values[j])),
      cell(vector(row.contributions[j]), "result"),
    ],
    foot: ["", "", vector(row.output)],
  };
}

const panel = el("section", { id: "panel", "aria-labelledby": "step-title" });
const announced = el("p", { class: "visually-hidden", role: "status" });

function table(says) {
  const heads = ["token", ...says.heads].map((head) =>
    head ? el("th", { scope: "col" }, head) : el("td", {}),
  );
  const body = data.tokens.map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, token(name)), says.cells(j)),
  );
  const foot = says.foot
    ? [el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "output"), says.foot.map((x) => cell(x, "result"))))]
    : [];
  return el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, body), foot);
}

function draw() {
  const says = told(state.step, current());
  const name = steps[state.step];
  panel.replaceChildren(
    el("h2", { id: "step-title" }, `${state.step + 1}. ${name}`),
    el("p", { id: "says" }, says.says),
    el("p", { class: "formula", id: "formula" }, says.formula),
    scrolling(`${name}: numbers for each key`, table(says)),
  );
  announced.textContent = `Step ${state.step + 1} of ${steps.length}, ${name}; query ${data.queries[state.query]}`;
  stepButtons.forEach((button, i) => {
    if (i === state.step) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  previous.disabled = state.step === 0;
  next.disabled = state.step === steps.length - 1;
}

function change(part) {
  Object.assign(state, part);
  state.step = Math.min(Math.max(state.step, 0), steps.length - 1);
  draw();
}

const stepButtons = steps.map((name, i) =>
  el("button", { type: "button", onclick: () => change({ step: i }) }, el("span", { class: "count" }, `${i + 1}`), name),
);
const move = (by) => () => change({ step: state.step + by });
const previous = el("button", { type: "button", id: "previous", onclick: move(-1) }, "← Previous");
const next = el("button", { type: "button", id: "next", class: "primary", onclick: move(1) }, "Next →");

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const box = event.target.closest(".scroll");
  const taken = event.target.type === "radio" || (box && box.scrollWidth > box.clientWidth);
  if (taken) return; // there the arrows choose the query, or scroll
  event.preventDefault();
  move(by)();
});

document.getElementById("app").append(
  header("How one query attends", `${data.shape}. Choose a query, then go through the steps; ← and → do it too.`),
  choices("query", "Query", data.queries.map(token), (query) => change({ query })),
  el("nav", { "aria-label": "Steps" }, el("ol", { class: "steps" }, stepButtons.map((b) => el("li", {}, b)))),
  panel,
  el("div", { class: "controls" }, previous, next, 
    el("div", { class: "switches" }, toggle("scale", "scaled", true, (scaled) => change({ scaled })),
      data.causal ? toggle("causal mask", "causal", false, (causal) => change({ causal })) : [])),
  announced,
);
draw();
