"""Build self-contained HTML pages.

Entry points: `html.build_page`, `head_map.build_head_map`, `model_page.build_model_page`,
`picture_page.build_picture_page` and `report_page.build_report_page`. The scripts are in `assets/`: `apps` (one for
each page), `components`, and `matrix` (the lazy matrix in the browser). The package imports `errors`, `types`,
`images`, `masks`, `score_mods`, `measures` and `render`.
"""
