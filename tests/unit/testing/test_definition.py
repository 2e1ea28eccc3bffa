"""The definition in other dtypes than float64: the error rule measures engines by its errors there."""

from __future__ import annotations

import numpy as np
import pytest

from regard import reference


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_every_step_runs_in_the_given_dtype(dtype: type) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 5, 3)) for _ in range(3))
    bias, sink = rng.normal(size=(5, 5)), np.array([0.5, -np.inf])
    for found in (
        reference.attention(query, key, value, dtype=dtype),
        reference.attention(
            query, key, value, biases=[bias], sink=sink, cap=2.0, mask=bias > 0, scale=0.3, dtype=dtype
        ),
        reference.linear_attention(query, key, value, feature_map=np.exp, dtype=dtype),
    ):
        assert {array.dtype for array in found} == {np.dtype(dtype)}


def test_a_weight_too_small_for_the_dtype_is_zero() -> None:
    arrays = np.array([[1.0]]), np.array([[0.0], [-110.0]])
    assert reference.attention(*arrays, dtype=np.float64).weights[0, 1] > 0
    assert reference.attention(*arrays, dtype=np.float32).weights[0, 1] == 0
