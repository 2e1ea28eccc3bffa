"""The faults of scripts/mutants still apply to the source as it is: a list that went stale would catch nothing."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "scripts/mutants"))
FAULTS = MUTANTS["FAULTS"]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_changes_one_line_and_leaves_the_file_readable(fault) -> None:
    source = MUTANTS["source_of"](fault, ROOT).read_text("utf-8")
    assert source.count(fault.old) == 1
    changed = source.replace(fault.old, fault.new)
    lines = zip(source.splitlines(), changed.splitlines(), strict=True)
    assert sum(before != after for before, after in lines) == 1
    ast.parse(changed)


def test_faults_are_many_and_each_is_another() -> None:
    assert len(FAULTS) >= 120
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)
