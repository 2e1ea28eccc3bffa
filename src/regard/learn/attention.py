"""Scaled dot-product attention in four steps, written to be read.

    1. compare     scores  = Q Kᵀ               how well does each query match each key?
    2. scale       scaled  = scores / √d_k      keep the scores the same size in any dimension
    3. normalise   weights = softmax(scaled)    turn each row into shares that sum to 1
    4. aggregate   output  = weights V          mix the values by their shares

All computation is in float64. `regard.attention` is the same mathematics for real sizes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from regard.errors import ArgumentError
from regard.learn.validation import (
    Floats,
    MaskLike,
    TrueMeans,
    as_count,
    as_floats,
    as_mask,
    check_leading_axes,
    read_mask,
)

if TYPE_CHECKING:
    from regard.core.explanation import Explanation


class ScaledDotProductAttention:
    """Scaled dot-product attention with one method for each of the four steps.

    Q is (…, q_len, d_k), K is (…, kv_len, d_k), V is (…, kv_len, d_v); leading axes (batch, heads) broadcast. A mask is
    boolean, True = attend, and broadcasts to (…, q_len, kv_len).

    Args:
        d_k: Number of entries in each query and key.

    >>> attention = ScaledDotProductAttention(d_k=2)
    >>> output, weights = attention(Q=[[1, 0]], K=[[2, 0], [0, 2]], V=[[10, 0], [0, 10]])
    >>> weights.round(3)
    array([[0.804, 0.196]])
    >>> output.round(3)
    array([[8.044, 1.956]])
    """

    def __init__(self, d_k: int) -> None:
        self.d_k = as_count("ScaledDotProductAttention", "d_k", d_k, minimum=1)

    @property
    def scale(self) -> float:
        """The factor of step 2, 1 / √d_k.

        >>> ScaledDotProductAttention(d_k=4).scale
        0.5
        """
        return 1 / math.sqrt(self.d_k)

    def forward(
        self, Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
    ) -> tuple[Floats, Floats]:
        """Run all four steps.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
            true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
                True means attend.

        Returns:
            The output (…, q_len, d_v) and the weights (…, q_len, kv_len).

        >>> attention = ScaledDotProductAttention(d_k=1)
        >>> mask = [[True, False], [True, True]]
        >>> output, weights = attention.forward(Q=[[0], [0]], K=[[1], [2]], V=[[5], [7]], mask=mask)
        >>> weights
        array([[1. , 0. ],
               [0.5, 0.5]])
        >>> output
        array([[5.],
               [6.]])
        >>> attention.forward([[0]], [[1], [2]], [[5], [7]], mask=[[1, 0]], true_means="ignore")[1]
        array([[0., 1.]])
        """
        mask = read_mask("ScaledDotProductAttention", mask, true_means)
        scores = self.compute_scores(Q, K)
        scaled = self.scale_scores(scores)
        weights = self.compute_weights(scaled, mask)
        output = self.compute_output(weights, V, mask)
        return output, weights

    __call__ = forward

    def compute_scores(self, Q: ArrayLike, K: ArrayLike) -> Floats:
        """Step 1, compare: compute the dot product of every query with every key.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).

        Returns:
            Scores (…, q_len, kv_len).

        >>> ScaledDotProductAttention(d_k=2).compute_scores([[3, 1]], [[1.5, 0.5], [1, 4]])
        array([[5., 7.]])
        """
        Q = self._check_vectors("Q", Q, "q_len")
        K = self._check_vectors("K", K, "kv_len")
        check_leading_axes("compute_scores", "Q", Q, "K", K)
        # No warning for 0 · inf: the key may be masked in step 3.
        with np.errstate(invalid="ignore", over="ignore"):
            return Q @ K.swapaxes(-1, -2)

    def scale_scores(self, scores: ArrayLike) -> Floats:
        """Step 2, scale: divide the scores by √d_k, so that their spread does not grow with d_k.

        Args:
            scores: Scores (…, q_len, kv_len).

        Returns:
            Scaled scores (…, q_len, kv_len).

        >>> ScaledDotProductAttention(d_k=4).scale_scores([[2, 6]])
        array([[1., 3.]])
        """
        return as_floats("scale_scores", "scores", scores, "q_len", "kv_len") / math.sqrt(self.d_k)

    def compute_weights(self, scaled: ArrayLike, mask: MaskLike = None) -> Floats:
        """Step 3, normalise: compute the softmax of each row. A fully masked row becomes zeros.

        Args:
            scaled: Scaled scores (…, q_len, kv_len).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            Weights (…, q_len, kv_len).

        >>> attention = ScaledDotProductAttention(d_k=1)
        >>> attention.compute_weights([[1, 1], [1, 1]], mask=[[True, True], [False, False]])
        array([[0.5, 0.5],
               [0. , 0. ]])
        """
        scaled = as_floats("compute_weights", "scaled", scaled, "q_len", "kv_len")
        if mask is not None:
            scaled = np.where(as_mask("compute_weights", mask, scaled.shape), scaled, -np.inf)

        # Subtracting the row's maximum does not change the quotient and keeps exp from overflowing.
        highest = scaled.max(axis=-1, keepdims=True, initial=-np.inf)
        shift = np.where(highest == -np.inf, 0.0, highest)  # a fully masked row has no maximum to subtract
        exponentials = np.exp(scaled - shift)  # exp(-inf) is exactly 0: a masked key gets no share
        total = exponentials.sum(axis=-1, keepdims=True)
        weights = exponentials / np.where(
            total == 0.0, 1.0, total
        )  # a fully masked row stays zeros, not 0 / 0
        return np.where(scaled == -np.inf, 0.0, weights)  # also in a row whose total is NaN

    def _softmax(self, scores: ArrayLike) -> Floats:
        """Compute the softmax of each row; step 3 without a mask.

        >>> ScaledDotProductAttention(d_k=1)._softmax([[0, 0]])
        array([[0.5, 0.5]])
        """
        return self.compute_weights(scores)

    def compute_output(self, weights: ArrayLike, V: ArrayLike, mask: MaskLike = None) -> Floats:
        """Step 4, aggregate: mix the values by each row of weights.

        If masked values may be NaN or infinite, pass the mask too: a weight of 0 is not enough, since 0 · NaN is NaN.

        Args:
            weights: Weights (…, q_len, kv_len).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            The output (…, q_len, d_v).

        >>> ScaledDotProductAttention(d_k=1).compute_output([[0.75, 0.25]], [[4, 0], [0, 8]])
        array([[3., 2.]])
        """
        weights = as_floats("compute_output", "weights", weights, "q_len", "kv_len")
        V = as_floats("compute_output", "V", V, "kv_len", "d_v")
        if V.shape[-2] != weights.shape[-1]:
            raise ArgumentError(
                "compute_output",
                received=f"weights over {weights.shape[-1]} keys and V with {V.shape[-2]} values",
                expected="one value for each key: weights (…, q_len, kv_len) and V (…, kv_len, d_v)",
                hint="Compute K and V from the same sequence.",
            )
        check_leading_axes("compute_output", "weights", weights, "V", V)
        finite = np.isfinite(V)
        if mask is None or finite.all():
            return weights @ V

        # Leave out values that are not finite, and add them back for the queries that attend to them.
        mask = as_mask("compute_output", mask, weights.shape)
        visible = mask[..., :, :, None] & ~finite[..., None, :, :]  # (…, q_len, kv_len, d_v)
        not_finite = np.where(visible, V[..., None, :, :], 0.0)
        return weights @ np.where(finite, V, 0.0) + (weights[..., None, :] @ not_finite)[..., 0, :]

    def explain(
        self,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        tokens: Sequence[str] | None = None,
        query_idx: int = 0,
    ) -> Explanation:
        """Explain one query: the four steps with every number.

        The steps are printed, unless a notebook shows the returned object by itself.

        Args:
            Q: Queries (q_len, d_k).
            K: Keys (kv_len, d_k).
            V: Values (kv_len, d_v).
            tokens: A name for each key. Default: "key 0", "key 1" and so on.
            query_idx: The row of Q to explain, counted from 0.

        Returns:
            The steps as an object with the numbers as attributes.

        >>> attention = ScaledDotProductAttention(d_k=2)
        >>> steps = attention.explain([[1, 0]], [[2, 0], [0, 2]], [[4], [8]], tokens=["a", "b"])
        How query 0 attends: 2 keys, head_dim 2
        ...
        >>> steps.weights.round(3)
        array([0.804, 0.196])
        """
        from regard.core.attention import attention

        Q, K = self._check_vectors("Q", Q, "q_len"), self._check_vectors("K", K, "kv_len")
        V = as_floats("explain", "V", V, "kv_len", "d_v")
        return print_in_script(attention(Q, K).explain(query_idx, value=V, tokens=tokens))

    def _check_vectors(self, name: str, array: ArrayLike, length: str) -> Floats:
        vectors = as_floats("ScaledDotProductAttention", name, array, length, "d_k")
        if vectors.shape[-1] != self.d_k:
            raise ArgumentError(
                "ScaledDotProductAttention",
                received=f"{name} of shape {vectors.shape}, vectors of {vectors.shape[-1]}",
                expected=f"{name} of shape (…, {length}, {self.d_k}), since d_k is {self.d_k}",
                hint=f"Build it with d_k={vectors.shape[-1]}, or pass vectors of {self.d_k}.",
            )
        return vectors


def scaled_dot_product_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
) -> tuple[Floats, Floats]:
    """Compute scaled dot-product attention; d_k is the last axis of Q.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        V: Values (…, kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.

    Returns:
        The output (…, q_len, d_v) and the weights (…, q_len, kv_len).

    >>> output, weights = scaled_dot_product_attention([[0, 0]], [[1, 2], [3, 4]], [[10], [30]])
    >>> output
    array([[20.]])
    >>> weights
    array([[0.5, 0.5]])
    """
    Q = as_floats("scaled_dot_product_attention", "Q", Q, "q_len", "d_k")
    mask = read_mask("scaled_dot_product_attention", mask, true_means)
    return ScaledDotProductAttention(d_k=Q.shape[-1]).forward(Q, K, V, mask)


Result = TypeVar("Result")


def print_in_script(result: Result) -> Result:
    """Print a result, unless the Python prompt or the notebook shows it in full by itself.

    >>> print_in_script("a result")
    a result
    'a result'
    """
    is_prompt = hasattr(sys, "ps1")  # only an interactive interpreter has one, and notebooks are interactive
    shows_itself = repr(result) == str(result) or (
        "ipykernel" in sys.modules and hasattr(result, "_repr_html_")
    )
    if not (is_prompt and shows_itself):
        print(result)
    return result
