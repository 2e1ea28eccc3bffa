"""`between`: the mask of chosen edges."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard import causal
from regard.frame import Frame
from regard.masks import between

LENGTH = 13


@pytest.mark.parametrize("queries", [None, 3, [1, 4, 5], slice(5, None), slice(2, 11, 3), [], -1])
@pytest.mark.parametrize("keys", [None, 0, [0, 7, 8, 12], slice(None, -4), [-1]])
def test_edges_and_blocks(queries, keys):
    mask = between(queries, keys)
    rows, columns = np.zeros(LENGTH, bool), np.zeros(LENGTH + 2, bool)
    rows[slice(None) if queries is None else queries] = True
    columns[slice(None) if keys is None else keys] = True
    expected = rows[:, None] & columns
    assert np.array_equal(mask.to_dense(LENGTH, LENGTH + 2), expected)
    assert np.array_equal((~mask).to_dense(LENGTH, LENGTH + 2), ~expected)
    frame = Frame((), LENGTH, LENGTH + 2)
    lows, highs = np.array([0, 3, 8]), np.array([3, 8, 15])
    for start, stop in ((0, 1), (2, 6), (6, 13)):
        kinds = mask.classify_blocks(frame, start, stop, lows, highs)
        blocks = [expected[start:stop, low:high] for low, high in zip(lows, highs, strict=True)]
        assert kinds.nonempty.tolist() == [block.any() for block in blocks]
        assert kinds.full.tolist() == [block.all() for block in blocks]
    splits = mask.split_points(frame)
    assert splits.rows[0] == splits.columns[0] == 0


def test_products_without_edges_equal_the_dense_mask():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 40, 8))
    mask = causal() & ~between(slice(20, None), [0, 5, 6]) & ~between([7, 9], slice(2, 4))
    other = regard.masks.dense(mask.to_dense(40, 40))
    A, B = regard.attention(q, k, mask=mask), regard.attention(q, k, mask=other)
    np.testing.assert_allclose(A.to_dense(), B.to_dense(), atol=1e-12)
    np.testing.assert_allclose(A @ v, B @ v, atol=1e-12)


def test_equality_hash_and_repr():
    assert between(3, [1, 2]) == between([3], np.array([2, 1])) != between(3, 1)
    assert hash(between(slice(2, None))) == hash(between(slice(2, None)))
    assert repr(causal() & ~between(keys=[0, 4])) == "causal() & ~between(keys=[0, 4])"
    assert repr(between(2)) == "between(queries=2)" and repr(between()) == "between()"
    assert between(keys=3).is_key_only and not between(2, 3).is_key_only


def test_wrong_positions():
    for positions in (1.5, "cat", [[1]], [0.5]):
        with pytest.raises(regard.ArgumentTypeError, match="an integer, a slice, or a list of integers"):
            between(keys=positions)
    for mask, received, length in (
        (between(keys=[-2, 20]), "keys with position 20", 5),
        (between(keys=-6), "keys with position -6", 5),
        (between(4, 4), "queries with position 4", 4),
    ):
        with pytest.raises(regard.IndexOutOfRangeError) as caught:
            regard.attention(np.eye(4, 5), np.eye(5), mask=mask)
        assert caught.value.operation == "between" and caught.value.received == received
        assert all(str(bound) in caught.value.expected for bound in (length - 1, f"−{length}"))
