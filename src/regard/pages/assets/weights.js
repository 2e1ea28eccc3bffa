// The lazy matrix: from query and key in half precision and each row's lse, any weight is exp(score − lse).
// A head is a plain object of numbers and typed arrays, as `headOf` makes it.

// -- Parts of the page, as numbers --

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Every half as a float, by its 16 bits.
let floats = null;
function floatsOfHalves() {
  const table = new Float32Array(1 << 16);
  for (let bits = 0; bits < 1 << 16; bits++) {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
    table[bits] = sign * (exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
  }
  return table;
}

// The numbers of a part from its text: what `regard.pages.parts` wrote.
export async function partOf(kind, text) {
  const buffer = await inflated(bytesOf(text));
  if (kind === "byte") return new Uint8Array(buffer);
  if (kind === "float") return new Float32Array(buffer);
  if (kind === "double") return new Float64Array(buffer);
  if (kind === "steps") {
    const steps = new Int32Array(buffer);
    for (let i = 1; i < steps.length; i++) steps[i] += steps[i - 1];
    return steps;
  }
  floats ??= floatsOfHalves();
  const planes = new Uint8Array(buffer), count = planes.length / 2, numbers = new Float32Array(count);
  for (let i = 0; i < count; i++) numbers[i] = floats[planes[i] | (planes[count + i] << 8)];
  return numbers;
}

// -- A head --

const rowsOf = (array, shape, pair) => {
  const size = array.length / shape[0];
  return array.subarray((shape[0] > 1 ? pair : 0) * size, (shape[0] > 1 ? pair + 1 : 1) * size);
};

// The head of a record; `part` gives the numbers of a part, or a promise of them.
export async function headOf(record, pair, part) {
  const query = record.query[record.query_of[pair]], key = record.key[record.key_of[pair]];
  const mask = record.masks[record.mask_of[pair]];
  const mods = Promise.all(record.mods.map(async (mod) => {
    const of = mod.table ?? mod.array ?? mod.rows;
    return of ? { ...mod, numbers: rowsOf(await part(of), of.shape, pair), shape: of.shape.slice(1) } : mod;
  }));
  const counts = await part(mask.counts), offsets = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) offsets[i + 1] = offsets[i] + counts[i];
  return {
    rows: record.size[0],
    keys: record.size[1],
    width: record.width,
    factor: record.scale * 2 ** -(query.exponent + key.exponent),
    query: await part(query.numbers),
    key: await part(key.numbers),
    lse: await part(record.lse[pair]),
    positions: await part(record.positions),
    offsets,
    edges: await part(mask.edges),
    first: record.q_len - 1, // the place of distance 0 in a table by distance
    mods: await mods,
  };
}

function modified(head, score, i, j) {
  for (const { kind, cap, numbers, shape } of head.mods) {
    if (kind === "softcap") score = cap * Math.tanh(score / cap);
    else if (kind === "distance") score += numbers[j - head.positions[i] + head.first];
    else if (kind === "flat") score = numbers[i] ? 0 : score;
    else {
      const [rows, columns] = shape;
      const added = numbers[(rows > 1 ? i : 0) * columns + (columns > 1 ? j : 0)];
      score = added === -Infinity ? added : score + added; // it hides even a NaN
    }
  }
  return score;
}

function dot(query, key, a, b, width) {
  let x = 0, y = 0, n = 0;
  for (; n + 4 <= width; n += 4) {
    x += query[a + n] * key[b + n] + query[a + n + 1] * key[b + n + 1];
    y += query[a + n + 2] * key[b + n + 2] + query[a + n + 3] * key[b + n + 3];
  }
  for (; n < width; n++) x += query[a + n] * key[b + n];
  return x + y;
}

// A row's weights at ascending columns, −1 where a key is hidden.
function fill(head, i, columns, out) {
  const { query, key, width, factor, edges, offsets } = head;
  const lse = head.lse[i], plain = !head.mods.length, half = edges.length / 2; // all starts, then all stops
  out.fill(-1);
  if (lse === -Infinity) return out;
  for (let run = offsets[i], n = 0; run < offsets[i + 1]; run++) {
    const start = edges[run], stop = edges[half + run];
    while (n < columns.length && columns[n] < start) n++;
    for (; n < columns.length && columns[n] < stop; n++) {
      const score = factor * dot(query, key, i * width, columns[n] * width, width);
      out[n] = Math.exp((plain ? score : modified(head, score, i, columns[n])) - lse);
    }
  }
  return out;
}

const series = (start, step, count) => Int32Array.from({ length: count }, (_, n) => start + n * step);
const zeroed = (weight) => (weight === -1 ? 0 : weight); // NaN stays

// -- What is asked of it --

// One weight, and whether the mask hides it.
export function cellOf(head, i, j) {
  const [weight] = fill(head, i, [j], new Float64Array(1));
  return { weight: zeroed(weight), hidden: weight === -1 };
}

// All weights of a row, 0 where hidden.
export function rowOf(head, i) {
  return fill(head, i, series(0, 1, head.keys), new Float32Array(head.keys)).map(zeroed);
}

// The weights of some rows at some ascending columns, row after row, 0 where hidden.
export function blockOf(head, rows, columns) {
  const block = new Float32Array(rows.length * columns.length);
  Array.from(rows, (i, n) => fill(head, i, columns, block.subarray(n * columns.length, (n + 1) * columns.length)));
  return block.map(zeroed);
}

export function tileOf(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount) {
  return blockOf(head, series(rowStart, rowStep, rowCount), series(columnStart, columnStep, columnCount));
}

// The keys that a row weighs most, largest first, the earlier of equals before the later.
export function strongestOf(head, i, count) {
  const weights = rowOf(head, i), best = [];
  for (let j = 0; j < weights.length; j++) {
    if (!(weights[j] > 0) || (best.length === count && weights[j] <= weights[best[count - 1]])) continue;
    let place = best.length;
    while (place && weights[best[place - 1]] < weights[j]) place--;
    best.splice(place, 0, j);
    best.length = Math.min(best.length, count);
  }
  return best.map((key) => ({ key, weight: weights[key] }));
}

// Where a cell of a picture is looked at: everywhere if it is small, else at `probes` places drawn by lot, one in each
// equal piece, so that nothing periodic is mistaken for something else.
function places(start, step, count, probes, length) {
  const found = [], cells = [];
  for (let cell = 0; cell < count; cell++) {
    const low = start + cell * step, many = Math.min(step, probes);
    for (let n = 0; n < many; n++) {
      const from = Math.floor((n * step) / many), to = Math.floor(((n + 1) * step) / many);
      let lot = Math.imul(low + from, 0x9e3779b1);
      lot = Math.imul(lot ^ (lot >>> 15), 0x85ebca6b);
      const at = low + from + (to - from > 1 ? ((lot ^ (lot >>> 13)) >>> 0) % (to - from) : 0);
      if (at < length) found.push(at), cells.push(cell);
    }
  }
  return { at: Int32Array.from(found), cells };
}

// A picture of rowCount × columnCount cells of rowStep × columnStep weights: the mean of each, −1 where all are hidden.
// A cell of at most probes × probes weights is looked at whole, of a larger one so many.
export function pictureOf(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount, probes) {
  const rows = places(rowStart, rowStep, rowCount, probes, head.rows);
  const columns = places(columnStart, columnStep, columnCount, probes, head.keys);
  const sums = new Float64Array(rowCount * columnCount), counts = new Int32Array(sums.length);
  const seen = new Uint8Array(sums.length), line = new Float64Array(columns.at.length);
  for (let a = 0; a < rows.at.length; a++) {
    fill(head, rows.at[a], columns.at, line);
    const base = rows.cells[a] * columnCount;
    for (let b = 0; b < line.length; b++) {
      const cell = base + columns.cells[b];
      counts[cell]++;
      if (line[b] === -1) continue;
      seen[cell] = 1;
      sums[cell] += line[b];
    }
  }
  return Float32Array.from(sums, (sum, cell) => (seen[cell] ? sum / counts[cell] : -1));
}
