"""`policy.export(…, "transformers")`: a model loaded with the configuration masks and evicts as the policy does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard.errors import ArgumentError  # noqa: E402
from regard.families import FAMILIES  # noqa: E402
from regard.policy import FULL  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.policy_caches import draw_tokens, make_policy, run_cached, run_masked  # noqa: E402

LENGTH, WINDOW = 23, 5
CHUNKS = ([LENGTH], [1] * LENGTH, [9, 2, 1, 1, 7, 3])
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "sliding_window": None, "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def build(config: Any) -> Any:
    torch.manual_seed(0)
    options = {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}
    model = hf.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="regard", **options
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    return model.double().eval()


def configure(family: str) -> Any:
    """Return a configuration without windows."""
    config = hf.AutoConfig.for_model(family)
    known = {name: size for name, size in SIZES.items() if hasattr(config, name)}
    if hasattr(config, "layer_types"):
        known["layer_types"] = ["full_attention"] * SIZES["num_hidden_layers"]
    if family in ("gemma2", "gpt_oss", "ministral"):
        known["sliding_window"] = 64  # which they need even if no layer uses it
    return type(config)(**known)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("qwen3", "phi3") else [pytest.mark.nightly])
        for family, facts in FAMILIES.items()
        if facts.windows
    ],
)
def test_a_model_with_the_configuration(tmp_path, family):
    model, tokens = build(configure(family)), draw_tokens(2, LENGTH)
    windows = [[FULL], [WINDOW], [WINDOW], [FULL]] if FAMILIES[family].windows == "by layer" else WINDOW
    policy = make_policy(model, windows)
    expected = run_masked(model, policy, tokens)
    assert not torch.allclose(model(tokens, use_cache=False).logits, expected, atol=1e-3)
    config = hf.AutoConfig.from_pretrained(policy.export(tmp_path, "transformers", config=model.config))
    changed = build(config)
    for chunks in CHUNKS:
        cache = policy.cache(changed)
        # The sliding layers of transformers serve families that list the type of each layer.
        assert isinstance(cache, hf.DynamicCache) == (FAMILIES[family].windows == "by layer")
        logits = run_cached(changed, cache, tokens, chunks)
        # Routers of some families compute in float32.
        dtype = "float64" if "moe" not in family else "float32"
        assert_matches(logits.numpy(), expected.numpy(), expected.numpy() + 1e-13, dtype=dtype, ordinary=True)


def test_what_a_configuration_cannot_say_is_refused(tmp_path):
    model = build(configure("qwen3"))
    refusals = [
        (make_policy(model, WINDOW, 2), "a policy with sinks"),
        (make_policy(model, [[WINDOW, FULL]]), "a layer whose heads differ"),
        (make_policy(model, [[3], [4], [4], [FULL]]), "windows of 3, 4 tokens"),
    ]
    for policy, message in refusals:
        with pytest.raises(ArgumentError, match=message):
            policy.export(tmp_path, "transformers", config=model.config)
    mixed = make_policy(model, [[3], [FULL], [FULL], [FULL]])
    with pytest.raises(ArgumentError, match="layers with and without a window in phi3"):
        mixed.export(tmp_path, "transformers", config=configure("phi3"))
    for family in ("llama", "gemma3_text", "cohere2"):
        with pytest.raises(ArgumentError, match=f"a configuration of {family}"):
            mixed.export(tmp_path, "transformers", config=configure(family))
    assert not list(tmp_path.iterdir())


def test_a_window_of_the_model_stays(tmp_path):
    config = configure("qwen3")
    config.layer_types[0], config.sliding_window, config.use_sliding_window = "sliding_attention", 4, True
    policy = make_policy(build(config), [[FULL], [4], [FULL], [9]])
    with pytest.raises(ArgumentError, match="windows of 4, 9"):
        policy.export(tmp_path, "transformers", config=config)
    policy = make_policy(build(config), [[6], [4], [FULL], [FULL]])
    exported = hf.AutoConfig.from_pretrained(policy.export(tmp_path, "transformers", config=config))
    assert exported.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    assert exported.sliding_window == 4
