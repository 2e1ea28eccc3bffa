"""Render results as text and as notebook HTML.

Entry points: `explanation.format_explanation`, `table.format_table`, `notebook`. The functions take arrays and plain
values, import only `errors` and `types` of this package, and need no optional dependency.
"""
