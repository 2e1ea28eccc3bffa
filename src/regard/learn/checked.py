"""The four steps behind a check of their arguments, with masks that cannot leak, and `explain`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.by_hand import WorkedRow, explain
from regard.learn.validation import (
    Bools,
    Floats,
    MaskLike,
    TrueMeans,
    as_count,
    as_floats,
    as_mask,
    check_leading_axes,
    read_mask,
)


class CheckedAttention(ScaledDotProductAttention):
    """Scaled dot-product attention that checks its arguments when it is called.

    A call converts lists and tensors to float64, and runs the four steps of `forward`. Two steps differ from those of
    the plain class: a masked key cannot change a number, and a row whose keys are all masked is zeros. Leading axes
    (batch, heads) broadcast.

    Args:
        d_k: Number of entries in each query and key.

    >>> attention = CheckedAttention(d_k=1)
    >>> output, weights = attention([[0], [0]], [[1], [2]], [[5], [7]], mask=[[True, False], [False, False]])
    >>> weights
    array([[1., 0.],
           [0., 0.]])
    >>> attention([[0]], [[1], [2]], [[5], [7]], mask=[[1, 0]], true_means="ignore")[1]
    array([[0., 1.]])
    """

    num_heads = 1  # of the queries, in the columns of Q
    num_kv_heads = 1

    def __init__(self, d_k: int) -> None:
        super().__init__(as_count(type(self).__name__, "d_k", d_k, minimum=1))

    def __call__(
        self, Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
    ) -> tuple[Floats, Floats]:
        """Check the arguments, and run the four steps.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
            true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
                True means attend.

        Returns:
            The output (…, q_len, d_v) and the weights (…, q_len, kv_len).
        """
        arrays = self.check_arrays(Q, K, V)
        # A masked key may be infinite: 0 · inf is not worth a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            return self.forward(*arrays, read_mask(type(self).__name__, mask, true_means))

    def compute_weights(self, scaled: Floats, mask: Bools | None = None) -> Floats:
        """Normalise, as in the plain class; masked keys have a weight of 0, whatever else is in their row.

        Args:
            scaled: Scaled scores (…, q_len, kv_len).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            Weights (…, q_len, kv_len).
        """
        scaled = self.apply_mask(scaled, mask)
        if scaled.shape[-1] == 0:
            return scaled  # no key, no weight
        with np.errstate(invalid="ignore"):  # in a fully masked row, −∞ minus −∞
            return np.where(scaled == -np.inf, 0.0, super().compute_weights(scaled))

    def apply_mask(self, scaled: Floats, mask: Bools | None) -> Floats:
        """Set the scores of masked keys to −∞.

        Args:
            scaled: Scaled scores (…, q_len, kv_len).
            mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len).

        Returns:
            The scores (…, q_len, kv_len), −∞ where the mask is False.
        """
        if mask is None:
            return scaled
        return np.where(as_mask("apply_mask", mask, scaled.shape), scaled, -np.inf)

    def compute_output(self, weights: Floats, V: Floats) -> Floats:
        """Aggregate, as in the plain class; a weight of 0 takes nothing from its value, not even NaN.

        Args:
            weights: Weights (…, q_len, kv_len).
            V: Values (…, kv_len, d_v).

        Returns:
            The output (…, q_len, d_v).
        """
        finite = np.isfinite(V)
        output = super().compute_output(weights, np.where(finite, V, 0.0))
        if finite.all():
            return output
        # 0 · NaN is NaN: add the values that are not finite only where they have a weight.
        taken = (weights != 0)[..., None] & ~finite[..., None, :, :]  # (…, q_len, kv_len, d_v)
        rest: Floats = weights[..., None, :] @ np.where(taken, V[..., None, :, :], 0.0)
        return output + rest[..., 0, :]

    def explain(
        self,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        tokens: Sequence[str] | None = None,
        query_idx: int = 0,
    ) -> WorkedRow:
        """Work out one query by hand, with every number on the way to its output and its weights.

        The steps are printed, unless a notebook or a Python prompt shows the returned object by itself.

        Args:
            Q: Queries (q_len, d_k).
            K: Keys (kv_len, d_k).
            V: Values (kv_len, d_v).
            tokens: A name for each key. Default: "key 0", "key 1" and so on.
            query_idx: The row of Q to work out, counted from 0.

        Returns:
            The steps, the output and the weights of that row.

        >>> steps = CheckedAttention(d_k=1).explain([[1]], [[2]], [[3]], tokens=["a"])
        Query 0 "a" by hand
        ...
        >>> print(steps.steps[0])
        1. Compare the query [1] with each key
           a  1·2 = 2
        """
        arrays = self.check_arrays(Q, K, V)
        tokens = [f"key {j}" for j in range(arrays[1].shape[-2])] if tokens is None else tokens
        return print_in_script(explain(self, *arrays, tokens, query_idx))

    def check_arrays(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> tuple[Floats, Floats, Floats]:
        """Convert Q, K and V to float64, and check that their shapes are compatible.

        Args:
            Q: Queries (…, q_len, d_k).
            K: Keys (…, kv_len, d_k).
            V: Values (…, kv_len, d_v).

        Returns:
            The three arrays.

        Raises:
            ArgumentError: If the shapes are incompatible.
        """
        owner = type(self).__name__
        Q, K = as_floats(owner, "Q", Q, "q_len", "d_k"), as_floats(owner, "K", K, "kv_len", "d_k")
        V = as_floats(owner, "V", V, "kv_len", "d_v")
        for name, array, parts in (("Q", Q, self.num_heads), ("K", K, self.num_kv_heads)):
            if array.shape[-1] != self.d_k * parts:
                raise ArgumentError(
                    owner,
                    received=f"{name} of shape {array.shape}, vectors of {array.shape[-1]}",
                    expected=f"{name} with {self.d_k * parts} entries in each vector, since d_k is {self.d_k}"
                    + (f", times {parts} heads" if parts > 1 else ""),
                    hint=f"Build it with d_k={array.shape[-1] // parts}, or pass vectors of {self.d_k * parts}.",
                )
        if V.shape[-2] != K.shape[-2] or V.shape[-1] % self.num_kv_heads:
            raise ArgumentError(
                owner,
                received=f"K of shape {K.shape} and V of shape {V.shape}",
                expected="one value for each key: K (…, kv_len, d_k) and V (…, kv_len, d_v)"
                + (f", d_v divisible by {self.num_kv_heads}" if self.num_kv_heads > 1 else ""),
                hint="Compute K and V from the same sequence.",
            )
        check_leading_axes(owner, "Q", Q, "K", K)
        check_leading_axes(owner, "K", K, "V", V)
        check_leading_axes(owner, "Q", Q, "V", V)
        return Q, K, V


def scaled_dot_product_attention(
    Q: ArrayLike, K: ArrayLike, V: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
) -> tuple[Floats, Floats]:
    """Compute scaled dot-product attention by `CheckedAttention`; d_k is the last axis of Q.

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
    return CheckedAttention(Q.shape[-1])(Q, K, V, mask, true_means)


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
