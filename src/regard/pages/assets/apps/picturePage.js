// Attention over pictures: a patch or another token is chosen as query, and the maps of the heads lie over the pictures.
import { createPalette, createScale, scaleLegend } from "../components/colorScale.js";
import { checkbox, slider, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { describeError } from "../components/errorStatement.js";
import { capitalise, formatShort } from "../components/format.js";
import { createHeadMaps } from "../components/headMaps.js";
import { createPictureView, patchAt, patchPosition } from "../components/pictureView.js";
import { createTokenButtons } from "../components/tokenButtons.js";
import { stripMarker } from "../components/tokenMatch.js";
import { parseInRange, readUrlState, updateUrlState } from "../components/urlState.js";
import { loadArray, openMatrix } from "../matrix/matrixClient.js";
import { decodePicture } from "../matrix/picture.js";
import { openRows } from "../matrix/storedRows.js";
import { MEAN } from "../matrix/weights.js";

const LARGEST = 8; // weights that are listed
const data = readRecord();
const pictures = await Promise.all(data.images.map(async ({ pixels, size }) => decodePicture(await loadArray(pixels), size)));

// -- The weights of a layer: computed from query and key if the page stores them, otherwise read from stored rows --

function createLayer(record) {
  const { payload, rows, heads, shape, first } = record;
  const matrix = payload ? openMatrix(payload) : null, stored = rows ? openRows(rows, heads.length, shape[1], loadArray) : null;
  const isWhole = Boolean(payload) && payload.heads.length === heads.length;
  const pairOf = (head) => (head === MEAN ? (isWhole ? MEAN : -1) : payload ? payload.heads.indexOf(head) : -1);
  const tokens = (list) => data.tokens[list].map(([index, name]) => ({ index, name: stripMarker(name) }));
  return {
    ...record,
    others: tokens(record.others),
    queryTokens: record.queries === null ? null : tokens(record.queries),
    // The queries of which a head has weights, null for all.
    storedQueries: (head) => (pairOf(head) === -1 ? stored?.queries ?? [] : null),
    async row(head, query, options) {
      const pair = pairOf(head);
      if (pair !== -1) return matrix.row(pair, query, options);
      return stored ? (head === MEAN ? stored.meanRow(query) : stored.row(heads.indexOf(head), query)) : null;
    },
    keyOf: (query) => (first === null ? null : query + first),
    queryOf: (key) => (first === null || key < first || key >= first + shape[0] ? null : key - first),
  };
}
const layers = data.layers.map(createLayer);

// -- Names of tokens, and weights --

// Three digits; the exact number is an attribute of the element.
function weightElement(weight) {
  return el("b", { class: "weight", "data-weight": String(weight) }, formatShort(weight));
}

function imageName(image) {
  return data.images.length > 1 ? `image ${image}, ` : "";
}
function patchName(image, { row, column }) {
  return `${imageName(image)}row ${row}, column ${column}`;
}
// The patch of a key in the layer, or null.
function findPatch(layer, key) {
  for (const grid of key === null ? [] : layer.images) {
    const patch = patchAt(grid, key);
    if (patch) return { ...patch, image: grid.image };
  }
  return null;
}
function keyElement(layer, key) {
  const patch = findPatch(layer, key);
  if (patch) return el("span", {}, patchName(patch.image, patch));
  return tokenElement(layer.others.find(({ index }) => index === key)?.name ?? `token ${key}`);
}
function queryElement(layer, query) {
  if (layer.queryTokens) return tokenElement(layer.queryTokens[query].name);
  return keyElement(layer, layer.keyOf(query));
}

// -- State, which the address keeps --

const state = { layer: layers.at(-1), head: MEAN, query: 0, opacity: 60, isGrey: true, isLog: false };

function parseState() {
  const given = readUrlState(), layer = layers[parseInRange(given.layer, 0, layers.length - 1)] ?? layers.at(-1);
  const head = layer.heads.find((number) => String(number) === given.head) ?? (layer.heads.length > 1 ? MEAN : layer.heads[0]);
  const query = parseInRange(given.query, 0, layer.shape[0] - 1), opacity = parseInRange(given.opacity, 0, 100);
  return { layer, head, query: Number.isInteger(query) ? query : layer.start, opacity: opacity === null ? 60 : 10 * Math.round(opacity / 10),
    isGrey: given.picture !== "colour", isLog: given.colours === "logarithmic" };
}
function writeState() {
  updateUrlState({ layer: layers.indexOf(state.layer), head: state.head, query: state.query, opacity: state.opacity,
    picture: state.isGrey ? null : "colour", colours: state.isLog ? "logarithmic" : null });
}

// The query itself if its weights are stored, else the nearest stored patch of its picture, or any stored query.
function nearestStored(layer, head, query) {
  const stored = layer.storedQueries(head);
  if (!stored || stored.includes(query) || !stored.length) return query;
  const at = findPatch(layer, layer.keyOf(query));
  const distance = (other) => {
    const patch = findPatch(layer, layer.keyOf(other));
    return at && patch && patch.image === at.image ? Math.hypot(patch.row - at.row, patch.column - at.column) : Infinity;
  };
  return stored.reduce((best, other) => (distance(other) < distance(best) ? other : best), stored[0]);
}

function choose(change) {
  Object.assign(state, change);
  state.query = Math.min(state.query, state.layer.shape[0] - 1);
  writeState();
  draw();
}

// -- Controls --

const layerName = ({ layer, stack, image }) => `Layer ${layer}${stack ? `, ${stack}` : ""}${image === null ? "" : `, image ${image}`}`;
const headName = (head) => (head === MEAN ? "Mean of the heads" : `Head ${head}`);
const layerSelect = el("select", { id: "layer", onchange: () => {
  const layer = layers[layerSelect.selectedIndex], isSame = layer.shape[0] === state.layer.shape[0] && layer.images[0].rows === state.layer.images[0].rows;
  const head = state.head === MEAN || layer.heads.includes(state.head) ? state.head : layer.heads[0];
  choose({ layer, head, query: isSame ? state.query : layer.start });
} }, layers.map((layer) => el("option", {}, layerName(layer))));
const headSelect = el("select", { id: "head", onchange: () => choose({ head: headSelect.value === MEAN ? MEAN : Number(headSelect.value) }) });
const opacities = Array.from({ length: 11 }, (_, n) => `${10 * n} %`);
const opacity = slider("Map opacity", "opacity", opacities, 6, (n) => choose({ opacity: 10 * n }));
const greySwitch = checkbox("Grey picture", "grey", true, (checked) => choose({ isGrey: checked }));
const logSwitch = checkbox("Logarithmic colours", "log", false, (checked) => choose({ isLog: checked }));

// -- Pictures --

const status = el("p", { class: "status", id: "patch-status", role: "status" });
const legend = el("div", { id: "legend" });
const views = data.images.map(({ name }, image) => createPictureView({
  picture: pictures[image],
  name,
  onPoint: (patch) => describePatch(image, patch),
  onChoose: (patch) => {
    const grid = gridOf(image), query = state.layer.queryOf(patchPosition(grid, patch.row, patch.column));
    if (query !== null) choose({ query });
  },
}));
const gridOf = (image) => state.layer.images.find((grid) => grid.image === image) ?? null;
let shown = { weights: null, note: "" };

function describePatch(image, patch) {
  if (!patch || !shown.weights) return status.replaceChildren(shown.note);
  const weight = shown.weights[patchPosition(gridOf(image), patch.row, patch.column)];
  return status.replaceChildren(`${capitalise(patchName(image, patch))}: weight `, weightElement(weight));
}

// -- Numbers beside the pictures --

const numbers = el("section", { id: "numbers", class: "card", "aria-label": "Numbers" });
const heading = el("p", { id: "query" }), sums = el("p", { id: "sums", class: "soft" }), largest = el("ol", { class: "largest" });
const lists = el("div");
let tokenLists = [];

function createLists(layer) {
  const isChoice = layer.queryTokens === null;
  const chooseKey = (key) => {
    const query = layer.queryOf(key);
    if (query !== null) choose({ query });
  };
  const found = [{ title: isChoice ? "Other tokens: choose one as query" : "Other keys", items: layer.others, onChoose: isChoice ? chooseKey : null, of: "key" },
    { title: "Queries: choose one", items: layer.queryTokens ?? [], onChoose: (query) => choose({ query }), of: "query" }]
    .filter(({ items }) => items.length);
  tokenLists = found.map(({ title, items, onChoose, of }) => ({ of, title, list: createTokenButtons({ label: title, items, onChoose }) }));
  lists.replaceChildren(...tokenLists.flatMap(({ title, list }) => [el("h2", {}, title), list.node]));
}

function drawNumbers(layer, weights) {
  const sumOf = (keys) => keys.reduce((sum, key) => sum + weights[key], 0);
  const patches = (grid) => Array.from({ length: grid.rows * grid.columns }, (_, n) => grid.before + n);
  const parts = layer.images.map((grid) => [data.images.length > 1 ? `image ${grid.image}` : "the picture", sumOf(patches(grid))]);
  if (layer.others.length) parts.push(["other tokens", sumOf(layer.others.map(({ index }) => index))]);
  sums.replaceChildren("On ", ...parts.flatMap(([name, sum], n) => [n ? ", on " : "", `${name} `, weightElement(sum)]), ".");
  const order = Array.from(weights.keys()).filter((key) => weights[key] > 0).sort((a, b) => weights[b] - weights[a] || a - b).slice(0, LARGEST);
  largest.replaceChildren(...order.map((key) => el("li", { "data-key": key }, keyElement(layer, key), weightElement(weights[key]), weightBar(weights[key] / weights[order[0]]))));
}

// -- Drawing --

const headMaps = createHeadMaps({ pictures, onChoose: (head) => choose({ head }) });
let drawing = 0, drawnLayer = null;

async function draw() {
  const number = ++drawing, { layer, head, isLog } = state;
  if (layer !== drawnLayer) {
    drawnLayer = layer;
    const options = [...(layer.heads.length > 1 ? [MEAN] : []), ...layer.heads];
    if (!options.includes(state.head)) state.head = options[0];
    headSelect.replaceChildren(...options.map((each) => el("option", { value: each }, headName(each))));
    createLists(layer);
    headMaps.setLayer(layer, options.map((each) => ({ head: each, name: headName(each) })));
  }
  layerSelect.selectedIndex = layers.indexOf(layer);
  headSelect.value = state.head;
  opacity.set(state.opacity / 10);
  logSwitch.querySelector("input").checked = isLog;
  greySwitch.querySelector("input").checked = state.isGrey;
  const query = nearestStored(layer, state.head, state.query), weights = await layer.row(state.head, query);
  if (number !== drawing) return;
  const colors = createPalette(), chosen = findPatch(layer, layer.keyOf(query));
  const top = weights ? layer.images.reduce((best, grid) => weights.subarray(grid.before, grid.before + grid.rows * grid.columns).reduce((a, b) => (b > a ? b : a), best), 0) : 0;
  const scale = createScale(layer.shape[1], top || 1, isLog), stored = layer.storedQueries(state.head);
  const label = `Weights of layer ${layer.layer}, ${headName(state.head).toLowerCase()}, from ${queryElement(layer, query).textContent}; the largest on a patch is ${formatShort(top)}.`;
  views.forEach((view, image) => {
    const grid = gridOf(image);
    if (!grid) return view.hide();
    const patches = (stored ?? []).map((other) => findPatch(layer, layer.keyOf(other))).filter((patch) => patch?.image === image);
    return view.show({ grid, weights, scale, colors, opacity: state.opacity / 100, isGrey: state.isGrey, query: chosen?.image === image ? chosen : null, stored: patches, label });
  });
  shown = { weights, note: query === state.query ? "Point at a patch to see its weight; click it to choose it as query."
    : "No map of this token is stored for this head; the nearest stored one is shown. Dots mark stored patches." };
  status.replaceChildren(weights ? shown.note : "No weights of this head are stored.");
  legend.replaceChildren(scaleLegend(scale));
  heading.replaceChildren("From ", el("b", {}, queryElement(layer, query)));
  if (weights) drawNumbers(layer, weights);
  for (const { of, list } of tokenLists) {
    const most = weights ? weights.reduce((a, b) => (b > a ? b : a), 0) : 0;
    list.show((index) => (of === "key" && weights ? weights[index] : null), most, of === "key" ? layer.keyOf(query) : query);
  }
  document.getElementById("app").dataset.query = query;
  await headMaps.show({ query, head: state.head, isLog, colors });
  if (number === drawing) document.getElementById("app").dataset.ready = `${layers.indexOf(layer)}.${head}.${state.query}`;
}

numbers.append(el("h2", {}, "Query"), heading, sums, lists, el("h2", {}, "Largest weights"), largest);
document.getElementById("app").append(
  pageHeader(data.title, data.lead),
  el("div", { class: "controls", id: "choices" }, el("label", {}, "Layer", layerSelect), el("label", {}, "Head", headSelect), opacity.node, greySwitch, logSwitch),
  el("div", { class: "beside" },
    el("section", { "aria-label": "Pictures" }, el("div", { id: "pictures" }, views.map(({ node }) => node)), status, legend),
    numbers),
  el("section", { id: "all-heads", "aria-label": "Every head" }, el("h2", {}, "Every head of this layer, same query"),
    el("p", { class: "soft" }, "Each map has its own colours, from 0 to its largest weight on a patch."), headMaps.node),
  el("footer", {}, data.notes.map((note) => el("p", {}, note)), data.error ? el("p", { id: "error" }, describeError(data.error)) : []),
);
addEventListener("hashchange", () => {
  Object.assign(state, parseState());
  draw();
});
Object.assign(state, parseState());
draw();
