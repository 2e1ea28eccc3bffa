// The worker's side of the model: it holds the weights and answers one request at a time.
import { decodeArray } from "../matrix/payload.js";
import { createTransformer, splitTensors } from "./transformer.js";

// Return a function from a message { request, method, … } to a promise of its reply { request, value | error, duration }.
export function createModelApi() {
  // One instance for the heads as they are switched, one with all heads, one to try heads: each keeps what it computed.
  let chosen = null, intact = null, trial = null, tensors = null, config = null, text = new Uint8Array(0);

  const methods = {
    async load({ record, encoding, base64 }) {
      config = record.config;
      tensors = splitTensors(record.shapes, await decodeArray(encoding, base64));
      [chosen, intact, trial] = [0, 1, 2].map(() => createTransformer(config, tensors));
      return Float32Array.from(tensors["embedding.weight"]);
    },
    // The guesses for each next byte (n, vocabulary), those with all heads on, and the maps of all heads.
    read({ bytes, off }) {
      text = bytes;
      chosen.read(bytes, off);
      const guess = Float32Array.from(chosen.guess());
      if (!off.includes(1)) return { guess, intact: guess, maps: chosen.maps() };
      intact.read(bytes);
      return { guess, intact: Float32Array.from(intact.guess()), maps: chosen.maps() };
    },
    // The guesses at every place of the residual stream: for each letter the best byte and its probability (places, n), and
    // all probabilities for one letter (places, vocabulary).
    lens({ position }) {
      const { places } = chosen, { vocabulary } = config, n = text.length;
      const best = new Uint8Array(places * n), probability = new Float32Array(places * n), all = new Float32Array(places * vocabulary);
      for (let place = 0; place < places; place++) {
        const guess = chosen.guess(place);
        for (let i = 0; i < n; i++) {
          let top = i * vocabulary;
          for (let b = top; b < (i + 1) * vocabulary; b++) if (guess[b] > guess[top]) top = b;
          best[place * n + i] = top - i * vocabulary;
          probability[place * n + i] = guess[top];
        }
        all.set(guess.subarray(position * vocabulary, (position + 1) * vocabulary), place * vocabulary);
      }
      return { best, probability, all };
    },
    // The guess for one letter without one more head, (vocabulary).
    without({ bytes, off, position }) {
      trial.read(bytes.subarray(0, position + 1), off);
      return Float32Array.from(trial.guess().subarray(position * config.vocabulary));
    },
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
