"""The page of a matrix: a payload from which a page computes any weight, and the zoomable map of one head.

The payload holds query and key in half precision, the lse of each row, and the mask as intervals of keys. The lse
belongs to the rounded query and key, so every weight that a page computes is exp(score − lse) of one matrix, whose rows
sum to 1. This module bounds and measures how far that matrix is from the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from regard.core.block_loop import SoftmaxStats, compute_entries, run_block_loop
from regard.core.planner import compute_measures
from regard.core.products import DenseWeights
from regard.errors import ArgumentError, TooLargeError
from regard.masks import Mask
from regard.masks.segments import KeyIntervals, find_intervals
from regard.measures import Coarse
from regard.pages.encoding import (
    EncodedArray,
    ScaledHalves,
    encode_array,
    encode_overview,
    live_cells,
    round_to_half,
)
from regard.pages.html import Page, build_page, encode_record
from regard.problem import Problem
from regard.render.text import escape_unprintable
from regard.score_mods import BiasMod, ScoreMod
from regard.types import Array, IntArray

MAX_CELLS = 1024  # cells of the overview along an edge
MAX_BIAS_SIZE = 1 << 22  # numbers of a bias that a payload holds
COMPARED_WEIGHTS = 1 << 22  # weights that are compared with the original
ELEMENT_OVERHEAD = 64  # characters around each array in the page


class ErrorEstimate(NamedTuple):
    """How far the weights of a payload are from the weights of the original matrix.

    Attributes:
        relative: Bound on the difference, relative to the weight.
        absolute: Bound on the difference.
        found_relative: Largest relative difference among the weights that were compared.
        found_absolute: Largest difference among the weights that were compared.
        compared: Number of weights that were compared.
        exact: Whether query and key were stored without rounding.
    """

    relative: float
    absolute: float
    found_relative: float
    found_absolute: float
    compared: int
    exact: bool


class MatrixPayload(NamedTuple):
    """The payload of a matrix.

    Attributes:
        record: The data for the page.
        problem: The matrix of the rounded query and key.
        stats: Its softmax statistics.
        intervals: For each (batch, head) pair, the intervals of keys that are not masked.
        error: The error of the weights.
    """

    record: dict[str, Any]
    problem: Problem
    stats: SoftmaxStats | None
    intervals: list[KeyIntervals]
    error: ErrorEstimate

    def overviews(self, max_cells: int) -> list[dict[str, Any]]:
        """Compute a picture of each (batch, head) pair: the maximum and the mean of each cell, from every weight.

        This takes one more pass over the matrix, and memory for the cells.
        """
        engine, (_, rows, keys) = self.problem.engine, self.problem.shape
        cells = min(max_cells, rows), min(max_cells, keys)
        measures = {"mean": Coarse(cells, "mean"), "max": Coarse(cells, "max")}
        with engine.no_grad():
            results = compute_measures(self.problem, measures, self.stats).results
        means, maxima = (engine.to_numpy(results[name]) for name in measures)
        return [
            encode_overview(mean, maximum, live_cells(*intervals, (rows, keys), cells), (rows, keys))
            for mean, maximum, intervals in zip(means, maxima, self.intervals, strict=True)
        ]


def _sample_rows(rows: int, count: int) -> IntArray:
    """Draw `count` rows, one at random from each equal part."""
    edges = np.arange(count + 1) * rows // count
    return edges[:-1] + np.random.default_rng(0).integers(np.diff(edges))


def build_payload(problem: Problem, operation: str) -> MatrixPayload:
    """Build the payload of a matrix.

    >>> import regard
    >>> A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())
    >>> payload = build_payload(A.problem, "page")
    >>> payload.record["size"], payload.error.exact
    ([3, 3], True)
    """
    if not problem.is_softmax:
        raise ArgumentError(
            operation,
            received=", ".join(problem.describe()),
            expected="weights that are exponentials of scores",
            hint="Compute its weights with A[rows], or draw A.coarsen(512).",
        )
    engine = problem.engine
    with engine.suppress_warnings(), engine.no_grad():
        masks, mask_index = _distinct_masks(problem, operation)
        intervals = [masks[i] for i in mask_index]
        live_queries = [np.diff(mask.offsets) > 0 for mask in intervals]
        live_keys = [_live_keys(mask, problem.shape[2]) for mask in intervals]
        query = _round(problem, problem.query, problem.query_index, live_queries, centre=False)
        score_mods = [_score_mod_record(mod, problem, operation) for mod in problem.score_mods]
        # What all scores of a row share cancels in the softmax, unless there is a sink or a cap.
        cancels = not problem.has_sink and all(mod["kind"] != "softcap" for mod in score_mods)
        key = _round(problem, problem.key, problem.key_index, live_keys, centre=cancels)
        error = _bound_error(problem, query, key)
        rounded = problem if error.exact else _replace_vectors(problem, query, key)
        stats = compute_measures(rounded, {}).stats
        assert stats is not None
        lse = engine.to_numpy(stats.lse(engine.xp)).astype(np.float32)
        error = _measure_error(problem, rounded, lse, error)
        record = {
            "size": list(problem.shape[1:]),
            "head_dim": int(problem.query.shape[-1]),
            "scale": float(problem.scale),
            "positions": encode_array(problem.positions),
            "query": query.to_record(),
            "query_index": query.array_index,
            "key": key.to_record(),
            "key_index": key.array_index,
            "lse": [encode_array(row) for row in lse],
            "has_sink": problem.has_sink,
            "masks": [
                {"counts": encode_array(np.diff(mask.offsets)), "edges": encode_array(mask.edges.T)}
                for mask in masks
            ],
            "mask_index": mask_index,
            "score_mods": score_mods,
            "q_len": problem.frame.q_len,
            "error": error._asdict(),
        }
    return MatrixPayload(record, rounded, stats, intervals, error)


def _distinct_masks(problem: Problem, operation: str) -> tuple[list[KeyIntervals], list[int]]:
    """Return the masks that differ, as intervals of keys, and for each pair the index of its mask."""
    mask, frame, engine = problem.mask, problem.frame, problem.engine

    def intervals_of(pair: int) -> KeyIntervals:
        only = frame.select(np.array([pair]))
        return find_intervals(mask, only, problem.positions, operation, engine.xp, engine.to_numpy)

    pairs = problem.shape[0]
    if _all_pairs_alike(mask, problem):
        return [intervals_of(0)], [0] * pairs
    masks: list[KeyIntervals] = []
    index = []
    for pair in range(pairs):
        own = intervals_of(pair)
        equal = (i for i, known in enumerate(masks) if all(map(np.array_equal, known, own)))
        index.append(next(equal, len(masks)))
        if index[-1] == len(masks):
            masks.append(own)
    return masks, index


def _all_pairs_alike(mask: Mask | None, problem: Problem) -> bool:
    one_key = np.zeros(1, np.int64)
    return (
        mask is None
        or mask.allows(problem.frame, problem.positions[:1], one_key, problem.engine.xp).shape[0] == 1
    )


def _live_keys(intervals: KeyIntervals, keys: int) -> Array:
    """Return which keys are in an interval of any row."""
    starts, stops = (np.bincount(edge, minlength=keys + 1) for edge in intervals.edges.T)
    return np.cumsum(starts - stops)[:keys] > 0


class RoundedVectors(NamedTuple):
    """The rounded vectors of query or key.

    Attributes:
        arrays: The distinct (batch, head) pairs that the matrix uses.
        array_index: For each pair of the matrix, its array.
        norms: For each array three norms of its live vectors: of the original, of the rounding error, and of the
            rounded vector. For keys, the last two are relative to their mean over all keys, if what all scores of a
            row share cancels.
        exact: Whether no number was rounded.
    """

    arrays: list[ScaledHalves]
    array_index: list[int]
    norms: list[tuple[Array, Array, Array]]
    exact: bool

    def to_record(self) -> list[dict[str, Any]]:
        return [{"numbers": encode_array(array.numbers), "exponent": array.exponent} for array in self.arrays]

    def to_array(self, problem: Problem) -> Array:
        wide = [array.to_dtype(_numpy_dtype(problem)) for array in self.arrays]
        return problem.engine.xp.asarray(np.stack(wide), dtype=problem.dtype)


def _numpy_dtype(problem: Problem) -> Any:
    """Return the NumPy dtype of the working dtype."""
    return np.float64 if "64" in str(problem.dtype) else np.float32


def _round(
    problem: Problem, array: Array, index: IntArray, live: list[Array], centre: bool
) -> RoundedVectors:
    """Round query or key to half precision; vectors that are masked everywhere become zero."""
    used, index = np.unique(index, return_inverse=True)
    arrays, norms, exact = [], [], True
    for i, own in enumerate(used):
        live_here = np.logical_or.reduce([live[pair] for pair in np.flatnonzero(index == i)])
        before = problem.engine.to_numpy(problem.engine.cast(array[int(own)], problem.dtype))
        arrays.append(round_to_half(before, live_here))
        finite = live_here & np.isfinite(before).all(1)
        before, after = before[finite], arrays[-1].to_dtype(before.dtype)[finite]
        length, change = _norms(before), before - after
        exact = exact and not change.any()
        if centre and len(change):
            change, after = change - change.mean(0), after - after.mean(0)
        norms.append((length, _norms(change), _norms(after)))
    return RoundedVectors(arrays, index.tolist(), norms, exact)


def _replace_vectors(problem: Problem, query: RoundedVectors, key: RoundedVectors) -> Problem:
    """Return the problem of the rounded query and key."""
    return replace(
        problem,
        query=query.to_array(problem),
        key=key.to_array(problem),
        query_index=np.array(query.array_index),
        key_index=np.array(key.array_index),
    )


def _bound_error(problem: Problem, query: RoundedVectors, key: RoundedVectors) -> ErrorEstimate:
    """Bound the error of any weight that the rounding of query and key causes.

    Rounding changes a score by scale · (q·δk + δq·k′). A change that all scores of a row share cancels in the softmax,
    so keys count by their distance from a common centre, unless there is a sink or a cap. If no score of a row changes
    by more than Δ, a weight changes by a factor of at most exp(2Δ), and by at most tanh(Δ / 2). The rounding of
    products, exponentials and sums is added to Δ.
    """
    precision = float(np.finfo(_numpy_dtype(problem)).eps)
    terms = problem.query.shape[-1] + 8
    worst, exact = 0.0, query.exact and key.exact
    for i, j in zip(query.array_index, key.array_index, strict=True):
        q, dq, _ = query.norms[i]
        k, dk, away = key.norms[j]
        if not len(q) or not len(k):
            continue
        rounding = q * dk.max() + dq * away.max()
        change = abs(problem.scale) * (rounding + terms * precision * q * k.max())
        worst = max(worst, float(change.max()) + 8 * precision)
    with np.errstate(over="ignore"):
        return ErrorEstimate(float(np.expm1(2 * worst)), math.tanh(worst / 2), 0.0, 0.0, 0, exact)


def _norms(array: Array) -> Array:
    return np.sqrt(np.einsum("ij,ij->i", array, array, dtype=np.float64))


def _measure_error(problem: Problem, rounded: Problem, lse: Array, error: ErrorEstimate) -> ErrorEstimate:
    """Compare whole rows of the original with what a page computes for them, and add what was found."""
    engine, (pairs, q_len, keys) = problem.engine, problem.shape
    count = min(q_len, max(1, min(64, COMPARED_WEIGHTS // (pairs * keys))))
    rows = _sample_rows(q_len, count)
    (weights,), _ = run_block_loop(problem.select_rows(rows), [DenseWeights()])
    stats = SoftmaxStats(engine.xp.asarray(lse[:, rows], dtype=problem.dtype), None)
    expected, found = (
        engine.to_numpy(array)
        for array in (weights, compute_entries(rounded.select_rows(rows), np.arange(keys), stats))
    )
    with np.errstate(all="ignore"):
        difference = np.abs(found - expected)
        relative = np.where(expected > 1e-30, difference / expected, 0.0)  # below, float32 has fewer digits
        worst_relative, worst = (float(np.nanmax(x, initial=0.0)) for x in (relative, difference))
        # The lse is stored as float32, whatever the dtype of the matrix is.
        lse_error = float(np.max(np.abs(lse), where=np.isfinite(lse), initial=0.0)) * 2.0**-24
        relative = np.expm1(np.log1p(error.relative) + lse_error)  # infinite from scores of about 1e10 on
        absolute = error.absolute + np.expm1(lse_error)
    return error._replace(
        relative=float(relative),
        absolute=min(1.0, float(absolute)),
        found_relative=worst_relative,
        found_absolute=worst,
        compared=pairs * count * keys,
    )


def _score_mod_record(mod: ScoreMod, problem: Problem, operation: str) -> dict[str, Any]:
    """Return what a page does to the scores, with encoded arrays."""
    size = math.prod(mod.array.shape) if isinstance(mod, BiasMod) else math.prod(problem.shape)
    is_dense = type(mod).to_payload is ScoreMod.to_payload
    if is_dense and size > MAX_BIAS_SIZE:
        raise TooLargeError(
            operation,
            received=f"{mod}, {size:,} numbers",
            expected=f"at most {MAX_BIAS_SIZE:,} in a page",
            hint="Select fewer rows with A.lazy[..., rows, :], or use relative_bias or alibi.",
        )
    record = mod.to_payload(problem.frame, problem.positions, problem.engine.xp, problem.dtype)
    if record is None:
        raise ArgumentError(
            operation,
            received=f"the score modification {mod!r}",
            expected="a score modification that a page supports: softcap, alibi, relative_bias, bias",
            hint="Implement to_payload(frame, q_idx, xp, dtype) with these, or draw A.coarsen(512).",
        )
    encoded = {}
    for name, value in record.items():
        if hasattr(value, "shape"):
            array = problem.engine.to_numpy(value)
            value = encode_array(array.astype(np.uint8) if array.dtype == bool else array)
        encoded[name] = value
    return encoded


# As many heads as fit


class FittedPayload(NamedTuple):
    """The payload of some heads of a layer.

    Attributes:
        record: The data for the page, with the numbers of the heads as `heads`.
        error: The error of its weights.
        size: Its characters in the page.
    """

    record: dict[str, Any]
    error: ErrorEstimate
    size: int


def fit_payload(
    problem: Problem,
    heads: Sequence[int],
    *,
    groups: int,
    head_dim: int,
    room: int,
    operation: str,
    add: Callable[[dict[str, Any], MatrixPayload], None] | None = None,
) -> FittedPayload | None:
    """Build the payload of as many heads as fit into `room` characters.

    Returns:
        The payload, or None if not even one head fits.
    """
    heads = list(heads)
    _, q_len, kv_len = problem.shape
    while heads:
        if estimate_size(heads, q_len, kv_len, groups, head_dim) <= room:
            payload = build_payload(problem.take_part(np.array(heads), np.arange(q_len)), operation)
            record = {"heads": heads, **payload.record}
            if add is not None:
                add(record, payload)
            size = count_characters(record)
            if size <= room:
                return FittedPayload(record, payload.error, size)
        heads = heads[:-1]
    return None


def estimate_size(heads: Sequence[int], q_len: int, kv_len: int, groups: int, head_dim: int) -> float:
    """Estimate the characters that heads take at least: halves of query and key, and each lse."""
    kv_heads = len({head // groups for head in heads})
    return (1.7 * head_dim * (len(heads) * q_len + kv_heads * kv_len) + 3 * len(heads) * q_len) * 4 / 3


def count_characters(record: Any) -> int:
    """Return the characters that a record takes in a page, with its arrays."""
    arrays: list[EncodedArray] = []
    text = encode_record(record, arrays)
    return len(text) + sum(ELEMENT_OVERHEAD + len(array.text) for array in arrays)


def combine_errors(errors: Sequence[ErrorEstimate]) -> dict[str, Any] | None:
    """Return the largest error of all layers, and the number of all weights that were compared; None without errors."""
    if not errors:
        return None
    worst = {name: max(getattr(error, name) for error in errors) for name in ErrorEstimate._fields}
    return worst | {
        "compared": sum(error.compared for error in errors),
        "exact": all(error.exact for error in errors),
    }


# The map of one head


def build_head_map(
    problem: Problem, tokens: Sequence[str] | None, query_tokens: Sequence[str] | None, title: str
) -> Page:
    """Build the page of `AttentionMatrix.page` from a matrix with one head; `tokens` name the keys."""
    _, rows, keys = problem.shape
    if not rows or not keys:
        raise ArgumentError(
            "page",
            received=f"{rows} queries and {keys} keys",
            expected="at least one of each",
            hint="An empty matrix has nothing to show.",
        )
    key_names = _token_names(tokens, keys, "tokens", "key")
    query_names = _token_names(query_tokens, rows, "query_tokens", "query")
    if query_names is None and key_names is not None and problem.frame.q_len == keys:
        query_names = [key_names[i] for i in problem.positions]
    if query_names is None and (problem.positions != np.arange(rows)).any():
        query_names = [f"query {i}" for i in problem.positions]  # row numbers would not be positions
    shared = query_names is not None and query_names == key_names
    payload = build_payload(problem, "page")
    (overview,) = payload.overviews(MAX_CELLS)
    details = [*problem.describe(), *([f"mask {problem.mask}"] if problem.mask is not None else [])]
    details += ["sink"] if problem.sink is not None else []
    record = {
        "title": escape_unprintable(title),
        "tokens": key_names,
        "query_tokens": None if shared else query_names,
        "shared_tokens": shared,
        "description": (
            f"{rows:,} × {keys:,} weights of one attention head, head_dim {problem.query.shape[-1]}; "
            f"{', '.join(details)}. Made by regard."
        ),
        "overview": overview,
        "matrix": payload.record,
    }
    return build_page(escape_unprintable(title), "headMap", record)


def _token_names(tokens: Sequence[str] | None, count: int, argument: str, token_of: str) -> list[str] | None:
    """Check the number of tokens, and escape them."""
    if tokens is None:
        return None
    if len(tokens) != count:
        raise ArgumentError(
            "page",
            received=f"{len(tokens)} {argument}",
            expected=f"{count}, one for each {token_of}",
            hint="tokens label the keys. If the queries are different tokens, also pass query_tokens.",
        )
    return [escape_unprintable(str(token)) for token in tokens]
