// One head: what kind it is, how documents spread by a measure, which stand at the ends, and how far it looks.
import { bar } from "./controls.js";
import { el, token } from "./dom.js";
import { brief, counted, percent } from "./figures.js";

const FINER = { entropy: "", distance: "Columns stand for more the farther away." };

export function headCard({ heads, measures, documents }) {
  const node = el("section", { class: "card", id: "head", "aria-label": "One head" });

  // Documents by a measure: a column for each bin from the first to the last that any head needs.
  function histogram(measure, head) {
    const { edges, counts } = measure, bins = edges.length - 1;
    const used = edges.slice(0, -1).map((_, bin) => heads.some((each) => counts[each.at * bins + bin]));
    const from = Math.max(used.indexOf(true), 0), to = used.lastIndexOf(true) + 1;
    const own = Array.from(counts.subarray(head.at * bins + from, head.at * bins + to)), most = Math.max(...own);
    const beyond = measure.name === "entropy" || measure.name === "distance";
    const span = (i) => (beyond && from + i === bins - 1 ? `${edges[from + i]} or more` : `${edges[from + i]} to ${edges[from + i + 1]}`);
    const columns = own.map((n, i) => {
      const column = el("span", { class: n ? "column" : "column none", title: `${span(i)}: ${n}`, "data-count": String(n) });
      column.style.height = `${most ? (100 * n) / most : 0}%`;
      return column;
    });
    const words = own.map((n, i) => (n ? `${span(i)}: ${n}` : "")).filter(Boolean).join("; ");
    return el("figure", { class: "histogram" },
      el("div", { class: "columns", role: "img", "aria-label": `Documents by ${measure.name}. ${words}` }, columns),
      el("div", { class: "ends soft", "aria-hidden": "true" }, el("span", {}, `${edges[from]}`), el("span", {}, `up to ${most.toLocaleString("en")} documents`), el("span", {}, `${edges[to]}`)),
      el("figcaption", { class: "soft" }, FINER[measure.name] ?? "Columns stand for less near 0 and near 1."));
  }

  function listing(title, end, head) {
    const places = Array.from({ length: end.keep }, (_, i) => head.at * end.keep + i).filter((i) => end.documents[i] >= 0);
    if (!places.length) return [];
    return [el("h4", {}, title), el("ol", { class: "documents" }, places.map((i) => {
      const [id, label, tokens] = documents[end.documents[i]];
      return el("li", { "data-value": String(end.values[i]) }, el("b", {}, brief(end.values[i])), " ", token(id),
        el("span", { class: "soft" }, label === null ? "" : [" ", token(label)], ` (${counted(tokens, "token")})`));
    }))];
  }

  function farNode(head) {
    if (!head.far || Number.isNaN(head.far[0])) return [];
    const last = head.far.findLastIndex((mass) => mass > 5e-4), from = (i) => (i ? 2 ** (i - 1) : 0);
    const name = (i) => (i < 2 ? `${from(i)}` : i === head.far.length - 1 ? `${from(i)} or more` : `${from(i)}–${2 * from(i) - 1}`);
    return [el("h4", {}, "How far it looks"), el("table", { class: "far" }, el("thead", { class: "visually-hidden" }, el("tr", {}, ["tokens away", "share", ""].map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
      el("tbody", {}, Array.from(head.far.subarray(0, last + 1), (mass, i) =>
        el("tr", {}, el("th", { scope: "row" }, name(i)), el("td", {}, percent(Math.round(1000 * mass) / 1000)), el("td", { class: "bars" }, bar(mass))))))];
  }

  function draw(head, chosen) {
    const measure = measures[chosen], mean = measure.means[head.at];
    node.replaceChildren(...[
      el("h3", {}, `Layer ${head.layer}, head ${head.head}`),
      el("p", { class: "soft" }, token(head.module), `, reads the keys of head ${head.kv}; `, el("b", {}, head.behaviour ? head.behaviour.name : "")),
      el("h4", {}, "Documents by ", el("span", { class: "name" }, measure.name), `, mean ${brief(mean)}`), histogram(measure, head),
      listing("The largest", measure.ends[0], head), listing("The smallest", measure.ends[1], head), farNode(head),
      el("details", {}, el("summary", {}, "Every measure"), el("dl", { class: "every" }, measures.map((each) => el("div", {}, el("dt", {}, each.name), el("dd", {}, brief(each.means[head.at])))))),
    ].flat());
  }

  // Where the card stands below the atlas, go there.
  function arrive() {
    const box = node.getBoundingClientRect();
    if (box.top > innerHeight - 120 || box.bottom < 120) node.scrollIntoView({ block: "nearest" });
  }
  return { node, draw, arrive };
}
