// What the model is, how it was trained, and how well it predicts text that it has not seen.
import { el } from "../components/dom.js";
import { formatCount } from "../components/format.js";

const METHODS = [["this model", "model"], ["counting the letters after the last five", "counting"], ["zlib, as in a .zip file", "zlib"]];

// A table of bits per byte with bars: 8 bits are a guess without any knowledge.
function bitsTable(bits) {
  const rows = [...METHODS.map(([name, key]) => [name, bits[key]]), ["guessing blindly", 8]];
  return el("table", { id: "bits" }, el("caption", {}, "Bits per byte of stories that were not in the training text; fewer is better"), el("tbody", {}, rows.map(([name, value]) => {
    const fill = el("span", { class: "fill" });
    fill.style.width = `${(100 * value) / 8}%`;
    return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "result" }, value.toFixed(2)), el("td", { class: "bars" }, el("span", { class: "bar", "aria-hidden": "true" }, fill)));
  })));
}

export function modelFacts({ config, parameters, training, bits }) {
  const { layers, heads, width, hidden } = config, read = training.steps * training.batch * training.context;
  const facts = [
    ["model", `${layers} layers of ${heads} heads and an MLP of ${hidden}, ${width} numbers for each token, ${formatCount(parameters)} parameters`],
    ["reads", `tokens: ${formatCount(config.vocabulary)} words and pieces of words; at most ${config.context} of them at a time`],
    ["training text", `${training.text.name}, ${(training.text.train_bytes / 1e6).toFixed(2)} MB; the model read ${(read / 1e6).toFixed(1)} million tokens in ${formatCount(training.steps)} steps`],
    ["numbers", "weights are stored as int8 with a factor for each row, and converted to float64; probabilities agree with PyTorch’s to 0.00001"],
  ];
  return el("section", { class: "card", id: "about", "aria-labelledby": "about-heading" }, el("h2", { id: "about-heading" }, "How good is it?"),
    el("p", { class: "caption" }, "It writes short simple stories and soon loses the thread. Larger models of the same kind, trained on far more text, lose it later."),
    bitsTable(bits), el("dl", {}, facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
}
