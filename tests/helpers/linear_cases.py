"""Masks and inputs shared by the tests of linear attention."""

from __future__ import annotations

import numpy as np

from regard.masks import causal, dense, document, first, padding, prefix, sliding_window

HEADS, N, D, V = 3, 29, 5, 7


SOME = np.random.default_rng(5).random((N, N)) < 0.6


MASKS = {
    "none": None,
    "causal": causal(),
    "window": sliding_window(6),
    "two-sided": sliding_window(left=9, right=3),
    "windows of heads": sliding_window([1, 8, 40]),
    "padding": padding(21),
    "left padding": padding(21, side="left"),
    "document": document(np.arange(N) // 11),
    "scattered documents": document(np.arange(N) % 3),
    "prefix": prefix(7),
    "all of it": causal() & padding(23) & (sliding_window(9) | first(2)),
    "not": ~sliding_window(left=9, right=9),
    "dense": dense(SOME),
    "nothing": padding(0),
}


def draw(seed, q_len=N, kv_len=N, lead=(HEADS,), dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = ((q_len, D), (kv_len, D), (kv_len, V))
    return [rng.normal(size=(*lead, *shape)).astype(dtype) for shape in shapes]
