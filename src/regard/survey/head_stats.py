"""What a survey keeps of one call: for each head a few numbers and short histograms, however long the text was."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from regard.core.problem import Problem
from regard.lens.analysis.head_table import copies_of, heavy_share, mean_of, numpy_of
from regard.lens.analysis.measures import At, Collected
from regard.lens.analysis.token_rows import Place
from regard.lens.call import Call
from regard.measures import Entropy, Measure, span
from regard.survey.schema import BITS, DISTANCES, KINDS, WINDOWS, widths
from regard.types import Array


@dataclass(frozen=True)
class Offsets(Measure):
    """What the rows put on the keys at each offset, summed over rows: (…, q_len + kv_len − 1).

    Offset 0, a row's own key, stands at `q_len − 1 + first`, keys before it to the left; row 0 stands at key `first`.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((3, 2)), np.zeros((3, 2)), mask=regard.causal())
    >>> A.measure(Offsets()).offsets.round(4)
    array([0.3333, 0.8333, 1.8333, 0.    , 0.    ])
    """

    rows: Array | None = None  # (…, q_len): how much each row counts, all of them 1 where None
    lengths: tuple[int, int] = (0, 0)
    room: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        rows = self.rows
        if rows is not None:
            picked = problem.frame.take_pairs(rows, 1, "offsets")
            rows = problem.engine.xp.asarray(picked, dtype=problem.dtype)[..., None]
        return replace(self, rows=rows, lengths=(problem.shape[1], problem.shape[2]), room={})

    def init(self, shape: tuple[int, int, int], xp: Any) -> Any:
        return xp.zeros((shape[0], shape[1] + shape[2] - 1))

    def step(self, state: Any, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Any) -> Any:
        if self.rows is not None:
            weights = weights * self.rows[:, span(q_idx)]
        pairs, height, width = weights.shape
        wide = height + width
        if (pairs, height, width) not in self.room:
            self.room[pairs, height, width] = xp.zeros((pairs, height * (wide + 1)), dtype=weights.dtype)
        room = self.room[pairs, height, width]
        # Written in rows of `wide`, read in rows of one more: each row moves one to the left of the row above it.
        xp.reshape(room[:, : height * wide], (pairs, height, wide))[..., height:] = weights
        diagonals = xp.sum(xp.reshape(room, (pairs, height, wide + 1)), axis=1)[:, 1:wide]
        start = int(kv_idx[0]) - int(q_idx[-1]) + self.lengths[0] - 1
        state[:, start : start + wide - 1] += diagonals
        return state


def profile(
    call: Call, tokens: list[list[Any]] | None, copies: dict[Any, Any], kinds: Collection[str] = KINDS
) -> dict[str, Any]:
    """Columns of a call by name, as `widths` lists them: (heads,) for a number, (heads, bins) for a histogram.

    Numbers are means over rows as in `Recording.heads`, NaN if undefined; the shares of a histogram add up to 1.
    `tokens` are those of each batch entry, `copies` holds what layers share.
    """
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    columns = _empty(heads, kinds)
    if not math.prod(call.shape):
        return columns
    place = Place.of(call)
    along = place.first is not None  # rows and keys are one sequence
    asked: dict[str, Measure] = {}
    if "entropy" in kinds:
        asked["entropy"] = Entropy()
    if "heavy" in kinds:
        asked["received"] = Collected(place.rows)
    if "first" in kinds or ("distance" in kinds and along):
        asked["first"] = At(np.where(place.rows, place.keys.argmax(-1)[..., None], -1))
    if "distance" in kinds and along:
        asked["offsets"] = Offsets(None if place.rows.all() else place.rows)
    again = None
    if "copies" in kinds and along and tokens is not None:
        asked["copies"], again = copies_of(place, tokens, copies)
    made = {name: numpy_of(result) for name, result in call.matrix.measure(**asked)._asdict().items()}
    if "entropy" in made:
        columns["entropy"] = mean_of(made["entropy"], place.rows)
        columns["entropy_histogram"] = _bits(made["entropy"], place.rows)
    if "heavy" in kinds:
        columns["heavy"] = heavy_share(made["received"], place)
    if "first" in kinds:
        columns["first"] = mean_of(made["first"], place.rows)
    if "offsets" in made:
        columns |= _distances(made["offsets"], made["first"], place)
    if again is not None:
        for i, name in enumerate(("duplicate", "induction")):
            columns[name] = mean_of(made["copies"][..., i], again)
    return columns


def _empty(heads: int, kinds: Collection[str]) -> dict[str, Any]:
    return {
        name: np.full(heads if width == 1 else (heads, width), np.nan)
        for name, width in widths(kinds).items()
    }


def _bits(entropy: Any, rows: Any) -> Any:
    """The share of each head's rows whose entropy lies in each bin: (…, heads, q_len) to (heads, BITS)."""
    with np.errstate(invalid="ignore"):
        bins = np.clip(np.nan_to_num(entropy / math.log(2)), 0, BITS - 1).astype(np.int64)
    return _binned(np.ones_like(entropy), bins, rows, BITS)


def _binned(values: Any, bins: Any, rows: Any, count: int) -> Any:
    """Values of the rows that count, summed by bin and divided by how many rows there are: (heads, count)."""
    rows = np.broadcast_to(rows, values.shape)
    heads = values.shape[-2]
    which = bins + count * np.arange(heads)[:, None]
    sums = np.bincount(which[rows], values[rows], count * heads).reshape(heads, count)
    return sums / max(1, int(rows[..., :1, :].sum()))


def distance_bins(distances: Any) -> Any:
    """The bin of each distance.

    >>> distance_bins(np.array([0, 1, 2, 3, 4, 63, 64, 65_535, 65_536, 10**9])).tolist()
    [0, 1, 2, 2, 3, 6, 7, 16, 17, 17]
    """
    return np.minimum(np.frexp(distances)[1], DISTANCES - 1)


def _distances(offsets: Any, first: Any, place: Place) -> dict[str, Any]:
    """All that is told by how far away the keys are."""
    own, count = place.own, int(place.rows.sum())
    zero = len(own) - 1 + (place.first or 0)
    offsets = offsets.reshape(-1, *offsets.shape[-2:]).sum(0) / max(count, 1)  # (heads, offsets)
    apart = np.abs(np.arange(offsets.shape[-1]) - zero)
    edges = distance_bins(apart)
    histogram = np.stack([offsets[:, edges == each].sum(-1) for each in range(DISTANCES)], -1)
    # What lies on the first key, by how far away it is: with it, a window that keeps the first key is told too.
    to_first = np.abs(own - place.keys.argmax(-1)[..., None])
    far = _binned(first, np.broadcast_to(distance_bins(to_first), first.shape), place.rows, DISTANCES)
    before = int((place.rows & (own >= 1) & place.keys[..., np.maximum(own - 1, 0)]).sum())
    previous = offsets[:, zero - 1] * count / before if before else np.full(len(offsets), np.nan)
    columns = {"distance": offsets @ apart, "previous": previous, "distance_histogram": histogram}
    inside, outside = np.cumsum(histogram, -1), np.cumsum(far[:, ::-1], -1)[:, ::-1]
    for power, window in enumerate(WINDOWS, start=int(math.log2(WINDOWS[0]))):
        columns[f"within_{window}"] = inside[:, power]
        columns[f"kept_{window}"] = inside[:, power] + outside[:, power + 1]
    return columns
