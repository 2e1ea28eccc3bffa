// A small GPT that runs in the page: the reader types, and sees what each part of the model does with the text.
import { slider } from "../components/controls.js";
import { el, pageHeader, readRecord } from "../components/dom.js";
import { formatCount } from "../components/format.js";
import { createGuessList } from "../gpt/guessList.js";
import { createHeadMaps } from "../gpt/headMaps.js";
import { createLensView } from "../gpt/lensView.js";
import { createLetterPlane } from "../gpt/letterPlane.js";
import { createLetterStrip } from "../gpt/letterStrip.js";
import { modelFacts } from "../gpt/modelFacts.js";
import { readUrlState, updateUrlState } from "../components/urlState.js";
import { decodeBytes, encodeText, formatShare, letterName } from "../gpt/letters.js";
import { openModel } from "../gpt/modelClient.js";
import { drawByte, shapeGuess } from "../gpt/sampling.js";

const TEMPERATURES = [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2];
const TOP_KS = [1, 2, 3, 5, 10, 20, 256];
const WINDOW_STEP = 64; // bytes by which the window moves when the text is longer
const LETTERS_PER_SECOND = 14;
const MAX_WRITTEN = 600; // letters after which writing stops by itself
const FAR = 8; // letters
const SURPRISING = 8; // bits that have the full colour
const EXAMPLES = ["Once upon a time, there was a", "Tom had a red car. Sue had a blue car. Tom s", "The dog was very hungry. He wanted to eat"];

const record = readRecord();
const { layers, heads, vocabulary, width, context } = record.config;
const state = {
  bytes: encodeText(readUrlState().text || record.text), position: null, pair: null, off: new Uint8Array(layers * heads),
  temperature: 0.8, topK: 20, written: 0, writing: false,
};
const app = document.getElementById("app");
let model = null, shown = null, isBusy = true, isStale = true, keystroke = null; // busy until the model is loaded

// The bytes that the model reads: the last of the text, from a multiple of WINDOW_STEP on.
function windowBytes() {
  const excess = state.bytes.length - context;
  return state.bytes.subarray(excess > 0 ? Math.ceil(excess / WINDOW_STEP) * WINDOW_STEP : 0);
}

const rowOf = (guess, i) => guess.subarray(i * vocabulary, (i + 1) * vocabulary);
const bestOf = (guess) => guess.indexOf(Math.max(...guess));

// -- The parts of the page --

const input = el("textarea", { id: "text", rows: "3", spellcheck: "false", autocapitalize: "off", autocomplete: "off" });
const strip = createLetterStrip("text-strip", "Letters of the text; arrow keys select one", "surprise", select);
const guesses = createGuessList("guesses", (byte) => write([byte]));
const guessTitle = el("h2", { id: "next-title" }, "What comes next?");
const guessNote = el("p", { class: "map-note", id: "guess-note" });
const offNote = el("div", { id: "off-note", hidden: true });
const windowNote = el("p", { class: "map-note", id: "window-note", hidden: true });
const lens = createLensView(select);
const lensNote = el("p", { id: "lens-note" });
const headMaps = createHeadMaps(record.config, { onHead, onSwitch, onSelect: select });
const effectNote = el("p", { class: "map-note", id: "effect-note", role: "status" });
const announcement = el("p", { class: "visually-hidden", role: "status", id: "announcement" });
const letterBox = el("div");
let letterPlane = null;

// -- Drawing --

function drawGuess() {
  const { guess, bytes } = shown, position = selected(), row = rowOf(guess, position);
  const isLast = position === bytes.length - 1, top = bestOf(row);
  guesses.draw(shapeGuess(row, state.temperature, state.topK), row);
  guessTitle.textContent = isLast ? "What comes next?" : `What comes after letter ${position + 1}?`;
  guessNote.textContent = isLast ? "Choose a letter to write it." : `It was ${letterName(bytes[position + 1])}, with ${formatShare(row[bytes[position + 1]])}. Choose another letter to write on from here.`;
  const before = rowOf(shown.intact, position), wanted = bestOf(before), count = state.off.reduce((a, b) => a + b, 0);
  if (count) guessNote.append(` ${formatCount(count, "head is", "heads are")} off.`);
  offNote.hidden = count === 0;
  offNote.replaceChildren(el("p", {}, el("b", {}, `${formatCount(count, "head")} off: `),
    `${letterName(wanted)} ${formatShare(before[wanted])} → ${formatShare(row[wanted])}`, top === wanted ? "." : `. Now ${letterName(top)} comes first.`),
  el("button", { type: "button", id: "all-on", onclick: () => switchHeads(state.off.fill(0)) }, "All heads on"));
}

function drawText() {
  const { guess, bytes } = shown;
  const chance = (i) => (i === 0 ? null : guess[(i - 1) * vocabulary + bytes[i]]);
  const shades = Array.from(bytes, (_, i) => (i === 0 ? 0 : Math.min(1, -Math.log2(chance(i)) / SURPRISING)));
  strip.draw(bytes, shades, selected(), (i) => (i === 0 ? "" : `, expected with ${formatShare(chance(i))}`));
  windowNote.hidden = bytes.length === state.bytes.length;
  windowNote.textContent = `The model sees the last ${bytes.length} bytes.`;
}

// The head with the most weight on a letter far back: it shows best what attention is for.
function findFarHead({ maps, bytes }) {
  const n = bytes.length, most = Array.from({ length: layers * heads }, (_, pair) => {
    const row = maps.subarray((pair * n + n - 1) * n, (pair * n + n - 1) * n + Math.max(n - FAR, 1));
    return Math.max(...row);
  });
  return most.indexOf(Math.max(...most));
}

function drawHeads() {
  state.pair ??= findFarHead(shown);
  headMaps.draw({ maps: shown.maps, bytes: shown.bytes, position: selected(), pair: state.pair, off: state.off });
}

async function drawLens() {
  const { bytes, guess } = shown, position = selected(), final = bestOf(rowOf(guess, position));
  const answer = await model.ask("lens", { position });
  if (isStale) return;
  if (selected() !== position) { // another letter was selected meanwhile
    await drawLens();
    return;
  }
  lens.draw(answer, bytes, position, vocabulary, final);
  const first = Array.from({ length: 2 * layers + 1 }, (_, place) => bestOf(rowOf(answer.all, place)));
  const from = first.findLastIndex((byte) => byte !== final) + 1;
  lensNote.replaceChildren("The final guess after ", el("b", {}, letterName(bytes[position])), " is ", el("b", {}, letterName(final)),
    from === 0 ? ", already before the first layer." : `. It comes first from layer ${Math.ceil(from / 2)} ${from % 2 ? "attention" : "MLP"} on.`);
}

const selected = () => Math.min(state.position ?? Infinity, shown.bytes.length - 1);

function drawAll() {
  drawGuess();
  if (keystroke !== null) performance.measure("keystroke", { start: keystroke, end: performance.now() });
  keystroke = null;
  drawText();
  drawHeads();
  letterPlane.draw(shown.bytes[selected()]);
  if (!state.writing) {
    const row = rowOf(shown.guess, selected()), top = bestOf(row);
    announcement.textContent = `Most likely next: ${letterName(top)}, ${formatShare(row[top])}`;
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
      const bytes = windowBytes();
      shown = { bytes, ...(await model.ask("read", { bytes, off: state.off })) };
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

function setText(bytes, fromInput = false) {
  if (bytes.length === 0) bytes = encodeText("\n"); // a story starts after a new line
  state.bytes = bytes;
  state.position = null;
  clearEffects();
  if (!fromInput) input.value = decodeBytes(bytes);
  updateUrlState({ text: decodeBytes(bytes) });
  return update();
}

// Write bytes after the selected letter.
function write(bytes) {
  const end = state.bytes.length - shown.bytes.length + selected() + 1;
  return setText(Uint8Array.of(...state.bytes.subarray(0, end), ...bytes));
}

function drawNext() {
  return drawByte(shapeGuess(rowOf(shown.guess, shown.bytes.length - 1), state.temperature, state.topK), Math.random());
}

async function settled() {
  while (isBusy) await new Promise((resolve) => setTimeout(resolve, 5));
}

async function writeOne() {
  await settled();
  state.position = null;
  await write([drawNext()]);
}

// Write letter after letter. Readers who want less motion get a word at a time, without waiting between letters.
async function writeOn() {
  if (state.writing) {
    stopWriting();
    return;
  }
  state.writing = true;
  drawButtons();
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (let count = 0; state.writing && count < MAX_WRITTEN; count++) {
    const start = performance.now();
    await writeOne();
    const atWordEnd = state.bytes.at(-1) === 32, rest = (calm ? (atWordEnd ? 500 : 0) : 1000 / LETTERS_PER_SECOND) - (performance.now() - start);
    if (rest > 0) await new Promise((resolve) => setTimeout(resolve, rest));
  }
  stopWriting();
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
}

function switchHeads(off) {
  state.off = Uint8Array.from(off);
  clearEffects();
  return update();
}

function onSwitch(pair, isOn) {
  state.pair = pair;
  switchHeads(state.off.map((x, i) => (i === pair ? Number(!isOn) : x)));
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
  const run = effectRun, { bytes, guess } = shown, position = selected(), row = rowOf(guess, position), top = bestOf(row);
  const effects = new Array(layers * heads).fill(null);
  for (let pair = effects.length - 1; pair >= 0; pair--) {
    const off = state.off.map((x, i) => (i === pair ? 1 : x));
    const without = await model.ask("without", { bytes, off, position });
    if (run !== effectRun) return;
    effects[pair] = without[top] - row[top];
    headMaps.drawEffects(effects);
  }
  const worst = effects.indexOf(Math.min(...effects));
  effectNote.textContent = `Change of the probability of ${letterName(top)} when a head is switched off. `
    + (effects[worst] < -0.005 ? `Layer ${Math.floor(worst / heads) + 1}, head ${(worst % heads) + 1} matters most.` : "No single head matters much here.");
}

// -- The page --

const button = (id, text, onclick, kind = "") => el("button", { type: "button", id, class: kind, onclick }, text);
const playButton = button("play", "Write on", writeOn, "primary");
const stepButton = button("step", "Next letter", () => {
  stopWriting();
  writeOne();
});
const backButton = button("back", "Delete one", () => {
  stopWriting();
  setText(state.bytes.slice(0, -1));
});

function drawButtons() {
  playButton.textContent = state.writing ? "Stop" : "Write on";
}

input.value = decodeBytes(state.bytes);
input.addEventListener("input", (event) => {
  keystroke = event.timeStamp;
  stopWriting();
  setText(encodeText(input.value), true);
});

const temperature = slider("Temperature", "temperature", TEMPERATURES.map((t) => (t === 0 ? "0: always the first" : `${t}`)), TEMPERATURES.indexOf(state.temperature), (i) => {
  state.temperature = TEMPERATURES[i];
  if (shown) drawGuess();
});
const topK = slider("Draw from the best", "top-k", TOP_KS.map((k) => (k === vocabulary ? "all 256" : `${k}`)), TOP_KS.indexOf(state.topK), (i) => {
  state.topK = TOP_KS[i];
  if (shown) drawGuess();
});

const card = (id, title, caption, ...children) => el("section", { class: "card", id, "aria-labelledby": `${id}-heading` },
  el("h2", { id: `${id}-heading` }, title), el("p", { class: "caption" }, caption), ...children);

app.setAttribute("aria-busy", "true");
app.append(
  pageHeader("A tiny GPT, running in this page",
    `It has ${formatCount(record.parameters)} numbers, and read ${(record.training.text.train_bytes / 1e6).toFixed(1)} MB of children’s stories. It does one thing: guess the next letter.`),
  el("div", { class: "top" },
    el("section", { class: "card", id: "write", "aria-labelledby": "write-heading" },
      el("h2", { id: "write-heading" }, el("label", { for: "text" }, "Type the beginning of a story")), input,
      el("div", { class: "controls" }, playButton, stepButton, backButton),
      el("fieldset", { class: "chips examples" }, el("legend", {}, "Or start from"), EXAMPLES.map((text) =>
        el("button", { type: "button", class: "example", onclick: () => { stopWriting(); setText(encodeText(text)); } }, text))),
      el("p", { class: "map-note" }, "The model reads one letter after another. The more orange, the less it expected the letter. Choose a letter to look at the model there."),
      strip.node, windowNote),
    el("section", { class: "card", id: "next", "aria-labelledby": "next-title" }, guessTitle, guesses.node, guessNote,
      el("div", { class: "sliders" }, temperature.node, topK.node),
      el("p", { class: "map-note" }, "Temperature: below 1 likely letters become more likely, above 1 rare ones get a chance."))),
  card("layers", "How the guess forms",
    `Each letter carries a list of ${width} numbers, and every layer adds to it. Attention fetches something from earlier letters, the MLP works on it. Here the list is read after every step, as if the model ended there.`,
    lensNote, lens.node),
  card("heads", "Where it looks: the attention heads",
    `Each layer has ${heads} heads. For every letter, a head decides how much to look at each earlier letter. Choose a head to see its map for your text. Switch it off to see what it is good for.`,
    el("div", { class: "head-columns" },
      el("div", {}, offNote, headMaps.grid, el("div", { class: "controls" }, button("try", "Which heads matter here?", tryHeads)), effectNote),
      headMaps.detail)),
  card("letters", "Letters as numbers",
    `The model knows no letters, only numbers: each byte starts as ${width} numbers that were learned in training. Letters that are used alike are near each other.`, letterBox),
  modelFacts(record),
  announcement,
);
drawButtons();

model = await openModel(record);
letterPlane = createLetterPlane(record, model.embedding, width);
letterBox.append(letterPlane.node);
setBusy(false);
await update();
