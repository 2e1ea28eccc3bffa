"""`watch(values=True)`: outputs have the order of axes of SDPA, whichever attention function ran."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-OSS"])
def test_outputs_of_eager_attention_are_heads_first_and_join(name, prompt):
    model = TINY[name].build("eager")
    tokens = TINY[name].inputs("none")["input_ids"][:, :prompt]
    config = hf.GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    for layer in recording:
        (call,) = recording.calls(layer)
        assert call.output.shape == (2, 4, prompt + 2, 8)
        if call.value is not None:
            torch.testing.assert_close(call.matrix @ call.value, call.output, atol=1e-5, rtol=1e-4)
