"""Test attention: the error rule, the case matrix for engines, and the conformance kit for any attention function.

Entry points: `check_conformance(fn)` for a function, `check_case` for an engine, `assert_matches` for one result,
`check_installation()` for what is installed here.
Imports `regard.core` and the packages below it, and `regard.reference`; the command line also imports `regard.models`.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.testing.cases.engine_check import ENGINES, check_case, list_compiled_engines
from regard.testing.cases.factors import FACTORS, Case
from regard.testing.cases.generate import draw_cases, find_uncovered_pairs, format_counts
from regard.testing.cases.inputs import CaseInputs, build_inputs
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.report import Capability, ConformanceReport
from regard.testing.conformance.runner import ConformanceTest, check_conformance, generate_tests
from regard.testing.device_check import check_device
from regard.testing.installation import InstallationReport, check_installation
from regard.testing.tolerance import ORDINARY_TOLERANCE, assert_matches, epsilon

__all__ = [
    "ENGINES",
    "FACTORS",
    "ORDINARY_TOLERANCE",
    "CallingConvention",
    "Capability",
    "Case",
    "CaseInputs",
    "ConformanceReport",
    "ConformanceTest",
    "InstallationReport",
    "assert_matches",
    "build_inputs",
    "check_case",
    "check_conformance",
    "check_device",
    "check_installation",
    "draw_cases",
    "epsilon",
    "find_uncovered_pairs",
    "format_counts",
    "generate_tests",
    "list_compiled_engines",
]

set_public_module(globals())
