// The worker's side of the lazy matrix: it holds arrays and heads, and answers one request at a time.
import { decodeArray } from "./payload.js";
import { blockWeights, cellWeight, explainCell, loadHead, pooledPicture, rowWeights, tileWeights, topKeys, topPairs } from "./weights.js";

const METHODS = {
  block: blockWeights, cell: cellWeight, explain: explainCell, picture: pooledPicture, row: rowWeights, tile: tileWeights, topKeys, topPairs,
};

// Return a function from a message to a promise of its reply, null for a message that only brings data.
export function createWorkerApi() {
  const arrays = new Map(), records = new Map(), heads = new Map();
  return async ({ array, encoding, text, matrix, record, request, head, method, args }) => {
    if (text !== undefined) arrays.set(array, decodeArray(encoding, text));
    else if (record) records.set(matrix, record);
    else {
      const name = `${matrix}/${head}`;
      try {
        if (!heads.has(name)) heads.set(name, loadHead(records.get(matrix), head, (encoded) => arrays.get(encoded.array)));
        const loaded = await heads.get(name), start = performance.now();
        const value = METHODS[method](loaded, ...args);
        return { request, value, duration: performance.now() - start };
      } catch (error) {
        return { request, error: `${error}` };
      }
    }
    return null;
  };
}
