"""Testing: the error rule, the case matrix, one check that holds an engine to them, and the conformance kit."""

from __future__ import annotations

from regard.testing._cases import FACTORS, Case, Inputs, count_table, draw, empty_cells, fill
from regard.testing._check import ENGINES, check
from regard.testing._conformance import Trial, conformance, trials
from regard.testing._convention import Convention
from regard.testing._diagnose import Finding
from regard.testing._report import Capability, Report
from regard.testing._rule import ORDINARY, assert_matches, epsilon

__all__ = [
    "ENGINES",
    "FACTORS",
    "ORDINARY",
    "Capability",
    "Case",
    "Convention",
    "Finding",
    "Inputs",
    "Report",
    "Trial",
    "assert_matches",
    "check",
    "conformance",
    "count_table",
    "draw",
    "empty_cells",
    "epsilon",
    "fill",
    "trials",
]
