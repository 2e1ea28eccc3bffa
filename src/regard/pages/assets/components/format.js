// Numbers as text. formatNumber, formatVector and sumOfProducts write, digit for digit, what `regard.render` writes.

const TERMS_SHOWN = 8;
const MAX_DECIMALS = 4;

// Python rounds an exact tie to the even digit, toFixed rounds it up: the full expansion shows whether it is a tie.
function roundToEven(short, long) {
  const mantissa = (text) => text.split("e")[0];
  const rest = mantissa(long).slice(mantissa(short).length);
  const down = mantissa(long).slice(0, mantissa(short).length);
  return /^50*$/.test(rest) && "02468".includes(down.at(-1)) ? down : mantissa(short);
}

export function formatNumber(x) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  if (x === 0) return Object.is(x, -0) ? "-0" : "0";
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e6) {
    return roundToEven(x.toFixed(MAX_DECIMALS), x.toFixed(100)).replace(/\.?0+$/, "");
  }
  const [, sign, exponent] = x.toExponential(3).match(/e([+-])(\d+)$/);
  return `${roundToEven(x.toExponential(3), x.toExponential(100))}e${sign}${exponent.padStart(2, "0")}`;
}

const PLAIN = /^-?\d+(?:\.(\d+))?$/; // neither infinite nor with an exponent

// A format for the numbers of a table: each has as many decimals as the number that needs most, 0.0900 beside 0.4026.
export function commonFormat(numbers) {
  const decimalsOf = (text) => PLAIN.exec(text)?.[1]?.length ?? 0;
  let decimals = 0;
  for (const x of numbers) {
    if (decimals < MAX_DECIMALS && !Number.isInteger(x)) decimals = Math.max(decimals, decimalsOf(formatNumber(x)));
  }
  return (x) => {
    const text = formatNumber(x), missing = decimals - decimalsOf(text);
    return missing && PLAIN.test(text) ? `${text}${text.includes(".") ? "" : "."}${"0".repeat(missing)}` : text;
  };
}

function joinTerms(terms, head, separator) {
  return terms.length > TERMS_SHOWN ? [...terms.slice(0, head), "…", terms.at(-1)].join(separator) : terms.join(separator);
}

export function formatVector(numbers, format = formatNumber) {
  return `[${joinTerms(Array.from(numbers, (x) => format(x)), TERMS_SHOWN - 2, ", ")}]`;
}

// A factor or a subtrahend, in parentheses if it has a minus sign.
export function formatFactor(x) {
  const text = formatNumber(x);
  return text.startsWith("-") ? `(${text})` : text;
}

export function sumOfProducts(query, key) {
  return joinTerms(Array.from(query, (q, i) => `${formatFactor(q)}·${formatFactor(key[i])}`), 3, " + ") || "0";
}

// Three digits.
export function formatShort(value) {
  return Number.isNaN(value) ? "–" : Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

// At most five characters, for a small cell.
export function formatTiny(value) {
  const size = Math.abs(value);
  return Number.isNaN(value) ? "–" : size === 0 ? "0" : size < 1 ? value.toFixed(3) : size < 1e5 ? String(Number(value.toPrecision(size < 1e3 ? 3 : 4))) : value.toExponential(0);
}

export function formatPercent(share) {
  return `${Number((100 * share).toPrecision(4))} %`;
}

// 12345 as "12,345"; with a noun "12,345 tokens", and for 1 "1 token".
export function formatCount(number, noun = "", plural = `${noun}s`) {
  const text = number.toLocaleString("en");
  return noun ? `${text} ${number === 1 ? noun : plural}` : text;
}

export function capitalise(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// JSON has no infinities; Python writes them as the strings that Number parses.
export function parseNumbers(nested) {
  return Array.isArray(nested) ? nested.map(parseNumbers) : nested === null ? null : Number(nested);
}
