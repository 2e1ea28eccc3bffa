"""Parity: a layer with the weights of a real module, both held against that module in float64.

The definition is not derived again: it is the module's own code, run in float64 throughout (`Wide`) on the numbers of
the narrow one. The naive computation of the error rule is the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from regard._matrix import AttentionMatrix
from regard._types import Array
from regard.testing._rule import ORDINARY, Target, epsilon, name_of

Tensor = Any  # the types of torch are not followed

DTYPES = (torch.float32, torch.bfloat16)


class Answer(NamedTuple):
    """What a module or a layer gives for its real tokens, in the same order whoever gave it."""

    output: Array  # (…, embed_dim)
    weights: Array  # (…, kv_len)
    largest: Array | None = None  # the largest |score| of each row, (…, 1): asked of the layer only


class Wide(TorchFunctionMode):  # type: ignore[misc]
    """While it is on, code that asks for float32 gets float64.

    Modules take their softmax and their angles in float32, whatever they are given; the definition must not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Comparison:
    """A module in one situation, as two functions (given, dtype): the answer of the module, and of the layer.

    Weights and inputs are rounded to the dtype `given`, and everything is computed in `dtype`; so the definition is
    about the numbers that the narrow computation had.
    """

    module: str
    situation: str
    theirs: Callable[[torch.dtype, torch.dtype], Answer]
    ours: Callable[[torch.dtype, torch.dtype], Answer]

    def __str__(self) -> str:
        return f"{self.module}: {self.situation}"


@dataclass(frozen=True)
class Row:
    """The largest errors of a comparison as shares of what is allowed, (output, weights) by dtype."""

    module: str
    situation: str
    shares: dict[str, tuple[float, float]]
    error: float  # the largest of the output in float32

    @property
    def ok(self) -> bool:
        """Whether all of it is within the error rule."""
        return all(share <= 1 for pair in self.shares.values() for share in pair)  # NaN is not


def judge(comparison: Comparison) -> Row:
    """Run a comparison at every dtype and say how much of the allowed error it takes.

    In float64 there is nothing wider to be held against: there the two may differ by the bound of ordinary inputs.
    """
    shares, error = {}, 0.0
    with torch.no_grad():
        for dtype in DTYPES:
            exact, wide = (run(dtype, torch.float64) for run in (comparison.theirs, comparison.ours))
            naive, ours = (run(dtype, dtype) for run in (comparison.theirs, comparison.ours))
            # Halves are raised to float32 before they are scored.
            drift = 4 * epsilon(torch.float32) * (1 + np.asarray(wide.largest))
            shares[name_of(dtype)] = (
                _share(ours.output, Target.of(exact.output, naive.output, dtype=dtype)),
                _share(ours.weights, Target.of(exact.weights, naive.weights, dtype=dtype, score_error=drift)),
            )
            if dtype is torch.float32:
                error = float(np.abs(ours.output - exact.output).max())
                apart = [np.abs(x - y).max() for x, y in zip(wide[:2], exact[:2], strict=True)]
                output, weights = (float(x) / ORDINARY["float64"] for x in apart)
                shares["float64"] = (output, weights)
    return Row(comparison.module, comparison.situation, shares, error)


def _share(actual: Array, target: Target) -> float:
    """The largest error as a share of what is allowed; NaN where there is something to be said beside that."""
    if actual.shape != target.definition.shape or not np.isfinite(target.definition).all():
        return float("nan")
    return float((np.abs(actual - target.definition) / target.limit).max())


def largest_scores(A: AttentionMatrix) -> Array:
    """The largest |score| of each row that is not hidden: (…, q_len, 1)."""
    scores = A.scores[...].double().numpy()
    return np.abs(np.where(np.isfinite(scores), scores, 0)).max(-1, keepdims=True)


def numbers(seed: int, *shape: int) -> Tensor:
    """Normal numbers, the same whenever they are asked for: float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scatter(parameters: Iterator[Tensor] | Sequence[Tensor], seed: int = 0) -> None:
    """None of the parameters 0, and rows of weights far from even: what is not mapped would show."""
    with torch.no_grad():
        for number, x in enumerate(parameters):
            fan_in = min(x.shape) if x.ndim > 1 else 1
            x.copy_(numbers(seed + number, *x.shape) * (1.4 * fan_in**-0.5))


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown."""
    dtypes = ["float64", *map(name_of, DTYPES)]
    lines = [
        "| module | situation | " + " | ".join(dtypes) + " | error in float32 |",
        "| --- | --- |" + " --- |" * (len(dtypes) + 1),
    ]
    for row in rows:
        cells = ["{:.2g} · {:.2g}".format(*row.shares[dtype]) for dtype in dtypes]
        lines.append(f"| {row.module} | {row.situation} | " + " | ".join(cells) + f" | {row.error:.0e} |")
    return "\n".join(lines)
