// Rows of weights that a page stores as levels, for heads whose query and key it does not store.

// The weights of the 256 levels, as `encode_levels` of `regard.pages.encoding` defines them.
export function levelTable(floor, top) {
  return Float32Array.from({ length: 256 }, (_, level) => (level < 2 ? 0 : floor * (top / floor) ** ((level - 2) / 253)));
}

// stored: { queries, levels, floor, top }, levels of (heads, queries, keys). `load(array)` resolves to the levels.
export function openRows(stored, headCount, keyCount, load) {
  const table = levelTable(stored.floor, stored.top), queryCount = stored.queries.length;
  let levels = null;

  // The weights of a row of one head, null if they are not stored.
  async function row(head, query) {
    const place = stored.queries.indexOf(query);
    if (place < 0) return null;
    levels ??= load(stored.levels);
    const start = (head * queryCount + place) * keyCount;
    return Float32Array.from((await levels).subarray(start, start + keyCount), (level) => table[level]);
  }

  async function meanRow(query) {
    const rows = await Promise.all(Array.from({ length: headCount }, (_, head) => row(head, query)));
    if (rows.includes(null)) return null;
    return Float32Array.from({ length: keyCount }, (_, key) => rows.reduce((sum, weights) => sum + weights[key], 0) / headCount);
  }
  return { row, meanRow, queries: stored.queries };
}
