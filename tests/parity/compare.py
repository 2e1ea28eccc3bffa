"""Parity: compare a layer that has the weights of a real module with that module in float64.

The definition is the module's own code, run in float64 throughout (`Float64Mode`) on numbers of the narrow dtype. The
naive computation of the error rule is the module itself.
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

Tensor = Any  # mypy does not follow torch's types

DTYPES = (torch.float32, torch.bfloat16)


class ParityResult(NamedTuple):
    """The result of a module or a layer for its real tokens, in the same order for both."""

    output: Array  # (…, embed_dim)
    weights: Array  # (…, kv_len)
    # For the layer only:
    max_scores: Array | None = None  # the largest |score| of each row, (…, 1)
    magnitudes: Array | None = None  # the sum of absolute terms of each output


class Float64Mode(TorchFunctionMode):  # type: ignore[misc]
    """Replace float32 by float64 in every torch call.

    Modules compute their softmax and their angles in float32, for inputs of any dtype; the definition must not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Comparison:
    """A module in one situation, as two functions of (storage dtype, compute dtype): of the module, and of the layer.

    Weights and inputs are rounded to the storage dtype, so that the float64 definition uses the numbers of the narrow
    computation.
    """

    module: str
    situation: str
    theirs: Callable[[torch.dtype, torch.dtype], ParityResult]
    ours: Callable[[torch.dtype, torch.dtype], ParityResult]

    def __str__(self) -> str:
        return f"{self.module}: {self.situation}"


@dataclass(frozen=True)
class ParityRow:
    """The largest errors of a comparison, (output, weights) by dtype."""

    module: str
    situation: str
    errors: dict[str, tuple[float, float]]
    shares: dict[str, tuple[float, float]]  # of the allowed error

    @property
    def ok(self) -> bool:
        """Whether every error is within the error rule."""
        return self.max_share <= 1  # False for NaN

    @property
    def max_share(self) -> float:
        """The largest share of the allowed error."""
        return float(np.max([share for pair in self.shares.values() for share in pair]))


def measure_parity(comparison: Comparison) -> ParityRow:
    """Run a comparison at every dtype, and return its errors as shares of the allowed error.

    There is no wider dtype to compare float64 with, so there both may differ by the bound for ordinary inputs.
    """
    errors, shares = {}, {}
    with torch.no_grad():
        for dtype in DTYPES:
            exact, wide = (run(dtype, torch.float64) for run in (comparison.theirs, comparison.ours))
            naive, ours = (run(dtype, dtype) for run in (comparison.theirs, comparison.ours))
            # Half precision is upcast to float32 before scores are computed.
            drift = 4 * epsilon(torch.float32) * (1 + np.asarray(wide.max_scores))
            output = ErrorBound.compute(exact.output, naive.output, dtype=dtype, magnitude=wide.magnitudes)
            weights = ErrorBound.compute(exact.weights, naive.weights, dtype=dtype, score_error=drift)
            name = dtype_name(dtype)
            errors[name] = (_max_error(ours.output, exact.output), _max_error(ours.weights, exact.weights))
            shares[name] = (
                _max_error(ours.output, exact.output, output.limit),
                _max_error(ours.weights, exact.weights, weights.limit),
            )
            if dtype is torch.float32:
                difference = (_max_error(wide.output, exact.output), _max_error(wide.weights, exact.weights))
                errors["float64"] = difference
                shares["float64"] = (
                    difference[0] / ORDINARY_TOLERANCE["float64"],
                    difference[1] / ORDINARY_TOLERANCE["float64"],
                )
    return ParityRow(comparison.module, comparison.situation, errors, shares)


def _max_error(actual: Array, definition: Array, limit: Any = 1.0) -> float:
    """Return the largest error, relative to `limit`; NaN if the shapes differ."""
    if actual.shape != definition.shape:
        return float("nan")
    return float((np.abs(actual - definition) / limit).max())


@contextmanager
def record_magnitudes(layer: Any) -> Iterator[list[Array]]:
    """Record the sums of absolute terms of a layer's outputs: Σ |weight · input| + |bias| of its last projection."""
    magnitudes = []

    def before(projection: Any, inputs: Any) -> None:
        bias = None if projection.bias is None else projection.bias.abs()
        terms = torch.nn.functional.linear(inputs[0].abs(), projection.weight.abs(), bias)
        magnitudes.append(terms.double().numpy())

    hook = layer.out_proj.register_forward_pre_hook(before)
    try:
        yield magnitudes
    finally:
        hook.remove()


def max_scores(A: AttentionMatrix) -> Array:
    """Return the largest unmasked |score| of each row, (…, q_len, 1)."""
    scores = A.scores[...].double().numpy()
    return np.abs(np.where(np.isfinite(scores), scores, 0)).max(-1, keepdims=True)


def draw_normal(seed: int, *shape: int) -> Tensor:
    """Draw normal numbers in float32, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomize(parameters: Iterator[Tensor] | Sequence[Tensor], seed: int = 0) -> None:
    """Make every parameter nonzero and attention rows uneven, so that an unmapped parameter shows."""
    with torch.no_grad():
        for number, x in enumerate(parameters):
            fan_in = min(x.shape) if x.ndim > 1 else 1
            x.copy_(draw_normal(seed + number, *x.shape) * (1.4 * fan_in**-0.5))


def format_markdown(rows: Sequence[ParityRow]) -> str:
    """Format rows as a Markdown table."""
    titles = ("module", "situation", "float32", "bfloat16", "error, float32", "difference, float64")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for row in rows:
        shares = ["{:.2f} · {:.2f}".format(*row.shares[dtype_name(dtype)]) for dtype in DTYPES]
        errors = ["{:.0e} · {:.0e}".format(*row.errors[name]) for name in ("float32", "float64")]
        lines.append(f"| {' | '.join((row.module, row.situation, *shares, *errors))} |")
    return "\n".join(lines)
