"""The largest contributions of each row, in NumPy; tests/unit/lens has those of models."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.measures import Contribution
from regard.tiling import use_tile_sizes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_contributions_are_weights_times_norms(dtype):
    rng = np.random.default_rng(0)
    query, key = (rng.normal(size=(2, 3, n, 4)).astype(dtype) for n in (5, 7))
    norms = rng.uniform(size=(3, 7))
    A = regard.attention(query, key)
    with use_tile_sizes(rows=2, columns=3):
        top = A.measure(Contribution(2, norms)).contribution
    dense = A.to_dense() * norms[:, None].astype(dtype)
    assert (top.values == top.values.astype(dtype)).all()  # computed at the dtype of the weights
    np.testing.assert_allclose(top.values, -np.sort(-dense, -1)[..., :2], rtol=4 * np.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.take_along_axis(dense, top.indices, -1), top.values, rtol=4 * np.finfo(dtype).eps
    )
    assert repr(Contribution(2, norms)) == "Contribution(k=2, norms=<array of shape (3, 7)>)"
