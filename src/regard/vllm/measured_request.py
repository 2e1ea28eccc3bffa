"""`MeasuredRequest`: the numbers of one request, from queries that the engine computed and keys in its cache.

A row waits until some are there: the keys stay in the cache, so one call of `A.measure` for many rows and layers gives
the numbers that a call in every step would. Rows that are not kept are added to sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.core.attention import attention
from regard.core.block_loop import run_block_loop
from regard.core.matrix import AttentionMatrix
from regard.core.planner import upcast
from regard.lens.spans import GENERATED, OTHER
from regard.lens.weight_measures import GroupMass
from regard.masks import causal, sliding_window
from regard.measures import Entropy, MaxScore, Measure, TopK
from regard.score_mods import alibi, softcap
from regard.types import Array, IntArray
from regard.vllm.layers import MeasuredLayer
from regard.vllm.settings import RequestOptions

__all__ = ["MeasuredRequest", "StepQueries"]

# Rows that wait before they are measured. A larger number costs memory for queries, a smaller one costs calls.
WAITING_ROWS = 16
# Newest rows that are not added to sums: their tokens may be discarded, since steps are scheduled ahead.
RECENT_ROWS = 8
# Scores up to which the block loop is faster than a product and a compiled pass, which prepare each head in Python.
LOOP_SCORES = 1 << 20
# Numbers of each row and head, beside the shares of the spans.
NUMBERS = ("entropy", "first", "max_score")


@dataclass(eq=False)
class StepQueries:
    """The queries of one step: for each layer, the rows of all requests that wait.

    Args:
        layers: (rows, heads, head_dim) by number of the layer.
    """

    layers: dict[int, torch.Tensor] = field(default_factory=dict)


class WaitingRows(NamedTuple):
    """Rows of one step that are not measured yet.

    Attributes:
        position: Position of the first row in the sequence.
        rows: Number of rows.
        queries: The queries of the step.
        start: First row among them.
    """

    position: int
    rows: int
    queries: StepQueries
    start: int


class MeasuredRows(NamedTuple):
    """The numbers of some rows in some layers.

    Attributes:
        layers: Numbers of the layers.
        position: Position of the first row.
        shares: Weight on each name: (layers, heads, rows, names).
        numbers: Of `NUMBERS`: (layers, heads, rows, numbers).
        top: The largest weights and their keys, (layers, heads, rows, k) each; None if rows are not kept.
    """

    layers: tuple[int, ...]
    position: int
    shares: Array
    numbers: Array
    top: tuple[Array, IntArray] | None

    def take(self, start: int, stop: int) -> MeasuredRows:
        """Return the rows with positions from `start` to `stop`."""
        rows = slice(max(start - self.position, 0), max(stop - self.position, 0))
        top = None if self.top is None else (self.top[0][:, :, rows], self.top[1][:, :, rows])
        return MeasuredRows(
            self.layers, self.position + rows.start, self.shares[:, :, rows], self.numbers[:, :, rows], top
        )


class RowSums:
    """Sums and maxima of some rows: over the rows for each head and, if asked for, over the heads for each row."""

    def __init__(self, layers: Sequence[MeasuredLayer], names: int, *, by_row: bool) -> None:
        self.by_row, width = by_row, names + len(NUMBERS)
        self.of_heads = [np.zeros((layer.heads, width)) for layer in layers]
        self.max_score = [np.full(layer.heads, -np.inf) for layer in layers]
        self.count = [0] * len(layers)
        self.of_rows: dict[int, Array] = {}

    def add(self, rows: MeasuredRows) -> None:
        table = np.concatenate([rows.shares, rows.numbers], -1, dtype=np.float64)
        for layer, own in zip(rows.layers, table, strict=True):
            self.of_heads[layer] += own.sum(1)
            self.max_score[layer] = np.maximum(self.max_score[layer], own[..., -1].max(1, initial=-np.inf))
            self.count[layer] += own.shape[1]
        for row, own in enumerate(table.sum((0, 1)) if self.by_row else ()):
            position = rows.position + row
            self.of_rows[position] = self.of_rows.get(position, 0.0) + own


class MeasuredRequest:
    """One request that is measured, from its first step to its record.

    Args:
        request_id: The engine's id.
        options: What is measured.
        prompt_len: Tokens of the prompt.
        blocks: Blocks of the request for each group of caches.
        cached: Tokens of the prompt that were found in the prefix cache.
        layers: The layers of this worker.
        keep_bytes: Size of the rows up to which they are kept.

    Raises:
        IndexOutOfRangeError: If a span exceeds the prompt.
    """

    def __init__(
        self,
        request_id: str,
        options: RequestOptions,
        prompt_len: int,
        blocks: Sequence[Sequence[int]],
        cached: int,
        layers: Sequence[MeasuredLayer],
        keep_bytes: int,
    ) -> None:
        self.request_id, self.options, self.prompt_len, self.cached = request_id, options, prompt_len, cached
        self.layers, self.started = layers, time.time()
        self.token_ids: list[int] | None = None
        self.preemptions = 0
        names = () if options.spans is None else options.spans.names
        self.names = (*names, OTHER, GENERATED)
        labels = (
            np.zeros((1, prompt_len), np.int64)
            if options.spans is None
            else options.spans.label_keys(1, prompt_len, "the prompt", "regard.vllm")
        )
        self._labels = labels[0]
        self._blocks = [list(own) for own in blocks]
        self._waiting: list[WaitingRows] = []
        # Position of the first row that is measured and has not run.
        self.next_row = cached if options.prompt else prompt_len - 1
        self._recent: list[MeasuredRows] = []
        self._kept: list[MeasuredRows] | None = [] if options.keep else None
        self._bytes_left = keep_bytes
        self._generated_sums = RowSums(layers, len(self.names), by_row=True)
        self._prompt_sums = RowSums(layers, len(self.names), by_row=False)
        kinds = sorted(range(len(layers)), key=lambda number: str(layers[number].kind))
        self._kinds = [
            tuple(numbers) for _, numbers in groupby(kinds, key=lambda number: str(layers[number].kind))
        ]

    # Blocks

    def resume(self, blocks: Sequence[Sequence[int]], generated: int) -> None:
        """Take new blocks after a preemption; rows that were measured run again and are not measured again.

        Args:
            blocks: The blocks for each group of caches.
            generated: Tokens that the request still has. A reset of the prefix cache discards the newest ones, and the
                rows that read them.
        """
        self.preemptions += 1
        self._blocks = [list(own) for own in blocks]
        stop = self.prompt_len - 1 + max(generated, 0)
        if self.next_row > stop:
            self.next_row = stop
            self._recent = [rows.take(rows.position, stop) for rows in self._recent if rows.position < stop]

    def add_blocks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Append blocks that the request received."""
        for own, new in zip(self._blocks, blocks, strict=True):
            own.extend(new)

    # Rows

    def find_new_rows(self, start: int, count: int) -> range:
        """Return the positions, of the rows that a step computes, that are measured."""
        return range(max(start, self.next_row), start + count)

    def add_prompt_rows(self, layer: int, position: int, query: torch.Tensor) -> None:
        """Measure rows of the prompt in one layer; they are many, so they do not wait.

        Args:
            layer: Number of the layer.
            position: Position of the first row.
            query: (rows, heads, head_dim).
        """
        self._store(self._measure((layer,), position, query.transpose(0, 1)))

    def add_rows(self, positions: range, queries: StepQueries, start: int) -> None:
        """Add rows that predict tokens; they are measured later."""
        self._waiting.append(WaitingRows(positions.start, len(positions), queries, start))

    @property
    def waiting(self) -> int:
        """Number of rows that wait."""
        return sum(part.rows for part in self._waiting)

    def loses_keys(self, start: int) -> bool:
        """Return whether a step that starts at a position may overwrite keys that waiting rows attend to."""
        if not self._waiting:
            return False
        first = self._waiting[0].position
        return any(
            (first - layer.window + 1) // layer.block_size < (start - layer.window + 1) // layer.block_size
            for layer in self.layers
            if layer.window is not None
        )

    def measure_waiting(self, stop: int | None = None) -> None:
        """Measure the rows that wait, except those from position `stop` on, which are dropped."""
        waiting, self._waiting = self._waiting, []
        if stop is not None:
            waiting = [
                part._replace(rows=min(part.rows, stop - part.position))
                for part in waiting
                if part.position < stop
            ]
        if not waiting:
            return
        for layers in self._kinds:
            query = torch.cat(
                [
                    torch.cat(
                        [part.queries.layers[layer][part.start : part.start + part.rows] for part in waiting]
                    ).transpose(0, 1)
                    for layer in layers
                ]
            )
            self._store(self._measure(layers, waiting[0].position, query))

    def _measure(self, numbers: tuple[int, ...], position: int, query: torch.Tensor) -> MeasuredRows:
        """Measure rows in layers of one kind; their heads are one axis: (layers · heads, rows, head_dim)."""
        layers = [self.layers[number] for number in numbers]
        like, stop = layers[0], position + query.shape[1]
        start = 0 if like.window is None else max(0, position - like.window + 1)
        blocks = self._blocks[like.group]
        key = torch.cat([layer.cache.read(blocks, start, stop) for layer in layers])
        mods: list[Any] = [softcap(like.softcap)] if like.softcap else []
        if like.slopes is not None:
            slopes = torch.cat([layer.slopes for layer in layers if layer.slopes is not None])
            mods.append(alibi(slopes.to(query.device), align="lower_right"))
        sinks = [layer.sinks for layer in layers if layer.sinks is not None]
        window = like.window
        A = attention(
            query,
            key,
            mask=causal(align="lower_right")
            if window is None
            else sliding_window(window, align="lower_right"),
            score_mod=mods,
            scale=like.scale,
            sink=torch.cat(sinks).to(query.device) if sinks else None,
            enable_gqa=True,
        )
        # The first token is a group of its own, so that its weight needs no measure of its own.
        labels = np.full(stop, len(self.names) - 1)
        labels[: self.prompt_len] = self._labels[:stop]
        first_name, labels[0] = labels[0], len(self.names)
        measures: dict[str, Measure] = {
            "shares": GroupMass(labels[start:], len(self.names) + 1),
            "entropy": Entropy(),
            "max_score": MaxScore(),
        }
        if self.options.keep and self.options.topk:
            measures["top"] = TopK(min(self.options.topk, stop - start))
        results = _compute(A, measures)
        shape = (len(layers), like.heads, query.shape[1])
        shares = _to_numpy(results["shares"]).reshape(*shape, -1)
        first = shares[..., -1]
        shares[..., first_name] += first
        entropy, max_score = (_to_numpy(results[name]).reshape(shape) for name in ("entropy", "max_score"))
        numbers_of_rows = np.stack([entropy, first, max_score], -1)
        top = None
        if "top" in measures:
            values, keys = (_to_numpy(part).reshape(*shape, -1) for part in results["top"])
            top = values.astype(np.float32), (keys + start).astype(np.int32)
        return MeasuredRows(numbers, position, shares[..., :-1], numbers_of_rows, top)

    def _store(self, rows: MeasuredRows) -> None:
        self._recent.append(rows)
        newest = rows.position + rows.shares.shape[2]
        self._settle(newest - RECENT_ROWS)

    def _settle(self, stop: int) -> None:
        """Add the rows before a position to the sums."""
        remaining = []
        for rows in self._recent:
            end = rows.position + rows.shares.shape[2]
            for sums, own in (
                (self._prompt_sums, rows.take(rows.position, min(stop, self.prompt_len - 1))),
                (self._generated_sums, rows.take(max(rows.position, self.prompt_len - 1), min(stop, end))),
            ):
                if own.shares.shape[2]:
                    sums.add(own)
                    self._keep(own)
            if end > stop:
                remaining.append(rows.take(max(stop, rows.position), end))
        self._recent = remaining

    def _keep(self, rows: MeasuredRows) -> None:
        """Keep rows, unless they are not asked for or too large."""
        if self._kept is not None:
            arrays = (rows.shares, rows.numbers, *(rows.top or ()))
            self._bytes_left -= sum(array.nbytes for array in arrays)
            self._kept.append(rows)
            if self._bytes_left < 0:
                self._kept = None

    # The record

    def finish(self, generated: int | None) -> tuple[dict[str, Any], dict[str, Array]]:
        """Measure what waits, and return the record of the request and the arrays of its rows, if they are kept.

        Args:
            generated: Number of tokens that were generated; None if it is not known, for a request that was cut off.
        """
        stop = None if generated is None else self.prompt_len - 1 + generated
        self.measure_waiting(stop)
        last = max((rows.position + rows.shares.shape[2] for rows in self._recent), default=0)
        self._settle(last if stop is None else min(last, stop))
        sums = self._generated_sums
        positions = sorted(sums.of_rows)
        heads = sum(layer.heads for layer in self.layers)
        of_rows = np.array([sums.of_rows[position] for position in positions])
        of_rows = of_rows.reshape(-1, len(self.names) + len(NUMBERS))
        record = {
            "prompt_tokens": self.prompt_len,
            "cached_tokens": self.cached,
            "generated_tokens": len(positions) if generated is None else generated,
            "measured_tokens": len(positions),
            "preemptions": self.preemptions,
            "started": self.started,
            "finished": time.time(),
            "names": list(self.names),
            "spans": None if self.options.spans is None else self.options.spans.entries[0],
            "heads": self._summarise(sums),
            "tokens": self._name_columns(of_rows / heads),
        }
        if self.options.prompt:
            record["prompt"] = self._summarise(self._prompt_sums)
            record["missing_prompt_rows"] = self.prompt_len - 1 - max(self._prompt_sums.count, default=0)
        return record, {} if self._kept is None else self._join_kept(self._kept)

    def _summarise(self, sums: RowSums) -> dict[str, Any]:
        """Return the means of each head, as lists [layer][head], and the largest score of each head."""
        means = [
            table / count if count else np.full_like(table, np.nan)
            for table, count in zip(sums.of_heads, sums.count, strict=True)
        ]
        columns = [self._name_columns(table) for table in means]
        return {
            "rows": max(sums.count, default=0),
            **{name: [own[name] for own in columns] for name in ("shares", "entropy", "first")},
            "max_score": [_round(largest) for largest in sums.max_score],
        }

    def _name_columns(self, table: Array) -> dict[str, list[Any]]:
        """Split a table, one row for each head or token, into the columns of a record."""
        names = len(self.names)
        return {
            "shares": [_round(row) for row in table[:, :names]],
            "entropy": _round(table[:, names]),
            "first": _round(table[:, names + 1]),
        }

    def _join_kept(self, kept: list[MeasuredRows]) -> dict[str, Array]:
        """Return the rows of every layer as arrays: positions_0, shares_0, numbers_0, top_values_0, …."""
        arrays: dict[str, Array] = {}
        names = len(self.names)
        by_layer: dict[int, list[tuple[int, MeasuredRows, int]]] = {}
        for layer, own_layer in enumerate(self.layers):
            arrays[f"positions_{layer}"] = np.zeros(0, np.int64)
            arrays[f"shares_{layer}"] = np.zeros((own_layer.heads, 0, names), np.float32)
            arrays[f"numbers_{layer}"] = np.zeros((own_layer.heads, 0, len(NUMBERS)), np.float32)
        for rows in kept:
            for index, layer in enumerate(rows.layers):
                by_layer.setdefault(layer, []).append((rows.position, rows, index))
        for layer, parts in sorted(by_layer.items()):
            parts.sort(key=lambda part: part[0])
            own = [(rows, index) for _, rows, index in parts]
            counts = [np.arange(rows.shares.shape[2]) + rows.position for rows, _ in own]
            arrays[f"positions_{layer}"] = np.concatenate(counts)
            arrays[f"shares_{layer}"] = np.concatenate([rows.shares[index] for rows, index in own], 1)
            arrays[f"numbers_{layer}"] = np.concatenate([rows.numbers[index] for rows, index in own], 1)
            tops = [(rows.top, index) for rows, index in own if rows.top is not None]
            for number, name in enumerate(("top_values", "top_keys") if tops else ()):
                widest = max(top[number].shape[-1] for top, _ in tops)
                arrays[f"{name}_{layer}"] = np.concatenate(
                    [_widen(top[number][index], widest, -1 if number else 0) for top, index in tops], 1
                )
        return arrays


def _compute(A: AttentionMatrix, measures: Mapping[str, Measure]) -> dict[str, Any]:
    """Compute measures of a matrix (heads, rows, keys)."""
    if math.prod(A.shape) > LOOP_SCORES:
        results: Any = A.measure(**measures)
        return {name: getattr(results, name) for name in measures}
    results, _ = run_block_loop(upcast(A.problem), list(measures.values()), compiled=False)
    return dict(zip(measures, results, strict=True))


def _to_numpy(tensor: torch.Tensor) -> Array:
    return tensor.float().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def _widen(array: Array, width: int, fill: int) -> Array:
    """Pad the last axis to a width: rows near the start of the sequence have fewer keys."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])], constant_values=fill)


def _round(values: Array) -> list[float | None]:
    """Return float32 numbers as JSON can hold them; None for those that are not finite."""
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values.tolist()]
