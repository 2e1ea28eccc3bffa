// Numbers of a survey as text.

export function brief(value) {
  return Number.isNaN(value) ? "–" : Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
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
