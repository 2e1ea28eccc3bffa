"""The base class of measures, and helpers that measures share."""

from __future__ import annotations

import copy
import re
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np

from regard.accumulators import Accumulator, RowSum
from regard.engines import find_engine
from regard.problem import Problem
from regard.types import Array, IntArray, Namespace

MeasureT = TypeVar("MeasureT", bound="Measure")


class Measure:
    """Base class of measures: a subclass defines `init` and `step`, and `merge` and `finish` if needed.

    (batch, head) pairs are on one axis: a tile of weights is (pairs, rows, columns), and the arrays that `finish`
    returns begin with the axis of pairs. `step` receives final weights, so nothing is ever rescaled. Tiles that are
    completely masked are skipped.

    >>> import regard
    >>> from regard.learn import cat
    >>> class Above(regard.Measure):  # how many keys of each row have a weight above 0.2
    ...     def init(self, shape, xp):
    ...         return xp.zeros(shape[:2])
    ...
    ...     def step(self, state, weights, scores, q_idx, kv_idx, xp):
    ...         state[:, q_idx] += (weights > 0.2).sum(-1)
    ...         return state
    >>> regard.attention(cat.Q, cat.K).measure(Above()).above
    array([2., 2., 2., 1., 1.])
    """

    # Whether `step` reads the scores. If no measure of a pass does, `step` may get None for them, and weights whose
    # memory is reused for the next tile, so that it must copy what it keeps.
    reads_scores: ClassVar[bool] = True
    # Field of `A.measure(…)` that holds the result; empty for the class name in snake case.
    result_name: ClassVar[str] = ""

    def bind(self, problem: Problem) -> Measure:
        """Return the measure for one matrix; called before the first tile.

        Args:
            problem: Matrix in canonical form.

        Returns:
            The measure itself, or a copy that holds the data it needs from the matrix.

        Raises:
            ArgumentError: If the measure does not fit the matrix.
        """
        return self

    def value_columns(self, problem: Problem) -> tuple[Array, IntArray] | None:
        """Return columns whose product with the matrix gives the measure, so that a fused product can compute it.

        Args:
            problem: Matrix in canonical form.

        Returns:
            The columns (own pairs, kv_len, width), and the index of the own pair for each pair of the matrix, (pairs,).
            None if the measure is not such a product.
        """
        return None

    def finish_columns(self, product: Array, lse: Array, problem: Problem) -> Array:
        """Compute the result from the product of the matrix and `value_columns`.

        Args:
            product: (pairs, rows, width).
            lse: Logsumexp of each row: (pairs, rows).
            problem: Matrix in canonical form.

        Returns:
            The result, an array that begins with the axis of pairs. It is converted to float64, like the sums of a
            pass, so that the dtype of a result does not depend on how it was computed.
        """
        return product[..., 0]

    def accumulator(self, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
        """Describe the state as one of the values that a compiled pass can accumulate.

        The description replaces `init` and `step`. It is not used if a subclass overrides only one of them.

        Args:
            problem: Matrix in canonical form.

        Returns:
            The value to accumulate; several sums if the state stacks them along a new last axis; None if only `step`
            can compute the measure.
        """
        return None

    def restore_state(self, accumulated: Any) -> Any:
        """Convert what a compiled pass accumulated to the state that `finish` takes; the default returns it unchanged.

        Args:
            accumulated: The array, or the pair of arrays, that `accumulator` describes.
        """
        return accumulated

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Any:
        """Return the state before the first tile.

        Args:
            shape: Shape of the matrix, (pairs, q_len, kv_len).
            xp: Array API namespace of the engine.

        Returns:
            Any object: an array, or a tuple of arrays.
        """
        raise TypeError(f"{type(self).__name__} must define init(shape, xp)")

    def step(
        self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> Any:
        """Add one tile to the state.

        Args:
            state: State after the previous tiles; it may be changed in place.
            weights: Weights of the tile: (pairs, r, c).
            scores: Scores of the tile, −inf where masked: (pairs, r, c).
            q_idx: Rows of the tile: (r,).
            kv_idx: Columns of the tile: (c,).
            xp: Array API namespace of the engine.

        Returns:
            The state after the tile.
        """
        raise TypeError(f"{type(self).__name__} must define step(state, weights, scores, q_idx, kv_idx, xp)")

    def compact(self, state: Any) -> Any:
        """Convert the state after the last tile to arrays, if `step` kept something else; the default returns it.

        Args:
            state: State after all tiles of a pass.

        Returns:
            An array or a tuple of arrays, which `merge` and `finish` take.
        """
        return state

    def merge(self, a: Any, b: Any) -> Any:
        """Merge the states of two sets of tiles, ranks or documents; associative up to rounding.

        Args:
            a: A state.
            b: Another state.

        Returns:
            The state of both sets; the default is a + b.
        """
        return a + b

    def finish(self, state: Any) -> Any:
        """Compute the result from the last state.

        Args:
            state: State after all tiles.

        Returns:
            An array or a named tuple of arrays, which begin with the axis of pairs; the default is the state.
        """
        return state

    def __repr__(self) -> str:
        """Show the arguments that differ from their defaults, as in `Coarse(cells=64)`."""
        own_fields: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        arguments = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in own_fields
            if field.init and not _is_default(getattr(self, field.name), field.default)
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


class BoundMeasure(Measure):
    """A measure that reads its matrix: `bind` returns a copy with `problem` set."""

    problem: Problem

    def bind(self, problem: Problem) -> Measure:
        return copy_with(self, problem=problem)


@dataclass(frozen=True, repr=False)
class RowMean(Measure):
    """A mean over the keys of each row: Σ weight · factor / Σ weight, 0 if the keys have no weight; (…, q_len).

    Without a sink, the weights of a row sum to 1, and the state is Σ weight · factor. With one, the state also holds
    Σ weight. A subclass defines `step` and `accumulator` with the methods below.
    """

    # Set by `bind`: the least sum of weights to divide by; 0 if no sink takes a share.
    _least_sum: float = field(default=0.0, init=False, compare=False)

    def bind(self, problem: Problem) -> Measure:
        return copy_with(self, _least_sum=self._find_least_sum(problem)) if problem.has_sink else self

    @staticmethod
    def _find_least_sum(problem: Problem) -> float:
        """Return the least sum of weights that has all its digits, and an inverse; 0 if no sink takes a share."""
        limits = problem.engine.xp.finfo(problem.dtype)
        return float(limits.tiny) / float(limits.eps) if problem.has_sink else 0.0

    @staticmethod
    def _describe_state(problem: Problem, row_sum: Accumulator) -> Accumulator | tuple[Accumulator, ...]:
        """Return what a compiled pass accumulates for a sum of weight · factor."""
        return (row_sum, RowSum("one")) if problem.has_sink else row_sum

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> Array:
        return xp.zeros((*shape[:2], 2) if self._least_sum else shape[:2])

    def _add(self, state: Array, q_idx: Array, sums: Array, weights: Array, xp: Namespace) -> Array:
        """Add the sums of weight · factor over a tile, (pairs, r), and the weights if the state needs them."""
        if self._least_sum:
            sums = xp.stack([sums, xp.sum(weights, axis=-1)], axis=-1)
        state[:, as_slice(q_idx)] += sums
        return state

    def finish(self, state: Array) -> Array:
        return self._normalise(state[..., 0], state[..., 1], self._least_sum) if self._least_sum else state

    def _normalise(self, total: Array, weight: Array, least_sum: float) -> Array:
        """Divide sums of weight · factor by the sums of the weights; both are (pairs, rows)."""
        xp = find_engine("finish", total=total).xp
        return xp.where(weight < least_sum, 0.0, total) / xp.where(weight < least_sum, 1.0, weight)


def _is_default(value: object, default: object) -> bool:
    return value is default or (isinstance(default, int | float | str) and value == default)


def copy_with(measure: MeasureT, **state: Any) -> MeasureT:
    """Return a copy of a measure that holds what it needs of one matrix."""
    bound = copy.copy(measure)
    vars(bound).update(state)
    return bound


def find_accumulator(measure: Measure, problem: Problem) -> Accumulator | tuple[Accumulator, ...] | None:
    """Return the description of a measure's state; None if the measure has none, or redefines how it is computed.

    >>> import regard
    >>> from regard.measures import Received
    >>> from regard.measures.base import find_accumulator
    >>> find_accumulator(Received(), regard.attention([[1.0]], [[1.0]]).problem)
    ColumnSum()
    """
    classes = type(measure).__mro__
    described = next(i for i, owner in enumerate(classes) if "accumulator" in vars(owner))
    computed = next(i for i, owner in enumerate(classes) if {"init", "step"} & vars(owner).keys())
    return measure.accumulator(problem) if described <= computed else None


def as_slice(indices: Array) -> slice:
    """Convert the indices of a tile's rows or columns, which are contiguous, to a slice.

    >>> as_slice(np.arange(8, 12))
    slice(8, 12, None)
    """
    known: slice | None = getattr(indices, "tile_slice", None)  # see `regard.frame.take_range`
    if known is not None:
        return known
    first = int(indices[0])
    return slice(first, first + len(indices))


def share_columns(problem: Problem, *columns: Array) -> tuple[Array, IntArray]:
    """Return columns (kv_len,) in the form of `Measure.value_columns`, shared by all pairs."""
    array = problem.engine.xp.asarray(np.stack(columns, axis=-1), dtype=problem.dtype)[None]
    return array, np.zeros(problem.shape[0], np.int64)


def get_result_name(measure: Measure) -> str:
    """Return the field of `A.measure(…)` that holds a measure's result: its `result_name`, or its class name.

    >>> import regard
    >>> get_result_name(regard.MaxWeight()), get_result_name(regard.TopK(8))
    ('max_weight', 'topk')
    """
    return measure.result_name or _convert_to_snake_case(type(measure).__name__)


@lru_cache(maxsize=256)
def _convert_to_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("_")).lower()
