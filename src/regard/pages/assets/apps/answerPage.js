// What an answer read: its tokens, coloured by the part of the prompt that got most of their attention.
import { bringIntoView } from "../components/bringIntoView.js";
import { radioGroup, weightBar } from "../components/controls.js";
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { formatCount, formatShort } from "../components/format.js";
import { createTextBlock } from "../components/textBlock.js";
import { stripMarker } from "../components/tokenMatch.js";
import { parseInRange, readUrlState, updateUrlState } from "../components/urlState.js";
import { decodeArray } from "../matrix/payload.js";

const data = readRecord();
const { names, tokens } = data, count = tokens.length, width = names.length;
const read = ({ array, encoding }) => decodeArray(encoding, document.getElementById(`array${array}`).textContent);
const [masses, lookback] = await Promise.all([read(data.masses), read(data.lookback)]);

// The rows of `masses`: one for each head, or for each layer, or one for all.
const rows = data.rows.map(({ layer, head }, index) => ({ layer, head, index }));
const layers = [...new Set(rows.map(({ layer }) => layer))].filter((layer) => layer !== null);
const isRest = (name) => name >= data.spans; // "other" and "generated"
const spanIndices = names.map((_, name) => name).filter((name) => !isRest(name));

const given = readUrlState();
const state = {
  layer: parseInRange(given.layer, 0, Infinity),
  head: parseInRange(given.head, 0, Infinity),
  color: parseInRange(given.color, -1, width - 1) ?? -1, // −1: the span with the largest share
  token: parseInRange(given.token, 0, count - 1) ?? 0,
};
if (!layers.includes(state.layer)) state.layer = null;
if (!rows.some(({ layer, head }) => head !== null && head === state.head && (state.layer === null || layer === state.layer))) state.head = null;

// -- Shares --

// One decimal, so that shares below each other can be compared.
const formatShare = (share) => (share > 0 && share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);

// The mean over rows, (tokens, names) and (tokens); a ratio that is undefined is left out.
function meanOf(chosen) {
  const shares = new Float64Array(count * width), ratios = new Float64Array(count), defined = new Float64Array(count);
  for (const { index } of chosen) {
    for (let i = 0; i < count * width; i++) shares[i] += masses[index * count * width + i] / chosen.length;
    for (let i = 0; i < count; i++) {
      const ratio = lookback[index * count + i];
      if (!Number.isNaN(ratio)) [ratios[i], defined[i]] = [ratios[i] + ratio, defined[i] + 1];
    }
  }
  return { shares, ratios: ratios.map((sum, i) => sum / defined[i]) };
}

let view = null; // the shares of the chosen rows
const shareOf = (token, name) => view.shares[token * width + name];
// The span that a token is coloured by: the chosen one, or the one with the largest share.
const colorOf = (token) => (state.color >= 0 ? state.color
  : spanIndices.reduce((best, name) => (shareOf(token, name) > shareOf(token, best) ? name : best), 0));

// -- Colours: hues around the circle, far from those before; the rest of the prompt and the answer itself are grey. --

const setColor = (node, name) => {
  node.style.setProperty("--hue", `${(210 + name * 137.5) % 360}`);
  node.classList.toggle("rest", isRest(name));
  node.classList.toggle("own", names[name] === "generated");
};
const swatch = (name) => {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  setColor(node, name);
  return node;
};

// -- Controls --

const choices = ["largest span", ...names];
const colors = radioGroup("color", "Colour the answer by", choices, (n) => setState({ color: n - 1 }));
colors.querySelectorAll(".chip span").forEach((chip, n) => n && chip.prepend(swatch(n - 1)));
const option = (value, text) => el("option", { value: value === null ? "" : String(value) }, text);
const layerSelect = el("select", { id: "layer", onchange: () => setState({ layer: layerSelect.value === "" ? null : Number(layerSelect.value), head: null }) },
  option(null, "mean of all layers"), layers.map((layer) => option(layer, `layer ${layer}`)));
const headSelect = el("select", { id: "head", onchange: () => setState({ head: headSelect.value === "" ? null : Number(headSelect.value) }) });

// -- The answer --

const answer = createTextBlock({ names: tokens, label: "Answer", onSelect: (token) => setState({ token }), onPoint: () => {}, decorate });
let strongest = 0;

function decorate(button, token) {
  if (!view) return; // before the first drawing
  const name = colorOf(token), share = shareOf(token, name);
  button.style.setProperty("--share", strongest ? Math.sqrt(share / strongest) : 0);
  setColor(button, name);
  button.setAttribute("aria-pressed", String(token === state.token));
  button.setAttribute("aria-label", `${tokens[token]}, token ${data.first + token}, ${formatShare(share)} on ${names[name]}`);
  button.dataset.span = names[name];
  button.dataset.value = String(share);
  button.title = `${names[name]}: ${formatShare(share)}`;
}

// -- One token --

const card = el("section", { class: "card", id: "token", "aria-live": "polite" });

function bar(name, share) {
  const node = weightBar(share);
  setColor(node.firstChild, name);
  return node;
}

function stackedBar(shares) {
  return el("span", { class: "stack" }, shares.map((share, name) => {
    const part = el("span", { class: "fill", title: `${names[name]}: ${formatShare(share)}` });
    part.style.width = `${100 * share}%`;
    setColor(part, name);
    return part;
  }));
}

function drawToken() {
  const token = state.token, ratio = view.ratios[token];
  const shares = names.map((_, name) => shareOf(token, name));
  const byLayer = layers.length < 2 ? [] : layers.map((layer) => {
    const own = rows.filter((row) => row.layer === layer && (state.head === null || row.head === state.head || row.head === null));
    const sums = names.map((_, name) => own.reduce((sum, { index }) => sum + masses[(index * count + token) * width + name], 0) / Math.max(own.length, 1));
    return [layer, sums];
  });
  card.replaceChildren(...[
    el("h2", {}, tokenElement(stripMarker(tokens[token])), el("sub", {}, String(data.first + token))),
    el("p", { class: "soft" }, data.prompt === null ? "Attention of this token: " : "Attention of the row that produced this token: ", describeRows(), "."),
    el("table", { class: "shares" }, el("thead", { class: "visually-hidden" }, el("tr", {}, ["part", "share"].map((text) => el("th", { scope: "col" }, text)), el("td", {}))),
      el("tbody", {}, shares.map((share, name) => el("tr", {}, el("th", { scope: "row" }, swatch(name), tokenElement(names[name])),
        el("td", { "data-share": String(share) }, formatShare(share)), el("td", { class: "bars" }, bar(name, share)))))),
    el("p", { id: "lookback", class: "soft" }, Number.isNaN(ratio) ? "Lookback ratio: undefined, because nothing was generated before this token."
      : ["Lookback ratio: ", el("b", {}, formatShort(ratio)), " = C / (C + G), where C is the mean weight on a token of the prompt and G on a generated token."]),
    byLayer.length ? [el("h3", {}, "By layer"), el("div", { class: "by-layer" }, byLayer.map(([layer, own]) =>
      el("button", { type: "button", class: "layer-row", "aria-pressed": String(layer === state.layer), onclick: () => setState({ layer: layer === state.layer ? null : layer }),
        "aria-label": `Layer ${layer}: ${own.map((share, name) => `${names[name]} ${formatShare(share)}`).join(", ")}` },
      el("span", { class: "label" }, `layer ${layer}`), stackedBar(own))))] : [],
  ].flat());
}

const describeRows = () => (state.layer === null ? "mean of all layers" : `layer ${state.layer}`) + (state.head === null ? "" : `, head ${state.head}`);

// -- The prompt --

function promptText() {
  return el("details", { id: "prompt" }, el("summary", {}, `The prompt, ${formatCount(data.prompt ?? count, "token")}, by span`),
    el("p", { class: "running" }, data.runs.map(({ name, text }) => {
      const part = el("mark", { class: "run", title: name < 0 ? "padding" : names[name] }, tokenElement(text));
      setColor(part, name < 0 ? width : name);
      return part;
    })));
}

// -- State --

function setState(change) {
  Object.assign(state, change);
  draw();
  if ("color" in change) bringIntoView(answer.node, colors);
  else bringIntoView(card, answer.node);
  updateUrlState({ layer: state.layer, head: state.head, color: state.color < 0 ? null : state.color, token: state.token || null });
}

function draw() {
  const own = rows.filter(({ layer }) => state.layer === null || layer === state.layer);
  const heads = [...new Set(own.map(({ head }) => head))].filter((head) => head !== null);
  if (!heads.includes(state.head)) state.head = null;
  const chosen = own.filter(({ head }) => state.head === null || head === state.head);
  view = meanOf(chosen);
  layerSelect.value = state.layer === null ? "" : String(state.layer);
  headSelect.replaceChildren(option(null, "mean of heads"), ...heads.map((head) => option(head, `head ${head}`)));
  headSelect.value = state.head === null ? "" : String(state.head);
  headSelect.disabled = !heads.length;
  colors.querySelectorAll("input")[state.color + 1].checked = true;
  const shares = tokens.map((_, token) => shareOf(token, colorOf(token)));
  strongest = shares.reduce((a, b) => Math.max(a, b), 0);
  answer.color(shares);
  caption.textContent = `${state.color < 0 ? `Each token has the colour of the named span with the largest share, without “${names.slice(data.spans).join("” and “")}”. ` : ""}`
    + "Colours follow the square root of the share, up to the largest share in the answer. Arrow keys move, Enter selects a token.";
  legend.replaceChildren(el("li", {}, "Mean of the answer:"), ...names.map((name, n) => el("li", {}, swatch(n), tokenElement(name), " ",
    el("b", { "data-mean": name }, formatShare(tokens.reduce((sum, _, token) => sum + shareOf(token, n), 0) / count)))));
  drawToken();
}

const legend = el("ul", { class: "legend", "aria-label": "Mean shares of the whole answer" }), caption = el("p", { class: "soft" });
const statement = el("aside", { class: "statement", role: "note" }, el("p", {}, el("b", {}, "Attention is not causation. "),
  "Attention shows where heads read, not what the answer depends on. A part with a large share may not matter, and a part with a small share may be decisive. ",
  "To test a part, remove its edges while the model runs, and compare the answers: ", el("code", {}, "regard.intervene(model, knockout(keys=slice(start, stop)))"), "; the guide Edit attention shows how."));

document.getElementById("app").append(
  pageHeader(data.title, `${formatCount(count, data.prompt === null ? "token" : "generated token")}, and the share of their attention on each part of the prompt.`),
  statement,
  el("div", { class: "controls" }, layers.length ? [el("label", {}, "Layer ", layerSelect), el("label", {}, "Head ", headSelect)] : []),
  data.note ? el("p", { class: "soft", id: "note" }, data.note) : [],
  colors, legend,
  el("div", { class: "beside answer" }, el("div", {}, answer.node, caption, promptText()), card));
draw();
document.getElementById("app").dataset.ready = "";
