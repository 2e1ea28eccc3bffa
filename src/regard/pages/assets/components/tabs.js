// Tabs: one of several panels is shown. Left and Right move between the tabs.
import { el } from "./dom.js";

// `onChange` gets the index of the selected tab. The panel is the element that the page fills.
export function createTabs(label, names, panel, onChange) {
  const tabs = names.map((name, i) =>
    el("button", { type: "button", role: "tab", id: `tab-${i}`, "aria-controls": panel.id, onclick: () => select(i) }, name));
  const node = el("div", { class: "tabs", role: "tablist", "aria-label": label }, tabs);
  node.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    const target = (tabs.indexOf(event.target) + by + tabs.length) % tabs.length;
    tabs[target].focus();
    select(target);
  });

  function select(index) {
    tabs.forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === index));
      tab.tabIndex = i === index ? 0 : -1;
    });
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", `tab-${index}`);
    onChange(index);
  }
  return { node, select };
}
