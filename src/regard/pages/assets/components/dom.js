// Create elements without markup: text is added as text nodes, so that nothing in a token can become an element.

// An attribute named on… is an event listener; true stands for an empty attribute, false and null for none.
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

// A page must not contain an address, and the namespace of SVG is one: take it from a parsed element.
const SVG_NAMESPACE = new DOMParser().parseFromString("<svg>", "text/html").querySelector("svg").namespaceURI;

export function svgElement(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  setAttributes(node, attributes);
  node.append(...children.flat(Infinity));
  return node;
}

export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
}

// Where the pointer last moved, on the screen.
let pointerAt = null;
for (const type of ["pointermove", "pointerdown"]) {
  addEventListener(type, ({ screenX, screenY }) => { pointerAt = [screenX, screenY]; }, { capture: true, passive: true });
}

// A listener of "pointerenter" that ignores a node which scrolls under a resting pointer: the keyboard has moved then.
export function whenPointedAt(handler) {
  return ({ screenX, screenY }) => {
    if (pointerAt?.[0] !== screenX || pointerAt?.[1] !== screenY) handler();
  };
}

export function tokenElement(text) {
  return el("bdi", { class: "token" }, text);
}

// The data of the page.
export function readRecord() {
  return JSON.parse(document.getElementById("record").textContent);
}

// A wide table scrolls in its own box, which the keyboard can reach.
export function scrollBox(label, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

export function pageHeader(title, subtitle) {
  return el("header", {}, el("h1", {}, title), el("p", { class: "lead" }, subtitle));
}

const FRAME_VIEW = 800; // pixels

// A frame may take the height of its page, so a page in a frame must not take its height from the frame.
const isFramed = parent !== window;

// The height of the window of a page around the frame that gives it the height of its content, null without such a page.
let heightAround = null;
export const windowAround = () => heightAround;

// The height of the window that sizes may depend on.
export function viewHeight() {
  return isFramed ? FRAME_VIEW : innerHeight;
}

// In a frame, post the height of the page to the page around it: whenever it changes, and when the page around it asks,
// which may have missed the first messages. The frame may shrink until a reader works in it, so that the text below does
// not move then; another width starts over.
if (isFramed) {
  document.documentElement.classList.add("framed");
  let width = innerWidth, isUsed = false;
  const postHeight = () => {
    if (innerWidth !== width) [width, isUsed] = [innerWidth, false];
    if (width < 50) return; // not laid out yet
    parent.postMessage({ regardHeight: document.body.offsetHeight, regardMayShrink: !isUsed }, "*");
  };
  new ResizeObserver(postHeight).observe(document.body);
  for (const type of ["pointermove", "pointerdown", "keydown"]) {
    addEventListener(type, () => { isUsed = true; }, { capture: true, passive: true });
  }
  addEventListener("message", ({ source, data }) => {
    if (source !== parent || !data?.regardAskHeight) return;
    heightAround = data.regardWindow ?? null;
    postHeight();
  });
}
