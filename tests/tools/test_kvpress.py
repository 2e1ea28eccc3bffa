"""kvpress: the observed-attention press reads lazy weights, and scores the keys as with eager attention."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from tests.tools import long_context
from tests.tools.measuring import measure
from tests.tools.models import build, draw_tokens


def check_equal(length):
    """Scores agree to rounding, and the kept keys are the same but for keys whose scores differ by rounding."""
    (eager, _), (ours, keys) = (long_context.press(name, length) for name in ("eager", "regard"))
    assert len(eager) == len(ours) == (1 if length > 1000 else 3)
    for a, b, kept in zip(eager, ours, keys, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-7)
        count = length // 2
        assert kept.shape[-2] == count
        chosen = [torch.zeros_like(a).scatter(-1, x.topk(count).indices, 1.0) for x in (a, b)]
        threshold = a.topk(count).values[..., -1:]
        differs = chosen[0] != chosen[1]
        assert bool(((a - threshold).abs() <= 1e-4 * threshold)[differs].all())


def test_scores_are_those_of_eager_attention():
    check_equal(300)


def test_8192_tokens_in_memory_that_grows_with_the_length(capsys):
    with capsys.disabled():
        print()
        peaks = {name: measure("kvpress", name, 8192) for name in ("regard", "eager")}
    assert peaks["regard"] < 200
    assert peaks["eager"] > 1000  # 2 heads · 8192² · 4 bytes are 512 MiB for each tensor of weights


def test_8192_tokens_are_scored_as_with_eager_attention():
    check_equal(8192)


@pytest.mark.parametrize("name", ["ObservedAttentionPress", "KnormPress", "SnapKVPress"])
def test_presses_generate_the_same_text(name):
    import kvpress  # warns, which pytest allows in tests of this folder and not while it collects them

    found = []
    for implementation in ("eager", "regard"):
        model = build("llama", implementation, max_position_embeddings=512)
        cache, tokens = hf.DynamicCache(), draw_tokens(1, 200, 1)
        press = getattr(kvpress, name)(compression_ratio=0.4)
        with torch.no_grad():
            with press(model):
                model.model(tokens[:, :-1], past_key_values=cache)
            assert cache.layers[0].keys.shape[-2] < 199
            positions = torch.tensor([[199]])
            found.append(model(tokens[:, -1:], past_key_values=cache, position_ids=positions).logits)
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)
