// Source code with numbered lines that can be selected: a list of lines for each function, one tab stop each. Up, Down,
// Home and End move the selection.
import { el, tokenElement } from "./dom.js";

const SYNTAX =
  /(#.*$)|([rbf]?"[^"]*"|[rbf]?'[^']*')|\b(and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|None|True|False)\b/g;

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

// `listings` are [name, [[line, text, note], …]]; `onSelect` gets the index of a listing and a line number. `explained`
// tells whether a line has something to show; the others cannot be selected.
export function createSourceListing(listings, explained, onSelect) {
  let highlighted = [];
  const lists = listings.map(([name, texts], index) => {
    const lines = new Map();
    const list = el("ol", { class: "lines", role: "listbox", tabindex: "0", "aria-label": name ? `Lines of ${name}` : "Lines of code" });
    for (const [number, text] of texts) {
      const option = el("li", { class: "line", id: `line-${index}-${number}`, role: "option", "aria-selected": "false" },
        el("span", { class: "no", "aria-hidden": "true" }, `${number}`), el("code", {}, highlightSyntax(text)));
      if (!text.trim()) {
        option.classList.add("blank");
        option.removeAttribute("role");
        option.setAttribute("aria-hidden", "true");
        option.removeAttribute("aria-selected");
      }
      if (!text.trim() || !explained(index, number)) option.setAttribute("aria-disabled", "true");
      else option.addEventListener("click", () => onSelect(index, number));
      lines.set(number, option);
    }
    list.append(...lines.values());
    list.addEventListener("keydown", (event) => {
      if (!["ArrowUp", "ArrowDown", "Home", "End"].includes(event.key) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault(); // Firefox would scroll the list
      const numbers = [...lines].filter(([, line]) => !line.hasAttribute("aria-disabled")).map(([number]) => number);
      const current = [...lines].find(([, line]) => line === highlighted[0])?.[0];
      const place = numbers.indexOf(current), last = numbers.length - 1;
      const next = { ArrowUp: place - 1, ArrowDown: place + 1, Home: 0, End: last }[event.key];
      const target = numbers[Math.min(Math.max(next, 0), last)];
      if (target !== undefined && target !== current) onSelect(index, target);
    });
    return { name, list, lines };
  });
  const node = el("div", { id: "listing", class: "card listing", role: "region", "aria-label": "Source" },
    lists.map(({ name, list }) => [name ? el("h2", { class: "function" }, tokenElement(name)) : [], list]));

  // Highlight the lines from `first` to `last`, and scroll to them; `isRaised` marks an exception.
  function highlight(index, first, last, isRaised = false) {
    for (const line of highlighted) {
      line.classList.remove("now", "raised");
      line.removeAttribute("aria-current");
      line.setAttribute("aria-selected", "false");
    }
    const own = lists[index].lines;
    highlighted = [...own].filter(([number]) => number >= first && number <= last).map(([, line]) => line);
    for (const line of highlighted) {
      line.classList.add("now");
      line.classList.toggle("raised", isRaised);
    }
    for (const { list } of lists) list.removeAttribute("aria-activedescendant");
    if (!highlighted.length) return;
    highlighted[0].setAttribute("aria-current", "step");
    highlighted[0].setAttribute("aria-selected", "true");
    lists[index].list.setAttribute("aria-activedescendant", highlighted[0].id);
    const top = highlighted[0].offsetTop, bottom = highlighted.at(-1).offsetTop, height = node.clientHeight;
    if (top < node.scrollTop + 40 || bottom > node.scrollTop + height - 60) node.scrollTop = top - height / 3;
  }

  // The highlighted lines, without indentation and comments.
  function statement() {
    const texts = highlighted.map((line) =>
      [...line.lastChild.childNodes].filter((part) => part.className !== "comment").map((part) => part.textContent).join(""),
    ).filter((text) => text.trim());
    const indent = Math.min(...texts.map((text) => text.search(/\S/)));
    return texts.map((text) => text.slice(indent).trimEnd());
  }

  return { node, highlight, statement, text: listings.map(([, texts]) => texts.map(([, text]) => `${text}\n`).join("")).join("\n\n") };
}
