"""Members that change the scores: by position, added or turned in, and by holding them down."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.family.variant import Variant, ahead
from regard.learn.validation import Floats, as_count, as_floats, as_mask, as_number


class Biased(Variant):
    """Attention that adds to each scaled score a number that depends on the two positions alone."""

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        scaled = super().scale_scores(scores)
        return scaled + self.bias(*scaled.shape[-2:])

    def bias(self, q_len: int, kv_len: int) -> Floats:
        """What is added, (q_len, kv_len)."""
        return np.zeros((q_len, kv_len))


class RelativeBias(Biased):
    """A learned number for each bucket of distance: exact when near, coarser the farther off.

    The first half of `table` is for keys behind the query, or level with it, the second for keys ahead. In each half
    the first half again holds one distance each; the rest grow in equal ratios up to `max_distance`.

    >>> RelativeBias(d_k=1, table=np.zeros(8), max_distance=6).buckets(ahead(1, 5) + 2)[0]
    array([2, 1, 0, 5, 6])
    """

    def __init__(self, d_k: int, table: npt.ArrayLike, max_distance: int) -> None:
        super().__init__(d_k)
        self.table = as_floats("RelativeBias", "table", table, "buckets")
        self.max_distance = as_count("RelativeBias", "max_distance", max_distance, least=1)
        if self.table.ndim != 1 or self.table.size % 4 or not 4 <= self.table.size < 4 * max_distance:
            raise ArgumentError(
                "RelativeBias",
                received=f"table of shape {self.table.shape} and max_distance {max_distance}",
                expected="a number for each of 4, 8, 12, … buckets, and a max_distance above a fourth of them",
                hint="T5 has 32 buckets and a max_distance of 128.",
            )

    def bias(self, q_len: int, kv_len: int) -> Floats:
        """The table's entry for each distance, (q_len, kv_len)."""
        return self.table[self.buckets(ahead(q_len, kv_len))]

    def buckets(self, ahead: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The bucket of each distance, in the shape of the distances."""
        half = len(self.table) // 2
        exact = half // 2
        distance = np.abs(ahead)
        ratio = np.log(np.maximum(distance, exact) / exact) / math.log(self.max_distance / exact)
        far = np.minimum(exact + (ratio * (half - exact)).astype(np.int64), half - 1)
        return np.where(ahead > 0, half, 0) + np.where(distance < exact, distance, far)


class ALiBi(Biased):
    """Every step of distance costs `slope`: a straight line is taken off the scores, and nothing is learned.

    >>> ALiBi(d_k=1, slope=0.5).bias(1, 3)
    array([[-1. , -0.5,  0. ]])
    """

    def __init__(self, d_k: int, slope: float) -> None:
        super().__init__(d_k)
        self.slope = as_number("ALiBi", "slope", slope, "The published slopes lie between 1/256 and 1.")

    def bias(self, q_len: int, kv_len: int) -> Floats:
        """−slope · distance, (q_len, kv_len)."""
        return 0.0 - self.slope * np.abs(ahead(q_len, kv_len))  # 0 at the query's own place, not −0


class Rotary(Variant):
    """Queries and keys turned by their position before they are compared: then only the distance counts.

    Entry i and entry i + d_k/2 are a pair ("half"), turned by the angle position · base^(−2i/d_k).

    >>> Rotary(d_k=2).turn(np.array([[1.0, 0.0], [1.0, 0.0]])).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """

    def __init__(self, d_k: int, base: float = 10_000.0) -> None:
        super().__init__(d_k)
        self.base = as_number("Rotary", "base", base, "10 000 is the published one.", above=True)
        if self.d_k % 2:
            raise ArgumentError(
                "Rotary", received=f"d_k {d_k}", expected="an even d_k", hint="Entries are turned in pairs."
            )

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        Q, K = self._vectors("Q", Q, "q_len"), self._vectors("K", K, "kv_len")
        return super().compute_scores(self.turn(Q, K.shape[-2] - Q.shape[-2]), self.turn(K))

    def turn(self, x: Floats, first: int = 0) -> Floats:
        """The vectors (…, n, d_k) turned, as they stand at the positions `first`, `first` + 1, …"""
        angles = self.angles(np.arange(first, first + x.shape[-2]))  # (n, d_k / 2)
        a, b = x[..., : self.d_k // 2], x[..., self.d_k // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def angles(self, positions: npt.NDArray[np.int64]) -> Floats:
        """The angle of each pair at each position, (n, d_k / 2)."""
        frequencies: Floats = self.base ** (-np.arange(0, self.d_k, 2) / self.d_k)
        return positions[:, None] * frequencies


class Softcap(Variant):
    """Scores bent so that none passes `cap`: cap · tanh(score / cap), nearly the score itself where it is small.

    >>> Softcap(d_k=1, cap=2.0).scale_scores([[0.1, 2, 2000]]).round(3)
    array([[0.1  , 1.523, 2.   ]])
    """

    def __init__(self, d_k: int, cap: float = 50.0) -> None:
        super().__init__(d_k)
        self.cap = as_number("Softcap", "cap", cap, "Gemma 2 has 50.", above=True)

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        bent: Floats = self.cap * np.tanh(super().scale_scores(scores) / self.cap)
        return bent


class Sink(Variant):
    """A score without a key: `sink` takes its share of every row and gives it to nobody.

    >>> Sink(d_k=1, sink=0.0).compute_weights([[0, 0, 0]])
    array([[0.25, 0.25, 0.25]])
    """

    def __init__(self, d_k: int, sink: float = 0.0) -> None:
        super().__init__(d_k)
        self.sink = float(sink)

    def compute_weights(self, scaled: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
        scaled = as_floats("compute_weights", "scaled", scaled, "q_len", "kv_len")
        if mask is not None:
            scaled = np.where(as_mask("compute_weights", mask, scaled.shape), scaled, -np.inf)
        sink = np.full((*scaled.shape[:-1], 1), self.sink)  # one more column, which no mask hides …
        weights = super().compute_weights(np.concatenate([scaled, sink], axis=-1))
        return weights[..., :-1]  # … and which no value answers


class SinkAndSoftcap(Sink, Softcap):
    """Both at once: the scores held below `cap`, then a `sink` that takes its share of what is left.

    >>> output, weights = SinkAndSoftcap(d_k=1, sink=0.0, cap=2.0)([[1]], [[2000]], [[1]])
    >>> weights.round(3)  # exp(2) / (exp(2) + exp(0)), however large the score
    array([[0.881]])
    """

    def __init__(self, d_k: int, sink: float = 0.0, cap: float = 50.0) -> None:
        Softcap.__init__(self, d_k, cap)
        self.sink = float(sink)
