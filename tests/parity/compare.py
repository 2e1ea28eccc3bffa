"""Parity: a layer with the weights of a real module, both held against that module in float64.

The definition is not derived again: it is the module's own code, run in float64 throughout (`Wide`) on the numbers of
the narrow one. The naive computation of the error rule is the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from regard.core.matrix import AttentionMatrix
from regard.testing.tolerance import ORDINARY_TOLERANCE, ErrorBound, dtype_name, epsilon
from regard.types import Array

Tensor = Any  # the types of torch are not followed

DTYPES = (torch.float32, torch.bfloat16)


class Answer(NamedTuple):
    """What a module or a layer gives for its real tokens, in the same order whoever gave it."""

    output: Array  # (…, embed_dim)
    weights: Array  # (…, kv_len)
    # Asked of the layer only:
    largest: Array | None = None  # the largest |score| of each row, (…, 1)
    summed: Array | None = None  # what each output is the sum of, terms counted without signs


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
    """The largest errors of a comparison, (output, weights) by dtype."""

    module: str
    situation: str
    errors: dict[str, tuple[float, float]]
    shares: dict[str, tuple[float, float]]  # of what is allowed

    @property
    def ok(self) -> bool:
        """Whether all of it is within the error rule."""
        return self.largest <= 1  # NaN is not

    @property
    def largest(self) -> float:
        """The largest share."""
        return float(np.max([share for pair in self.shares.values() for share in pair]))


def judge(comparison: Comparison) -> Row:
    """Run a comparison at every dtype and say how much of the allowed error it takes.

    In float64 there is nothing wider to be held against: there the two may differ by the bound of ordinary inputs.
    """
    errors, shares = {}, {}
    with torch.no_grad():
        for dtype in DTYPES:
            exact, wide = (run(dtype, torch.float64) for run in (comparison.theirs, comparison.ours))
            naive, ours = (run(dtype, dtype) for run in (comparison.theirs, comparison.ours))
            # Halves are raised to float32 before they are scored.
            drift = 4 * epsilon(torch.float32) * (1 + np.asarray(wide.largest))
            output = ErrorBound.compute(exact.output, naive.output, dtype=dtype, magnitude=wide.summed)
            weights = ErrorBound.compute(exact.weights, naive.weights, dtype=dtype, score_error=drift)
            name = dtype_name(dtype)
            errors[name] = (_largest(ours.output, exact.output), _largest(ours.weights, exact.weights))
            shares[name] = (
                _largest(ours.output, exact.output, output.limit),
                _largest(ours.weights, exact.weights, weights.limit),
            )
            if dtype is torch.float32:
                apart = (_largest(wide.output, exact.output), _largest(wide.weights, exact.weights))
                errors["float64"] = apart
                shares["float64"] = (
                    apart[0] / ORDINARY_TOLERANCE["float64"],
                    apart[1] / ORDINARY_TOLERANCE["float64"],
                )
    return Row(comparison.module, comparison.situation, errors, shares)


def _largest(actual: Array, definition: Array, limit: Any = 1.0) -> float:
    """The largest error, in limits; NaN where the two cannot be compared."""
    if actual.shape != definition.shape:
        return float("nan")
    return float((np.abs(actual - definition) / limit).max())


@contextmanager
def sums(layer: Any) -> Iterator[list[Array]]:
    """What the outputs of a layer's calls are the sums of: Σ |weight · input| + |bias| of its last projection."""
    found = []

    def before(projection: Any, inputs: Any) -> None:
        bias = None if projection.bias is None else projection.bias.abs()
        terms = torch.nn.functional.linear(inputs[0].abs(), projection.weight.abs(), bias)
        found.append(terms.double().numpy())

    hook = layer.out_proj.register_forward_pre_hook(before)
    try:
        yield found
    finally:
        hook.remove()


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
    titles = ("module", "situation", "float32", "bfloat16", "error, float32", "difference, float64")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        shares = ["{:.2f} · {:.2f}".format(*row.shares[dtype_name(dtype)]) for dtype in DTYPES]
        errors = ["{:.0e} · {:.0e}".format(*row.errors[name]) for name in ("float32", "float64")]
        lines.append(f"| {' | '.join((row.module, row.situation, *shares, *errors))} |")
    return "\n".join(lines)
