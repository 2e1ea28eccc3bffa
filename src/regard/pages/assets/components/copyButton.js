// A button that copies a text. Frames have no right to use the clipboard directly, so the text is copied by selection,
// which a click may always do.
import { el } from "./dom.js";

const SHOWN = 2000; // milliseconds

// `text()` is the text to copy, and `announce` is called with what a screen reader should say.
export function createCopyButton(label, text, announce) {
  const button = el("button", { type: "button", class: "copy" }, label);
  let timer = 0;
  button.addEventListener("click", () => {
    button.textContent = copyText(text()) ? "Copied" : "Not copied: select the lines";
    announce(button.textContent);
    clearTimeout(timer);
    timer = setTimeout(() => (button.textContent = label), SHOWN);
  });
  return button;
}

function copyText(text) {
  const focused = document.activeElement;
  const area = el("textarea", { class: "visually-hidden", readonly: true, "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus({ preventScroll: true });
  return done;
}
