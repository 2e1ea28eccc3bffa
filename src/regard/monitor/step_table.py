"""Collect the calls of one training step, and combine them across processes."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from regard.capture.call import Call
from regard.monitor.head_summary import HeadMeasures, HeadSummary
from regard.monitor.layer_parts import LayerPart, Layout


class StepTable:
    """Sums and maxima of every layer and head over one training step.

    Args:
        measures: What to measure in each call.
    """

    def __init__(self, measures: HeadMeasures) -> None:
        self._measures = measures
        self.layers: dict[str, HeadSummary] = {}
        self.first_heads: dict[str, int] = {}  # number of the first head of a layer, if it is not 0
        self.is_empty = True

    def add(self, call: Call) -> None:
        """Measure a call, and join it with the other calls of its layer."""
        self.is_empty = False
        summary = self._measures.summarise(call)
        if summary is not None:
            before = self.layers.get(call.name)
            self.layers[call.name] = summary if before is None else before.join(summary)

    def reduce(self, layout: Layout, own: dict[str, LayerPart], group: Any, device: Any) -> None:
        """Combine with the tables of the other processes: one SUM and one MAX all-reduce.

        Args:
            layout: The layers that all processes expect. A layer that this process has not run adds nothing.
            own: The part of each layer that this process holds.
            group: The process group, or None for all processes.
            device: Device of the tensors that are sent.
        """
        unknown = [
            name
            for name, summary in self.layers.items()
            if name not in layout or layout[name].heads.get(own[name].part) != len(summary.sums)
        ]
        if unknown:
            warnings.warn(
                f"Monitor: {unknown[0]!r} did not run in the first monitored step of any process, so it is skipped: "
                "the processes have agreed on the layers then.",
                stacklevel=2,
            )
        num_sums = 2 + sum(column.reduce in ("mean", "saturated") for column in self._measures.columns)
        num_maxima = 2 + len(self._measures.columns) - num_sums
        parts = [
            self.layers[name]
            if name in self.layers and name not in unknown and own[name].part == number
            else HeadSummary(np.zeros((heads, num_sums)), np.full((heads, num_maxima), -np.inf))
            for name, layer in layout.items()
            for number, heads in layer.heads.items()
        ]
        tables = []
        for values, operation in (
            ([part.sums for part in parts], dist.ReduceOp.SUM),
            ([part.maxima for part in parts], dist.ReduceOp.MAX),
        ):
            table = torch.from_numpy(np.concatenate(values)).to(device)
            dist.all_reduce(table, op=operation, group=group)
            tables.append(table.cpu().numpy())
        stops = np.cumsum([sum(layer.heads.values()) for layer in layout.values()])[:-1]
        halves = zip(*(np.split(table, stops) for table in tables), strict=True)
        self.layers = {name: HeadSummary(*half) for name, half in zip(layout, halves, strict=True)}
        self.first_heads = {name: layer.first_head for name, layer in layout.items()}

    def rows(self, step: int, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return the table as rows of the history, one for each layer and head.

        Args:
            step: The optimiser step.
            numbers: The number of each layer that ran in an earlier step; layers that are new get the next ones.
        """
        return [
            {
                "step": step,
                "module": name,
                "layer": numbers.setdefault(name, len(numbers)),
                **row,
                "head": row["head"] + self.first_heads.get(name, 0),
            }
            for name, summary in self.layers.items()
            for row in self._measures.finish(summary)
        ]
