// The transformer of `regard.learn.TinyGPT`. It keeps the numbers of the last text, so that a new one costs only what differs:
// the rows after the first changed token, and the layers from the first changed head on.
import { dotProduct, summariseRow } from "../matrix/attentionSteps.js";
import { linear, normFactor, packWeights, rmsNorm, rotate, softmaxInPlace } from "./linear.js";

const GUESS_ROWS = 16; // whose logits are computed at a time
const PROMOTED = 5;
const squaredRelu = (x) => (x > 0 ? x * x : 0);

// Split the numbers of a checkpoint into tensors, named as in torch. `bytes` are the matrices, int8, and `halves` the vectors and,
// as "name.factor", the factor of each row of a matrix. Matrices are packed for `linear`, but not the embedding. A product of a
// byte and a half is exact in float32.
export function splitTensors(shapes, bytes, halves) {
  const stored = {}, at = { 1: 0, 2: 0 };
  for (const [name, shape] of Object.entries(shapes)) {
    const dims = shape.length, from = at[dims];
    at[dims] += shape.reduce((a, b) => a * b, 1);
    stored[name] = (dims === 2 ? bytes : halves).subarray(from, at[dims]);
  }
  return Object.fromEntries(Object.entries(shapes).filter(([name]) => !name.endsWith(".factor")).map(([name, shape]) => {
    if (shape.length === 1) return [name, Float64Array.from(stored[name])];
    const numbers = new Float32Array(stored[name]), factors = stored[`${name}.factor`];
    for (let k = 0; k < numbers.length; k++) numbers[k] *= factors[Math.floor(k / shape[1])];
    return [name, name === "embedding.weight" ? numbers : packWeights(shape, numbers)];
  }));
}

// config: { vocabulary, width, heads, layers, hidden, context }; tensors from `splitTensors`.
export function createTransformer({ vocabulary, width, heads, layers, hidden, context }, tensors) {
  const rows = (columns) => new Float64Array(context * columns);
  const headDim = width / heads, scale = 1 / Math.sqrt(headDim);
  // The residual stream: after the embedding, and after the attention and the MLP of each layer.
  const stream = Array.from({ length: 2 * layers + 1 }, () => rows(width));
  const keys = stream.slice(0, layers).map(() => rows(width)), values = keys.map(() => rows(width)), queries = keys.map(() => rows(width));
  const weights = keys.map(() => new Float64Array(heads * context * context)); // row i of head h starts at (h · context + i) · context
  const [normed, mixed, inner, added] = [rows(width), rows(width), rows(hidden), rows(width)];
  const guesses = stream.map(() => null); // probabilities of the next token, read from the stream; allocated when they are asked for
  const guessRows = stream.map(() => 0); // number of rows of each that are up to date
  let tokens = new Uint16Array(0), off = new Uint8Array(layers * heads);

  function addTo(from, to, input, output) {
    for (let k = from * width; k < to * width; k++) output[k] = input[k] + added[k];
  }

  function attend(layer, from, to) {
    const of = (name) => tensors[`layers.${layer}.${name}`], query = queries[layer], key = keys[layer], value = values[layer], weight = weights[layer];
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
  function read(newTokens, newOff = off) {
    let same = 0;
    while (same < Math.min(tokens.length, newTokens.length) && tokens[same] === newTokens[same]) same++;
    const changedHead = newOff.findIndex((isOff, head) => isOff !== off[head]);
    const changedLayer = changedHead < 0 ? layers : Math.floor(changedHead / heads);
    [tokens, off] = [Uint16Array.from(newTokens), Uint8Array.from(newOff)];
    const table = tensors["embedding.weight"];
    for (let i = same; i < tokens.length; i++) stream[0].set(table.subarray(tokens[i] * width, (tokens[i] + 1) * width), i * width);
    guessRows[0] = Math.min(guessRows[0], same);
    for (let layer = 0; layer < layers; layer++) {
      const from = layer < changedLayer ? same : 0;
      attend(layer, from, tokens.length);
      transform(layer, from, tokens.length);
      for (const place of [2 * layer + 1, 2 * layer + 2]) guessRows[place] = Math.min(guessRows[place], from);
    }
  }

  // Probabilities of the next token for rows from ≤ i < to of a place of the stream, given to `keep(row, probabilities)`.
  function readRows(place, from, to, keep) {
    const logits = new Float64Array(GUESS_ROWS * vocabulary);
    rmsNorm(stream[place], from, to, tensors["norm.weight"], normed);
    for (let start = from; start < to; start += GUESS_ROWS) {
      const count = Math.min(GUESS_ROWS, to - start);
      linear(normed.subarray(start * width), 0, count, tensors["unembedding.weight"], null, logits);
      for (let i = 0; i < count; i++) {
        softmaxInPlace(logits, i * vocabulary, vocabulary);
        keep(start + i, logits.subarray(i * vocabulary, (i + 1) * vocabulary));
      }
    }
  }

  // Probabilities of the next token after each token, as if the model ended at a place of its stream; (n, vocabulary).
  function guess(place = stream.length - 1) {
    const to = tokens.length, out = (guesses[place] ??= new Float32Array(context * vocabulary));
    readRows(place, guessRows[place], to, (i, row) => out.set(row, i * vocabulary));
    guessRows[place] = to;
    return out.subarray(0, to * vocabulary);
  }

  // These probabilities after token i alone, (vocabulary).
  function guessAt(place, i) {
    if (i < guessRows[place]) return guesses[place].subarray(i * vocabulary, (i + 1) * vocabulary);
    let found = null;
    readRows(place, i, i + 1, (_, row) => (found = Float32Array.from(row)));
    return found;
  }

  // The weights of every head, (layers, heads, n, n); 0 above the diagonal.
  function maps() {
    const n = tokens.length, out = new Float32Array(layers * heads * n * n);
    for (let pair = 0; pair < layers * heads; pair++) {
      const source = weights[Math.floor(pair / heads)];
      for (let i = 0; i < n; i++) {
        const at = ((pair % heads) * context + i) * context;
        out.set(source.subarray(at, at + i + 1), (pair * n + i) * n);
      }
    }
    return out;
  }

  // What a vector (head_dim) of head h at token i becomes in the residual stream: (width).
  function project(layer, h, vector) {
    const input = new Float64Array(width), out = new Float64Array(width);
    input.set(vector, h * headDim);
    linear(input, 0, 1, tensors[`layers.${layer}.attention.out_proj.weight`], null, out);
    return out;
  }

  // How much a vector that is added to the stream of token i adds to each logit, compared to the average logit; (vocabulary). The
  // last norm divides by the size of the whole stream, as it did for this text.
  function logitsOf(vector, i) {
    const weight = tensors["norm.weight"], last = stream.at(-1), factor = normFactor(last, i * width, width);
    const out = new Float64Array(vocabulary);
    linear(vector.map((x, k) => x * factor * weight[k]), 0, 1, tensors["unembedding.weight"], null, out);
    const mean = out.reduce((a, b) => a + b, 0) / vocabulary;
    return out.map((x) => x - mean);
  }

  // How the weight of token j for token i arose in a head, and what it does; see `components/weightSteps.js`.
  function explain(pair, i, j) {
    const layer = Math.floor(pair / heads), h = pair % heads;
    const part = (array, row) => array[layer].slice(row * width + h * headDim, row * width + (h + 1) * headDim);
    const query = part(queries, i), scores = Float64Array.from({ length: tokens.length }, (_, key) => (key > i ? -Infinity : scale * dotProduct(query, part(keys, key))));
    const row = summariseRow(scores, j), value = part(values, j), share = value.map((x) => x * row.weight);
    const output = new Float64Array(headDim);
    for (let key = 0; key <= i; key++) part(values, key).forEach((x, d) => (output[d] += weights[layer][(h * context + i) * context + key] * x));
    const written = project(layer, h, share), logits = logitsOf(written, i), order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
    const changes = (tokens) => tokens.map((token) => [token, logits[token]]);
    return { query, key: part(keys, j), scale, ...row, value, share, output, written: {
      norm: Math.hypot(...written), head: Math.hypot(...project(layer, h, output)), stream: Math.hypot(...stream[2 * layer].subarray(i * width, (i + 1) * width)),
      promoted: changes(order.slice(0, PROMOTED)), suppressed: changes(order.slice(-PROMOTED).reverse()),
    } };
  }

  return { read, guess, guessAt, maps, explain, places: stream.length };
}
