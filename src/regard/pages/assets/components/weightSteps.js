// How one weight of a head arose, and what it does: query and key of the two tokens, their products, the score, the softmax of
// the row, the value it mixes, and what that writes into the residual stream, with the steps and flights of the pipeline.
import { bringIntoView } from "./bringIntoView.js";
import { el, scrollBox, tokenElement } from "./dom.js";
import { createFlights } from "./flights.js";
import { formatCount, formatFactor, formatNumber, formatVector } from "./format.js";
import { createNumberRows, fillRows } from "./numberGrid.js";
import { STEP_NAMES, describeProduct } from "./productText.js";
import { quote } from "./rowSentence.js";

const FOLD = 8, NARROW_FOLD = 6; // entries of a vector in a line, on a wide and a narrow screen
const PACE = 900; // milliseconds of a place of the walk

// `explain(i, j)` resolves to the record of a cell, or to null: query, key, scale and what `summariseRow` returns, and, if they are
// known, value, share (weight · value), output (of the head) and `written`, { norm, head, stream, promoted, suppressed }, with
// lists of [token, change of its logit]. `texts()` returns functions `query(i)`, `key(j)` and `token(token)` to names, and sentences:
// `source` on query and key, `missing` if the page has no value, `unavailable` if there is no record.
export function createWeightSteps({ explain, texts }) {
  const title = el("h3", { id: "steps-heading" }), source = el("p", { class: "soft" }), stage = el("div", { class: "folded-stage" });
  const heading = el("h4"), description = el("p"), formula = el("p", { class: "formula" });
  const announcement = el("p", { class: "visually-hidden", role: "status" });
  const button = (id, text, onclick, kind = "") => el("button", { type: "button", id: `steps-${id}`, class: kind, onclick }, text);
  const play = button("play", "▶ Play", () => (timer ? pause() : start()), "primary"), back = button("back", "← Back", () => moveBy(-1)), next = button("next", "Next →", () => moveBy(1));
  const nav = el("ol", { class: "steps" }), panel = el("div", { class: "steps-panel" }, heading, description, formula);
  const node = el("section", { id: "weight-steps", class: "card", "aria-labelledby": "steps-heading", hidden: true },
    el("div", { class: "steps-top" }, title, button("close", "Close", hide)), source,
    el("div", { class: "controls stays-on-top" }, play, back, next), el("nav", { "aria-label": "Steps" }, nav), panel, stage, announcement);
  let shown = null, places = [], at = 0, timer = null, flights = null, request = 0;

  // -- One cell --

  async function show(i, j) {
    const current = ++request, record = await explain(i, j);
    if (current !== request) return;
    pause();
    const names = texts(), isMasked = record?.score === -Infinity;
    title.replaceChildren("How ", quote(names.query(i)), " looks at ", quote(names.key(j)), record && !isMasked ? `: weight ${formatNumber(record.weight)}` : "");
    node.hidden = false;
    source.textContent = !record ? names.unavailable : isMasked ? "This pair is masked: the score is replaced by minus infinity, so the weight is 0." : names.source;
    announcement.textContent = "";
    for (const part of [nav, panel, stage, play.parentNode]) part.hidden = !record || isMasked;
    if (record && !isMasked) {
      shown = { ...record, sum: record.query.reduce((sum, x, k) => sum + x * record.key[k], 0), names, queryName: names.query(i), keyName: names.key(j), column: record.keys.indexOf(j) };
      build();
      go(places.findIndex(({ kind }) => kind === "sum"));
    } else bringIntoView(node);
  }

  function hide() {
    pause();
    request++;
    node.hidden = true;
  }

  function build() {
    const { query, key, keys, value, written, names } = shown, dim = query.length;
    shown.fold = matchMedia("(max-width: 34rem)").matches ? NARROW_FOLD : FOLD;
    const create = (id, rows, length, names) => createNumberRows({ id: `steps-${id}`, rows, length, fold: shown.fold, names });
    const products = create("products", ["query", "key", "product"], dim);
    const score = create("score", [""], 3, ["sum", "scale", "score"]);
    const softmax = create("softmax", ["score", "exp", "weight"], keys.length, keys.map(names.key));
    const values = value ? create("value", ["value", "× weight", "head output"], value.length) : null;
    fillRows(products.cells, [query, key, query.map((x, k) => x * key[k])], 2);
    fillRows(score.cells, [[shown.sum, shown.scale, shown.score]]);
    fillRows(softmax.cells, [shown.scores, shown.exponentials, shown.weights], 2);
    if (values) fillRows(values.cells, [value, shown.share, shown.output]);
    shown.cells = { products: products.cells, score: score.cells[0], softmax: softmax.cells, values: values?.cells };
    const group = (step, name, ...children) => el("div", { class: "step-group", "data-step": `${step}` }, el("p", { class: "grid-name" }, el("b", {}, name)), children);
    const others = shown.others ? el("p", { class: "soft" }, `${formatCount(shown.others, "more key")}: together ${formatNumber(shown.rest)}`) : [];
    const sink = shown.sink > 0 ? el("p", { class: "soft" }, `The sink takes the rest of the row: ${formatNumber(shown.sink)}`) : [];
    const content = el("div", { class: "folded-screen" },
      group(0, "query · key", products.node), group(1, "score", score.node), group(2, "softmax of the row", softmax.node, others, sink),
      values ? group(3, "value", values.node) : group(3, "value", el("p", { class: "soft", id: "steps-missing" }, names.missing)),
      written ? group(4, "residual stream", writtenElement()) : []);
    stage.replaceChildren(scrollBox("Numbers of this weight", content));
    flights = createFlights(content);
    const folds = Array.from({ length: Math.ceil(dim / shown.fold) }, (_, n) => ({ step: 0, kind: "products", start: n * shown.fold }));
    places = [...folds, { step: 0, kind: "sum" }, { step: 1, kind: "scale" }, { step: 2, kind: "softmax" },
      ...(values ? [{ step: 3, kind: "value" }] : []), ...(written ? [{ step: 4, kind: "written" }] : [])];
    const steps = [...STEP_NAMES.slice(0, values ? 4 : 3), ...(written ? ["Write"] : [])];
    nav.replaceChildren(...steps.map((name, step) => el("li", {}, el("button", { type: "button", onclick: () => goAndPause(places.findLastIndex((place) => place.step === step)) },
      el("span", { class: "count" }, `${step + 1}`), name))));
  }

  // The tokens whose logits change most, with their changes.
  function writtenElement() {
    const { written: { promoted, suppressed }, names } = shown;
    const list = (name, id, changes) => el("div", {}, el("p", { class: "grid-name" }, name), el("table", { id }, el("tbody", {}, changes.map(([token, change]) =>
      el("tr", {}, el("th", { scope: "row" }, tokenElement(names.token(token))), el("td", { class: "result", "data-value": `${change}` }, `${change > 0 ? "+" : ""}${formatNumber(change)}`))))));
    return el("div", { class: "logits" }, list("logits that rise most", "steps-promoted", promoted), list("that fall most", "steps-suppressed", suppressed));
  }

  // -- The walk --

  function describe({ step, kind, start: first }) {
    const { queryName, keyName, names, scale, score, sum, weight, share, value, written } = shown;
    if (kind === "products") {
      const last = Math.min(first + shown.fold, shown.query.length) - 1;
      return { words: ["Multiply the numbers of ", quote(queryName), " and ", quote(keyName), ` in pairs: ${first} to ${last}.`],
        formula: `${formatNumber(shown.query[first])} · ${formatFactor(shown.key[first])} = ${formatNumber(shown.query[first] * shown.key[first])}` };
    }
    if (kind === "value") return { words: ["The weight multiplies the value of ", quote(keyName), ". The sum over all keys is the output of the head."], formula: `${formatNumber(weight)} · ${formatVector(value)} = ${formatVector(share)}` };
    if (kind === "written") {
      return { words: ["The output matrix of the layer turns this share into numbers that are added to the residual stream of ", quote(queryName),
        `. Their length is ${formatNumber(written.norm)}; all keys of this head together write ${formatNumber(written.head)} to a stream of length ${formatNumber(written.stream)}. `,
        "If the last norm and the unembedding read them directly, without the layers between, they change the logits as follows (relative to the average logit):"],
      formula: written.promoted.slice(0, 3).map(([token, change]) => `“${names.token(token)}” ${change > 0 ? "+" : ""}${formatNumber(change)}`).join(", ") };
    }
    const raw = shown.keys.map((_, k) => (k === shown.column ? sum : null)), keys = raw.map(() => shown.key);
    const text = describeProduct({ step, column: shown.column }, { row: { ...shown, keys, raw_scores: raw }, tokens: shown.keys.map(names.key), query: queryName, scale, dim: shown.query.length });
    if (kind !== "scale" || Math.abs(sum * scale - score) <= 1e-6 * Math.abs(score)) return text;
    return { words: [...text.words, " Then the model changes the score, by a bias or a cap."], formula: `${formatNumber(sum)} × ${formatNumber(scale)} = ${formatNumber(sum * scale)} → ${formatNumber(score)}` };
  }

  // The cells that are combined at a place, and those that result.
  function partsOf({ kind, start: first }) {
    const { products: [query, key, product], score: [sum, factor, score], softmax: [scores, , weights], values } = shown.cells, { column } = shown;
    if (kind === "products") return { from: query.slice(first, first + shown.fold).flatMap((cell, k) => [cell, key[first + k]]), to: product.slice(first, first + shown.fold) };
    if (kind === "sum") return { from: product, to: [sum] };
    if (kind === "scale") return { from: [sum, factor], to: [score] };
    if (kind === "softmax") return { from: scores, to: [weights[column]] };
    if (kind === "value") return { from: [weights[column], ...values[0]], to: values[1] };
    return { from: values[1], to: [stage.querySelector("#steps-promoted td")] };
  }

  function go(place) {
    at = place;
    const current = places[at], text = describe(current), { from, to } = partsOf(current);
    stage.querySelectorAll(".factor, .at-work").forEach((cell) => cell.classList.remove("factor", "at-work"));
    from.forEach((cell) => cell.classList.add("factor"));
    to.forEach((cell) => cell.classList.add("at-work"));
    heading.textContent = `${current.step + 1}. ${nav.children[current.step].textContent.slice(1)}`;
    description.replaceChildren(...text.words.flat());
    formula.textContent = text.formula;
    [...nav.querySelectorAll("button")].forEach((item, step) => item.toggleAttribute("aria-current", step === current.step));
    [back.disabled, next.disabled] = [at === 0, at === places.length - 1];
    play.textContent = timer ? "Pause" : "▶ Play";
    if (!timer) announcement.textContent = `${heading.textContent}. ${formula.textContent}`;
    // A screen with one column shows only the parts that the walk is at.
    stage.querySelectorAll(".step-group").forEach((group) => group.classList.toggle("current", group.querySelector(".factor, .at-work") !== null));
    bringIntoView(to[0].closest("table"), panel, play.parentNode);
    flights.fly(from, to[Math.floor(to.length / 2)], timer ? PACE : 700);
  }

  function goAndPause(place) {
    pause();
    go(place);
  }

  const moveBy = (by) => goAndPause(Math.min(Math.max(at + by, 0), places.length - 1));

  function start() {
    timer = setInterval(() => (at < places.length - 1 ? go(at + 1) : pause()), PACE);
    go(at === places.length - 1 || places[at].kind === "sum" ? 0 : at);
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    play.textContent = "▶ Play";
  }

  return { node, show, hide };
}

// The steps for a matrix whose query and key are stored in the page; `names` are the functions `query(i)` and `key(j)`.
export function createStoredSteps({ explain, names }) {
  return createWeightSteps({ explain, texts: () => ({
    ...names(),
    source: "Query and key as attention received them, after a rotary embedding if the model has one, rounded to half precision.",
    missing: "This page has queries and keys, but not the values, so it ends at the weight.",
    unavailable: "This is a mean over heads: each has its own queries and keys. Open a single head to see how its weights were computed.",
  }) });
}
