"""Analyse recordings: head table, search, rollout and checks, each behind a method of `Recording`.

Imports from `regard.lens.capture`, `regard.lens.table` and `regard.core` and below.
"""
