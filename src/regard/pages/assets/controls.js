// What readers move: switches, choices and sliders, and the bar that follows them.
import { el } from "./dom.js";

export function bar(weight) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * (weight || 0)}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

// A weight among others, all with as many digits; the whole number stays with the element.
export function share(weight, tag = "span") {
  const text = weight >= 5e-5 ? weight.toFixed(4) : weight > 0 ? weight.toExponential(1) : Number.isNaN(weight) ? "nan" : "0";
  return el(tag, { class: "much", "data-weight": String(weight) }, text);
}

export function toggle(label, id, checked, changed) {
  const input = el("input", { type: "checkbox", id, checked, onchange: (event) => changed(event.target.checked) });
  return el("label", { class: "switch" }, input, label);
}

// One of several, the first to begin with; `changed` is told its number.
export function choices(name, legend, labels, changed, hidden = false) {
  const chips = labels.map((label, i) => {
    const input = el("input", { type: "radio", name, checked: i === 0, onchange: () => changed(i) });
    return el("label", { class: "chip" }, input, el("span", {}, label));
  });
  return el("fieldset", { class: "chips" }, el("legend", { class: hidden ? "visually-hidden" : null }, legend), chips);
}

// Slides over the places of a list and shows, and says, the text of each. `set` moves it without a call of `changed`.
export function slider(label, id, texts, start, changed) {
  const shown = el("span", { class: "reading", "aria-hidden": "true" }); // a screen reader has the text of the slider
  const input = el("input", { type: "range", id, min: "0", max: `${texts.length - 1}` });
  const set = (place) => {
    input.value = `${place}`;
    input.setAttribute("aria-valuetext", texts[place]);
    shown.textContent = texts[place];
  };
  input.addEventListener("input", () => {
    set(Number(input.value));
    changed(Number(input.value));
  });
  set(start);
  const node = el("div", { class: "slider" }, el("label", { for: id }, label), shown, input);
  return { node, input, set };
}
