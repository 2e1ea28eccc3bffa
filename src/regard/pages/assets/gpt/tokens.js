// The tokens of the model, words and pieces of words: text to tokens and back, and what the page writes for a token.

const isWord = (text) => /^[A-Za-z]/.test(text);

// Both are those of `TinyGPT`: a newline first, a space before each line, then the longest piece that fits.
export function createTokenizer(pieces) {
  const numbers = new Map(pieces.map((piece, number) => [piece, number])), longest = Math.max(...pieces.map((piece) => piece.length));

  function encode(text) {
    const whole = `\n${text.replace(/[^\n -~]/gu, "?").replace(/(^|\n)(?=[^\n])/g, "$1 ")}`, tokens = [];
    for (let at = 0; at < whole.length; at += pieces[tokens.at(-1)].length) {
      let length = longest;
      while (!numbers.has(whole.slice(at, at + length))) length--;
      tokens.push(numbers.get(whole.slice(at, at + length)));
    }
    return Uint16Array.from(tokens);
  }

  const decode = (tokens) => Array.from(tokens, (token) => pieces[token]).join("").replace(/^\n/, "").replace(/(^|\n) /g, "$1");

  // A word without its space; “…bi” for a piece that continues a word; ␣ and ⏎ for other spaces and new lines.
  function sign(token) {
    const piece = pieces[token];
    if (piece[0] === " " && isWord(piece.slice(1))) return piece.slice(1);
    return isWord(piece) ? `…${piece}` : piece.replaceAll(" ", "␣").replaceAll("\n", "⏎");
  }

  // For a sentence or a screen reader.
  const name = (token) => ({ "\n": "new line", " ": "space" })[pieces[token]] ?? `“${sign(token)}”`;
  return { encode, decode, sign, name, startsWord: (token) => /^[ \n]/.test(pieces[token]) };
}

// A share as per cent: 97 %, 3.1 %, 0.02 %.
export const formatShare = (share) => `${formatPoints(share)} %`;

export function formatPoints(share) {
  const percent = 100 * share;
  return percent >= 99.95 ? "100" : percent >= 10 ? percent.toFixed(0) : percent >= 0.095 ? percent.toFixed(1) : percent >= 0.005 ? percent.toFixed(2) : "0";
}
