// One row of weights in a sentence.
import { el, tokenElement } from "./dom.js";
import { formatPercent } from "./format.js";

const ALMOST_ALL = 0.9;
const EVEN = 0.25; // rows whose weights differ from an even share by less, relative to it, are called even

export const quote = (name) => el("span", {}, "“", tokenElement(name), "”");
export const percent = (share) => formatPercent(Number(share.toPrecision(3)));

// `live(j)` tells whether a key is not masked. Returns texts and elements.
export function rowSentence(query, weights, tokens, live, selfIndex = -1) {
  const order = Array.from(weights, (weight, j) => ({ weight, j })).filter(({ j }) => live(j)).sort((a, b) => b.weight - a.weight);
  const name = ({ j }) => (j === selfIndex ? "itself" : quote(tokens[j]));
  if (!order.length) return [quote(query), " sees nothing: every key is masked."];
  const [first, second, third] = order, last = order.at(-1);
  if (order.length === 1) return [quote(query), " sees only ", name(first), ", so it takes everything from there."];
  if (first.weight >= ALMOST_ALL) return [quote(query), " looks almost only at ", name(first), `: ${percent(first.weight)}.`];
  if (first.weight - last.weight < 1e-6) return [quote(query), ` looks at all ${order.length} alike, ${percent(first.weight)} each.`];
  const differs = ({ weight }) => Math.abs(weight * order.length - 1);
  if (differs(first) < EVEN && differs(last) < EVEN) return [quote(query), ` looks at all ${order.length} about alike, a little more at `, name(first), `: ${percent(first.weight)}.`];
  const isTie = first.weight - second.weight < 1e-6;
  if (isTie && (!third || second.weight - third.weight >= 1e-6)) {
    return [quote(query), " looks most at ", name(first), " and ", name(second), `, ${percent(first.weight)} each.`];
  }
  const rest = third && third.weight > 0.1 ? [" and ", name(third), ` (${percent(third.weight)})`] : [];
  return [quote(query), " looks most at ", name(first), ` (${percent(first.weight)}), then at `, name(second), ` (${percent(second.weight)})`, ...rest, "."];
}
