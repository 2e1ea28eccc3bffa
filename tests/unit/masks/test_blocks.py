"""Where masks divide the matrix into blocks, and what is left of a mask in a block."""

from __future__ import annotations

import numpy as np
import pytest

from regard import causal, padding, sliding_window
from regard.frame import Frame
from regard.masks import between, dense, first
from regard.tiling import use_tile_sizes

LOWER = "lower_right"
EVERY_FOUR = [0, 4, 8]


@use_tile_sizes(mask_rows=4)
@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    [
        (dense(np.ones((11, 13), bool)), EVERY_FOUR, [0]),  # anything could be in it
        (causal("upper_left"), [0], [0]),
        (causal(LOWER), [0], [0, 2]),  # row 0 ends at column 2
        (sliding_window(3, align=LOWER), EVERY_FOUR, [0, 2, 6, 10]),
        (sliding_window(left=2, right=None, align=LOWER), EVERY_FOUR, [0]),
        (sliding_window(np.array([2, 3]), align=LOWER), EVERY_FOUR, [0, 2, 6, 10]),
        (sliding_window(left=5, right=np.array([0, 1]), align=LOWER), EVERY_FOUR, [0]),  # by head
        (causal("upper_left") & first(5), [0, 5], [0, 5]),
        (~causal(LOWER), [0], [0, 2]),
        (between(slice(3, 7), slice(2, 4)), [0, 3, 7], [0, 2, 4]),
        (between(slice(1, 7), slice(1, 12)), [0, 1, 7], [0, 1, 12]),
    ],
    ids=str,
)
def test_split_points(mask, rows, columns):
    found = mask.split_points(Frame((1, 2), 11, 13))
    assert (found.rows.tolist(), found.columns.tolist()) == (rows, columns)


@use_tile_sizes(mask_rows=16)
def test_many_runs_are_split_evenly():
    found = between(slice(0, None, 2), slice(0, None, 2)).split_points(Frame((), 80, 90))
    assert (found.rows.tolist(), found.columns.tolist()) == ([0, 16, 32, 48, 64], [0])


@pytest.mark.parametrize(
    ("mask", "rows", "columns", "expected"),
    [
        (sliding_window(4), range(4, 8), range(4, 8), causal()),  # the left limit is outside
        (sliding_window(4), range(4, 8), range(3, 8), sliding_window(4)),
        (sliding_window(4), range(8, 12), range(0, 4), False),
        (sliding_window(4), range(6, 8), range(4, 6), True),
        (sliding_window(left=3), range(4, 8), range(4, 8), True),
        (padding(6), range(0, 2), range(0, 6), True),
    ],
    ids=str,
)
def test_the_rest_of_a_mask_in_a_block(mask, rows, columns, expected):
    assert mask.restrict(Frame((), 12, 12), rows, columns) == expected
