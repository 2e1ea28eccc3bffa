"""Masks of one head whose rows attend to intervals of keys, few or many."""

from __future__ import annotations

import numpy as np

from regard import causal, padding, sliding_window
from regard.masks import between, dense, document, first, prefix

ROWS, KEYS = 37, 41
LOWER = {"align": "lower_right"}


def drawn(shape, part, seed=3):
    return np.random.default_rng(seed).random(shape) < part


MASKS = {
    "none": None,
    "causal": causal(**LOWER),
    "window": sliding_window(5, **LOWER),
    "two-sided": sliding_window(left=3, right=4, align="upper_left"),
    "padding": padding(29),
    "padding left": padding(31, side="left"),
    "first": first(3),
    "prefix": prefix(9, **LOWER),
    "documents": document(
        np.repeat(np.arange(5), [9, 1, 16, 8, 7]), np.repeat(np.arange(5), [5, 5, 9, 9, 9])
    ),
    "window and first": causal(**LOWER) & (sliding_window(4, **LOWER) | first(2)),
    "not": ~(sliding_window(4, **LOWER) | padding(20)),
    "dense": dense(drawn((ROWS, KEYS), 0.4)),
    "one row": between(queries=20),
    "some rows empty": dense(drawn((ROWS, KEYS), 0.5) & drawn((ROWS, 1), 0.6)),
}
