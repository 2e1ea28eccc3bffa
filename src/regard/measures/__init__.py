"""Measures: summaries of the whole matrix, computed in one streaming pass and O(n) memory.

`A.measure(…)` runs them. This package may import engines, masks and the modules below them, but not core.

A measure is about ten lines. This one computes the share of each row on even positions:

>>> import numpy as np, regard
>>> class EvenShare(Measure):
...     def init(self, shape, xp):
...         return xp.zeros(shape[:2])
...     def step(self, state, weights, scores, q_idx, kv_idx, xp):
...         state[:, q_idx] += xp.sum(weights * (kv_idx % 2 == 0), axis=-1)
...         return state
>>> A = regard.attention(np.zeros((4, 2)), np.zeros((4, 2)), mask=regard.causal())
>>> A.measure(EvenShare()).even_share
array([1.        , 0.5       , 0.66666667, 0.5       ])

Design notes:
- Entropy, distance, position and spread are of the keys alone: weights are divided by their sum if there is a sink. A
  sum over half the weight is not a mean, and a sink has no position. Without a sink nothing is divided, so nothing is
  slower; with one, the state has the sum of the weights as well, which merges by addition.
- `Spread` merges means and squared deviations (Chan et al.). Moments around the query need float64 to cancel; merged
  deviations do not.
- Contributions multiply the weights of a tile by ‖v_j W_O‖, from the Gram matrix of W_O. A bias log ‖v_j W_O‖ of the
  scores ranks alike, but changes the sums of rows. The Gram matrix has head_dim² numbers; the projected values would
  have kv_len · width for each head.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.measures.base import Measure
from regard.measures.sums import Coarse, Distance, Entropy, Mass, Output, Position, Received, Spread, Sum
from regard.measures.topk import Contribution, MaxScore, MaxWeight, TopK, TopKResult

__all__ = [
    "Coarse",
    "Contribution",
    "Distance",
    "Entropy",
    "Mass",
    "MaxScore",
    "MaxWeight",
    "Measure",
    "Output",
    "Position",
    "Received",
    "Spread",
    "Sum",
    "TopK",
    "TopKResult",
]

set_public_module(globals())
