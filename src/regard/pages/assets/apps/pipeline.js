// Attention as matrices: every number of every query, one product at a time. The first numbers come from the library;
// after a change the page computes them.
import { bringIntoView } from "../components/bringIntoView.js";
import { checkbox, radioGroup, slider } from "../components/controls.js";
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { formatNumber, parseNumbers } from "../components/format.js";
import { createMatrixScreen, dependsOn, productKind } from "../components/matrixScreen.js";
import { STEP_NAMES, describeChange, describeProduct } from "../components/productText.js";
import { stepTable } from "../components/stepTable.js";
import { splitWords, wordVector } from "../components/wordVectors.js";
import { attentionRow, weightValues } from "../matrix/attentionSteps.js";

const MAX_WORDS = 8;
const SPEEDS = [0.5, 1, 2, 4, 8]; // products per second
const DIAL = Array.from({ length: 81 }, (_, i) => (i - 40) / 10);

const data = readRecord();
const libraryRows = data.rows.map((record) => {
  const row = Object.fromEntries(Object.entries(record).map(([name, x]) => [name, parseNumbers(x)]));
  return { ...row, contributions: weightValues(row, parseNumbers(data.value)) };
});
const initial = {
  tokens: data.tokens, queries: data.queries,
  Q: libraryRows.map((row) => row.query), K: parseNumbers(data.key), V: parseNumbers(data.value),
};
const stepNames = initial.V === null ? STEP_NAMES.slice(0, 3) : STEP_NAMES;
let problem = initial; // replaced by a changed copy, never changed itself
let rows = libraryRows; // the numbers of every query with the current switches
let screen = null;
let timer = null;
// `column` is that of the product, null for a whole row. `selected` is the input that is being changed. With `hidden`,
// cells that come later in the walk are not shown.
const state = { row: 0, step: 0, column: 0, selected: null, hidden: false, scaled: true, causal: false, speed: 2 };

// -- The numbers --

const scale = () => (state.scaled ? data.scale : 1);
const isInitialMask = () => problem.tokens.length === data.tokens.length && problem.queries.length === data.queries.length;

function isMasked(i, j) {
  const byMask = isInitialMask() && libraryRows[i].scores[j] === -Infinity;
  return byMask || (state.causal && j > i);
}

function computeRows() {
  if (problem === initial && state.scaled && !state.causal) return libraryRows;
  return problem.Q.map((query, i) => attentionRow({
    query, keys: problem.K, values: problem.V, scale: scale(),
    masked: problem.K.map((_, j) => isMasked(i, j)),
    rawScores: problem === initial ? libraryRows[i].raw_scores : null,
  }));
}

const setEntry = (matrix, i, j, x) => matrix.map((row, a) => (a === i ? row.map((old, b) => (b === j ? x : old)) : row));

// Kᵀ is drawn, K is stored.
const inputValue = ({ name, i, j }) => (name === "K" ? problem.K[j][i] : problem[name][i][j]);

function changeEntry(name, i, j, number) {
  const matrix = name === "K" ? setEntry(problem.K, j, i, number) : setEntry(problem[name], i, j, number);
  problem = { ...problem, [name]: matrix };
  rows = computeRows();
  Object.assign(state, { selected: { name, i, j }, hidden: false });
  draw();
  announce(`${inputName(state.selected)} is ${formatNumber(number)}. ${changeText.textContent}`);
}

// -- The walk: for each query, its scores, the scaling, its weights, its output --

const widths = () => ({ keys: problem.tokens.length, values: problem.V ? problem.V[0].length : 0 });
const perQuery = () => widths().keys + 2 + widths().values;
const lastPlace = () => problem.queries.length * perQuery() - 1;

function placeOf({ row, step, column }) {
  const within = [column ?? 0, widths().keys, widths().keys + 1, widths().keys + 2 + (column ?? 0)][step];
  return row * perQuery() + within;
}

function productAt(place) {
  const row = Math.floor(place / perQuery()), within = place % perQuery(), { keys } = widths();
  if (within < keys) return { row, step: 0, column: within };
  if (within < keys + 2) return { row, step: within - keys + 1, column: null };
  return { row, step: 3, column: within - keys - 2 };
}

const isReached = (product) => !state.hidden || placeOf(product) <= placeOf(state);

function cellValue(name, i, j) {
  if (name === "K") return problem.K[j][i];
  if (name === "Q" || name === "V") return problem[name][i][j];
  const row = rows[i];
  if (name === "weights") return isReached({ row: i, step: 2, column: null }) ? row.weights[j] : null;
  if (name === "output") return isReached({ row: i, step: 3, column: j }) ? row.output[j] : null;
  if (!isReached({ row: i, step: 0, column: j })) return null;
  const isScaled = state.hidden ? isReached({ row: i, step: 1, column: null }) : state.step > 0;
  return isScaled ? row.scores[j] : row.raw_scores[j];
}

// -- Drawing --

const screenBox = el("div", { class: "screen" });
const panel = el("section", { id: "panel", "aria-labelledby": "step-title" });
const title = el("h2", { id: "step-title" });
const description = el("p", { id: "description" });
const formula = el("p", { class: "formula", id: "formula" });
const changeText = el("p", { id: "change" });
const announcement = el("p", { class: "visually-hidden", role: "status" });
const tableBox = el("div", { id: "numbers" });
const table = el("details", {}, el("summary", {}, "Every number of this step"), tableBox);
let dial = null;

const announce = (text) => (announcement.textContent = text);
const inputName = ({ name, i, j }) =>
  name === "Q" ? `Q of ${problem.queries[i]}, number ${j}` : name === "K" ? `K of ${problem.tokens[j]}, number ${i}` : `V of ${problem.tokens[i]}, number ${j}`;

function drawInput() {
  const { name, i, j } = state.selected, x = inputValue(state.selected);
  title.replaceChildren("Change a number: ", name, " of ", tokenElement(name === "Q" ? problem.queries[i] : problem.tokens[name === "K" ? j : i]));
  description.textContent = `Number ${name === "K" ? i : j}. Drag the slider, or type into the cell. Everything after it is recomputed.`;
  changeText.replaceChildren(...describeChange(state.selected, { ...problem, rows }));
  if (!dial || dial.key !== inputName(state.selected)) {
    const choices = DIAL.includes(x) || !Number.isFinite(x) ? DIAL : [...DIAL, x].sort((a, b) => a - b);
    const control = slider("value", "dial", choices.map(formatNumber), choices.indexOf(x), (index) => changeEntry(name, i, j, choices[index]));
    control.input.addEventListener("change", () => showWork()); // after the slider is released
    dial = { key: inputName(state.selected), choices, ...control };
  } else if (dial.choices.includes(x)) dial.set(dial.choices.indexOf(x));
  if (!panel.contains(dial.node)) panel.replaceChildren(title, description, dial.node, changeText);
}

function drawProduct() {
  const text = describeProduct(state, {
    row: { ...rows[state.row], keys: problem.K }, tokens: problem.tokens, query: problem.queries[state.row],
    scale: scale(), dim: problem.K[0].length, values: problem.V,
  });
  title.textContent = `${state.step + 1}. ${stepNames[state.step]}`;
  description.replaceChildren(...text.words.flat());
  formula.textContent = text.formula;
  if (!panel.contains(formula)) panel.replaceChildren(title, description, formula);
  dial = null;
  if (!timer) announce(`Step ${state.step + 1} of ${stepNames.length}, ${stepNames[state.step]}; query ${problem.queries[state.row]}. ${formula.textContent}`);
}

function draw() {
  const { selected } = state;
  screen.draw(cellValue, (name, i, j) => {
    if (!selected) return productKind(state, name, i, j);
    if (name === selected.name && i === selected.i && j === selected.j) return "selected";
    return dependsOn(selected, name, i, j) ? "touched" : "";
  }, scale());
  if (selected) drawInput();
  else drawProduct();
  if (table.open) drawTable();
  stepButtons.forEach((button, i) => {
    if (i === state.step && !selected) button.setAttribute("aria-current", "step");
    else button.removeAttribute("aria-current");
  });
  for (const [i, input] of queryChips.querySelectorAll("input").entries()) input.checked = i === state.row;
  previous.disabled = placeOf(state) === 0;
  next.disabled = placeOf(state) === lastPlace();
  play.textContent = timer ? "Pause" : "▶ Play";
  showAll.hidden = !state.hidden;
  reset.disabled = problem === initial && (!sentence || sentence.value === initial.tokens.join(" "));
}

function drawTable() {
  const masks = state.causal ? [...data.masks, "causal()"] : data.masks;
  tableBox.replaceChildren(...stepTable(state.step, {
    row: rows[state.row], keys: problem.K, values: problem.V, tokens: problem.tokens, scale: scale(), masks,
  }));
}
table.addEventListener("toggle", () => table.open && drawTable());

// -- Moving --

function pause() {
  clearInterval(timer);
  timer = null;
}

// Show a product, and let its factors fly to the result.
function go(product) {
  Object.assign(state, product, { selected: null });
  draw();
  screen.animate(state, timer ? 1000 / SPEEDS[state.speed] : 700);
  showWork();
}

// Scroll to the cells that are being computed, or that an input changes, with the controls and the text about them.
function showWork(kind = state.selected ? "touched" : "at-work") {
  const cell = screen.node.querySelector(`.${kind}`);
  bringIntoView(cell, desk, cell?.closest(".product"));
}

function goAndPause(product, change = {}) {
  pause();
  Object.assign(state, change);
  go(product);
}

const moveBy = (by) => goAndPause(productAt(Math.min(Math.max(placeOf(state) + by, 0), lastPlace())));

function advance() {
  if (placeOf(state) < lastPlace()) {
    go(productAt(placeOf(state) + 1));
    return;
  }
  pause();
  state.hidden = false;
  draw();
}

function start() {
  const isOver = placeOf(state) === lastPlace();
  timer = setInterval(advance, 1000 / SPEEDS[state.speed]);
  const first = state.hidden ? productAt(placeOf(state)) : { row: isOver ? 0 : state.row, step: 0, column: 0 };
  state.hidden = true;
  go(first);
}

function playOrPause() {
  if (!timer) start();
  else {
    pause();
    draw();
  }
}

function selectCell(name, i, j) {
  if (name === "Q" || name === "K" || name === "V") {
    const isSame = state.selected && state.selected.name === name && state.selected.i === i && state.selected.j === j;
    if (isSame) return;
    pause();
    Object.assign(state, { selected: { name, i, j }, hidden: false });
    if (name === "Q") state.row = i;
    draw();
    showWork("selected");
    announce(`${inputName(state.selected)} is ${formatNumber(inputValue(state.selected))}`);
    return;
  }
  const step = { scores: state.step === 0 ? 0 : 1, weights: 2, output: 3 }[name];
  if (!state.selected && state.row === i && state.step === step && state.column === j) return;
  goAndPause({ row: i, step, column: j }, { hidden: false });
}

// -- Own words --

function useWords(words) {
  const find = (matrix, word, kind) => {
    const known = initial.tokens.findIndex((token) => token.toLowerCase() === word.toLowerCase());
    return known >= 0 ? matrix[known] : wordVector(word.toLowerCase(), kind, matrix[0].length);
  };
  const take = (matrix, kind) => matrix && words.map((word) => find(matrix, word, kind));
  problem = { tokens: words, queries: words, Q: take(initial.Q, "query"), K: take(initial.K, "key"), V: take(initial.V, "value") };
  showProblem();
}

function showProblem() {
  pause();
  Object.assign(state, { row: Math.min(state.row, problem.queries.length - 1), step: state.step, column: state.step % 3 ? null : 0, selected: null, hidden: false });
  rows = computeRows();
  screen = createMatrixScreen(problem, desk, selectCell, (...change) => {
    changeEntry(...change);
    showWork();
  });
  screenBox.replaceChildren(screen.node);
  screen.chooseLayout();
  queryChips = radioGroup("query", "Query", problem.queries.map(tokenElement), (row) => goAndPause({ row, column: state.step % 3 ? null : state.column }, { hidden: false }));
  queryBox.replaceChildren(queryChips);
  draw();
}

const note = el("p", { class: "soft", id: "words-note" });
const sentence = data.words ? el("input", { type: "text", id: "sentence", autocomplete: "off", spellcheck: "false", maxlength: "120" }) : null;
sentence?.addEventListener("change", () => showWork()); // when the reader leaves it
sentence?.addEventListener("input", () => {
  const { words, leftOut } = splitWords(sentence.value, MAX_WORDS);
  if (!words.length) return;
  useWords(words);
  const isNew = words.some((word) => !initial.tokens.some((token) => token.toLowerCase() === word.toLowerCase()));
  note.textContent = [
    isNew ? "The numbers of new words are derived from their letters; a model would learn them. Change any of them." : "",
    leftOut ? `The first ${MAX_WORDS} words are used.` : "",
  ].filter(Boolean).join(" ");
});

function resetAll() {
  problem = initial;
  if (sentence) sentence.value = initial.tokens.join(" ");
  note.textContent = "";
  showProblem();
}

// -- The page --

const button = (id, text, onclick, kind = "") => el("button", { type: "button", id, class: kind, onclick }, text);
const stepButtons = stepNames.map((name, i) =>
  el("button", { type: "button", onclick: () => goAndPause({ step: i, column: i === 0 || i === 3 ? 0 : null }, { hidden: false }) },
    el("span", { class: "count" }, `${i + 1}`), name));
const previous = button("previous", "← Back", () => moveBy(-1));
const next = button("next", "Next →", () => moveBy(1));
const play = button("play", "▶ Play", playOrPause, "primary");
const showAll = button("show-all", "Show all", () => {
  pause();
  state.hidden = false;
  draw();
  showWork();
});
const reset = button("reset", "Reset", () => {
  resetAll();
  showWork();
});
const speed = slider("speed", "speed", SPEEDS.map((products) => `${products} a second`), state.speed, (index) => {
  state.speed = index;
  if (!timer) return;
  pause();
  timer = setInterval(advance, 1000 / SPEEDS[state.speed]);
});
let queryChips = null;
const queryBox = el("div", { class: "query-box" });
const setSwitch = (change) => {
  Object.assign(state, change);
  rows = computeRows();
  draw();
  showWork();
};

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], isSpace = event.key === " ";
  if (!by && !isSpace) return;
  const box = event.target.closest(".scroll");
  if (event.target.matches("input, summary") || (isSpace && event.target.matches("button"))) return; // they use the key themselves
  if (by && box && box.scrollWidth > box.clientWidth && event.target === box) return; // scrolls
  event.preventDefault();
  if (isSpace) playOrPause();
  else moveBy(by);
});

const desk = el("div", { class: "desk" },
  el("div", { class: "controls player" }, play, previous, next, showAll), speed.node,
  el("div", { class: "switches" }, checkbox("scale", "scaled", true, (scaled) => setSwitch({ scaled })),
    data.causal ? checkbox("causal mask", "causal", false, (causal) => setSwitch({ causal })) : []),
  el("nav", { "aria-label": "Steps" }, el("ol", { class: "steps" }, stepButtons.map((b) => el("li", {}, b)))),
  panel);

document.getElementById("app").classList.add("wide");
document.getElementById("app").append(
  pageHeader("Attention as matrices", `${data.shape}. Press Play, click any cell to see how it is computed, or change a number of Q, K or V.`),
  el("div", { class: "setup" },
    ...(sentence ? [el("div", { class: "words" }, el("label", { for: "sentence" }, "Your sentence"), sentence)] : []), reset, queryBox),
  note,
  screenBox,
  table,
  announcement,
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
resetAll();
