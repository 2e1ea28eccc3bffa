"""Attention as kernel smoothing: the mean of the values, weighted by the similarity of each key to the query.

    weight of key j  =  κ(query, key j) / Σ κ(query, key m)

Nadaraya and Watson estimated a curve this way in 1964, with a Gaussian κ. Softmax attention is this mean with
κ = exp(query · key / √d_k). Since |query − key|² = |query|² − 2 query · key + |key|², the two differ only by the length
of the key: if all keys have the same length, they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import Floats, TrueMeans, as_floats, as_number, check_leading_axes, read_mask


def exponential_kernel(Q: Floats, K: Floats) -> Floats:
    """Compute exp(query · key / √d_k) for every query and key.

    It overflows if a scaled score exceeds 709; softmax subtracts the largest score of the row first.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).

    Returns:
        Similarities (…, q_len, kv_len).

    >>> exponential_kernel(np.array([[2.0]]), np.array([[0.0], [1.0]])).round(3)
    array([[1.   , 7.389]])
    """
    return np.exp(Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1]))


def gaussian_kernel(Q: Floats, K: Floats, width: float | None = None) -> Floats:
    """Compute exp(−|query − key|² / 2 width²) for every query and key.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        width: Width of the Gaussian, above 0. The default is the fourth root of d_k; it makes the kernel differ from
            `exponential_kernel` only by the lengths of the vectors.

    Returns:
        Similarities (…, q_len, kv_len).

    >>> gaussian_kernel(np.array([[2.0]]), np.array([[2.0], [1.0]])).round(3)
    array([[1.   , 0.607]])
    """
    width = Q.shape[-1] ** 0.25 if width is None else width
    width = as_number(
        "gaussian_kernel", "width", width, "It is a distance between vectors, for example 1.", positive=True
    )
    distances = np.linalg.norm(Q[..., :, None, :] - K[..., None, :, :], axis=-1)
    similarities: Floats = np.exp(-((distances / width) ** 2) / 2)
    return similarities


def kernel_attention(
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    true_means: TrueMeans | None = None,
    *,
    kernel: Callable[[Floats, Floats], Floats] = exponential_kernel,
) -> tuple[Floats, Floats]:
    """Compute attention with any kernel that is not negative.

    Args:
        Q: Queries (…, q_len, d_k).
        K: Keys (…, kv_len, d_k).
        V: Values (…, kv_len, d_v).
        mask: Boolean, True = attend; broadcasts to (…, q_len, kv_len). Or of 0 and 1, with `true_means`.
        true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
            True means attend.
        kernel: A function of Q and K that returns similarities (…, q_len, kv_len).

    Returns:
        The output (…, q_len, d_v) and the weights (…, q_len, kv_len).

    Raises:
        ArgumentError: If the shapes do not fit together, or the kernel returns a negative number.

    >>> output, weights = kernel_attention([[0.0]], [[-1.0], [1.0], [9.0]], [[1], [3], [8]], kernel=gaussian_kernel)
    >>> weights.round(3)
    array([[0.5, 0.5, 0. ]])
    >>> output.round(3)
    array([[2.]])
    """
    Q = as_floats("kernel_attention", "Q", Q, "q_len", "d_k")
    K = as_floats("kernel_attention", "K", K, "kv_len", "d_k")
    V = as_floats("kernel_attention", "V", V, "kv_len", "d_v")
    if Q.shape[-1] != K.shape[-1] or K.shape[-2] != V.shape[-2]:
        raise ArgumentError(
            "kernel_attention",
            received=f"Q of shape {Q.shape}, K of shape {K.shape} and V of shape {V.shape}",
            expected="Q (…, q_len, d_k), K (…, kv_len, d_k) and V (…, kv_len, d_v)",
            hint="Project queries and keys to the same d_k, and compute K and V from the same sequence.",
        )
    check_leading_axes("kernel_attention", "Q", Q, "K", K)
    similarities = as_floats("kernel_attention", "kernel(Q, K)", kernel(Q, K), "q_len", "kv_len")
    if (similarities < 0).any():
        raise ArgumentError(
            "kernel_attention",
            received=f"a kernel with values down to {similarities.min():g}",
            expected="a kernel that is never negative",
            hint="Use its exponential, or max(kernel, 0).",
        )
    mask = read_mask("kernel_attention", mask, true_means)
    weights = normalised_relu(similarities, mask)  # none is negative: each is divided by the sum
    return ScaledDotProductAttention(d_k=Q.shape[-1]).compute_output(weights, V, mask), weights
