// How exact the weights of a page are, in one sentence.

function percent(part) {
  const value = 100 * part;
  return value >= 1 ? `${Number(value.toPrecision(2))} %` : value >= 1e-4 ? `${Number(value.toFixed(6)).toPrecision(2)} %`
    : `${value.toExponential(0).replace("-", "−")} %`;
}

// `error` is what `regard._carried.Error` says.
export function exactness(error) {
  const bound = Number(error.relative), found = Number(error.found_relative);
  const how = error.exact
    ? "Query and key are carried here as they were; what is left is the rounding of the arithmetic. A weight differs"
    : "Query and key are carried here in half precision, and every weight is worked out from them. It differs";
  const most = bound < 1 ? `by at most ${percent(bound)} of itself from the original's`
    : `from the original's by at most ${Number(error.absolute).toPrecision(2)}`;
  return `${how} ${most}; among ${error.compared.toLocaleString("en-GB")} weights that were compared, by at most ${percent(found)}.`;
}
