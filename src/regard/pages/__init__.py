"""Self-contained HTML pages from plain data.

Entry points: `html.build_page` and `report_page.build_report_page`. The scripts are in `assets/`: `apps` (one for each
page), `components`, and `matrix` (the lazy matrix in the browser). The package imports `errors`, `types` and `render`.
"""
