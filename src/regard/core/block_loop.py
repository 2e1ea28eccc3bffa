"""The one block loop: every entry, product and measure of the matrix comes out of these tiles.

A band of rows is read twice over its live blocks of keys: first each row's shift (its largest score) and total
(the sum of exp(score − shift)), then the weights exp(score − shift) / total, which are final when a measure sees
them. Blocks that the mask leaves empty are never computed, full ones are not tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from regard.core.broadcasting import num_pairs, serves
from regard.engines import Engine
from regard.frame import Frame, is_run
from regard.masks import Mask
from regard.render import text
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray

# Rows and columns of a tile, and entries of a tile over all its pairs: what stays in the cores' caches.
ROWS, COLUMNS, TILE = 512, 512, 1 << 19
# Entries of a band whose scores are kept between the two readings rather than computed again.
KEEP = 1 << 22


class Rows(NamedTuple):
    """What turns scores into weights, for each row: weights = exp(scores − shift) / total.

    The pair keeps what a logsumexp loses: where scores are 1e4, rounding their lse costs the weights 1e-3. Where
    all scores are finite and small a kernel's lse is as good: then it is the shift, and the total None.
    """

    shift: Array
    total: Array | None

    def lse(self, xp: Any) -> Array:
        """The natural logarithm of each row's sum of exponentials, −inf for a row that sees nothing."""
        return self.shift if self.total is None else self.shift + xp.log(self.total)

    def at(self, index: Any) -> Rows:
        """The same for some pairs or rows."""
        return Rows(self.shift[index], None if self.total is None else self.total[index])


@dataclass(slots=True)
class Spec:
    """What `attention` was given, checked; a part of a matrix has no query of its own, only a problem."""

    engine: Engine
    query: Array
    key: Array
    mask: Mask | None
    score_mods: tuple[ScoreMod, ...]
    scale: float
    sink: Array | None
    lead: tuple[int, ...]
    groups: int
    q_len: int | None = None
    kind: type[Problem] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, q_len, kv_len)"""
        q_len = self.query.shape[-2] if self.q_len is None else self.q_len
        return (*self.lead, q_len, self.key.shape[-2])

    def problem(self) -> Problem:
        """The same in canonical form."""
        frame = Frame.whole(self.shape)
        return (self.kind or Problem)(
            engine=self.engine,
            query=self.query.reshape((num_pairs(self.query), *self.query.shape[-2:])),
            key=self.key.reshape((num_pairs(self.key), *self.key.shape[-2:])),
            query_index=serves(self.query, self.lead, 1),
            key_index=serves(self.key, self.lead, self.groups),
            numbers=frame.picked,
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
    """What a matrix is made of, in canonical form: pairs of (batch, head) on one axis.

    `query` is `(own pairs, rows, head_dim)` and `query_index` tells which of its own pairs serves each pair of the
    frame, likewise `key`; so nothing is ever repeated or expanded. `numbers` count the pairs within the matrix,
    `positions` are the q_idx of the rows.
    """

    engine: Engine
    query: Array
    key: Array
    query_index: IntArray
    key_index: IntArray
    numbers: IntArray
    positions: IntArray
    frame: Frame
    mask: Mask | None
    score_mods: tuple[ScoreMod, ...]
    scale: float
    sink: Array | None
    dtype: Any

    # What `product` is, in a plan.
    call: ClassVar[str] = "one fused call"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(pairs, rows, kv_len)"""
        return len(self.query_index), len(self.positions), self.frame.kv_len

    # How products are made: by the engine's fused kernel, unless a kind of matrix knows another road.

    @property
    def fuses(self) -> bool:
        """Whether a product may be made without the block loop."""
        return self.engine.fuses(self)

    @property
    def kernel(self) -> str:
        """What runs for a product."""
        return self.engine.kernel(self)

    @property
    def streamed(self) -> str:
        """What ran where the block loop made a product, although a kernel might have."""
        if not self.fuses:
            return self.kernel
        return f"{self.engine.name}: streaming tiles (the fused kernel does not keep what is promised here)"

    def product(self, value: Array, value_of: IntArray) -> tuple[Array, Array, str] | None:
        """Output, lse and what ran, without the block loop; None where that must do it."""
        return self.engine.product(self, value, value_of)

    @property
    def least_value(self) -> tuple[Array, IntArray]:
        """A value for a product that is made for its lse alone."""
        return self.key, self.key_index

    @property
    def needs_exact_rows(self) -> bool:
        """Whether a weight takes its digits only from scores and sum of one and the same computation."""
        return self.engine.needs_exact_rows(self)

    def shares(self, rows: IntArray, columns: IntArray, full: bool) -> Array | None:
        """What weights are shares of, where that is not the exponential of the scores."""
        return None

    @property
    def manner(self) -> str:
        """What an explanation adds to "How query 0 attends"."""
        return ""

    @property
    def words(self) -> list[str]:
        """What is done to the products of query and key, for a reader."""
        return [f"scale {text.number(self.scale)}", *map(repr, self.score_mods)]

    def pairs(self, which: IntArray) -> Problem:
        """The same for some pairs of (batch, head)."""
        frame = self.frame.only(which)
        query_index, key_index, numbers = self.query_index[which], self.key_index[which], self.numbers[which]
        return replace(self, query_index=query_index, key_index=key_index, numbers=numbers, frame=frame)

    def rows(self, which: IntArray) -> Problem:
        """The same for some rows, in the order given."""
        return replace(self, query=self.query[:, which], positions=self.positions[which])

    def start(self, rows: int) -> Rows:
        """Rows before any key was seen: only the sink, if there is one, has its share."""
        xp, pairs = self.engine.xp, self.shape[0]
        if self.sink is None:
            shift = xp.full((pairs, rows), -xp.inf, dtype=self.dtype)
            return Rows(shift, xp.zeros((pairs, rows), dtype=xp.float64))
        picked = self.engine.cast(self.frame.per_head(self.sink, "sink"), self.dtype)
        shift = xp.broadcast_to(picked[:, None], (pairs, rows))
        return Rows(shift, xp.where(shift == -xp.inf, 0.0, 1.0))

    def scores(self, rows: IntArray, columns: IntArray, full: bool = False) -> Array:
        """Scores of a tile, −inf where hidden. Scale → score modifications in the order given → mask."""
        engine, xp = self.engine, self.engine.xp
        query = engine.take(self.query, self.query_index, rows, self.dtype)
        key = engine.take(self.key, self.key_index, columns, self.dtype)
        scores = engine.scores(query, key, self.scale)
        if len(scores) != self.shape[0]:
            scores = xp.broadcast_to(scores, (self.shape[0], *scores.shape[1:]))
        q_idx = self.positions[rows]
        for score_mod in self.score_mods:
            scores = score_mod.apply(scores, self.frame, q_idx, columns, xp)
        if self.mask is None or full:
            return scores
        return xp.where(self.mask.allows(self.frame, q_idx, columns, xp), scores, -xp.inf)

    def allowed(self, rows: IntArray, columns: IntArray, kept: dict[Any, Array]) -> Array:
        """1 where a tile is seen, 0 where hidden: `(pairs or 1, rows, columns)`; `kept` for those that are alike."""
        assert self.mask is not None
        q_idx = self.positions[rows]
        # Blocks along a diagonal share one.
        alike = (
            (columns[0] - q_idx[0], len(rows), len(columns)) if self.mask.slides and is_run(q_idx) else None
        )
        if alike is None or alike not in kept:
            allowed = self.mask.allows(self.frame, q_idx, columns, self.engine.xp)
            kept[alike] = self.engine.xp.astype(allowed, self.dtype)
        return kept[alike]

    def live_blocks(self, rows: IntArray) -> list[tuple[IntArray, bool]]:
        """The columns of every block that these rows may see, and whether they see all of it."""
        kv_lo = np.arange(0, self.frame.kv_len, COLUMNS)
        if not len(kv_lo) or not len(rows):
            return []
        kv_hi = np.minimum(kv_lo + COLUMNS, self.frame.kv_len)
        may, must = np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool)
        if self.mask is not None:
            q_idx = self.positions[rows]
            may, must = self.mask.bounds(self.frame, int(q_idx.min()), int(q_idx.max()) + 1, kv_lo, kv_hi)
        return [(np.arange(kv_lo[i], kv_hi[i]), bool(must[i])) for i in np.flatnonzero(may)]


def fold(seen: Rows, scores: Array, engine: Engine) -> Rows:
    """Rows that have seen these scores too; the order in which blocks come does not matter."""
    xp = engine.xp
    assert seen.total is not None
    shift = xp.maximum(seen.shift, xp.max(scores, axis=-1))
    base = finite_shift(shift, xp)
    here = xp.sum(engine.exponentials(scores, base[..., None]), axis=-1)
    return Rows(shift, seen.total * xp.exp(seen.shift - base) + here)


def finite_shift(shift: Array, xp: Any) -> Array:
    """0 for a row that has seen nothing, since (−inf) − (−inf) is NaN."""
    return xp.where(shift == -xp.inf, 0.0, shift)


def weights_of(scores: Array, rows: Rows, engine: Engine) -> Array:
    """exp(scores − shift) / total, zero where hidden and in rows that see nothing."""
    xp = engine.xp
    weights = engine.exponentials(scores, finite_shift(rows.shift, xp)[..., None])
    if rows.total is None:
        return weights
    total = xp.where(rows.total == 0, 1.0, rows.total)
    weights /= engine.cast(total, weights.dtype)[..., None]
    if xp.any(xp.isnan(total)):
        # A NaN row is NaN where it is live only: what is hidden stays zero.
        weights = xp.where(scores == -xp.inf, 0.0, weights)
    return weights


class Step(Protocol):
    """What the loop asks of a measure; see `regard.measures.Measure`. It may have more."""

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any: ...
    def step(
        self, state: Any, weights: Array, scores: Array, q_idx: Array, kv_idx: Array, xp: Any
    ) -> Any: ...
    def finish(self, state: Any) -> Any: ...


def stream(
    problem: Problem, measures: Sequence[Step], known: Rows | None = None
) -> tuple[list[Any], Rows | None]:
    """The result of each measure over the whole matrix, and its rows; `known` rows save the first reading.

    Where gradients are wanted the engine makes the results, and finds no rows that were not known.
    """
    if not measures and known is not None:
        return [], known
    arrays = [getattr(measure, "array", None) for measure in measures]
    if measures and problem.engine.requires_grad(problem, *arrays):
        return problem.engine.differentiate(problem, measures, list(bands(problem.shape[1]))), known
    groups = list(_pair_groups(problem.shape))
    parts = []
    with problem.engine.quiet(), problem.engine.detached():
        for group in groups:
            rows = None if known is None else known.at(group)
            parts.append(_stream_group(problem.pairs(group), measures, rows))
    join = problem.engine.xp.concat
    results = [_join([part[0][i] for part in parts], join) for i in range(len(measures))]
    return results, known or Rows(*(join([part[1][i] for part in parts]) for i in range(2)))


def _stream_group(problem: Problem, measures: Sequence[Step], known: Rows | None) -> tuple[list[Any], Rows]:
    engine, xp = problem.engine, problem.engine.xp
    bound = [measure.bind(problem) if hasattr(measure, "bind") else measure for measure in measures]
    reading = any(getattr(measure, "reads_scores", True) for measure in bound)
    last = max((i for i, measure in enumerate(bound) if hasattr(measure, "step_logs")), default=None)
    # From the lse of a kernel, and nothing to do to the scores: one product, one exponential. It does not tell a weight
    # of zero from the smallest number, which matters where a sink may take all.
    changed = problem.score_mods or problem.sink is not None
    lean = known is not None and known.total is None and not (changed or reading)
    states = [measure.init(problem.shape, xp) for measure in bound]
    room: list[Array] = []  # used again for every tile: fresh memory costs as much as what is done in it
    alike: dict[Any, Array] = {}
    every = xp.arange(max(problem.shape))
    if lean:
        key = engine.take(problem.key, problem.key_index, np.arange(problem.shape[2]), problem.dtype)
    found: list[Rows] = []
    for band in bands(problem.shape[1]):
        blocks = problem.live_blocks(band)
        kept: list[Any] = [None] * len(blocks)
        if known is None:
            rows, kept = _first_reading(problem, band, blocks)
            found.append(rows)
        else:
            rows = known.at((slice(None), band))
        q_idx = every[band[0] : band[-1] + 1]
        if lean:
            shift = finite_shift(rows.shift, xp)[..., None]
            query = engine.take(problem.query, problem.query_index, band, problem.dtype) * problem.scale
        for (columns, full), scores in zip(blocks if bound else (), kept, strict=False):
            kv_idx, logs = every[columns[0] : columns[-1] + 1], None
            if lean:
                allowed = None if full else problem.allowed(band, columns, alike)
                logs, weights = engine.weights(
                    query, key[:, columns[0] : columns[-1] + 1], shift, allowed, room
                )
            else:
                scores = problem.scores(band, columns, full) if scores is None else scores
                weights = weights_of(scores, rows, engine)
            for i, measure in enumerate(bound):
                if logs is not None and hasattr(measure, "step_logs"):
                    own = logs if i == last else logs + 0.0  # whoever is last may use them up
                    states[i] = measure.step_logs(states[i], weights, own, q_idx, kv_idx, xp)
                else:
                    states[i] = measure.step(states[i], weights, scores, q_idx, kv_idx, xp)
    if known is None:
        found = found or [problem.start(0)]
        known = Rows(*(xp.concat([rows[i] for rows in found], axis=1) for i in range(2)))
    return [measure.finish(state) for measure, state in zip(bound, states, strict=True)], known


def _first_reading(problem: Problem, band: IntArray, blocks: Any) -> tuple[Rows, list[Any]]:
    """The rows of a band, and its scores where they are few enough to be kept."""
    rows, kept = problem.start(len(band)), []
    keep = len(band) * problem.shape[0] * sum(len(columns) for columns, _ in blocks) <= KEEP
    for columns, full in blocks:
        scores = problem.scores(band, columns, full)
        rows = fold(rows, scores, problem.engine)
        kept.append(scores if keep else None)
    return rows, kept


def entries(problem: Problem, columns: IntArray, known: Rows | None) -> Array:
    """Weights at these columns, `(pairs, rows, len(columns))`; scores where no rows are given."""
    engine, xp = problem.engine, problem.engine.xp
    pairs, count, _ = problem.shape
    result = xp.empty((pairs, count, len(columns)), dtype=problem.dtype)
    with engine.quiet():
        for group in _pair_groups((pairs, count, len(columns))):
            part = problem.pairs(group)
            for band in bands(count):
                for start in range(0, len(columns), COLUMNS):
                    chosen = columns[start : start + COLUMNS]
                    tile = part.scores(band, chosen)
                    if known is not None:
                        tile = weights_of(tile, known.at(group).at((slice(None), band)), engine)
                    result[group[:, None], band, start : start + COLUMNS] = tile
    return result


def bands(rows: int) -> Iterator[IntArray]:
    """Bands of rows, in order."""
    for start in range(0, rows, ROWS):
        yield np.arange(start, min(start + ROWS, rows))


def _pair_groups(shape: tuple[int, int, int]) -> Iterator[IntArray]:
    """Groups of pairs whose tiles fit together; one empty group where there are none."""
    pairs, rows, columns = shape
    size = max(1, TILE // max(1, min(rows, ROWS) * min(columns, COLUMNS)))
    for start in range(0, max(pairs, 1), size):
        yield np.arange(start, min(start + size, pairs))


def _join(parts: list[Any], join: Any) -> Any:
    if isinstance(parts[0], tuple):
        return type(parts[0])(*(_join(list(column), join) for column in zip(*parts, strict=True)))
    return parts[0] if len(parts) == 1 else join(parts)
