// What is told of a cell: both tokens and what stands around them, the weight, and the keys that its query weighs most.
import { el, token } from "./dom.js";
import { bar } from "./controls.js";
import { number } from "./numbers.js";

const AROUND = 6; // tokens on either side
const SHOWN = 8; // keys
const REST = 120; // milliseconds that a pointer rests before a whole row is worked out

const spelled = (n) => n.toLocaleString("en-GB");

function around(names, n) {
  const low = Math.max(0, n - AROUND), high = Math.min(names.length, n + AROUND + 1);
  const words = names.slice(low, high).map((name, k) => [k ? " " : "", low + k === n ? el("mark", {}, token(name)) : token(name)]);
  return [low > 0 ? "… " : "", words, high < names.length ? " …" : ""];
}

const HINT = "Point at the map, or choose a cell with the arrow keys: here stands its weight, with both tokens.";

// `go(row, column)` is called when a key of the list is chosen; `hint` stands here before anything is.
export function readingOf({ matrix, tokens, queries, go, head = 0, hint = HINT }) {
  const node = el("div", { class: "card reading-card", role: "status" },
    el("p", { class: "place" }, hint));
  const list = el("div", { class: "strongest" });
  let of = head, row = null, timer = 0, asking = null;

  // `answer` is null while the weight is still to come.
  function tell(i, j, answer) {
    const hidden = answer?.hidden;
    const names = [queries ? token(queries[i]) : `query ${spelled(i)}`, " → ", tokens ? token(tokens[j]) : `key ${spelled(j)}`];
    const where = `query ${spelled(i)} → key ${spelled(j)}${hidden ? ": the mask lets nothing through here" : ""}`;
    node.replaceChildren(...[
      el("p", { class: "pair" }, names),
      el("p", { class: "weight" }, answer ? (hidden ? "hidden" : number(answer.weight)) : "…"),
      el("p", { class: "place" }, answer ? where : "unpacking the numbers of this page"),
      queries || tokens ? el("dl", {},
        queries ? [el("dt", {}, "the query, in its text"), el("dd", {}, around(queries, i))] : [],
        tokens ? [el("dt", {}, "the key, in its text"), el("dd", {}, around(tokens, j))] : []) : [],
    ].flat());
    if (!answer) return;
    if (i === row) return;
    row = i;
    clearTimeout(timer);
    asking?.abort();
    timer = setTimeout(() => rank(i), REST);
  }

  async function rank(i) {
    asking = new AbortController();
    const { signal } = asking, best = await matrix.strongest(of, i, SHOWN, { signal, urgent: false });
    if (!best || signal.aborted) return;
    const items = best.map(({ key, weight }) => el("li", {}, el("button", { type: "button", onclick: () => go(i, key) },
      el("span", { class: "name" }, tokens ? token(tokens[key]) : `key ${spelled(key)}`),
      tokens ? el("span", { class: "where" }, spelled(key)) : [],
      el("span", { class: "number" }, number(weight)),
      bar(weight))));
    list.replaceChildren(el("h2", {}, "Where ", queries ? ["“", token(queries[i]), "”, "] : "", `query ${spelled(i)}, looks most`),
      items.length ? el("ol", {}, items) : el("p", { class: "place" }, "Nowhere: the mask hides every key from it."));
  }

  function setHead(number) {
    [of, row] = [number, null];
    list.replaceChildren();
  }

  return { node: el("div", { class: "reading-side" }, node, list), tell, setHead };
}
