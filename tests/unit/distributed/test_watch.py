"""`watch` in a run whose ranks hold parts of the sequence records one sequence."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.sharded_models import watch_layer


@pytest.mark.parametrize(
    "kind, layout, size",
    [
        ("plain", "contiguous", 2),
        ("plain", "zigzag", 3),
        ("DTensor", "contiguous", 3),
        ("ring", "zigzag", 3),
        pytest.param("ring", "zigzag", 4, marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_layer_is_recorded_as_one_sequence(ranks, kind, layout, size) -> None:
    for result in ranks.run(watch_layer, kind, layout, 24, ranks=range(size)):
        assert result == {"identical": True, "names": ["attention"], "shape": (1, 2, 24 // size, 24)}
