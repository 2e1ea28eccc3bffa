// The worker's side of the model: it holds the weights and answers one request at a time.
import { decodeArray } from "../matrix/payload.js";
import { unpackWeights } from "./linear.js";
import { createTransformer, splitTensors } from "./transformer.js";

// Return a function from a message { request, method, … } to a promise of its reply { request, value | error, duration }.
export function createModelApi() {
  // One instance for the heads as they are switched, one with all heads, one to try heads: each keeps what it computed.
  let chosen = null, intact = null, trial = null, config = null, text = new Uint16Array(0);

  const methods = {
    // Resolves to the numbers that a guess compares the stream with, (vocabulary, width).
    async load({ record, arrays }) {
      config = record.config;
      const tensors = splitTensors(record.shapes, ...(await Promise.all(arrays.map(({ encoding, base64 }) => decodeArray(encoding, base64)))));
      [chosen, intact, trial] = [0, 1, 2].map(() => createTransformer(config, tensors));
      return unpackWeights(tensors["unembedding.weight"]);
    },
    // The guesses for each next token (n, vocabulary), those with all heads on, and the maps of all heads.
    read({ tokens, off }) {
      text = tokens;
      chosen.read(tokens, off);
      const guess = chosen.guess().slice();
      if (!off.includes(1)) return { guess, intact: guess, maps: chosen.maps() };
      intact.read(tokens);
      return { guess, intact: intact.guess().slice(), maps: chosen.maps() };
    },
    // For each token and each layer (after its MLP; the first is the embedding) the best guess and its probability (layers + 1, n),
    // and all probabilities for one token at every place of the residual stream (places, vocabulary).
    lens({ position }) {
      const { places } = chosen, { vocabulary, layers } = config, n = text.length;
      const best = new Uint16Array((layers + 1) * n), probability = new Float32Array(best.length), all = new Float32Array(places * vocabulary);
      for (let layer = 0; layer <= layers; layer++) {
        const guess = chosen.guess(2 * layer);
        for (let i = 0; i < n; i++) {
          let top = i * vocabulary;
          for (let k = top; k < (i + 1) * vocabulary; k++) if (guess[k] > guess[top]) top = k;
          best[layer * n + i] = top - i * vocabulary;
          probability[layer * n + i] = guess[top];
        }
      }
      for (let place = 0; place < places; place++) all.set(chosen.guessAt(place, position), place * vocabulary);
      return { best, probability, all };
    },
    // The guess for one token without one more head, (vocabulary).
    without({ tokens, off, position }) {
      trial.read(tokens.subarray(0, position + 1), off);
      return trial.guessAt(trial.places - 1, position).slice();
    },
    // How a weight of a head arose, and what it does.
    explain: ({ pair, query, key }) => chosen.explain(pair, query, key),
  };

  return async ({ request, method, ...args }) => {
    const start = performance.now();
    try {
      return { request, value: await methods[method](args), duration: performance.now() - start };
    } catch (error) {
      return { request, error: `${error}` };
    }
  };
}
