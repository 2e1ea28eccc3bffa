"""The kernel view: attention is an average of the values, weighted by how near each key is to the query.

    weight of key j  =  κ(query, key j) / Σ κ(query, key m)

Nadaraya and Watson estimated a curve this way in 1964, with a Gaussian κ. Softmax attention is the same average with
κ = exp(query · key / √d_k). Since |query − key|² = |query|² − 2 query · key + |key|², the two differ by the length of
the key alone: where all keys are equally long they are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.softmax_alternatives import normalised_relu
from regard.learn.validation import Floats, as_floats, as_number, check_leading_axes


def exponential_kernel(Q: Floats, K: Floats) -> Floats:
    """The nearness exp(query · key / √d_k) of every query to every key, (…, q_len, kv_len).

    As it stands it overflows where a scaled score passes 709: softmax subtracts the largest of the row first.

    >>> exponential_kernel(np.array([[2.0]]), np.array([[0.0], [1.0]])).round(3)
    array([[1.   , 7.389]])
    """
    return np.exp(Q @ K.swapaxes(-1, -2) / math.sqrt(Q.shape[-1]))


def gaussian_kernel(Q: Floats, K: Floats, width: float | None = None) -> Floats:
    """The nearness exp(−|query − key|² / 2 width²) of every query to every key, (…, q_len, kv_len).

    The width is the fourth root of d_k unless given: then it differs from `exponential_kernel` by the lengths alone.

    >>> gaussian_kernel(np.array([[2.0]]), np.array([[2.0], [1.0]])).round(3)
    array([[1.   , 0.607]])
    """
    width = Q.shape[-1] ** 0.25 if width is None else width
    width = as_number(
        "gaussian_kernel", "width", width, "It is a distance between vectors; try 1.", positive=True
    )
    distances = np.linalg.norm(Q[..., :, None, :] - K[..., None, :, :], axis=-1)
    nearness: Floats = np.exp(-((distances / width) ** 2) / 2)
    return nearness


def kernel_attention(
    Q: npt.ArrayLike,
    K: npt.ArrayLike,
    V: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    *,
    kernel: Callable[[Floats, Floats], Floats] = exponential_kernel,
) -> tuple[Floats, Floats]:
    """The output (…, q_len, d_v) and the weights (…, q_len, kv_len) by any kernel that is not negative.

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
            hint="Project queries and keys to the same d_k, and make K and V from the same sequence.",
        )
    check_leading_axes("kernel_attention", "Q", Q, "K", K)
    nearness = as_floats("kernel_attention", "kernel(Q, K)", kernel(Q, K), "q_len", "kv_len")
    if (nearness < 0).any():
        raise ArgumentError(
            "kernel_attention",
            received=f"a kernel with values down to {nearness.min():g}",
            expected="a kernel that is never negative, so that its shares are shares",
            hint="Take its exponential, or what it has above 0.",
        )
    weights = normalised_relu(nearness, mask)  # nothing is below 0: each is divided by the sum
    return ScaledDotProductAttention(d_k=Q.shape[-1]).compute_output(weights, V, mask), weights
