"""The ways of `regard.learn` to compute attention, all with the same arguments and results, and random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.learn import (
    CheckedAttention,
    attention_by_loops,
    scaled_dot_product_attention,
)


def draw_qkv(n_q: int, n_k: int, d_k: int, d_v: int, *lead: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shapes = [(*lead, n_q, d_k), (*lead, n_k, d_k), (*lead, n_k, d_v)]
    Q, K, V = (rng.normal(size=shape) for shape in shapes)
    return Q, K, V


def by_class(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    return CheckedAttention(d_k=np.shape(Q)[-1])(Q, K, V, mask)


def by_function(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    return scaled_dot_product_attention(Q, K, V, mask)


def by_loops(Q: Any, K: Any, V: Any, mask: Any = None) -> tuple[Any, Any]:
    result = attention_by_loops(Q, K, V, mask)
    return result.output, result.weights
