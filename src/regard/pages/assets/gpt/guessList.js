// The most likely next letters, as buttons with bars.
import { formatShare, letterName, letterSign } from "./letters.js";
import { el } from "../components/dom.js";

const SHOWN = 8;

// `onChoose(byte)` is called when a letter is selected.
export function createGuessList(id, onChoose) {
  const rows = Array.from({ length: SHOWN }, () => {
    const sign = el("b", { class: "sign" }), fill = el("span", { class: "fill" }), share = el("span", { class: "share" });
    const button = el("button", { type: "button", onclick: () => onChoose(Number(button.dataset.byte)) },
      sign, el("span", { class: "bar", "aria-hidden": "true" }, fill), share);
    return { sign, fill, share, button, node: el("li", {}, button) };
  });
  const node = el("ol", { id, class: "guesses" }, rows.map((row) => row.node));

  // shaped: probabilities after temperature and top-k; guess: those of the model, which order the letters.
  function draw(shaped, guess) {
    const order = [...guess.keys()].sort((a, b) => guess[b] - guess[a] || a - b);
    rows.forEach(({ sign, fill, share, button }, i) => {
      const byte = order[i], part = shaped[byte];
      sign.textContent = letterSign(byte);
      fill.style.width = `${100 * part}%`;
      share.textContent = part === 0 ? "–" : formatShare(part);
      button.dataset.byte = `${byte}`;
      button.dataset.probability = `${guess[byte]}`;
      button.classList.toggle("cut", part === 0);
      button.setAttribute("aria-label", `${letterName(byte)}, ${part === 0 ? "never drawn" : formatShare(part)}: write it`);
    });
  }
  return { node, draw };
}
