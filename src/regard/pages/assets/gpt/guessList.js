// The most likely next tokens, as buttons with bars.
import { rankTokens } from "./sampling.js";
import { formatShare } from "./tokens.js";
import { el } from "../components/dom.js";

const SHOWN = 8;

// `onChoose(token)` is called when a token is selected.
export function createGuessList(id, tokenizer, onChoose) {
  const rows = Array.from({ length: SHOWN }, () => {
    const sign = el("b", { class: "sign" }), fill = el("span", { class: "fill" }), share = el("span", { class: "share" });
    const button = el("button", { type: "button", onclick: () => onChoose(Number(button.dataset.token)) },
      sign, el("span", { class: "bar", "aria-hidden": "true" }, fill), share);
    return { sign, fill, share, button, node: el("li", {}, button) };
  });
  const node = el("ol", { id, class: "guesses" }, rows.map((row) => row.node));

  // shaped: probabilities after temperature and top-k; guess: those of the model, which order the tokens.
  function draw(shaped, guess) {
    const order = rankTokens(guess);
    rows.forEach(({ sign, fill, share, button }, i) => {
      const token = order[i], part = shaped[token];
      sign.textContent = tokenizer.sign(token);
      fill.style.width = `${100 * part}%`;
      share.textContent = part === 0 ? "–" : formatShare(part);
      button.dataset.token = `${token}`;
      button.dataset.probability = `${guess[token]}`;
      button.classList.toggle("cut", part === 0);
      button.setAttribute("aria-label", `${tokenizer.name(token)}, ${part === 0 ? "never drawn" : formatShare(part)}: write it`);
    });
  }
  return { node, draw };
}
