"""Scaled dot-product attention in four steps, written to be read.

    1. compare     scores  = Q Kᵀ               how well does each query match each key?
    2. scale       scaled  = scores / √d_k      keep the scores the same size in any dimension
    3. normalise   weights = softmax(scaled)    turn each row into shares that sum to 1
    4. aggregate   output  = weights V          mix the values by their shares

The book, the code page and the solution of exercise 8 print this class, so it has no checks and no types; the types
are in `attention.pyi`. `CheckedAttention` adds what the class leaves out.
"""

import math

import numpy as np


class ScaledDotProductAttention:
    """Attention in four steps; `forward` runs all of them."""

    def __init__(self, d_k):
        self.d_k = d_k
        self.scale = 1 / math.sqrt(d_k)

    def compute_scores(self, Q, K):
        return Q @ K.swapaxes(-1, -2)

    def scale_scores(self, scores):
        return scores * self.scale

    def compute_weights(self, scaled, mask=None):
        if mask is not None:
            scaled = np.where(mask, scaled, -np.inf)
        parts = np.exp(scaled - scaled.max(-1, keepdims=True))
        return parts / parts.sum(-1, keepdims=True)

    def compute_output(self, weights, V):
        return weights @ V

    def forward(self, Q, K, V, mask=None):
        scores = self.compute_scores(Q, K)
        scaled = self.scale_scores(scores)
        weights = self.compute_weights(scaled, mask)
        return self.compute_output(weights, V), weights
