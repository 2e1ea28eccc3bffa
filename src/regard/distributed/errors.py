"""The error that names ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from regard.errors import RegardError


class RankError(RegardError, RuntimeError):
    """A rank that died, hangs, failed, or called with other arguments than the rest of its group.

    Every rank of the group raises it, with the same ranks.

    Args:
        operation: The method that was called.
        received: What the named ranks did.
        expected: What all ranks must do.
        hint: How to go on.
        ranks: The ranks at fault, within the group.

    >>> error = RankError("A @ value", received="rank 2 died", expected="all ranks", hint="Restart.", ranks=(2,))
    >>> error.ranks
    (2,)
    """

    def __init__(
        self, operation: str, *, received: str, expected: str, hint: str, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(operation, received=received, expected=expected, hint=hint)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> Any:
        parts = {"received": self.received, "expected": self.expected, "hint": self.hint, "ranks": self.ranks}
        return partial(type(self), **parts), (self.operation,)  # type: ignore[arg-type]
