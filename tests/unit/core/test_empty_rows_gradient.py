"""Rows with nothing to attend to have a gradient of zero: each result is part of the graph, whatever the mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    MaxScore,
    Output,
    Position,
    Received,
    Spread,
    alibi,
    attention,
    causal,
    linear_attention,
    padding,
    relative_bias,
    sliding_window,
    softcap,
)  # fmt: skip
from regard.masks import between, dense, first
from regard.measures import Contribution, Sum
from regard.score_mods import bias
from regard.tiling import use_tile_sizes

torch = pytest.importorskip("torch")

HEADS, Q_LEN, KV_LEN, WIDTH = 2, 5, 7, 3
LR = "lower_right"

RESULTS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda A, value: A @ value,
    "output": lambda A, value: A.measure(Output(value), Entropy()).output,
    "transpose": lambda A, value: A.mT @ torch.ones(Q_LEN),
    "from the left": lambda A, value: torch.ones(Q_LEN) @ A,
    "lse": lambda A, value: A.lse,
    "dense": lambda A, value: A.to_dense(),
    "row": lambda A, value: A[..., 1, :],
    "entry": lambda A, value: A[..., 1, 2],
    "reversed rows": lambda A, value: A[..., ::-1, 2:4],
    "scores": lambda A, value: A.scores[..., 1, :],
    "lazy rows": lambda A, value: A.lazy[..., 1:3, :].entropy(),
    "head": lambda A, value: A[0, 1].entropy(),
    "sum": lambda A, value: A.sum(),
    "mean": lambda A, value: A.mean(-1),
    "max": lambda A, value: A.max(),
    "topk": lambda A, value: A.topk(2).values,
    "contribution": lambda A, value: A.measure(Contribution(2, torch.ones(KV_LEN))).contribution.values,
}
MEASURES = [
    Entropy(), Received(), Distance(LR), Position(), Spread(LR), MaxScore(), Sum(), Mass(first(2)), Mass(causal(LR)),
    Coarse(2, "mean"), Coarse(2, "max"),
]  # fmt: skip
RESULTS |= {
    repr(measure): lambda A, value, measure=measure: A.measure(own=measure).own  # type: ignore[misc]
    for measure in MEASURES
}
RESULTS |= {f"max_weight {axis}": lambda A, value, axis=axis: A.max(axis) for axis in (-1, -2)}  # type: ignore[misc]
MASKS = {
    "no key": first(0),
    "padding": padding([0]),
    "dense": dense(np.zeros((Q_LEN, KV_LEN), bool)),
    "disjoint": between([1, 2]) & between([3]),
    "nothing outside": ~sliding_window(left=99, right=99, align=LR),
}


def draw(*shape: int) -> Any:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def check_zero(result: Any, inputs: list[Any]) -> None:
    assert result.requires_grad
    gradients = torch.autograd.grad(result, inputs, torch.ones_like(result))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", RESULTS)
def test_the_gradient_of_a_matrix_without_live_keys_is_zero(name: str, mask: str) -> None:
    torch.manual_seed(0)
    query, key, value = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH), draw(1, HEADS, KV_LEN, 2)
    inputs = [query, key, value] if name in ("product", "output") else [query, key]
    check_zero(RESULTS[name](attention(query, key, mask=MASKS[mask]), value), inputs)


LEARNED: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]] = {
    "softcap": lambda: ([], {"score_mod": softcap(3.0)}),
    "bias": lambda: ([array := draw(Q_LEN, KV_LEN)], {"score_mod": bias(array)}),
    "slopes": lambda: ([slopes := draw(HEADS)], {"score_mod": alibi(slopes, LR)}),
    "table": lambda: (
        [table := draw(4, HEADS)],
        {"score_mod": relative_bias(table, bidirectional=True, align=LR)},
    ),
}


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("name", RESULTS)
def test_score_modifications_without_live_keys_have_a_gradient_of_zero(name: str, kind: str) -> None:
    torch.manual_seed(1)
    query, key, value = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH), draw(1, HEADS, KV_LEN, 2)
    learned, arguments = LEARNED[kind]()
    A = attention(query, key, mask=first(0), **arguments)
    inputs = [query, key, *learned, *([value] if name in ("product", "output") else ())]
    check_zero(RESULTS[name](A, value), inputs)


@pytest.mark.parametrize("name", RESULTS)
def test_linear_attention_without_live_keys_has_a_gradient_of_zero(name: str) -> None:
    torch.manual_seed(2)
    query, key, value = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH), draw(1, HEADS, KV_LEN, 2)
    inputs = [query, key, value] if name in ("product", "output") else [query, key]
    check_zero(RESULTS[name](linear_attention(query, key, mask=first(0)), value), inputs)


@pytest.mark.parametrize("name", [name for name in RESULTS if name != "scores"])
def test_masked_numbers_that_are_not_finite_do_not_reach_the_gradient(name: str) -> None:
    torch.manual_seed(3)
    query, key, value = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH), draw(1, HEADS, KV_LEN, 2)
    with torch.no_grad():
        key[..., 2, :], value[..., 1, :] = math.nan, math.inf
    inputs = [query, key, value] if name in ("product", "output") else [query, key]
    check_zero(RESULTS[name](attention(query, key, mask=first(0)), value), inputs)


def test_a_sink_takes_the_gradient_of_the_lse_and_the_rest_is_zero() -> None:
    query, key, sink = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH), draw(HEADS)
    A = attention(query, key, mask=first(0), sink=sink)
    gradients = torch.autograd.grad(A.lse.sum(), [query, key, sink])
    assert [float(gradient.abs().sum()) for gradient in gradients] == [0.0, 0.0, HEADS * Q_LEN]
    check_zero(A.entropy(), [query, key, sink])


@pytest.mark.parametrize("q_len, kv_len", [(0, KV_LEN), (Q_LEN, 0), (0, 0)])
@pytest.mark.parametrize(
    "measure", [Entropy(), Received(), Distance(LR), Position(), MaxScore(), Mass(first(2))]
)
def test_an_empty_matrix_is_part_of_the_graph(measure: Any, q_len: int, kv_len: int) -> None:
    query, key, value = draw(1, HEADS, q_len, WIDTH), draw(1, HEADS, kv_len, WIDTH), draw(1, HEADS, kv_len, 2)
    A = attention(query, key)
    check_zero(A.measure(own=measure).own, [query, key])
    check_zero(A @ value, [query, key, value])
    check_zero(A.lse, [query, key])


def test_bands_without_live_keys_beside_others() -> None:
    torch.manual_seed(4)
    query, key = draw(1, HEADS, Q_LEN, WIDTH), draw(1, HEADS, KV_LEN, WIDTH)
    live = torch.zeros(Q_LEN, KV_LEN, dtype=torch.bool)
    live[3:, :4] = True
    scores = (query @ key.mT / WIDTH**0.5).masked_fill(~live, -math.inf)[..., 3:, :4]
    weights = scores.softmax(-1)
    expected = torch.special.entr(weights).sum(-1)
    with use_tile_sizes(rows=2, columns=2):
        entropy = regard.attention(query, key, mask=dense(live)).entropy()
    torch.testing.assert_close(entropy[..., 3:], expected)
    found = torch.autograd.grad(entropy.sum(), [query, key])
    for gradient, exact in zip(found, torch.autograd.grad(expected.sum(), [query, key]), strict=True):
        torch.testing.assert_close(gradient, exact)
