"""Find the axes of a product with attention weights, in a call of `matmul`, `bmm`, `baddbmm` or `einsum`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Tensor = Any  # the types of torch are not followed

_MATRIX_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}


class ProductAxes(NamedTuple):
    """The axes of a product of weights with a value.

    Args:
        other: The value.
        key: Axis of the weights that is summed over.
        query: Axis of the weights that the value does not have; None if there is none.
        batch: The other axes of the weights.
        value_axes: Axes of the value in the order (…, kv_len, value_dim); None if it has others.
        output_axes: Axes of the result in the order (…, q_len, value_dim); None if it has others.
    """

    other: Tensor
    key: int
    query: int | None
    batch: tuple[int, ...]
    value_axes: tuple[int, ...] | None
    output_axes: tuple[int, ...] | None


def find_product_axes(name: str, args: Any, weights: Tensor) -> ProductAxes | None:
    """Find the axes of a product with weights.

    Args:
        name: Name of the function.
        args: Its positional arguments.
        weights: One of them, the weights.

    Returns:
        The axes, or None if the call is not a product of the weights with another tensor.
    """
    if name in _MATRIX_PRODUCTS:
        left, right = args[1:3] if name == "baddbmm" else args[:2]
        if name == "__rmatmul__":
            left, right = right, left
        return _find_matrix_axes(left, right, weights)
    return _find_einsum_axes(args, weights) if name == "einsum" else None


def _find_matrix_axes(left: Tensor, right: Tensor, weights: Tensor) -> ProductAxes | None:
    is_left = left is weights
    other = right if is_left else left
    if other is weights or min(weights.ndim, other.ndim) < 2:
        return None
    last = weights.ndim - 1
    order = tuple(range(other.ndim))
    axes = tuple(range(max(weights.ndim, other.ndim)))
    if not is_left:
        order, axes = (*order[:-2], order[-1], order[-2]), (*axes[:-2], axes[-1], axes[-2])
    # Rows that multiply one matrix without a batch are a linear layer.
    is_batched = other.ndim > 2 or weights.ndim == 2
    query = last - 1 if is_left else last
    return ProductAxes(
        other,
        key=last if is_left else last - 1,
        query=query if is_batched else None,
        batch=tuple(range(last - 1)),
        value_axes=order,
        output_axes=axes,
    )


def _find_einsum_axes(args: Any, weights: Tensor) -> ProductAxes | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or operands[0] is operands[1]:
        return None
    labels = _parse_equation(args[0], [operand.ndim for operand in operands])
    if labels is None:
        return None
    *inputs, output = labels
    position = 0 if operands[0] is weights else 1
    own, others, other = inputs[position], inputs[1 - position], operands[1 - position]
    if len(set(own)) < len(own) or len(set(others)) < len(others):
        return None
    summed = [label for label in own if label in others and label not in output]
    if len(summed) != 1 or any(label not in others and label not in output for label in own):
        return None
    key = summed[0]
    # Without a heads axis in the value, queries and heads are both absent from it: queries are nearer to the keys.
    absent = [label for label in own if label not in others]
    query = absent[-1] if absent else None
    batch = [label for label in own if label not in (key, query)]
    width = [label for label in others if label not in own]
    value_axes = output_axes = None
    if len(width) == 1 and all(label in others for label in batch):
        value_axes = tuple(others.index(label) for label in (*batch, key, *width))
    if len(width) == 1 and query is not None and width[0] in output:
        output_axes = tuple(output.index(label) for label in (*batch, query, *width))
    return ProductAxes(
        other,
        key=own.index(key),
        query=None if query is None else own.index(query),
        batch=tuple(own.index(label) for label in batch),
        value_axes=value_axes,
        output_axes=output_axes,
    )


def _parse_equation(equation: str, ndims: list[int]) -> list[list[str]] | None:
    """Parse an equation into the labels of each operand and of the result; None if it does not fit the operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    inputs = []
    for term, ndim in zip(terms, ndims, strict=True):
        labels = _expand_ellipsis(term, ndim - len(term.replace("...", "")))
        if len(labels) != ndim:
            return None
        inputs.append(labels)
    if not arrow:
        every = [label for labels in inputs for label in labels]
        return [*inputs, sorted(label for label in set(every) if every.count(label) == 1)]
    hidden = max(
        (ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)), default=0
    )
    return [*inputs, _expand_ellipsis(right, hidden)]


def _expand_ellipsis(term: str, hidden: int) -> list[str]:
    """Return the labels of a term; the axes of an ellipsis are counted from its end, as they broadcast."""
    before, dots, after = term.partition("...")
    names = [f"...{i}" for i in range(hidden, 0, -1)] if dots else []
    return [*before, *names, *after]


def locate_axis(before: tuple[int, ...], axis: int, after: tuple[int, ...]) -> int | None:
    """Return where an axis is after a reshape, which keeps the order of the entries; None if it was split or merged.

    >>> locate_axis((2, 4, 5, 7), 3, (8, 5, 7)), locate_axis((2, 4, 5, 7), 2, (2, 4, 35))
    (2, None)
    """
    inner = math.prod(before[axis + 1 :])
    for i in range(len(after) - 1, -1, -1):
        if after[i] == before[axis] and math.prod(after[i + 1 :]) == inner:
            return i
    return None


def group_axes(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Return the smallest groups of neighbouring axes that a reshape turns into each other.

    Args:
        before: Shape before the reshape, without axes of size 0.
        after: Shape after it.

    Returns:
        The axes before and after it, for each group. An axis that is kept is a group of its own.

    >>> group_axes((2, 4, 5, 6), (2, 20, 3, 2))
    [(range(0, 1), range(0, 1)), (range(1, 3), range(1, 2)), (range(3, 4), range(2, 4))]
    """
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        first, second, size, other = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while size != other:
            if size < other:
                size, i = size * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        groups.append((range(first, i), range(second, j)))
    return groups
