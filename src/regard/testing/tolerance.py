"""The error rule: what counts as right, derived from the definition and the dtype, never tuned to a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

# Largest absolute error allowed on ordinary inputs (normal values, outputs of order one), by dtype.
ORDINARY = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}


def name_of(dtype: Any) -> str:
    """The plain name of a dtype of any engine.

    >>> name_of(np.float32), name_of("bfloat16")
    ('float32', 'bfloat16')
    """
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).removeprefix("torch.")


def epsilon(dtype: Any) -> float:
    """The spacing of numbers at one: 2⁻⁵² for float64, 2⁻⁷ for bfloat16.

    >>> epsilon("bfloat16")
    0.0078125
    """
    name = name_of(dtype)
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
    """Pass where `actual` is as close to the definition as a naive computation at the same dtype is.

    (a) NaN and inf stand where the definition has them. (b) The error is at most `factor` times the naive one's
    largest, plus a floor: 4 ulps of `magnitude` (what was summed up, the definition itself unless given) and
    `score_error` (relative, for what is recomputed from lse: 4 · eps · (1 + the row's largest |score|)).
    (c) Where the inputs are `ordinary`, the error is within the fixed bound of the dtype.

    >>> assert_matches([1.0], [1.0], [1.0], dtype="float32")
    """
    Target.of(
        definition, naive, dtype=dtype, magnitude=magnitude, score_error=score_error, factor=factor,
        ordinary=ordinary, what=what,
    ).check(actual)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The definition of a result and how far from it each entry may be, for any number of engines."""

    definition: Any
    limit: Any
    bound: float | None
    what: str
    naive: float  # the largest error of the naive computation

    @classmethod
    def of(
        cls, definition: Any, naive: Any, *, dtype: Any, magnitude: Any = None, score_error: Any = 0.0,
        factor: float = 2.0, ordinary: bool = False, what: str = "output",
    ) -> Target:  # fmt: skip
        """What `assert_matches` holds a result against; the arguments are its own."""
        wide = np.longdouble if name_of(dtype) == "float64" else np.float64
        definition, naive = (np.asarray(x).astype(wide) for x in (definition, naive))
        with np.errstate(all="ignore"):
            size = np.abs(definition if magnitude is None else np.asarray(magnitude))
            floor = (4 * epsilon(dtype) + np.asarray(score_error)) * size + 4 * _tiny(dtype)
            naive_error = np.abs(naive - definition)
            worst = np.max(np.where(np.isfinite(naive_error), naive_error, 0), initial=0)
        bound = ORDINARY[name_of(dtype)] if ordinary else None
        return cls(definition, factor * worst + floor, bound, what, float(worst))

    def check(self, actual: Any) -> None:
        """Refuse a result that is not where and what the definition says."""
        definition, what = self.definition, self.what
        actual = np.asarray(actual).astype(definition.dtype)
        if actual.shape != definition.shape:
            raise AssertionError(f"{what}: shape {actual.shape}, the definition has {definition.shape}")
        for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
            wrong = test(actual) != test(definition)
            if wrong.any():
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                raise AssertionError(
                    f"{what}: {kind} in {int(test(actual).sum())} places, the definition in "
                    f"{int(test(definition).sum())}; first at {at}: {actual[at]} for {definition[at]}"
                )
        finite = np.isfinite(definition)
        with np.errstate(all="ignore"):
            error = np.where(finite, np.abs(actual - definition), 0)
        # Said so that a limit of NaN refuses, too.
        _refuse(finite & ~(error <= self.limit), error, self.limit, what, "the error rule")
        if self.bound is not None:
            _refuse(error > self.bound, error, self.bound, what, "the bound for ordinary inputs")


def _tiny(dtype: Any) -> float:
    name = name_of(dtype)
    return 2.0**-133 if name == "bfloat16" else float(np.finfo(name).smallest_subnormal)


def _refuse(wrong: Any, error: Any, allowed: Any, what: str, rule: str) -> None:
    if np.any(wrong):
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        limit = np.broadcast_to(allowed, np.shape(error))[at]
        raise AssertionError(f"{what}: error {error[at]:.3e} at {at} is above {rule}, {limit:.3e}")
