// The embeddings of the letters: a plane in which similar ones are near each other, and the numbers of one letter.
import { letterName, letterSign } from "./letters.js";
import { el, svgElement } from "../components/dom.js";
import { formatNumber } from "../components/format.js";

const SIZE = 400, EDGE = 18; // of the picture
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

// letters: the bytes of the plane; plane: their coordinates, −1 … 1; embedding: (vocabulary, width).
export function createLetterPlane({ letters, plane }, embedding, width) {
  const vector = (byte) => embedding.subarray(byte * width, (byte + 1) * width);
  const along = (x) => EDGE + ((x + 1) / 2) * (SIZE - 2 * EDGE);
  const marks = letters.map((byte, i) => svgElement("text", { x: along(plane[i][0]), y: along(-plane[i][1]), "data-byte": `${byte}` }, letterSign(byte)));
  const picture = svgElement("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "letter-plane", role: "img" }, marks);
  const title = el("h3"), near = el("p", { id: "near" }), bars = el("canvas", { id: "vector", role: "img", width: `${width}`, height: "1" });
  const numbers = el("p", { class: "map-note", id: "numbers" });
  const node = el("div", { class: "letter-box" }, picture, el("div", { class: "letter-detail" }, title, bars, numbers, near));

  marks.forEach((mark, i) => mark.addEventListener("click", () => draw(letters[i])));

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

  function draw(byte) {
    const own = vector(byte), others = letters.filter((other) => other !== byte);
    const nearest = others.map((other) => [other, cosine(own, vector(other))]).sort((a, b) => b[1] - a[1]).slice(0, NEAREST);
    marks.forEach((mark, i) => mark.setAttribute("class", letters[i] === byte ? "chosen" : nearest.some(([other]) => other === letters[i]) ? "near" : ""));
    title.textContent = `The ${width} numbers of ${letterName(byte)}`;
    drawVector(Array.from(own));
    bars.setAttribute("aria-label", `${width} numbers as stripes`);
    numbers.textContent = `${Array.from(own.subarray(0, 6), formatNumber).join(", ")}, … Orange: above 0. Blue: below 0.`;
    near.replaceChildren(letters.includes(byte) ? "Most similar, by the cosine of the angle between the numbers: " : "This byte is rare in the training text, or not in it. Most similar: ",
      ...nearest.flatMap(([other, share], i) => [i ? ", " : "", el("b", { class: "sign" }, letterSign(other)), ` ${share.toFixed(2)}`]));
    picture.setAttribute("aria-label", `Map of ${letters.length} letters; those used alike are near each other`);
  }
  return { node, draw };
}
