"""Checks of arguments that several packages share."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError
from regard.types import Array


def as_array(argument: Any, operation: str, name: str) -> Array:
    """Convert an array, a tensor or nested lists to a NumPy array in the byte order of this machine."""
    if hasattr(argument, "new_tensor"):  # a tensor, on any device
        if argument.requires_grad:
            raise ArgumentTypeError(
                operation,
                received=f"{name} as a tensor that requires a gradient",
                expected="numbers, or query and key as tensors",
                hint=f"NumPy has no gradients: pass {name}.detach(), or convert query and key to tensors.",
            )
        # NumPy has neither bfloat16 nor lazy conjugates.
        argument = argument.cpu().float() if str(argument.dtype) == "torch.bfloat16" else argument.cpu()
        argument = argument.resolve_conj()
    try:
        array = np.asarray(argument)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} as nested lists of different lengths",
            expected="rows of equal length",
            hint="Pad the shorter ones, and mask the padding with padding(lengths).",
        ) from None


def check_count(
    count: Any, least: int, most: int | None, operation: str, name: str, suffix: str, hint: str
) -> int:
    """Validate an integer from `least` to `most`, or without an upper limit; `suffix` ends the received text."""
    is_int = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if is_int and count >= least and (most is None or count <= most):
        return int(count)
    limits = f"of {least} or more" if most is None else f"from {least} to {most}"
    is_empty = most is not None and most < least
    raise ArgumentError(
        operation,
        received=f"{name}={count!r}{suffix}",
        expected="a non-empty matrix" if is_empty else f"{name} {limits}, an integer",
        hint=hint,
    )


def check_align(align: object, operation: str) -> None:
    """Refuse an unknown alignment."""
    if align not in (None, "upper_left", "lower_right"):
        raise ArgumentError(
            operation,
            received=f"align={align!r}",
            expected='"upper_left" or "lower_right"',
            hint='If the queries are the last tokens of the keys, use align="lower_right".',
        )
