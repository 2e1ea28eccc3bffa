// How sharp a row of weights is, as `regard.learn.sharpness` has it.

export function sharpness(weights) {
  let largest = 0, entropy = 0, squares = 0, slope = 0;
  for (let i = 0; i < weights.length; i++) {
    const weight = weights[i];
    largest = Math.max(largest, weight); // a NaN stays
    if (!(weight === 0)) entropy -= weight * Math.log(weight);
    // The Jacobian of softmax, entry by entry: how much weight i moves when score j does.
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

export function deviation(numbers) {
  const middle = mean(numbers);
  return Math.sqrt(mean(numbers.map((x) => (x - middle) ** 2)));
}
