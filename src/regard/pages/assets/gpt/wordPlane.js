// The unembedding of words: a plane in which similar ones are near each other, and the numbers of one token.
import { el, scrollBox, svgElement } from "../components/dom.js";
import { formatNumber } from "../components/format.js";

const WIDTH = 640, HEIGHT = 400, EDGE = [36, 14]; // of the picture
const NEAREST = 5;

function cosine(a, b) {
  let dot = 0, left = 0, right = 0;
  for (let k = 0; k < a.length; k++) {
    dot += a[k] * b[k];
    left += a[k] * a[k];
    right += b[k] * b[k];
  }
  return dot / Math.sqrt(left * right || 1);
}

// words: the tokens of the plane; plane: their coordinates, −1 … 1; unembedding: (vocabulary, width).
export function createWordPlane({ words, plane }, unembedding, width, tokenizer) {
  const vector = (token) => unembedding.subarray(token * width, (token + 1) * width);
  const along = (x, size, edge) => edge + ((x + 1) / 2) * (size - 2 * edge);
  const marks = words.map((token, i) => svgElement("text", { x: along(plane[i][0], WIDTH, EDGE[0]), y: along(-plane[i][1], HEIGHT, EDGE[1]), "data-token": `${token}` }, tokenizer.sign(token)));
  const picture = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "word-plane", role: "img", "aria-label": `Map of ${words.length} words; words with similar uses are close together` }, marks);
  const title = el("h3"), near = el("p", { id: "near" }), bars = el("canvas", { id: "vector", role: "img", width: `${width}`, height: "1", "aria-label": `${width} numbers as stripes` });
  const numbers = el("p", { class: "map-note", id: "numbers" });
  const node = el("div", { class: "word-box" }, scrollBox("Map of words", picture), el("div", { class: "word-detail" }, title, bars, numbers, near));

  marks.forEach((mark, i) => mark.addEventListener("click", () => draw(words[i])));

  // One stripe for each number: orange above 0, blue below.
  function drawVector(numbersOf) {
    const style = getComputedStyle(document.documentElement), most = Math.max(...numbersOf.map(Math.abs));
    const context = bars.getContext("2d");
    context.clearRect(0, 0, width, 1);
    numbersOf.forEach((x, k) => {
      context.globalAlpha = Math.abs(x) / most;
      context.fillStyle = style.getPropertyValue(x > 0 ? "--mark" : "--accent");
      context.fillRect(k, 0, 1, 1);
    });
    context.globalAlpha = 1;
  }

  function draw(token) {
    const own = vector(token), tokens = unembedding.length / width, others = Array.from({ length: tokens }, (_, other) => other).filter((other) => other !== token);
    const nearest = others.map((other) => [other, cosine(own, vector(other))]).sort((a, b) => b[1] - a[1]).slice(0, NEAREST);
    marks.forEach((mark, i) => mark.setAttribute("class", words[i] === token ? "chosen" : nearest.some(([other]) => other === words[i]) ? "near" : ""));
    title.textContent = `The ${width} numbers of ${tokenizer.name(token)}`;
    drawVector(Array.from(own));
    numbers.textContent = `${Array.from(own.subarray(0, 6), formatNumber).join(", ")}, … Orange: above 0. Blue: below 0.`;
    near.replaceChildren("Most similar of all tokens, by the cosine of the angle between the numbers: ",
      ...nearest.flatMap(([other, share], i) => [i ? ", " : "", el("b", { class: "sign" }, tokenizer.sign(other)), ` ${share.toFixed(2)}`]));
  }
  return { node, draw };
}
