// Explorers tell how tall they are; their frames follow, and do not shrink again, so that the text below stays.
addEventListener("message", ({ source, data }) => {
  const frame = [...document.querySelectorAll("iframe")].find((it) => it.contentWindow === source);
  const height = Number(data?.regardHeight);
  if (frame && height > frame.clientHeight && height < 4000) frame.style.height = `${Math.ceil(height)}px`;
});

// A block wider than the page scrolls, which the keyboard must be able to do too.
addEventListener("load", () => {
  for (const block of document.querySelectorAll("pre, math, .architecture, .table-wrapper, .text_html")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
});

// Opened as a file, a page may not read the others, from which the search would show a line of each result.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
