"""`interventions.logit_attribution`: the parts of a model add up to its logit, in many families."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError, IndexOutOfRangeError  # noqa: E402
from regard.interventions import logit_attribution  # noqa: E402
from tests.helpers.tiny_models import TINY, TinyModel  # noqa: E402

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def family(name, config_name=None, **more):
    model_class = getattr(hf, f"{name}ForCausalLM")
    return TinyModel(model_class, getattr(hf, f"{config_name or name}Config")(**SIZES | more))


SHARED = ("GPT-2", "Llama", "Mistral", "Qwen3", "DeepSeek-V3", "Gemma 2", "GPT-OSS")
FAMILIES = {name: TINY[name] for name in SHARED} | {
    "Qwen2": family("Qwen2", num_key_value_heads=2),
    "Gemma": family("Gemma", **GROUPED),
    "Gemma 3": TinyModel(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**SIZES, **GROUPED, sliding_window=5)),
    "GPT-NeoX": family("GPTNeoX"),
    "Pythia, sequential": family("GPTNeoX", use_parallel_residual=False),
    "Phi": family("Phi"),
    "Phi-3": family("Phi3", num_key_value_heads=2),
    "OLMo 2": family("Olmo2", num_key_value_heads=2),
    "Granite": family(
        "Granite", num_key_value_heads=2, residual_multiplier=0.3, logits_scaling=4.0, embedding_multiplier=2.0
    ),
    "Cohere": family("Cohere", num_key_value_heads=2, logit_scale=0.5),
    "StableLM": family("StableLm", num_key_value_heads=2),
    "Starcoder2": family("Starcoder2", num_key_value_heads=2),
    "Falcon": TinyModel(
        hf.FalconForCausalLM,
        hf.FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
                        bos_token_id=1, eos_token_id=2),
    ),
    "OPT": TinyModel(
        hf.OPTForCausalLM,
        hf.OPTConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
                     max_position_embeddings=64, word_embed_proj_dim=32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("wrong", [None, 9])
def test_the_parts_add_up_to_the_logit(name, wrong):
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs("none")
    found = logit_attribution(model, inputs, 7, wrong, position=8, batch=1)
    with torch.no_grad():
        logits = model(**inputs).logits[1, 8].double()
    expected = float(logits[7] - (0 if wrong is None else logits[wrong]))
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        uncapped = torch.atanh(logits / cap) * cap
        expected = float(uncapped[7] - (0 if wrong is None else uncapped[wrong]))
    size = sum(abs(value) for value in found.parts.column("logit"))
    assert found.logit == pytest.approx(expected, abs=1e-5 * size)
    assert sum(found.parts.column("logit")) == pytest.approx(found.logit, abs=1e-5 * size)
    counts = {part: len(found.parts.filter(part=part)) for part in ("embedding", "head", "mlp")}
    assert counts == {"embedding": 1, "head": 8, "mlp": 2}
    # No part is a remainder that hides another: every head adds something.
    assert all(abs(row["logit"]) > 1e-6 for row in found.heads)


def watch_inputs(model, modules, inputs):
    """Run a model, and return the inputs and outputs of some modules at the last position of the first entry."""
    seen = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: seen.update(
                {name: (args[0][0, -1].double(), out[0, -1].double())}
            )
        )
        for name in modules
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def rms(x):
    return (x.square().mean() + 1e-6).sqrt()


@torch.no_grad()
def test_heads_of_gpt2_by_hand():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    found = logit_attribution(model, inputs, 7)
    seen = watch_inputs(
        model, ["transformer.ln_f", *(f"transformer.h.{i}.attn.c_proj" for i in (0, 1))], inputs
    )
    norm = model.transformer.ln_f
    stream = seen["transformer.ln_f"][0]
    direction = (model.lm_head.weight[7] * norm.weight).double() / (
        stream.var(unbiased=False) + norm.eps
    ).sqrt()
    for row in found.heads:
        merged = seen[f"transformer.h.{row['layer']}.attn.c_proj"][0]
        weight = model.transformer.h[row["layer"]].attn.c_proj.weight.double()
        rows = slice(8 * row["head"], 8 * row["head"] + 8)
        added = merged[rows] @ weight[rows]
        assert row["logit"] == pytest.approx(float((added - added.mean()) @ direction), rel=1e-5, abs=1e-7)


@torch.no_grad()
def test_heads_of_gemma_2_by_hand():
    """A norm follows each output projection, and the weight of every norm counts plus one."""
    model, inputs = TINY["Gemma 2"].build(), TINY["Gemma 2"].inputs("none")
    found = logit_attribution(model, inputs, 7)
    projections = [f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)]
    seen = watch_inputs(model, ["model.norm", *projections], inputs)
    stream = seen["model.norm"][0]
    direction = (model.lm_head.weight[7] * (1 + model.model.norm.weight)).double() / rms(stream)
    for row in found.heads:
        merged, projected = seen[projections[row["layer"]]]
        layer = model.model.layers[row["layer"]]
        rows = slice(8 * row["head"], 8 * row["head"] + 8)
        added = layer.self_attn.o_proj.weight[:, rows].double() @ merged[rows]
        added = added * (1 + layer.post_attention_layernorm.weight).double() / rms(projected)
        assert row["logit"] == pytest.approx(float(added @ direction), rel=1e-4, abs=1e-6)


def test_the_logit_of_the_trained_model_is_split():
    induction = pytest.importorskip("examples.induction")
    model, fresh = induction.load(), induction.draw_repeats(2, seed=1)
    position = int((fresh.source[0] >= 0).nonzero()[-2])
    answer = int(fresh.tokens[0, position + 1])
    found = logit_attribution(model, fresh.tokens, answer, position=position)
    with torch.no_grad():
        assert found.logit == pytest.approx(float(model(fresh.tokens)[0, position, answer]), rel=1e-4)
    assert sum(found.parts.column("logit")) == pytest.approx(found.logit, rel=1e-4)
    assert found.parts.filter(part="mlp") == []
    assert (
        found.heads[0]["layer"] == 1
    )  # induction heads write the answer; the head before them writes no logit


class PostNorm(nn.Module):
    """A causal model whose blocks normalise the stream itself, as the first transformers did."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(PostNormBlock() for _ in range(2))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class PostNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = regard.nn.MultiheadAttention(8, 2), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.attention(x, mask=regard.causal()))


class Pooled(PostNorm):
    """A classifier: one vector of logits for the whole text."""

    def forward(self, tokens):
        return super().forward(tokens)[:, -1]


def test_models_whose_parts_do_not_add_up_are_refused_with_the_reason():
    tokens = torch.arange(7)[None] + 3
    with pytest.raises(ArgumentError, match="is not its input plus"):
        logit_attribution(PostNorm(), tokens, 3)
    bert = hf.BertForMaskedLM._from_config(hf.BertConfig(**SIZES)).eval()
    with pytest.raises(ArgumentError, match="is not its input plus"):
        logit_attribution(bert, tokens, 3)
    with pytest.raises(ArgumentError, match="no linear layer computes its logits"):
        logit_attribution(TINY["Llama"].build().model, tokens, 3)
    with pytest.raises(ArgumentError, match="returns no logits"):
        logit_attribution(Pooled(), tokens, 3)
    with pytest.raises(ArgumentError, match="2 stacks"):
        logit_attribution(TINY["BART"].build(), {"input_ids": tokens, "decoder_input_ids": tokens}, 3)
    with pytest.raises(ArgumentError, match="without tokens"):
        logit_attribution(TINY["GPT-2"].build(), tokens[0], 3)
    model = TINY["GPT-2"].build()
    with pytest.raises(IndexOutOfRangeError, match="position=7"):
        logit_attribution(model, tokens, 3, position=7)
    with pytest.raises(IndexOutOfRangeError, match="answer=61"):
        logit_attribution(model, tokens, 61)


def test_half_precision_adds_up_to_its_rounding():
    model, inputs = TINY["Llama"].build(dtype=torch.bfloat16), TINY["Llama"].inputs("none")
    found = logit_attribution(model, inputs, 7)
    size = sum(abs(value) for value in found.parts.column("logit"))
    assert sum(found.parts.column("logit")) == pytest.approx(found.logit, abs=2e-2 * size)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 2", "Granite"])
def test_double_precision_adds_up_also_where_norms_compute_in_single(name):
    model, inputs = FAMILIES[name].build(dtype=torch.float64), FAMILIES[name].inputs("none")
    found = logit_attribution(model, inputs, 7)
    assert sum(found.parts.column("logit")) == pytest.approx(found.logit, rel=1e-5)
    single = logit_attribution(FAMILIES[name].build(), inputs, 7)
    for ours, theirs in zip(found.parts, single.parts, strict=True):
        assert ours["logit"] == pytest.approx(theirs["logit"], rel=1e-3, abs=1e-5)


def test_layer_and_head_are_integers_or_missing_in_data_frames():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    parts = logit_attribution(TINY["GPT-2"].build(), torch.arange(5)[None], 3).parts
    assert {type(row["head"]) for row in parts.filter(part="head")} == {int}
    assert parts.filter(part="embedding")[0]["layer"] is None and "–" in str(parts)
    for frame in (polars.DataFrame(parts), parts.to_polars()):
        assert frame.schema["layer"] == frame.schema["head"] == polars.Int64
        assert frame["head"].to_list() == parts.column("head")
    frame = parts.to_pandas()
    assert frame.dtypes["layer"] == frame.dtypes["head"] == pandas.Int64Dtype()
    assert frame["layer"].isna().tolist() == [layer is None for layer in parts.column("layer")]
    assert frame.loc[frame["part"] == "head", "head"].tolist() == parts.filter(part="head").column("head")
    assert frame.dtypes["logit"] == "float64" and frame["logit"].tolist() == parts.column("logit")
    assert [row["layer"] for row in parts.sort("layer", largest_first=False)][-1] is None
