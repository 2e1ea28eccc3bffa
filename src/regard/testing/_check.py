"""One case, checked: output, lse, weights and a measure of the matrix against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard import reference
from regard._matrix import attention
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, Received
from regard.testing._cases import Case, Inputs
from regard.testing._rule import assert_matches, epsilon


def check(case: Case, inputs: Inputs) -> None:
    """Raise AssertionError where the matrix of a case breaks the error rule."""
    exact_dtype = np.longdouble if case.dtype == "float64" else np.float64
    working = np.float64 if case.dtype == "float64" else np.float32
    arrays = inputs.query, inputs.key, inputs.value
    exact = reference.attention(*arrays, **inputs.definition, dtype=exact_dtype)
    naive = reference.attention(*arrays, **inputs.definition, dtype=working)
    matrix = attention(inputs.query, inputs.key, **inputs.arguments)
    # A cap hides how large the scores were that it was given, and with them their rounding.
    before = reference.attention(*arrays[:2], **{**inputs.definition, "cap": None}).scores
    sizes = [np.abs(np.where(np.isfinite(s), s, 0)) for s in (exact.scores, before)]
    largest = np.max(np.maximum(*sizes), axis=-1, initial=0)
    drift = 4 * epsilon(working) * (1 + largest)  # what a rounded score does to a weight, relative
    common: dict[str, Any] = {"dtype": working, "ordinary": inputs.ordinary}

    with np.errstate(all="ignore"):
        value = reference.repeat_heads(np.abs(np.asarray(inputs.value).astype(exact_dtype)), inputs.query)
        summed = exact.weights @ np.where(np.isfinite(value), value, 0)
        output = naive.output.astype(inputs.value.dtype)
    assert_matches(
        matrix @ inputs.value, exact.output, output, magnitude=summed, score_error=drift[..., None],
        dtype=case.dtype, ordinary=inputs.ordinary, what="output",
    )  # fmt: skip
    assert_matches(matrix.lse, exact.lse, naive.lse, magnitude=1 + largest, what="lse", **common)
    assert_matches(
        matrix.to_dense(),
        exact.weights,
        naive.weights,
        score_error=drift[..., None],
        what="weights",
        **common,
    )
    _check_measures(matrix, exact.weights, naive.weights, drift, common)


def _check_measures(matrix: Any, exact: Any, naive: Any, drift: Any, common: dict[str, Any]) -> None:
    q_len, kv_len = exact.shape[-2:]
    block = max(1, min(q_len, kv_len, 4))
    measures = [Entropy(), Received(), Distance("lower_right"), Mass(first(3))]
    measures += [Coarse(block)] if min(q_len, kv_len) else []
    found = matrix.measure(*measures)
    with np.errstate(all="ignore"):
        # A measure's floor: its value, with the relative drift of the weights it is a sum of.
        exact_of, naive_of = (_measures_of(weights, block) for weights in (exact, naive))
        worst = np.max(drift, axis=-1, initial=0)
        for name in found._fields:
            size, more = np.abs(exact_of[name]), 0.0
            if name == "entropy":  # −w ln w changes by drift · w (1 + |ln w|)
                size = size + 1
            if name in ("received", "coarse"):
                more = worst[..., None] if name == "received" else worst[..., None, None]
            else:
                more = drift
            options = {**common, "ordinary": False}
            assert_matches(
                getattr(found, name), exact_of[name], naive_of[name], magnitude=size, score_error=more,
                what=name, **options,
            )  # fmt: skip


def _measures_of(weights: Any, block: int) -> dict[str, Any]:
    """The measures by their definitions, from whole weights."""
    *_, q_len, kv_len = weights.shape
    at = np.arange(q_len)[:, None] + kv_len - q_len
    logs = np.log(np.where(weights > 0, weights, 1))
    measures = {
        "entropy": -(weights * logs).sum(-1),
        "received": weights.sum(-2),
        "distance": (weights * np.abs(np.arange(kv_len)[None, :] - at)).sum(-1),
        "mass": weights[..., :3].sum(-1),
    }
    if min(q_len, kv_len):
        rows, columns = (np.arange(n) * block // n for n in (q_len, kv_len))
        cells = [
            [weights[..., rows == a, :][..., columns == b].mean((-2, -1)) for b in range(block)]
            for a in range(block)
        ]
        measures["coarse"] = np.moveaxis(np.array(cells), (0, 1), (-2, -1))
    return measures
