// One head: its map, its lines or the running text, details of the selected cell, its measures and findings.
import { createCellDetails } from "./cellDetails.js";
import { radioGroup } from "./controls.js";
import { el } from "./dom.js";
import { capitalise, formatShort } from "./format.js";
import { headName } from "./headGrid.js";
import { createTextView } from "./textView.js";
import { paintThumbnail } from "./thumbnails.js";
import { createTokenLines } from "./tokenLines.js";
import { createWeightMap } from "./weightMap.js";
import { createStoredSteps } from "./weightSteps.js";

const MAX_LINE_TOKENS = 64; // so that both columns can be read
const LINES_HINT = "Point at a token, or select one with the arrow keys, to see its largest weight and both tokens.";
const TEXT_HINT = "Click a token to colour the text by it. Point at another token, or move to it with the arrow keys, to see the weight between the two.";
export const VIEWS = ["map", "lines", "text"];
const CREATE = {
  map: { create: createWeightMap, options: {} },
  lines: { create: createTokenLines, options: { hint: LINES_HINT } },
  text: { create: createTextView, options: { hint: TEXT_HINT, hasList: false } },
};

export function findingElement(finding, location) {
  return el("div", { class: "finding" },
    el("p", {}, el("span", { class: `flag ${finding.severity}` }, finding.severity), " ", el("b", {}, finding.kind), ". ", finding.message),
    location, finding.evidence ? el("p", { class: "soft" }, finding.evidence) : [], finding.hint ? el("p", {}, finding.hint) : []);
}

// One matrix for all heads, so that the view stays when the head changes: head n is cell n.
function combineMatrices(cells) {
  const methods = ["cell", "explain", "row", "block", "tile", "topKeys", "picture"].map((method) =>
    [method, (n, ...args) => cells[n].matrix()[method](cells[n].pair, ...args)]);
  return Object.fromEntries(methods);
}

// `onBack()`, `onStep(by)` and `onMean()`, between a head and the mean of its layer, are called by the buttons, `onView(state)` when the view, the cell or the map changes.
export function createHeadView({ cells, texts, onBack, onStep, onMean, onView }) {
  const title = el("h2", { tabindex: "-1", id: "which" }), module = el("p", { class: "soft module" });
  const stage = el("div", { class: "stage" }), side = el("div"), about = el("div", { class: "about-head" });
  const stepButton = (by, text, label) => el("button", { type: "button", "aria-label": label, title: label, onclick: () => onStep(by) }, text);
  const meanButton = el("button", { type: "button", id: "mean", onclick: () => onMean() }, "Mean of heads");
  const views = radioGroup("view", "View", VIEWS.map(capitalise), (n) => onView({ view: VIEWS[n] }), true);
  const node = el("section", { id: "head", "aria-labelledby": "which", hidden: true },
    el("div", { class: "headbar" }, el("button", { type: "button", id: "back", onclick: () => onBack() }, "All heads"),
      stepButton(-1, "‹", "Previous head"), stepButton(1, "›", "Next head"), meanButton, el("div", { class: "title" }, title, module), views),
    el("div", { class: "beside" }, stage, el("div", {}, side, about)));
  const matrix = combineMatrices(cells), panels = new Map();
  const steps = createStoredSteps({ explain: (i, j) => matrix.explain(opened.head, i, j), names: () => opened.names });
  let opened = null; // the head whose cell was clicked last, and the names of its queries and keys
  node.append(steps.node);

  node.addEventListener("keydown", (event) => {
    if (event.key === "Escape") onBack();
  });

  // The map, the lines or the text for a shape and its texts, with the cell details: created for the first head that needs them.
  function panelFor(cell, kind, state) {
    const { shape, first, query_text: queryText, key_text: keyText } = cell.layer, shift = first ?? 0;
    const key = JSON.stringify([kind, shape, first, queryText, keyText]);
    if (!panels.has(key)) {
      const queries = texts[queryText]?.slice(shift, shift + shape[0]) ?? null, tokens = texts[keyText]?.slice(0, shape[1]) ?? null;
      const head = cells.indexOf(cell), { create, options } = CREATE[kind];
      const details = createCellDetails({ matrix, head, tokens, queries, goTo: (i, j) => view.goTo(i, j), ...options });
      const onCell = (queryIndex, keyIndex, answer) => {
        details.show(queryIndex, keyIndex, answer);
        onView({ query: queryIndex, key: keyIndex });
      };
      const onOpen = (i, j) => {
        opened = { head: panels.get(key).head, names: { query: (n) => queries?.[n] ?? `query ${n}`, key: (n) => tokens?.[n] ?? `key ${n}` } };
        steps.show(i, j);
      };
      const view = create({ matrix, head, size: shape, tokens, queries, first, overview: cell.overview, view: state, onCell, onView, onOpen });
      panels.set(key, { view, details, head, isNew: true });
    }
    return panels.get(key);
  }

  function measureList(cell) {
    return el("dl", { class: "numbers" }, Object.entries(cell.measures).map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, formatShort(value)))));
  }

  // What is shown of a head whose weights are not in the page.
  function withoutWeights(cell) {
    const [height, width] = cell.thumbnail.size;
    const canvas = el("canvas", { class: "still", width, height, role: "img", "aria-label": "Thumbnail of this head" });
    cell.thumbnail.levels("max").then((levels) => paintThumbnail(canvas, levels));
    const { payload_error: error, module: name } = cell.layer;
    if (cell.isMean) {
      return el("div", {}, el("p", { id: "no-weights" }, "This page has only the thumbnail of this mean, because it does not have the weights of "
        + "all heads of the layer."), canvas);
    }
    const reason = error ? [`A page cannot compute its weights. ${error}`]
      : ["With its weights, the page would be larger than max_bytes. To include them, call ",
        el("code", {}, `recording.page(tokens, layers="${name}", heads=[${cell.head}])`), "."];
    return el("div", {}, el("p", { id: "no-weights" }, "This page has only the thumbnail and the measures of this head. ", reason), canvas);
  }

  // A short text has lines too, and one with tokens can be read; the selected view stays when the head changes. `goTo`: move the
  // map to the cell.
  function show(cell, state, { focus = false, goTo = false } = {}) {
    const { shape, query_text: queryText, key_text: keyText } = cell.layer, { hasWeights } = cell;
    const available = { map: true, lines: hasWeights && Math.max(...shape) <= MAX_LINE_TOKENS,
      text: hasWeights && queryText !== null && keyText !== null };
    steps.hide();
    const kind = available[state.view] ? state.view : "map", inputs = [...views.querySelectorAll("input")];
    title.textContent = capitalise(headName(cell));
    module.textContent = cell.layer.module;
    about.replaceChildren(...(cell.isMean ? [] : [el("h3", {}, "This head"), measureList(cell)]), ...cell.findings.map((finding) => findingElement(finding, [])));
    meanButton.hidden = cell.layer.heads.length === 1;
    meanButton.setAttribute("aria-pressed", String(cell.isMean));
    views.hidden = !available.lines && !available.text;
    inputs.forEach((input, n) => (input.parentNode.hidden = !available[VIEWS[n]]));
    inputs[VIEWS.indexOf(kind)].checked = true;
    if (hasWeights) showWeights(cell, state, kind, goTo);
    else {
      stage.replaceChildren(withoutWeights(cell));
      side.replaceChildren();
    }
    if (focus) title.focus();
  }

  async function showWeights(cell, state, kind, goTo) {
    const head = cells.indexOf(cell), requested = { ...state }; // the map changes the state meanwhile
    const panel = panelFor(cell, kind, requested), { view, details } = panel;
    stage.replaceChildren(view.node);
    side.replaceChildren(details.node);
    const isCurrent = panel.head === head && panel.isNew;
    Object.assign(panel, { head, isNew: false });
    if (!isCurrent) details.setHead(head);
    await (isCurrent ? view.ready : view.setHead(head, cell.overview));
    if (goTo) view.goTo(requested.query, requested.key);
    else view.show(requested);
  }

  return { node, show, repaint: () => panels.forEach(({ view }) => view.repaint?.()) };
}
