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


@pytest.mark.parametrize("kernel", ["fused", "own softmax"])
def test_outputs_stay_as_they_were_if_the_layer_changes_them_in_place(kernel):
    class Attention(torch.nn.Module):
        def forward(self, x):
            if kernel == "fused":
                output = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            else:
                output = (x @ x.mT * 8**-0.5).softmax(-1) @ x
            output += 1
            return output

    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(Attention())
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        changed = model(x)
    (call,) = recording.calls("0")
    torch.testing.assert_close(call.output, changed - 1, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(call.output, call.matrix @ x, atol=1e-6, rtol=1e-5)
