"""The error rule: how far a result may be from the definition, derived from the dtype and never tuned to a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.types import ORDINARY_TOLERANCE

__all__ = ["ORDINARY_TOLERANCE", "ErrorBound", "assert_matches", "dtype_name", "epsilon"]


def dtype_name(dtype: Any) -> str:
    """Return the plain name of a dtype of NumPy or torch.

    >>> dtype_name(np.float32), dtype_name("bfloat16")
    ('float32', 'bfloat16')
    """
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def epsilon(dtype: Any) -> float:
    """Return the spacing of numbers at one: 2⁻⁵² for float64, 2⁻⁷ for bfloat16.

    >>> epsilon("bfloat16")
    0.0078125
    """
    name = dtype_name(dtype)
    return 2.0**-7 if name == "bfloat16" else float(np.finfo(name).eps)


def assert_matches(
    actual: Any,
    definition: Any,
    naive: Any,
    *,
    dtype: Any,
    magnitude: Any = None,
    score_error: Any = 0.0,
    factor: float = 2.0,
    ordinary: bool = False,
    what: str = "output",
) -> None:
    """Check that a result is as close to the definition as a naive computation at the same dtype.

    The rule has three parts. (a) NaN and inf are where the definition has them. (b) The error is at most `factor` times
    the largest naive error, plus a floor: 4 ulps of `magnitude`, and `score_error` relative to it. (c) On ordinary
    inputs the error is within the fixed bound of the dtype.

    Args:
        actual: The result, of any shape.
        definition: The exact result, computed in a wider dtype; same shape.
        naive: The result of a naive computation at the same dtype; same shape.
        dtype: The dtype of the computation.
        magnitude: The sum of the absolute terms of each entry; broadcasts to the result. Default: `definition`.
        score_error: A relative error to allow for results that are recomputed from lse:
            4 · eps · (1 + the largest |score| of the row). Default 0.
        factor: How many times the naive error is allowed. Default 2; gradients use 3.
        ordinary: Whether the inputs are ordinary, so that part (c) applies.
        what: The name of the result in the error message.

    Raises:
        AssertionError: If the result breaks the rule. The message names the first entry that does.

    >>> assert_matches([1.0], [1.0], [1.0], dtype="float32")
    """
    ErrorBound.compute(
        definition, naive, dtype=dtype, magnitude=magnitude, score_error=score_error, factor=factor,
        ordinary=ordinary, what=what,
    ).check(actual)  # fmt: skip


@dataclass(frozen=True)
class ErrorBound:
    """The definition of a result and the error allowed for each entry, to check any number of results against."""

    definition: Any
    limit: Any
    ordinary_limit: float | None
    what: str
    naive_error: float  # the largest error of the naive computation

    @classmethod
    def compute(
        cls, definition: Any, naive: Any, *, dtype: Any, magnitude: Any = None, score_error: Any = 0.0,
        factor: float = 2.0, ordinary: bool = False, what: str = "output",
    ) -> ErrorBound:  # fmt: skip
        """Compute the bound. The arguments are those of `assert_matches`.

        Where long double is float64, as on Windows, a definition in float64 may have an error of its own.
        """
        wide = np.longdouble if dtype_name(dtype) == "float64" else np.float64
        definition, naive = (np.asarray(x).astype(wide) for x in (definition, naive))
        with np.errstate(all="ignore"):
            size = np.abs(definition if magnitude is None else np.asarray(magnitude))
            name = dtype_name(dtype)
            smallest = 2.0**-133 if name == "bfloat16" else float(np.finfo(name).smallest_subnormal)
            floor = (4 * epsilon(dtype) + np.asarray(score_error)) * size + 4 * smallest
            if np.finfo(wide).eps == epsilon(dtype):  # the definition is rounded as the result is
                floor = 2 * floor
            naive_error = np.abs(naive - definition)
            worst = np.max(np.where(np.isfinite(naive_error), naive_error, 0), initial=0)
        ordinary_limit = ORDINARY_TOLERANCE[dtype_name(dtype)] if ordinary else None
        return cls(definition, factor * worst + floor, ordinary_limit, what, float(worst))

    def compute_share(self, actual: Any) -> float:
        """Return the largest error as a share of what the rule allows for its entry: at most 1 within the rule."""
        actual = np.asarray(actual).astype(self.definition.dtype)
        finite = np.isfinite(self.definition)
        with np.errstate(all="ignore"):
            error = np.where(finite, np.abs(actual - self.definition), 0)
            limit = self.limit if self.ordinary_limit is None else np.minimum(self.limit, self.ordinary_limit)
            shares = np.where(error == 0, 0, error / limit)
        return float(np.max(shares, initial=0))

    def check(self, actual: Any) -> None:
        """Raise an AssertionError if a result is not within the bound."""
        definition, what = self.definition, self.what
        actual = np.asarray(actual).astype(definition.dtype)
        if actual.shape != definition.shape:
            raise AssertionError(f"{what}: shape {actual.shape}, the definition has {definition.shape}")
        for name, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            wrong = test(actual) != test(definition)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise AssertionError(
                    f"{what}: {name} in {int(test(actual).sum())} entries, the definition in "
                    f"{int(test(definition).sum())}; first at {at}: {actual[at]}, expected {definition[at]}"
                )
        finite = np.isfinite(definition)
        with np.errstate(all="ignore"):
            error = np.where(finite, np.abs(actual - definition), 0)
        # Negated, so that a limit of NaN fails too.
        _check_errors(finite & ~(error <= self.limit), error, self.limit, what, "the error rule")
        if self.ordinary_limit is not None:
            exceeds = error > self.ordinary_limit
            _check_errors(exceeds, error, self.ordinary_limit, what, "the bound for ordinary inputs")


def _check_errors(wrong: Any, error: Any, allowed: Any, what: str, rule: str) -> None:
    if np.any(wrong):
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        limit = np.broadcast_to(allowed, np.shape(error))[at]
        raise AssertionError(f"{what}: error {error[at]:.3e} at {at} is above {rule}, {limit:.3e}")
