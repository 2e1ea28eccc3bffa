// Give the frame of an explorer the height of its page. A frame may have reported its height before this script listened,
// so every frame is asked once everything is loaded. Only that answer may shrink the frame, once, and again after the window
// changed its size; later the frame grows at most, so that the text below does not move while a reader works.
const MAX_FRAME_HEIGHT = 4000;
const fittedFrames = new WeakSet();

addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  const height = Math.ceil(Number(data?.regardHeight));
  if (!frame || !(height > 0 && height < MAX_FRAME_HEIGHT)) return;
  const mayShrink = data.regardAnswer && !fittedFrames.has(frame);
  if (height > frame.clientHeight || mayShrink) frame.style.height = `${height}px`;
  if (data.regardAnswer) fittedFrames.add(frame);
});

function askFrames() {
  for (const frame of document.querySelectorAll("iframe")) {
    fittedFrames.delete(frame);
    frame.contentWindow?.postMessage({ regardAskHeight: true }, "*");
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
