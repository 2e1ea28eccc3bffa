// A recorded run, gone through line by line. Nothing is computed here: every value was written down as it was.
import { el, header, record, token } from "./dom.js";
import { kindOf, shown, spoken } from "./values.js";

const WORDS =
  /(#.*$)|([rbf]?"[^"]*"|[rbf]?'[^']*')|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False)\b/g;

const data = record();
const steps = unfolded(data.steps.map(([kind, place, line, frame, depth, changed, produced, rounds, result, says]) => {
  const { name, notes, ends, place: listed } = data.functions[place];
  const note = notes[line], end = ends[line] || line;
  return { kind, name, note, line, end, place: listed, frame, depth, changed, produced, rounds, result, says };
}));
let at = 0;

// For each step what the frame holds and which calls are open, told by the steps before it.
function unfolded(list) {
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

function coloured(text) {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(WORDS)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : "word";
    parts.push(text.slice(from, match.index), el("span", { class: kind }, match[0]));
    from = match.index + match[0].length;
  }
  return [...parts, text.slice(from)];
}

const lines = data.listings.map(([, texts]) =>
  new Map(texts.map(([line, text]) => [
    line,
    el("li", { class: "line" }, el("span", { class: "no" }, `${line}`), el("code", {}, coloured(text))),
  ])),
);
const listing = el("div", { id: "listing", class: "card listing", tabindex: "0", role: "region", "aria-label": "Source" },
  lines.map((each, i) => [
    el("h2", { class: "function" }, token(data.listings[i][0])),
    el("ol", { class: "lines" }, [...each.values()]),
  ]),
);
let marked = [];

// The lines of the step, with the mark on them, in the middle of the box.
function mark(step) {
  for (const line of marked) {
    line.classList.remove("now", "raised");
    line.removeAttribute("aria-current");
  }
  marked = [];
  for (let i = step.line; i <= step.end; i++) {
    if (lines[step.place].has(i)) marked.push(lines[step.place].get(i));
  }
  for (const line of marked) {
    line.classList.add("now");
    line.classList.toggle("raised", step.kind === "raise");
  }
  if (!marked.length) return;
  marked[0].setAttribute("aria-current", "step");
  const top = marked[0].offsetTop, bottom = marked.at(-1).offsetTop, height = listing.clientHeight;
  if (top < listing.scrollTop + 40 || bottom > listing.scrollTop + height - 60) listing.scrollTop = top - height / 3;
}

// What is marked, without its indentation and comments.
function statement() {
  const texts = marked.map((line) =>
    [...line.lastChild.childNodes].filter((part) => part.className !== "comment").map((part) => part.textContent).join(""),
  ).filter((text) => text.trim());
  const indent = Math.min(...texts.map((text) => text.search(/\S/)));
  return texts.map((text) => text.slice(indent).trimEnd());
}

// -- What is told of the step --

const where = el("p", { id: "where" });
const told = el("section", { id: "told", class: "card told", tabindex: "0", "aria-label": "What this line did" });
const announced = el("p", { class: "visually-hidden", role: "status" });

const called = (step) => step.name.split(".").at(-1);

// "i = 2 (3 of 5)" for each loop around the line.
function round([run, time], step) {
  const [names, total] = data.loops[run];
  const values = names.filter((name) => step.now.has(name)).map((name) => `${name} = ${spoken(data.values[step.now.get(name)])}`);
  return el("span", { class: "round" }, `${values.join(", ") || "while"} `, el("span", { class: "soft" }, `${time} of ${total}`));
}

function happened(step, next) {
  if (step.kind === "enter") return `${called(step)} is called`;
  if (step.kind === "call") return next ? `calls ${called(next)}` : "calls";
  if (step.kind === "raise") return `raises ${step.says}`;
  if (step.kind === "yield") return "yields";
  if (step.kind === "return") return "returns";
  const goesOn = step.produced.length === 0 && next && next.frame === step.frame;
  return goesOn ? `goes on at line ${next.line}` : "";
}

function variable(name, step, fresh) {
  const value = data.values[step.now.get(name)], before = step.before.get(name);
  const short = value.cells || value.parts ? "" : " short";
  return el("div", { class: `variable${fresh ? " fresh" : ""}${short}` },
    el("p", { class: "title" }, el("strong", {}, token(name)), " ", el("span", { class: "kind" }, kindOf(value))),
    shown(value, fresh && before !== undefined ? data.values[before] : null));
}

function draw() {
  const step = steps[at], says = happened(step, steps[at + 1]);
  mark(step);
  where.replaceChildren(
    ...step.open.map((call, i) => [i ? " › " : "", el("span", { class: "call" }, token(called(call)))]).flat(),
    ...step.rounds.map((each) => [" › ", round(each, step)]).flat(),
  );
  const size = (name) => (({ cells, parts }) => (parts ? 2 : cells ? 1 : 0))(data.values[step.now.get(name)]);
  const names = [...step.now.keys()].sort((a, b) => size(a) - size(b)); // the smallest first, in few lines
  const [fresh, others] = [true, false].map((isNew) => names.filter((name) => step.produced.includes(name) === isNew));
  const result = step.result === null ? [] : el("div", { class: "variable fresh", id: "result" },
    el("p", { class: "title" }, el("strong", {}, says), " ", el("span", { class: "kind" }, kindOf(data.values[step.result]))),
    shown(data.values[step.result]));
  told.replaceChildren(
    ...[
      el("h2", {}, `Line ${step.line}`),
      el("p", { id: "source" }, statement().map((text) => el("code", {}, text))),
      step.note ? el("p", { id: "note" }, token(step.note)) : [],
      says && step.result === null ? el("p", { id: "says", class: step.kind === "raise" ? "raised" : "" }, token(says)) : [],
      result,
      fresh.map((name) => variable(name, step, true)),
      others.length ? el("h3", {}, "As before") : [],
      el("div", { class: "others" }, others.map((name) => variable(name, step, false))),
      at === steps.length - 1 && data.cut ? el("p", { id: "cut" }, data.cut) : [],
    ].flat(),
  );
  const news = step.produced.map((name) => `${name} ${spoken(data.values[step.now.get(name)])}`);
  const returned = step.result === null ? [] : [`returns ${spoken(data.values[step.result])}`];
  announced.textContent = [`Line ${step.line}`, ...(step.result === null && says ? [says] : []), ...returned, ...news].join("; ");
  slider.value = at;
  slider.setAttribute("aria-valuetext", `step ${at + 1} of ${steps.length}, line ${step.line}`);
  count.textContent = `step ${at + 1} of ${steps.length}`;
  back.disabled = at === 0;
  next.disabled = at === steps.length - 1;
  over.disabled = overTo() === null;
  again.disabled = againTo() === null;
}

// -- Moving --

function go(to) {
  if (to === null) return;
  at = Math.min(Math.max(to, 0), steps.length - 1);
  draw();
}

function after(fits) {
  const to = steps.findIndex((step, i) => i > at && fits(step));
  return to < 0 ? null : to;
}

// Past what is called from here, or out of this call where nothing is.
const overTo = () => after((step) => step.depth <= steps[at].depth);

// The same loop, the next time round; or the first line after it.
function againTo() {
  const innermost = steps[at].rounds.at(-1);
  if (!innermost) return null;
  return after((step) => {
    const same = step.rounds.find(([run]) => run === innermost[0]);
    return step.frame === steps[at].frame && (!same || same[1] > innermost[1]);
  });
}

function button(id, text, to, kind = "") {
  return el("button", { type: "button", id, class: kind, onclick: () => go(to()) }, text);
}
const back = button("back", "← Back", () => at - 1);
const next = button("next", "Next →", () => at + 1, "primary");
const over = button("over", "Step over", overTo);
const again = button("again", "Next round", againTo);
const count = el("span", { id: "count", class: "soft" });
const slider = el("input", {
  type: "range", id: "step", min: "0", max: `${steps.length - 1}`, value: "0", "aria-label": "Step",
  oninput: () => go(Number(slider.value)),
});

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const box = event.target.closest(".card");
  if (event.target === slider || (box && box.scrollWidth > box.clientWidth)) return; // there they have their own work
  event.preventDefault();
  go(at + by);
});

document.getElementById("app").classList.add("wide");
document.getElementById("app").append(
  header("Line by line", el("span", {}, "A run of ", token(data.name), ". Step with the buttons, the slider, or ← and →.")),
  el("div", { class: "walk" },
    el("div", { class: "controls" }, back, next, over, again, count),
    slider, where),
  el("div", { class: "columns" }, listing, told),
  announced,
);
draw();
