"""The case matrix: generated inputs of every mask, dtype, length and layout, and the check of an engine with them.

Entry points: `draw_cases`, `build_inputs` and `check_case`, exported by `regard.testing`. Imports `regard.core` and the
packages below it, and `regard.reference`.
"""
