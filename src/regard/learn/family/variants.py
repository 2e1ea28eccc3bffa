"""The variants: those that mask keys, those with several heads, those that change the scores, those that keep sums.

Each is a class that overrides only what it changes; `CheckedAttention` checks the arguments of a call before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from regard.learn.checked import CheckedAttention
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import Bools, Floats, as_floats, require


def relative_positions(q_len: int, kv_len: int) -> npt.NDArray[np.int64]:
    """Compute the position of each key minus that of each query; the last query is aligned with the last key.

    Differences (q_len, kv_len) are negative where the key comes before the query.

    >>> relative_positions(2, 3)
    array([[-1,  0,  1],
           [-2, -1,  0]])
    """
    return np.arange(kv_len)[None, :] - np.arange(kv_len - q_len, kv_len)[:, None]


class Masked(CheckedAttention):
    """Attention with a built-in mask. If the caller passes a mask as well, a key must be allowed by both.

    Args:
        d_k: Number of entries in each query and key.
    """

    def compute_weights(self, scaled: Floats, mask: Bools | None = None) -> Floats:
        scaled = np.where(self.create_mask(*scaled.shape[-2:]), scaled, -np.inf)
        return super().compute_weights(scaled, mask)

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        """Create the built-in mask.

        Args:
            q_len: Number of queries.
            kv_len: Number of keys.

        Returns:
            A boolean mask (q_len, kv_len), True = attend.
        """
        return np.ones((q_len, kv_len), dtype=bool)


class Causal(Masked):
    """Each query attends to its own position and those before it; the last query is aligned with the last key.

    Args:
        d_k: Number of entries in each query and key.

    >>> Causal(d_k=1).create_mask(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        return relative_positions(q_len, kv_len) <= 0


class SlidingWindow(Masked):
    """Each query attends to the last `size` keys, its own included; the last query is aligned with the last key.

    Args:
        d_k: Number of entries in each query and key.
        size: Number of keys in the window.

    >>> SlidingWindow(d_k=1, size=2).create_mask(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    def __init__(self, d_k: int, size: int) -> None:
        super().__init__(d_k)
        self.size = size

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        distance = relative_positions(q_len, kv_len)
        return (-self.size < distance) & (distance <= 0)


class BlockSparse(Masked):
    """Each token attends to its own block; global tokens attend to all tokens, and all tokens attend to them.

    Args:
        d_k: Number of entries in each query and key.
        block_size: Number of tokens in a block.
        global_tokens: Positions of the global tokens, counted from 0.

    >>> BlockSparse(d_k=1, block_size=2, global_tokens=[4]).create_mask(5, 5).astype(int)
    array([[1, 1, 0, 0, 1],
           [1, 1, 0, 0, 1],
           [0, 0, 1, 1, 1],
           [0, 0, 1, 1, 1],
           [1, 1, 1, 1, 1]])
    """

    def __init__(self, d_k: int, block_size: int, global_tokens: Sequence[int] = ()) -> None:
        super().__init__(d_k)
        self.block_size = block_size
        self.global_tokens = list(global_tokens)
        require(
            min(self.global_tokens, default=0) >= 0,
            "BlockSparse",
            received=f"global_tokens {self.global_tokens}",
            expected="positions of at least 0",
            hint="Count the positions from 0.",
        )

    def create_mask(self, q_len: int, kv_len: int) -> Bools:
        q, k = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None, :]
        same_block: Bools = q // self.block_size == k // self.block_size
        return same_block | np.isin(q, self.global_tokens) | np.isin(k, self.global_tokens)


class Cross(CheckedAttention):
    """Queries from one sequence, keys and values from another: only the inputs differ, nothing is overridden.

    Args:
        d_k: Number of entries in each query and key.

    >>> output, weights = Cross(d_k=1)(Q=[[0], [0]], K=[[1], [2], [3]], V=[[3], [6], [9]])
    >>> output.shape, weights.shape
    ((2, 1), (2, 3))
    """


class MultiHead(CheckedAttention):
    """Several heads of `d_k` columns each; their outputs are concatenated.

    The weights are (…, num_heads, q_len, kv_len).

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of heads.

    >>> output, weights = MultiHead(d_k=1, num_heads=2)([[9, 0]], [[9, 0], [0, 9]], [[1, 1], [3, 3]])
    >>> weights.round(2)
    array([[[1. , 0. ]],
    <BLANKLINE>
           [[0.5, 0.5]]])
    >>> output.round(2)
    array([[1., 2.]])
    """

    def __init__(self, d_k: int, num_heads: int) -> None:
        super().__init__(d_k)
        self.num_heads = self.num_kv_heads = num_heads

    def forward(self, Q: Floats, K: Floats, V: Floats, mask: Bools | None = None) -> tuple[Floats, Floats]:
        output, weights = super().forward(*self.split_inputs(Q, K, V), mask)
        return self.merge(output), weights

    def split_inputs(self, Q: Floats, K: Floats, V: Floats) -> tuple[Floats, Floats, Floats]:
        """Split Q, K and V into heads.

        Args:
            Q: Queries (…, q_len, columns).
            K: Keys (…, kv_len, columns).
            V: Values (…, kv_len, columns).

        Returns:
            Q, K and V, each (…, num_heads, n, columns / num_heads).
        """
        n = self.num_heads
        return self.split(Q, n), self.split(K, n), self.split(V, n)

    def split(self, x: Floats, parts: int) -> Floats:
        """Split the columns into equal parts.

        Args:
            x: An array (…, n, columns).
            parts: Number of parts.

        Returns:
            The parts (…, parts, n, columns / parts).
        """
        return x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts).swapaxes(-3, -2)

    def merge(self, x: Floats) -> Floats:
        """Concatenate the heads.

        Args:
            x: Heads (…, num_heads, n, d).

        Returns:
            The heads side by side (…, n, num_heads · d).
        """
        x = x.swapaxes(-3, -2)
        return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class GroupedQuery(MultiHead):
    """Fewer heads of keys and values than of queries: each key head serves a group of consecutive query heads.

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides `num_heads`.

    >>> output, weights = GroupedQuery(d_k=1, num_heads=4, num_kv_heads=2)([[1, 2, 3, 4]], [[5, 6]], [[7, 8]])
    >>> weights.shape, output
    ((4, 1, 1), array([[7., 7., 8., 8.]]))
    """

    def __init__(self, d_k: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(d_k, num_heads)
        self.num_kv_heads = num_kv_heads

    def split_inputs(self, Q: Floats, K: Floats, V: Floats) -> tuple[Floats, Floats, Floats]:
        n, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        K, V = self.split(K, n), self.split(V, n)
        return self.split(Q, self.num_heads), K.repeat(group, axis=-3), V.repeat(group, axis=-3)


class MultiQuery(GroupedQuery):
    """Several heads of queries, and one head of keys and values for all of them.

    Args:
        d_k: Number of query and key columns per head.
        num_heads: Number of query heads.

    >>> output, weights = MultiQuery(d_k=1, num_heads=2)([[9, 0]], [[9], [0]], [[1], [3]])
    >>> output.round(2)
    array([[1., 2.]])
    """

    def __init__(self, d_k: int, num_heads: int) -> None:
        super().__init__(d_k, num_heads, num_kv_heads=1)


def mean_pool_heads(x: ArrayLike, num_heads: int, num_kv_heads: int) -> Floats:
    """Replace each group of heads by its mean.

    Ainslie et al. (2305.13245) convert a trained multi-head model into a grouped-query model this way.

    Args:
        x: Keys or values (…, n, columns), with the heads side by side.
        num_heads: Number of heads in `x`.
        num_kv_heads: Number of heads to keep; divides `num_heads`.

    Returns:
        The pooled heads (…, n, columns · num_kv_heads / num_heads).

    >>> mean_pool_heads([[1, 3, 10, 20]], num_heads=4, num_kv_heads=2)
    array([[ 2., 15.]])
    """
    x = as_floats("mean_pool_heads", "x", x, "n", "columns")
    d = x.shape[-1] // num_heads
    mean: Floats = x.reshape(*x.shape[:-1], num_kv_heads, num_heads // num_kv_heads, d).mean(axis=-2)
    return np.ascontiguousarray(mean).reshape(*x.shape[:-1], num_kv_heads * d)


class Biased(CheckedAttention):
    """Attention that adds a bias to each scaled score; the bias depends on the two positions alone.

    Args:
        d_k: Number of entries in each query and key.
    """

    def scale_scores(self, scores: Floats) -> Floats:
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

    def __init__(self, d_k: int, table: ArrayLike, max_distance: int) -> None:
        super().__init__(d_k)
        self.table = as_floats("RelativeBias", "table", table, "buckets")
        self.max_distance = max_distance
        require(
            self.table.size % 4 == 0 and 4 <= self.table.size < 4 * max_distance,
            "RelativeBias",
            received=f"table of shape {self.table.shape} and max_distance {max_distance}",
            expected="one number for each of 4, 8, 12, … buckets; max_distance above a quarter of their number",
            hint="T5 has 32 buckets and a max_distance of 128.",
        )

    def compute_bias(self, q_len: int, kv_len: int) -> Floats:
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
        self.slope = slope

    def compute_bias(self, q_len: int, kv_len: int) -> Floats:
        return 0.0 - self.slope * np.abs(relative_positions(q_len, kv_len))  # 0 on the diagonal, not −0


class Rotary(CheckedAttention):
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
        self.base = base
        require(d_k % 2 == 0, "Rotary", f"d_k {d_k}", "an even d_k", "Entries are rotated in pairs.")

    def compute_scores(self, Q: Floats, K: Floats) -> Floats:
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


class Softcap(CheckedAttention):
    """Scores capped smoothly by cap · tanh(score / cap); small scores hardly change.

    Args:
        d_k: Number of entries in each query and key.
        cap: Limit of the scores, above 0.

    >>> Softcap(d_k=1, cap=2.0).scale_scores(np.array([[0.1, 2, 2000]])).round(3)
    array([[0.1  , 1.523, 2.   ]])
    """

    def __init__(self, d_k: int, cap: float = 50.0) -> None:
        super().__init__(d_k)
        self.cap = cap

    def scale_scores(self, scores: Floats) -> Floats:
        capped: Floats = self.cap * np.tanh(super().scale_scores(scores) / self.cap)
        return capped


class Sink(CheckedAttention):
    """A score without a key: `sink` takes a share of every row, and that share goes to no value.

    Args:
        d_k: Number of entries in each query and key.
        sink: The extra score.

    >>> Sink(d_k=1, sink=0.0).compute_weights(np.zeros((1, 3)))
    array([[0.25, 0.25, 0.25]])
    """

    def __init__(self, d_k: int, sink: float = 0.0) -> None:
        super().__init__(d_k)
        self.sink = float(sink)

    def compute_weights(self, scaled: Floats, mask: Bools | None = None) -> Floats:
        scaled = self.apply_mask(scaled, mask)
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


class Linear(CheckedAttention):
    """Linear attention: weights are φ(query) · φ(key), divided by their sum, with φ(x) = elu(x) + 1 ≥ 0.

    Args:
        d_k: Number of entries in each query and key.

    >>> output, weights = Linear(d_k=1)(Q=[[0]], K=[[0], [2]], V=[[4], [8]])
    >>> output, weights
    (array([[7.]]), array([[0.25, 0.75]]))
    """

    def feature_map(self, x: Floats) -> Floats:
        """Compute φ(x) = elu(x) + 1: x + 1 above 0, exp(x) below.

        Args:
            x: Queries or keys (…, d_k).

        Returns:
            Features in the same shape.
        """
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def compute_scores(self, Q: Floats, K: Floats) -> Floats:
        return super().compute_scores(self.feature_map(Q), self.feature_map(K))

    def scale_scores(self, scores: Floats) -> Floats:
        return scores  # no exponential follows

    def compute_weights(self, scaled: Floats, mask: Bools | None = None) -> Floats:
        return normalised_relu(
            self.apply_mask(scaled, mask)
        )  # no score is negative: each is divided by the sum

    def compute_state(self, K: Floats, V: Floats) -> tuple[Floats, Floats]:
        """Compute the state S, z, which is all that the queries need of the keys and values.

        Args:
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).

        Returns:
            S = Σ φ(key) valueᵀ, (…, d_k, d_v), and z = Σ φ(key), (…, d_k).
        """
        features = self.feature_map(K)
        return features.swapaxes(-1, -2) @ V, features.sum(axis=-2)

    def compute_output_from_state(self, Q: Floats, state: tuple[Floats, Floats]) -> Floats:
        """Compute the output from the state alone, without a table of weights; the result equals that of `forward`.

        Args:
            Q: Queries (…, q_len, d_k).
            state: S and z of `compute_state`.

        Returns:
            The output (…, q_len, d_v).

        >>> linear = Linear(d_k=1)
        >>> K, V = np.array([[0.0], [2.0]]), np.array([[4.0], [8.0]])
        >>> linear.compute_output_from_state(np.array([[0.0]]), linear.compute_state(K, V))
        array([[7.]])
        """
        features, (S, z) = self.feature_map(Q), state
        return (features @ S) / (features @ z[..., None])


@dataclass(frozen=True, eq=False)
class TileState:
    """The state of the online softmax after the keys from `start` to `stop`.

    `scores` and `exponentials` (…, q_len, stop − start) belong to this tile. `row_max`, `row_sum` (…, q_len, 1) and
    `weighted_sum` (…, q_len, d_v) cover all keys so far. `rescale` is the factor that brought the sums of the earlier
    tiles to the new maximum.

    >>> from regard.learn import cat
    >>> [(tile.start, tile.stop) for tile in Flash(d_k=4, tile_size=2).iter_tiles(cat.Q, cat.K, cat.V)]
    [(0, 2), (2, 4), (4, 5)]
    """

    start: int
    stop: int
    scores: Floats
    row_max: Floats
    rescale: Floats
    exponentials: Floats
    row_sum: Floats
    weighted_sum: Floats


class Flash(CheckedAttention):
    """Tiled attention: the scores of at most `tile_size` keys exist at a time; running sums are kept and rescaled.

    Args:
        d_k: Number of entries in each query and key.
        tile_size: Number of keys per tile.

    >>> Q, K, V = [[1, 0]], [[2, 0], [0, 2], [1, 1]], [[4], [8], [6]]
    >>> np.allclose(Flash(d_k=2, tile_size=2)(Q, K, V)[0], CheckedAttention(d_k=2)(Q, K, V)[0], rtol=1e-15)
    True
    """

    def __init__(self, d_k: int, tile_size: int) -> None:
        super().__init__(d_k)
        self.tile_size = tile_size

    def forward(self, Q: Floats, K: Floats, V: Floats, mask: Bools | None = None) -> tuple[Floats, Floats]:
        *_, last = self.iter_tiles(Q, K, V, mask)
        row_sum = np.where(last.row_sum == 0.0, 1.0, last.row_sum)  # a fully masked row stays zeros
        # A kernel ends here. One number per row, the log-sum-exp, is enough to recompute any weight.
        lse = last.row_max + np.log(row_sum)
        scores = self.scale_scores(self.compute_scores(Q, K))
        return last.weighted_sum / row_sum, np.exp(self.apply_mask(scores - lse, mask))

    def iter_tiles(self, Q: Floats, K: Floats, V: Floats, mask: Bools | None = None) -> Iterator[TileState]:
        """Iterate over the tiles of keys, and yield the state after each.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Yields:
            The state after each tile, in order.
        """
        kv_len = K.shape[-2]
        highest: Floats = np.full((Q.shape[-2], 1), -np.inf)
        row_sum, weighted_sum = np.zeros_like(highest), np.zeros(())
        if mask is not None:  # a column for each key, so that a tile can take its own
            mask = np.broadcast_to(mask, np.broadcast_shapes(mask.shape, (kv_len,)))
        for start in range(0, max(kv_len, 1), self.tile_size):
            stop = min(start + self.tile_size, kv_len)
            scores = self.scale_scores(self.compute_scores(Q, K[..., start:stop, :]))
            scores = self.apply_mask(scores, None if mask is None else mask[..., start:stop])

            higher = np.maximum(highest, scores.max(axis=-1, keepdims=True, initial=-np.inf))
            row_max = np.where(higher == -np.inf, 0.0, higher)  # no visible key yet: no maximum to subtract
            rescale = np.exp(highest - row_max)  # the sums so far had subtracted a smaller maximum
            exponentials = np.exp(scores - row_max)
            row_sum = row_sum * rescale + exponentials.sum(axis=-1, keepdims=True)
            tile_sum = self.compute_output(exponentials, V[..., start:stop, :])
            weighted_sum = weighted_sum * rescale + tile_sum
            highest = higher
            yield TileState(start, stop, scores, row_max, rescale, exponentials, row_sum, weighted_sum)


class Cached(Causal):
    """Causal attention in steps: keys and values of earlier calls are cached, not computed again.

    Pass only the new tokens. A call returns their rows: output (…, new, d_v) and weights (…, new, cached + new).

    Args:
        d_k: Number of entries in each query and key.

    >>> decode = Cached(d_k=1)
    >>> decode([[0]], [[1]], [[4]])
    (array([[4.]]), array([[1.]]))
    >>> decode([[0]], [[1]], [[8]])  # the second token attends to the first, which is cached
    (array([[6.]]), array([[0.5, 0.5]]))
    """

    def __init__(self, d_k: int) -> None:
        super().__init__(d_k)
        self.clear()

    def clear(self) -> None:
        """Empty the cache."""
        self.K: Floats | None = None
        self.V: Floats | None = None

    def forward(self, Q: Floats, K: Floats, V: Floats, mask: Bools | None = None) -> tuple[Floats, Floats]:
        K = K if self.K is None else np.concatenate([self.K, K], axis=-2)
        V = V if self.V is None else np.concatenate([self.V, V], axis=-2)
        output, weights = super().forward(Q, K, V, mask)
        self.K, self.V = K, V  # only after the call succeeded: an error leaves the cache unchanged
        return output, weights
