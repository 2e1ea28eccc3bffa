"""One case, checked: output, lse, weights and a measure of the matrix against the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard import reference
from regard._attention import attention
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, Received
from regard.testing._cases import Case, Inputs
from regard.testing._rule import assert_matches, epsilon

ENGINES = ("numpy", "torch fused", "torch streaming")


def check(case: Case, inputs: Inputs, engines: Sequence[str] = ENGINES[:1]) -> list[str]:
    """What each engine's matrix of a case has to say against the error rule; nothing where it holds."""
    definition = _define(case, inputs)
    failures = []
    for engine in engines:
        try:
            _check_engine(case, inputs, definition, engine)
        except Exception as error:
            failures.append(f"{engine}: {case}\n    {type(error).__name__}: {error}")
    return failures


def _to_engine(array: Any, engine: str) -> Any:
    """The same numbers in the same layout for an engine; torch has no negative strides."""
    if engine == "numpy" or not isinstance(array, np.ndarray):
        return array
    import torch

    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    if not array.flags.writeable:  # expanded
        array = np.lib.stride_tricks.as_strided(array.base, array.shape, array.strides)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@contextmanager
def _without_fused(engine: str) -> Iterator[None]:
    """While "torch streaming" is checked, no fused kernel is to be had."""
    if engine != "torch streaming":
        yield
        return
    from regard.engines import _torch_kernels

    kernel_on = _torch_kernels.kernel_on
    _torch_kernels.kernel_on = lambda device_type: None  # type: ignore[assignment]
    try:
        yield
    finally:
        _torch_kernels.kernel_on = kernel_on


@dataclass
class Definition:
    """A case by its definition, by a naive computation at the same dtype, and how far rounding may carry it."""

    exact: reference.Definition
    naive: reference.Definition
    summed: Any  # what an output is the sum of, without signs: Σ w |v|
    largest: Any  # the largest |score| of each row, its terms counted without signs
    drift: Any  # what a rounded score does to a weight, relative
    working: Any


def _define(case: Case, inputs: Inputs) -> Definition:
    exact_dtype = np.longdouble if case.dtype == "float64" else np.float64
    working = np.float64 if case.dtype == "float64" else np.float32
    arrays = inputs.query, inputs.key, inputs.value
    exact = reference.attention(*arrays, **inputs.definition, dtype=exact_dtype)
    naive = _worst_naive(inputs, exact, working)
    # A score is rounded as large as what it is the sum of: signs may cancel, and a cap may hide it.
    scale = inputs.definition.get("scale")
    unsigned = (np.abs(np.asarray(x).astype(np.float64)) for x in arrays[:2])
    terms = reference.attention(*unsigned, scale=None if scale is None else abs(scale)).scores
    sizes = [np.abs(np.where(np.isfinite(s), s, 0)) for s in (exact.scores, terms)]
    largest = np.max(np.maximum(*sizes), axis=-1, initial=0)
    with np.errstate(all="ignore"):
        value = reference.repeat_heads(np.abs(np.asarray(inputs.value).astype(exact_dtype)), inputs.query)
        summed = exact.weights @ np.where(np.isfinite(value), value, 0)
    return Definition(exact, naive, summed, largest, 4 * epsilon(working) * (1 + largest), working)


def _worst_naive(inputs: Inputs, exact: reference.Definition, working: Any) -> reference.Definition:
    """The definition, off by the most that a naive computation errs in any of three orders of summation.

    One order may be lucky where there is little to sum: a budget drawn from it alone would be a matter of luck.
    """
    orders = [
        slice(None),
        slice(None, None, -1),
        np.random.default_rng(0).permutation(inputs.query.shape[-1]),
    ]
    worst: list[Any] = [0.0] * len(exact)
    with np.errstate(all="ignore"):
        for order in orders:
            query, key = (x[..., order] for x in (inputs.query, inputs.key))
            naive = reference.attention(query, key, inputs.value, **inputs.definition, dtype=working)
            naive = naive._replace(output=naive.output.astype(inputs.value.dtype).astype(working))
            errors = [np.abs(found - right) for found, right in zip(naive, exact, strict=True)]
            worst = [np.fmax(before, error) for before, error in zip(worst, errors, strict=True)]
        return reference.Definition(*(right + error for right, error in zip(exact, worst, strict=True)))


def _check_engine(case: Case, inputs: Inputs, definition: Definition, engine: str) -> None:
    exact, naive, drift = definition.exact, definition.naive, definition.drift
    working = definition.working
    query, key, value = (_to_engine(array, engine) for array in (inputs.query, inputs.key, inputs.value))
    with _without_fused(engine):
        matrix = attention(query, key, **inputs.arguments)
        common: dict[str, Any] = {"dtype": working, "ordinary": inputs.ordinary}
        output = matrix @ value
        if engine == "torch fused" and "streaming" not in matrix.kernel:
            assert "flash" in matrix.kernel, matrix.kernel
        assert_matches(
            from_engine(output), exact.output, naive.output, magnitude=definition.summed,
            score_error=drift[..., None], dtype=case.dtype, ordinary=inputs.ordinary, what="output",
        )  # fmt: skip
        size = 1 + definition.largest
        assert_matches(from_engine(matrix.lse), exact.lse, naive.lse, magnitude=size, what="lse", **common)
        assert_matches(
            from_engine(matrix.to_dense()), exact.weights, naive.weights, score_error=drift[..., None],
            what="weights", **common,
        )  # fmt: skip
        _check_measures(matrix, exact.weights, naive.weights, drift, common)


def from_engine(array: Any) -> Any:
    """The numbers as NumPy's; bfloat16, which it does not have, as float32."""
    if type(array).__module__.startswith("torch"):
        return array.detach().float().numpy() if array.itemsize < 4 else array.detach().numpy()
    return array


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
                from_engine(getattr(found, name)), exact_of[name], naive_of[name], magnitude=size, score_error=more,
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
