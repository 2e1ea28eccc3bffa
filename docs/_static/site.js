// Give the frame of an explorer the height of its page. A frame may have reported its height before this script listened,
// so every frame is asked once everything is loaded, and once more, since a page without a scrollbar is wider and may be
// shorter. Only these answers may shrink the frame, and those after the window changed its size; later the frame grows at
// most, so that the text below does not move while a reader works.
const MAX_FRAME_HEIGHT = 4000;
const openQuestions = new WeakMap(); // frame: answers that may still shrink it

addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  const height = Math.ceil(Number(data?.regardHeight));
  if (!frame || !(height > 0 && height < MAX_FRAME_HEIGHT)) return;
  const open = data.regardAnswer ? openQuestions.get(frame) ?? 0 : 0;
  if (height > frame.clientHeight || open) frame.style.height = `${height}px`;
  if (open) openQuestions.set(frame, open - 1);
  if (open > 1) setTimeout(ask, 100, frame); // its canvases are drawn again at the new width
});

function ask(frame) {
  frame.contentWindow?.postMessage({ regardAskHeight: true }, "*");
}

function askFrames() {
  for (const frame of document.querySelectorAll("iframe")) {
    openQuestions.set(frame, 2);
    ask(frame);
  }
}
if (document.readyState === "complete") askFrames();
else addEventListener("load", askFrames);

let pageWidth = innerWidth, askTimer = 0;
addEventListener("resize", () => {
  if (innerWidth === pageWidth) return; // a phone hides its address bar
  pageWidth = innerWidth;
  clearTimeout(askTimer);
  askTimer = setTimeout(askFrames, 200);
});

// Make blocks that are wider than the page focusable, so that the keyboard can scroll them.
addEventListener("load", () => {
  for (const block of document.querySelectorAll("pre, math, .architecture, .table-wrapper, .text_html")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
});

// A page opened as a file cannot read other pages, so the search cannot show excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
