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
    MultiHeadAttention,
    RecurrentNetwork,
    TransformerBlock,
    compare_softmax_alternatives,
    cost_table,
    create_causal_mask,
    create_padding_mask,
    fit_exponent,
    gaussian_kernel,
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
        "axes of one",
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
        "axes of one",
    ),
    (lambda: create_causal_mask(-1), "create_causal_mask", "seq_len -1", "at least 0", "shape of an array"),
    (lambda: create_causal_mask(3.0), "create_causal_mask", "float 3.0", "whole number", "int(seq_len)"),  # type: ignore[arg-type]
    (
        lambda: create_padding_mask([2, 9], 5),
        "create_padding_mask",
        "from 2 to 9",
        "0 and max_length",
        "to 9",
    ),
    (lambda: create_padding_mask([-1], 5), "create_padding_mask", "from -1 to -1", "0 and max_length", "cut"),
    (
        lambda: create_padding_mask([[1, 1]], 5),
        "create_padding_mask",
        "(1, 2)",
        "shape (batch,)",
        "sum(axis=1)",
    ),
    (
        lambda: create_padding_mask([1.5], 5),
        "create_padding_mask",
        "float64",
        "whole numbers",
        "Count the real",
    ),
    (lambda: MultiHeadAttention(10, 4), "MultiHeadAttention", "num_heads 4", "equal parts", "[1, 2, 5, 10]"),
    (lambda: MultiHeadAttention(10, 4), "MultiHeadAttention", "embed_dim 10", "divides", "embed_dim 12"),
    (
        lambda: MultiHeadAttention(4, 0),
        "MultiHeadAttention",
        "num_heads 0",
        "at least 1",
        "shape of an array",
    ),
    (
        lambda: MultiHeadAttention(6, 2)(X34),
        "MultiHeadAttention, query",
        "(3, 4)",
        "embed_dim 6",
        "fits the array",
    ),
    (
        lambda: MultiHeadAttention(4, 2)(X34, value=X34),
        "MultiHeadAttention",
        "without a key",
        "a key",
        "key=",
    ),
    (lambda: MultiHeadAttention(4, 2).split_heads(X32), "split_heads", "(3, 2)", "embed_dim 4", "that shape"),
    (
        lambda: MultiHeadAttention(4, 2).merge_heads([X34] * 3),
        "merge_heads",
        "(3, 3, 4)",
        "num_heads 2",
        "shape",
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
        "axes of one",
    ),
    (lambda: softmax([1], temperature=-1), "softmax", "temperature -1", "at least 0", "sharpens"),
    (lambda: softmax([1], temperature=math.nan), "softmax", "temperature nan", "at least 0", "sharpens"),
    (lambda: softmax([1], temperature="hot"), "softmax", "str 'hot'", "number", "sharpens"),  # type: ignore[arg-type]
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
    (lambda: variance_experiment([8, 4]), "variance_experiment", "(8, 4)", "rising", "sorted"),
    (lambda: variance_experiment([]), "variance_experiment", "d_k ()", "at least one", "sorted"),
    (lambda: variance_experiment([0]), "variance_experiment", "d_k 0", "at least 1", "shape"),
    (lambda: variance_experiment(sigma=0), "variance_experiment", "sigma 0", "above 0", "deviation"),
    (lambda: AdditiveAttention(2, 0, 3), "AdditiveAttention", "d_k 0", "at least 1", "shape"),
    (lambda: AdditiveAttention(2, 2, 3)(X34, X32, X32), "Q", "(3, 4)", "d_q 2", "fits the array"),
    (lambda: AdditiveAttention(2, 2, 3)(X32, X34, X32), "K", "(3, 4)", "(…, kv_len, d_k)", "fits"),
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
        "one sequence",
        "Q[0]",
    ),
    (lambda: LayerNorm(4)(X32), "LayerNorm", "(3, 2)", "embed_dim 4", "fits the array"),
    (lambda: FeedForward(4, 5)(X32), "FeedForward", "(3, 2)", "embed_dim 4", "fits the array"),
    (lambda: FeedForward(4, 5, activation="tanh"), "FeedForward", "'tanh'", "'relu', 'gelu'", "usual"),
    (lambda: TransformerBlock(4, 2, norm="mid"), "TransformerBlock", "'mid'", "'pre', 'post'", "usual"),
    (lambda: TransformerBlock(4, 3), "MultiHeadAttention", "num_heads 3", "equal parts", "[1, 2, 4]"),
    (lambda: TransformerBlock(4, 2)(X32), "LayerNorm", "(3, 2)", "embed_dim 4", "fits the array"),
    (lambda: TransformerBlock(4, 2)(X34[0]), "TransformerBlock", "(4,)", "(…, n, embed_dim)", "x[None, :]"),
    (lambda: TransformerBlock(4, 2)(X34, mask=X34 > 0), "apply_mask", "(3, 4)", "broadcasts", "axes"),
    (lambda: learn.dropout(X32, 1), "dropout", "rate 1", "below 1", "chance"),
    (lambda: learn.dropout(X32, -0.1), "dropout", "rate -0.1", "at least 0", "chance"),
    (lambda: cost_table([4, 4]), "cost_table", "(4, 4)", "rising", "sorted"),
    (lambda: cost_table([2.5]), "cost_table", "float 2.5", "whole number", "int(lengths)"),  # type: ignore[list-item]
    (lambda: profile([64]), "profile", "(64,)", "two lengths", "(64, 128)"),
    (lambda: cost_table(None), "cost_table", "a NoneType", "whole number", "int(lengths)"),  # type: ignore[arg-type]
    (lambda: profile([2, 4], attend=7), "profile", "attend, int 7", "attend(Q, K, V)", "Omit attend"),  # type: ignore[arg-type]
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
    (lambda: kernel_attention(X32, X34, X34), "kernel_attention", "(3, 4)", "(…, kv_len, d_k)", "same d_k"),
    (
        lambda: kernel_attention(X32, X32, X32, kernel=lambda q, k: -(q @ k.T)),
        "kernel_attention",
        "down to -2",
        "never negative",
        "exponential",
    ),
    (lambda: gaussian_kernel(X32, X32, width=0), "gaussian_kernel", "width 0", "above 0", "distance"),
    (lambda: RecurrentNetwork(2, 3)(X34), "RecurrentNetwork", "(3, 4)", "(n, 2)", "embed_dim of your tokens"),
    (lambda: pad_batch([X32, X34]), "pad_batch", "[(3, 2), (3, 4)]", "same d", "same d for every token"),
    (lambda: pad_batch(5), "pad_batch", "int 5", "list of sequences", "pad_batch([x])"),  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("part", "name", "shape"),
    [("feed_forward", "W_1", (4, 3)), ("feed_forward", "b_2", (1,)), ("attention_norm", "gain", (1,))],
)
def test_a_parameter_of_the_wrong_shape_raises(part: str, name: str, shape: tuple[int, ...]) -> None:
    block = TransformerBlock(4, 2)
    setattr(getattr(block, part), name, np.ones(shape))
    with pytest.raises(ValueError, match=rf", {name}: received an array of shape \{str(shape)[:-1]}"):
        block(X34)
    additive = AdditiveAttention(2, 2, 3)
    additive.w = np.ones(4)
    with pytest.raises(ValueError, match=r"AdditiveAttention, w: received an array of shape \(4,\)"):
        additive.compute_scores(X32, X32)
