// The arithmetic of the layers, in float64; the weights are stored in float32.

const EPSILON = 2 ** -23; // of torch's RMSNorm in float32
const LANES = 4; // outputs whose weights are stored together

// Weights (outWidth, inWidth) in the order in which `linear` reads them: those of four outputs beside each other. The number of
// outputs is a multiple of four.
export function packWeights(shape, numbers) {
  const [outWidth, inWidth] = shape, packed = new Float32Array(numbers.length);
  for (let o = 0; o < outWidth; o++) {
    const at = (o - (o % LANES)) * inWidth + (o % LANES);
    for (let k = 0; k < inWidth; k++) packed[at + LANES * k] = numbers[o * inWidth + k];
  }
  return { outWidth, inWidth, packed };
}

// The weights in the order in which they were before, (outWidth, inWidth).
export function unpackWeights({ outWidth, inWidth, packed }) {
  const numbers = new Float32Array(packed.length);
  for (let o = 0; o < outWidth; o++) {
    const at = (o - (o % LANES)) * inWidth + (o % LANES);
    for (let k = 0; k < inWidth; k++) numbers[o * inWidth + k] = packed[at + LANES * k];
  }
  return numbers;
}

// output[i] = weights · input[i] + bias for rows from ≤ i < to; bias may be null. Two rows and four outputs at a time, so that
// each number that is loaded serves several products.
export function linear(input, from, to, { outWidth, inWidth, packed }, bias, output) {
  for (let o = 0; o < outWidth; o += LANES) {
    const start = o * inWidth, end = start + LANES * inWidth;
    const b0 = bias ? bias[o] : 0, b1 = bias ? bias[o + 1] : 0, b2 = bias ? bias[o + 2] : 0, b3 = bias ? bias[o + 3] : 0;
    for (let i = from; i < to; i += 2) {
      const twin = Math.min(i + 1, to - 1); // an odd last row is computed twice
      let x = i * inWidth, y = twin * inWidth;
      let p0 = b0, p1 = b1, p2 = b2, p3 = b3, q0 = b0, q1 = b1, q2 = b2, q3 = b3;
      for (let w = start; w < end; w += LANES) {
        const a = input[x++], b = input[y++], w0 = packed[w], w1 = packed[w + 1], w2 = packed[w + 2], w3 = packed[w + 3];
        p0 += w0 * a;
        p1 += w1 * a;
        p2 += w2 * a;
        p3 += w3 * a;
        q0 += w0 * b;
        q1 += w1 * b;
        q2 += w2 * b;
        q3 += w3 * b;
      }
      x = i * outWidth + o;
      y = twin * outWidth + o;
      output[x] = p0;
      output[x + 1] = p1;
      output[x + 2] = p2;
      output[x + 3] = p3;
      output[y] = q0;
      output[y + 1] = q1;
      output[y + 2] = q2;
      output[y + 3] = q3;
    }
  }
}

// What a norm multiplies `width` numbers from `at` by: 1 / the root of their mean square.
export function normFactor(input, at, width) {
  let sum = 0;
  for (let k = at; k < at + width; k++) sum += input[k] * input[k];
  return 1 / Math.sqrt(sum / width + EPSILON);
}

// Divide each row by the root of its mean square, and multiply it by the weights of the norm.
export function rmsNorm(input, from, to, weight, output) {
  const width = weight.length;
  for (let i = from; i < to; i++) {
    const factor = normFactor(input, i * width, width);
    for (let k = 0; k < width; k++) output[i * width + k] = input[i * width + k] * factor * weight[k];
  }
}

// Rotate entry j and entry j + headDim / 2 of every head by position · 10000^(−2j / headDim), in place.
export function rotate(rows, from, to, heads, headDim) {
  const half = headDim / 2, width = heads * headDim;
  for (let i = from; i < to; i++) {
    for (let j = 0; j < half; j++) {
      const angle = i * 10000 ** (-j / half), cos = Math.cos(angle), sin = Math.sin(angle);
      for (let at = i * width + j; at < (i + 1) * width; at += headDim) {
        const a = rows[at], b = rows[at + half];
        rows[at] = a * cos - b * sin;
        rows[at + half] = b * cos + a * sin;
      }
    }
  }
}

// Softmax of `count` numbers that start at `at`, in place.
export function softmaxInPlace(numbers, at, count) {
  let most = -Infinity, total = 0;
  for (let j = at; j < at + count; j++) most = Math.max(most, numbers[j]);
  for (let j = at; j < at + count; j++) total += numbers[j] = Math.exp(numbers[j] - most);
  for (let j = at; j < at + count; j++) numbers[j] /= total;
}
