// The results of a class: students × exercises, the hints of one answer, common hints, and what was not checked.
import { bringIntoView } from "../components/bringIntoView.js";
import { el, pageHeader, readRecord, scrollBox, tokenElement } from "../components/dom.js";
import { formatCount } from "../components/format.js";

const data = readRecord();
const cells = new Map(data.cells.map((cell) => [JSON.stringify([cell.student, cell.exercise]), cell]));
const maximum = data.exercises.reduce((sum, { points }) => sum + points, 0);
const details = el("div", { id: "details", class: "card", role: "status" });
const detailsRow = el("tr", {}, el("td", { colspan: data.exercises.length + 2 }, details));
let opened = null;

function open(button, cell) {
  opened?.setAttribute("aria-expanded", "false");
  opened = button === opened ? null : button;
  if (opened === null) {
    detailsRow.remove();
    return;
  }
  button.closest("tr").after(detailsRow);
  button.setAttribute("aria-expanded", "true");
  const { points, title } = data.exercises.find(({ n }) => n === cell.exercise);
  details.replaceChildren(
    el("h2", {}, tokenElement(cell.student)),
    el("p", {}, `${title}. ${cell.points} of ${points} points, from `, tokenElement(cell.file),
      cell.files > 1 ? ` (the best of ${cell.files} files)` : "", cell.late ? el("span", { class: "late" }, ", late") : "", "."),
    cell.hints.length ? el("ul", {}, cell.hints.map((hint) => el("li", {}, tokenElement(hint)))) : el("p", {}, "Everything is correct."));
  bringIntoView(details, button);
}

function drawCell(student, { n }) {
  const cell = cells.get(JSON.stringify([student.name, n]));
  if (!cell) return el("td", {}, "–");
  const label = `${student.name}, exercise ${n}: ${cell.summary}${cell.late ? ", late" : ""}`;
  const button = el("button", { class: `cell ${cell.status.replace(" ", "-")}`, "aria-expanded": "false", "aria-label": label, onclick: () => open(button, cell) },
    cell.summary, cell.late ? el("span", { class: "late" }, " late") : "");
  return el("td", {}, button);
}

function drawTable(id, label, columns, rows) {
  return scrollBox(label, el("table", { id }, el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col", class: name.startsWith("points") ? "number" : null }, name)))), el("tbody", {}, rows)));
}

function drawSection(title, ...children) {
  return el("section", {}, el("h2", {}, title), children);
}

function drawNames(title, text, names) {
  return names.length ? drawSection(title, el("p", {}, text), el("ul", {}, names.map((name) => el("li", {}, tokenElement(name))))) : [];
}

const rows = data.students.map((student) => el("tr", {},
  el("th", { scope: "row" }, tokenElement(student.name)),
  data.exercises.map((exercise) => drawCell(student, exercise)),
  el("td", { class: "number" }, String(student.points))));

document.getElementById("app").append(
  pageHeader(data.title, `${formatCount(data.students.length, "student")}, ${formatCount(data.cells.length, "answer")}. Select a result to see its hints.`),
  drawTable("results", "Results", ["student", ...data.exercises.map(({ n }) => `exercise ${n}`), `points of ${maximum}`], rows),
  data.hints.length ? drawSection("The most common hints",
    drawTable("hints", "Hints", ["students", "exercise", "hint"], data.hints.map((row) => el("tr", {}, row.map((cell) => el("td", {}, typeof cell === "string" ? tokenElement(cell) : String(cell))))))) : [],
  drawNames("No file", "These students are in the roster, but submitted no file.", data.absent),
  drawNames("Not in the roster", "These names have files, but are not in the roster.", data.strangers),
  data.skipped.length ? drawSection("Files that were not checked",
    drawTable("skipped", "Files that were not checked", ["student", "file", "reason"], data.skipped.map((row) => el("tr", {}, row.map((cell) => el("td", {}, tokenElement(cell))))))) : []);
document.getElementById("app").dataset.ready = "";
