"""The picture of all heads that a notebook shows for a recording: small maps, one row for each call of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from regard.capture.call import Call
from regard.errors import RegardError
from regard.lens.find import as_numpy, select_batch_entry
from regard.render.notebook import PictureRow
from regard.types import Array

MAX_EDGE, MIN_EDGE = 24, 8  # cells along an edge of a map
MAX_CELLS = 120_000  # of all maps, one byte each
MAX_WEIGHTS = 500_000_000  # about a second; of more, some queries are drawn


def build_head_grid(calls: Sequence[Call]) -> tuple[list[PictureRow], str]:
    """Draw the heads of calls that have weights, in the first batch entry.

    Returns:
        The rows, one for each call, up to `MAX_CELLS`; and what a map shows, in a sentence.
    """
    count = sum(_count_heads(call) for call in calls)
    edge = min(MAX_EDGE, max(MIN_EDGE, math.isqrt(MAX_CELLS // max(count, 1))))
    samples = sum(_count_heads(call) * math.prod(call.shape[-2:]) for call in calls) > MAX_WEIGHTS
    rows: list[PictureRow] = []
    cells = 0
    for call in calls:
        cells += _count_heads(call) * edge**2
        if cells > MAX_CELLS and rows:
            break
        try:
            maps = _draw_heads(call, edge, samples)
        except RegardError:  # the page, or reading the layer, says why
            continue
        rows.append(PictureRow(call.name, maps))
    queries = (
        "Each line is one of some evenly spaced queries"
        if samples
        else "Each cell shows the largest of its weights"
    )
    entry = (
        " Only the first batch entry is drawn."
        if any(math.prod(call.shape[:-3]) > 1 for call in calls)
        else ""
    )
    return rows, f"Heads are numbered from 0, left to right. Queries run down, keys across. {queries}.{entry}"


def _count_heads(call: Call) -> int:
    """Return the number of heads of one batch entry."""
    return call.shape[-3] if len(call.shape) > 2 else 1


def _draw_heads(call: Call, edge: int, samples: bool) -> Array:
    """Compute the maps of a call: the square root of each cell, 1 for the largest of a head, (heads, rows, columns)."""
    q_len, kv_len = call.shape[-2:]
    matrix = select_batch_entry(call, 0, "recording")
    rows, columns = min(edge, q_len), min(edge, kv_len)
    if samples:
        matrix = matrix.lazy[..., np.linspace(0, q_len - 1, rows).astype(int), :]
    maps = np.nan_to_num(as_numpy(matrix.coarsen((rows, columns))).reshape(-1, rows, columns))
    largest = maps.max((1, 2), keepdims=True)
    return np.sqrt(maps / np.where(largest > 0, largest, 1.0))
