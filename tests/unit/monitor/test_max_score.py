"""`MaxScore` as the monitor logs it equals the dense maximum: grouped heads, masks, score modifications and sinks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import regard

N, HEADS = 29, 4
POSITION = torch.arange(N)
CAUSAL = POSITION[:, None] >= POSITION
KEEP = torch.arange(N) < 20
SLOPES = torch.tensor([2.0 ** -(2 * (head + 1)) for head in range(HEADS)], dtype=torch.float64)
DISTANCE = (POSITION[:, None] - POSITION).double()

# Arguments of `regard.attention`, and what a score_mod and a mask_mod of FlexAttention would do to the scaled scores.
CASES = {
    "plain": ({}, lambda s: s),
    "causal": ({"mask": regard.causal()}, lambda s: s.masked_fill(~CAUSAL, -math.inf)),
    "window": (
        {"mask": regard.causal() & regard.sliding_window(5)},
        lambda s: s.masked_fill(~(CAUSAL & (DISTANCE < 5)), -math.inf),
    ),
    "padding": ({"mask": regard.padding(20)}, lambda s: s.masked_fill(~KEEP, -math.inf)),
    "softcap": ({"score_mod": regard.softcap(3.0)}, lambda s: 3 * torch.tanh(s / 3)),
    "bias": (
        {"score_mod": regard.score_mods.bias((-SLOPES[:, None, None] * DISTANCE.abs()).float())},
        lambda s: s - SLOPES[:, None, None] * DISTANCE.abs(),
    ),
    "sink": (
        {"sink": torch.full((HEADS,), 50.0), "mask": regard.causal()},
        lambda s: s.masked_fill(~CAUSAL, -math.inf),
    ),
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_max_score_equals_the_dense_maximum(case: str, kv_heads: int) -> None:
    arguments, modify = CASES[case]
    generator = torch.Generator().manual_seed(7)
    query = 3 * torch.randn(2, HEADS, N, 8, generator=generator)
    key = torch.randn(2, kv_heads, N, 8, generator=generator)
    A = regard.attention(query, key, enable_gqa=kv_heads != HEADS, **arguments)
    scores = query.double() @ key.double().repeat_interleave(HEADS // kv_heads, 1).mT / math.sqrt(8)
    expected = modify(scores).amax(-1)
    np.testing.assert_allclose(A.measure(regard.MaxScore()).max_score, expected, rtol=1e-5, atol=1e-6)
