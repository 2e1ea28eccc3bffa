// What a head looks at, in words, measured on one text.

const SPACES = new Set([10, 32]), MARKS = new Set(Array.from(".,!?", (mark) => mark.charCodeAt(0)));

// For each letter the position of the last space before its word, or −1.
function wordStarts(bytes) {
  let last = -1;
  return Array.from(bytes, (byte, i) => {
    const start = last;
    if (SPACES.has(byte)) last = i;
    return start;
  });
}

// For each letter the position of the last comma, full stop or other mark before it, or −1.
function lastMarks(bytes) {
  let last = -1;
  return Array.from(bytes, (byte, i) => {
    const mark = last;
    if (MARKS.has(byte)) last = i;
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
  ["the letter before", (i, j) => j === i - 1, 0.45],
  ["the letter itself", (i, j) => j === i, 0.45],
  ["the letter two before", (i, j) => j === i - 2, 0.45],
  ["the letter that came next the last time (an induction head)", (i, j, bytes) => j > 0 && bytes[j - 1] === bytes[i] && j - 1 < i, 0.45],
  ["earlier copies of the same letter", (i, j, bytes) => j < i && bytes[j] === bytes[i], 0.45],
  ["the space before the word", (i, j, bytes, starts) => j === starts[i] && starts[i] >= 0, 0.4],
  ["the last comma or full stop", (i, j, bytes, starts, marks) => j === marks[i] && marks[i] >= 0, 0.3],
  ["the first letter of the text", (i, j) => j === 0, 0.5],
  ["the letters of the word so far", (i, j, bytes, starts) => j > starts[i], 0.6],
  ["the last eight letters", (i, j) => i - j < 8, 0.6],
];

// { text, share }: where most of the weight of a head lies, and its mean share.
export function describeHabit(map, bytes) {
  const n = bytes.length, starts = wordStarts(bytes), marks = lastMarks(bytes);
  for (const [text, isOn, least] of HABITS) {
    const share = meanWeight(map, n, (i, j) => isOn(i, j, bytes, starts, marks));
    if (share >= least) return { text, share };
  }
  return { text: "letters all over the text", share: meanWeight(map, n, (i, j) => i - j >= 8) };
}
