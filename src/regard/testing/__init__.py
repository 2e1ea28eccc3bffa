"""Test attention: the error rule, the case matrix for engines, and the conformance kit for any attention function.

Entry points: `check_conformance(fn)` for a function, `check_case` for an engine, `assert_matches` for one result,
`check_installation()` for what is installed here.
Imports `regard.core` and the packages below it, and `regard.reference`; the command line also imports `regard.models`.

Design notes:
- The conformance kit describes a fault as the definition with one step replaced. It computes what a function with
  exactly this fault returns, so two faults are two findings.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.testing.cases import (
    ENGINES,
    Case,
    CaseInputs,
    build_inputs,
    check_case,
    draw_cases,
)
from regard.testing.conformance.convention import CallingConvention
from regard.testing.conformance.runner import (
    Capability,
    ConformanceReport,
    ConformanceTest,
    check_conformance,
    generate_tests,
)
from regard.testing.device_check import check_device
from regard.testing.installation import InstallationReport, check_installation
from regard.testing.tolerance import assert_matches

__all__ = [
    "ENGINES",
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
    "generate_tests",
]

set_public_module(globals())
