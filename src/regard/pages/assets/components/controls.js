// Switches, choices and sliders, and the bar of a weight.
import { el } from "./dom.js";

export function weightBar(weight) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * (weight || 0)}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

// A weight to four decimals; the exact number is an attribute of the element.
export function weightElement(weight, tag = "span") {
  const text = weight >= 5e-5 ? weight.toFixed(4) : weight > 0 ? weight.toExponential(1) : Number.isNaN(weight) ? "nan" : "0";
  return el(tag, { class: "much", "data-weight": String(weight) }, text);
}

export function checkbox(label, id, checked, onChange) {
  const input = el("input", { type: "checkbox", id, checked, onchange: (event) => onChange(event.target.checked) });
  return el("label", { class: "switch" }, input, label);
}

// Radio buttons, the first one selected; `onChange` gets the index of the selected one.
export function radioGroup(name, legend, labels, onChange, hideLegend = false) {
  const chips = labels.map((label, i) => {
    const input = el("input", { type: "radio", name, checked: i === 0, onchange: () => onChange(i) });
    return el("label", { class: "chip" }, input, el("span", {}, label));
  });
  return el("fieldset", { class: "chips" }, el("legend", { class: hideLegend ? "visually-hidden" : null }, legend), chips);
}

// A slider over the indices of a list, which shows the text of the selected one. `set` moves it without calling `onChange`.
export function slider(label, id, texts, start, onChange) {
  const shown = el("span", { class: "slider-value", "aria-hidden": "true" }); // a screen reader reads the slider's own text
  const input = el("input", { type: "range", id, min: "0", max: `${texts.length - 1}` });
  const set = (index) => {
    input.value = `${index}`;
    input.setAttribute("aria-valuetext", texts[index]);
    shown.textContent = texts[index];
  };
  input.addEventListener("input", () => {
    set(Number(input.value));
    onChange(Number(input.value));
  });
  set(start);
  const node = el("div", { class: "slider" }, el("label", { for: id }, label), shown, input);
  return { node, input, set };
}
