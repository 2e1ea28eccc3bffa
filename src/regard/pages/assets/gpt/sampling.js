// Choose the next token from its probabilities.

// The tokens in the order of their probabilities, the most likely first.
export const rankTokens = (guess) => Uint16Array.from(guess.keys()).sort((a, b) => guess[b] - guess[a] || a - b);

// The probabilities after temperature and top-k, (vocabulary). A temperature of 0 leaves the most likely token alone.
export function shapeGuess(guess, temperature, topK) {
  const order = rankTokens(guess), shaped = new Float64Array(guess.length);
  if (temperature === 0) {
    shaped[order[0]] = 1;
    return shaped;
  }
  // p^(1/T), divided by its largest value so that nothing overflows.
  let total = 0;
  for (const token of order.subarray(0, topK)) total += shaped[token] = (guess[token] / guess[order[0]]) ** (1 / temperature);
  return shaped.map((x) => x / total);
}

// The token at a place between 0 and 1 of the cumulative probabilities.
export function drawToken(shaped, place) {
  let sum = 0, last = 0;
  for (let token = 0; token < shaped.length; token++) {
    if (shaped[token] === 0) continue;
    sum += shaped[token];
    last = token;
    if (place < sum) return token;
  }
  return last;
}
