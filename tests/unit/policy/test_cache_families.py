"""Every family of the guide's table is supported, with the outputs of the masks, or rejected by name."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

import regard  # noqa: E402
import regard.transformers  # noqa: E402
from regard.errors import ArgumentError  # noqa: E402
from regard.families import TESTED_CACHES  # noqa: E402
from regard.policy import FULL, CachePolicy  # noqa: E402
from tests.helpers.base_models import VARIANTS, shrink  # noqa: E402
from tests.helpers.policy_caches import run_cached  # noqa: E402
from tests.helpers.tiny_models import softmax_in_own_dtype  # noqa: E402

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "22-policy-cache.md"
TABLE = GUIDE.read_text().split("## Which families are supported")[1].split("## Export")[0]
FAMILIES = {
    family: row.split("|")[2].strip().split(";")[0].split(":")[0]
    for row in TABLE.splitlines()
    if row.startswith("| `")
    for family in re.findall(r"`([^`]+)`", row.split("|")[1])
}
CHUNKS = [9, 2, 1, 1, 7, 1, 1, 1]
# Routers and recurrent layers of some families compute in float32 whatever the dtype of the model.
TOLERANCE = 1e-5


def build(config_class: Any) -> Any:
    """Build a tiny model of a family, in the first variant that runs."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    for variant in VARIANTS:
        try:
            config = config_class()
            shrink(config, variant)
            if getattr(config, "is_decoder", None) is False:
                config.is_decoder = True
            text = config.get_text_config(decoder=True)
            if isinstance(getattr(text, "sliding_window", None), int):
                text.sliding_window = 6
            has_experts = any("expert" in name for name in vars(text))
            options = {"experts_implementation": "eager"} if has_experts else {}
            torch.manual_seed(0)
            model = model_class._from_config(copy.deepcopy(config), **options).eval().double()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape) * 0.1)
                model(torch.arange(3, 12)[None])
        except Exception as error:
            reason = error
            continue
        return model
    raise AssertionError(f"no variant runs: {reason}")


def test_the_table_is_read():
    assert FAMILIES["llama"] == "supported" and FAMILIES["falcon"] == "rejected" and len(FAMILIES) > 100
    assert {family for family, result in FAMILIES.items() if result == "supported"} == TESTED_CACHES


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_family(family):
    config_class = next(found for found in MODEL_FOR_CAUSAL_LM_MAPPING if found.model_type == family)
    model = build(config_class)
    tokens = torch.randint(3, 90, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(0))
    config = model.config.get_text_config(decoder=True)
    if FAMILIES[family] == "rejected":
        shape = (getattr(config, "num_hidden_layers", 2), getattr(config, "num_attention_heads", 4))
        policy = CachePolicy(
            np.full(shape, 3), np.ones(shape, int), [str(layer) for layer in range(shape[0])]
        )
        with pytest.raises(ArgumentError, match=type(model).__name__):
            policy.cache(model)
        return
    model.set_attn_implementation("regard")
    with regard.watch(model) as recording:
        model(tokens, use_cache=False)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    random, shape = np.random.default_rng(0), (len(recording), kv_heads)
    windows, sinks = random.choice([FULL, 2, 3, 5], shape), random.choice([0, 1, 3], shape)
    policy = CachePolicy(windows, sinks, list(recording), {"num_heads": heads})
    if FAMILIES[family] == "rejected in the first forward pass":
        with pytest.raises(ArgumentError, match=type(model).__name__):
            run_cached(model, policy.cache(model), tokens, CHUNKS)
        return
    with softmax_in_own_dtype():
        plain = model(tokens, use_cache=False).logits
        with regard.intervene(model, policy.edits()):
            expected = model(tokens, use_cache=False).logits
        logits = run_cached(model, policy.cache(model), tokens, CHUNKS)
    assert (logits - expected).abs().max() < TOLERANCE < 1e-2 < (plain - expected).abs().max()
