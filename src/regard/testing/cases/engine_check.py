"""One case, checked: output, lse, weights and a measure of the matrix against the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from regard import reference
from regard.core.attention import attention
from regard.engines import find_engine, get_engine
from regard.masks import first
from regard.measures import Coarse, Distance, Entropy, Mass, Received
from regard.testing.cases.generate import Case, Inputs, seen_keys
from regard.testing.tolerance import Target, epsilon

# The engines that `check` can hold against the definition; the last two need torch.
ENGINES = ("numpy", "torch fused", "torch streaming")


def check(case: Case, inputs: Inputs, engines: Sequence[str] = ENGINES[:1]) -> list[str]:
    """What each engine's matrix of a case has to say against the error rule; nothing where it holds.

    `engines` are names of `ENGINES`, or of what was given to `regard.engines.register`.

    >>> from regard.testing import draw, fill
    >>> case, _ = next(draw(1, seed=0, tile=8))
    >>> check(case, fill(case, tile=8))
    []
    """
    targets = _define(case, inputs)
    failures = []
    for engine in engines:
        try:
            _check_engine(inputs, targets, engine)
        except Exception as error:
            failures.append(f"{engine}: {case}\n    {type(error).__name__}: {error}")
    return failures


def _to_engine(array: Any, engine: str) -> Any:
    """The same numbers in the same layout for an engine; torch has no negative strides."""
    if engine == "numpy" or not isinstance(array, np.ndarray):
        return array
    if engine not in ENGINES:
        return get_engine(engine).as_float(array, "check", "array")
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
    from regard.engines import torch_kernels as _torch_kernels

    get_kernel = _torch_kernels.get_kernel
    _torch_kernels.get_kernel = lambda device_type: None  # type: ignore[assignment]
    try:
        yield
    finally:
        _torch_kernels.get_kernel = get_kernel


class Targets(NamedTuple):
    """What the results of a case are held against; worked out once for all engines."""

    output: Target
    lse: Target
    weights: Target
    measures: dict[str, Target]
    block: int  # of Coarse


def _define(case: Case, inputs: Inputs) -> Targets:
    """A case by its definition and by a naive computation at the same dtype, and how far rounding may carry it."""
    exact_dtype = np.longdouble if case.dtype == "float64" else np.float64
    working = np.float64 if case.dtype == "float64" else np.float32
    value = _without_unseen(inputs)
    exact = reference.attention(inputs.query, inputs.key, value, **inputs.definition, dtype=exact_dtype)
    naive = _worst_naive(inputs, value, exact, working)
    largest, summed = _magnitudes(inputs, exact)
    drift = 4 * epsilon(working) * (1 + largest)  # what a rounded score does to a weight, relative
    # Four ulps of the lse itself, or of the scores it is made of: of few it may be near 0, of many larger than any.
    own = np.abs(np.where(np.isfinite(exact.lse), exact.lse, 0))
    common: dict[str, Any] = {"dtype": working, "ordinary": inputs.ordinary}
    block = max(1, min(*exact.weights.shape[-2:], 4))
    return Targets(
        Target.of(
            exact.output, naive.output, magnitude=summed, score_error=drift[..., None], dtype=case.dtype,
            ordinary=inputs.ordinary, what="output",
        ),
        Target.of(exact.lse, naive.lse, magnitude=np.maximum(own, 1 + largest), what="lse", **common),
        Target.of(exact.weights, naive.weights, score_error=drift[..., None], what="weights", **common),
        _define_measures(exact.weights, naive.weights, drift, block, working),
        block,
    )  # fmt: skip


def _magnitudes(inputs: Inputs, exact: reference.Definition) -> tuple[Any, Any]:
    """The largest |score| of each row, and what each output is the sum of, Σ w |v|: terms counted without signs.

    A score is rounded as large as what it is the sum of: signs may cancel, and a cap may hide it.
    """
    query, key, value = (
        np.abs(np.asarray(x).astype(np.float64)) for x in (inputs.query, inputs.key, inputs.value)
    )
    scale = inputs.definition.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    with np.errstate(all="ignore"):
        terms = query @ reference.repeat_heads(key, query).swapaxes(-1, -2) * scale
        terms = np.where(inputs.definition.get("mask", True), terms, 0)  # what is hidden widens no limit
        sizes = [np.abs(np.where(np.isfinite(s), s, 0)) for s in (exact.scores, terms)]
        finite = reference.repeat_heads(np.where(np.isfinite(value), value, 0), query)
        return np.max(np.maximum(*sizes), axis=-1, initial=0), exact.weights.astype(np.float64) @ finite


def _without_unseen(inputs: Inputs) -> Any:
    """The value with zeros for the NaN or inf that no query may see: the definition is the same, and much quicker."""
    allowed = np.broadcast_to(
        inputs.definition.get("mask", True), (*inputs.query.shape[:-1], inputs.key.shape[-2])
    )
    seen = seen_keys(allowed, inputs.value.shape[:-2])[..., None]
    return np.where(seen | np.isfinite(inputs.value), inputs.value, inputs.value.dtype.type(0))


def _worst_naive(
    inputs: Inputs, value: Any, exact: reference.Definition, working: Any
) -> reference.Definition:
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
            naive = reference.attention(query, key, value, **inputs.definition, dtype=working)
            naive = naive._replace(output=naive.output.astype(inputs.value.dtype).astype(working))
            errors = [np.abs(found - right) for found, right in zip(naive, exact, strict=True)]
            worst = [np.fmax(before, error) for before, error in zip(worst, errors, strict=True)]
        return reference.Definition(*(right + error for right, error in zip(exact, worst, strict=True)))


def _check_engine(inputs: Inputs, targets: Targets, engine: str) -> None:
    query, key, value = (_to_engine(array, engine) for array in (inputs.query, inputs.key, inputs.value))
    with _without_fused(engine):
        matrix = attention(query, key, **inputs.arguments)
        output = matrix @ value
        if engine == "torch fused" and "streaming" not in matrix.kernel:
            assert "flash" in matrix.kernel, matrix.kernel
        targets.output.check(from_engine(output))
        targets.lse.check(from_engine(matrix.lse))
        targets.weights.check(from_engine(matrix.to_dense()))
        measures = [Entropy(), Received(), Distance("lower_right"), Mass(first(3))]
        measures += [Coarse(targets.block)] if "coarse" in targets.measures else []
        for name, found in matrix.measure(*measures)._asdict().items():
            targets.measures[name].check(from_engine(found))


def from_engine(array: Any) -> Any:
    """The numbers as NumPy's; bfloat16, which it does not have, as float32."""
    if type(array).__module__.startswith("torch"):
        return array.detach().float().numpy() if array.itemsize < 4 else array.detach().numpy()
    return find_engine("check", result=array).to_numpy(array)


def _define_measures(exact: Any, naive: Any, drift: Any, block: int, working: Any) -> dict[str, Target]:
    targets = {}
    with np.errstate(all="ignore"):
        # A measure's floor: its value, with the relative drift of the weights it is a sum of.
        exact_of, naive_of = (_measures_of(weights, block) for weights in (exact, naive))
        worst = np.max(drift, axis=-1, initial=0)
        drifts = {"received": worst[..., None], "coarse": worst[..., None, None]}
        for name, measure in exact_of.items():
            size = np.abs(measure)
            if name == "entropy":  # −w ln w changes by drift · w (1 + |ln w|)
                size = size + 1
            targets[name] = Target.of(
                measure, naive_of[name], magnitude=size, score_error=drifts.get(name, drift), dtype=working,
                what=name,
            )  # fmt: skip
    return targets


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
