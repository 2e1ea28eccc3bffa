// A recorded run, line by line. Nothing is computed here: every value was recorded.
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { describeType, describeValue, valueElement } from "../components/valueView.js";

const SYNTAX =
  /(#.*$)|([rbf]?"[^"]*"|[rbf]?'[^']*')|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False)\b/g;

const data = readRecord();
const steps = expandSteps(data.steps.map(([kind, functionIndex, line, frame, depth, changed, produced, iterations, result, message]) => {
  const { name, notes, ends, place: listing } = data.functions[functionIndex];
  const note = notes[line], end = ends[line] || line;
  return { kind, name, note, line, end, listing, frame, depth, changed, produced, iterations, result, message };
}));
let at = 0;

// Add to each step the variables of its frame and the open calls, which follow from the steps before it.
function expandSteps(list) {
  const frames = new Map(), open = [];
  return list.map((step) => {
    const before = frames.get(step.frame) || new Map(), now = new Map(before);
    for (const [name, value] of Object.entries(step.changed)) {
      if (value === null) now.delete(name);
      else now.set(name, value);
    }
    frames.set(step.frame, now);
    open.length = step.depth;
    open.push(step);
    return { ...step, before, now, open: [...open] };
  });
}

// -- The listing --

function highlightSyntax(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(SYNTAX)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : "word";
    parts.push(text.slice(from, match.index), el("span", { class: kind }, match[0]));
    from = match.index + match[0].length;
  }
  return [...parts, text.slice(from)];
}

const lines = data.listings.map(([, texts]) =>
  new Map(texts.map(([line, text]) => [
    line,
    el("li", { class: "line" }, el("span", { class: "no" }, `${line}`), el("code", {}, highlightSyntax(text))),
  ])),
);
const listing = el("div", { id: "listing", class: "card listing", tabindex: "0", role: "region", "aria-label": "Source" },
  lines.map((own, i) => [
    el("h2", { class: "function" }, tokenElement(data.listings[i][0])),
    el("ol", { class: "lines" }, [...own.values()]),
  ]),
);
let highlighted = [];

// Highlight the lines of the step, and scroll to them.
function highlightLines(step) {
  for (const line of highlighted) {
    line.classList.remove("now", "raised");
    line.removeAttribute("aria-current");
  }
  highlighted = [];
  for (let i = step.line; i <= step.end; i++) {
    if (lines[step.listing].has(i)) highlighted.push(lines[step.listing].get(i));
  }
  for (const line of highlighted) {
    line.classList.add("now");
    line.classList.toggle("raised", step.kind === "raise");
  }
  if (!highlighted.length) return;
  highlighted[0].setAttribute("aria-current", "step");
  const top = highlighted[0].offsetTop, bottom = highlighted.at(-1).offsetTop, height = listing.clientHeight;
  if (top < listing.scrollTop + 40 || bottom > listing.scrollTop + height - 60) listing.scrollTop = top - height / 3;
}

// The highlighted lines, without indentation and comments.
function currentStatement() {
  const texts = highlighted.map((line) =>
    [...line.lastChild.childNodes].filter((part) => part.className !== "comment").map((part) => part.textContent).join(""),
  ).filter((text) => text.trim());
  const indent = Math.min(...texts.map((text) => text.search(/\S/)));
  return texts.map((text) => text.slice(indent).trimEnd());
}

// -- Details of the step --

const where = el("p", { id: "where" });
const details = el("section", { id: "details", class: "card step-details", tabindex: "0", "aria-label": "Details of this line" });
const announcement = el("p", { class: "visually-hidden", role: "status" });

const functionName = (step) => step.name.split(".").at(-1);

// "i = 2 3 of 5" for a loop around the line.
function iterationElement([run, count], step) {
  const [names, total] = data.loops[run];
  const values = names.filter((name) => step.now.has(name)).map((name) => `${name} = ${describeValue(data.values[step.now.get(name)])}`);
  return el("span", { class: "iteration" }, `${values.join(", ") || "while"} `, el("span", { class: "soft" }, `${count} of ${total}`));
}

function describeStep(step, next) {
  if (step.kind === "enter") return `${functionName(step)} is called`;
  if (step.kind === "call") return next ? `calls ${functionName(next)}` : "calls";
  if (step.kind === "raise") return `raises ${step.message}`;
  if (step.kind === "yield") return "yields";
  if (step.kind === "return") return "returns";
  const continues = step.produced.length === 0 && next && next.frame === step.frame;
  return continues ? `continues at line ${next.line}` : "";
}

function variableElement(name, step, isNew) {
  const value = data.values[step.now.get(name)], before = step.before.get(name);
  const short = value.cells || value.parts ? "" : " short";
  return el("div", { class: `variable${isNew ? " fresh" : ""}${short}` },
    el("p", { class: "title" }, el("strong", {}, tokenElement(name)), " ", el("span", { class: "kind" }, describeType(value))),
    valueElement(value, isNew && before !== undefined ? data.values[before] : null));
}

function draw() {
  const step = steps[at], event = describeStep(step, steps[at + 1]);
  highlightLines(step);
  where.replaceChildren(
    ...step.open.map((call, i) => [i ? " › " : "", el("span", { class: "call" }, tokenElement(functionName(call)))]).flat(),
    ...step.iterations.map((iteration) => [" › ", iterationElement(iteration, step)]).flat(),
  );
  const size = (name) => (({ cells, parts }) => (parts ? 2 : cells ? 1 : 0))(data.values[step.now.get(name)]);
  const names = [...step.now.keys()].sort((a, b) => size(a) - size(b)); // the smallest first
  const [fresh, others] = [true, false].map((isNew) => names.filter((name) => step.produced.includes(name) === isNew));
  const result = step.result === null ? [] : el("div", { class: "variable fresh", id: "result" },
    el("p", { class: "title" }, el("strong", {}, event), " ", el("span", { class: "kind" }, describeType(data.values[step.result]))),
    valueElement(data.values[step.result]));
  details.replaceChildren(
    ...[
      el("h2", {}, `Line ${step.line}`),
      el("p", { id: "source" }, currentStatement().map((text) => el("code", {}, text))),
      step.note ? el("p", { id: "note" }, tokenElement(step.note)) : [],
      event && step.result === null ? el("p", { id: "event", class: step.kind === "raise" ? "raised" : "" }, tokenElement(event)) : [],
      result,
      fresh.map((name) => variableElement(name, step, true)),
      others.length ? el("h3", {}, "Unchanged") : [],
      el("div", { class: "others" }, others.map((name) => variableElement(name, step, false))),
      at === steps.length - 1 && data.truncated ? el("p", { id: "truncated" }, data.truncated) : [],
    ].flat(),
  );
  const changes = step.produced.map((name) => `${name} ${describeValue(data.values[step.now.get(name)])}`);
  const returned = step.result === null ? [] : [`returns ${describeValue(data.values[step.result])}`];
  announcement.textContent = [`Line ${step.line}`, ...(step.result === null && event ? [event] : []), ...returned, ...changes].join("; ");
  slider.value = at;
  slider.setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}, line ${step.line}`);
  count.textContent = `step ${at + 1} of ${steps.length}`;
  back.disabled = at === 0;
  next.disabled = at === steps.length - 1;
  stepOver.disabled = stepOverTarget() === null;
  nextIteration.disabled = nextIterationTarget() === null;
}

// -- Moving --

function go(target) {
  if (target === null) return;
  at = Math.min(Math.max(target, 0), steps.length - 1);
  draw();
}

// The index of the next step that satisfies a condition, or null.
function findNext(condition) {
  const index = steps.findIndex((step, i) => i > at && condition(step));
  return index < 0 ? null : index;
}

// After the call made here, or after this call if there is none.
const stepOverTarget = () => findNext((step) => step.depth <= steps[at].depth);

// The next iteration of the innermost loop, or the first line after it.
function nextIterationTarget() {
  const innermost = steps[at].iterations.at(-1);
  if (!innermost) return null;
  return findNext((step) => {
    const same = step.iterations.find(([run]) => run === innermost[0]);
    return step.frame === steps[at].frame && (!same || same[1] > innermost[1]);
  });
}

function button(id, text, target, kind = "") {
  return el("button", { type: "button", id, class: kind, onclick: () => go(target()) }, text);
}
const back = button("back", "← Back", () => at - 1);
const next = button("next", "Next →", () => at + 1, "primary");
const stepOver = button("step-over", "Step over", stepOverTarget);
const nextIteration = button("next-iteration", "Next iteration", nextIterationTarget);
const count = el("span", { id: "count", class: "soft" });
const slider = el("input", {
  type: "range", id: "step", min: "0", max: `${steps.length - 1}`, value: "0", "aria-label": "Step",
  oninput: () => go(Number(slider.value)),
});

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const box = event.target.closest(".card");
  if (event.target === slider || (box && box.scrollWidth > box.clientWidth)) return; // the arrow keys move the slider, or scroll
  event.preventDefault();
  go(at + by);
});

document.getElementById("app").classList.add("wide");
document.getElementById("app").append(
  pageHeader("Line by line", el("span", {}, "A run of ", tokenElement(data.name), ". Step with the buttons, the slider, or ← and →.")),
  el("div", { class: "stepper" },
    el("div", { class: "controls" }, back, next, stepOver, nextIteration, count),
    slider, where),
  el("div", { class: "columns" }, listing, details),
  announcement,
);
draw();
