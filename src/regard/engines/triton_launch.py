"""Launch the Triton kernels: prepare the arrays of a matrix, choose block sizes, and read the results.

Nothing here imports Triton before a kernel is launched. Lengths and strides count elements.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from regard.frame import Frame
from regard.masks import Mask
from regard.masks.segments import FULL, MaskSegments, build_segments
from regard.types import Array, IntArray

Tensor = Any  # torch's types are not checked

MAX_HEAD_DIM = 128
BLOCK_KEYS = 64
FEW_LARGEST = 8  # largest weights of a row that share a launch with other measures
ROW_SUMS = ("one", "surprisal", "distance", "position", "max_score")
SHARE_UNITS = 2.0**60  # as in triton_kernels


@dataclass(frozen=True)
class KernelVariant:
    """What one compiled kernel computes; Triton compiles a kernel for each.

    Args:
        kernel: "softmax" computes the statistics of each row; "measure" measures the weights, given the statistics.
        dtype: Dtype of query and key.
        head_dim: Length of a query.
        value_dim: With "softmax", length of a value; 0 for no output.
        row_sums: Names from `ROW_SUMS`.
        shares: With "measure", whether weights on intervals of keys are added up.
        columns: With "measure", whether columns are added up.
        cells: With "measure", how the cells of a grid are reduced: "sum", "max" or "".
        top_k: With "measure", number of largest weights, a power of two; 0 for none.
    """

    kernel: Literal["softmax", "measure"]
    dtype: Any
    head_dim: int
    value_dim: int = 0
    row_sums: frozenset[str] = frozenset()
    shares: bool = False
    columns: bool = False
    cells: Literal["", "sum", "max"] = ""
    top_k: int = 0

    @property
    def name(self) -> str:
        """Name of the variant, as reports show it."""
        parts = [name for name in ROW_SUMS if name in self.row_sums]
        parts += ["shares"] * self.shares + ["columns"] * self.columns
        parts += [f"cells {self.cells}"] * bool(self.cells) + [f"top {self.top_k}"] * bool(self.top_k)
        sizes = f"d{self.head_dim}" + f" v{self.value_dim}" * bool(self.value_dim)
        return f"{self.kernel} {sizes} {str(self.dtype).removeprefix('torch.')}: {', '.join(parts) or 'lse'}"

    def list_constants(self) -> dict[str, Any]:
        """Return the constants that the kernel is compiled with, beside its block sizes."""
        constants: dict[str, Any] = {
            "D": self.head_dim,
            "BLOCK_D": round_up_power(self.head_dim),
            "UPCAST": self.dtype == torch.float32 or (self.dtype == torch.bfloat16 and is_interpreted()),
            **{f"HAS_{name.upper()}": name in self.row_sums for name in ROW_SUMS},
        }
        if self.kernel == "softmax":
            sizes = {"VALUE_D": self.value_dim, "BLOCK_V": round_up_power(self.value_dim)}
            return constants | sizes | {"HAS_OUTPUT": self.value_dim > 0}
        return constants | {
            "HAS_SHARES": self.shares,
            "HAS_COLUMNS": self.columns,
            "CELL_SUM": self.cells == "sum",
            "CELL_MAX": self.cells == "max",
            "TOP_K": self.top_k,
        }


def round_up_power(number: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least a number, and at least `least`."""
    return max(least, 1 << (number - 1).bit_length()) if number else least


@functools.cache
def is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on tensors of the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def find_target(device: torch.device) -> str:
    """Return the architecture that the kernels were compiled for, such as "sm90"; empty if there is none."""
    try:
        if is_interpreted():
            return "interpreter" if device.type == "cpu" else ""
        if device.type != "cuda" or not torch.cuda.is_available():
            return ""
        from triton.runtime import driver

        with torch.cuda.device(device):
            target = driver.active.get_current_target()
    except (ImportError, AttributeError, RuntimeError):
        return ""
    if target.backend == "cuda":
        return f"sm{target.arch}" if target.arch >= 80 else ""
    arch = str(target.arch).split(":")[0]
    return arch if arch == "gfx942" else ""


class LaunchOptions(NamedTuple):
    """Rows of a block, and what Triton calls num_warps and num_stages."""

    block_rows: int
    num_warps: int
    num_stages: int


def choose_options(variant: KernelVariant, target: str) -> LaunchOptions:
    """Choose the block of rows of a variant: what the target spills no register with (`triton_resources.json`)."""
    if target.startswith("gfx"):
        return LaunchOptions(64, 4, 2)  # four warps of 64 threads may have 512 registers each
    if variant.top_k > FEW_LARGEST:
        return LaunchOptions(64, 4, 2)
    return LaunchOptions(64 if max(variant.head_dim, variant.value_dim) > 64 else 128, 8, 2)


class PassInputs(NamedTuple):
    """The parts of a matrix in canonical form that the kernels read; see `regard.problem.Problem`.

    Attributes:
        query: (own pairs, rows, head_dim).
        key: (own pairs, kv_len, head_dim).
        query_index: For each pair of the matrix, its pair in `query`: (pairs,).
        key_index: For each pair of the matrix, its pair in `key`: (pairs,).
        positions: Position of each row: (rows,).
        frame: The (batch, head) pairs and the lengths.
        mask: Which keys each query may attend to.
        scale: Factor of the products.
        sink: Extra score of each pair, (pairs,); None for none.
    """

    query: Tensor
    key: Tensor
    query_index: IntArray
    key_index: IntArray
    positions: IntArray
    frame: Frame
    mask: Mask | None
    scale: float
    sink: Tensor | None


class Launcher:
    """The arrays of one matrix on its device, for any number of launches."""

    def __init__(self, inputs: PassInputs) -> None:
        self.device = inputs.query.device
        self.query, self.key = _make_rows_contiguous(inputs.query), _make_rows_contiguous(inputs.key)
        self.pairs, self.rows, self.kv_len = (
            len(inputs.query_index),
            len(inputs.positions),
            inputs.key.shape[1],
        )
        self._inputs = inputs
        self._query_pair, self._key_pair = self._upload(inputs.query_index), self._upload(inputs.key_index)
        self._row_positions = self._upload(inputs.positions)
        self._segments: dict[int, tuple[Tensor, ...]] = {}

    def run_softmax(
        self,
        variant: KernelVariant,
        value: Tensor | None = None,
        value_index: IntArray | None = None,
        offset: int = 0,
    ) -> tuple[dict[str, Tensor], Any]:
        """Run the flash loop.

        Args:
            variant: What to compute.
            value: (own pairs, kv_len, value_dim), of the dtype of the query; None for no output.
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).
            offset: Added to the position of a row in "distance".

        Returns:
            "max" and "sum" of each row, (pairs, rows); "output", (pairs, rows, value_dim); the row sums by name; and
            the compiled kernel, None in the interpreter.
        """
        from regard.engines.triton_kernels import run_softmax_pass

        results = self._allocate_rows(variant)
        results["max"] = torch.empty((self.pairs, self.rows), dtype=torch.float32, device=self.device)
        results["sum"] = torch.empty((self.pairs, self.rows), dtype=torch.float64, device=self.device)
        value = self.query if value is None else _make_rows_contiguous(value)
        value_pair = self._query_pair if value_index is None else self._upload(value_index)
        if variant.value_dim:
            shape = (self.pairs, self.rows, variant.value_dim)
            results["output"] = torch.empty(shape, dtype=value.dtype, device=self.device)
        sink = self._inputs.sink
        if sink is None:
            sink = torch.full((self.pairs,), -torch.inf, dtype=torch.float32, device=self.device)
        options = choose_options(variant, find_target(self.device))
        unused = results["max"]
        launch = run_softmax_pass[self._grid(options)]
        with self._use_device():
            compiled = launch(
                self.query, self.key, value, self._query_pair, self._key_pair, value_pair, self._row_positions,
                *self._describe_mask(options.block_rows), sink.to(torch.float32).contiguous(),
                results["max"], results["sum"], results.get("output", unused),
                *(results.get(name, results["sum"]) for name in ROW_SUMS),
                self.rows, self.kv_len, self._count_blocks(options), offset, float(self._inputs.scale),
                *self.query.stride()[:2], *self.key.stride()[:2], *value.stride()[:2],
                **_list_keywords(variant, options),
            )  # fmt: skip
        return results, compiled

    def run_measures(
        self,
        variant: KernelVariant,
        largest: Tensor,
        total: Tensor | None,
        *,
        offset: int = 0,
        shares: tuple[tuple[tuple[int, int], ...], ...] = (),
        cells: tuple[int, int] = (1, 1),
    ) -> tuple[dict[str, Tensor], Any]:
        """Run the measure pass.

        Args:
            variant: What to compute.
            largest: Largest score of each row, or its lse if `total` is None: (pairs, rows).
            total: Σ exp(score − max) of each row: (pairs, rows).
            offset: Added to the position of a row in "distance".
            shares: For each share, first key of each of its intervals and the key after the last.
            cells: Number of cells of the grid along the rows and the columns.

        Returns:
            The row sums by name, (pairs, rows); "shares", (shares, pairs, rows); "columns", (pairs, kv_len); "cells",
            (pairs, *cells); "top_values" and "top_keys", (pairs, rows, top_k), sorted; all float64 but the keys. And
            the compiled kernel, None in the interpreter.
        """
        from regard.engines.triton_kernels import run_measure_pass

        results = self._allocate_rows(variant)
        total = torch.ones_like(largest, dtype=torch.float64) if total is None else total
        divisor = torch.where(total == 0, 1.0, total)
        shift = torch.where(largest == -torch.inf, torch.inf, largest).to(torch.float32).contiguous()
        unused = torch.empty(1, dtype=torch.float64, device=self.device)
        integers = torch.zeros(1, dtype=torch.int64, device=self.device)
        intervals = [(*interval, n) for n, share in enumerate(shares) for interval in share]
        if variant.shares:
            results["shares"] = integers.new_zeros((len(shares), self.pairs, self.rows))
        if variant.columns:
            results["columns"] = integers.new_zeros((self.pairs, self.kv_len))
        dtype = torch.int32 if variant.cells == "max" else torch.int64
        if variant.cells:
            results["cells"] = integers.new_zeros((self.pairs, *cells), dtype=dtype)
        if variant.top_k:
            shape = (self.pairs, self.rows, variant.top_k)
            results["top_values"] = torch.empty(shape, dtype=torch.float32, device=self.device)
            results["top_keys"] = torch.empty(shape, dtype=torch.int32, device=self.device)
        row_cell, column_cell = (
            self._upload(np.arange(length) * count // max(length, 1))
            for length, count in zip((self.rows, self.kv_len), cells, strict=True)
        )
        options, units = choose_options(variant, find_target(self.device)), count_units(self.rows)
        launch = run_measure_pass[self._grid(options)]
        with self._use_device():
            compiled = launch(
                self.query, self.key, self._query_pair, self._key_pair, self._row_positions,
                *self._describe_mask(options.block_rows),
                shift, (1 / divisor).to(torch.float32).contiguous(), divisor.log2().to(torch.float32).contiguous(),
                *(results.get(name, unused) for name in ROW_SUMS),
                results.get("shares", integers), self._upload(np.array(intervals or [(0, 0, 0)])),
                results.get("columns", integers), results.get("cells", integers.to(dtype)), row_cell, column_cell,
                results.get("top_values", shift), results.get("top_keys", row_cell),
                self.rows, self.kv_len, self._count_blocks(options), offset, len(intervals), *cells,
                float(self._inputs.scale), units, *self.query.stride()[:2], *self.key.stride()[:2],
                **_list_keywords(variant, options),
            )  # fmt: skip
        for name, unit in (("shares", SHARE_UNITS), ("columns", units), ("cells", units)):
            if name in results and results[name].dtype == torch.int64:
                results[name] = results[name].double() / unit
        if variant.cells == "max":
            results["cells"] = results["cells"].view(torch.float32).double()
        if variant.top_k:
            results["top_values"], results["top_keys"] = _sort_largest(
                results["top_values"], results["top_keys"]
            )
        return results, compiled

    # Private

    def _use_device(self) -> AbstractContextManager[Any]:
        """Return a context in which Triton launches kernels on the device of the arrays."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _upload(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(self.device)

    def _allocate_rows(self, variant: KernelVariant) -> dict[str, Tensor]:
        shape = (self.pairs, self.rows)
        return {
            name: torch.empty(shape, dtype=torch.float64, device=self.device)
            for name in ROW_SUMS
            if name in variant.row_sums
        }

    def _count_blocks(self, options: LaunchOptions) -> int:
        return -(-self.rows // options.block_rows)

    def _grid(self, options: LaunchOptions) -> tuple[int]:
        return (self.pairs * self._count_blocks(options),)

    def _describe_mask(self, block_rows: int) -> tuple[Tensor, ...]:
        """Return first block of each pair, offsets, segments and tiles, as the kernels read them."""
        if block_rows not in self._segments:
            inputs = self._inputs
            described = build_segments(
                inputs.mask, inputs.frame, inputs.positions, block_rows, BLOCK_KEYS, pack="columns"
            )
            self._segments[block_rows] = tuple(
                map(self._upload, pack_segments(described.distinct, described.pair_index, self.kv_len))
            )
        return self._segments[block_rows]


def pack_segments(
    distinct: list[MaskSegments], pair_index: IntArray, kv_len: int
) -> tuple[Array, Array, Array, Array]:
    """Join the segments of pairs whose masks differ, and cut full segments where the last block of keys is short.

    Args:
        distinct: Segments of each different mask, with blocks of `BLOCK_KEYS` keys packed along the columns.
        pair_index: For each pair, its entry in `distinct`: (pairs,).
        kv_len: Number of keys.

    Returns:
        The first entry of each pair in the offsets, (pairs,); the offsets of the blocks of rows; the segments, (n, 3);
        and the tiles as words of 32 bits, (tiles, block_rows, BLOCK_KEYS // 32).
    """
    block_rows = distinct[0].tiles.shape[1]
    # A block that ends before its last key is full, up to that key: one tile for all rows.
    is_inside = np.arange(BLOCK_KEYS) < kv_len % BLOCK_KEYS
    tail = np.broadcast_to(np.packbits(is_inside, bitorder="little"), (1, block_rows, BLOCK_KEYS // 8))
    tiles, offsets, segments = [tail], [], []
    num_tiles = num_segments = num_offsets = 0
    first_of_mask = []
    num_tiles = 1
    for own in distinct:
        own_offsets, own_segments = _cut_tail(own, num_tiles)
        first_of_mask.append(num_offsets)
        offsets.append(own_offsets + num_segments)
        segments.append(own_segments)
        tiles.append(own.tiles)
        num_tiles += len(own.tiles)
        num_segments += len(own_segments)
        num_offsets += len(own_offsets)
    words = np.ascontiguousarray(np.concatenate(tiles)).view(np.int32)
    rows_of_segments = np.concatenate([*segments, np.zeros((1, 3), np.int64)])  # never empty
    return np.array(first_of_mask)[pair_index], np.concatenate(offsets), rows_of_segments, words


def _cut_tail(mask: MaskSegments, first_tile: int) -> tuple[IntArray, IntArray]:
    """Return offsets and segments in which no full segment ends inside a block; tile 0 is that of the short block."""
    segments = mask.segments.copy()
    is_partial = segments[:, 2] != FULL
    segments[is_partial, 2] += first_tile
    rest = segments[:, 1] % BLOCK_KEYS
    is_short = ~is_partial & (rest > 0)
    has_front = segments[:, 1] - segments[:, 0] > rest
    counts = 1 + (is_short & has_front)
    cut = np.repeat(segments, counts, axis=0)
    last = np.cumsum(counts) - 1  # of each segment's parts
    short = last[is_short]
    cut[short, 0], cut[short, 2] = (segments[:, 1] - rest)[is_short], 0
    front = last[is_short & has_front] - 1
    cut[front, 1] = (segments[:, 1] - rest)[is_short & has_front]
    return np.concatenate([[0], np.cumsum(counts)])[mask.offsets], cut


def count_units(rows: int) -> float:
    """Return the units that a weight of 1 has in the integers of column sums: as many as `rows` of them can hold."""
    return 2.0 ** (61 - max(rows, 1).bit_length())


def _list_keywords(variant: KernelVariant, options: LaunchOptions) -> dict[str, Any]:
    return {
        **variant.list_constants(),
        "BLOCK_M": options.block_rows,
        "BLOCK_N": BLOCK_KEYS,
        "num_warps": options.num_warps,
        "num_stages": options.num_stages,
        # Both kernels must round a score alike; contracted with a subtraction, it would not be rounded.
        "enable_fp_fusion": False,
    }


def _make_rows_contiguous(array: Tensor) -> Tensor:
    return array if array.stride(-1) == 1 or array.shape[-1] == 1 else array.contiguous()


def _sort_largest(values: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the largest weights of each row by weight, then by key; an empty slot has weight 0 and key 0."""
    keys = torch.where(values > 0, keys.long(), torch.iinfo(torch.int64).max)
    by_key = torch.argsort(keys, dim=-1)
    values, keys = values.gather(-1, by_key), keys.gather(-1, by_key)
    by_value = torch.argsort(values, dim=-1, descending=True, stable=True)
    values, keys = values.gather(-1, by_value), keys.gather(-1, by_value)
    return values.double(), torch.where(values > 0, keys, 0)
