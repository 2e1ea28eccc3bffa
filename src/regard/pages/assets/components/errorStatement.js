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
    ? "This page stores query and key exactly; only the arithmetic rounds. A weight differs"
    : "This page stores query and key in half precision, and computes every weight from them. A weight differs";
  const limit = bound < 1 ? `by at most ${roundUp(100 * bound)} % from the original`
    : `from the original by at most ${roundUp(Number(error.absolute))}`;
  return `${source} ${limit}; among ${error.compared.toLocaleString("en-GB")} weights that were compared, `
    + `by at most ${roundUp(100 * found)} %${bound < 1 ? "" : " of the weight"}.`;
}
