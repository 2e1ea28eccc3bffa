// What a head looks at, in words, measured on one text.

// For each token the position of the last mark before it (comma, full stop and such), or −1.
function lastMarks(tokens, isMark) {
  let last = -1;
  return Array.from(tokens, (token, i) => {
    const mark = last;
    if (isMark(token)) last = i;
    return mark;
  });
}

// Mean weight of the rows of a map (n, n) that lies on the keys of which `isOn(i, j)` is true; rows without such keys do not count.
function meanWeight(map, n, isOn) {
  let total = 0, rows = 0;
  for (let i = 1; i < n; i++) {
    let sum = 0, found = false;
    for (let j = 0; j <= i; j++) {
      if (!isOn(i, j)) continue;
      found = true;
      sum += map[i * n + j];
    }
    if (!found) continue;
    total += sum;
    rows++;
  }
  return rows ? total / rows : 0;
}

// Habits in the order in which they are tried: the words, which keys, and the mean weight from which the words are used.
const HABITS = [
  ["the token before", (i, j) => j === i - 1, 0.45],
  ["the token itself", (i, j) => j === i, 0.45],
  ["the token two before", (i, j) => j === i - 2, 0.45],
  ["the token that came next the last time (an induction head)", (i, j, tokens) => j > 0 && tokens[j - 1] === tokens[i] && j - 1 < i, 0.45],
  ["earlier copies of the same token", (i, j, tokens) => j < i && tokens[j] === tokens[i], 0.45],
  ["the start of the text", (i, j) => j === 0, 0.5],
  ["the last comma or full stop", (i, j, tokens, marks) => j === marks[i] && marks[i] > 0, 0.3],
  ["the last four tokens", (i, j) => i - j < 4, 0.6],
];

// { text, share }: where most of the weight of a head lies, and its mean share.
export function describeHabit(map, tokens, isMark) {
  const n = tokens.length, marks = lastMarks(tokens, isMark);
  if (n === 1) return { text: "the token itself", share: map[0] }; // there is no other
  for (const [text, isOn, least] of HABITS) {
    const share = meanWeight(map, n, (i, j) => isOn(i, j, tokens, marks));
    if (share >= least) return { text, share };
  }
  return { text: "tokens all over the text", share: meanWeight(map, n, (i, j) => i - j >= 4) };
}
