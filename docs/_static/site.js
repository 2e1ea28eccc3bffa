// Give the frame of an explorer the height of its page, and scroll to the part of it that the reader changed. The page reports its height, and whether the frame may shrink,
// when the height changes and when it is asked. A frame that is not on screen reports nothing of its own, and one may have
// reported before this script listened, so all are asked after loading and at another width. Each is asked again after
// its height changed, since a page without a scrollbar is wider and may be shorter, and then at growing intervals, since
// a worker of a busy machine may answer late.
const MAX_ASK_INTERVAL = 60000; // milliseconds
const MAX_FRAME_HEIGHT = 20000; // for a page that grows with its frame; the tallest one has 5,713 on a phone

addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  if (frame && data?.regardShow) scrollToPart(frame, ...data.regardShow.map(Number));
  const height = Math.min(Math.ceil(Number(data?.regardHeight)), MAX_FRAME_HEIGHT);
  if (!frame || !(height > 0)) return;
  if (height > frame.clientHeight || (height < frame.clientHeight && data.regardMayShrink)) {
    frame.style.height = `${height}px`;
    askLater(frame, 100); // its canvases are drawn again at the new width
  }
});

// The height of the bar at the top, which covers what is below it.
const barHeight = () => document.querySelector(".mobile-header")?.offsetHeight ?? 0;

function ask(frame, interval = 100) {
  frame.contentWindow?.postMessage({ regardAskHeight: true, regardWindow: innerHeight - barHeight() }, "*");
  if (interval < MAX_ASK_INTERVAL) askLater(frame, interval);
}

const askTimers = new WeakMap();
function askLater(frame, interval) {
  clearTimeout(askTimers.get(frame));
  askTimers.set(frame, setTimeout(ask, interval, frame, 2 * interval));
}

// Scroll as little as possible, so that a part of a frame is on screen. A frame that was scrolled away moves nothing.
function scrollToPart(frame, top, bottom) {
  const box = frame.getBoundingClientRect(), [start, end] = [box.top + top - barHeight(), box.top + bottom];
  if (box.bottom < 0 || box.top > innerHeight) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  scrollBy({ top: start < 0 ? start : Math.max(Math.min(end - innerHeight, start), 0), behavior: calm ? "instant" : "smooth" });
}

function askFrames() {
  document.querySelectorAll("iframe").forEach((frame) => ask(frame));
}
if (document.readyState === "complete") askFrames();
else addEventListener("load", askFrames);

let pageWidth = innerWidth, askTimer = 0;
addEventListener("resize", () => {
  if (innerWidth === pageWidth) return; // a phone hides its address bar
  pageWidth = innerWidth;
  clearTimeout(askTimer);
  askTimer = setTimeout(() => (askFrames(), markWide()), 200);
});

// Make blocks that are wider than the page focusable, so that the keyboard can scroll them, and let long names scroll.
function markWide() {
  for (const block of document.querySelectorAll("pre, math, .architecture, .table-wrapper, .text_html")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
  for (const name of document.querySelectorAll("article code .pre")) {
    const line = name.closest("p, li, dd, dt, h1, h2, h3, summary");
    name.classList.toggle("wide", line !== null && !name.closest("table") && name.scrollWidth > line.clientWidth);
  }
}
addEventListener("load", markWide);

// A page opened as a file cannot read other pages, so the search cannot show excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// Filter the table of supported models: rows without the words are hidden, and kinds with a match are unfolded.
addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("model-filter");
  if (!field) return;
  field.closest("p").hidden = false;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let total = 0;
    for (const kind of document.querySelectorAll("details.models")) {
      let matches = 0;
      for (const row of kind.querySelectorAll("tbody tr")) {
        row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        matches += !row.hidden;
      }
      kind.hidden = !matches;
      kind.open = words.length > 0 && matches > 0;
      total += matches;
    }
    document.querySelector(".filter [role=status]").textContent = words.length ? `${total} models` : "";
  });
});
