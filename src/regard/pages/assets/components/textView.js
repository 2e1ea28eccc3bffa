// A running text, coloured by one token: by what it attends to, or by what attends to it. If queries and keys are two
// sequences, both texts are shown, and a token of one colours the other.
import { radioGroup, weightBar } from "./controls.js";
import { el, tokenElement } from "./dom.js";
import { formatCount, formatNumber } from "./format.js";
import { createTextBlock } from "./textBlock.js";

const TOP_TOKENS = 8;

// Arguments and methods as in `createWeightMap`. `first`: the position of query 0 among the keys, null for another sequence;
// view: { query, key, direction }, where the direction "received" selects the key.
export function createTextView({ matrix, head, size: [rows, columns], tokens, queries, first, view, onCell, onView }) {
  const shared = first !== null;
  let side = view.direction === "received" ? 1 : 0; // 0: the selected token is a query, 1: it is a key
  let selected = null, lastRequest = 0, cellRequest = null, weights = null;

  const directions = radioGroup("direction", "Colour the text by", ["what the token attends to", "what attends to the token"], (n) => {
    side = n;
    if (selected !== null) select(side, toIndex(side, selected));
  });
  directions.hidden = !shared;
  const status = el("p", { class: "text-status", role: "status" });
  const list = el("div", { class: "top-keys" });
  const blockOf = (names, label, own) => createTextBlock({ names, label,
    onSelect: (position) => select(shared ? side : own, shared ? toIndex(side, position) : position),
    onPoint: (position) => point(own, position) });
  // One text for both, or a text of queries and one of keys.
  const blocks = shared ? [blockOf(tokens, "Text", null)]
    : [blockOf(queries, "Queries", 0), blockOf(tokens, "Keys", 1)];
  const coloured = () => (shared ? blocks[0] : blocks[1 - side]);
  const node = el("div", { class: "text-view" }, directions, status, blocks.map((block) => block.node),
    el("p", { class: "soft text-legend" }, "Colours follow the square root of the weight, up to the largest. Arrow keys move, Enter selects a token."),
    list);

  // Positions in the shared text are those of the keys; row i is at position first + i.
  const toIndex = (which, position) => (which === 0 ? position - first : position);
  const toPosition = (which, index) => (shared && which === 0 ? index + first : index);
  const nameOf = (which, index) => (shared ? tokens[toPosition(which, index)] : (which ? tokens : queries)[index]);

  // `index`: the row of a query or the column of a key.
  async function select(which, index) {
    side = which;
    directions.querySelectorAll("input")[side].checked = true;
    const request = ++lastRequest, position = toPosition(side, index);
    selected = position;
    for (const block of blocks) block.select(block === coloured() && !shared ? null : position);
    node.removeAttribute("data-ready");
    if (side === 0 && (index < 0 || index >= rows)) {
      weights = null;
      coloured().color(null);
      list.replaceChildren();
      status.textContent = `This call has no query at token ${formatCount(position)}, only a key.`;
      node.dataset.ready = "none";
      return;
    }
    onView?.(side ? { query: null, key: index, direction: "received" } : { query: index, key: null, direction: null });
    const all = side ? matrix.block(head, Array.from({ length: rows }, (_, i) => i), [index]) : matrix.row(head, index);
    const answer = await all.catch((error) => fail(error));
    if (!answer || request !== lastRequest) return;
    weights = answer;
    const offset = shared && side === 1 ? first : 0;
    coloured().color(weights, offset);
    describe(index);
    node.dataset.ready = `${side} ${index}`;
  }

  function fail(error) {
    status.textContent = `The weights could not be computed: ${error.message}`;
    return null;
  }

  // The selected token, and the tokens with the largest weights, the first of equal ones first.
  function describe(index) {
    const order = [];
    for (let n = 0; n < weights.length; n++) {
      if (!(weights[n] > 0) || (order.length === TOP_TOKENS && weights[n] <= weights[order.at(-1)])) continue;
      let rank = order.length;
      while (rank && weights[order[rank - 1]] < weights[n]) rank--;
      order.splice(rank, 0, n);
      order.length = Math.min(order.length, TOP_TOKENS);
    }
    const name = [tokenElement(nameOf(side, index)), el("sub", {}, String(toPosition(side, index)))];
    status.replaceChildren(...(side ? ["What attends to ", ...name] : ["What ", ...name, " attends to"]));
    const other = 1 - side;
    if (order.length) onCell?.(...(side ? [order[0], index] : [index, order[0]]), { weight: weights[order[0]], masked: false });
    list.replaceChildren(el("h3", {}, side ? "Largest weights on it" : "Its largest weights"),
      order.length ? el("ol", {}, order.map((n) => el("li", {}, el("button", { type: "button", onclick: () => {
        coloured().goTo(toPosition(other, n));
        point(other, toPosition(other, n));
      } },
        el("span", { class: "name" }, tokenElement(nameOf(other, n))), el("span", { class: "where" }, formatCount(toPosition(other, n))),
        el("span", { class: "number" }, formatNumber(weights[n])), weightBar(weights[n])))))
        : el("p", { class: "place" }, "None: every weight is 0."));
  }

  // Report the weight between the selected token and the one that is pointed at.
  async function point(block, position) {
    if (selected === null || !weights || (!shared && block === side)) return;
    const other = 1 - side, index = shared ? toIndex(other, position) : position;
    if (index < 0 || index >= (other ? columns : rows)) return;
    const own = toIndexOfSelected(), [i, j] = side ? [index, own] : [own, index];
    cellRequest?.abort();
    cellRequest = new AbortController();
    const { signal } = cellRequest, answer = await matrix.cell(head, i, j, { signal }).catch(fail);
    if (answer && !signal.aborted) onCell?.(i, j, answer);
  }
  const toIndexOfSelected = () => (shared ? toIndex(side, selected) : selected);

  function setHead(newHead) {
    head = newHead;
    return selected === null ? null : select(side, toIndexOfSelected());
  }

  // The last query if nothing is selected.
  function show({ query = null, key = null, direction = null }) {
    const which = direction === "received" && key !== null ? 1 : 0, index = which ? key : query ?? rows - 1;
    blocks[shared ? 0 : which].goTo(toPosition(which, index), false);
    return select(which, index);
  }

  function goTo(row, column) {
    show({ query: row });
    coloured().goTo(column);
  }

  return { node, setHead, show, goTo, ready: Promise.resolve(), repaint: () => blocks.forEach((block) => block.repaint()) };
}
