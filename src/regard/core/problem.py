"""The canonical form of a matrix: (batch, head) pairs on one axis, every argument checked and resolved."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np

from regard.core.broadcasting import broadcast_index, num_pairs
from regard.engines import Engine
from regard.frame import Frame, is_contiguous
from regard.masks import Mask
from regard.render import text
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray

SpecOrProblem = TypeVar("SpecOrProblem", "Spec", "Problem")


def detach(array: Any) -> Any:
    """Return an array without the graph of its gradient; anything but a tensor unchanged."""
    return array.detach() if hasattr(array, "detach") else array


def detach_arrays(arguments: SpecOrProblem) -> SpecOrProblem:
    """Return arguments of detached arrays and without an engine, as a deep copy or a file keeps them."""
    score_mods = tuple(map(copy.copy, arguments.score_mods))
    for score_mod in score_mods:
        vars(score_mod).update({name: detach(array) for name, array in vars(score_mod).items()})
    query, key, sink = map(detach, (arguments.query, arguments.key, arguments.sink))
    none: Any = None
    return replace(arguments, engine=none, query=query, key=key, sink=sink, score_mods=score_mods)


def _list_fields(parts: Iterable[Any]) -> Iterator[Any]:
    """List the fields of masks and score modifications, and of the ones they combine."""
    for part in parts:
        if isinstance(part, Mask | ScoreMod):
            yield from _list_fields(vars(part).values())
        elif isinstance(part, list | tuple):
            yield from _list_fields(part)
        else:
            yield part


@dataclass(slots=True)
class Spec:
    """The checked arguments of `attention`, before their leading axes are broadcast.

    A part of a matrix has no query of its own (`query` is None), only a `Problem`. If the keys of a longer sequence are
    not all here, `kv_len` is its length.
    """

    engine: Engine
    query: Array
    key: Array
    mask: Mask | None
    score_mods: tuple[ScoreMod, ...]
    scale: float
    sink: Array | None
    leading_shape: tuple[int, ...]
    groups: int
    q_len: int | None = None
    problem_class: type[Problem] | None = None
    kv_len: int | None = None

    def list_arrays(self) -> list[Any]:
        """List everything that the weights depend on: query, key, sink, and what mask and modifications hold."""
        arrays = [self.query, self.key]
        if self.mask is not None or self.score_mods or self.sink is not None:
            arrays += [self.sink, *_list_fields((self.mask, *self.score_mods))]
        return arrays

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, q_len, kv_len)."""
        q_len = self.query.shape[-2] if self.q_len is None else self.q_len
        return (*self.leading_shape, q_len, self.key.shape[-2] if self.kv_len is None else self.kv_len)

    def to_problem(self) -> Problem:
        """Convert to canonical form."""
        frame = Frame.from_shape(self.shape)
        return (self.problem_class or Problem)(
            engine=self.engine,
            query=self.query.reshape((num_pairs(self.query), *self.query.shape[-2:])),
            key=self.key.reshape((num_pairs(self.key), *self.key.shape[-2:])),
            query_index=broadcast_index(self.query, self.leading_shape, 1),
            key_index=broadcast_index(self.key, self.leading_shape, self.groups),
            pair_ids=frame.selected,
            positions=np.arange(frame.q_len),
            frame=frame,
            mask=self.mask,
            score_mods=self.score_mods,
            scale=self.scale,
            sink=self.sink,
            dtype=self.engine.working_dtype(self.query, self.key),
        )


@dataclass(frozen=True)
class Problem:
    """A matrix in canonical form: its (batch, head) pairs are on one axis.

    Nothing is repeated or expanded for broadcasting or grouped heads: `query_index` and `key_index` say which of the
    arrays' own pairs each pair of the matrix uses.

    Attributes:
        engine: The array library.
        query: (own pairs, rows, head_dim).
        key: (own pairs, kv_len, head_dim), or a block of these keys.
        query_index: For each pair of the matrix, its pair in `query`: (pairs,).
        key_index: For each pair of the matrix, its pair in `key`: (pairs,).
        pair_ids: Number of each pair within the whole matrix: (pairs,).
        positions: `q_idx` of each row: (rows,).
        frame: The frame in which mask and score modifications are evaluated.
        mask: Which keys each query may attend to; None for all.
        score_mods: Score modifications, in the order in which they are applied.
        scale: Factor of the products of query and key.
        sink: Extra score of each head that takes part in the softmax and belongs to no key.
        dtype: Dtype of scores and weights, float32 or wider.
        first_key: `kv_idx` of the first key in `key`, above 0 for a block of keys of a longer sequence.
    """

    engine: Engine
    query: Array
    key: Array
    query_index: IntArray
    key_index: IntArray
    pair_ids: IntArray
    positions: IntArray
    frame: Frame
    mask: Mask | None
    score_mods: tuple[ScoreMod, ...]
    scale: float
    sink: Array | None
    dtype: Any
    first_key: int = 0

    # Whether weights are the softmax of the scores, so that exp(score − lse) gives any weight.
    is_softmax: ClassVar[bool] = True

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the scores, (pairs, rows, kv_len)."""
        return len(self.query_index), len(self.positions), self.frame.kv_len

    @property
    def kv_range(self) -> range:
        """`kv_idx` of the keys in `key`: all of the sequence, or one block of it."""
        return range(self.first_key, self.first_key + self.key.shape[-2])

    # Products: the engine's fused kernel, unless a subclass has another method.

    @property
    def can_fuse(self) -> bool:
        """Whether `product` may be called."""
        return self.engine.can_fuse(self)

    @property
    def kernel(self) -> str:
        """Name of the kernel that `A @ value` runs."""
        return self.engine.kernel_name(self)

    @property
    def fallback_kernel(self) -> str:
        """Name of the kernel if the block loop computes a product, with the reason if a fused one was possible."""
        if not self.can_fuse:
            return self.kernel
        reason = "non-finite values, or a gradient that the fused kernel lacks"
        return f"{self.engine.name}: block loop ({reason})"

    def product(self, value: Array, value_index: IntArray) -> tuple[Array, Array | None, str] | None:
        """Compute output, lse and kernel name without the block loop; None if the block loop must do it."""
        return self.engine.run_fused_product(self, value, value_index)

    @property
    def placeholder_value(self) -> tuple[Array, IntArray]:
        """A value for a product that is computed for its lse only, and its index."""
        return self.key, self.key_index

    @property
    def has_sink(self) -> bool:
        """Whether the weights of a row may sum to less than 1: the rest belongs to the sink, or to no key."""
        return self.sink is not None

    @property
    def given_lse(self) -> Array | None:
        """The lse of each row if the weights were given, (pairs, rows); None if it is computed from the scores."""
        return None

    @property
    def needs_exact_rows(self) -> bool:
        """Whether weights must be normalised by the sum of their own computation, not by a kernel's lse."""
        return self.engine.needs_exact_rows(self)

    def compute_unnormalised_weights(self, rows: IntArray, columns: IntArray, full: bool) -> Array | None:
        """Weights of a tile before the division by the row sum; None if they are exponentials of the scores."""
        return None

    def take_given_weights(self, rows: IntArray, columns: IntArray) -> Array | None:
        """Weights of a tile that were given, (pairs, rows, columns); None if they are computed from the scores."""
        return None

    # Descriptions

    @property
    def title_suffix(self) -> str:
        """Text that an explanation appends to "How query 0 attends"."""
        return ""

    def describe(self) -> list[str]:
        """Describe the operations on the products of query and key, one phrase each."""
        return [f"scale {text.format_number(self.scale)}", *map(repr, self.score_mods)]

    # Parts and tiles

    def select_pairs(self, which: IntArray) -> Problem:
        """Return the problem of some (batch, head) pairs."""
        frame = self.frame.select(which)
        query_index, key_index, pair_ids = (
            index[which] for index in (self.query_index, self.key_index, self.pair_ids)
        )
        return replace(self, query_index=query_index, key_index=key_index, pair_ids=pair_ids, frame=frame)

    def select_rows(self, which: IntArray) -> Problem:
        """Return the problem of some rows, in the order given."""
        if np.array_equal(which, np.arange(len(self.positions))):
            return self  # without a copy of the query
        return replace(self, query=self.query[:, which], positions=self.positions[which])

    def scores(self, rows: IntArray, columns: IntArray, full: bool = False) -> Array:
        """Compute the scores of a tile: scale → score modifications in the order given → mask.

        Args:
            rows: Rows of the tile: (r,).
            columns: Columns of the tile: (c,).
            full: Whether the mask is known to allow the whole tile, so that it need not be evaluated.

        Returns:
            Scores, −inf where masked: (pairs, r, c).
        """
        engine, xp = self.engine, self.engine.xp
        query = engine.take(self.query, self.query_index, rows, self.dtype)
        own_columns = columns - self.first_key if self.first_key else columns
        key = engine.take(self.key, self.key_index, own_columns, self.dtype)
        scores = engine.compute_scores(query, key, self.scale)
        if len(scores) != self.shape[0]:
            scores = xp.broadcast_to(scores, (self.shape[0], *scores.shape[1:]))
        q_idx = self.positions[rows]
        for score_mod in self.score_mods:
            scores = score_mod.apply(scores, self.frame, q_idx, columns, xp)
        if self.mask is None or full:
            return scores
        return xp.where(self.mask.allows(self.frame, q_idx, columns, xp), scores, -xp.inf)

    def mask_tile(self, rows: IntArray, columns: IntArray, cache: dict[Any, Array]) -> Array:
        """Evaluate the mask on a tile as 1 (attend) and 0 (masked): (pairs or 1, rows, columns).

        `cache` is reused for tiles along a diagonal if the mask depends on q_idx − kv_idx only.
        """
        assert self.mask is not None
        q_idx = self.positions[rows]
        same_diagonal = (
            (columns[0] - q_idx[0], len(rows), len(columns))
            if self.mask.is_relative and is_contiguous(q_idx)
            else None
        )
        if same_diagonal is None or same_diagonal not in cache:
            allowed = self.mask.allows(self.frame, q_idx, columns, self.engine.xp)
            cache[same_diagonal] = self.engine.xp.astype(allowed, self.dtype)
        return cache[same_diagonal]

    def live_blocks(self, rows: IntArray, width: int) -> list[tuple[IntArray, bool]]:
        """List the blocks of `width` keys that the mask does not leave empty for a band of rows.

        Returns:
            For each block its columns, and whether the mask allows all of it.
        """
        kv_range = self.kv_range
        kv_lo = np.arange(kv_range.start, kv_range.stop, width)
        if not len(kv_lo) or not len(rows):
            return []
        kv_hi = np.minimum(kv_lo + width, kv_range.stop)
        may, must = np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool)
        if self.mask is not None:
            q_idx = self.positions[rows]
            may, must = self.mask.classify_blocks(
                self.frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi
            )
        return [(np.arange(kv_lo[i], kv_hi[i]), bool(must[i])) for i in np.flatnonzero(may)]
