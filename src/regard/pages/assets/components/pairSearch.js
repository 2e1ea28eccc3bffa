// Search in one map: the pairs with the largest weights among all occurrences of a query token and of a key token.
import { weightBar, weightElement } from "./controls.js";
import { el, tokenElement } from "./dom.js";
import { formatCount } from "./format.js";
import { chooseCase, findPositions, similarTokens, stripMarker } from "./tokenMatch.js";

const RESULTS = 8;
const MAX_WEIGHTS = 1 << 19; // of one request, so that other requests are answered in between
const MAX_OPTIONS = 4000;

// `onFound({ rows, columns })` gets the positions of both tokens, null for a field that is empty; `onOpen(row, column)` is
// called when a result is opened, `onSearch(from, to)` when a search starts.
export function createPairSearch({ matrix, head = 0, size: [rowCount, columnCount], tokens, queries, onFound, onOpen, onSearch }) {
  const texts = [queries, tokens], known = [...new Set(texts.flatMap((names) => names ?? []).map(stripMarker))];
  const options = el("datalist", { id: "words" }, known.slice(0, MAX_OPTIONS).map((text) => el("option", { value: text })));
  const field = (id, label) => el("input", { id, type: "text", list: "words", autocomplete: "off", spellcheck: "false", "aria-label": label,
    placeholder: "any", onkeydown: (event) => {
      if (event.key === "Enter") run(from.value, to.value);
    } });
  const from = field("from", "Query token"), to = field("to", "Key token");
  const clear = el("button", { type: "button", id: "clear", hidden: true, onclick: () => run("", "") }, "Clear");
  const status = el("p", { id: "search-status", role: "status" }), results = el("div", { id: "results" });
  const form = el("div", { id: "search", role: "search" }, el("span", {}, "Find where"), from, el("span", {}, "attends to"), to,
    el("button", { type: "button", class: "primary", onclick: () => run(from.value, to.value) }, "Find"), clear, options);
  let lastSearch = 0, searched = { from: "", to: "" };

  const all = (count) => Array.from({ length: count }, (_, n) => n);

  // `restore`: the search comes from the address, so it need not be written there.
  async function run(x, y, restore = false) {
    const search = ++lastSearch;
    [from.value, to.value] = [x, y];
    searched = { from: x, to: y };
    clear.hidden = !x && !y;
    results.replaceChildren();
    delete results.dataset.ready;
    status.replaceChildren();
    if (!restore) onSearch?.(x, y);
    const find = (text, names, length) => (text ? findPositions(text, names, length, chooseCase(text, [names])) : null);
    const [rows, columns] = [find(x, queries, rowCount), find(y, tokens, columnCount)];
    onFound({ rows, columns });
    if (!x && !y) return;
    const unknown = rows && !rows.length ? [x, queries] : columns && !columns.length ? [y, tokens] : null;
    if (unknown) describeUnknown(...unknown);
    else {
      const pairs = await largestPairs(rows ?? all(rowCount), columns ?? all(columnCount), () => search === lastSearch);
      if (search !== lastSearch) return;
      showPairs(pairs, rows, columns);
    }
    results.dataset.ready = "true";
  }

  // The largest weights, a chunk of rows at a time; null if another search has started.
  async function largestPairs(rows, columns, isCurrent) {
    const chunk = Math.max(1, Math.floor(MAX_WEIGHTS / columns.length));
    let best = [];
    for (let start = 0; start < rows.length; start += chunk) {
      if (rows.length > chunk) status.textContent = `Searching … ${Math.floor((100 * start) / rows.length)} %`;
      const own = await matrix.topPairs(head, rows.slice(start, start + chunk), columns, RESULTS, { urgent: false });
      if (!isCurrent()) return null;
      best = [...best, ...own].sort((a, b) => b.weight - a.weight || a.row - b.row || a.column - b.column).slice(0, RESULTS);
    }
    return best;
  }

  function describeUnknown(text, names) {
    const similar = names ? similarTokens(text, names) : [];
    status.replaceChildren("No token ", tokenElement(text), ". ", similar.length ? "Similar: " : "",
      ...similar.flatMap((name, i) => [i ? ", " : "", tokenElement(name)]), similar.length ? ". " : "",
      names ? "A word may be several tokens; write a position as #7." : "This map has no tokens; write a position as #7.");
  }

  function showPairs(pairs, rows, columns) {
    const counts = [[rows, "query", "queries"], [columns, "key", "keys"]].filter(([positions]) => positions)
      .map(([positions, noun, plural]) => formatCount(positions.length, noun, plural));
    status.textContent = `${counts.join(" and ")} found, marked on the map.${pairs.length ? " The largest weights:" : " All of their weights are 0."}`;
    const nameAt = (names, n) => (names ? [tokenElement(names[n]), el("sub", {}, String(n))] : [`#${n}`]);
    results.replaceChildren(el("ol", {}, pairs.map(({ row, column, weight }) => el("li", {},
      el("button", { type: "button", class: "hit", "data-pair": `${row},${column}`, onclick: () => onOpen(row, column) },
        el("span", { class: "pair" }, nameAt(queries, row), " → ", nameAt(tokens, column)), weightBar(weight), weightElement(weight))))));
  }

  const node = el("section", { class: "finder pairs", "aria-label": "Search" }, form, status, results);
  return { node, run, current: () => searched };
}
