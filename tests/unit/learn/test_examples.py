"""The worked examples: read-only, consistent, and exported with the other public names."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from regard import learn
from regard.learn import (
    examples,
)


def test_examples_are_read_only() -> None:
    found = 0
    for example in vars(examples).values():
        for array in vars(example).values() if type(example).__module__ == examples.__name__ else ():
            if isinstance(array, np.ndarray):
                found += 1
                assert array.dtype == np.float64
                with pytest.raises(ValueError, match="read-only"):
                    array[0, 0] = 1
    assert found == 5 * 3 + 2 + 4
    with pytest.raises(AttributeError):
        examples.cat.Q = np.ones((5, 4))  # type: ignore[misc]


def test_shapes_of_the_examples() -> None:
    for name in ("cat", "tiny_head", "pronoun", "three_by_three", "three_tokens"):
        example = getattr(examples, name)
        assert getattr(learn, name) is example
        assert example.Q.shape[1] == example.K.shape[1]
        assert len(example.tokens) == len(example.K) == len(example.V)
    assert len(examples.magnitude.tokens) == len(examples.magnitude.K)
    for W in (examples.projection.W_Q, examples.projection.W_K, examples.projection.W_V):
        assert (examples.projection.X @ W).shape == (len(examples.projection.tokens), 4)


def test_the_public_names() -> None:
    assert learn.__all__ == sorted(learn.__all__)
    for name in learn.__all__:
        thing = getattr(learn, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__
            assert thing.__module__.startswith("regard.learn.")
    wanted = {
        "NumpyMultiHeadAttention",
        "CheckedAttention",
        "ScaledDotProductAttention",
        "attention_by_loops",
        "create_causal_mask",
        "create_padding_mask",
        "scaled_dot_product_attention",
    }
    assert set(learn.__all__) >= wanted
