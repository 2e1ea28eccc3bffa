// How exact the weights of a page are, in one sentence.

// Two digits, rounded up, since it is said to be the most.
function atMost(value) {
  if (!(value > 0 && value < Infinity)) return `${value}`;
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1), text = (Math.ceil(value / unit - 1e-9) * unit).toPrecision(2);
  return value >= 1e-4 ? String(Number(text)) : Number(text).toExponential().replace("-", "−");
}

// `error` is what `regard.pages.payload.Error` says.
export function exactness(error) {
  const bound = Number(error.relative), found = Number(error.found_relative);
  const how = error.exact
    ? "Query and key are carried here as they were; what is left is the rounding of the arithmetic. A weight differs"
    : "Query and key are carried here in half precision, and every weight is worked out from them. It differs";
  const stated = bound < 1 ? `by at most ${atMost(100 * bound)} % of itself from the original's`
    : `from the original's by at most ${atMost(Number(error.absolute))}`;
  return `${how} ${stated}; among ${error.compared.toLocaleString("en-GB")} weights that were compared, `
    + `by at most ${atMost(100 * found)} %${bound < 1 ? "" : " of itself"}.`;
}
