"""Sums and maxima of every layer and head over one training step, combined over its calls and processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from regard.capture.call import Call
from regard.errors import ArgumentError
from regard.lens.head_table import as_numpy_per_head
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import WeightAt
from regard.measures import Entropy, MaxScore, Measure
from regard.monitor.head_layout import LayerPart, Layout
from regard.monitor.history import FloatArray, Snapshot
from regard.types import Array

if TYPE_CHECKING:
    from regard.core.matrix import AttentionMatrix
    from regard.distributed.matrix import DistributedMatrix

# A row is saturated if one weight exceeds this.
SATURATED_WEIGHT = 0.99


class HeadColumn(NamedTuple):
    """A column of the history: a measure of each row, reduced over rows and batch.

    Args:
        name: Name of the column.
        measure: Name of the measure.
        reduce: "mean", "max", "min" or "saturated", the share of the rows above `SATURATED_WEIGHT`.
    """

    name: str
    measure: str
    reduce: Literal["mean", "max", "min", "saturated"]


DEFAULT_COLUMNS = (
    HeadColumn("max_score", "max_score", "max"),
    HeadColumn("max_score_mean", "max_score", "mean"),
    HeadColumn("entropy", "entropy", "mean"),
    HeadColumn("entropy_min", "entropy", "min"),
    HeadColumn("first", "first", "mean"),
    HeadColumn("first_max", "first", "max"),
    HeadColumn("saturated", "max_weight", "saturated"),
)


class HeadSummary(NamedTuple):
    """Sums and maxima over the rows of each head, which calls and processes combine by adding and by the maximum.

    Args:
        sums: (heads, 2 + means): finite rows, rows with NaN or inf, and sums over the finite rows.
        maxima: (heads, extremes): maxima over the finite rows; a minimum is the maximum with its sign changed.
    """

    sums: Array
    maxima: Array


class StepTable:
    """Sums and maxima of every layer and head over one training step.

    Args:
        extra: Measures in addition to the default ones, by name; each result is (…, heads, q_len).
    """

    def __init__(self, extra: Mapping[str, Measure]) -> None:
        self._extra = extra
        own = (
            HeadColumn(name if reduce == "mean" else f"{name}_{reduce}", name, reduce)
            for name in extra
            for reduce in ("mean", "min", "max")
        )
        self._columns: tuple[HeadColumn, ...] = (*DEFAULT_COLUMNS, *own)
        self.layers: dict[str, HeadSummary] = {}
        self._first_heads: dict[str, int] = {}  # number of the first head of a layer, if it is not 0
        self.is_empty = True

    def add(self, call: Call) -> None:
        """Measure a call in one pass, and join it with the other calls of its layer."""
        self.is_empty = False
        token_rows = TokenRows.from_call(call)
        if not token_rows.rows.any():
            return
        by_row = self._measure(call.matrix, token_rows)
        is_finite = np.logical_and.reduce([np.isfinite(values) for values in by_row.values()])
        if call.weights is not None:
            # The logarithm of a weight is the score less the lse of the layer's own softmax.
            lse = np.nan if call.lse is None else as_numpy_per_head(call.lse)
            by_row["max_score"] = by_row["max_score"] + lse
        self._join(call.name, self._reduce(by_row, token_rows.rows, is_finite))

    def add_shards(self, name: str, matrix: DistributedMatrix) -> None:
        """Measure the rows of this process over the keys of all ranks of a group; every rank of it must call it."""
        self.is_empty = False
        with torch.no_grad():
            token_rows = TokenRows.from_shards(matrix)
            by_row = self._measure(matrix, token_rows)
        is_finite = np.logical_and.reduce([np.isfinite(values) for values in by_row.values()])
        self._join(name, self._reduce(by_row, token_rows.rows, is_finite))

    def _measure(self, matrix: AttentionMatrix, token_rows: TokenRows) -> dict[str, Array]:
        """Return the measures of each row by name, (…, heads, q_len)."""
        first_key = token_rows.keys.argmax(-1)[..., None]  # of all rows of a batch entry
        results = matrix.measure(
            max_score=MaxScore(), entropy=Entropy(), first=WeightAt(first_key), **self._extra
        )._asdict()
        by_row: dict[str, Array] = {}
        for name, result in results.items():
            shape = getattr(result, "shape", type(result).__name__)
            if shape != matrix.shape[:-1]:
                raise ArgumentError(
                    "Monitor",
                    received=f"measures[{name!r}] with a result of shape {shape}",
                    expected=f"one number for each row, {matrix.shape[:-1]}",
                    hint="Entropy, Mass, Distance, Position and Spread return such results.",
                )
            by_row[name] = as_numpy_per_head(result)
        # A weight is exp(score − lse), so the largest one needs no search.
        with np.errstate(invalid="ignore"):  # a row without keys has −inf in both
            by_row["max_weight"] = np.exp(by_row["max_score"] - as_numpy_per_head(matrix.lse))
        return by_row

    def _join(self, name: str, summary: HeadSummary) -> None:
        """Join the rows of a call with those of the other calls of its layer."""
        before = self.layers.get(name)
        if before is not None:
            maxima = np.maximum(before.maxima, summary.maxima)
            summary = HeadSummary(before.sums + summary.sums, maxima)
        self.layers[name] = summary

    def _reduce(self, by_row: dict[str, Array], rows: Array, is_finite: Array) -> HeadSummary:
        """Reduce (…, heads, q_len) over all axes but the heads; a score of NaN in a finite row is not known."""
        axes = tuple(axis for axis in range(is_finite.ndim) if axis != is_finite.ndim - 2)
        rows = np.broadcast_to(rows, is_finite.shape)
        counted = rows & is_finite
        sums, maxima = [counted.sum(axes), (rows & ~is_finite).sum(axes)], []
        for _, measure, reduce in self._columns:
            values = by_row[measure]
            if reduce == "mean":
                sums.append(np.where(counted, values, 0.0).sum(axes))
            elif reduce == "saturated":
                sums.append((counted & (values > SATURATED_WEIGHT)).sum(axes))
            else:
                signed = values if reduce == "max" else -values
                # Sums of several processes keep a NaN, maxima may not: `rows` reads it from the sum.
                maxima.append(
                    np.where(counted & ~np.isnan(signed), signed, -np.inf).max(axes, initial=-np.inf)
                )
        return HeadSummary(np.stack(sums, -1).astype(float), np.stack(maxima, -1))

    def combine(self, layout: Layout, own: dict[str, LayerPart], group: Any, device: Any) -> None:
        """Combine with the tables of the other processes: one SUM and one MAX all-reduce."""
        unknown = [
            name
            for name, summary in self.layers.items()
            if name not in layout or layout[name].heads.get(own[name].part) != len(summary.sums)
        ]
        if unknown:
            warnings.warn(
                f"Monitor: {unknown[0]!r} did not run in the first monitored step of any process, so it is skipped: "
                f"the processes agree on the layers in that step.",
                stacklevel=2,
            )
        num_sums = 2 + sum(column.reduce in ("mean", "saturated") for column in self._columns)
        num_maxima = 2 + len(self._columns) - num_sums
        parts = [
            self.layers[name]
            if name in self.layers and name not in unknown and own[name].part == number
            else HeadSummary(np.zeros((heads, num_sums)), np.full((heads, num_maxima), -np.inf))
            for name, layer in layout.items()
            for number, heads in layer.heads.items()
        ]
        stops = np.cumsum([sum(layer.heads.values()) for layer in layout.values()])[:-1]
        halves = []
        for half, operation in enumerate((dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
            table = torch.from_numpy(np.concatenate([part[half] for part in parts])).to(device)
            dist.all_reduce(table, op=operation, group=group)
            halves.append(np.split(table.cpu().numpy(), stops))
        self.layers = {name: HeadSummary(*both) for name, *both in zip(layout, *halves, strict=True)}
        self._first_heads = {name: layer.first_head for name, layer in layout.items()}

    def snapshot(self, step: int, numbers: dict[str, int]) -> Snapshot:
        """Return the numbers of all heads.

        Args:
            step: The step.
            numbers: Number of each layer by name; layers that ran for the first time are added.
        """
        places: list[tuple[str, int, int]] = []
        values = [np.empty((0, len(self._columns) + 2))]
        for name, summary in self.layers.items():
            layer, first_head = numbers.setdefault(name, len(numbers)), self._first_heads.get(name, 0)
            places += [(name, layer, first_head + head) for head in range(len(summary.sums))]
            values.append(self._compute_columns(summary))
        columns = *(column.name for column in self._columns), "nonfinite", "rows"
        return Snapshot(step, ("module", "layer", "head"), places, columns, np.concatenate(values))

    def _compute_columns(self, summary: HeadSummary) -> FloatArray:
        """Return the numbers of the heads of a layer, (heads, columns)."""
        count, nonfinite, *sums = summary.sums.T
        mean_of, maxima = iter(sums), iter(summary.maxima.T)
        columns = []
        for column in self._columns:
            if column.reduce in ("mean", "saturated"):
                columns.append(next(mean_of) / np.where(count > 0, count, np.nan))
            else:
                extreme = next(maxima) * (-1 if column.reduce == "min" else 1)
                is_known = (count > 0) & ~(np.isnan(sums[0]) & (column.measure == "max_score"))
                columns.append(np.where(is_known, extreme, np.nan))
        return np.stack([*columns, nonfinite, count + nonfinite], -1)
