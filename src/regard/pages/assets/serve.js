// What a worker does for a page: it holds parts and heads, and answers one question at a time.
import { blockOf, cellOf, headOf, partOf, pictureOf, rowOf, strongestOf, tileOf } from "./weights.js";

const ANSWERS = {
  block: blockOf, cell: cellOf, picture: pictureOf, row: rowOf, strongest: strongestOf, tile: tileOf,
};

// A function from a message to its answer, or to nothing where a message only brings something.
export function server() {
  const parts = new Map(), records = new Map(), heads = new Map();
  return async ({ part, kind, text, matrix, record, ask, head, what, args }) => {
    if (text !== undefined) parts.set(part, partOf(kind, text));
    else if (record) records.set(matrix, record);
    else {
      const name = `${matrix}/${head}`;
      try {
        if (!heads.has(name)) heads.set(name, headOf(records.get(matrix), head, (each) => parts.get(each.part)));
        const opened = await heads.get(name), start = performance.now();
        const value = ANSWERS[what](opened, ...args);
        return { answer: ask, value, took: performance.now() - start };
      } catch (error) {
        return { answer: ask, error: `${error}` };
      }
    }
    return null;
  };
}
