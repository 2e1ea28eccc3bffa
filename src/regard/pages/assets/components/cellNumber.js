// Numbers in the small cells of a matrix: written short, and read as people type them.
import { formatNumber } from "./format.js";

// At most five characters if they can say the number: up to three decimals, and no zeros at the end.
export function formatCell(x) {
  if (x === -Infinity) return "−∞";
  if (!Number.isFinite(x)) return formatNumber(x);
  for (let decimals = 3; decimals >= 0; decimals--) {
    const text = String(Number(x.toFixed(decimals)));
    if (Number(text) === 0 && x !== 0) break;
    if (text.length <= 5) return text.replace("-", "−");
  }
  return x.toExponential(0).replace("e+", "e").replace(/^-/, "−");
}

// The number in a text, or null. Accepts a decimal comma and the long minus sign.
export function parseCell(text) {
  const number = Number(text.trim().replace(",", ".").replace("−", "-"));
  return text.trim() && Number.isFinite(number) && Math.abs(number) <= 1e6 ? number : null;
}
