"""Reduce one call of an attention layer to a few numbers per head: sums and maxima over its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from regard.capture.call import Call
from regard.errors import ArgumentError
from regard.lens.head_table import as_numpy_per_head
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import WeightAt
from regard.measures import Entropy, MaxScore, Measure
from regard.types import Array

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


@dataclass(frozen=True)
class HeadMeasures:
    """What is measured in each call, and how the rows of a head are reduced.

    Args:
        extra: Measures beside the default ones, by name; each result is (…, heads, q_len).
    """

    extra: Mapping[str, Measure]

    @property
    def columns(self) -> tuple[HeadColumn, ...]:
        """The columns of the history, in order."""
        own = (
            HeadColumn(name if reduce == "mean" else f"{name}_{reduce}", name, reduce)
            for name in self.extra
            for reduce in ("mean", "min", "max")
        )
        return (*DEFAULT_COLUMNS, *own)

    def summarise(self, call: Call) -> HeadSummary | None:
        """Measure a call in one pass.

        Args:
            call: The call.

        Returns:
            Its sums and maxima; None if it has no rows that count.

        Raises:
            ArgumentError: If the result of a measure is not one number for each row.
        """
        token_rows = TokenRows.from_call(call)
        if not token_rows.rows.any():
            return None
        first_key = np.broadcast_to(token_rows.keys.argmax(-1)[..., None], token_rows.rows.shape)
        matrix = call.matrix
        results = matrix.measure(
            max_score=MaxScore(), entropy=Entropy(), first=WeightAt(first_key), **self.extra
        )._asdict()
        by_row = {name: self._check_rows(name, result, call) for name, result in results.items()}
        # A weight is exp(score − lse), so the largest one needs no search.
        with np.errstate(invalid="ignore"):  # a row without keys has −inf in both
            by_row["max_weight"] = np.exp(by_row["max_score"] - as_numpy_per_head(matrix.lse))
        is_finite = np.logical_and.reduce([np.isfinite(values) for values in by_row.values()])
        if (
            call.weights is not None
        ):  # the logarithm of a weight is the score less the lse of the layer's own softmax
            by_row["max_score"] = by_row["max_score"] + (
                np.nan if call.lse is None else as_numpy_per_head(call.lse)
            )
        return self._reduce(by_row, token_rows.rows, is_finite)

    def _check_rows(self, name: str, result: Any, call: Call) -> Array:
        if getattr(result, "shape", None) != call.shape[:-1]:
            raise ArgumentError(
                "Monitor",
                received=f"measures[{name!r}] with a result of shape {getattr(result, 'shape', type(result).__name__)}",
                expected=f"one number for each row, {call.shape[:-1]}",
                hint="Entropy, Mass, Distance, Position and Spread have such results.",
            )
        return as_numpy_per_head(result)

    def _reduce(self, by_row: dict[str, Array], rows: Array, is_finite: Array) -> HeadSummary:
        """Reduce (…, heads, q_len) over all axes but the heads; a score of NaN in a finite row is not known."""
        axes = tuple(axis for axis in range(is_finite.ndim) if axis != is_finite.ndim - 2)
        rows = np.broadcast_to(rows, is_finite.shape)
        counted = rows & is_finite
        sums, maxima = [counted.sum(axes), (rows & ~is_finite).sum(axes)], []
        for _, measure, reduce in self.columns:
            values = by_row[measure]
            if reduce == "mean":
                sums.append(np.where(counted, values, 0.0).sum(axes))
            elif reduce == "saturated":
                sums.append((counted & (values > SATURATED_WEIGHT)).sum(axes))
            else:
                signed = values if reduce == "max" else -values
                # Sums of several processes keep a NaN, maxima may not: `finish` reads it from the sum.
                maxima.append(np.where(counted & ~np.isnan(signed), signed, -np.inf).max(axes))
        return HeadSummary(np.stack(sums, -1).astype(float), np.stack(maxima, -1))

    def finish(self, summary: HeadSummary) -> list[dict[str, Any]]:
        """Turn sums and maxima into one row of numbers for each head."""
        rows = []
        for head, (sums, maxima) in enumerate(zip(summary.sums, summary.maxima, strict=True)):
            count, nonfinite, *sums = sums.tolist()
            sums_left, maxima_left = iter(sums), iter(maxima.tolist())
            has_scores = not math.isnan(sums[0])  # that of `max_score`
            row: dict[str, Any] = {"head": head}
            for column in self.columns:
                if column.reduce in ("mean", "saturated"):
                    total = next(sums_left)
                    row[column.name] = total / count if count else math.nan
                else:
                    extreme = next(maxima_left)
                    is_known = count and (has_scores or column.measure != "max_score")
                    row[column.name] = (
                        (-extreme if column.reduce == "min" else extreme) if is_known else math.nan
                    )
            rows.append(row | {"nonfinite": int(nonfinite), "rows": int(count + nonfinite)})
        return rows


class HeadSummary(NamedTuple):
    """Sums and maxima over the rows of each head, which calls and processes combine by adding and by the maximum.

    Args:
        sums: (heads, 2 + means): finite rows, rows with NaN or inf, and sums over the finite rows.
        maxima: (heads, extremes): maxima over the finite rows; a minimum is the maximum with its sign changed.
    """

    sums: Array
    maxima: Array

    def join(self, other: HeadSummary) -> HeadSummary:
        """Combine with the rows of another call."""
        return HeadSummary(self.sums + other.sums, np.maximum(self.maxima, other.maxima))
