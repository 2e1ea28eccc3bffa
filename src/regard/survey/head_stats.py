"""Measure one attention call: for each head a few numbers and short histograms, of a size independent of the text."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from regard.capture.call import Call
from regard.jobs.shards import EVICTION_WINDOWS
from regard.lens.eviction import Offsets, build_first_masses, compute_evicted
from regard.lens.head_table import (
    as_numpy_per_head,
    build_copies_measure,
    heavy_hitter_share,
    mean_over_rows,
)
from regard.lens.token_rows import TokenRows
from regard.lens.weight_measures import GroupMass, ReceivedFrom, WeightAt
from regard.measures import Entropy, Measure
from regard.survey.schema import (
    DISTANCE_BINS,
    ENTROPY_BINS,
    MEASURES,
    SINKS,
    WINDOWS,
    list_columns,
)
from regard.types import Array, IntArray


def measure_call(
    call: Call,
    tokens: list[list[Any]] | None,
    copies: dict[Any, Any],
    measures: Collection[str] = MEASURES,
    prompt_len: int = 0,
) -> dict[str, Array]:
    """Measure the heads of one call.

    Returns:
        The columns that `list_columns` lists: (heads,) for a number, (heads, bins) for a histogram. Numbers are means
        over rows as in `Recording.heads`, NaN if undefined; the shares of a histogram add up to 1.
    """
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    columns: dict[str, Array] = {
        name: np.full(heads if width == 1 else (heads, width), np.nan)
        for name, width in list_columns(measures).items()
    }
    if not math.prod(call.shape):
        return columns
    token_rows = TokenRows.from_call(call)
    one_sequence = token_rows.query_offset is not None  # else queries and keys belong to two sequences
    selected: dict[str, Measure] = {}
    if "entropy" in measures:
        selected["entropy"] = Entropy()
    if "heavy" in measures:
        selected["received"] = ReceivedFrom(token_rows.rows)
    if "first" in measures or ("distance" in measures and one_sequence):
        selected["first"] = WeightAt(token_rows.first_key)
    if "distance" in measures and one_sequence:
        selected["offsets"] = Offsets(None if token_rows.rows.all() else token_rows.rows)
        selected["sinks"] = build_first_masses(token_rows, max(SINKS))
    repeated = None
    if "copies" in measures and one_sequence and tokens is not None:
        selected["copies"], repeated = build_copies_measure(token_rows, tokens, copies)
    has_answer = one_sequence and 0 < prompt_len < call.shape[-1]
    if "lookback" in measures and has_answer:
        selected["lookback"] = GroupMass((np.arange(call.shape[-1]) >= prompt_len).astype(np.int64), 2)
    results = {
        name: as_numpy_per_head(result) for name, result in call.matrix.measure(**selected)._asdict().items()
    }
    if "entropy" in results:
        columns["entropy"] = mean_over_rows(results["entropy"], token_rows.rows)
        columns["entropy_histogram"] = _bin_entropy(results["entropy"], token_rows.rows)
    if "heavy" in measures:
        columns["heavy"] = heavy_hitter_share(results["received"], token_rows)
    if "first" in measures:
        columns["first"] = mean_over_rows(results["first"], token_rows.rows)
    if "offsets" in results:
        columns |= _measure_distances(
            results["offsets"], results["first"], token_rows, has_sink=call.matrix.problem.has_sink
        )
        for sinks in SINKS:
            evicted = compute_evicted(results["offsets"], results["sinks"], token_rows, sinks)
            columns[f"evicted_{sinks}"] = evicted[:, np.minimum(EVICTION_WINDOWS, evicted.shape[1] - 1)]
    if "lookback" in results:
        columns["lookback"] = _measure_lookback(results["lookback"], token_rows, prompt_len)
    if repeated is not None:
        for i, name in enumerate(("duplicate", "induction")):
            columns[name] = mean_over_rows(results["copies"][..., i], repeated)
    return columns


def _measure_lookback(masses: Array, token_rows: TokenRows, prompt_len: int) -> Array:
    """Compute the mean lookback ratio of the rows that predict tokens of the text, (heads,).

    The first of them is left out: it has no token of the text to attend to. So is the last row, which predicts none.

    Args:
        masses: Weight on the prompt and on the text, (…, heads, q_len, 2).
        token_rows: The tokens of the call.
        prompt_len: Number of tokens of the prompt.
    """
    own = token_rows.own_keys
    context = masses[..., 0] / max(1, int(token_rows.keys[..., :prompt_len].sum(-1).max()))
    generated = masses[..., 1] / np.maximum(own - prompt_len + 1, 1)
    total = context + generated
    rows = token_rows.rows & (own >= prompt_len) & (own < token_rows.keys.shape[-1] - 1)
    return mean_over_rows(context / np.where(total > 0, total, 1.0), rows & (total > 0))


def _bin_entropy(entropy: Array, rows: Array) -> Array:
    """Return the share of each head's rows in each entropy bin: (…, heads, q_len) to (heads, ENTROPY_BINS)."""
    with np.errstate(invalid="ignore"):
        bins = np.clip(np.nan_to_num(entropy / math.log(2)), 0, ENTROPY_BINS - 1).astype(np.int64)
    return _sum_by_bin(np.ones_like(entropy), bins, rows, ENTROPY_BINS)


def _sum_by_bin(values: Array, bins: IntArray, rows: Array, count: int) -> Array:
    """Sum the values of the selected rows by bin and divide by the number of rows: (heads, count)."""
    rows = np.broadcast_to(rows, values.shape)
    heads = values.shape[-2]
    index = bins + count * np.arange(heads)[:, None]
    sums = np.bincount(index[rows], values[rows], count * heads).reshape(heads, count)
    return sums / max(1, int(rows[..., :1, :].sum()))


def assign_distance_bins(distances: IntArray) -> IntArray:
    """Return the bin of each distance.

    >>> assign_distance_bins(np.array([0, 1, 2, 3, 4, 63, 64, 65_535, 65_536, 10**9])).tolist()
    [0, 1, 2, 2, 3, 6, 7, 16, 17, 17]
    """
    return np.minimum(np.frexp(distances)[1], DISTANCE_BINS - 1)


def _measure_distances(
    offsets: Array, first: Array, token_rows: TokenRows, *, has_sink: bool
) -> dict[str, Array]:
    """Compute the columns that depend on the distance between query and key."""
    own, count = token_rows.own_keys, int(token_rows.rows.sum())
    zero = len(own) - 1 + (token_rows.query_offset or 0)
    offsets = offsets.reshape(-1, *offsets.shape[-2:]).sum(0) / max(count, 1)  # (heads, offsets)
    distances = np.abs(np.arange(offsets.shape[-1]) - zero)
    bins = assign_distance_bins(distances)
    histogram = np.stack([offsets[:, bins == number].sum(-1) for number in range(DISTANCE_BINS)], -1)
    # The weight on the first key by its distance: added where the first key lies outside a window.
    to_first = assign_distance_bins(np.abs(own - token_rows.keys.argmax(-1)[..., None]))
    first_histogram = _sum_by_bin(
        first, np.broadcast_to(to_first, first.shape), token_rows.rows, DISTANCE_BINS
    )
    preceded = int((token_rows.rows & (own >= 1) & token_rows.keys[..., np.maximum(own - 1, 0)]).sum())
    previous = offsets[:, zero - 1] * count / preceded if preceded else np.full(len(offsets), np.nan)
    # A sink has no position: the mean is over the weight of the keys.
    total = offsets.sum(-1) if has_sink else np.ones(len(offsets))
    distance = offsets @ distances / np.where(total > 0, total, 1.0)
    columns = {"distance": distance, "previous": previous, "distance_histogram": histogram}
    inside = np.cumsum(histogram, -1)
    first_outside = np.cumsum(first_histogram[:, ::-1], -1)[:, ::-1]
    for power, window in enumerate(WINDOWS, start=int(math.log2(WINDOWS[0]))):
        columns[f"within_{window}"] = inside[:, power]
        columns[f"kept_{window}"] = inside[:, power] + first_outside[:, power + 1]
    return columns
