"""Variants that change the scores: by adding or rotating in positions, by capping them, and by a sink."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.family.variant import AttentionVariant, relative_positions
from regard.learn.validation import Floats, as_count, as_floats, as_mask, as_number


class Biased(AttentionVariant):
    """Attention that adds a bias to each scaled score; the bias depends on the two positions alone.

    Args:
        d_k: Number of entries in each query and key.
    """

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        scaled = super().scale_scores(scores)
        return scaled + self.compute_bias(*scaled.shape[-2:])

    def compute_bias(self, q_len: int, kv_len: int) -> Floats:
        """Compute the bias, 0 in this base class.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.

        Returns:
            The bias (q_len, kv_len).
        """
        return np.zeros((q_len, kv_len))


class RelativeBias(Biased):
    """A learned bias per bucket of distances: one distance per bucket when near, wider buckets farther away.

    The first half of `table` is for keys at or before the query, the second half for keys after it. In each half the
    first half of the buckets holds one distance each; the others grow in equal ratios up to `max_distance`.

    Args:
        d_k: Number of entries in each query and key.
        table: One bias per bucket, (buckets,), where buckets is a multiple of 4.
        max_distance: Distances from here on share the last bucket; above a fourth of the buckets.

    >>> RelativeBias(d_k=1, table=np.zeros(8), max_distance=6).compute_buckets(np.array([-2, -1, 0, 1, 2]))
    array([2, 1, 0, 5, 6])
    """

    def __init__(self, d_k: int, table: npt.ArrayLike, max_distance: int) -> None:
        super().__init__(d_k)
        self.table = as_floats("RelativeBias", "table", table, "buckets")
        self.max_distance = as_count("RelativeBias", "max_distance", max_distance, minimum=1)
        if self.table.ndim != 1 or self.table.size % 4 or not 4 <= self.table.size < 4 * max_distance:
            raise ArgumentError(
                "RelativeBias",
                received=f"table of shape {self.table.shape} and max_distance {max_distance}",
                expected="one number for each of 4, 8, 12, … buckets; max_distance above a quarter of their number",
                hint="T5 has 32 buckets and a max_distance of 128.",
            )

    def compute_bias(self, q_len: int, kv_len: int) -> Floats:
        """Look up the bias of each distance in the table.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.

        Returns:
            The bias (q_len, kv_len).
        """
        return self.table[self.compute_buckets(relative_positions(q_len, kv_len))]

    def compute_buckets(self, relative: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Compute the bucket of each relative position.

        Args:
            relative: Positions of keys minus positions of queries, of any shape.

        Returns:
            Indices into `table`, in the same shape.
        """
        half = len(self.table) // 2
        exact = half // 2
        distance = np.abs(relative)
        ratio = np.log(np.maximum(distance, exact) / exact) / math.log(self.max_distance / exact)
        far = np.minimum(exact + (ratio * (half - exact)).astype(np.int64), half - 1)
        return np.where(relative > 0, half, 0) + np.where(distance < exact, distance, far)


class ALiBi(Biased):
    """A linear penalty: each step of distance lowers the score by `slope`, and nothing is learned.

    Args:
        d_k: Number of entries in each query and key.
        slope: Penalty per step, at least 0.

    >>> ALiBi(d_k=1, slope=0.5).compute_bias(1, 3)
    array([[-1. , -0.5,  0. ]])
    """

    def __init__(self, d_k: int, slope: float) -> None:
        super().__init__(d_k)
        self.slope = as_number("ALiBi", "slope", slope, "The published slopes are between 1/256 and 1.")

    def compute_bias(self, q_len: int, kv_len: int) -> Floats:
        """Compute −slope · distance.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.

        Returns:
            The bias (q_len, kv_len).
        """
        return 0.0 - self.slope * np.abs(relative_positions(q_len, kv_len))  # 0 on the diagonal, not −0


class Rotary(AttentionVariant):
    """Queries and keys are rotated by their positions, so that a score depends on the distance only.

    Entries i and i + d_k/2 form a pair (the "half" layout), which is rotated by the angle position · base^(−2i/d_k).

    Args:
        d_k: Number of entries in each query and key; even.
        base: Base of the frequencies.

    >>> Rotary(d_k=2).rotate(np.array([[1.0, 0.0], [1.0, 0.0]])).round(3)
    array([[1.   , 0.   ],
           [0.54 , 0.841]])
    """

    def __init__(self, d_k: int, base: float = 10_000.0) -> None:
        super().__init__(d_k)
        self.base = as_number("Rotary", "base", base, "The published base is 10 000.", positive=True)
        if self.d_k % 2:
            raise ArgumentError(
                "Rotary", received=f"d_k {d_k}", expected="an even d_k", hint="Entries are rotated in pairs."
            )

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        Q, K = self._check_vectors("Q", Q, "q_len"), self._check_vectors("K", K, "kv_len")
        first = K.shape[-2] - Q.shape[-2]  # the last query is aligned with the last key
        return super().compute_scores(self.rotate(Q, first), self.rotate(K))

    def rotate(self, x: Floats, first: int = 0) -> Floats:
        """Rotate vectors by their positions.

        Args:
            x: Vectors (…, n, d_k).
            first: Position of the first vector; the others follow it.

        Returns:
            The rotated vectors (…, n, d_k).
        """
        angles = self.compute_angles(np.arange(first, first + x.shape[-2]))  # (n, d_k / 2)
        a, b = x[..., : self.d_k // 2], x[..., self.d_k // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)

    def compute_angles(self, positions: npt.NDArray[np.int64]) -> Floats:
        """Compute the angle of each pair at each position.

        Args:
            positions: Positions (n,).

        Returns:
            Angles in radians (n, d_k / 2).
        """
        frequencies: Floats = self.base ** (-np.arange(0, self.d_k, 2) / self.d_k)
        return positions[:, None] * frequencies


class Softcap(AttentionVariant):
    """Scores capped smoothly by cap · tanh(score / cap); small scores hardly change.

    Args:
        d_k: Number of entries in each query and key.
        cap: Limit of the scores, above 0.

    >>> Softcap(d_k=1, cap=2.0).scale_scores([[0.1, 2, 2000]]).round(3)
    array([[0.1  , 1.523, 2.   ]])
    """

    def __init__(self, d_k: int, cap: float = 50.0) -> None:
        super().__init__(d_k)
        self.cap = as_number("Softcap", "cap", cap, "Gemma 2 uses 50.", positive=True)

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        capped: Floats = self.cap * np.tanh(super().scale_scores(scores) / self.cap)
        return capped


class Sink(AttentionVariant):
    """A score without a key: `sink` takes a share of every row, and that share goes to no value.

    Args:
        d_k: Number of entries in each query and key.
        sink: The extra score.

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
        sink = np.full((*scaled.shape[:-1], 1), self.sink)  # one more column, never masked …
        weights = super().compute_weights(np.concatenate([scaled, sink], axis=-1))
        return weights[..., :-1]  # … and dropped after the softmax, since it has no value


class SinkAndSoftcap(Sink, Softcap):
    """Both at once: scores are capped at `cap`, and then a `sink` takes its share of the softmax.

    Args:
        d_k: Number of entries in each query and key.
        sink: The extra score.
        cap: Limit of the scores, above 0.

    >>> output, weights = SinkAndSoftcap(d_k=1, sink=0.0, cap=2.0)([[1]], [[2000]], [[1]])
    >>> weights.round(3)  # exp(2) / (exp(2) + exp(0)), no matter how large the score is
    array([[0.881]])
    """

    def __init__(self, d_k: int, sink: float = 0.0, cap: float = 50.0) -> None:
        Softcap.__init__(self, d_k, cap)
        self.sink = float(sink)
