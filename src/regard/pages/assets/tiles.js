// Tiles of a map: squares of cells, each a weight or the mean of some, asked for when they come into view and then kept.
import { levelOf, painted } from "./ramp.js";

const CELLS = 128; // along the edge of a tile
const KEPT = 400;
export const PROBES = 4; // a cell of up to 4 × 4 weights is looked at whole, a larger one at 16 places

const nameOf = (down, across, i, j) => `${down} ${across} ${i} ${j}`;

// `changed` is called when a tile has come, `failed` with an error.
export function tilesOf(matrix, [rows, columns], changed, failed) {
  const tiles = new Map(), wanted = new Map();
  let head = 0, scale = null, colours = null;

  function imageOf({ weights, wide, high }) {
    const square = new Uint8Array(CELLS * CELLS);
    for (let i = 0; i < high; i++) {
      for (let j = 0; j < wide; j++) square[i * CELLS + j] = levelOf(scale, weights[i * wide + j]);
    }
    return painted(square, CELLS, colours);
  }

  // What is no longer in view need not be worked out.
  function drop(needed = new Set()) {
    for (const [name, controller] of wanted) {
      if (needed.has(name)) continue;
      wanted.delete(name);
      controller.abort();
    }
  }

  async function ask(down, across, i, j) {
    const name = nameOf(down, across, i, j), of = head;
    if (wanted.has(name)) return;
    const controller = new AbortController();
    wanted.set(name, controller);
    const high = Math.min(CELLS, Math.ceil(rows / down) - i * CELLS);
    const wide = Math.min(CELLS, Math.ceil(columns / across) - j * CELLS);
    const range = [i * CELLS * down, down, high, j * CELLS * across, across, wide];
    const weights = await matrix.picture(head, ...range, PROBES, { signal: controller.signal }).catch(failed);
    if (wanted.get(name) === controller) wanted.delete(name);
    if (!weights || of !== head) return;
    const tile = { down, across, i, j, weights, wide, high };
    tile.image = imageOf(tile);
    tiles.set(name, tile);
    if (tiles.size > KEPT) tiles.delete(tiles.keys().next().value);
    changed();
  }

  // Draw what is in view, coarser tiles where the right ones are not there yet, and ask for those; how many are missing.
  function paint(context, { left, top, across, down, first, upper, wide, high }, a, b) {
    const range = (from, length, by) => [Math.floor(from / (CELLS * by)), Math.ceil((from + length) / (CELLS * by))];
    const [i0, i1] = range(upper, high, a), [j0, j1] = range(first, wide, b);
    const put = (tile) => context.drawImage(tile.image, left + (tile.j * CELLS * tile.across - first) * across,
      top + (tile.i * CELLS * tile.down - upper) * down, CELLS * tile.across * across, CELLS * tile.down * down);
    const needed = new Set(), absent = [];
    for (let i = i0; i < i1; i++) {
      for (let j = j0; j < j1; j++) {
        const name = nameOf(a, b, i, j), tile = tiles.get(name);
        needed.add(name);
        if (tile) {
          tiles.delete(name); // the last to be thrown away
          tiles.set(name, tile);
        } else absent.push([i, j]);
      }
    }
    for (let more = 3; more >= 1; more--) {
      for (const [i, j] of absent) {
        const tile = tiles.get(nameOf(a << more, b << more, i >> more, j >> more));
        if (tile) put(tile);
      }
    }
    for (const name of needed) if (tiles.has(name)) put(tiles.get(name));
    drop(needed);
    // The newest question is answered first, so the middle is asked for last.
    const far = ([i, j]) => Math.hypot(i - (i0 + i1 - 1) / 2, j - (j0 + j1 - 1) / 2);
    for (const [i, j] of absent.sort((x, y) => far(y) - far(x))) ask(a, b, i, j);
    return absent.length;
  }

  // A single weight that is on the map, −1 where hidden, null where it is not there.
  function weightAt(i, j) {
    const tile = tiles.get(nameOf(1, 1, Math.floor(i / CELLS), Math.floor(j / CELLS)));
    return tile ? tile.weights[(i % CELLS) * tile.wide + (j % CELLS)] : null;
  }

  function recolour(newScale, newColours) {
    [scale, colours] = [newScale, newColours];
    for (const tile of tiles.values()) tile.image = imageOf(tile);
  }

  function setHead(number) {
    head = number;
    tiles.clear();
    drop();
  }

  return { paint, drop, weightAt, recolour, setHead };
}
