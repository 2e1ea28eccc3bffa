// Elements without markup: text goes in as text nodes, so that nothing a token holds can become an element.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity));
  return node;
}

export function token(text) {
  return el("bdi", { class: "token" }, text);
}

export function record() {
  return JSON.parse(document.getElementById("record").textContent);
}

// A wide table scrolls in its own box, which the keyboard can reach.
export function scrolling(label, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

export function header(title, subtitle) {
  return el("header", {}, el("h1", {}, title), el("p", { class: "lead" }, subtitle));
}

// In a frame, tell the page around it how tall this one is: it may make room, and does not have to.
if (parent !== window) {
  const tell = () => parent.postMessage({ regardHeight: document.body.offsetHeight }, "*");
  new ResizeObserver(tell).observe(document.body);
}
