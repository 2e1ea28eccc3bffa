"""Testing: the error rule, the case matrix, and one check that holds an engine against the definition."""

from __future__ import annotations

from regard.testing._cases import FACTORS, Case, Inputs, count_table, draw, empty_cells, fill
from regard.testing._check import ENGINES, check
from regard.testing._rule import ORDINARY, assert_matches, epsilon

__all__ = [
    "ENGINES",
    "FACTORS",
    "ORDINARY",
    "Case",
    "Inputs",
    "assert_matches",
    "check",
    "count_table",
    "draw",
    "empty_cells",
    "epsilon",
    "fill",
]
