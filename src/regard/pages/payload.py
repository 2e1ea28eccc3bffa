"""A matrix as a page carries it: query and key in half precision, each row's lse and runs of keys, and the error.

The lse is that of the rounded query and key, so every weight that a page works out is exp(score − lse) of one and the
same matrix, whose rows sum to 1; how far it is from the original is bounded and measured here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, TooLargeError
from regard.masks import Mask
from regard.masks.intervals import KeyIntervals, find_intervals
from regard.pages.parts import Halves, covered, halves, levels, part
from regard.score_mods import BiasMod, ScoreMod
from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.core.problem import Problem

# Numbers of a bias that a page carries at most, weights that an overview looks at, and weights compared.
MOST_ADDED, MOST_LOOKED_AT, COMPARED = 1 << 22, 1 << 31, 1 << 22


class Error(NamedTuple):
    """How far weights of the page are from the original's, as a part of each weight and as a difference.

    `relative` and `absolute` are bounds, from the rounding that was made; `found_relative` and `found_absolute` the
    largest among `compared` weights. `exact`: nothing was rounded, what is left is the arithmetic.
    """

    relative: float
    absolute: float
    found_relative: float
    found_absolute: float
    compared: int
    exact: bool


class Carried(NamedTuple):
    """`record` is what the page opens, `matrix` the rounded matrix with its lse, `runs` those of each pair."""

    record: dict[str, Any]
    matrix: Any
    runs: list[KeyIntervals]
    error: Error

    def overviews(self, edge: int, most: int | None = None) -> list[dict[str, Any]]:
        """For each pair a picture of at most `edge` × `edge` means of blocks, as a record for the page.

        Where all pairs together have more than `most` weights, some rows of each block are taken, and all their keys:
        `taken` says how many, and is None where none were left out.
        """
        pairs, rows, keys = self.matrix._problem.shape
        cells = min(edge, rows), min(edge, keys)
        most = MOST_LOOKED_AT if most is None else most
        taken = max(1, int(rows / cells[0] * most / (pairs * rows * keys)))
        matrix = self.matrix
        if taken < rows // cells[0]:
            matrix = matrix.lazy[..., _spread(rows, cells[0], taken), :]
        else:
            taken = 0
        means = matrix._problem.engine.to_numpy(matrix.coarsen(cells)).reshape(pairs, *cells)
        made = {"size": cells, "block": (rows / cells[0], keys / cells[1]), "taken": taken or None}
        return [
            made | levels(mean, covered(*seen, (rows, keys), cells))
            for mean, seen in zip(means, self.runs, strict=True)
        ]


def _spread(rows: int, cells: int, taken: int) -> IntArray:
    """`taken` rows of each of so many cells, one from each equal piece of it, at a place drawn by lot."""
    edges = np.arange(cells * taken + 1) * rows // (cells * taken)
    return edges[:-1] + np.random.default_rng(0).integers(np.diff(edges))


def carried(matrix: Any, operation: str) -> Carried:
    """A matrix as a page carries it; its pairs (batch, head) are counted from 0 in the page.

    >>> import regard
    >>> A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())
    >>> made = carried(A, "page")
    >>> made.record["size"], made.error.exact, made.matrix[2].round(4).tolist()
    ([3, 3], True, [0.2645, 0.2645, 0.4711])
    """
    problem: Problem = matrix._problem
    if not problem.is_softmax:
        raise ArgumentError(
            operation,
            received=", ".join(problem.describe()),
            expected="weights that are exponentials of scores",
            hint="Its weights can be had from A[rows], and its picture from A.coarsen(512).",
        )
    engine = problem.engine
    with engine.suppress_warnings(), engine.no_grad():
        masks, mask_of = _masks(problem, operation)
        seen = [masks[i] for i in mask_of]
        live = [np.diff(each.offsets) > 0 for each in seen]
        reached = [_reached(each, problem.shape[2]) for each in seen]
        query = _rounded(problem, problem.query, problem.query_index, live, centred=False)
        key = _rounded(problem, problem.key, problem.key_index, reached, centred=True)
        error = _bounds(problem, query, key)
        rounded = matrix if error.exact else _with(matrix, query, key)
        lse = engine.to_numpy(rounded.lse).reshape(problem.shape[:2]).astype(np.float32)
        error = _compared(matrix, rounded, lse, error)
        record = {
            "size": list(problem.shape[1:]),
            "width": int(problem.query.shape[-1]),
            "scale": float(problem.scale),
            "positions": part(problem.positions),
            "query": query.record(),
            "query_index": query.of,
            "key": key.record(),
            "key_index": key.of,
            "lse": [part(each) for each in lse],
            "masks": [{"counts": part(np.diff(each.offsets)), "edges": part(each.edges.T)} for each in masks],
            "mask_of": mask_of,
            "mods": [_mod(mod, problem, operation) for mod in problem.score_mods],
            "q_len": problem.frame.q_len,
            "error": error._asdict(),
        }
    return Carried(record, rounded, seen, error)


def _masks(problem: Problem, operation: str) -> tuple[list[KeyIntervals], list[int]]:
    """The masks that differ, as runs of keys, and which of them each pair has."""
    mask, frame, engine = problem.mask, problem.frame, problem.engine

    def of(pair: int) -> KeyIntervals:
        only = frame.select(np.array([pair]))
        return find_intervals(mask, only, problem.positions, operation, engine.xp, engine.to_numpy)

    pairs = problem.shape[0]
    if _alike(mask, problem):
        return [of(0)], [0] * pairs
    found: list[KeyIntervals] = []
    which = []
    for pair in range(pairs):
        here = of(pair)
        same = (i for i, each in enumerate(found) if all(map(np.array_equal, each, here)))
        which.append(next(same, len(found)))
        if which[-1] == len(found):
            found.append(here)
    return found, which


def _alike(mask: Mask | None, problem: Problem) -> bool:
    one = np.zeros(1, np.int64)
    return (
        mask is None
        or mask.allows(problem.frame, problem.positions[:1], one, problem.engine.xp).shape[0] == 1
    )


def _reached(seen: KeyIntervals, keys: int) -> Array:
    """Which keys anyone sees."""
    starts, stops = (np.bincount(edge, minlength=keys + 1) for edge in seen.edges.T)
    return np.cumsum(starts - stops)[:keys] > 0


class Side(NamedTuple):
    """Query or key, rounded: its own pairs that serve, which of them serves each pair, and lengths.

    Of the vectors of each own pair: how long they were, how far rounding moved them, and how long they are; the latter
    two from a common centre for keys.
    """

    own: list[Halves]
    of: list[int]
    lengths: list[tuple[Array, Array, Array]]

    def record(self) -> list[dict[str, Any]]:
        return [{"numbers": part(each.numbers), "exponent": each.exponent} for each in self.own]

    def widened(self, problem: Problem) -> Array:
        return problem.engine.xp.asarray(
            np.stack([each.widened(_wide(problem)) for each in self.own]), dtype=problem.dtype
        )


def _wide(problem: Problem) -> Any:
    """NumPy's name of the working dtype."""
    return np.float64 if "64" in str(problem.dtype) else np.float32


def _rounded(problem: Problem, array: Array, of: IntArray, live: list[Array], centred: bool) -> Side:
    """Query or key in half precision, zero where nobody sees it."""
    own, of = np.unique(of, return_inverse=True)
    made, lengths = [], []
    for i, each in enumerate(own):
        anyone = np.logical_or.reduce([live[pair] for pair in np.flatnonzero(of == i)])
        before = problem.engine.to_numpy(problem.engine.cast(array[int(each)], problem.dtype))
        made.append(halves(before, anyone))
        fine = anyone & np.isfinite(before).all(1)
        before, after = before[fine], made[-1].widened(before.dtype)[fine]
        whole, moved = _norms(before), before - after
        if centred and len(moved):
            moved, after = moved - moved.mean(0), after - after.mean(0)
        lengths.append((whole, _norms(moved), _norms(after)))
    return Side(made, of.tolist(), lengths)


def _with(matrix: Any, query: Side, key: Side) -> Any:
    """The matrix of the rounded query and key."""
    problem: Problem = matrix._problem
    changed = replace(
        problem,
        query=query.widened(problem),
        key=key.widened(problem),
        query_index=np.array(query.of),
        key_index=np.array(key.of),
    )
    return type(matrix)(replace(matrix._spec, query=None, q_len=problem.shape[1]), changed)


def _bounds(problem: Problem, query: Side, key: Side) -> Error:
    """Bounds on the error of any weight from the rounding of query and key.

    A score moves by scale · (q·δk + δq·k′), and what moves all scores of a row alike cancels in the softmax; so keys
    count by their distance from a common centre. Where no score of a row moves by more than Δ, a weight changes by a
    factor of at most exp(2Δ), and by at most tanh(Δ / 2). What the arithmetic rounds in products, exponentials and
    sums is added to Δ.
    """
    precision = float(np.finfo(_wide(problem)).eps)
    terms = problem.query.shape[-1] + 8
    worst, exact = 0.0, True
    for i, j in zip(query.of, key.of, strict=True):
        q, dq, _ = query.lengths[i]
        k, dk, away = key.lengths[j]
        if not len(q) or not len(k):
            continue
        rounding = q * dk.max() + dq * away.max()
        exact = exact and not rounding.any()
        moved = abs(problem.scale) * (rounding + terms * precision * q * k.max())
        worst = max(worst, float(moved.max()) + 8 * precision)
    with np.errstate(over="ignore"):
        return Error(float(np.expm1(2 * worst)), math.tanh(worst / 2), 0.0, 0.0, 0, exact)


def _norms(array: Array) -> Array:
    return np.sqrt(np.einsum("ij,ij->i", array, array, dtype=np.float64))


def _compared(matrix: Any, rounded: Any, lse: Array, error: Error) -> Error:
    """The error with what was found: whole rows of the original beside what a page makes of them."""
    problem: Problem = rounded._problem
    pairs, count, keys = problem.shape
    many = min(count, max(1, min(64, COMPARED // (pairs * keys))))
    rows = _spread(count, 1, many)
    wanted = problem.engine.to_numpy(matrix.lazy[..., rows, :].to_dense()).reshape(pairs, many, keys)
    found = problem.engine.to_numpy(rounded._weights_from_lse(rows, lse[:, rows]))
    with np.errstate(all="ignore"):
        apart = np.abs(found - wanted)
        relative = np.where(wanted > 1e-30, apart / wanted, 0.0)  # below, float32 has fewer digits
        worst = [float(np.nanmax(each, initial=0.0)) for each in (relative, apart)]
        # The lse travels as float32, whatever the matrix is.
        rest = float(np.max(np.abs(lse), where=np.isfinite(lse), initial=0.0)) * 2.0**-24
    return error._replace(
        relative=float(np.expm1(np.log1p(error.relative) + rest)),
        absolute=min(1.0, error.absolute + math.expm1(rest)),
        found_relative=worst[0],
        found_absolute=worst[1],
        compared=pairs * many * keys,
    )


def _mod(mod: ScoreMod, problem: Problem, operation: str) -> dict[str, Any]:
    """What a page does to the scores, its arrays as parts."""
    size = math.prod(mod.array.shape) if isinstance(mod, BiasMod) else math.prod(problem.shape)
    dense = type(mod).to_payload is ScoreMod.to_payload
    if dense and size > MOST_ADDED:
        raise TooLargeError(
            operation,
            received=f"{mod}, {size:,} numbers",
            expected=f"at most {MOST_ADDED:,} to be carried",
            hint="Take some rows, A.lazy[..., rows, :], or say it by distance: relative_bias, alibi.",
        )
    record = mod.to_payload(problem.frame, problem.positions, problem.engine.xp, problem.dtype)
    if record is None:
        raise ArgumentError(
            operation,
            received=f"the score modification {mod!r}",
            expected="one that a page can do by itself: softcap, alibi, relative_bias, bias",
            hint="Give it a record(frame, q_idx, xp, dtype) in these terms, or show A.coarsen(512).",
        )
    carried = {name: each for name, each in record.items() if not hasattr(each, "shape")}
    for name, each in record.items():
        if hasattr(each, "shape"):
            array = problem.engine.to_numpy(each)
            carried[name] = part(array.astype(np.uint8) if array.dtype == bool else array)
    return carried
