"""Errors of `regard.learn`: what was received, what is expected, and how to fix it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from regard import learn
from regard.learn import (
    AdditiveAttention,
    CheckedAttention,
    FeedForward,
    LayerNorm,
    NumpyMultiHeadAttention,
    RecurrentNetwork,
    TransformerBlock,
    compare_softmax_alternatives,
    cost_table,
    create_causal_mask,
    create_padding_mask,
    family,
    fit_exponent,
    hardmax,
    iter_multiplications,
    kernel_attention,
    pad_batch,
    profile,
    softmax,
    sparsemax,
    variance_experiment,
)
from tests.helpers.attention_ways import by_class, by_function, by_loops

X32, X34, X52 = np.ones((3, 2)), np.ones((3, 4)), np.ones((5, 2))
CALLS: list[tuple[Any, str, str, str, str]] = [
    (
        lambda: CheckedAttention(0),
        "CheckedAttention",
        "d_k 0",
        "at least 1",
        "shape of an array",
    ),
    (
        lambda: CheckedAttention(2.0),  # type: ignore[arg-type]
        "CheckedAttention",
        "float 2.0",
        "whole number",
        "int(d_k)",
    ),
    (
        lambda: by_class(X32, X34, X32),
        "CheckedAttention",
        "K of shape (3, 4)",
        "since d_k is 2",
        "d_k=4",
    ),
    (lambda: CheckedAttention(4)(X32, X34, X34), "", "Q of shape (3, 2)", "since d_k is 4", "d_k=2"),
    (
        lambda: by_class(X32, X32, X52),
        "CheckedAttention",
        "V of shape (5, 2)",
        "one value for each key",
        "sequence",
    ),
    (lambda: by_function(X32[0], X32, X32), "", "Q of shape (2,)", "(…, q_len, d_k)", "Q[None, :]"),
    (lambda: by_class(X32, X32, X32 > 0), "CheckedAttention", "V, an array of bool", "real numbers", "mask="),
    (lambda: by_class(X32, X32 * 1j, X32), "", "K, an array of complex128", "real numbers", "dtype=float"),
    (
        lambda: by_class(np.ones((2, 3, 4)), np.ones((5, 3, 4)), X32),
        "CheckedAttention",
        "(2, 3, 4) and K of shape (5, 3, 4)",
        "of size 1",
        "same batch",
    ),
    (
        lambda: by_class(X32, X32, X32, create_causal_mask(5)),
        "apply_mask",
        "mask of shape (5, 5) for scores (q_len 3, kv_len 3)",
        "broadcasts to the shape of the scores",
        "(batch, 1, 1, kv_len)",
    ),
    (
        lambda: by_class(X32, X32, X32, create_padding_mask([2, 3], 3)),
        "apply_mask",
        "mask of shape (2, 1, 1, 3)",
        "broadcasts",
        "of size 1",
    ),
    (lambda: create_causal_mask(-1), "create_causal_mask", "seq_len -1", "at least 0", "shape of an array"),
    (lambda: create_causal_mask(3.0), "create_causal_mask", "float 3.0", "whole number", "int(seq_len)"),  # type: ignore[arg-type]
    *(
        (
            lambda lengths=lengths: create_padding_mask(lengths, 5),
            "create_padding_mask",
            f"lengths {lengths}",
            "whole numbers between 0 and max_length",
            "Pass the number of real tokens",
        )
        for lengths in ([2, 9], [-1], [[1, 1]], [1.5])
    ),
    (
        lambda: NumpyMultiHeadAttention(10, 4),
        "NumpyMultiHeadAttention",
        "num_heads 4",
        "equal width",
        "[1, 2, 5, 10]",
    ),
    (
        lambda: by_loops(X32[None], X32, X32),
        "attention_by_loops",
        "Q of shape (1, 3, 2)",
        "one head",
        "Q[0, 3]",
    ),
    (
        lambda: by_loops(X32, X34, X32),
        "attention_by_loops",
        "K of shape (3, 4)",
        "K (kv_len, d_k)",
        "same d_k",
    ),
    (
        lambda: by_loops(X32, X32, X52),
        "attention_by_loops",
        "V of shape (5, 2)",
        "V (kv_len, d_v)",
        "same sequence",
    ),
    (
        lambda: by_loops(X32, X32, X32, create_causal_mask(5)),
        "attention_by_loops",
        "mask of shape (5, 5)",
        "broadcasts",
        "of size 1",
    ),
    (lambda: softmax([1], temperature=-1), "softmax", "temperature -1", "at least 0", "sharpens"),
    (lambda: softmax([1], temperature=math.nan), "softmax", "temperature nan", "at least 0", "sharpens"),
    (lambda: softmax(1.0), "softmax", "shape ()", "(…, kv_len)", "one row"),
    (
        lambda: sparsemax([1, 2], [1, 0]),
        "sparsemax",
        "mask, an array of int",
        "True = attend",
        "np.array([1, 0]) == 0",
    ),
    (lambda: hardmax([1, 2], [True] * 3), "hardmax", "(3,) for scores (kv_len 2)", "broadcasts", "axes"),
    (
        lambda: compare_softmax_alternatives(X32),
        "compare_softmax_alternatives",
        "(3, 2)",
        "one row",
        "scores[0]",
    ),
    (lambda: variance_experiment([8, 4]), "variance_experiment", "(8, 4)", "ascending", "sorted"),
    (lambda: variance_experiment([]), "variance_experiment", "d_k ()", "at least one", "sorted"),
    (lambda: variance_experiment([0]), "variance_experiment", "d_k 0", "at least 1", "shape"),
    (lambda: AdditiveAttention(2, 0, 3), "AdditiveAttention", "d_k 0", "at least 1", "shape"),
    (
        lambda: AdditiveAttention(2, 2, 3)(X32, X32, X34[:2]),
        "AdditiveAttention",
        "K of shape (3, 2)",
        "value",
        "sequence",
    ),
    (
        lambda: AdditiveAttention(2, 2, 3).score_by_loops(X32[None], X32),
        "score_by_loops",
        "(1, 3, 2)",
        "(q_len, d_q)",
        "Q[0]",
    ),
    (lambda: LayerNorm(4)(X32[:, :1]), "LayerNorm", "(3, 1)", "(…, 4)", "embed_dim of your"),
    (lambda: FeedForward(4, 5, activation="tanh"), "FeedForward", "'tanh'", "'relu', 'gelu'", "usual"),
    (lambda: TransformerBlock(4, 2, norm="mid"), "TransformerBlock", "'mid'", "'pre', 'post'", "usual"),
    (lambda: TransformerBlock(4, 3), "NumpyMultiHeadAttention", "num_heads 3", "equal width", "[1, 2, 4]"),
    (lambda: TransformerBlock(4, 2)(X32), "LayerNorm", "(3, 2)", "(…, 4)", "embed_dim of your"),
    (lambda: TransformerBlock(4, 2)(X34[0]), "TransformerBlock", "(4,)", "(…, n, embed_dim)", "x[None, :]"),
    (lambda: TransformerBlock(4, 2)(X34, mask=X34 > 0), "apply_mask", "(3, 4)", "broadcasts", "axes"),
    (lambda: learn.dropout(X32, 1), "dropout", "rate 1", "below 1", "chance"),
    (lambda: learn.dropout(X32, -0.1), "dropout", "rate -0.1", "at least 0", "chance"),
    (lambda: cost_table([4, 4]), "cost_table", "(4, 4)", "ascending", "sorted"),
    (lambda: cost_table([2.5]), "cost_table", "float 2.5", "whole number", "int(lengths)"),  # type: ignore[list-item]
    (lambda: cost_table(None), "cost_table", "a NoneType", "whole number", "int(lengths)"),  # type: ignore[arg-type]
    (lambda: fit_exponent([1, 2], [1, 0]), "fit_exponent", "2 amounts", "above 0", "logarithm"),
    (lambda: fit_exponent([1], [1]), "fit_exponent", "1 lengths", "two or more", "two points"),
    (lambda: fit_exponent([1, 2], [1]), "fit_exponent", "1 amounts", "one amount for each", "Measure more"),
    (
        lambda: iter_multiplications(X32[None], X32, X32),
        "iter_multiplications",
        "(1, 3, 2)",
        "one head",
        "Q[0, 3]",
    ),
    (
        lambda: iter_multiplications(X32, X34, X32),
        "iter_mul",
        "K of shape (3, 4)",
        "K (kv_len, d_k)",
        "same d_k",
    ),
    (lambda: kernel_attention(X32, X34, X34), "CheckedAttention", "(3, 4)", "since d_k is 2", "d_k=4"),
    (
        lambda: CheckedAttention(2)(np.ones((2, 1, 2)), np.ones((1, 1, 2)), np.ones((3, 1, 2))),
        "CheckedAttention",
        "V of shape (3, 1, 2)",
        "of size 1",
        "same batch",
    ),
    (lambda: profile([64], repeats=1), "fit_exponent", "1 lengths", "two or more", "two points"),
    (
        lambda: kernel_attention(X32, X32, X32, kernel=lambda q, k: -(q @ k.T)),
        "kernel_attention",
        "down to -2",
        "never negative",
        "exponential",
    ),
    (lambda: pad_batch([X32, X34]), "pad_batch", "[(3, 2), (3, 4)]", "same d", "same d for every token"),
    (lambda: pad_batch([]), "pad_batch", "[]", "at least one", "same d for every token"),
]


@pytest.mark.parametrize(("call", "operation", "received", "expected", "hint"), CALLS)
def test_errors_name_the_value_the_expectation_and_the_fix(
    call: Any, operation: str, received: str, expected: str, hint: str
) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    error: Any = caught.value
    assert operation in error.operation
    assert received in error.received
    assert expected in error.expected
    assert hint in error.hint
    assert (
        str(error) == f"{error.operation}: received {error.received}; expected {error.expected}. {error.hint}"
    )


def with_parameter(layer: Any, name: str, shape: tuple[int, ...]) -> Any:
    setattr(layer, name, np.ones(shape))
    return layer


@pytest.mark.parametrize(
    "call",
    [
        lambda: NumpyMultiHeadAttention(6, 2)(X34),
        lambda: NumpyMultiHeadAttention(4, 2).split_heads(X32),
        lambda: NumpyMultiHeadAttention(4, 2).merge_heads([X34] * 3),
        lambda: with_parameter(NumpyMultiHeadAttention(4, 2), "W_K", (3, 3))(X34),
        lambda: FeedForward(4, 5)(X32),
        lambda: with_parameter(FeedForward(4, 5), "W_1", (4, 3))(X34),
        lambda: with_parameter(LayerNorm(4), "gain", (3,))(X34),
        lambda: RecurrentNetwork(2, 3)(X34),
        lambda: AdditiveAttention(2, 2, 3)(X34, X32, X32),
        lambda: AdditiveAttention(2, 2, 3)(X32, X34, X32),
        lambda: with_parameter(AdditiveAttention(2, 2, 3), "w", (4,))(X32, X32, X32),
        lambda: family.GroupedQuery(d_k=1, num_heads=4, num_kv_heads=3)(X34, X34[:, :3], X34[:, :3]),
        lambda: family.Flash(d_k=2, tile_size=0)(X32, X32, X32),
    ],
)
def test_sizes_that_do_not_fit_raise_the_error_of_numpy(call: Any) -> None:
    with pytest.raises(ValueError, match=r"shape|dimension|broadcast|must not be zero"):
        call()
