"""Matrices without queries, keys, heads or batch entries: every mask and measure, and the refusals that remain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard import (
    Distance,
    Entropy,
    Mass,
    MaxScore,
    MaxWeight,
    Output,
    Position,
    Received,
    Spread,
    causal,
    padding,
    sliding_window,
)
from regard.masks import between, dense, document, first, prefix
from regard.measures import Contribution, Sum

LR = "lower_right"
SHAPES = [
    (0, 5), (5, 0), (0, 0), (0, 3, 3), (2, 0, 3), (0, 2, 3, 3), (2, 0, 3, 3), (2, 3, 0, 4), (2, 3, 4, 0), (0, 0, 0, 0),
]  # fmt: skip


def make_masks(shape: tuple[int, ...]) -> dict[str, Any]:
    """Make each kind of mask for a shape, also with an entry for each batch entry and each head."""
    *lead, q_len, kv_len = shape
    masks = {
        "causal": causal(LR), "upper left": causal("upper_left"), "window": sliding_window(3, align=LR),
        "band": sliding_window(left=1, right=2, align=LR), "first": first(2), "padding": padding(min(kv_len, 2)),
        "left padding": padding(min(kv_len, 2), side="left"), "prefix": prefix(2, align=LR),
        "document": document(np.zeros(kv_len, int), query_ids=np.zeros(q_len, int)),
        "dense": dense(np.ones((q_len, kv_len), bool)), "one flag": dense(np.ones((1, 1), bool)),
        "flags of heads": dense(np.ones(shape, bool)), "between": between(slice(0, 2), slice(1, None)),
        "all edges": between(), "no edges": between([], []), "keys": between(keys=slice(0, 1)),
    }  # fmt: skip
    if lead:
        sizes = np.ones(lead[-1], int)
        masks |= {
            "window of heads": sliding_window(sizes, align=LR),
            "band of heads": sliding_window(left=sizes, right=sizes, align=LR),
        }
    if len(lead) == 2:
        batch, counts = lead[0], np.zeros(lead[0], int)
        ids = document(np.zeros((batch, kv_len), int), query_ids=np.zeros((batch, q_len), int))
        masks |= {
            "documents": ids, "lengths": padding(counts), "left lengths": padding(counts, side="left"),
            "firsts": first(counts), "prefixes": prefix(counts, align=LR),
        }  # fmt: skip
    names = list(masks)
    masks |= {f"not {name}": ~masks[name] for name in names}
    masks |= {f"causal and {name}": causal(LR) & masks[name] for name in names if name != "causal"}
    return masks


def convert(array: Any, library: str) -> Any:
    return array if library == "numpy" else pytest.importorskip("torch").from_numpy(array)


def make_matrix(shape: tuple[int, ...], library: str, **arguments: Any) -> regard.AttentionMatrix:
    *lead, q_len, kv_len = shape
    query, key = (convert(np.ones((*lead, n, 3)), library) for n in (q_len, kv_len))
    return regard.attention(query, key, **arguments)


def check(A: regard.AttentionMatrix, result: Any, shape: tuple[int, ...], fill: float = 0.0) -> None:
    """Compare the arrays of a result with a shape, of which every entry is `fill`."""
    for array in result if isinstance(result, tuple) else (result,):
        found = A.problem.engine.to_numpy(array)
        np.testing.assert_array_equal(found, np.full(shape, fill))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_mask_of_an_empty_matrix(shape: tuple[int, ...], library: str) -> None:
    rows, keys = shape[:-1], (*shape[:-2], shape[-1])
    for name, mask in make_masks(shape).items():
        A = make_matrix(shape, library, mask=mask)
        value = convert(np.ones((*keys, 2)), library)
        check(A, A @ value, (*rows, 2))
        check(A, A.lse, rows, -math.inf)
        check(A, A.to_dense(), shape)
        check(A, A[..., :1, :], (*shape[:-2], min(1, shape[-2]), shape[-1]))
        assert tuple(A.scores[..., :2].shape) == (*rows, min(2, shape[-1])), name
        results = A.measure(Output(value), Entropy(), Received(), Position())
        check(A, results.output, (*rows, 2))
        check(A, results.entropy, rows)
        check(A, results.received, keys)
        # The same mask as the keys that a share counts.
        check(A, make_matrix(shape, library).mass(mask), rows)


MEASURES: dict[str, Callable[[int], Any]] = {
    "entropy": lambda kv_len: Entropy(), "received": lambda kv_len: Received(), "sum": lambda kv_len: Sum(),
    "distance": lambda kv_len: Distance(LR), "position": lambda kv_len: Position(),
    "spread": lambda kv_len: Spread(LR), "max_score": lambda kv_len: MaxScore(),
    "max_weight": lambda kv_len: MaxWeight(), "max of columns": lambda kv_len: MaxWeight(-2),
    "mass": lambda kv_len: Mass(first(2)), "near": lambda kv_len: Mass(causal(LR)),
    "topk": lambda kv_len: regard.TopK(1), "contribution": lambda kv_len: Contribution(1, np.ones(kv_len)),
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal(LR)},
    "sink": {"sink": 0.5},
    "modified": {"score_mod": [regard.alibi(align=LR), regard.softcap(3.0)]},
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", [*ARGUMENTS, "linear"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_measure_of_an_empty_matrix(shape: tuple[int, ...], kind: str, library: str) -> None:
    *lead, q_len, kv_len = shape
    for name, make in MEASURES.items():
        if name in ("topk", "contribution") and not kv_len:
            continue
        if kind == "linear":
            A = regard.linear_attention(*(convert(np.ones((*lead, n, 3)), library) for n in (q_len, kv_len)))
        else:
            A = make_matrix(shape, library, **ARGUMENTS[kind])
        of_columns = name in ("received", "max of columns")
        expected = (
            *lead,
            kv_len if of_columns else q_len,
            *((1,) if name in ("topk", "contribution") else ()),
        )
        for _ in range(2):
            check(A, A.measure(own=make(kv_len)).own, expected, -math.inf if name == "max_score" else 0.0)
        check(A, A.mT @ convert(np.ones((*lead, q_len, 2)), library), (*lead, kv_len, 2))
        check(A, A.sum(), ())
        assert (
            math.isnan(float(A.mean())) and repr(A) and A._repr_html_() and A.kernel and A.plan(make(kv_len))
        )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 in shape[-2:]])
def test_an_empty_matrix_has_nothing_to_choose(shape: tuple[int, ...]) -> None:
    A = make_matrix(shape, "numpy")
    refused: list[Callable[[], Any]] = [lambda: A.max(-1), lambda: A.argmax(), lambda: A.coarsen(1)]
    refused += [lambda: A.topk(1)] if not shape[-1] else [lambda: A[..., 0, :]]
    for call in refused:
        with pytest.raises(regard.RegardError, match=r"non-empty|at least one entry"):
            call()


def test_a_matrix_without_heads_has_none_to_explain() -> None:
    with pytest.raises(regard.ArgumentError, match="it has no heads"):
        make_matrix((0, 3, 3), "numpy").explain(0)
