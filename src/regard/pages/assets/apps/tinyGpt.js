// A small GPT that runs in the page: the reader types, and sees what each part of the model does with the text.
import { bringIntoView } from "../components/bringIntoView.js";
import { slider } from "../components/controls.js";
import { el, pageHeader, readRecord } from "../components/dom.js";
import { formatCount } from "../components/format.js";
import { createGuessList } from "../gpt/guessList.js";
import { createHeadMaps } from "../gpt/headMaps.js";
import { createLensView } from "../gpt/lensView.js";
import { modelFacts } from "../gpt/modelFacts.js";
import { readUrlState, updateUrlState } from "../components/urlState.js";
import { openModel } from "../gpt/modelClient.js";
import { drawToken, shapeGuess } from "../gpt/sampling.js";
import { createTokenizer, formatShare } from "../gpt/tokens.js";
import { createTokenStrip } from "../gpt/tokenStrip.js";
import { createWordPlane } from "../gpt/wordPlane.js";
import { createWeightSteps } from "../components/weightSteps.js";

const TEMPERATURES = [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2];
const TOP_KS = [1, 2, 3, 5, 10, 20, 50, Infinity];
const WINDOW_STEP = 64; // tokens by which the window moves when the text is longer
const TOKENS_PER_SECOND = 5;
const MAX_WRITTEN = 200; // tokens after which writing stops by itself
const FAR = 4; // tokens
const SURPRISING = 8; // bits that have the full colour

const record = readRecord();
const { layers, heads, vocabulary, width, context } = record.config;
const tokenizer = createTokenizer(record.pieces), { encode, decode, name: nameOf } = tokenizer;
const state = {
  tokens: encode(readUrlState().text || record.text), position: null, pair: null, cell: null, off: new Uint8Array(layers * heads),
  temperature: 0.8, topK: 20, written: 0, writing: false,
};
const app = document.getElementById("app");
let model = null, shown = null, isBusy = true, isStale = true, keystroke = null; // busy until the model is loaded

// The tokens that the model reads: the last of the text, from a multiple of WINDOW_STEP on.
function windowTokens() {
  const excess = state.tokens.length - context;
  return state.tokens.subarray(excess > 0 ? Math.ceil(excess / WINDOW_STEP) * WINDOW_STEP : 0);
}

const rowOf = (guess, i) => guess.subarray(i * vocabulary, (i + 1) * vocabulary);
const bestOf = (guess) => guess.reduce((best, share, token) => (share > guess[best] ? token : best), 0);

// -- The parts of the page --

const input = el("textarea", { id: "text", rows: "3", spellcheck: "false", autocapitalize: "off", autocomplete: "off" });
const strip = createTokenStrip("text-strip", "Tokens of the text; arrow keys select one", "surprise", tokenizer, select);
const guesses = createGuessList("guesses", tokenizer, (token) => write([token]));
const guessTitle = el("h2", { id: "next-title" }, "What comes next?");
const guessKind = el("p", { class: "map-note", id: "guess-temperature" });
const guessNote = el("p", { class: "map-note", id: "guess-note" });
const offNote = el("div", { id: "off-note", hidden: true });
const windowNote = el("p", { class: "map-note", id: "window-note", hidden: true });
const lens = createLensView(tokenizer, select);
const lensNote = el("p", { id: "lens-note" });
const headMaps = createHeadMaps(record.config, tokenizer, { onHead, onSwitch, onSelect: select, onOpen: openCell });
const effectNote = el("p", { class: "map-note", id: "effect-note", role: "status" });
const announcement = el("p", { class: "visually-hidden", role: "status", id: "announcement" });
const steps = createWeightSteps({
  explain: (query, key) => model.ask("explain", { pair: state.pair, query, key }),
  texts: () => ({ query: shownSign, key: shownSign, token: tokenizer.sign,
    source: `${state.off[state.pair] ? "This head is switched off: it adds nothing. These are the numbers that it would have. " : ""}Query and key after the rotary position embedding (rope), which rotates each by the position of its token.` }),
});
const shownSign = (position) => tokenizer.sign(shown.tokens[position]);
const wordBox = el("div");
let wordPlane = null;

// -- Drawing --

function drawGuess() {
  const { guess, tokens } = shown, position = selected(), row = rowOf(guess, position);
  const isLast = position === tokens.length - 1, top = bestOf(row);
  guesses.draw(shapeGuess(row, state.temperature, state.topK), row);
  guessTitle.textContent = isLast ? "What comes next?" : `What comes after token ${position}?`;
  guessKind.textContent = state.temperature === 0 ? "At temperature 0 the most likely token is always written." : `At temperature ${state.temperature}${state.topK < vocabulary ? `, among the ${state.topK} best` : ""}:`;
  guessNote.textContent = isLast ? "Choose a token to write it." : `It was ${nameOf(tokens[position + 1])}, with ${formatShare(row[tokens[position + 1]])} at temperature 1. Choose another token to continue from here.`;
  const before = rowOf(shown.intact, position), wanted = bestOf(before), count = state.off.reduce((a, b) => a + b, 0);
  if (count) guessNote.append(` ${formatCount(count, "head is", "heads are")} off.`);
  offNote.hidden = count === 0;
  offNote.replaceChildren(el("p", {}, el("b", {}, `${formatCount(count, "head")} off: `),
    `${nameOf(wanted)} ${formatShare(before[wanted])} → ${formatShare(row[wanted])}`, " (temperature 1)", top === wanted ? "." : `. Now ${nameOf(top)} comes first.`),
  el("button", { type: "button", id: "all-on", onclick: () => switchHeads(state.off.fill(0)) }, "All heads on"));
}

function drawText() {
  const { guess, tokens } = shown;
  const chance = (i) => (i === 0 ? null : guess[(i - 1) * vocabulary + tokens[i]]);
  const shades = Array.from(tokens, (_, i) => (i === 0 ? 0 : Math.min(1, -Math.log2(chance(i)) / SURPRISING)));
  strip.draw(tokens, shades, selected(), (i) => (i === 0 ? "" : `, expected with ${formatShare(chance(i))}`));
  windowNote.hidden = tokens.length === state.tokens.length;
  windowNote.textContent = `The model sees the last ${tokens.length} tokens.`;
}

// The head with the most weight on a token far back, the start aside: it shows best what attention is for.
function findFarHead({ maps, tokens }) {
  const n = tokens.length, most = Array.from({ length: layers * heads }, (_, pair) => {
    const start = (pair * n + n - 1) * n;
    return Math.max(...maps.subarray(start + 1, start + Math.max(n - FAR, 2)));
  });
  return most.indexOf(Math.max(...most));
}

function drawHeads() {
  state.pair ??= findFarHead(shown);
  headMaps.draw({ maps: shown.maps, tokens: shown.tokens, position: selected(), pair: state.pair, off: state.off });
}

async function drawLens() {
  const { tokens, guess } = shown, position = selected(), final = bestOf(rowOf(guess, position));
  const answer = await model.ask("lens", { position });
  if (isStale) return;
  if (selected() !== position) { // another token was selected meanwhile
    await drawLens();
    return;
  }
  lens.draw(answer, tokens, position, vocabulary, final);
  const first = Array.from({ length: 2 * layers + 1 }, (_, place) => bestOf(rowOf(answer.all, place)));
  const from = first.findLastIndex((token) => token !== final) + 1;
  lensNote.replaceChildren("The final guess after ", el("b", {}, nameOf(tokens[position])), " is ", el("b", {}, nameOf(final)),
    from === 0 ? ", already before the first layer." : `. It comes first from layer ${Math.ceil(from / 2)} ${from % 2 ? "attention" : "MLP"} on.`);
}

const selected = () => Math.min(state.position ?? Infinity, shown.tokens.length - 1);

function drawAll() {
  drawGuess();
  if (keystroke !== null) performance.measure("keystroke", { start: keystroke, end: performance.now() });
  keystroke = null;
  drawText();
  drawHeads();
  wordPlane.draw(shown.tokens[selected()]);
  if (!state.writing) {
    const row = rowOf(shown.guess, selected()), top = bestOf(row);
    announcement.textContent = `Most likely next: ${nameOf(top)}, ${formatShare(row[top])}`;
  }
}

// Read the text with the heads that are on, and draw. While the worker is busy, only the latest text waits.
async function update(mustRead = true) {
  isStale ||= mustRead;
  if (isBusy) return;
  setBusy(true);
  do {
    if (isStale) {
      isStale = false;
      const tokens = windowTokens();
      shown = { tokens, ...(await model.ask("read", { tokens, off: state.off })) };
    }
    drawAll();
    if (!isStale) await drawLens();
  } while (isStale);
  setBusy(false);
}

function setBusy(value) {
  isBusy = value;
  app.setAttribute("aria-busy", `${value}`);
}

// -- What the reader does --

function setText(tokens, fromInput = false) {
  state.tokens = tokens;
  state.position = null;
  clearEffects();
  steps.hide();
  if (!fromInput) input.value = decode(tokens);
  updateUrlState({ text: decode(tokens) });
  return update();
}

// Write tokens after the selected one.
function write(tokens) {
  const end = state.tokens.length - shown.tokens.length + selected() + 1;
  return setText(Uint16Array.of(...state.tokens.subarray(0, end), ...tokens));
}

function drawNext() {
  return drawToken(shapeGuess(rowOf(shown.guess, shown.tokens.length - 1), state.temperature, state.topK), Math.random());
}

async function settled() {
  while (isBusy) await new Promise((resolve) => setTimeout(resolve, 5));
}

async function writeOne() {
  await settled();
  state.position = null;
  await write([drawNext()]);
}

// Write token after token. Readers who want less motion get a sentence at a time, without waiting between tokens.
async function writeOn() {
  if (state.writing) {
    stopWriting();
    return;
  }
  const run = (state.writing = {}); // unlike any other
  drawButtons();
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (let count = 0; state.writing === run && count < MAX_WRITTEN; count++) {
    const start = performance.now();
    await settled();
    if (state.writing !== run) return; // the reader typed, or stopped it, meanwhile
    await writeOne();
    const atEnd = nameOf(state.tokens.at(-1)) === "“.”", rest = (calm ? (atEnd ? 500 : 0) : 1000 / TOKENS_PER_SECOND) - (performance.now() - start);
    if (rest > 0) await new Promise((resolve) => setTimeout(resolve, rest));
  }
  if (state.writing === run) stopWriting();
}

function stopWriting() {
  state.writing = false;
  drawButtons();
}

function select(position) {
  stopWriting();
  state.position = position;
  clearEffects();
  update(false);
}

function onHead(pair) {
  state.pair = pair;
  drawHeads();
  if (steps.node.hidden) steps.hide(); // those of another head may be on their way
  else steps.show(...state.cell);
}

async function openCell(i, j) {
  const clicked = shown;
  await settled();
  if (shown !== clicked) return; // the text or the heads changed meanwhile
  state.cell = [i, j];
  steps.show(i, j);
}

function switchHeads(off) {
  state.off = Uint8Array.from(off);
  clearEffects();
  steps.hide(); // later layers have other numbers now
  return update();
}

async function onSwitch(pair, isOn) {
  state.pair = pair;
  await switchHeads(state.off.map((x, i) => (i === pair ? Number(!isOn) : x)));
  bringIntoView(offNote, headMaps.grid);
}

// -- The effect of each head --

let effectRun = 0;

function clearEffects() {
  effectRun++;
  headMaps.drawEffects(null);
  effectNote.textContent = "";
}

// Switch off each head by itself, the last layer first: the worker then computes only the layers after it.
async function tryHeads() {
  await settled();
  clearEffects();
  const run = effectRun, { tokens, guess } = shown, position = selected(), row = rowOf(guess, position), top = bestOf(row);
  const effects = new Array(layers * heads).fill(null);
  for (let pair = effects.length - 1; pair >= 0; pair--) {
    const off = state.off.map((x, i) => (i === pair ? 1 : x));
    const without = await model.ask("without", { tokens, off, position });
    if (run !== effectRun) return;
    effects[pair] = without[top] - row[top];
    headMaps.drawEffects(effects);
  }
  const worst = effects.indexOf(Math.min(...effects));
  effectNote.textContent = `Change of the probability of ${nameOf(top)}, in percentage points, when a head is switched off. `
    + (effects[worst] < -0.005 ? `Layer ${Math.floor(worst / heads) + 1}, head ${(worst % heads) + 1} matters most.` : "No single head matters much here.");
}

// -- The page --

const button = (id, text, onclick, kind = "") => el("button", { type: "button", id, class: kind, onclick }, text);
const playButton = button("play", "Write on", writeOn, "primary");
const stepButton = button("step", "Next token", () => {
  stopWriting();
  writeOne();
});
const backButton = button("back", "Delete one", () => {
  stopWriting();
  if (state.tokens.length > 1) setText(state.tokens.slice(0, -1)); // a text starts with a new line
});

function drawButtons() {
  playButton.textContent = state.writing ? "Stop" : "Write on";
}

input.value = decode(state.tokens);
input.addEventListener("input", (event) => {
  keystroke = event.timeStamp;
  stopWriting();
  setText(encode(input.value), true);
});

const temperature = slider("Temperature", "temperature", TEMPERATURES.map((t) => (t === 0 ? "0: always the first" : `${t}`)), TEMPERATURES.indexOf(state.temperature), (i) => {
  state.temperature = TEMPERATURES[i];
  if (shown) drawGuess();
});
const topK = slider("Draw from the best", "top-k", TOP_KS.map((k) => (k > vocabulary ? `all ${formatCount(vocabulary)}` : `${k}`)), TOP_KS.indexOf(state.topK), (i) => {
  state.topK = TOP_KS[i];
  if (shown) drawGuess();
});

const card = (id, title, caption, ...children) => el("section", { class: "card", id, "aria-labelledby": `${id}-heading` },
  el("h2", { id: `${id}-heading` }, title), el("p", { class: "caption" }, caption), ...children);

app.setAttribute("aria-busy", "true");
app.append(
  pageHeader("A tiny GPT, running in this page",
    `It has ${formatCount(record.parameters)} numbers, and read ${(record.training.text.train_bytes / 1e6).toFixed(1)} MB of children’s stories. It does one thing: guess the next token, which is a word or part of a word.`),
  el("div", { class: "top" },
    el("section", { class: "card", id: "write", "aria-labelledby": "write-heading" },
      el("h2", { id: "write-heading" }, el("label", { for: "text" }, "Type the beginning of a story")), input,
      el("div", { class: "controls" }, playButton, stepButton, backButton),
      el("fieldset", { class: "chips examples" }, el("legend", {}, "Or start from"), record.examples.map((text) =>
        el("button", { type: "button", class: "example", onclick: () => { stopWriting(); setText(encode(text)); } }, text))),
      el("p", { class: "map-note" }, "The model reads these tokens, one after another; every text starts after a new line, ⏎. The more orange, the less it expected the token. Choose a token to look at the model there."),
      strip.node, windowNote),
    el("section", { class: "card", id: "next", "aria-labelledby": "next-title" }, guessTitle, guessKind, guesses.node, guessNote,
      el("div", { class: "sliders" }, temperature.node, topK.node),
      el("p", { class: "map-note" }, "Temperature: 1 is the guess of the model. Below 1, likely tokens become more likely; above 1, rare tokens become more likely."))),
  card("layers", "How the guess forms",
    `Each token carries a list of ${width} numbers, and every layer adds to it. Attention fetches something from earlier tokens, the MLP works on it. Here the list is read after every step, as if the model ended there.`,
    lensNote, lens.node),
  card("heads", "Where it looks: the attention heads",
    `Each layer has ${heads} heads. For every token, a head decides how much to look at each earlier token. Choose a head to see its map for your text. Switch it off to see what it does.`,
    el("div", { class: "head-columns" },
      el("div", {}, offNote, headMaps.grid, el("div", { class: "controls" }, button("try", "Which heads matter here?", tryHeads)), effectNote),
      headMaps.detail), steps.node),
  card("words", "Words as numbers",
    `The model does not see words, only numbers. To guess, it compares the ${width} numbers at the end of its last layer with ${width} numbers of each token, which were learned in training (the unembedding). Words that can replace each other have similar numbers, and are close together here.`, wordBox),
  modelFacts(record),
  announcement,
);
drawButtons();

model = await openModel(record);
wordPlane = createWordPlane(record, model.unembedding, width, tokenizer);
wordBox.append(wordPlane.node);
setBusy(false);
await update();
