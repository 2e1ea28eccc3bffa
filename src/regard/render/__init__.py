"""Render results as text and as notebook HTML.

Entry points: `text`, `table.format_table`, `table.format_steps`, `notebook`. The functions take arrays and plain
values, import only `errors` and `types` of this package, and need no optional dependency.
"""
