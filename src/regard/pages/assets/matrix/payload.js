// Decode the arrays of a page, as `regard.pages.encoding` writes them.

function decodeBase64(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// The float of every half, by its 16 bits.
let halfTable = null;
function buildHalfTable() {
  const table = new Float32Array(1 << 16);
  for (let bits = 0; bits < 1 << 16; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    table[bits] = sign * (exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
  }
  return table;
}

// Resolve to a typed array of the numbers.
export async function decodeArray(encoding, text) {
  const buffer = await inflate(decodeBase64(text));
  if (encoding === "byte") return new Uint8Array(buffer);
  if (encoding === "int8") return new Int8Array(buffer);
  if (encoding === "float") return new Float32Array(buffer);
  if (encoding === "double") return new Float64Array(buffer);
  if (encoding === "differences") {
    const numbers = new Int32Array(buffer);
    for (let i = 1; i < numbers.length; i++) numbers[i] += numbers[i - 1];
    return numbers;
  }
  halfTable ??= buildHalfTable();
  const planes = new Uint8Array(buffer), count = planes.length / 2, numbers = new Float32Array(count);
  for (let i = 0; i < count; i++) numbers[i] = halfTable[planes[i] | (planes[count + i] << 8)];
  return numbers;
}

// Numbers that `encode_float32` of `regard.pages.html` wrote: base64 of little-endian float32.
export function decodeFloat32(base64) {
  return new Float32Array(decodeBase64(base64).buffer);
}
