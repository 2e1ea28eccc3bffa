// Choose the next byte from its probabilities.

// The probabilities after temperature and top-k, (vocabulary). A temperature of 0 leaves the most likely byte alone.
export function shapeGuess(guess, temperature, topK) {
  const order = [...guess.keys()].sort((a, b) => guess[b] - guess[a] || a - b);
  const shaped = new Float64Array(guess.length);
  if (temperature === 0) {
    shaped[order[0]] = 1;
    return shaped;
  }
  // p^(1/T), divided by its largest value so that nothing overflows.
  let total = 0;
  for (const byte of order.slice(0, topK)) total += shaped[byte] = (guess[byte] / guess[order[0]]) ** (1 / temperature);
  return shaped.map((x) => x / total);
}

// The byte at a place between 0 and 1 of the cumulative probabilities.
export function drawByte(shaped, place) {
  let sum = 0, last = 0;
  for (let byte = 0; byte < shaped.length; byte++) {
    if (shaped[byte] === 0) continue;
    sum += shaped[byte];
    last = byte;
    if (place < sum) return byte;
  }
  return last;
}
