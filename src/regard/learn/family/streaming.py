"""Members that change the order of the work: sums kept instead of tables. Tiled and cached, the numbers stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.learn.family.masking import Causal
from regard.learn.family.variant import Variant, mask_for
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import Floats, as_count, as_floats


class Linear(Variant):
    """Weights φ(query) · φ(key), divided by their sum; with φ(x) = elu(x) + 1 nothing is ever negative.

    >>> output, weights = Linear(d_k=1)(Q=[[0]], K=[[0], [2]], V=[[4], [8]])
    >>> output, weights
    (array([[7.]]), array([[0.25, 0.75]]))
    """

    def feature_map(self, x: npt.ArrayLike) -> Floats:
        """elu(x) + 1: x + 1 above 0, exp(x) below."""
        x = as_floats("Linear", "x", x, "d_k")
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def compute_scores(self, Q: npt.ArrayLike, K: npt.ArrayLike) -> Floats:
        return super().compute_scores(self.feature_map(Q), self.feature_map(K))

    def scale_scores(self, scores: npt.ArrayLike) -> Floats:
        return as_floats("scale_scores", "scores", scores, "q_len", "kv_len")  # no exponential to keep small

    def compute_weights(self, scaled: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
        return normalised_relu(scaled, mask)  # nothing is below 0: each is divided by the sum

    def state(self, K: npt.ArrayLike, V: npt.ArrayLike) -> tuple[Floats, Floats]:
        """All that is kept of keys and values: Σ φ(key) valueᵀ, (…, d_k, d_v), and Σ φ(key), (…, d_k)."""
        features, V = (
            self.feature_map(self._vectors("K", K, "kv_len")),
            as_floats("Linear", "V", V, "kv_len", "d_v"),
        )
        return features.swapaxes(-1, -2) @ V, features.sum(axis=-2)

    def read(self, Q: npt.ArrayLike, state: tuple[Floats, Floats]) -> Floats:
        """The output (…, q_len, d_v) from the state alone: the same numbers, and no table of weights.

        >>> linear = Linear(d_k=1)
        >>> linear.read([[0]], linear.state([[0], [2]], [[4], [8]]))
        array([[7.]])
        """
        features, (mixed, total) = self.feature_map(Q), state
        return (features @ mixed) / (features @ total[..., None])


@dataclass(frozen=True, eq=False)
class Tile:
    """What is known after the keys from `start` to `stop`; `scores` and `exponentials` are those of this tile.

    `shift` is the largest score so far, `kept` what the sums before are still worth under it; `total` (…, q_len, 1)
    and `mixed` (…, q_len, d_v) are the sums so far.

    >>> from regard.learn import cat
    >>> [(tile.start, tile.stop) for tile in Flash(d_k=4, tile=2).tiles(cat.Q, cat.K, cat.V)]
    [(0, 2), (2, 4), (4, 5)]
    """

    start: int
    stop: int
    scores: Floats
    shift: Floats
    kept: Floats
    exponentials: Floats
    total: Floats
    mixed: Floats


class Flash(Variant):
    """The plain numbers, with never more than `tile` keys' scores at hand: sums are kept and rescaled.

    >>> Q, K, V = [[1, 0]], [[2, 0], [0, 2], [1, 1]], [[4], [8], [6]]
    >>> np.allclose(Flash(d_k=2, tile=2)(Q, K, V)[0], Variant(d_k=2)(Q, K, V)[0], rtol=1e-15)
    True
    """

    def __init__(self, d_k: int, tile: int) -> None:
        super().__init__(d_k)
        self.tile = as_count("Flash", "tile", tile, least=1)

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        *_, end = self.tiles(Q, K, V, mask)
        some = np.where(end.total == 0.0, 1.0, end.total)  # a row that sees nothing stays zeros
        # A kernel ends here. One number a row, its lse, gives back any weight that someone wants to see.
        lse = end.shift + np.log(some)
        scores = self.scale_scores(self.compute_scores(Q, K))
        weights = np.exp(np.where(mask_for(Q, K, mask), scores - lse, -np.inf))
        return end.mixed / some, weights

    def tiles(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> Iterator[Tile]:
        """The state after each tile of keys, in order."""
        K, V = self._vectors("K", K, "kv_len"), as_floats("Flash", "V", V, "kv_len", "d_v")
        seen, kv_len = mask_for(Q, K, mask), K.shape[-2]
        highest: Floats = np.full((*seen.shape[:-1], 1), -np.inf)
        total, mixed = np.zeros_like(highest), np.zeros(())
        for start in range(0, max(kv_len, 1), self.tile):
            stop = min(start + self.tile, kv_len)
            sees = seen[..., start:stop]
            scores = self.scale_scores(self.compute_scores(Q, K[..., start:stop, :]))
            scores = np.where(sees, scores, -np.inf)

            higher = np.maximum(highest, scores.max(axis=-1, keepdims=True, initial=-np.inf))
            shift = np.where(higher == -np.inf, 0.0, higher)  # nothing seen yet: no maximum to subtract
            kept = np.exp(highest - shift)  # the sums so far had subtracted less
            exponentials = np.exp(scores - shift)
            total = total * kept + exponentials.sum(axis=-1, keepdims=True)
            mixed = mixed * kept + self.compute_output(exponentials, V[..., start:stop, :], sees)
            highest = higher
            yield Tile(start, stop, scores, shift, kept, exponentials, total, mixed)


class Cached(Causal):
    """Causal attention, some tokens at a time: keys and values of earlier calls are kept, not computed again.

    A call is given the new tokens only and returns their rows: weights (…, new, kept so far) and output (…, new, d_v).

    >>> decode = Cached(d_k=1)
    >>> decode([[0]], [[1]], [[4]])
    (array([[4.]]), array([[1.]]))
    >>> decode([[0]], [[1]], [[8]])  # the second token sees the first, which was not passed again
    (array([[6.]]), array([[0.5, 0.5]]))
    """

    def __init__(self, d_k: int) -> None:
        super().__init__(d_k)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.K: Floats | None = None
        self.V: Floats | None = None

    def forward(
        self, Q: npt.ArrayLike, K: npt.ArrayLike, V: npt.ArrayLike, mask: npt.ArrayLike | None = None
    ) -> tuple[Floats, Floats]:
        K, V = self._vectors("K", K, "kv_len"), as_floats("Cached", "V", V, "kv_len", "d_v")
        K = K if self.K is None else np.concatenate([self.K, K], axis=-2)
        V = V if self.V is None else np.concatenate([self.V, V], axis=-2)
        output, weights = super().forward(Q, K, V, mask)
        self.K, self.V = K, V  # only now: a call that was refused leaves the cache as it was
        return output, weights
