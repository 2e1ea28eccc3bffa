// Grow the frame of an explorer to the height it reports. Never shrink it, so that the text below does not move.
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  const height = Number(data?.regardHeight);
  if (frame && height > frame.clientHeight && height < 4000) frame.style.height = `${Math.ceil(height)}px`;
});

// Make blocks that are wider than the page focusable, so that the keyboard can scroll them.
addEventListener("load", () => {
  for (const block of document.querySelectorAll("pre, math, .architecture, .table-wrapper, .text_html")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
});

// A page opened as a file cannot read other pages, so the search cannot show excerpts.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
