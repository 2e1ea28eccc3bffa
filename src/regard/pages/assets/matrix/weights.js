// The lazy matrix: from query and key in half precision and the lse of each row, any weight is exp(score − lse).
// A head is a plain object of numbers and typed arrays, as `loadHead` returns it.

import { summariseRow } from "./attentionSteps.js";

export const MASKED = -1; // in place of a weight

// -- Loading a head --

// The part of an array that belongs to a (batch, head) pair; an array of one pair serves all.
function selectPair(array, shape, pair) {
  const size = array.length / shape[0], own = shape[0] > 1 ? pair : 0;
  return array.subarray(own * size, (own + 1) * size);
}

export const MEAN = "mean"; // in place of the number of a pair: the mean over all pairs

// Resolve to the head of a (batch, head) pair, or to their mean. `load(array)` returns the numbers of an encoded array, or a promise of them.
export async function loadHead(record, pair, load) {
  if (pair === MEAN) {
    const members = await Promise.all(record.query_index.map((_, n) => loadHead(record, n, load)));
    return { members, rows: record.size[0], keys: record.size[1] };
  }
  const query = record.query[record.query_index[pair]], key = record.key[record.key_index[pair]];
  const mask = record.masks[record.mask_index[pair]];
  const scoreMods = Promise.all(record.score_mods.map(async (mod) => {
    const array = mod.table ?? mod.array ?? mod.rows;
    if (!array) return mod;
    return { ...mod, numbers: selectPair(await load(array), array.shape, pair), shape: array.shape.slice(1) };
  }));
  const counts = await load(mask.counts), offsets = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) offsets[i + 1] = offsets[i] + counts[i];
  return {
    rows: record.size[0],
    keys: record.size[1],
    headDim: record.head_dim,
    scale: record.scale * 2 ** -(query.exponent + key.exponent),
    exponents: [query.exponent, key.exponent],
    query: await load(query.numbers),
    key: await load(key.numbers),
    lse: await load(record.lse[pair]),
    hasSink: record.has_sink,
    positions: await load(record.positions),
    offsets,
    edges: await load(mask.edges),
    zeroDistance: record.q_len - 1, // index of distance 0 in a table by distance
    scoreMods: await scoreMods,
  };
}

// -- Computing weights --

function modifyScore(head, score, i, j) {
  for (const { kind, cap, numbers, shape } of head.scoreMods) {
    if (kind === "softcap") score = cap * Math.tanh(score / cap);
    else if (kind === "distance") score += numbers[j - head.positions[i] + head.zeroDistance];
    else if (kind === "flat") score = numbers[i] ? 0 : score;
    else {
      const [rows, columns] = shape;
      const bias = numbers[(rows > 1 ? i : 0) * columns + (columns > 1 ? j : 0)];
      score = bias === -Infinity ? bias : score + bias; // −∞ masks even a NaN
    }
  }
  return score;
}

function dotProduct(query, key, a, b, headDim) {
  let x = 0, y = 0, n = 0;
  for (; n + 4 <= headDim; n += 4) {
    x += query[a + n] * key[b + n] + query[a + n + 1] * key[b + n + 1];
    y += query[a + n + 2] * key[b + n + 2] + query[a + n + 3] * key[b + n + 3];
  }
  for (; n < headDim; n++) x += query[a + n] * key[b + n];
  return x + y;
}

// Fill `out` with the weights of row i at ascending columns, MASKED where a key is masked.
function fillRow(head, i, columns, out) {
  if (head.members) return fillMeanRow(head.members, i, columns, out);
  const { query, key, headDim, scale, edges, offsets } = head;
  const lse = head.lse[i], plain = !head.scoreMods.length, half = edges.length / 2; // all starts, then all stops
  out.fill(MASKED);
  if (lse === -Infinity) return out;
  for (let interval = offsets[i], n = 0; interval < offsets[i + 1]; interval++) {
    const start = edges[interval], stop = edges[half + interval];
    while (n < columns.length && columns[n] < start) n++;
    for (; n < columns.length && columns[n] < stop; n++) {
      const score = scale * dotProduct(query, key, i * headDim, columns[n] * headDim, headDim);
      out[n] = Math.exp((plain ? score : modifyScore(head, score, i, columns[n])) - lse);
    }
  }
  return out;
}

// The mean over heads; a key that is masked for some counts as 0 there.
function fillMeanRow(members, i, columns, out) {
  const line = new Float64Array(columns.length), sums = new Float64Array(columns.length).fill(MASKED);
  for (const member of members) {
    fillRow(member, i, columns, line);
    for (let n = 0; n < line.length; n++) if (line[n] !== MASKED) sums[n] = (sums[n] === MASKED ? 0 : sums[n]) + line[n];
  }
  for (let n = 0; n < sums.length; n++) out[n] = sums[n] === MASKED ? MASKED : sums[n] / members.length;
  return out;
}

const range = (start, step, count) => Int32Array.from({ length: count }, (_, n) => start + n * step);
const maskedToZero = (weight) => (weight === MASKED ? 0 : weight); // NaN stays

// -- Queries to a head --

export function cellWeight(head, i, j) {
  const [weight] = fillRow(head, i, [j], new Float64Array(1));
  return { weight: maskedToZero(weight), masked: weight === MASKED };
}

// How the weight of a cell arose, as `components/weightSteps.js` shows it; null for a mean over heads, which has no score.
export function explainCell(head, i, j) {
  if (head.members) return null;
  const { headDim, scale, exponents, offsets, edges } = head, half = edges.length / 2, scores = new Float64Array(head.keys).fill(-Infinity);
  for (let interval = offsets[i]; interval < offsets[i + 1]; interval++) {
    for (let key = edges[interval]; key < edges[half + interval]; key++) {
      scores[key] = modifyScore(head, scale * dotProduct(head.query, head.key, i * headDim, key * headDim, headDim), i, key);
    }
  }
  const vector = (array, n, exponent) => Float64Array.from(array.subarray(n * headDim, (n + 1) * headDim), (x) => x * 2 ** -exponent);
  return { query: vector(head.query, i, exponents[0]), key: vector(head.key, j, exponents[1]), scale: scale * 2 ** (exponents[0] + exponents[1]), ...summariseRow(scores, j, head.hasSink ? head.lse[i] : null) };
}

// All weights of a row, 0 where masked.
export function rowWeights(head, i) {
  return fillRow(head, i, range(0, 1, head.keys), new Float32Array(head.keys)).map(maskedToZero);
}

// The weights of some rows at ascending columns, row after row, 0 where masked.
export function blockWeights(head, rows, columns) {
  const block = new Float32Array(rows.length * columns.length);
  Array.from(rows, (i, n) => fillRow(head, i, columns, block.subarray(n * columns.length, (n + 1) * columns.length)));
  return block.map(maskedToZero);
}

export function tileWeights(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount) {
  return blockWeights(head, range(rowStart, rowStep, rowCount), range(columnStart, columnStep, columnCount));
}

// The keys with the largest weights of a row, the largest first, and of equal ones the first.
export function topKeys(head, i, count) {
  const weights = rowWeights(head, i), best = [];
  for (let j = 0; j < weights.length; j++) {
    if (!(weights[j] > 0) || (best.length === count && weights[j] <= weights[best[count - 1]])) continue;
    let rank = best.length;
    while (rank && weights[best[rank - 1]] < weights[j]) rank--;
    best.splice(rank, 0, j);
    best.length = Math.min(best.length, count);
  }
  return best.map((key) => ({ key, weight: weights[key] }));
}

// The pairs with the largest weights among some rows and ascending columns, the largest first, and of equal ones the first.
export function topPairs(head, rows, columns, count) {
  const line = new Float32Array(columns.length), best = [];
  for (const row of rows) {
    fillRow(head, row, columns, line);
    for (let n = 0; n < line.length; n++) {
      if (!(line[n] > 0) || (best.length === count && line[n] <= best[count - 1].weight)) continue;
      let rank = best.length;
      while (rank && best[rank - 1].weight < line[n]) rank--;
      best.splice(rank, 0, { row, column: columns[n], weight: line[n] });
      best.length = Math.min(best.length, count);
    }
  }
  return best;
}

// The positions at which the cells of a picture are sampled: every position of a small cell, otherwise `probes` random
// ones, one in each equal part, so that a periodic pattern is not aliased.
function samplePositions(start, step, count, probes, length) {
  const positions = [], cells = [];
  for (let cell = 0; cell < count; cell++) {
    const low = start + cell * step, samples = Math.min(step, probes);
    for (let n = 0; n < samples; n++) {
      const from = Math.floor((n * step) / samples), to = Math.floor(((n + 1) * step) / samples);
      let hash = Math.imul(low + from, 0x9e3779b1);
      hash = Math.imul(hash ^ (hash >>> 15), 0x85ebca6b);
      const position = low + from + (to - from > 1 ? ((hash ^ (hash >>> 13)) >>> 0) % (to - from) : 0);
      if (position < length) positions.push(position), cells.push(cell);
    }
  }
  return { positions: Int32Array.from(positions), cells };
}

// A picture of rowCount × columnCount cells of rowStep × columnStep weights: the "max" or the "mean" of each cell, MASKED where
// all of it is masked. A maximum is taken over every weight of its cell. A mean is taken over every weight of a cell of at most
// probes × probes weights, and over probes × probes weights of a larger one.
export function pooledPicture(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount, probes, reduce) {
  const isMax = reduce === "max", most = isMax ? Infinity : probes;
  const rows = samplePositions(rowStart, rowStep, rowCount, most, head.rows);
  const columns = samplePositions(columnStart, columnStep, columnCount, most, head.keys);
  const pooled = new Float64Array(rowCount * columnCount).fill(MASKED), counts = new Int32Array(pooled.length);
  const line = new Float64Array(columns.positions.length);
  for (let a = 0; a < rows.positions.length; a++) {
    fillRow(head, rows.positions[a], columns.positions, line);
    const base = rows.cells[a] * columnCount;
    for (let b = 0; b < line.length; b++) {
      const cell = base + columns.cells[b];
      counts[cell]++;
      if (line[b] === MASKED) continue;
      if (isMax) pooled[cell] = Math.max(pooled[cell], line[b]); // a NaN stays
      else pooled[cell] = (pooled[cell] === MASKED ? 0 : pooled[cell]) + line[b];
    }
  }
  return Float32Array.from(pooled, (value, cell) => (isMax || value === MASKED ? value : value / counts[cell]));
}
