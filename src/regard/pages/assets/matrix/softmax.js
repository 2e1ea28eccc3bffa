// The softmax of the explorers, computed in the same steps as `regard` does: a masked score is −Infinity and gets the
// weight 0, and a row without a live key is all zeros.

export function softmax(scores) {
  let largest = -Infinity;
  for (const score of scores) largest = Math.max(largest, score); // a NaN stays
  const shift = largest === -Infinity ? 0 : largest;
  const exponentials = scores.map((score) => Math.exp(score - shift));
  const total = exponentials.reduce((sum, x) => sum + x, 0);
  const weights = exponentials.map((x, j) => (scores[j] === -Infinity ? 0 : x / total));
  return { shift, exponentials, total, weights };
}
