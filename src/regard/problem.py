"""The canonical form of a call, and the engine that computes it.

A `Problem` is a matrix whose arguments are checked and resolved, with its (batch, head) pairs on one axis. An `Engine`
holds the operations of an array library, most of them on a problem, so both are one layer: above masks and score
modifications, below the engines themselves.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from regard.accumulators import Accumulator
from regard.errors import ArgumentError, format_named_shape
from regard.frame import Frame, as_index, is_contiguous
from regard.masks import Mask
from regard.masks.base import classify_blocks
from regard.masks.kinds import IntParameter
from regard.render import text
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace

SpecOrProblem = TypeVar("SpecOrProblem", "Spec", "Problem")


class Engine(Protocol):
    """The operations of an array library that the matrix is computed with.

    In the shapes, g is the number of (batch, head) pairs, r of rows (queries) and c of columns (keys) of a tile. Most
    engines subclass `ArrayEngine`, which implements everything but `name`, `xp`, `owns` and `to_numpy`. By default, an
    engine has no compiled pass, no fused kernels and no gradients.

    >>> import numpy as np
    >>> from regard.engines import find_engine
    >>> engine = find_engine("example", query=np.ones(2))
    >>> engine.compute_scores(np.ones((1, 2, 4)), np.ones((1, 3, 4)), scale=0.5)
    array([[[2., 2., 2.],
            [2., 2., 2.]]])
    """

    @property
    def name(self) -> str:
        """Name of the library, as messages and `A.kernel` show it."""

    @property
    def xp(self) -> Namespace:
        """Array API namespace that masks, score modifications and measures compute with.

        `xp.zeros(shape)` without a dtype returns an accumulator: float64, or sums with compensated rounding errors if
        the device has no float64, where `xp.float64` is float32.
        """

    @property
    def is_asynchronous(self) -> bool:
        """Whether a device computes while Python goes on, so that reading a number of an array waits for it."""
        return False

    # Arrays

    def owns(self, array: object) -> bool:
        """Return whether an object is an array of this library.

        Args:
            array: Any object.
        """

    def to_numpy(self, array: Array) -> Any:
        """Convert an array to NumPy, for indices and for printing.

        Args:
            array: Array of this library, or a NumPy array, which is returned unchanged.
        """

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        """Convert an argument to a floating point array of this library.

        Args:
            array: Array of this library, NumPy array, or nested lists of numbers.
            operation: Operation that an error message names.
            name: Argument that an error message names.

        Raises:
            ArgumentTypeError: If the argument does not hold real numbers, or is on another device.
        """

    def count_changes(self, arrays: Sequence[Any]) -> list[int]:
        """Return how often each array was changed in place; nothing for those whose changes the library does not count.

        Args:
            arrays: Arrays and any other objects.
        """
        return []

    def working_dtype(self, *arrays: Array) -> Any:
        """Return the dtype that scores are computed in: the widest of the arrays' dtypes, float32 at least.

        Args:
            *arrays: Query, key and possibly value.
        """

    def cast(self, array: Array, dtype: Any) -> Array:
        """Convert an array to another dtype; return it unchanged if it has that dtype.

        Args:
            array: Array of this library.
            dtype: Dtype of this library.
        """

    def take(self, array: Array, pairs: IntArray, positions: IntArray, dtype: Any) -> Array:
        """Take some pairs and positions of an array, as a view if possible.

        Args:
            array: (own pairs, length, dim).
            pairs: Index into the own pairs: (g,).
            positions: Index into the length: (n,).
            dtype: Dtype of the result.

        Returns:
            (g, n, dim), or (1, n, dim) if all entries of `pairs` are equal.
        """

    # The block loop

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        """Compute scale · query keyᵀ.

        Args:
            query: (g or 1, r, head_dim).
            key: (g or 1, c, head_dim).
            scale: Factor of the products.

        Returns:
            (g, r, c).
        """

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        """Compute exp(scores − shift) without changing the scores.

        Args:
            scores: (g, r, c).
            shift: Shift of each row: (g, r, 1).
        """

    def compute_weights(
        self, query: Array, key: Array, lse: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        """Compute the weights of a tile from the lse of a fused kernel.

        Args:
            query: Scaled queries: (g or 1, r, head_dim).
            key: (g or 1, c, head_dim).
            lse: Logsumexp of each row: (g, r, 1).
            allowed: 1 where a query may attend to a key and 0 elsewhere, (g or 1, r, c); None for 1 everywhere.
            buffers: Memory to reuse; empty at the first call, filled by the engine.

        Returns:
            query keyᵀ − lse, at most 0, and its exponential times `allowed`: (g, r, c) each.
        """
        raise TypeError(f"{self.name} has no fused kernel whose lse could be used")

    def softmax(self, scores: Array) -> Array | None:
        """Compute the weights of whole rows, naively; None if one is not finite, as in a row without live keys.

        Args:
            scores: (…, r, c).
        """
        return None

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        """Reduce consecutive segments of an axis.

        Args:
            array: (g, r, c).
            sizes: Length of each segment; they add up to the length of the axis.
            axis: −1 or −2.
            reduce: "sum" or "max".

        Returns:
            The array with `len(sizes)` entries along the axis.
        """

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        """Find the k largest weights of each row, in any order. NaN ranks highest.

        Args:
            weights: (…, c).
            k: Number of weights, at most c.

        Returns:
            The weights and their columns, (…, k) each. Of equal weights above 0, the lowest columns.
        """

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager in which NaN and inf raise no warning and no dtype is lowered (autocast)."""

    # The compiled pass

    def name_compiled_pass(self, problem: Problem) -> str:
        """Return the name of the compiled pass for built-in measures; empty if the block loop must compute them.

        Args:
            problem: Matrix in canonical form.
        """
        return ""

    def can_accumulate(self, problem: Problem, accumulator: Accumulator) -> bool:
        """Return whether the compiled pass of a problem has an accumulator; the block loop computes other measures.

        Args:
            problem: Matrix in canonical form.
            accumulator: What to accumulate.
        """
        return True

    def accumulate(
        self,
        problem: Problem,
        accumulators: Sequence[Accumulator],
        known_max: Array | None,
        known_sum: Array | None,
    ) -> tuple[list[Any], Array, Array | None] | None:
        """Run the compiled pass; called only if `name_compiled_pass` returns a name.

        Args:
            problem: Matrix in canonical form.
            accumulators: What to accumulate; if empty, only the statistics are computed.
            known_max: Largest score of each row, or its lse if `known_sum` is None: (g, r). None if unknown.
            known_sum: Σ exp(score − max) of each row: (g, r).

        Returns:
            The array, or the pair of arrays, of each accumulator, and the largest score and the sum of each row. None
            if the block loop must compute them after all.
        """
        raise TypeError(f"{self.name} has no compiled pass")

    def prefers_compiled_pass(self, problem: Problem) -> bool:
        """Return whether the compiled pass is faster than a fused product of the upcast arrays, and needs no lse of it.

        Args:
            problem: Matrix in canonical form.
        """
        return False

    def keeps_exponentials(self, problem: Problem) -> bool:
        """Return whether the compiled pass computes each score once, so that it is slower with the lse of a product.

        Args:
            problem: Matrix in canonical form.
        """
        return False

    def name_measured_product(
        self, problem: Problem, value: Array, accumulators: Sequence[Accumulator]
    ) -> str:
        """Return the name of the kernel that computes `A @ value` and accumulators at once; empty if there is none.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            accumulators: What to accumulate.
        """
        return ""

    def run_measured_product(
        self, problem: Problem, value: Array, value_index: IntArray, accumulators: Sequence[Accumulator]
    ) -> tuple[Array, list[Any], Array, Array] | None:
        """Compute `A @ value` and accumulators at once; called only if `name_measured_product` returns a name.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).
            accumulators: What to accumulate.

        Returns:
            Output (pairs, rows, value_dim), the array of each accumulator, and the largest score and the sum of each
            row. None if they must be computed separately.
        """
        return None

    # Fused kernels

    def can_fuse(self, problem: Problem) -> bool:
        """Return whether a fused kernel may be called for a problem.

        Args:
            problem: Matrix in canonical form.
        """
        return False

    def kernel_name(self, problem: Problem) -> str:
        """Return the name of the kernel that `A @ value` runs.

        Args:
            problem: Matrix in canonical form.
        """
        return f"{self.name}: block loop"

    def run_fused_product(
        self, problem: Problem, value: Array, value_index: IntArray
    ) -> tuple[Array, Array | None, str] | None:
        """Compute `A @ value` with a fused kernel.

        Args:
            problem: Matrix in canonical form.
            value: (own pairs, kv_len, value_dim).
            value_index: For each pair of the matrix, its pair in `value`: (pairs,).

        Returns:
            Output (pairs, rows, value_dim), lse (pairs, rows) and the name of the kernel; None if the block loop must
            compute the product. The lse is None if the kernel computed it with reduced precision.
        """
        return None

    def prepare_fast_product(
        self, query: Array, key: Array, mask: Mask | None, scale: float
    ) -> Callable[[Any, bool], tuple[Array, Array | None, str] | None] | None:
        """Check once whether `A @ value` can run directly on the caller's arrays, in one call of the fused kernel.

        Args:
            query: (…, heads, q_len, head_dim).
            key: (…, kv_heads, kv_len, head_dim).
            mask: Mask of the matrix.
            scale: Factor of the products.

        Returns:
            None if the arguments need conversion first. Otherwise a function of the value, not validated, and of
            whether the lse is used. It returns output, lse and the name of the kernel, or None if the value needs
            validation or conversion. The lse is None if it is not used, or was computed with reduced precision.
        """
        return None

    def find_largest_norm(self, array: Array, dtype: Any) -> float:
        """Return the largest Euclidean norm along the last axis, computed in a dtype; 0 for an empty array.

        Args:
            array: (own pairs, length, dim).
            dtype: Dtype to compute in.
        """

    # Gradients

    def requires_grad(self, problem: Problem, *arrays: Array) -> bool:
        """Return whether a gradient is required of the problem's arrays, or of these.

        Args:
            problem: Matrix in canonical form.
            *arrays: Further arrays, such as a value.
        """
        return False

    def differentiate(
        self, problem: Problem, measures: Sequence[Any], bands: Sequence[IntArray]
    ) -> list[Any]:
        """Compute measures with gradients.

        Args:
            problem: Matrix in canonical form.
            measures: Measures that share the pass.
            bands: Row indices of each band.

        Returns:
            The result of each measure.
        """
        raise TypeError(f"{self.name} has no gradients")

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        """Call function(*arrays); if a gradient is required, recompute it in the backward pass.

        Args:
            function: Function of arrays that returns an array.
            *arrays: Its arguments.
        """
        return function(*arrays)

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager without gradients: the block loop writes into its states."""
        return nullcontext

    @property
    def enable_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        """Context manager with gradients, for views that are kept and used again."""
        return nullcontext


# The problem

# A score that is larger has a rounding error that its weight would show: eps times the score.
LARGE_SCORE = 64


def may_have_large_scores(query_norm: float, key_norm: float, scale: float) -> bool:
    """Return whether scores of these norms may be too large for weights from the lse of another computation.

    A kernel adds up its scores in a different order, so that a weight recomputed from its lse has a relative error of
    eps · |query| · |key| · scale.
    """
    return not query_norm * key_norm * abs(scale) < LARGE_SCORE  # NaN counts as large


def detach(array: Any) -> Any:
    """Return an array without the graph of its gradient; anything but a tensor unchanged."""
    return array.detach() if hasattr(array, "detach") else array


def convert_arrays(arguments: SpecOrProblem, convert: Callable[[Any], Any]) -> SpecOrProblem:
    """Return arguments whose arrays were converted, without an engine."""
    parts = (arguments.mask, arguments.score_mods)
    mask, score_mods = copy.deepcopy(parts, {id(array): convert(array) for array in find_arrays(*parts)})
    query, key, sink = (
        None if array is None else convert(array)
        for array in (arguments.query, arguments.key, arguments.sink)
    )
    none: Any = None
    return replace(arguments, engine=none, query=query, key=key, sink=sink, mask=mask, score_mods=score_mods)


def find_arrays(*parts: Any) -> list[Any]:
    """Find the arrays that masks and score modifications hold, at any depth of lists, dataclasses and torch modules."""
    arrays = []
    rest = list(parts)
    for part in rest:  # it grows
        if part is None or isinstance(part, (str, int, float, IntParameter)):
            continue  # most fields, for which `hasattr` would cost a microsecond
        if isinstance(part, (Mask, ScoreMod)):
            if not (isinstance(part, Mask) and part.is_constant):
                rest += vars(part).values()
        elif isinstance(part, (list, tuple)):
            rest += part
        elif isinstance(part, dict):
            rest += part.values()
        elif hasattr(part, "dtype"):
            arrays.append(part)
        elif hasattr(part, "parameters") and hasattr(part, "buffers"):
            arrays += [*part.parameters(), *part.buffers()]
        elif is_dataclass(part):
            rest += vars(part).values()
    return arrays


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
            arrays += find_arrays(self.sink, self.mask, self.score_mods)
        return arrays

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, (…, heads, q_len, kv_len)."""
        q_len = self.query.shape[-2] if self.q_len is None else self.q_len
        return (*self.leading_shape, q_len, self.key.shape[-2] if self.kv_len is None else self.kv_len)

    def to_problem(self) -> Problem:
        """Convert to canonical form."""
        frame = Frame.from_shape(self.shape)
        q_shape, k_shape = tuple(self.query.shape), tuple(self.key.shape)
        is_plain = q_shape[:-2] == k_shape[:-2] and self.groups == 1
        return (self.problem_class or Problem)(
            engine=self.engine,
            query=self.query.reshape((math.prod(q_shape[:-2]), *q_shape[-2:])),
            key=self.key.reshape((math.prod(k_shape[:-2]), *k_shape[-2:])),
            query_index=frame.selected if is_plain else broadcast_index(self.query, self.leading_shape, 1),
            key_index=frame.selected
            if is_plain
            else broadcast_index(self.key, self.leading_shape, self.groups),
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
        scale: Factor that multiplies the products of query and key.
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

    @cached_property
    def largest_norms(self) -> tuple[float, float]:
        """The largest norm of a query and of a key."""
        norm = self.engine.find_largest_norm
        return norm(self.query, self.dtype), norm(self.key, self.dtype)

    @cached_property
    def has_large_scores(self) -> bool:
        """Whether weights must be normalised by the sum of their own computation, not by a kernel's lse."""
        return may_have_large_scores(*self.largest_norms, self.scale)

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

    def take_part(self, pairs: IntArray, rows: IntArray) -> Problem:
        """Return some pairs and rows as a matrix of its own, whose pairs are numbered from 0."""
        all_rows = len(rows) == len(self.positions) and is_contiguous(rows)
        return replace(
            self,
            query=self.query if all_rows else self.query[:, as_index(rows)],
            positions=self.positions[rows],
            query_index=self.query_index[pairs],
            key_index=self.key_index[pairs],
            pair_ids=np.arange(len(pairs)),
            frame=self.frame.select(pairs),
        )

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
        return self._modify_scores(scores, self.positions[rows], columns, full)

    def compute_all_scores(self) -> Array:
        """Compute the scores of a small matrix without taking it apart: (pairs, rows, kv_len)."""
        engine = self.engine
        query, key = (
            engine.cast(_take_pairs(array, index, engine.xp), self.dtype)
            for array, index in ((self.query, self.query_index), (self.key, self.key_index))
        )
        scores = engine.compute_scores(query, key, self.scale)
        if scores.shape[0] != len(self.pair_ids):
            scores = engine.xp.broadcast_to(scores, (self.shape[0], *scores.shape[1:]))
        if not self.score_mods and self.mask is None:
            return scores
        return self._modify_scores(scores, self.positions, np.arange(self.frame.kv_len), full=False)

    def _modify_scores(self, scores: Array, q_idx: IntArray, columns: IntArray, full: bool) -> Array:
        """Apply score modifications, and the mask unless it is known to allow the whole tile."""
        xp = self.engine.xp
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
        """List the blocks of `width` keys that the mask does not leave empty for a band of rows, and which are full."""
        kv_range = self.kv_range
        kv_lo = np.arange(kv_range.start, kv_range.stop, width)
        if not len(kv_lo) or not len(rows):
            return []
        kv_hi = np.minimum(kv_lo + width, kv_range.stop)
        q_idx = self.positions[rows]
        nonempty, full = classify_blocks(
            self.mask, self.frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi
        )
        return [(np.arange(kv_lo[i], kv_hi[i]), bool(full[i])) for i in np.flatnonzero(nonempty)]


# Leading axes


def _take_pairs(array: Array, index: IntArray, xp: Namespace) -> Array:
    """Take the pairs of a small matrix, without a copy if possible; one pair if they are all equal."""
    count = len(index)
    if count == 1 and array.shape[0] == 1:
        return array
    if count == 1 or (index == index[0]).all():
        return array[int(index[0]) : int(index[0]) + 1]
    taken = as_index(index)
    return array[taken if isinstance(taken, slice) else xp.asarray(taken)]


def num_pairs(array: Array) -> int:
    """Count the (batch, head) pairs of an array (…, length, width)."""
    return math.prod(array.shape[:-2])


def broadcast_index(
    array: Array, leading_shape: tuple[int, ...], groups: int, operation: str = "", name: str = ""
) -> IntArray:
    """Compute which pair of an array (…, length, width) each pair of the matrix uses: flat indices, (pairs,)."""
    own_shape = tuple(array.shape[:-2])
    if own_shape == leading_shape and groups <= 1:
        return np.arange(math.prod(own_shape))
    pairs = np.arange(math.prod(own_shape)).reshape(own_shape)
    if groups > 1 and own_shape:
        pairs = np.repeat(pairs, groups, axis=-1)
    try:
        return np.broadcast_to(pairs, leading_shape).ravel()
    except ValueError:
        raise ArgumentError(
            operation,
            received=f"{name} of shape {tuple(array.shape)}",
            expected=f"axes before the last two that broadcast to {leading_shape}"
            + (f", its heads repeated {groups} times" if groups > 1 else ""),
            hint=f"Give {name} the leading axes of the matrix, or none.",
        ) from None


def leading_shape(
    query: Array, key: Array, enable_gqa: bool, operation: str = "attention"
) -> tuple[tuple[int, ...], int]:
    """Compute the leading axes of the matrix, and how many query heads share a key head."""
    q_shape, k_shape = tuple(query.shape), tuple(key.shape)  # slicing a `torch.Size` costs a microsecond
    if not enable_gqa and len(q_shape) > 1 and q_shape[:-2] == k_shape[:-2] and q_shape[-1:] == k_shape[-1:]:
        return q_shape[:-2], 1  # fast path of the common case
    for name, array in (("query", query), ("key", key)):
        if array.ndim < 2:
            raise ArgumentError(
                operation,
                received=f"{name} of shape {tuple(array.shape)}",
                expected="(…, heads, length, head_dim), with at least two axes",
                hint=f"A single token is a sequence of length one: {name}[None, :].",
            )
    shapes = ", ".join(
        f"{name} {format_named_shape(array.shape, length, 'head_dim')}"
        for name, array, length in (("query", query, "q_len"), ("key", key, "kv_len"))
    )
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(
            operation,
            received=shapes,
            expected="the same head_dim",
            hint="A score is a dot product of query and key: project them to one head_dim, or check for a transpose.",
        )
    q_leading, kv_leading, groups = tuple(query.shape[:-2]), tuple(key.shape[:-2]), 1
    if enable_gqa:
        heads, kv_heads = (leading[-1] if leading else 1 for leading in (q_leading, kv_leading))
        if not (q_leading and kv_leading) or kv_heads == 0 or heads % kv_heads:
            raise ArgumentError(
                operation,
                received=f"{shapes} with enable_gqa=True",
                expected="heads that are a multiple of kv_heads",
                hint="Each key head is shared by heads / kv_heads consecutive query heads.",
            )
        groups = heads // kv_heads
        kv_leading = (*kv_leading[:-1], heads)
    try:
        return np.broadcast_shapes(q_leading, kv_leading), groups
    except ValueError:
        raise ArgumentError(
            operation,
            received=shapes,
            expected="leading axes that broadcast",
            hint="For fewer key heads than query heads set enable_gqa=True.",
        ) from None


def resolve_scale(scale: Any, head_dim: int) -> float:
    """Return the given scale, or 1/√head_dim for None."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.number) or not math.isfinite(scale):
        raise ArgumentError(
            "attention",
            received=f"scale={scale!r}",
            expected="a finite number",
            hint="Omit scale for 1/√head_dim; 0 makes every row uniform.",
        )
    return float(scale)
