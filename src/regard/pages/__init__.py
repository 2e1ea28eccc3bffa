"""Self-contained HTML pages from plain data.

`html.build_page` builds a page from a record, `encoding` its arrays. The scripts are in `assets/`: `apps` (one for each
page), `components`, and `matrix` (the lazy matrix in the browser). The package imports `errors`, `types` and `render`.

Design notes:
- A map shows the maximum of each point first, computed from every weight when the page is made. A mean over many
  weights, or a sample of rows, hides a single weight of 1. One more pass gives maxima and means; cells that share a
  pixel are combined in the page.
- A page in a frame takes no size from the height of its window. The page around it gives the frame the height of the
  page, so the two would drive each other. The parent asks each frame after loading, since a message may have come
  before it listened.
"""
