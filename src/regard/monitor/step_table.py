"""Sums and maxima of every layer and head over one training step, combined over its calls and processes."""

from __future__ import annotations

import hashlib
import math
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from regard.capture.call import Call
from regard.capture.own_softmax import count_heads
from regard.errors import ArgumentError
from regard.lens.head_table import as_numpy_per_head
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import WeightAt
from regard.measures import Entropy, MaxScore, Measure
from regard.types import Array

Tensor = Any  # the types of torch are not followed

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
        first_key = np.broadcast_to(token_rows.keys.argmax(-1)[..., None], token_rows.rows.shape)
        matrix = call.matrix
        results = matrix.measure(
            max_score=MaxScore(), entropy=Entropy(), first=WeightAt(first_key), **self._extra
        )._asdict()
        by_row: dict[str, Array] = {}
        for name, result in results.items():
            shape = getattr(result, "shape", type(result).__name__)
            if shape != call.shape[:-1]:
                raise ArgumentError(
                    "Monitor",
                    received=f"measures[{name!r}] with a result of shape {shape}",
                    expected=f"one number for each row, {call.shape[:-1]}",
                    hint="Entropy, Mass, Distance, Position and Spread return such results.",
                )
            by_row[name] = as_numpy_per_head(result)
        # A weight is exp(score − lse), so the largest one needs no search.
        with np.errstate(invalid="ignore"):  # a row without keys has −inf in both
            by_row["max_weight"] = np.exp(by_row["max_score"] - as_numpy_per_head(matrix.lse))
        is_finite = np.logical_and.reduce([np.isfinite(values) for values in by_row.values()])
        if call.weights is not None:
            # The logarithm of a weight is the score less the lse of the layer's own softmax.
            lse = np.nan if call.lse is None else as_numpy_per_head(call.lse)
            by_row["max_score"] = by_row["max_score"] + lse
        summary, before = self._reduce(by_row, token_rows.rows, is_finite), self.layers.get(call.name)
        if before is not None:
            maxima = np.maximum(before.maxima, summary.maxima)
            summary = HeadSummary(before.sums + summary.sums, maxima)
        self.layers[call.name] = summary

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
                maxima.append(np.where(counted & ~np.isnan(signed), signed, -np.inf).max(axes))
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

    def rows(self, step: int, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return the table as rows of the history, one for each layer and head."""
        rows = []
        for name, summary in self.layers.items():
            layer, first_head = numbers.setdefault(name, len(numbers)), self._first_heads.get(name, 0)
            for head, (sums, maxima) in enumerate(zip(*summary, strict=True), first_head):
                count, nonfinite, *sums = sums.tolist()
                sums_left, maxima_left = iter(sums), iter(maxima.tolist())
                has_scores = not math.isnan(sums[0])  # that of `max_score`
                row = {"step": step, "module": name, "layer": layer, "head": head}
                for column in self._columns:
                    if column.reduce in ("mean", "saturated"):
                        number, is_known = next(sums_left) / (count or math.nan), True
                    else:
                        number = next(maxima_left) * (-1 if column.reduce == "min" else 1)
                        is_known = count and (has_scores or column.measure != "max_score")
                    row[column.name] = number if is_known else math.nan
                rows.append(row | {"nonfinite": int(nonfinite), "rows": int(count + nonfinite)})
        return rows


class LayerPart(NamedTuple):
    """The heads of a layer that one process holds.

    Args:
        heads: Number of heads.
        part: Which part of the heads they are, from 0.
        num_parts: Number of parts.
        fingerprint: A hash of some of the layer's weights; the same in all processes that hold the same part.
    """

    heads: int
    part: int
    num_parts: int
    fingerprint: str


class LayerHeads(NamedTuple):
    """The heads of a layer in a group of processes.

    Args:
        heads: Number of heads of each part, by its number; all parts, or one if the group has no other.
        first_head: Number of the first head.
    """

    heads: dict[int, int]
    first_head: int = 0


Layout = dict[str, LayerHeads]  # by module name, in the order in which the layers run


def find_layer_part(model: nn.Module, call: Call) -> LayerPart:
    """Find out which heads of a layer this process holds; to be called while the layer runs.

    Parameters that FSDP shards are whole then, and those that are still sharded belong to tensor parallelism.
    """
    owner = _find_owner(model, call.name)
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    part, num_parts = 0, 1
    sharded = [shard for parameter in owner.parameters() for shard in _list_split_axes(parameter)]
    if sharded:
        widths = _list_widths(call, heads)
        # Sizes of the matrices that are not split.
        whole = {
            size
            for parameter in owner.parameters()
            if parameter.ndim == 2 and not any(_list_split_axes(parameter))
            for size in parameter.shape
        }
        matching = [shard for shard in sharded if shard.size in widths]
        total = count_heads(owner)
        if matching and not whole & widths:
            part, num_parts = matching[0].part, matching[0].num_parts
        elif not widths and total == heads * sharded[0].num_parts:  # the layer computes its own softmax
            part, num_parts = sharded[0].part, sharded[0].num_parts
        elif not whole & widths and total != heads:
            raise ArgumentError(
                "Monitor",
                received=f"{call.name!r} with sharded parameters, none of which matches its {heads} heads",
                expected="heads that are split evenly by the rows of the query's projection, or not at all",
                hint="Shard query, key and value with ColwiseParallel and the output with RowwiseParallel of "
                "torch.distributed.tensor.parallel. Or monitor other layers only, with layers=.",
            )
    return LayerPart(heads, part, num_parts, _hash_parameters(owner, with_shards=num_parts > 1))


def agree_on_layout(parts: dict[str, LayerPart], group: Any) -> Layout:
    """Exchange the layers and heads that each process of a group holds, once, in the order in which they run."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, parts, group=group)
    found: dict[str, dict[int, LayerPart]] = {}
    for other in gathered:
        for name, part in other.items():
            known = found.setdefault(name, {}).setdefault(part.part, part)
            if known != part:
                _raise_different(name, "processes that hold different layers by that name")
    names = list(found)
    if any(list(other) != names for other in gathered if other):
        # By their numbers, and layers of different lists in the order given.
        lists = list(dict.fromkeys(re.split(r"\d", name, maxsplit=1)[0] for name in names))
        names.sort(
            key=lambda name: (
                lists.index(re.split(r"\d", name, maxsplit=1)[0]),
                [int(number) for number in re.findall(r"\d+", name)],
            )
        )
    return {name: _join_parts(name, found[name]) for name in names}


def _join_parts(name: str, parts: dict[int, LayerPart]) -> LayerHeads:
    heads = {number: parts[number].heads for number in sorted(parts)}
    first, *others = parts.values()
    if len(parts) == first.num_parts:
        return LayerHeads(heads)
    if others:
        _raise_different(name, f"{len(parts)} of the {first.num_parts} parts of its heads")
    return LayerHeads(heads, first.part * first.heads)


def _raise_different(name: str, received: str) -> None:
    raise ArgumentError(
        "Monitor",
        received=f"{name!r} in {received}",
        expected="replicas of one model, shards of its heads, or pipeline stages whose layers have different names",
        hint="Give the layers of pipeline stages their names in the whole model. Or pass the processes that hold the "
        "same layers: Monitor(…, process_group=group).",
    )


def _find_owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a layer, or the nearest one around it that has parameters."""
    while name:
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):
            return module
        name = name.rpartition(".")[0]
    return model


class _SplitAxis(NamedTuple):
    """One axis of a parameter that is split: its size here, and which part of how many it is."""

    size: int
    part: int
    num_parts: int


def _list_split_axes(parameter: Tensor) -> Iterator[_SplitAxis]:
    """Yield the axes of a parameter that are split between processes, as DTensor states them."""
    if not _is_distributed(parameter):
        return
    coordinate = parameter.device_mesh.get_coordinate() or []
    for axis, size in enumerate(parameter.to_local().shape):
        part, num_parts = 0, 1
        for place, position, length in zip(
            parameter.placements, coordinate, parameter.device_mesh.shape, strict=True
        ):
            if place.is_shard(axis):
                part, num_parts = part * length + position, num_parts * length
        if num_parts > 1:
            yield _SplitAxis(int(size), part, num_parts)


def _is_distributed(parameter: Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # no parameter is a DTensor before it is imported
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def _list_widths(call: Call, heads: int) -> set[int]:
    """Return the number of rows that projections of this call's heads have: query alone, and query, key and value."""
    head_dims = {int(tensor.shape[-1]) for tensor in (call.query, call.cached) if tensor is not None} - {0}
    kv_heads = call.key.shape[-3] if call.key.ndim > 2 else 1
    return {count * head_dim for head_dim in head_dims for count in (heads, heads + 2 * kv_heads, 3 * heads)}


def _hash_parameters(module: nn.Module, with_shards: bool) -> str:
    """Hash the ends of each parameter: replicas of a layer have the same, different layers do not.

    Parameters that are split, included `with_shards`, differ between processes with the same heads.
    """
    digest = hashlib.sha256()
    for parameter in module.parameters():
        if with_shards or not any(_list_split_axes(parameter)):
            local = parameter.to_local() if _is_distributed(parameter) else parameter
            flat = local.detach().reshape(-1)
            digest.update(repr((tuple(local.shape), flat[:8].tolist(), flat[-8:].tolist())).encode())
    return digest.hexdigest()
