// How exact the weights of a page are, in one sentence.

// Two digits, rounded up, because the number is a bound.
function roundUp(value) {
  if (!(value > 0 && value < Infinity)) return `${value}`;
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1), text = (Math.ceil(value / unit - 1e-9) * unit).toPrecision(2);
  return value >= 1e-4 ? String(Number(text)) : Number(text).toExponential().replace("-", "−");
}

// `error` is a `regard.core.matrix_page.ErrorEstimate`.
export function describeError(error) {
  const bound = Number(error.relative), found = Number(error.found_relative);
  const source = error.exact
    ? "This page stores query and key exactly; only the arithmetic rounds."
    : "This page stores query and key in half precision, and computes every weight from them.";
  const seen = `Of ${error.compared.toLocaleString("en-GB")} weights that were compared with the original, none differs by more than `
    + `${roundUp(100 * found)} %${bound < 1 ? "" : " of the weight"}.`;
  const limit = bound < 1 ? `${roundUp(100 * bound)} %` : `a difference of ${roundUp(Number(error.absolute))}`;
  return `${source} ${seen} The bound for every weight is ${limit}.`;
}
