"""The domain faults of scripts/faults still name functions that exist, and patch them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.faults import FAULTS, Fault, resolve


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_names_a_function(fault: Fault) -> None:
    _, _, original = resolve(fault.target)
    function = getattr(original, "fget", None) or getattr(original, "func", None) or original
    assert callable(function)
    assert callable(fault.make(function))


def test_faults_are_few_and_distinct() -> None:
    assert 40 <= len(FAULTS) <= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
