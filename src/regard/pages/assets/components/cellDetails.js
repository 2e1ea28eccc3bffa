// Details of a cell: its weight, both tokens with their context, and the keys with the largest weights of its query.
import { weightBar } from "./controls.js";
import { el, tokenElement } from "./dom.js";
import { formatCount, formatNumber } from "./format.js";

const CONTEXT = 6; // tokens on either side
const TOP_KEYS = 8;
const ROW_DELAY = 120; // milliseconds that a cell is selected before its whole row is computed

function contextElements(names, n) {
  const low = Math.max(0, n - CONTEXT), high = Math.min(names.length, n + CONTEXT + 1);
  const words = names.slice(low, high).map((name, k) =>
    [k ? " " : "", low + k === n ? el("mark", {}, tokenElement(name)) : tokenElement(name)]);
  return [low > 0 ? "… " : "", words, high < names.length ? " …" : ""];
}

const HINT = "Point at the map, or select a cell with the arrow keys, to see its weight and both tokens. Click it, or press Enter, to see how it was computed.";

// `goTo(row, column)` is called when a key of the list is clicked; `hint` is shown until a cell is selected, and
// without `hasList` the largest weights are not listed.
export function createCellDetails({ matrix, tokens, queries, goTo, head = 0, hint = HINT, hasList = true }) {
  const node = el("div", { class: "card cell-card", role: "status" },
    el("p", { class: "place" }, hint));
  const list = el("div", { class: "top-keys" });
  let row = null, timer = 0, rowRequest = null;

  // `answer` is null while the weight is being computed.
  function show(i, j, answer) {
    const masked = answer?.masked;
    const names = [queries ? tokenElement(queries[i]) : `query ${formatCount(i)}`, " → ",
      tokens ? tokenElement(tokens[j]) : `key ${formatCount(j)}`];
    const place = `query ${formatCount(i)} → key ${formatCount(j)}${masked ? ": masked" : ""}`;
    node.replaceChildren(...[
      el("p", { class: "pair" }, names),
      el("p", { class: "weight" }, answer ? (masked ? "masked" : formatNumber(answer.weight)) : "…"),
      el("p", { class: "place" }, answer ? place : "loading the weights of this page"),
      queries || tokens ? el("dl", {},
        queries ? [el("dt", {}, "Query in context"), el("dd", {}, contextElements(queries, i))] : [],
        tokens ? [el("dt", {}, "Key in context"), el("dd", {}, contextElements(tokens, j))] : []) : [],
    ].flat());
    if (!answer || i === row || !hasList) return;
    row = i;
    clearTimeout(timer);
    rowRequest?.abort();
    timer = setTimeout(() => listTopKeys(i), ROW_DELAY);
  }

  async function listTopKeys(i) {
    rowRequest = new AbortController();
    const { signal } = rowRequest, top = await matrix.topKeys(head, i, TOP_KEYS, { signal, urgent: false });
    if (!top || signal.aborted) return;
    const items = top.map(({ key, weight }) => el("li", {}, el("button", { type: "button", onclick: () => goTo(i, key) },
      el("span", { class: "name" }, tokens ? tokenElement(tokens[key]) : `key ${formatCount(key)}`),
      tokens ? el("span", { class: "where" }, formatCount(key)) : [],
      el("span", { class: "number" }, formatNumber(weight)),
      weightBar(weight))));
    list.replaceChildren(el("h2", {}, "Largest weights of ", queries ? ["“", tokenElement(queries[i]), "”, "] : "", `query ${formatCount(i)}`),
      items.length ? el("ol", {}, items) : el("p", { class: "place" }, "None: every key is masked for this query."));
  }

  function setHead(newHead) {
    [head, row] = [newHead, null];
    list.replaceChildren();
  }

  return { node: el("div", { class: "cell-side" }, node, list), show, setHead };
}
