// Tiles of a map: squares of cells, each a weight, or the maximum or mean of weights, requested when they come into view and
// cached.

export const TILE_CELLS = 128; // along the edge of a tile
export const PROBES = 4; // the mean of a cell of up to 4 × 4 weights reads them all, that of a larger one 16 of them
const MAX_TILES = 400;

const tileKey = (down, across, i, j) => `${down} ${across} ${i} ${j}`;

// `render({ weights, width, height })` returns the image of a tile, `onChange()` is called when a tile has arrived,
// `onError(error)` if a request fails.
export function createTileCache({ matrix, size: [rows, columns], render, onChange, onError }) {
  const tiles = new Map(), requested = new Map();
  let head = 0, reduce = "max";

  // Abort the requests for tiles that are no longer in view.
  function abortRequests(needed = new Set()) {
    for (const [key, controller] of requested) {
      if (needed.has(key)) continue;
      requested.delete(key);
      controller.abort();
    }
  }

  async function request(down, across, i, j) {
    const key = tileKey(down, across, i, j), requestedHead = head, requestedReduce = reduce;
    if (requested.has(key)) return;
    const controller = new AbortController();
    requested.set(key, controller);
    const height = Math.min(TILE_CELLS, Math.ceil(rows / down) - i * TILE_CELLS);
    const width = Math.min(TILE_CELLS, Math.ceil(columns / across) - j * TILE_CELLS);
    const range = [i * TILE_CELLS * down, down, height, j * TILE_CELLS * across, across, width];
    const weights = await matrix.picture(head, ...range, PROBES, reduce, { signal: controller.signal }).catch(onError);
    if (requested.get(key) === controller) requested.delete(key);
    if (!weights || requestedHead !== head || requestedReduce !== reduce) return;
    const tile = { down, across, i, j, weights, width, height };
    tile.image = render(tile);
    tiles.set(key, tile);
    if (tiles.size > MAX_TILES) tiles.delete(tiles.keys().next().value);
    onChange();
  }

  // Draw the tiles in view, coarser ones where a tile is missing, and request the missing ones. A cell stands for
  // rowStep × columnStep weights. Returns the number of missing tiles.
  function paint(context, { left, top, across, down, first, upper, wide, high }, rowStep, columnStep) {
    const range = (from, length, step) => [Math.floor(from / (TILE_CELLS * step)), Math.ceil((from + length) / (TILE_CELLS * step))];
    const [i0, i1] = range(upper, high, rowStep), [j0, j1] = range(first, wide, columnStep);
    const draw = (tile) => context.drawImage(tile.image, left + (tile.j * TILE_CELLS * tile.across - first) * across,
      top + (tile.i * TILE_CELLS * tile.down - upper) * down, TILE_CELLS * tile.across * across, TILE_CELLS * tile.down * down);
    const needed = new Set(), missing = [];
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const key = tileKey(rowStep, columnStep, i, j), tile = tiles.get(key);
        needed.add(key);
        if (tile) {
          tiles.delete(key); // moves it to the end, so that it is evicted last
          tiles.set(key, tile);
        } else missing.push([i, j]);
      }
    }
    for (let zoom = 3; zoom >= 1; zoom--) {
      for (const [i, j] of missing) {
        const tile = tiles.get(tileKey(rowStep << zoom, columnStep << zoom, i >> zoom, j >> zoom));
        if (tile) draw(tile);
      }
    }
    for (const key of needed) if (tiles.has(key)) draw(tiles.get(key));
    abortRequests(needed);
    // The newest request is answered first, so the tile in the middle is requested last.
    const distance = ([i, j]) => Math.hypot(i - (i0 + i1 - 1) / 2, j - (j0 + j1 - 1) / 2);
    for (const [i, j] of missing.sort((x, y) => distance(y) - distance(x))) request(rowStep, columnStep, i, j);
    return missing.length;
  }

  // The weight of a single cell, MASKED where masked, null where it is not cached.
  function weightAt(i, j) {
    const tile = tiles.get(tileKey(1, 1, Math.floor(i / TILE_CELLS), Math.floor(j / TILE_CELLS)));
    return tile ? tile.weights[(i % TILE_CELLS) * tile.width + (j % TILE_CELLS)] : null;
  }

  function rerender() {
    for (const tile of tiles.values()) tile.image = render(tile);
  }

  // Forget all tiles: those of another head, or of another reduction, differ.
  function reset(newHead, newReduce) {
    [head, reduce] = [newHead, newReduce];
    tiles.clear();
    abortRequests();
  }

  return { paint, abortRequests, weightAt, rerender, reset };
}
