"""`regard.doctor` compares attention calls with the layers around them: heads, scale, norms, rotary positions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from regard import doctor  # noqa: E402
from tests.helpers.planted_bugs import make_inputs  # noqa: E402
from tests.helpers.planted_models import rotate  # noqa: E402

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 40, 4, 2, 12, 61


def errors(findings):
    return {finding.kind for finding in findings.by_severity("error")}


def kinds(findings):
    return {finding.kind for finding in findings}


class Norm(nn.Module):
    """RMSNorm with weights that differ."""

    def __init__(self, dim=HEAD_DIM):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight)


class Attention(nn.Module):
    """Grouped self-attention with rotary positions and norms of query and key, as an engineer might port it."""

    def __init__(self, **options):
        super().__init__()
        self.options = {
            "norms": "before",
            "order": (0, 0, 1, 1),
            "value_order": None,
            "scale": HEAD_DIM**-0.5,
        }
        self.options |= {"merge": (0, 2, 1, 3), "turns_values": False} | options
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, x, positions):
        options = self.options
        query, key, value = (
            linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if options["norms"] in ("before", "query only"):
            query = self.q_norm(query)
        if options["norms"] == "before":
            key = self.k_norm(key)
        query, key = (rotate(x, positions) for x in (query, key))
        if options["norms"] == "after":
            query, key = self.q_norm(query), self.k_norm(key)
        if options["turns_values"]:
            value = rotate(value, positions)
        key, value = key[:, options["order"]], value[:, options["value_order"] or options["order"]]
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options["scale"])
        return self.o_proj(output.permute(options["merge"]).flatten(2))


class Port(nn.Module):
    """Two layers of attention."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention(**options) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.25)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        x = self.embed(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), positions)
        return x


def test_a_healthy_port_has_no_findings():
    assert doctor(Port(), make_inputs()) == []


# -- Heads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["before", "none"])
@pytest.mark.parametrize("orders", [((0, 0, 0, 0), None), ((0, 0, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), None)])
def test_heads_of_a_projection_that_no_query_head_uses_are_found(norms, orders):
    findings = doctor(Port(norms=norms, order=orders[0], value_order=orders[1]), make_inputs())
    found = [finding for finding in findings if finding.kind == "key heads not used"]
    assert [finding.layer for finding in found] == [0, 1] and errors(findings) == {"key heads not used"}, (
        findings
    )
    used = (orders[1] or orders[0])[0]
    assert found[0].evidence["heads used"] == str(used)
    assert found[0].evidence["projection"] == "layers.0.v_proj"


def test_key_heads_that_no_query_head_uses_are_found_by_their_lengths():
    """If the values are right and no norm hides the lengths of the keys."""
    findings = doctor(Port(norms="none", order=(0, 0, 0, 0), value_order=(0, 0, 1, 1)), make_inputs())
    (first, _) = [finding for finding in findings if finding.kind == "key heads not used"]
    assert first.evidence["projection"] == "layers.0.k_proj"


def test_heads_that_are_merged_channel_by_channel_are_a_warning():
    findings = doctor(Port(merge=(0, 2, 3, 1)), make_inputs())
    assert [(finding.kind, finding.severity) for finding in findings] == [
        ("heads merged channel by channel", "warning")
    ] * 2
    assert findings[0].evidence["input of the next layer"] == "layers.0.o_proj"


# -- Scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["before", "none"])
@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (1 / HEAD_DIM, "1/head_dim"),
        ((2 * HEAD_DIM) ** -0.5, "1/√(2 · head_dim)"),
        ((KV_HEADS * HEAD_DIM) ** -0.5, "1/√(kv_heads · head_dim)"),
        (WIDTH**-0.5, "1/√width"),
    ],
)
def test_a_wrong_scale_is_named_with_and_without_a_norm_of_the_query(norms, scale, name):
    findings = doctor(Port(norms=norms, scale=scale), make_inputs())
    found = [finding for finding in findings if finding.kind == "scale"]
    assert len(found) == 2 and name in found[0].message, findings
    assert found[0].severity == "warning" and not errors(findings)


@pytest.mark.parametrize("scale", [0.1, 0.2])
def test_a_query_with_a_norm_may_have_a_scale_of_its_own(scale):
    assert doctor(Port(scale=scale), make_inputs()) == []


def test_the_scale_of_a_configuration_is_compared_with_that_of_the_call():
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, max_position_embeddings=64, query_pre_attn_scalar=16, sliding_window=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    assert "scale" not in kinds(doctor(model, make_inputs()))
    for layer in model.model.layers:
        layer.self_attn.scaling = 8**-0.5
    found = [finding for finding in doctor(model, make_inputs()) if finding.kind == "scale"]
    assert len(found) == 2 and found[0].evidence["the scale of the configuration"] == 0.25


# -- Norms and values -------------------------------------------------------------------------------------


def test_a_norm_after_rotary_positions_is_a_warning():
    findings = doctor(Port(norms="after"), make_inputs())
    found = [finding for finding in findings if finding.kind == "norm after rotary"]
    assert {finding.severity for finding in found} == {"warning"} and not errors(findings), findings
    assert found[0].layer == 0 and "q_norm" in found[0].evidence["norm"]


def test_a_norm_after_rotary_positions_that_keeps_the_pairs_is_none():
    model = Port(norms="after")
    for layer in model.layers:
        for norm in (layer.q_norm, layer.k_norm):
            nn.init.ones_(norm.weight)
    assert doctor(model, make_inputs()) == []


@pytest.mark.parametrize("norms", ["before", "none"])
def test_values_that_turn_are_found(norms):
    findings = doctor(Port(turns_values=True, norms=norms), make_inputs())
    found = [finding for finding in findings if finding.kind == "rotary: values rotated"]
    assert [finding.layer for finding in found] == [0] and errors(findings) == {"rotary: values rotated"}, (
        findings
    )


@pytest.mark.parametrize(("norms", "unused"), [("none", ("q_norm", "k_norm")), ("query only", ("k_norm",))])
def test_norms_that_are_never_called_are_a_warning(norms, unused):
    model = Port(norms=norms)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    findings = doctor(model, make_inputs())
    assert [(finding.kind, finding.severity, finding.layer) for finding in findings] == [
        ("weights without effect", "warning", layer) for layer in (0, 1)
    ]
    for layer, finding in enumerate(findings):
        assert finding.evidence["norms"] == ", ".join(f"layers.{layer}.{name}" for name in unused)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


class FunctionalNorms(Attention):
    """Reads the weights of its norms, and does not call them."""

    def forward(self, x, positions):
        query, key, value = (
            linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = rotate(F.rms_norm(query, (HEAD_DIM,), self.q_norm.weight), positions)
        key = rotate(F.rms_norm(key, (HEAD_DIM,), self.k_norm.weight), positions)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).flatten(2))


def test_norms_whose_weights_are_read_without_a_call_have_an_effect():
    model = Port()
    model.layers = nn.ModuleList(FunctionalNorms() for _ in range(2))
    assert "weights without effect" not in kinds(doctor(model, make_inputs()))


def test_the_weights_of_norms_are_restored_if_the_model_fails():
    model, weights = Port(norms="none"), {}

    def fail_if_changed(module, args):
        changed = [
            name for name, weight in module.state_dict().items() if not torch.equal(weight, weights[name])
        ]
        if changed:
            raise ValueError(f"changed {changed}")

    weights.update({name: weight.clone() for name, weight in model.state_dict().items()})
    model.register_forward_pre_hook(fail_if_changed)
    findings = doctor(model, make_inputs())
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert "weights without effect" not in kinds(findings)


def build_text_model(name, **options):
    import transformers

    sizes = {
        "vocab_size": 61, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32,
        "pad_token_id": 1, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    }  # fmt: skip
    model_class, config_class = f"{name}Model", f"{name}Config"
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes, **options)).eval()


@pytest.mark.parametrize("name", ["OPT", "Bart", "Roberta", "Bert", "Nystromformer"])
def test_tables_of_positions_that_are_read_from_their_offset_are_healthy(name):
    assert "position table offset" not in kinds(doctor(build_text_model(name), make_inputs()))


@pytest.mark.parametrize(("name", "tables"), [("OPT", ["decoder"]), ("Bart", ["encoder", "decoder"])])
def test_a_table_of_positions_that_is_read_from_its_first_row_is_found(name, tables):
    model = build_text_model(name)
    for part in tables:
        getattr(model, part).embed_positions.offset = 0
    found = [finding for finding in doctor(model, make_inputs()) if finding.kind == "position table offset"]
    assert [(finding.module, finding.severity) for finding in found] == [
        (f"{part}.embed_positions", "error") for part in tables
    ]
    assert found[0].evidence["rows"] == 66
