// The four steps of one query. The numbers come from the library; the page computes them only after a switch is changed.
import { checkbox, radioGroup, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { formatNumber, formatVector, parseNumbers, sumOfProducts } from "../components/format.js";
import { softmax } from "../matrix/softmax.js";

const STEPS = ["Compare", "Scale", "Normalise", "Aggregate"];

const data = readRecord();
const keys = parseNumbers(data.key);
const values = parseNumbers(data.value);
const rows = data.rows.map((row) => Object.fromEntries(Object.entries(row).map(([name, x]) => [name, parseNumbers(x)])));
const steps = values === null ? STEPS.slice(0, 3) : STEPS;
const state = { query: 0, step: 0, scaled: true, causal: false };

// The numbers of the selected query with the current switches.
function currentRow() {
  const row = rows[state.query];
  if (state.scaled && !state.causal) return row;
  const masked = row.scores.map((s, j) => s === -Infinity || (state.causal && !data.causal[state.query][j]));
  const unmasked = state.scaled ? row.scaled_scores : row.raw_scores;
  const scores = unmasked.map((s, j) => (masked[j] ? -Infinity : s));
  const result = { ...row, scores, ...softmax(scores) };
  if (values !== null) {
    result.contributions = values.map((v, j) => v.map((x) => (masked[j] ? 0 : result.weights[j] * x)));
    result.output = values[0].map((_, i) => result.contributions.reduce((sum, c) => sum + c[i], 0));
  }
  return result;
}

const cell = (text, kind = "") => el("td", { class: kind }, text);
const maskedCell = () => el("td", { class: "masked-key" }, "masked");

// The content of a step: a description, a formula, column headers, the cells of one key, and a footer.
function stepContent(step, row) {
  const isLive = (j) => row.scores[j] !== -Infinity;
  const anyLive = row.scores.some((_, j) => isLive(j));
  const factor = formatNumber(data.scale);
  const masks = state.causal ? [...data.masks, "causal()"] : data.masks;
  if (step === 0) {
    return {
      description: "Multiply query and key entry by entry and add up. The larger the sum, the better the match.",
      formula: `query = ${formatVector(row.query)}`,
      headers: ["key", "query · key", "sum"],
      cells: (j) => [
        cell(formatVector(keys[j])),
        cell(sumOfProducts(row.query, keys[j])),
        cell(formatNumber(row.raw_scores[j]), "result"),
      ],
    };
  }
  if (step === 1) {
    return {
      description: state.scaled
        ? "Multiply every sum by one factor, so that scores do not grow with the number of entries."
        : "Scaling is off: the sums are the scores, and grow with the number of entries.",
      formula: [state.scaled ? `score = sum × ${factor}` : "score = sum", ...masks].join(", then "),
      headers: ["sum", "factor", "score"],
      cells: (j) => [
        cell(formatNumber(row.raw_scores[j])),
        cell(state.scaled ? `× ${factor}` : "× 1"),
        isLive(j) ? cell(formatNumber(row.scores[j]), "result") : maskedCell(),
      ],
    };
  }
  if (step === 2) {
    return {
      description: anyLive
        ? "Take the exponential of each score and divide by the sum of all: positive weights that add up to 1."
        : "Every key is masked for this query: its weights are zeros.",
      formula: `weight = exp(score − ${formatNumber(row.shift)}) / ${formatNumber(row.total)}`,
      headers: ["score", "exp", "weight", ""],
      cells: (j) => [
        isLive(j) ? cell(formatNumber(row.scores[j])) : maskedCell(),
        cell(formatNumber(row.exponentials[j])),
        cell(formatNumber(row.weights[j]), "result"),
        el("td", { class: "bars" }, weightBar(row.weights[j])),
      ],
    };
  }
  return {
    description: anyLive
      ? "Multiply each value by its weight and add up: the output is a mean of the values."
      : "Every key is masked for this query: its output is zeros.",
    formula: `output = ${formatVector(row.output)}`,
    headers: ["weight", "value", "weight · value"],
    cells: (j) => [
      cell(formatNumber(row.weights[j])),
      cell(formatVector(values[j])),
      cell(formatVector(row.contributions[j]), "result"),
    ],
    footer: ["", "", formatVector(row.output)],
  };
}

const panel = el("section", { id: "panel", "aria-labelledby": "step-title" });
const announcement = el("p", { class: "visually-hidden", role: "status" });

function contentTable(content) {
  const headers = ["token", ...content.headers].map((header) =>
    header ? el("th", { scope: "col" }, header) : el("td", {}),
  );
  const body = data.tokens.map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, tokenElement(name)), content.cells(j)),
  );
  const footer = content.footer
    ? [el("tfoot", {}, el("tr", {}, el("th", { scope: "row" }, "output"), content.footer.map((x) => cell(x, "result"))))]
    : [];
  return el("table", {}, el("thead", {}, el("tr", {}, headers)), el("tbody", {}, body), footer);
}

function draw() {
  const content = stepContent(state.step, currentRow());
  const name = steps[state.step];
  panel.replaceChildren(
    el("h2", { id: "step-title" }, `${state.step + 1}. ${name}`),
    el("p", { id: "description" }, content.description),
    el("p", { class: "formula", id: "formula" }, content.formula),
    scrollBox(`${name}: numbers for each key`, contentTable(content)),
  );
  announcement.textContent = `Step ${state.step + 1} of ${steps.length}, ${name}; query ${data.queries[state.query]}`;
  stepButtons.forEach((button, i) => {
    if (i === state.step) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  previous.disabled = state.step === 0;
  next.disabled = state.step === steps.length - 1;
}

function setState(change) {
  Object.assign(state, change);
  state.step = Math.min(Math.max(state.step, 0), steps.length - 1);
  draw();
}

const stepButtons = steps.map((name, i) =>
  el("button", { type: "button", onclick: () => setState({ step: i }) }, el("span", { class: "count" }, `${i + 1}`), name),
);
const moveBy = (by) => () => setState({ step: state.step + by });
const previous = el("button", { type: "button", id: "previous", onclick: moveBy(-1) }, "← Previous");
const next = el("button", { type: "button", id: "next", class: "primary", onclick: moveBy(1) }, "Next →");

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const box = event.target.closest(".scroll");
  const isUsed = event.target.type === "radio" || (box && box.scrollWidth > box.clientWidth);
  if (isUsed) return; // the arrow keys select the query, or scroll
  event.preventDefault();
  moveBy(by)();
});

document.getElementById("app").append(
  pageHeader("How one query attends", `${data.shape}. Select a query, then go through the steps with the buttons or with ← and →.`),
  radioGroup("query", "Query", data.queries.map(tokenElement), (query) => setState({ query })),
  el("nav", { "aria-label": "Steps" }, el("ol", { class: "steps" }, stepButtons.map((b) => el("li", {}, b)))),
  panel,
  el("div", { class: "controls" }, previous, next,
    el("div", { class: "switches" }, checkbox("scale", "scaled", true, (scaled) => setState({ scaled })),
      data.causal ? checkbox("causal mask", "causal", false, (causal) => setState({ causal })) : [])),
  announcement,
);
draw();
