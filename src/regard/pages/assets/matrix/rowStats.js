// How sharp a row of weights is, by the same definitions as `regard.learn.sharpness`.

export function rowStats(weights) {
  let largest = 0, entropy = 0, squares = 0, slope = 0;
  for (let i = 0; i < weights.length; i++) {
    const weight = weights[i];
    largest = Math.max(largest, weight); // a NaN stays
    if (!(weight === 0)) entropy -= weight * Math.log(weight);
    // The Jacobian of the softmax, entry by entry: the change of weight i with score j.
    for (let j = 0; j < weights.length; j++) {
      const entry = (i === j ? weight : 0) - weight * weights[j];
      squares += entry * entry;
      slope = Math.max(slope, Math.abs(entry));
    }
  }
  return { largest, entropy: Math.abs(entropy), gradient: Math.sqrt(squares), slope };
}

export function mean(numbers) {
  return numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
}

export function standardDeviation(numbers) {
  const centre = mean(numbers);
  return Math.sqrt(mean(numbers.map((x) => (x - centre) ** 2)));
}
