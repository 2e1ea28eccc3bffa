// One head of a survey: its behaviour, a histogram of documents by a measure, the documents at both ends, and distances.
import { weightBar } from "./controls.js";
import { el, tokenElement } from "./dom.js";
import { formatCount, formatPercent, formatShort } from "./format.js";

const BIN_NOTES = { entropy: "", distance: "Columns are wider at larger distances." };

export function createHeadCard({ heads, measures, documents }) {
  const node = el("section", { class: "card", id: "head", "aria-label": "One head" });

  // Documents by a measure: a column for each bin from the first to the last that any head uses.
  function histogram(measure, head) {
    const { edges, counts } = measure, bins = edges.length - 1;
    const used = edges.slice(0, -1).map((_, bin) => heads.some(({ index }) => counts[index * bins + bin]));
    const from = Math.max(used.indexOf(true), 0), to = used.lastIndexOf(true) + 1;
    const own = Array.from(counts.subarray(head.index * bins + from, head.index * bins + to)), highest = Math.max(...own);
    const isOpenEnded = measure.name === "entropy" || measure.name === "distance";
    const span = (i) => (isOpenEnded && from + i === bins - 1 ? `${edges[from + i]} or more` : `${edges[from + i]} to ${edges[from + i + 1]}`);
    const columns = own.map((n, i) => {
      const column = el("span", { class: n ? "column" : "column none", title: `${span(i)}: ${n}`, "data-count": String(n) });
      column.style.height = `${highest ? (100 * n) / highest : 0}%`;
      return column;
    });
    const description = own.map((n, i) => (n ? `${span(i)}: ${n}` : "")).filter(Boolean).join("; ");
    return el("figure", { class: "histogram" },
      el("div", { class: "columns", role: "img", "aria-label": `Documents by ${measure.name}. ${description}` }, columns),
      el("div", { class: "ends soft", "aria-hidden": "true" }, el("span", {}, `${edges[from]}`), el("span", {}, `up to ${formatCount(highest, "document")}`), el("span", {}, `${edges[to]}`)),
      el("figcaption", { class: "soft" }, BIN_NOTES[measure.name] ?? "Columns are narrower near 0 and near 1."));
  }

  function documentList(title, end, head) {
    const places = Array.from({ length: end.count }, (_, i) => head.index * end.count + i).filter((i) => end.documents[i] >= 0);
    if (!places.length) return [];
    return [el("h4", {}, title), el("ol", { class: "documents" }, places.map((i) => {
      const [id, label, tokens] = documents[end.documents[i]];
      return el("li", { "data-value": String(end.values[i]) }, el("b", {}, formatShort(end.values[i])), " ", tokenElement(id),
        el("span", { class: "soft" }, label === null ? "" : [" ", tokenElement(label)], ` (${formatCount(tokens, "token")})`));
    }))];
  }

  function distanceTable(head) {
    const { distances } = head;
    if (!distances || Number.isNaN(distances[0])) return [];
    const last = distances.findLastIndex((mass) => mass > 5e-4), from = (i) => (i ? 2 ** (i - 1) : 0);
    const name = (i) => (i < 2 ? `${from(i)}` : i === distances.length - 1 ? `${from(i)} or more` : `${from(i)}–${2 * from(i) - 1}`);
    return [el("h4", {}, "Weight by distance"), el("table", { class: "distances" }, el("thead", { class: "visually-hidden" }, el("tr", {}, ["distance in tokens", "share", ""].map((text) => (text ? el("th", { scope: "col" }, text) : el("td", {}))))),
      el("tbody", {}, Array.from(distances.subarray(0, last + 1), (mass, i) =>
        el("tr", {}, el("th", { scope: "row" }, name(i)), el("td", {}, formatPercent(Math.round(1000 * mass) / 1000)), el("td", { class: "bars" }, weightBar(mass))))))];
  }

  function draw(head, measureIndex) {
    const measure = measures[measureIndex], mean = measure.means[head.index];
    node.replaceChildren(...[
      el("h3", {}, `Layer ${head.layer}, head ${head.head}`),
      el("p", { class: "soft" }, tokenElement(head.module), `, reads key head ${head.kvHead}; `, el("b", {}, head.behaviour ? head.behaviour.name : "")),
      el("h4", {}, "Documents by ", el("span", { class: "name" }, measure.name), `, mean ${formatShort(mean)}`), histogram(measure, head),
      documentList("Largest", measure.ends[0], head), documentList("Smallest", measure.ends[1], head), distanceTable(head),
      el("details", {}, el("summary", {}, "All measures"), el("dl", { class: "all-measures" }, measures.map(({ name, means }) =>
        el("div", {}, el("dt", {}, name), el("dd", {}, formatShort(means[head.index])))))),
    ].flat());
  }

  return { node, draw };
}
