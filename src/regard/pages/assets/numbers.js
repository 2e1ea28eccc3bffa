// Numbers as text, digit for digit what `regard.render.text` writes.

const TERMS_SHOWN = 8;

// Python rounds an exact tie to the even digit, toFixed away from zero: the full expansion tells a tie.
function roundedToEven(short, long) {
  const cut = (text) => text.split("e")[0];
  const rest = cut(long).slice(cut(short).length);
  const down = cut(long).slice(0, cut(short).length);
  return /^50*$/.test(rest) && "02468".includes(down.at(-1)) ? down : cut(short);
}

export function number(x) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  if (x === 0) return Object.is(x, -0) ? "-0" : "0";
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e6) {
    return roundedToEven(x.toFixed(4), x.toFixed(100)).replace(/\.?0+$/, "");
  }
  const [, sign, exponent] = x.toExponential(3).match(/e([+-])(\d+)$/);
  return `${roundedToEven(x.toExponential(3), x.toExponential(100))}e${sign}${exponent.padStart(2, "0")}`;
}

function shortened(items, head, joint) {
  return items.length > TERMS_SHOWN ? [...items.slice(0, head), "…", items.at(-1)].join(joint) : items.join(joint);
}

export function vector(numbers) {
  return `[${shortened(Array.from(numbers, number), TERMS_SHOWN - 2, ", ")}]`;
}

export function sumOfProducts(query, key) {
  return shortened(Array.from(query, (q, i) => `${number(q)}·${number(key[i])}`), 3, " + ") || "0";
}

// JSON has no infinities; Python writes them as the strings that Number reads.
export function numbers(nested) {
  return Array.isArray(nested) ? nested.map(numbers) : nested === null ? null : Number(nested);
}

// Many numbers travel as base64 of little-endian float32.
export function unpacked(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}
