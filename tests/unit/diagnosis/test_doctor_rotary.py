"""`regard.doctor` compares rotary positions with the configuration: scaling, theta, share and factor."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard import doctor  # noqa: E402
from tests.helpers.healthy_models import GROUPED, SIZES  # noqa: E402
from tests.helpers.planted_bugs import make_inputs  # noqa: E402
from tests.unit.diagnosis.test_doctor_layers import HEAD_DIM, Port  # noqa: E402

KIND = "rotary: not as configured"
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0, 2.0, 2.5, 3.0], "long_factor": [1.0, 4.0, 6.0, 8.0], "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def build(rope_type="default", model="Llama", **options):
    """Build a tiny model; head_dim is 8."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **ROPES[rope_type], **options.pop("rope", {})}
    sizes = SIZES | GROUPED | {"max_position_embeddings": 128, "rope_parameters": rope} | options
    torch.manual_seed(0)
    model = getattr(hf, f"{model}ForCausalLM")(getattr(hf, f"{model}Config")(**sizes)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model


def list_findings(model):
    return [finding for finding in doctor(model, make_inputs()) if finding.kind.startswith("rotary")]


@pytest.mark.parametrize(
    ("model", "rope_type"),
    [(model, kind) for model in ("Llama", "Qwen3") for kind in ROPES] + [("Phi3", "longrope")],
)
def test_a_model_that_follows_its_configuration_has_no_findings(model, rope_type):
    options = {"Qwen3": {"head_dim": 8}, "Phi3": {"original_max_position_embeddings": 64}}.get(model, {})
    assert list_findings(build(rope_type, model, **options)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn", "longrope"])
def test_a_scaling_that_was_forgotten_is_named(rope_type, dtype):
    model = build(rope_type).to(dtype)
    model.model.rotary_emb.inv_freq = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    if rope_type == "longrope":  # which computes its frequencies again
        model.model.rotary_emb.original_inv_freq = model.model.rotary_emb.inv_freq
        model.model.rotary_emb.rope_type = "default"
    found = list_findings(model)
    assert [(finding.kind, finding.layer, finding.severity) for finding in found] == [
        (KIND, 0, "error"), (KIND, 1, "error"),
    ]  # fmt: skip
    assert "not scaled" in found[0].message and rope_type in found[0].message
    assert found[0].evidence["measured (rad)"] != found[0].evidence["configured"]


def test_the_scaling_of_slow_pairs_alone_is_compared():
    """As in Llama 3.1, where only pairs change that turn by less than 0.003 radians per token."""
    rope = {"rope_theta": 5e5, "original_max_position_embeddings": 8192}
    model = build("llama3", rope=rope, head_dim=64, max_position_embeddings=131072)
    assert list_findings(model) == []
    model.model.rotary_emb.inv_freq = 5e5 ** (-torch.arange(0, 64, 2) / 64)
    (first, _) = list_findings(model)
    assert "not scaled" in first.message and "pair" in first.evidence["configured"]


@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_an_attention_factor_that_was_forgotten_is_named(model, rope_type):
    model = build(rope_type, model, head_dim=8)
    factor = model.model.rotary_emb.attention_scaling
    assert factor > 1.05
    if rope_type == "longrope":
        model.model.rotary_emb.rope_type = "default"
    model.model.rotary_emb.attention_scaling = 1.0
    (first, _) = list_findings(model)
    assert first.kind == KIND and "attention factor" in first.message
    assert first.evidence["configured"] == pytest.approx(factor)


def test_another_theta_is_named():
    model = build()
    model.model.rotary_emb.inv_freq = 5e5 ** (-torch.arange(0, 8, 2) / 8)
    (first, _) = list_findings(model)
    assert "rope_theta is 500,000 instead of 10,000" in first.message


@pytest.mark.parametrize(("share", "size"), [(0.5, 8), (1.0, 4)])
def test_the_share_of_the_head_that_turns_is_compared(share, size):
    """In a model of transformers whose configuration states it."""
    rope = {"partial_rotary_factor": share}
    model = build(model="Glm", rope=rope, head_dim=8, pad_token_id=0)
    assert list_findings(model) == []
    model.model.rotary_emb.inv_freq = 1e4 ** (-torch.arange(0, size, 2) / size)
    (first, _) = list_findings(model)
    assert f"{size} channels of each head are rotated instead of {int(8 * share)}" in first.message


def test_the_configuration_of_a_port_is_read():
    model = Port()
    model.config = hf.LlamaConfig(**SIZES | {"hidden_size": 4 * HEAD_DIM, "rope_theta": 1e4})
    assert list_findings(model) == []
    model.config.rope_parameters["rope_theta"] = 5e5
    assert {finding.kind for finding in list_findings(model)} == {KIND}
    model.config = hf.LlamaConfig(**SIZES | {"head_dim": HEAD_DIM // 2})
    (first, _) = list_findings(model)
    assert "12 channels of each head are rotated instead of 6" in first.message


def test_each_type_of_layer_has_its_own_angles():
    types = ["sliding_attention", "full_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    sizes = (
        SIZES | GROUPED | {"head_dim": 8, "sliding_window": 64, "layer_types": types, "rope_parameters": rope}
    )
    torch.manual_seed(0)
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes)).eval()
    assert list_findings(model) == []
    rotary = model.model.rotary_emb
    rotary.full_attention_inv_freq = rotary.sliding_attention_inv_freq
    assert [(finding.kind, finding.layer) for finding in list_findings(model)] == [(KIND, 1)]


@pytest.mark.parametrize("name", ["Llama4Text", "SmolLM3", "Cohere2"])
def test_layers_without_positions_by_design_are_no_warning(name):
    options = SIZES | GROUPED | {"num_hidden_layers": 4, "head_dim": 8}
    if name == "Llama4Text":
        options |= {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 32}
    torch.manual_seed(0)
    model_class = hf.Llama4ForCausalLM if name == "Llama4Text" else getattr(hf, f"{name}ForCausalLM")
    model = model_class(getattr(hf, f"{name}Config")(**options)).eval()
    assert list_findings(model) == []


def test_a_layer_without_positions_that_nothing_states_is_a_warning():
    model = Port()
    model.layers.append(type(model.layers[0])())
    model.norms.append(type(model.norms[0])(40))
    model.eval().layers[1].forward = _without_positions(model.layers[1])
    (found,) = list_findings(model)
    assert (found.kind, found.severity, found.layer) == ("rotary: missing in some layers", "warning", 1)


def _without_positions(layer):
    forward = layer.forward
    return lambda x, positions: forward(x, torch.zeros_like(positions))
