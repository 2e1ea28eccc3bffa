// Numbers in the small cells of a matrix: written short, and read as people type them.
import { formatNumber } from "./format.js";

const MAX_CHARACTERS = 5;
const MAX_DECIMALS = 3;

// A format for the cells of one matrix: all have as many decimals as the number that needs most, at most three, and as
// few that each has five characters. A number that is too large for one decimal, or too small for three, has a format of
// its own.
export function cellFormat(numbers) {
  const plain = (x, decimals) => x.toFixed(decimals).replace("-", "−");
  const fits = (x, decimals) => plain(x, decimals).length <= MAX_CHARACTERS;
  const own = Array.from(numbers).filter((x) => Number.isFinite(x) && fits(x, 1));
  const needed = (x) => [0, 1, 2].find((decimals) => Number(x.toFixed(decimals)) === Number(x.toFixed(MAX_DECIMALS))) ?? MAX_DECIMALS;
  let decimals = Math.max(0, ...own.map(needed));
  while (decimals > 0 && !own.every((x) => fits(x, decimals))) decimals -= 1;
  return (x) => {
    if (x === -Infinity) return "−∞";
    if (!Number.isFinite(x)) return formatNumber(x);
    const text = plain(x, fits(x, decimals) ? decimals : 0);
    return text.length <= MAX_CHARACTERS && (x === 0 || Number(x.toFixed(decimals)) !== 0) ? text.replace(/^−(?=[0.]*$)/, "") : x.toExponential(0).replace("e+", "e").replace(/^-/, "−");
  };
}

// The number in a text, or null. Accepts a decimal comma and the long minus sign.
export function parseCell(text) {
  const number = Number(text.trim().replace(",", ".").replace("−", "-"));
  return text.trim() && Number.isFinite(number) && Math.abs(number) <= 1e6 ? number : null;
}
