"""Scripts that users write for `output_attentions=True`: unchanged but for `attn_implementation`."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard.testing import assert_matches  # noqa: E402
from regard.transformers import AttentionWeights  # noqa: E402
from tests.helpers import attention_scripts as scripts  # noqa: E402
from tests.helpers.tiny_models import softmax_in_own_dtype  # noqa: E402

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """The same model three times: by regard, by eager attention, and by eager attention in float64."""
    built = {}
    for name, implementation in {"regard": "regard", "eager": "eager", "exact": "eager"}.items():
        torch.manual_seed(0)
        config = hf.LlamaConfig(**SIZES, **HEADS, **TOKENS, initializer_range=0.2)
        built[name] = hf.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
    built["exact"].double()
    return built


def run(models: dict[str, Any], length: int, script: Any) -> tuple[Any, Any, Any]:
    """Run a script on the output of each model."""
    tokens = torch.randint(3, 61, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), softmax_in_own_dtype():
        ours, eager, exact = (script(model, tokens) for model in models.values())
    return ours, eager, exact


READERS = [
    scripts.attention_to_first_token,
    scripts.last_row_of_the_head_mean,
    scripts.received_by_each_token,
]


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_readers(models, read):
    ours, eager, exact = run(models, 67, lambda model, tokens: read(model(tokens, output_attentions=True)))
    assert_matches(ours, exact, eager, dtype="float32")


def test_the_tokens_that_fastv_keeps(models):
    def select(model: Any, tokens: Any) -> Any:
        outputs = model(tokens, output_attentions=True)
        return scripts.select_image_tokens(outputs, layer=2, first=5, count=40, keep=20)

    ours, eager, exact = run(models, 67, select)
    assert torch.equal(ours, exact) and torch.equal(eager, exact) and len(ours) == 47


def test_lookback_ratios(models):
    def generate(model: Any, tokens: Any) -> Any:
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        mask = torch.ones_like(tokens)
        options |= {"attention_mask": mask, "output_attentions": True, "return_dict_in_generate": True}
        return scripts.lookback_ratios(model.generate(tokens, **options), tokens.shape[1])

    ours, eager, exact = run(models, 31, generate)
    assert ours.shape == (11, 3, 4)
    assert_matches(ours, exact, eager, dtype="float32")


def test_rollout_needs_one_more_line(models):
    tokens = torch.randint(3, 61, (1, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        lazy = models["regard"](tokens, output_attentions=True).attentions
        eager = models["eager"](tokens, output_attentions=True).attentions
    with pytest.raises(
        AttributeError, match=r"no 'squeeze'.* attentions = \[weights.to_dense\(\) for weights"
    ):
        scripts.rollout(lazy)
    attentions = [weights.to_dense() for weights in lazy]
    ours = scripts.rollout(attentions)
    assert torch.allclose(ours, scripts.rollout(eager), atol=1e-6)
    assert torch.allclose(ours.sum(-1), torch.ones(512), atol=1e-5)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:unclosed file .*head_view.js:ResourceWarning")  # of BertViz 1.4.1
def test_bertviz_needs_one_more_line(models):
    bertviz = pytest.importorskip("bertviz")
    tokens = torch.randint(3, 61, (1, 512), generator=torch.Generator().manual_seed(1))
    words = [f"token{i}" for i in tokens[0].tolist()]
    with torch.no_grad():
        lazy = models["regard"](tokens, output_attentions=True).attentions[:1]
        eager = models["eager"](tokens, output_attentions=True).attentions[:1]
    assert all(isinstance(weights, AttentionWeights) for weights in lazy)
    with pytest.raises(AttributeError, match=r"attentions = \[weights.to_dense\(\)"):
        bertviz.head_view(lazy, words, html_action="return")
    attentions = [weights.to_dense() for weights in lazy]
    page, expected = (
        bertviz.head_view(each, words, html_action="return").data for each in (attentions, eager)
    )
    numbers, others = (re.findall(r"(?<=[\[ ])\d\.[\d.e-]+", text) for text in (page, expected))
    assert len(numbers) == len(others) > 200_000
    assert max(abs(float(a) - float(b)) for a, b in zip(numbers, others, strict=True)) < 1e-6
