// "Which head attends from X to Y": the largest weight among all occurrences of both tokens, for every head whose weights
// are in the page, as `recording.find` computes it.
import { weightBar, weightElement } from "./controls.js";
import { el, tokenElement } from "./dom.js";
import { headKey, headName } from "./headGrid.js";
import { chooseCase, findPositions, similarTokens, stripMarker } from "./tokenMatch.js";

const RESULTS_SHOWN = 8;
const MAX_PAIRS = 1 << 20; // weights of one request

// The pair with the largest weight, and of equal ones the first.
async function largestPair(cell, queries, keys) {
  const best = { cell, row: queries[0], column: keys[0], weight: NaN };
  const count = Math.max(1, Math.floor(MAX_PAIRS / keys.length));
  for (let start = 0; start < queries.length; start += count) {
    const rows = queries.slice(start, start + count), weights = await cell.matrix().block(cell.pair, rows, keys);
    for (let n = 0; n < weights.length; n++) {
      if (!(weights[n] > best.weight) && !(Number.isNaN(best.weight) && weights[n] >= 0)) continue;
      Object.assign(best, { row: rows[Math.floor(n / keys.length)], column: keys[n % keys.length], weight: weights[n] });
    }
  }
  return best;
}

// The rows of `recording.find`, the largest weight first, of the heads whose weights are in the page.
async function findHeads(cells, texts, from, to) {
  const requests = [], positions = new Map();
  const missing = { from: true, to: true };
  const [foldFrom, foldTo] = [chooseCase(from, texts), chooseCase(to, texts)];
  for (const cell of cells) {
    const { layer } = cell, shift = layer.first ?? 0;
    if (!positions.has(layer)) {
      const [qLen, kvLen] = layer.shape;
      const queries = findPositions(from, texts[layer.query_text], layer.first === null ? qLen : shift + qLen, foldFrom);
      const keys = findPositions(to, texts[layer.key_text], kvLen, foldTo);
      if (queries.length) missing.from = false;
      if (keys.length) missing.to = false;
      positions.set(layer, { queries: queries.map((i) => i - shift).filter((i) => i >= 0), keys });
    }
    const { queries, keys } = positions.get(layer);
    if (queries.length && keys.length && cell.hasWeights) requests.push(largestPair(cell, queries, keys));
  }
  const rows = await Promise.all(requests);
  return { rows: rows.sort((a, b) => Number.isNaN(a.weight) - Number.isNaN(b.weight) || b.weight - a.weight), missing };
}

// `onOpen(cell, row, column)` is called when a result is opened, `onSearch(from, to)` when a search starts.
export function createHeadSearch({ cells, texts, onOpen, onSearch }) {
  const names = [...new Set(texts.flat().map(stripMarker))];
  const options = el("datalist", { id: "words" }, names.slice(0, 4000).map((text) => el("option", { value: text })));
  const field = (id, label, example) => el("input", { id, name: id, type: "text", list: "words", autocomplete: "off",
    spellcheck: "false", "aria-label": label, placeholder: example, onkeydown: (event) => {
      if (event.key === "Enter") run(from.value, to.value);
    } });
  const from = field("from", "Query token", "it"), to = field("to", "Key token", "cat");
  const clear = el("button", { type: "button", id: "clear", hidden: true, onclick: () => run("", "") }, "Clear");
  const results = el("div", { id: "results" });
  const status = el("p", { id: "search-status", role: "status" });
  // Not a form: a sandboxed frame must not submit one.
  const form = el("div", { id: "search", role: "search" }, el("span", {}, "Which head attends from"), from, el("span", {}, "to"), to,
    el("button", { type: "button", class: "primary", onclick: () => run(from.value, to.value) }, "Find"), clear, options);
  let lastSearch = 0;

  // `restore`: the search comes from the address, so it need not be written there.
  async function run(x, y, restore = false) {
    const search = ++lastSearch;
    [from.value, to.value] = [x, y];
    clear.hidden = !x && !y;
    results.replaceChildren();
    delete results.dataset.ready;
    if (!restore) onSearch(x, y);
    if (!x || !y) {
      status.textContent = x || y ? `Enter a ${x ? "key" : "query"} token too.` : "";
      return;
    }
    status.textContent = "Searching …";
    const { rows, missing } = await findHeads(cells, texts, x, y);
    if (search !== lastSearch) return;
    show(rows, missing, x, y);
    results.dataset.ready = "true";
  }

  function show(rows, missing, x, y) {
    const unknown = missing.from ? x : missing.to ? y : null;
    if (unknown !== null) {
      const similar = similarTokens(unknown, texts.flat());
      status.replaceChildren("No token ", tokenElement(unknown), ". ", similar.length ? "Similar: " : "",
        ...similar.flatMap((text, i) => [i ? ", " : "", tokenElement(text)]),
        similar.length ? ". " : "", "A word may be several tokens; write a position as #7.");
      return;
    }
    if (!rows.length) {
      status.textContent = "No layer with weights in this page has both tokens.";
      return;
    }
    const without = cells.filter((cell) => !cell.hasWeights).length;
    status.textContent = `The largest weight of each of ${rows.length} heads`
      + (without ? `; the weights of ${without} heads are not in this page.` : ".");
    const list = el("ol", {}, rows.slice(0, RESULTS_SHOWN).map(resultElement));
    const more = rows.length > RESULTS_SHOWN ? el("button", { type: "button", id: "all-results", onclick: () => {
      list.append(...rows.slice(RESULTS_SHOWN).map(resultElement));
      list.children[RESULTS_SHOWN].firstChild.focus();
      more.remove();
    } }, `All ${rows.length}`) : [];
    results.replaceChildren(...[list, more].flat());
  }

  function resultElement({ cell, row, column, weight }) {
    const { layer } = cell, shift = layer.first ?? 0;
    const nameAt = (text, i) => (text ? [tokenElement(text[i]), el("sub", {}, String(i))] : [`#${i}`]);
    return el("li", {}, el("button", { type: "button", class: "hit", "data-head": headKey(cell), onclick: () => onOpen(cell, row, column) },
      el("span", { class: "which" }, headName(cell)), weightBar(weight), weightElement(weight),
      el("span", { class: "pair" }, nameAt(texts[layer.query_text], row + shift), " → ", nameAt(texts[layer.key_text], column))));
  }

  return { node: el("section", { class: "finder", "aria-label": "Search" }, form, status, results), run };
}
