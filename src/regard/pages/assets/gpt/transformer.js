// A byte-level transformer as `examples/induction/model.py` defines it. It keeps the numbers of the last text, so that a new
// one costs only what differs: the rows after the first changed byte, and the layers from the first changed head on.
import { linear, packWeights, rmsNorm, rotate, softmaxInPlace } from "./linear.js";

const squaredRelu = (x) => (x > 0 ? x * x : 0);

// Split the numbers of a checkpoint into tensors, named as in torch; matrices are packed for `linear`.
export function splitTensors(shapes, numbers) {
  const tensors = {};
  let at = 0;
  for (const [name, shape] of Object.entries(shapes)) {
    const part = numbers.subarray(at, (at += shape.reduce((a, b) => a * b, 1)));
    tensors[name] = shape.length === 2 && name !== "embedding.weight" ? packWeights(shape, part) : Float64Array.from(part);
  }
  return tensors;
}

// config: { vocabulary, width, heads, layers, hidden, context }; tensors from `splitTensors`.
export function createTransformer({ vocabulary, width, heads, layers, hidden, context }, tensors) {
  const rows = (columns) => new Float64Array(context * columns);
  const headDim = width / heads, scale = 1 / Math.sqrt(headDim);
  // The residual stream: after the embedding, and after the attention and the MLP of each layer.
  const stream = Array.from({ length: 2 * layers + 1 }, () => rows(width));
  const keys = stream.slice(0, layers).map(() => rows(width)), values = keys.map(() => rows(width));
  const weights = keys.map(() => new Float64Array(heads * context * context)); // row i of head h starts at (h · context + i) · context
  const [normed, query, mixed, inner, added] = [rows(width), rows(width), rows(width), rows(hidden), rows(width)];
  const guesses = stream.map(() => rows(vocabulary)); // probabilities of the next byte, read from the stream
  const guessRows = stream.map(() => 0); // number of rows of each that are up to date
  let bytes = new Uint8Array(0), off = new Uint8Array(layers * heads);

  function addTo(from, to, input, output) {
    for (let k = from * width; k < to * width; k++) output[k] = input[k] + added[k];
  }

  function attend(layer, from, to) {
    const of = (name) => tensors[`layers.${layer}.${name}`], key = keys[layer], value = values[layer], weight = weights[layer];
    rmsNorm(stream[2 * layer], from, to, of("norm.weight"), normed);
    linear(normed, from, to, of("attention.q_proj.weight"), null, query);
    linear(normed, from, to, of("attention.k_proj.weight"), null, key);
    linear(normed, from, to, of("attention.v_proj.weight"), null, value);
    rotate(query, from, to, heads, headDim);
    rotate(key, from, to, heads, headDim);
    const sums = new Float64Array(headDim);
    for (let h = 0; h < heads; h++) {
      for (let i = from; i < to; i++) {
        const at = (h * context + i) * context, q = i * width + h * headDim;
        for (let j = 0; j <= i; j++) {
          const k = j * width + h * headDim;
          let score = 0;
          for (let d = 0; d < headDim; d++) score += query[q + d] * key[k + d];
          weight[at + j] = score * scale;
        }
        softmaxInPlace(weight, at, i + 1);
        sums.fill(0);
        if (!off[layer * heads + h]) {
          for (let j = 0; j <= i; j++) {
            const share = weight[at + j], v = j * width + h * headDim;
            for (let d = 0; d < headDim; d++) sums[d] += share * value[v + d];
          }
        }
        mixed.set(sums, q);
      }
    }
    linear(mixed, from, to, of("attention.out_proj.weight"), null, added);
    addTo(from, to, stream[2 * layer], stream[2 * layer + 1]);
  }

  function transform(layer, from, to) {
    const of = (name) => tensors[`layers.${layer}.mlp.${name}`];
    rmsNorm(stream[2 * layer + 1], from, to, of("0.weight"), normed);
    linear(normed, from, to, of("1.weight"), of("1.bias"), inner);
    for (let k = from * hidden; k < to * hidden; k++) inner[k] = squaredRelu(inner[k]);
    linear(inner, from, to, of("3.weight"), of("3.bias"), added);
    addTo(from, to, stream[2 * layer + 1], stream[2 * layer + 2]);
  }

  // Read a text, with some heads switched off: `newOff[layer · heads + head]` is 1 for these. An output of 0 takes their place.
  function read(newBytes, newOff = off) {
    let same = 0;
    while (same < Math.min(bytes.length, newBytes.length) && bytes[same] === newBytes[same]) same++;
    const changedHead = newOff.findIndex((isOff, head) => isOff !== off[head]);
    const changedLayer = changedHead < 0 ? layers : Math.floor(changedHead / heads);
    [bytes, off] = [Uint8Array.from(newBytes), Uint8Array.from(newOff)];
    const table = tensors["embedding.weight"];
    for (let i = same; i < bytes.length; i++) stream[0].set(table.subarray(bytes[i] * width, (bytes[i] + 1) * width), i * width);
    guessRows[0] = Math.min(guessRows[0], same);
    for (let layer = 0; layer < layers; layer++) {
      const from = layer < changedLayer ? same : 0;
      attend(layer, from, bytes.length);
      transform(layer, from, bytes.length);
      for (const place of [2 * layer + 1, 2 * layer + 2]) guessRows[place] = Math.min(guessRows[place], from);
    }
  }

  // Probabilities of the next byte after each byte, as if the model ended at a place of its stream; (n, vocabulary).
  function guess(place = stream.length - 1) {
    const from = guessRows[place], to = bytes.length, out = guesses[place];
    rmsNorm(stream[place], from, to, tensors["norm.weight"], normed);
    linear(normed, from, to, tensors["unembedding.weight"], null, out);
    for (let i = from; i < to; i++) softmaxInPlace(out, i * vocabulary, vocabulary);
    guessRows[place] = to;
    return out.subarray(0, to * vocabulary);
  }

  // The weights of every head, (layers, heads, n, n); 0 above the diagonal.
  function maps() {
    const n = bytes.length, out = new Float32Array(layers * heads * n * n);
    for (let pair = 0; pair < layers * heads; pair++) {
      const source = weights[Math.floor(pair / heads)];
      for (let i = 0; i < n; i++) {
        const at = ((pair % heads) * context + i) * context;
        out.set(source.subarray(at, at + i + 1), (pair * n + i) * n);
      }
    }
    return out;
  }

  return { read, guess, maps, places: stream.length };
}
