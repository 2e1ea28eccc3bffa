"""Dynamic time warping of attention over time: standardise and filter the weights, and find the cheapest path."""

from __future__ import annotations

import numpy as np

from regard.types import Array, IntArray


def standardise_columns(weights: Array) -> Array:
    """Subtract the mean of each column and divide by its standard deviation; a constant column becomes 0.

    A frame that every token attends to, such as a sink, then says nothing about where a token is.

    Args:
        weights: (tokens, frames).

    Returns:
        (tokens, frames), float64.

    >>> standardise_columns(np.array([[0.5, 0.25], [0.5, 0.75]])).tolist()
    [[0.0, -1.0], [0.0, 1.0]]
    """
    if not len(weights):
        return weights
    deviations, spread = weights - weights.mean(0), weights.std(0)
    return deviations / np.where(spread > 0, spread, 1.0)


def filter_median(rows: Array, width: int) -> Array:
    """Replace each number by the median of `width` numbers around it; rows are reflected at both ends.

    Args:
        rows: (…, n).
        width: An odd number. Rows of at most `width // 2` numbers stay as they are.

    Returns:
        (…, n).

    >>> filter_median(np.array([0.0, 9.0, 1.0, 2.0, 2.0]), 3).tolist()
    [9.0, 1.0, 2.0, 2.0, 2.0]
    """
    reach, length = width // 2, rows.shape[-1]
    if length <= reach:
        return rows
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(reach, reach)], mode="reflect")
    shifted = [padded[..., i : i + length] for i in range(width)]
    # Sorting whole arrays against each other is ten times faster than sorting each short window.
    for last in range(width - 1, reach - 1, -1):
        for i in range(last):
            low, high = np.minimum(shifted[i], shifted[i + 1]), np.maximum(shifted[i], shifted[i + 1])
            shifted[i], shifted[i + 1] = low, high
    return shifted[reach]


def find_cheapest_path(costs: Array) -> tuple[IntArray, IntArray]:
    """Find the path from the first cell to the last whose costs have the smallest sum.

    A step goes to the next row, to the next column, or to both. Of equal sums, the path stays in its row, then goes to
    both.

    Args:
        costs: (rows, columns), finite, at least one of each.

    Returns:
        The rows and the columns of the cells on the path, in order.

    >>> rows, columns = find_cheapest_path(np.array([[0, 0, 9], [9, 9, 0]]))
    >>> rows.tolist(), columns.tolist()
    ([0, 0, 1], [0, 1, 2])
    """
    num_rows, num_columns = costs.shape
    flat = np.ascontiguousarray(costs, np.float64).reshape(-1)
    choices = np.empty(flat.shape, np.int8)  # 0: from both, 1: from the row before, 2: from the column before
    # Cells on one antidiagonal do not depend on each other. Sums are indexed by row + 1; index 0 is outside.
    before_last, last, current = (np.full(num_rows + 1, np.inf) for _ in range(3))
    before_last[0] = 0.0
    for diagonal in range(num_rows + num_columns - 1):
        top, bottom = max(0, diagonal - num_columns + 1), min(num_rows - 1, diagonal)
        first, final = (row * (num_columns - 1) + diagonal for row in (top, bottom))
        cells = slice(first, final + 1, max(1, num_columns - 1))
        from_both, from_row = before_last[top : bottom + 1], last[top : bottom + 1]
        from_column = last[top + 1 : bottom + 2]
        cheaper = np.minimum(from_both, from_row)
        stays = from_column <= cheaper
        current[top + 1 : bottom + 2] = np.where(stays, from_column, cheaper) + flat[cells]
        choices[cells] = np.where(stays, 2, from_row < from_both)
        before_last[0] = np.inf
        before_last, last, current = last, current, before_last
    return _follow_back(choices.reshape(num_rows, num_columns))


def _follow_back(choices: Array) -> tuple[IntArray, IntArray]:
    """Follow the choices from the last cell to the first."""
    row, column = choices.shape[0] - 1, choices.shape[1] - 1
    cells = [(row, column)]
    while row or column:
        choice = choices[row, column]
        row, column = row - (choice != 2), column - (choice != 1)
        cells.append((row, column))
    rows, columns = np.array(cells[::-1], np.int64).T
    return rows, columns
