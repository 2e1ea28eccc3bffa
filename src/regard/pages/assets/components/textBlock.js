// A text whose tokens are buttons in running lines. A long text is shown a part at a time, with a strip of the whole.
import { el, tokenElement, whenPointedAt } from "./dom.js";
import { formatCount, formatNumber } from "./format.js";

export const PART = 1000; // tokens that are shown at a time
const MARKER = /^[Ġ▁ ]/; // at the start of a word
const NEWLINE = /^(Ċ|\\n|↵)+$/; // a token that only ends a line

// How a token is written in running text: [whether a space comes before it, its text].
function createWriter(names) {
  const marked = names.some((name) => MARKER.test(name));
  return (name, i) => {
    if (marked) return MARKER.test(name) ? [i > 0, name.replace(MARKER, "") || "·"] : [false, name];
    return name.startsWith("##") && name.length > 2 ? [false, name.slice(2)] : [i > 0, name];
  };
}

// `onSelect(position)` is called when a token is clicked, `onPoint(position)` when it is pointed at or focused.
// `decorate(button, position)`, if given, sets the colour and the label of a token in place of its weight.
export function createTextBlock({ names, label, onSelect, onPoint, decorate = null }) {
  const write = createWriter(names), parts = Math.ceil(names.length / PART);
  const lines = el("p", { class: "running", role: "group", "aria-label": `${label}: arrow keys move, Enter selects a token` });
  const range = el("span", { class: "soft", role: "status" });
  const strip = el("canvas", { class: "strip", "aria-hidden": "true", height: "18" }); // the list of largest weights says the same
  const turn = (by, text, title) => el("button", { type: "button", "aria-label": title, title, onclick: () => showPart(part + by) }, text);
  const [back, forward] = [turn(-1, "‹", "Previous part of the text"), turn(1, "›", "Next part of the text")];
  const node = el("section", { class: "text-block", "aria-label": label },
    parts > 1 ? [el("div", { class: "text-tools" }, back, forward, range), strip] : [], lines);
  let part = -1, buttons = [], weights = null, offset = 0, selected = null, top = 0;

  const weightAt = (position) => (weights && position >= offset && position - offset < weights.length ? weights[position - offset] : null);

  function createButton(name, position) {
    const [space, text] = write(name, position), ends = NEWLINE.test(name);
    const button = el("button", { type: "button", class: "word", tabindex: "-1", "aria-pressed": "false",
      onclick: () => onSelect(position), onpointerenter: whenPointedAt(() => onPoint(position)), onfocus: () => onFocus(button, position) },
    tokenElement(ends ? "↵" : text));
    return [button, [space ? " " : el("wbr"), button, ends ? el("br") : []]];
  }

  function showPart(number) {
    if (number === part) return;
    part = number;
    const start = part * PART, made = names.slice(start, start + PART).map((name, n) => createButton(name, start + n));
    buttons = made.map(([button]) => button);
    lines.replaceChildren(...made.flatMap(([, nodes]) => nodes).flat());
    [back.disabled, forward.disabled] = [part === 0, part === parts - 1];
    range.textContent = `tokens ${formatCount(start)} to ${formatCount(start + buttons.length - 1)} of ${formatCount(names.length)}`;
    buttons[0].tabIndex = 0;
    paint();
  }

  function paint() {
    buttons.forEach((button, n) => {
      const position = part * PART + n, weight = weightAt(position);
      button.style.setProperty("--share", weight > 0 ? Math.sqrt(weight / top) : 0);
      button.setAttribute("aria-pressed", String(position === selected));
      if (decorate) return decorate(button, position);
      const shown = weight === null ? "" : `, weight ${formatNumber(weight)}`;
      button.setAttribute("aria-label", `${names[position]}, token ${position}${shown}`);
      button.title = `${position}${weight === null ? "" : `: ${formatNumber(weight)}`}`;
    });
    if (parts > 1) paintStrip();
  }

  // The whole text: each pixel shows the largest of its weights.
  function paintStrip() {
    const width = Math.max(1, Math.round(strip.clientWidth * (devicePixelRatio || 1))), { height } = strip;
    strip.width = width;
    const context = strip.getContext("2d"), style = getComputedStyle(strip), per = names.length / width;
    const largest = new Float64Array(width);
    if (weights) weights.forEach((weight, n) => {
      const x = Math.min(width - 1, Math.floor((n + offset) / per));
      largest[x] = Math.max(largest[x], weight);
    });
    context.fillStyle = style.getPropertyValue("--heat");
    largest.forEach((weight, x) => {
      context.globalAlpha = top ? Math.sqrt(weight / top) : 0;
      context.fillRect(x, 0, 1, height);
    });
    context.globalAlpha = 1;
    context.strokeStyle = style.getPropertyValue("--mark");
    context.lineWidth = 2;
    context.strokeRect((part * PART) / per, 1, Math.min(PART, names.length - part * PART) / per, height - 2);
  }

  strip.addEventListener("click", (event) => {
    const position = Math.floor((event.offsetX / strip.clientWidth) * names.length);
    showPart(Math.min(Math.max(Math.floor(position / PART), 0), parts - 1));
  });
  if (parts > 1) new ResizeObserver(paintStrip).observe(node);

  function onFocus(button, position) {
    for (const other of buttons) other.tabIndex = other === button ? 0 : -1;
    if (button.matches(":focus-visible")) onPoint(position);
  }

  // The token above or below.
  function neighbour(n, step) {
    const here = buttons[n].getBoundingClientRect(), middle = here.left + here.width / 2;
    let best = n, bestDown = Infinity, bestAcross = Infinity;
    for (let m = n + step; m >= 0 && m < buttons.length; m += step) {
      const there = buttons[m].getBoundingClientRect(), down = step * (there.top - here.top), across = Math.abs(there.left + there.width / 2 - middle);
      if (down < 2) continue;
      if (down > bestDown + 2) break; // a line further
      if (across < bestAcross) [best, bestDown, bestAcross] = [m, down, across];
    }
    return best;
  }

  lines.addEventListener("keydown", (event) => {
    const n = buttons.indexOf(event.target);
    if (n < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const position = part * PART + n, start = part * PART;
    const target = {
      ArrowLeft: () => position - 1, ArrowRight: () => position + 1, ArrowUp: () => start + neighbour(n, -1), ArrowDown: () => start + neighbour(n, 1),
      Home: () => start, End: () => start + buttons.length - 1, PageUp: () => position - PART, PageDown: () => position + PART,
    }[event.key];
    if (!target) return;
    event.preventDefault();
    goTo(Math.min(Math.max(target(), 0), names.length - 1));
  });

  function goTo(position, focus = true) {
    showPart(Math.floor(position / PART));
    const button = buttons[position - part * PART];
    for (const other of buttons) other.tabIndex = other === button ? 0 : -1;
    if (focus) button.focus();
  }

  // Weights of the tokens from position `newOffset` on, or null.
  function color(newWeights, newOffset = 0) {
    [weights, offset] = [newWeights, newOffset];
    top = weights ? weights.reduce((a, b) => (b > a ? b : a), 0) : 0;
    paint();
  }

  function select(position) {
    selected = position;
    paint();
  }

  showPart(0);
  return { node, color, select, goTo, repaint: paint };
}
