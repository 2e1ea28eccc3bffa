// Numbers for words that the page has never seen: drawn from the letters, so that the same word has the same numbers on
// every visit. They mean nothing; a model would learn them.

const CHOICES = [-1, -0.5, 0, 0, 0.5, 1, 1.5, 2];

// FNV-1a, a short hash of a text, with a last step that mixes its bits; an unsigned 32-bit number.
function hash(text) {
  let value = 0x811c9dc5;
  for (const letter of text) value = Math.imul(value ^ letter.codePointAt(0), 0x01000193);
  value = Math.imul(value ^ (value >>> 16), 0x85ebca6b);
  return (value ^ (value >>> 13)) >>> 0;
}

// `kind` separates the query, key and value of a word.
export function wordVector(word, kind, size) {
  return Array.from({ length: size }, (_, i) => CHOICES[hash(`${kind} ${i} ${word}`) % CHOICES.length]);
}

// The words of a sentence, with punctuation marks as words of their own.
export function splitWords(sentence, limit) {
  const words = sentence.match(/[\p{L}\p{N}\p{M}'’-]+|[^\s\p{L}\p{N}\p{M}'’-]/gu) ?? [];
  return { words: words.slice(0, limit), leftOut: Math.max(words.length - limit, 0) };
}
