// The picture of a whole matrix, from the levels that `regard.pages.encoding` writes: the maximum or the mean of each cell.
// If the screen has fewer pixels than the picture has cells, cells are combined, so that none is left out.
import { MASKED } from "./weights.js";

const TOP_LEVEL = 255;

// The weight of each level: level 0 is masked, level 1 is below the floor.
export function levelWeights({ floor, top }) {
  const ratio = Math.log(top / floor) / (TOP_LEVEL - 2);
  return Float64Array.from({ length: TOP_LEVEL + 1 }, (_, level) =>
    (level === 0 ? MASKED : level === 1 ? 0 : floor * Math.exp(ratio * (level - 2))));
}

// The picture of the mean over heads, in place of an encoded one. Of means it is exact; of maxima it is the mean over heads of
// each cell's maximum, which is not below the maximum of the mean. `records` have floor and top, `load()` resolves to their levels.
export function averageLevels(records, load) {
  const top = Math.max(...records.map((record) => record.top)), floor = top * Math.min(...records.map((record) => record.floor / record.top));
  const ratio = (TOP_LEVEL - 2) / Math.log(top / floor);
  return { floor, top, load: async () => {
    const all = await load(), tables = records.map(levelWeights);
    return all[0].map((_, cell) => {
      const weights = all.map((levels, n) => tables[n][levels[cell]]).filter((weight) => weight !== MASKED);
      if (!weights.length) return 0;
      const mean = weights.reduce((sum, weight) => sum + weight, 0) / all.length;
      return Math.min(Math.max(Math.round(Math.log(mean / floor) * ratio) + 2, 1), TOP_LEVEL);
    });
  } };
}

// The overview of the mean over heads; null if a head has none.
export function averageOverviews(overviews, loadLevels) {
  if (overviews.includes(null)) return null;
  const average = (reduce) => overviews[0][reduce] && averageLevels(overviews.map((overview) => overview[reduce]),
    () => Promise.all(overviews.map((overview) => loadLevels(overview[reduce].levels))));
  return { ...overviews[0], max: average("max"), mean: average("mean"), heads: overviews.length };
}

// Combine a picture of rows × columns weights to height × width, neither larger, by "max" or "mean". A masked cell counts
// as 0 in a mean; a combined cell is masked if all of its cells are.
export function poolCells(weights, [rows, columns], height, width, reduce) {
  if (height === rows && width === columns) return weights;
  const pooled = new Float64Array(height * width).fill(MASKED), counts = new Uint32Array(pooled.length);
  for (let i = 0; i < rows; i++) {
    const base = Math.floor((i * height) / rows) * width;
    for (let j = 0; j < columns; j++) {
      const weight = weights[i * columns + j], cell = base + Math.floor((j * width) / columns);
      counts[cell]++;
      if (weight === MASKED) continue;
      if (reduce === "max") pooled[cell] = Math.max(pooled[cell], weight);
      else pooled[cell] = (pooled[cell] === MASKED ? 0 : pooled[cell]) + weight;
    }
  }
  return reduce === "max" ? pooled : pooled.map((sum, cell) => (sum === MASKED ? MASKED : sum / counts[cell]));
}

// Draw weights of at least `least` wider by `radius` points on every side, so that a single one is seen; masked cells stay.
export function widenLarge(weights, width, least, radius) {
  const height = weights.length / width, widened = weights.slice();
  for (let n = 0; n < weights.length; n++) {
    if (!(weights[n] >= least)) continue;
    const row = Math.floor(n / width), column = n % width;
    for (let i = Math.max(0, row - radius); i <= Math.min(height - 1, row + radius); i++) {
      for (let j = Math.max(0, column - radius); j <= Math.min(width - 1, column + radius); j++) {
        const at = i * width + j;
        if (weights[at] !== MASKED) widened[at] = Math.max(widened[at], weights[n]);
      }
    }
  }
  return widened;
}
