"""The example of QK-clip: one correction brings the largest score of every head down to the limit."""

from __future__ import annotations

import pytest
import torch

from examples.qk_clip import clip_scores
from regard.learn.gpt import GPT, GPTConfig
from regard.monitor import Monitor


def test_clipped_heads_have_the_limit_as_largest_score() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=16, width=16, heads=4, layers=2))
    tokens = torch.randint(16, (2, 12))
    with torch.no_grad():
        model.layers[0].attention.q_proj.weight[4:8] *= 30  # head 1
    with Monitor(model, every=1, alarms=(), optimizer=None) as monitor:
        model(tokens)
        monitor.step()
        before = monitor.last_rows.filter(layer=0).column("max_score")
        limit = before[1] / 4
        assert sum(score > limit for score in before) == 1
        assert clip_scores(model, monitor.last_rows.filter(layer=0), limit) == 1
        model(tokens)
        monitor.step()
    after = monitor.last_rows.filter(layer=0).column("max_score")
    assert after[1] == pytest.approx(limit, rel=1e-5)
    assert after[:1] + after[2:] == before[:1] + before[2:]
