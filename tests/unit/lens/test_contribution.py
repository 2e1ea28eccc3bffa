"""Contributions ‖w v W_O‖: `measures.Contribution`, `Recording.value_norms` and `find(by="contribution")`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.measures import Contribution  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

# Name of the output projection inside each family, relative to the attention layer that is captured.
PROJECTIONS = {
    "GPT-2": "c_proj", "BERT": "../output.dense", "Llama": "o_proj", "Mistral": "o_proj", "Qwen3": "o_proj",
    "T5": "o", "BART": "out_proj", "ViT": None, "DeepSeek-V3": "o_proj", "Gemma 2": "o_proj", "GPT-OSS": "o_proj",
}  # fmt: skip


def record(name, side="none"):
    family = TINY[name]
    model, inputs = family.build(), family.inputs(side)
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        model(**inputs)
    return model, inputs, recording


def find_by_hand(recording, model, layer):
    """Compute ‖w v W_O‖ of every edge, (batch, heads, q_len, kv_len), with each vector written down."""
    projection = model.get_submodule(recording._projections[layer].module)
    weight = projection.weight.detach().double()
    weight = weight if type(projection).__name__ == "Conv1D" else weight.T
    (call,) = recording.calls(layer)
    heads = call.shape[-3]
    value = call.value.double().repeat_interleave(heads // call.value.shape[-3], -3)
    mapped = torch.einsum("bhjd,hdw->bhjw", value, weight.unflatten(0, (heads, -1)))
    return (call.matrix.to_dense().double()[..., None] * mapped[:, :, None]).norm(dim=-1)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_norms_and_largest_contributions_equal_those_by_hand(name, small):
    model, _, recording = record(name)
    for layer in recording:
        assert layer in recording._projections, recording._projections.find_fault(layer)
        if PROJECTIONS[name] is not None:
            base = layer.rpartition(".")[0] if PROJECTIONS[name].startswith("../") else layer
            expected = f"{base}.{PROJECTIONS[name].removeprefix('../')}"
            assert recording._projections[layer].module == expected
        by_hand = find_by_hand(recording, model, layer)
        A, norms = recording[layer], recording.value_norms(layer)
        torch.testing.assert_close(A.to_dense() * norms[..., None, :], by_hand, rtol=1e-5, atol=1e-7)
        top = A.measure(Contribution(3, norms)).contribution
        torch.testing.assert_close(top.values, by_hand.topk(3).values, rtol=1e-5, atol=1e-7)
        picked = by_hand.gather(-1, top.indices)
        torch.testing.assert_close(picked, top.values, rtol=1e-5, atol=1e-7)


def test_the_bias_of_the_scores_gives_the_same_order():
    """Adding log ‖v W_O‖ to the scores changes a row by one factor only, so it ranks keys as contributions do."""
    _, _, recording = record("Llama")
    layer = next(iter(recording))
    (call,), norms = recording.calls(layer), recording.value_norms(layer)
    biased = regard.attention(
        call.query, call.key, mask=call.mask, scale=call.scale, enable_gqa=True,
        score_mod=regard.score_mods.bias(norms.log()[..., None, :]),
    )  # fmt: skip
    top = recording[layer].measure(Contribution(4, norms)).contribution
    factor = (recording[layer].lse - biased.lse).exp()[..., None]
    torch.testing.assert_close(biased.topk(4).values / factor, top.values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_the_table_of_heads_has_what_each_head_adds(name):
    """The mean over tokens, padding left out, of the length of a head's output after its projection."""
    model, inputs, recording = record(name, "right")
    table = recording.heads()
    real = inputs["attention_mask"].bool()
    for row in table:
        layer, head = row["module"], row["head"]
        weight = recording._projections[layer].weight[head].double()
        lengths = (recording.calls(layer)[0].output[:, head].double() @ weight).norm(dim=-1)
        assert row["contribution"] == pytest.approx(float(lengths[real].mean()), rel=1e-6)
    with torch.no_grad(), regard.watch(model) as without:
        model(**inputs)
    assert "contribution" not in without.heads().columns


def test_find_by_contribution_ranks_by_what_is_carried():
    model, inputs, recording = record("Llama")
    tokens = [f"t{token}" for token in inputs["input_ids"][0].tolist()]
    table = recording.find(7, 2, tokens, by="contribution")
    contributions = table.column("contribution")
    assert contributions == sorted(contributions, reverse=True) and len(table) == 8
    for row in table:
        by_hand = find_by_hand(recording, model, row["module"])
        assert row["contribution"] == pytest.approx(float(by_hand[0, row["head"], 7, 2]), rel=1e-4)
        assert row["weight"] == pytest.approx(float(recording[row["module"]][0, row["head"], 7, 2]), rel=1e-4)
    weights = recording.find(7, 2, tokens)
    assert "contribution" not in weights.columns
    order, by_weight = ([(row["module"], row["head"]) for row in rows] for rows in (table, weights))
    assert sorted(order) == sorted(by_weight) and order != by_weight


def test_of_several_occurrences_the_largest_contribution_is_found():
    model, _, recording = record("BERT")
    tokens = ["a", "b"] * 5 + ["a"]
    for row in recording.find("a", "b", tokens, batch=1, by="contribution"):
        by_hand = find_by_hand(recording, model, row["module"])[1, row["head"], ::2, 1::2]
        assert row["contribution"] == pytest.approx(float(by_hand.amax()), rel=1e-4)


def test_layers_of_torch_and_of_regard_have_projections():
    encoder = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    for mode in (encoder.train(), encoder.eval()):
        with torch.no_grad(), regard.watch(mode, values=True) as recording:
            mode(x)
        by_hand = find_by_hand(recording, encoder, "self_attn")
        norms = recording.value_norms("self_attn")
        torch.testing.assert_close(
            recording["self_attn"].to_dense() * norms[..., None, :], by_hand, rtol=1e-5, atol=1e-7
        )
    own = nn.ModuleDict({"layer": regard.nn.MultiheadAttention(16, 4, num_kv_heads=2)})
    with torch.no_grad(), regard.watch(own, values=True) as recording:
        own["layer"](x)
    by_hand = find_by_hand(recording, own, "layer")
    norms = recording.value_norms("layer")
    torch.testing.assert_close(
        recording["layer"].to_dense() * norms[..., None, :], by_hand, rtol=1e-5, atol=1e-7
    )


class Gated(nn.Module):
    """Attention whose output is multiplied by a gate before its projection, or read by two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.first, self.second, self.kind = (
            nn.Linear(8, 24),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            kind,
        )

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.first(out * x.sigmoid()) if self.kind == "gate" else self.first(out) + self.second(out)


@pytest.mark.parametrize(
    ("kind", "reason"), [("gate", "no linear layer reads its output"), ("two", "several layers")]
)
def test_layers_without_one_projection_are_refused_with_the_reason(kind, reason):
    model = nn.ModuleDict({"layer": Gated(kind)})
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        model["layer"](torch.randn(1, 5, 8))
    with pytest.raises(ArgumentError, match=reason):
        recording.value_norms("layer")


def test_what_is_missing_is_named(tmp_path):
    pytest.importorskip("safetensors")
    model, inputs, recording = record("GPT-2")
    with torch.no_grad(), regard.watch(model) as without:
        model(**inputs)
    with pytest.raises(ArgumentError, match="value was not recorded"):
        without.find(3, 1, by="contribution")
    with pytest.raises(ArgumentError, match="by='norm'"):
        recording.find(3, 1, by="norm")
    recording.save(tmp_path / "recording.safetensors")
    loaded = regard.load_recording(tmp_path / "recording.safetensors")
    with pytest.raises(ArgumentError, match="Record them"):
        loaded.find(3, 1, by="contribution")


def test_watching_values_leaves_no_hooks_and_no_outputs():
    model, _, recording = record("Llama")
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not recording._projections._pending
