// "Which head looks from X to Y": every pair of their occurrences in every head that the page carries, as recording.find has it.
import { bar, share } from "./controls.js";
import { el, token } from "./dom.js";
import { headName, headPlace } from "./grid.js";

const RESULTS = 8;
const MOST_PAIRS = 1 << 20; // weights asked for at once

// A token without the mark that it begins a word; a mark alone stays.
export function word(text) {
  return text.replace(/^[Ġ▁ ]+/, "") || text;
}

const asIs = (text) => text;
const inAnyCapitals = (text) => text.toLowerCase();

// How letters are compared: as they are where some text has the token so, else in any capitals.
export function letters(asked, texts) {
  return texts.some((names) => names?.some((name) => word(name) === word(asked))) ? asIs : inAnyCapitals;
}

// Where a token is: everywhere its text occurs, or at the position that is asked for.
export function occurrences(asked, names, length, as) {
  const place = /^(#?)([-−]?\d+)$/.exec(asked.trim());
  if (names && !place?.[1]) {
    const found = names.flatMap((name, i) => (as(word(name)) === as(word(asked)) ? [i] : []));
    if (found.length) return found;
  }
  if (!place) return [];
  const index = Number(place[2].replace("−", "-"));
  return index >= -length && index < length ? [(index + length) % length] : [];
}

function pairsOfLetters(text) {
  return new Set(Array.from({ length: Math.max(text.length - 1, 1) }, (_, i) => text.toLowerCase().slice(i, i + 2)));
}

function near(asked, names) {
  const wanted = pairsOfLetters(asked), words = [...new Set(names.map(word))];
  const alike = (text) => {
    const own = pairsOfLetters(text), both = [...own].filter((pair) => wanted.has(pair)).length;
    return (2 * both) / (own.size + wanted.size);
  };
  return words.map((text) => [alike(text), text]).filter(([share]) => share >= 0.4)
    .sort((a, b) => b[0] - a[0]).slice(0, 3).map(([, text]) => text);
}

// The pair with the largest weight, the first of equals.
async function largestPair(cell, at, keys) {
  const best = { cell, row: at[0], column: keys[0], weight: NaN };
  const many = Math.max(1, Math.floor(MOST_PAIRS / keys.length));
  for (let start = 0; start < at.length; start += many) {
    const rows = at.slice(start, start + many), weights = await cell.matrix().block(cell.place, rows, keys);
    for (let n = 0; n < weights.length; n++) {
      if (!(weights[n] > best.weight) && !(Number.isNaN(best.weight) && weights[n] >= 0)) continue;
      Object.assign(best, { row: rows[Math.floor(n / keys.length)], column: keys[n % keys.length], weight: weights[n] });
    }
  }
  return best;
}

// The rows of recording.find, largest weight first, of the heads that can be opened.
export async function find(cells, texts, from, to) {
  const rows = [], where = new Map();
  const missing = { from: true, to: true };
  const [asFrom, asTo] = [letters(from, texts), letters(to, texts)];
  for (const cell of cells) {
    const { entry } = cell, shift = entry.first ?? 0;
    if (!where.has(entry)) {
      const [q_len, kv_len] = entry.shape;
      const at = occurrences(from, texts[entry.query_text], entry.first === null ? q_len : shift + q_len, asFrom);
      const keys = occurrences(to, texts[entry.key_text], kv_len, asTo);
      if (at.length) missing.from = false;
      if (keys.length) missing.to = false;
      where.set(entry, { at: at.map((i) => i - shift).filter((i) => i >= 0), keys });
    }
    const { at, keys } = where.get(entry);
    if (!at.length || !keys.length || !cell.opens) continue;
    rows.push(largestPair(cell, at, keys));
  }
  const found = await Promise.all(rows);
  return { rows: found.sort((a, b) => Number.isNaN(a.weight) - Number.isNaN(b.weight) || b.weight - a.weight), missing };
}

export function searchOf({ cells, texts, open, changed }) {
  const names = [...new Set(texts.flat().map(word))];
  const options = el("datalist", { id: "words" }, names.slice(0, 4000).map((text) => el("option", { value: text })));
  const field = (id, label, like) => el("input", { id, name: id, type: "text", list: "words", autocomplete: "off",
    spellcheck: "false", "aria-label": label, placeholder: like, onkeydown: (event) => {
      if (event.key === "Enter") run(from.value, to.value);
    } });
  const from = field("from", "from token, the query", "it"), to = field("to", "to token, the key", "cat");
  const clear = el("button", { type: "button", id: "clear", hidden: true, onclick: () => run("", "") }, "Clear");
  const results = el("div", { id: "results" });
  const said = el("p", { id: "found", role: "status" });
  // Not a form: a frame that may run scripts and nothing else submits none.
  const form = el("div", { id: "search", role: "search" }, el("span", {}, "Which head looks from"), from, el("span", {}, "to"), to,
    el("button", { type: "button", class: "primary", onclick: () => run(from.value, to.value) }, "Find"), clear, options);
  let asked = 0;

  async function run(x, y, quiet = false) {
    const mine = ++asked;
    [from.value, to.value] = [x, y];
    clear.hidden = !x && !y;
    results.replaceChildren();
    delete results.dataset.ready;
    if (!quiet) changed(x, y);
    if (!x || !y) {
      said.textContent = x || y ? `Which token ${x ? "to" : "from"}? Fill in both.` : "";
      return;
    }
    said.textContent = "Looking …";
    const { rows, missing } = await find(cells, texts, x, y);
    if (mine !== asked) return;
    show(rows, missing, x, y);
    results.dataset.ready = "true";
  }

  function show(rows, missing, x, y) {
    const wrong = missing.from ? x : missing.to ? y : null;
    if (wrong !== null) {
      const others = near(wrong, texts.flat());
      said.replaceChildren("No token ", token(wrong), others.length ? (others.length > 1 ? "; there are " : "; there is ") : ". ",
        ...others.flatMap((text, i) => [i ? ", " : "", token(text)]),
        others.length ? ". " : "", "A word may be several tokens; a position is written #7.");
      return;
    }
    if (!rows.length) {
      said.textContent = "No layer that can be opened here has both.";
      return;
    }
    const left = cells.filter((cell) => !cell.opens).length;
    said.textContent = `The largest weight of each of ${rows.length} heads` + (left ? `; ${left} not carried here.` : ".");
    const list = el("ol", {}, rows.slice(0, RESULTS).map(line));
    const more = rows.length > RESULTS ? el("button", { type: "button", id: "every", onclick: () => {
      list.append(...rows.slice(RESULTS).map(line));
      list.children[RESULTS].firstChild.focus();
      more.remove();
    } }, `All ${rows.length}`) : [];
    results.replaceChildren(...[list, more].flat());
  }

  function line({ cell, row, column, weight }) {
    const { entry } = cell, shift = entry.first ?? 0;
    const pair = (text, i) => (text ? [token(text[i]), el("sub", {}, String(i))] : [`#${i}`]);
    return el("li", {}, el("button", { type: "button", class: "hit", "data-place": headPlace(cell), onclick: () => open(cell, row, column) },
      el("span", { class: "which" }, headName(cell)), bar(weight), share(weight),
      el("span", { class: "pair" }, pair(texts[entry.query_text], row + shift), " → ", pair(texts[entry.key_text], column))));
  }

  return { node: el("section", { class: "finder", "aria-label": "Search" }, form, said, results), run };
}
