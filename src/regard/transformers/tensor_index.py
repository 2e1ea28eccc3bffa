"""Resolve the axes of weights that are averaged over some axes of their matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError, IndexOutOfRangeError


def resolve_dims(dim: Any, ndim: int) -> list[int]:
    """Resolve an axis, several, or None for all, to sorted positions from 0.

    Raises:
        ArgumentError: If an axis does not exist, or is named twice.

    >>> resolve_dims((-1, 0), 4), resolve_dims(None, 2)
    ([0, 3], [0, 1])
    """
    if dim is None or dim == ():
        return list(range(ndim))
    given = [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({axis + ndim if axis < 0 else axis for axis in given})
    if len(dims) != len(given) or not all(0 <= axis < ndim for axis in dims):
        raise ArgumentError(
            "weights.sum",
            received=f"dim={dim}",
            expected=f"different axes from {-ndim} to {ndim - 1}",
            hint="The axes are batch, heads, queries and keys.",
        )
    return dims


def insert_axes(
    index: Any, shape: Sequence[int], averaged: tuple[int, ...]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Extend an index by the axes over which the result is averaged.

    Args:
        index: The index that the caller passed, for an array of `shape`.
        shape: Shape after averaging.
        averaged: Axes of the matrix that are averaged, in ascending order.

    Returns:
        The index of the matrix, whole along the averaged axes, and the positions of these axes in its result.

    Raises:
        IndexOutOfRangeError: If the index has too many entries, or a boolean array has the wrong length.

    >>> insert_axes((0, -1), (1, 5, 5), (1,))
    ((0, slice(None, None, None), -1, slice(None, None, None)), (0,))
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    given = sum(entry is not None and entry is not Ellipsis for entry in entries)
    dots = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    if given > len(shape) or len(dots) > 1:
        raise IndexOutOfRangeError(
            "weights[index]",
            received=f"{given} indices and {len(dots)} ellipses",
            expected=f"at most {len(shape)} indices and one ellipsis",
            hint=f"The weights have {len(shape)} axes.",
        )
    at = dots[0] if dots else len(entries)
    entries[at : at + 1] = [slice(None)] * (len(shape) - given)
    full: list[Any] = []
    positions: list[int] = []
    result_axes = axis = matrix_axis = 0

    def insert_averaged() -> None:
        nonlocal matrix_axis, result_axes
        while matrix_axis in averaged:
            full.append(slice(None))
            positions.append(result_axes)
            matrix_axis, result_axes = matrix_axis + 1, result_axes + 1

    for entry in entries:
        if entry is not None:
            insert_averaged()
            entry = _resolve_booleans(entry, shape[axis])
            axis, matrix_axis = axis + 1, matrix_axis + 1
        full.append(entry)
        result_axes += _count_axes(entry)
    return tuple(full), tuple(positions)


def _count_axes(entry: Any) -> int:
    """Return the number of axes that an entry of an index gives the result."""
    if entry is None or isinstance(entry, slice):
        return 1
    return int(np.ndim(entry)) if not hasattr(entry, "ndim") else int(entry.ndim)


def _resolve_booleans(entry: Any, size: int) -> Any:
    """Replace a boolean array along one axis by the positions of its true entries."""
    if isinstance(entry, list):
        entry = np.array(entry)
    is_boolean = getattr(entry, "ndim", 0) == 1 and str(getattr(entry, "dtype", "")).endswith("bool")
    if not is_boolean:
        return entry
    if len(entry) != size:
        raise IndexOutOfRangeError(
            "weights[index]",
            received=f"{len(entry)} booleans for an axis of size {size}",
            expected="as many booleans as the axis has entries",
            hint="Pass positions as integers to choose some.",
        )
    return entry.nonzero()[0] if isinstance(entry, np.ndarray) else entry.nonzero()[:, 0]
