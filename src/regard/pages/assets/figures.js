// Numbers of a survey as text.

export function brief(value) {
  return Number.isNaN(value) ? "–" : Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

// In five characters, for a cell.
export function tight(value) {
  const size = Math.abs(value);
  return Number.isNaN(value) ? "–" : size === 0 ? "0" : size < 1 ? value.toFixed(3) : size < 1e5 ? String(Number(value.toPrecision(size < 1e3 ? 3 : 4))) : value.toExponential(0);
}

export function percent(share) {
  return `${Number((100 * share).toPrecision(4))} %`;
}

export function counted(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

// A head in a few characters.
export function place({ layer, head }) {
  return `${layer}.${head}`;
}
