"""Testing: the error rule, the case matrix, one check that holds an engine to them, and the conformance kit."""

from __future__ import annotations

from regard._public import set_public_module
from regard.testing.cases.engine_check import ENGINES, check
from regard.testing.cases.generate import FACTORS, Case, Inputs, count_table, draw, empty_cells, fill
from regard.testing.conformance.convention import Convention
from regard.testing.conformance.diagnosis import Finding
from regard.testing.conformance.report import Capability, Report
from regard.testing.conformance.runner import Trial, conformance, trials
from regard.testing.tolerance import ORDINARY, assert_matches, epsilon

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

set_public_module(globals())
