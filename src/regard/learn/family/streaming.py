"""Variants that change the order of the work and keep sums instead of a table; tiled and cached, no number changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.learn.family.masking import Causal
from regard.learn.family.variant import AttentionVariant, broadcast_mask
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import Floats, TrueMeans, as_count, as_floats, read_mask


class Linear(AttentionVariant):
    """Linear attention: weights are φ(query) · φ(key), divided by their sum, with φ(x) = elu(x) + 1 ≥ 0.

    Args:
        d_k: Number of entries in each query and key.

    >>> output, weights = Linear(d_k=1)(Q=[[0]], K=[[0], [2]], V=[[4], [8]])
    >>> output, weights
    (array([[7.]]), array([[0.25, 0.75]]))
    """

    def feature_map(self, x: npt.ArrayLike) -> Floats:
        """Compute φ(x) = elu(x) + 1: x + 1 above 0, exp(x) below.

        Args:
            x: Queries or keys (…, d_k).

        Returns:
            Features in the same shape.
        """
        x = as_floats("Linear", "x", x, "d_k")
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        return super().compute_scores(self.feature_map(Q), self.feature_map(K))

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        return as_floats("scale_scores", "scores", scores, "q_len", "kv_len")  # no exponential follows

    def compute_weights(self, scaled: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
        return normalised_relu(scaled, mask)  # no score is negative: each is divided by the sum

    def compute_state(self, K: npt.ArrayLike, V: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Compute the state S, z, which is all that the queries need of the keys and values.

        Args:
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).

        Returns:
            S = Σ φ(key) valueᵀ, (…, d_k, d_v), and z = Σ φ(key), (…, d_k).
        """
        features = self.feature_map(self._check_vectors("K", K, "kv_len"))
        V = as_floats("Linear", "V", V, "kv_len", "d_v")
        return features.swapaxes(-1, -2) @ V, features.sum(axis=-2)

    def compute_output_from_state(self, Q: npt.ArrayLike, state: tuple[Floats, Floats]) -> Floats:
        """Compute the output from the state alone, without a table of weights; the result equals that of `forward`.

        Args:
            Q: Queries (…, q_len, d_k).
            state: S and z of `compute_state`.

        Returns:
            The output (…, q_len, d_v).

        >>> linear = Linear(d_k=1)
        >>> linear.compute_output_from_state([[0]], linear.compute_state([[0], [2]], [[4], [8]]))
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


class Flash(AttentionVariant):
    """Tiled attention: the scores of at most `tile_size` keys exist at a time; running sums are kept and rescaled.

    Args:
        d_k: Number of entries in each query and key.
        tile_size: Number of keys per tile.

    >>> Q, K, V = [[1, 0]], [[2, 0], [0, 2], [1, 1]], [[4], [8], [6]]
    >>> np.allclose(Flash(d_k=2, tile_size=2)(Q, K, V)[0], AttentionVariant(d_k=2)(Q, K, V)[0], rtol=1e-15)
    True
    """

    def __init__(self, d_k: int, tile_size: int) -> None:
        super().__init__(d_k)
        self.tile_size = as_count("Flash", "tile_size", tile_size, minimum=1)

    def forward(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        mask = read_mask("mask", mask, true_means)
        *_, last = self.iter_tiles(Q, K, V, mask)
        row_sum = np.where(last.row_sum == 0.0, 1.0, last.row_sum)  # a fully masked row stays zeros
        # A kernel ends here. One number per row, the log-sum-exp, is enough to recompute any weight.
        lse = last.row_max + np.log(row_sum)
        scores = self.scale_scores(self.compute_scores(Q, K))
        weights = np.exp(np.where(broadcast_mask(Q, K, mask), scores - lse, -np.inf))
        return last.weighted_sum / row_sum, weights

    def iter_tiles(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> Iterator[TileState]:
        """Iterate over the tiles of keys, and yield the state after each.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Yields:
            The state after each tile, in order.
        """
        K, V = self._check_vectors("K", K, "kv_len"), as_floats("Flash", "V", V, "kv_len", "d_v")
        visible, kv_len = broadcast_mask(Q, K, mask), K.shape[-2]
        highest: Floats = np.full((*visible.shape[:-1], 1), -np.inf)
        row_sum, weighted_sum = np.zeros_like(highest), np.zeros(())
        for start in range(0, max(kv_len, 1), self.tile_size):
            stop = min(start + self.tile_size, kv_len)
            attend = visible[..., start:stop]
            scores = self.scale_scores(self.compute_scores(Q, K[..., start:stop, :]))
            scores = np.where(attend, scores, -np.inf)

            higher = np.maximum(highest, scores.max(axis=-1, keepdims=True, initial=-np.inf))
            row_max = np.where(higher == -np.inf, 0.0, higher)  # no visible key yet: no maximum to subtract
            rescale = np.exp(highest - row_max)  # the sums so far had subtracted a smaller maximum
            exponentials = np.exp(scores - row_max)
            row_sum = row_sum * rescale + exponentials.sum(axis=-1, keepdims=True)
            tile_sum = self.compute_output(exponentials, V[..., start:stop, :], attend)
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

    def forward(
        self,
        Q: npt.ArrayLike,
        K: npt.ArrayLike,
        V: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        K, V = self._check_vectors("K", K, "kv_len"), as_floats("Cached", "V", V, "kv_len", "d_v")
        K = K if self.K is None else np.concatenate([self.K, K], axis=-2)
        V = V if self.V is None else np.concatenate([self.V, V], axis=-2)
        output, weights = super().forward(Q, K, V, mask, true_means)
        self.K, self.V = K, V  # only after the call succeeded: an error leaves the cache unchanged
        return output, weights
