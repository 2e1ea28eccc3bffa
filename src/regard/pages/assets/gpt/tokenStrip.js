// The tokens of a text, each with a shade; one is selected, with the pointer or the arrow keys.
import { el } from "../components/dom.js";

const LIGHT = 40, DARK = 72; // per cent of the colour; between them no text can be read

// kind: "surprise" or "weight", which selects the colour. `onSelect(position)` is called when a token is selected.
export function createTokenStrip(id, label, kind, tokenizer, onSelect) {
  const node = el("div", { id, class: `strip ${kind}`, role: "listbox", tabindex: "0", "aria-label": label });
  let cells = [], selected = 0;

  node.addEventListener("click", (event) => {
    const place = cells.indexOf(event.target.closest("[role=option]"));
    if (place >= 0) onSelect(place);
  });
  node.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: selected - 1, ArrowRight: selected + 1, Home: 0, End: cells.length - 1 }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    onSelect(Math.min(Math.max(to, 0), cells.length - 1));
  });

  // shades: a number between 0 and 1 for each token; describe(i) is added to the name of a token.
  function draw(tokens, shades, position, describe) {
    while (cells.length < tokens.length) {
      cells.push(el("span", { role: "option", id: `${id}-${cells.length}` }));
      node.append(cells.at(-1));
    }
    cells.splice(tokens.length).forEach((cell) => cell.remove());
    selected = position;
    cells.forEach((cell, i) => {
      const sign = tokenizer.sign(tokens[i]).replace(/^…/, ""), shade = shades[i]; // pieces of a word touch each other
      const strong = kind === "weight" && shade > 0.5;
      if (cell.textContent !== sign) cell.textContent = sign;
      cell.classList.toggle("start", tokenizer.startsWord(tokens[i]));
      cell.classList.toggle("strong", strong);
      cell.style.setProperty("--part", `${strong ? DARK + 2 * (100 - DARK) * (shade - 0.5) : LIGHT * Math.min(1, kind === "weight" ? 2 * shade : shade)}%`);
      cell.setAttribute("aria-selected", `${i === position}`);
      cell.setAttribute("aria-label", `${tokenizer.name(tokens[i])}${describe(i)}`);
    });
    node.setAttribute("aria-activedescendant", `${id}-${position}`);
  }
  return { node, draw };
}
