"""How many of our own functions a product calls: a mask is resolved once for its frame, not once for every block."""

from __future__ import annotations

import numpy as np
import pytest

from regard import attention, causal, padding, sliding_window
from regard.frame import Frame
from regard.masks import between, first
from tests.helpers.own_calls import count_own_calls

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("mask", [sliding_window(128), causal() & sliding_window(128)], ids=str)
def test_a_windowed_product_makes_few_calls(mask):
    query, key, value = torch.randn(3, 1, 8, 8192, 16).unbind(0)
    attention(query, key, mask=mask) @ value  # a kernel is compared with the definition before its first use
    A = attention(query, key, mask=mask)
    calls = count_own_calls(lambda: A @ value)
    assert sum(calls.values()) < 600
    assert calls["check_align"] + calls["per_head"] + calls["_name"] < 20, "per frame, not per block"


def test_a_band_and_a_band_are_one_band():
    frame = Frame((2, 3), 11, 11)
    sizes = np.array([2, 4, 5])
    for mask in (
        causal() & sliding_window(4),
        sliding_window(left=3, right=5) & sliding_window(sizes) & sliding_window(left=4),
        causal() & padding([9, 4]) & sliding_window(left=2, right=1),
        causal("upper_left") & causal("lower_right") & sliding_window(3, align="lower_right"),
    ):
        parts = [part.to_dense(2, 3, 11, 11) for part in mask.parts]
        np.testing.assert_array_equal(mask.to_dense(2, 3, 11, 11), np.logical_and.reduce(parts))
        assert "&" in repr(mask) and mask != sliding_window(4)
    (band,) = (causal() & sliding_window(4))._evaluated
    assert band == sliding_window(4) and band.diagonal(frame) is None


def test_a_mask_is_resolved_once_for_a_frame():
    for mask in (sliding_window(3), padding([9, 4]), first(2), between(2, slice(3, 5))):
        frame = Frame((2, 3), 11, 11)
        rows = np.arange(11)
        calls = count_own_calls(lambda: [mask.allows(frame, rows, rows, np) for _ in range(10)])  # noqa: B023
        calls += count_own_calls(lambda: mask.classify_blocks(frame, 0, 4, rows[:1], rows[4:5]))  # noqa: B023
        assert calls["resolve"] == 12, "11 lookups and one resolution"
        part = frame.select(np.array([3]))
        np.testing.assert_array_equal(
            np.broadcast_to(mask.allows(part, rows, rows, np), (1, 11, 11))[0],
            mask.to_dense(2, 3, 11, 11)[1, 0],
        )


def test_one_row_of_one_head_computes_scores_once():
    A = attention(torch.randn(1, 4, 1, 8), torch.randn(1, 4, 3000, 8))
    assert count_own_calls(lambda: A[0, 2, 0])["compute_scores"] == 1
