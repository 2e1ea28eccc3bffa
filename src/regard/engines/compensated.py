"""Sums with compensated rounding errors, for devices without float64."""

from __future__ import annotations

from typing import Any

from regard.types import Array, Namespace


class CompensatedSum:
    """A float32 array of sums beside an array of the rounding errors of their additions.

    `sums[index] += terms` computes the rounding error of each addition exactly (Knuth's two-sum) and adds it to the
    second array. After n additions the error is about eps + n · eps², as if they were made in float64 and rounded once:
    below 2 eps for n up to 2²³. Every other operation reads the sums, rounded to float32.

    Args:
        high: The sums as float32 adds them.
        low: The errors of these additions, of the same shape.
        xp: Array API namespace of both.

    >>> import numpy as np
    >>> sums = CompensatedSum(np.zeros(1, np.float32), np.zeros(1, np.float32), np)
    >>> for term in [1.0, *[2.0**-24] * 8]:
    ...     sums[:] += np.array([term], np.float32)
    >>> float(sums.high[0]), float(sums.resolve()[0]) == 1 + 8 * 2.0**-24
    (1.0, True)
    """

    __array_ufunc__ = None  # NumPy then calls the methods here

    def __init__(self, high: Array, low: Array, xp: Namespace) -> None:
        self.high, self.low, self._xp = high, low, xp

    def resolve(self) -> Array:
        """Return the sums, rounded to float32."""
        return self.high + self.low

    # Accumulation

    def __getitem__(self, index: Any) -> CompensatedSum:
        return self._replace(self.high[index], self.low[index])

    def __setitem__(self, index: Any, values: Any) -> None:
        if not isinstance(values, CompensatedSum):
            self.high[index], self.low[index] = values, 0.0
        elif not _is_view(index):  # a view was updated in place
            self.high[index], self.low[index] = values.high, values.low

    def __iadd__(self, terms: Any) -> CompensatedSum:
        if isinstance(terms, CompensatedSum):
            self += terms.high
            self.low += terms.low
            return self
        total, error = self._add_exactly(terms)
        self.low += error
        self.high[...] = total
        return self

    def __isub__(self, terms: Any) -> CompensatedSum:
        self += -terms
        return self

    def __add__(self, terms: Any) -> CompensatedSum:
        if isinstance(terms, CompensatedSum):
            total, error = self._add_exactly(terms.high)
            return self._replace(total, self.low + terms.low + error)
        total, error = self._add_exactly(terms)
        return self._replace(total, self.low + error)

    def __mul__(self, factor: Any) -> CompensatedSum:
        return self._replace(self.high * factor, self.low * factor)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> CompensatedSum:
        return self._replace(-self.high, -self.low)

    def _replace(self, high: Array, low: Array) -> CompensatedSum:
        return CompensatedSum(high, low, self._xp)

    def _add_exactly(self, terms: Array) -> tuple[Array, Array]:
        """Return the sums with these terms, rounded, and the rounding error, exactly; 0 where it is not finite."""
        total = self.high + terms
        part = total - self.high
        error = (self.high - (total - part)) + (terms - part)
        return total, self._xp.where(error == error, error, 0.0)  # inf − inf is NaN

    # Any other operation

    def __sub__(self, other: Any) -> Array:
        return self.resolve() - other

    def __truediv__(self, other: Any) -> Array:
        return self.resolve() / other

    def __len__(self) -> int:
        return len(self.high)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.resolve(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function of torch to the rounded sums."""
        return func(*map(resolve_sums, args), **{name: resolve_sums(x) for name, x in (kwargs or {}).items()})


def resolve_sums(state: Any) -> Any:
    """Replace every `CompensatedSum` in a state, in lists and tuples too, by its rounded sums."""
    if isinstance(state, CompensatedSum):
        return state.resolve()
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*map(resolve_sums, state))
    return type(state)(map(resolve_sums, state)) if type(state) in (list, tuple) else state


def _is_view(index: Any) -> bool:
    """Return whether an index gives a view: integers, slices, None and the ellipsis do."""
    entries = index if isinstance(index, tuple) else (index,)
    return all(entry is None or entry is Ellipsis or isinstance(entry, int | slice) for entry in entries)
