// Find a token among the tokens of a text, as `recording.find` does.

// A token without its word-start marker; a token that is only a marker stays.
export function stripMarker(text) {
  return text.replace(/^[Ġ▁ ]+/, "") || text;
}

const keepCase = (text) => text;
const ignoreCase = (text) => text.toLowerCase();

// Compare case if a text contains the token exactly, else ignore it.
export function chooseCase(query, texts) {
  return texts.some((names) => names?.some((name) => stripMarker(name) === stripMarker(query))) ? keepCase : ignoreCase;
}

// The positions of a token: wherever its text occurs, or the position that the query states.
export function findPositions(query, names, length, fold) {
  const position = /^(#?)([-−]?\d+)$/.exec(query.trim());
  if (names && !position?.[1]) {
    const positions = names.flatMap((name, i) => (fold(stripMarker(name)) === fold(stripMarker(query)) ? [i] : []));
    if (positions.length) return positions;
  }
  if (!position) return [];
  const index = Number(position[2].replace("−", "-"));
  return index >= -length && index < length ? [(index + length) % length] : [];
}

function bigrams(text) {
  return new Set(Array.from({ length: Math.max(text.length - 1, 1) }, (_, i) => text.toLowerCase().slice(i, i + 2)));
}

// Up to three tokens that are similar to a query.
export function similarTokens(query, names) {
  const wanted = bigrams(query), words = [...new Set(names.map(stripMarker))];
  const similarity = (text) => {
    const own = bigrams(text), both = [...own].filter((pair) => wanted.has(pair)).length;
    return (2 * both) / (own.size + wanted.size);
  };
  return words.map((text) => [similarity(text), text]).filter(([share]) => share >= 0.4)
    .sort((a, b) => b[0] - a[0]).slice(0, 3).map(([, text]) => text);
}
