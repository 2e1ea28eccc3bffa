// Code, line by line, with what each line is for and the values of a recorded run. Nothing is computed here: every value
// was recorded.
import { bringIntoView } from "../components/bringIntoView.js";
import { checkbox } from "../components/controls.js";
import { createCopyButton } from "../components/copyButton.js";
import { el, pageHeader, readRecord, tokenElement } from "../components/dom.js";
import { createSourceListing } from "../components/sourceListing.js";
import { createTabs } from "../components/tabs.js";
import { describeType, describeValue, valueElement } from "../components/valueView.js";

const data = readRecord();
const hasTabs = data.tabs.length > 1;
const state = { tab: 0, run: 0, at: 0, picked: null }; // `picked` is a selected line that has no step, [listing, line]
let run, steps, listing; // of the shown tab

// Add to each step the variables of its frame and the open calls, which follow from the steps before it.
function expandSteps({ steps: records, functions }) {
  const frames = new Map(), open = [];
  return records.map(([kind, functionIndex, line, frame, depth, changed, produced, iterations, result, message]) => {
    const { name, notes, ends, place } = functions[functionIndex];
    const before = frames.get(frame) || new Map(), now = new Map(before);
    for (const [variable, value] of Object.entries(changed)) {
      if (value === null) now.delete(variable);
      else now.set(variable, value);
    }
    frames.set(frame, now);
    const step = { kind, name, note: notes[line], line, end: ends[line] || line, listing: place, frame, depth, produced, iterations, result, message, before, now };
    open.length = depth;
    open.push(step);
    return { ...step, open: [...open] };
  });
}

// The indices of the steps of a line. A line that calls a function has a step before the call, which has no result yet.
function stepsOfLine(place, line) {
  const own = steps.map((step, i) => [step, i]).filter(([step]) => step.listing === place && step.line <= line && line <= step.end);
  const complete = own.filter(([step]) => step.kind !== "call");
  return (complete.length ? complete : own).map(([, i]) => i);
}

function noteOfLine(place, line) {
  const [, texts] = run.listings[place];
  const own = texts.find(([number]) => number === line)?.[2];
  return own || run.functions.filter((it) => it.place === place).map((it) => it.notes[line]).find(Boolean);
}

// -- Details of the step, or of the selected line --

const where = el("p", { id: "where" });
const details = el("section", { id: "details", class: "card step-details", tabindex: "0", "aria-label": "Details of this line" });
const announcement = el("p", { class: "visually-hidden", role: "status" });

const functionName = (step) => step.name.split(".").at(-1);

// "i = 2 3 of 5" for a loop around the line.
function iterationElement([loop, count], step) {
  const [names, total] = run.loops[loop];
  const values = names.filter((name) => step.now.has(name)).map((name) => `${name} = ${describeValue(run.values[step.now.get(name)])}`);
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
  const value = run.values[step.now.get(name)], before = step.before.get(name);
  const short = value.cells || value.parts ? "" : " short";
  return el("div", { class: `variable${isNew ? " fresh" : ""}${short}` },
    el("p", { class: "title" }, el("strong", {}, tokenElement(name)), " ", el("span", { class: "kind" }, describeType(value))),
    valueElement(value, isNew && before !== undefined ? run.values[before] : null, data.tokens));
}

function lineHeader(line, note) {
  return [
    el("h2", {}, `Line ${line}`),
    el("p", { id: "source" }, listing.statement().map((text) => el("code", {}, text))),
    note ? el("p", { id: "note" }, tokenElement(note)) : [],
  ].flat();
}

function drawPicked([place, line]) {
  listing.highlight(place, line, line);
  where.replaceChildren();
  const isBody = /^\s/.test(run.listings[place][1].find(([number]) => number === line)[1]);
  const notRun = isBody && steps.length ? "This line did not run this time." : "";
  details.replaceChildren(...lineHeader(line, noteOfLine(place, line)), ...(notRun ? [el("p", { id: "event" }, notRun)] : []));
  announcement.textContent = [`Line ${line}`, noteOfLine(place, line), notRun].filter(Boolean).join(". ");
}

function drawStep(step) {
  const event = describeStep(step, steps[state.at + 1]);
  listing.highlight(step.listing, step.line, step.end, step.kind === "raise");
  where.replaceChildren(
    ...step.open.map((call, i) => [i ? " › " : "", el("span", { class: "call" }, tokenElement(functionName(call)))]).flat(),
    ...step.iterations.map((iteration) => [" › ", iterationElement(iteration, step)]).flat(),
  );
  const size = (name) => (({ cells, parts }) => (parts ? 2 : cells ? 1 : 0))(run.values[step.now.get(name)]);
  const names = [...step.now.keys()].sort((a, b) => size(a) - size(b)); // the smallest first
  const [fresh, others] = [true, false].map((isNew) => names.filter((name) => step.produced.includes(name) === isNew));
  const result = step.result === null ? [] : el("div", { class: "variable fresh", id: "result" },
    el("p", { class: "title" }, el("strong", {}, event), " ", el("span", { class: "kind" }, describeType(run.values[step.result]))),
    valueElement(run.values[step.result], null, data.tokens));
  const visits = stepsOfLine(step.listing, step.line);
  details.replaceChildren(
    ...lineHeader(step.line, step.note),
    ...[
      event && step.result === null ? el("p", { id: "event", class: step.kind === "raise" ? "raised" : "" }, tokenElement(event)) : [],
      visits.length > 1 && visits.includes(state.at)
        ? el("p", { class: "kind", id: "visits" }, `Time ${visits.indexOf(state.at) + 1} of ${visits.length} on this line; click the line for the next.`) : [],
      result,
      fresh.map((name) => variableElement(name, step, true)),
      others.length ? el("h3", {}, "Unchanged") : [],
      el("div", { class: "others" }, others.map((name) => variableElement(name, step, false))),
      state.at === steps.length - 1 && run.truncated ? el("p", { id: "truncated" }, run.truncated) : [],
    ].flat(),
  );
  const changes = step.produced.map((name) => `${name} ${describeValue(run.values[step.now.get(name)])}`);
  const returned = step.result === null ? [] : [`returns ${describeValue(run.values[step.result])}`];
  announcement.textContent = [`Line ${step.line}`, ...(step.result === null && event ? [event] : []), ...returned, ...changes].join("; ");
}

function draw() {
  if (state.picked) drawPicked(state.picked);
  else drawStep(steps[state.at]);
  stepper.hidden = steps.length === 0;
  if (!steps.length) return;
  slider.value = state.at;
  slider.setAttribute("aria-valuetext", `step ${state.at + 1} of ${steps.length}, line ${steps[state.at].line}`);
  count.textContent = `step ${state.at + 1} of ${steps.length}`;
  back.disabled = state.at === 0;
  next.disabled = state.at === steps.length - 1;
  stepOver.disabled = stepOverTarget() === null;
  nextIteration.disabled = nextIterationTarget() === null;
  nextIteration.hidden = run.loops.length === 0;
}

// -- Moving --

// Draw, and scroll to what the line did, with as much of the line and the buttons around it as fits.
function drawAndShow() {
  draw();
  bringIntoView(details.querySelector(".fresh, #event") ?? details.firstChild, details.firstChild, listing.node, stepper);
}

function go(target) {
  if (target === null || !steps.length) return;
  state.at = Math.min(Math.max(target, 0), steps.length - 1);
  state.picked = null;
  drawAndShow();
}

// Go to the next time that a line runs, or back to the first.
function selectLine(place, line) {
  const visits = stepsOfLine(place, line);
  if (!visits.length) {
    state.picked = [place, line];
    drawAndShow();
    return;
  }
  const isShown = !state.picked && visits.includes(state.at);
  go(visits.find((i) => (isShown ? i > state.at : i >= state.at)) ?? visits[0]);
}

// The index of the next step that satisfies a condition, or null.
function findNext(condition) {
  const index = steps.findIndex((step, i) => i > state.at && condition(step));
  return index < 0 ? null : index;
}

// After the call made here, or after this call if there is none.
const stepOverTarget = () => findNext((step) => step.depth <= steps[state.at].depth);

// The next iteration of the innermost loop, or the first line after it.
function nextIterationTarget() {
  const innermost = steps[state.at].iterations.at(-1);
  if (!innermost) return null;
  return findNext((step) => {
    const same = step.iterations.find(([loop]) => loop === innermost[0]);
    return step.frame === steps[state.at].frame && (!same || same[1] > innermost[1]);
  });
}

function button(id, text, target, kind = "") {
  return el("button", { type: "button", id, class: kind, onclick: () => go(target()) }, text);
}
const back = button("back", "← Back", () => state.at - 1);
const next = button("next", "Next →", () => state.at + 1, "primary");
const stepOver = button("step-over", "Step over", stepOverTarget);
const nextIteration = button("next-iteration", "Next iteration", nextIterationTarget);
const count = el("span", { id: "count", class: "soft" });
const slider = el("input", {
  type: "range", id: "step", min: "0", value: "0", "aria-label": "Step",
  oninput: () => go(Number(slider.value)),
});

document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const box = event.target.closest(".card");
  if (event.target === slider || (box && box.scrollWidth > box.clientWidth)) return; // the arrow keys move the slider, or scroll
  event.preventDefault();
  go(state.at + by);
});

// -- The page --

const listingBox = el("div");
const about = el("p", { id: "about" });
const runSwitch = el("div", { class: "switches" });
const stepper = el("div", { class: "stepper stays-on-top" },
  el("div", { class: "controls" }, back, next, stepOver, nextIteration, count, runSwitch),
  slider, where);
const listingColumn = el("div", { class: "listing-column" }, listingBox, createCopyButton("Copy code", () => listing.text, (said) => (announcement.textContent = said)));
const panel = el("div", { id: "walk" }, about, stepper, el("div", { class: "columns" }, listingColumn, details));

// Show a run of a tab. A tab starts at the line that it is about; another run of it stays at the line that was selected.
function show(tabIndex, runIndex, isNewTab) {
  const tab = data.tabs[tabIndex];
  const line = state.picked ?? (steps?.length ? [steps[state.at].listing, steps[state.at].line] : null);
  Object.assign(state, { tab: tabIndex, run: runIndex, at: 0, picked: null });
  run = tab.runs[runIndex];
  steps = expandSteps(run);
  listing = createSourceListing(run.listings, (place, number) => noteOfLine(place, number) || stepsOfLine(place, number).length, selectLine);
  listingBox.replaceChildren(listing.node);
  about.textContent = tab.about;
  about.hidden = !tab.about;
  slider.max = `${Math.max(steps.length - 1, 0)}`;
  if (!isNewTab && line) selectLine(...line);
  else if (tab.start) selectLine(0, tab.start);
  else draw();
}

function showTab(index) {
  const { runs } = data.tabs[index];
  runSwitch.replaceChildren(...(runs.length > 1 ? [checkbox(runs[1].name, "run", false, (checked) => show(index, Number(checked), false))] : []));
  show(index, 0, true);
}

const tabs = createTabs("Versions of the code", data.tabs.map((tab) => tab.name), panel, showTab);
const lead = hasTabs
  ? "All of attention fits on one page. Click a line to see what it does and which numbers it computed, or step with ← and →."
  : el("span", {}, "A run of ", tokenElement(data.tabs[0].name), ". Click a line, or step with the buttons, the slider, or ← and →.");
document.getElementById("app").classList.add("wide");
document.getElementById("app").append(
  pageHeader(hasTabs ? "Attention, line by line" : "Line by line", lead),
  ...(hasTabs ? [tabs.node] : []),
  panel,
  ...(data.agreement ? [el("p", { id: "agreement", class: "soft" }, data.agreement)] : []),
  announcement,
);
if (hasTabs) tabs.select(0);
else showTab(0);
