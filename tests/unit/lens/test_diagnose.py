"""`Recording.diagnose`: healthy models have no errors, and each fault put into one is found and located."""

from __future__ import annotations

import copy
import json
import re
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.families import UNSCALED_LAYERS  # noqa: E402
from tests.helpers.model_folders import build_gemma3_vlm  # noqa: E402
from tests.helpers.tiny_models import TINY, needs_t5_attention  # noqa: E402
from tests.helpers.torch_capabilities import runs_fused  # noqa: E402

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
REAL = torch.ones(2, 12, dtype=torch.long)


def padded(side):
    mask = REAL.clone()
    mask[1, slice(0, 4) if side == "left" else slice(8, 12)] = 0
    return mask


def ids():
    return torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=2, initializer_range=0.3, **options
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=32, initializer_range=0.3, **options)
    return transformers.BertModel(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=4, n_head=4, initializer_range=0.3
    )
    return transformers.GPT2LMHeadModel(config).eval()


class Plain(torch.nn.Module):
    """A hand-written causal model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 32)
        self.layers = torch.nn.ModuleList(Attention() for _ in range(3))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.options = {"is_causal": True}

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.options)
        return output.transpose(1, 2).flatten(2)


def watched(model, *args, **kwargs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(*args, **kwargs)
    return recording


# -- Healthy models ---------------------------------------------------------------------------------------


WAYS = [
    (name, side)
    for name, tiny in TINY.items()
    for side in ("none", *(["left", "right"] if tiny.pads else []), *(["generate"] if tiny.generates else []))
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_healthy_model_has_no_errors(name, way):
    """Twelve architectures, padded on either side, and generating."""
    tiny = TINY[name]
    model, inputs = tiny.build(), tiny.inputs("left" if way == "generate" and tiny.pads else way)
    if way == "left" and name in ("GPT-2", "BERT"):  # by default, their positions count padding
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    if way != "generate":
        found = watched(model, **inputs).diagnose(attention_mask=inputs.get("attention_mask"))
    else:
        inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
        with torch.no_grad(), regard.watch(model) as recording:
            model.generate(**inputs, max_new_tokens=4, do_sample=False)
        found = recording.diagnose(attention_mask=inputs.get("attention_mask"))
    assert found.by_severity("error") == [], found


def encoder():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 32, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def test_healthy_models_without_transformers_have_no_errors():
    assert watched(Plain(), ids()).diagnose().by_severity("error") == []
    real, x = padded("right"), torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    assert (
        watched(encoder(), x, src_key_padding_mask=real == 0)
        .diagnose(attention_mask=real)
        .by_severity("error")
        == []
    )
    recording = watched(bert(attn_implementation="eager"), ids(), attention_mask=real)
    assert recording.diagnose(attention_mask=real).by_severity("error") == []


def test_a_healthy_model_with_large_weights_has_no_findings():
    found = watched(llama(), ids(), attention_mask=padded("left")).diagnose(attention_mask=padded("left"))
    assert found == [], found
    assert repr(found).startswith("No problems found in 4 layers, 16 heads.\n\nrun      NaN or inf\n")
    not_run = {check.name: check.reason for check in found.checks if check.reason}
    assert not_run["positions of cached steps"] == "only one pass was recorded, without cached steps"
    assert "weight on padding" not in not_run and "weight on the future" not in not_run


# -- Faults -----------------------------------------------------------------------------------------------


@contextmanager
def replace_attribute(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def get_attention(model, number):
    return dict(model.named_modules())[f"model.layers.{number}.self_attn"]


def without_mask(module):
    """Drop the mask that a layer is passed."""
    forward = module.forward

    def dropping(*args, **kwargs):
        return forward(*args, **(kwargs | {"attention_mask": None}))

    return replace_attribute(module, "forward", dropping)


def with_mask(module, change):
    forward = module.forward

    def changed(*args, **kwargs):
        return forward(*args, **(kwargs | {"attention_mask": change(kwargs["attention_mask"])}))

    return replace_attribute(module, "forward", changed)


def find_only(recording, kind, **options):
    """Return the one finding of a kind, and check that no other is an error or warning."""
    found = [
        finding
        for finding in recording.diagnose(**options)
        if finding.severity != "note" or finding.kind == kind
    ]
    assert [finding.kind for finding in found] == [kind], recording.diagnose(**options)
    (finding,) = found
    assert finding.evidence and finding.hint.endswith(".") and finding.kind in str(finding)
    assert max(map(len, str(finding).splitlines())) <= 92
    json.dumps(finding.as_dict())
    return finding


def test_fault_1_a_layer_that_attends_to_the_future():
    model = Plain()
    model.layers[1].options = {}
    finding = find_only(watched(model, ids()), "weight on the future")
    assert (finding.severity, finding.layer, finding.module) == ("error", 1, "layers.1")
    assert finding.heads == () and finding.rows == tuple(range(11))  # the last token has no future
    assert 0 < finding.evidence["mean share"] < 1


def test_fault_1_all_layers_attend_to_the_future_and_their_modules_are_causal():
    model = llama()
    for layer in range(4):
        get_attention(model, layer).is_causal = True
    mask = torch.zeros(2, 1, 12, 12)
    found = watched(model.model, ids(), attention_mask=mask).diagnose()
    assert [(finding.kind, finding.layer) for finding in found.by_severity("error")] == [
        ("weight on the future", i) for i in range(4)
    ]
    assert watched(model.model, ids(), attention_mask=mask).diagnose(causal=False).by_severity("error") == []


def test_a_bidirectional_prefix_is_a_warning():
    model = Plain()
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:, :5] = True
    for layer in model.layers:
        layer.options = {"attn_mask": mask}
    found = watched(model, ids()).diagnose(causal=True)
    assert {(finding.kind, finding.severity, finding.rows) for finding in found} == {
        ("weight on the future", "warning", (0, 1, 2, 3))
    }


def image_inputs(side="none"):
    """Return two texts, each with an image of four tokens, the second padded on a side."""
    tokens = torch.randint(5, 200, (2, 14), generator=torch.Generator().manual_seed(0))
    tokens[0, 3:7] = tokens[1, 5:9] = 290
    real = torch.ones_like(tokens)
    if side != "none":
        real[1, slice(3) if side == "left" else slice(-3, None)] = 0
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    types = (tokens == 290).long()
    return {"input_ids": tokens, "attention_mask": real, "pixel_values": images, "token_type_ids": types}


@pytest.mark.parametrize("way", ["none", "left", "right", "generate", "twice"])
def test_tokens_of_an_image_may_attend_to_each_other(way, tmp_path):
    model, inputs = build_gemma3_vlm(), image_inputs(way if way in ("left", "right") else "none")
    with torch.no_grad(), regard.watch(model) as recording:
        if way == "generate":
            model.generate(**inputs, max_new_tokens=3, do_sample=False)
        else:
            model(**inputs)
        if way == "twice":
            swapped = {name: tensor.flip(0) for name, tensor in inputs.items()}
            model(**swapped)
    assert recording.diagnose().by_severity("error") == []
    recording.save(tmp_path / "recording.safetensors")
    again = regard.load_recording(tmp_path / "recording.safetensors")
    assert again.diagnose().by_severity("error") == []


def test_weight_on_the_future_outside_an_image_is_reported():
    model, inputs = build_gemma3_vlm(), image_inputs()

    def unmask(mask):
        mask = mask.clone()
        mask[0, :, 9, 11] = True if mask.dtype == torch.bool else 0.0
        mask[1, :, 6, 9] = True if mask.dtype == torch.bool else 0.0  # from an image to the text after it
        return mask

    with with_mask(model.model.language_model.layers[1].self_attn, unmask):
        recording = watched(model, **inputs)
    (finding,) = recording.diagnose().by_severity("error")
    assert (finding.kind, finding.layer, finding.rows) == ("weight on the future", 2, (6, 9))


def test_without_token_types_the_same_mask_is_reported():
    model, inputs = build_gemma3_vlm(), image_inputs()
    recording = watched(model, **inputs)
    recording._module_hints.image_runs.clear()
    assert [finding.layer for finding in recording.diagnose().by_severity("error")] == [1, 2]


def test_fault_2_a_layer_that_attends_to_padding():
    model = bert()
    with without_mask(model.encoder.layer[2].attention.self):
        recording = watched(model, ids(), attention_mask=padded("right"))
    finding = find_only(recording, "weight on padding", attention_mask=padded("right"))
    assert (finding.severity, finding.layer, finding.batch) == ("error", 2, (1,))
    assert finding.rows == tuple(range(8)) and finding.evidence["padding keys"] == 4
    assert recording.diagnose().by_severity("error") == []  # without a padding mask …
    tokens = [["a"] * 12, ["a"] * 8 + ["[PAD]"] * 4]
    assert (
        find_only(recording, "weight on padding", tokens=tokens).layer == 2
    )  # … but with tokens it is known


def test_fault_3_fully_masked_tokens():
    def mask_row(mask):
        mask = mask.clone()
        mask[0, :, 5] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask

    model = llama()
    with with_mask(get_attention(model, 3), mask_row):
        recording = watched(model, ids(), attention_mask=padded("left"))
    finding = find_only(recording, "fully masked rows", attention_mask=padded("left"))
    assert (finding.severity, finding.layer, finding.rows, finding.batch) == ("error", 3, (5,), (0,))


def test_fault_4_nan_in_the_weights_of_one_head():
    model = llama()
    with torch.no_grad():
        get_attention(model, 1).q_proj.weight[8:16] = float("nan")  # head 1 of 4
    finding = find_only(watched(model, ids()), "NaN or inf")
    assert (finding.severity, finding.layer, finding.heads) == ("error", 1, (1,))
    assert "projections" in finding.message and finding.evidence["in"] == "query"


def test_fault_5_inf_that_came_in_between_two_layers():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("inf"))
    finding = find_only(watched(model, ids()), "NaN or inf")
    assert (
        finding.layer == 2 and finding.heads == () and finding.evidence["later layers with NaN or inf"] == 1
    )
    assert "The attention of model.layers.1.self_attn had none." in finding.message


def test_fault_6_a_saturated_head():
    model = llama()
    with torch.no_grad():
        get_attention(model, 2).q_proj.weight[24:32] *= 1e4  # head 3 of 4
    finding = find_only(watched(model, ids()), "saturated heads")
    assert (finding.severity, finding.layer, finding.heads) == ("warning", 2, (3,))
    assert finding.evidence["mean entropy"] < 0.05 and finding.evidence["deviation of the scores"] > 100


@pytest.mark.parametrize(
    ("word", "to"), [("first", [0] * 9), ("previous", [0, *range(8)]), ("own", range(9))]
)
def test_heads_that_attend_only_to_one_kind_of_token_are_a_note(word, to):
    at = torch.eye(9)[None, None]
    finding = find_only(
        watched(PassedAttention(), 1e3 * at[:, :, list(to)], at, is_causal=True), "saturated heads"
    )
    assert finding.severity == "note" and finding.message == f"The heads attend only to the {word} token."


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("word", "to"), [("previous", [3, 0, 1, 2, 3]), ("next", [1, 2, 3, 4, 1])])
def test_rows_without_such_a_token_do_not_count(word, to, batch):
    at = torch.eye(5).expand(batch, 1, 5, 5)
    finding = find_only(watched(PassedAttention(), 1e3 * at[:, :, to], at), "saturated heads")
    assert finding.severity == "note" and finding.message == f"The heads attend only to the {word} token."
    assert finding.evidence[f"weight on the {word} token"] == pytest.approx(1)


def test_fault_7_a_uniform_head():
    model = llama()
    with torch.no_grad():
        get_attention(model, 0).q_proj.weight[:8] = 0  # head 0 of 4
    finding = find_only(watched(model, ids()), "uniform heads")
    assert (finding.severity, finding.layer, finding.heads) == ("note", 0, (0,))
    assert finding.evidence["entropy / ln(keys)"] == pytest.approx(1, abs=1e-6)


def test_fault_8_scores_without_their_scale():
    model = llama()
    with torch.no_grad():
        for layer in range(4):
            get_attention(model, layer).q_proj.weight *= 3
    healthy = [finding for finding in watched(model, ids()).diagnose() if finding.kind == "scale"]
    assert healthy == []
    for layer in range(4):
        get_attention(model, layer).scaling = 1.0
    found = [finding for finding in watched(model, ids()).diagnose() if finding.kind == "scale"]
    assert [finding.layer for finding in found] == [0, 1, 2, 3]
    assert found[0].evidence["1/√head_dim"] == pytest.approx(8**-0.5) and found[0].evidence["scale"] == 1.0
    assert "1/√head_dim" in found[0].message


def test_fault_8_one_layer_with_another_scale():
    model = llama()
    get_attention(model, 2).scaling /= 8
    finding = find_only(watched(model, ids()), "scale")
    assert finding.layer == 2 and finding.evidence["scale of the other layers"] == pytest.approx(
        8**-0.5, rel=1e-5
    )


def t5(layers=4):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=layers, num_heads=4, initializer_factor=1.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5EncoderModel(config).eval()
    with torch.no_grad():
        for block in model.encoder.block:
            block.layer[0].SelfAttention.q.weight *= 20  # trained models have large scores
    return model


def test_a_scale_of_1_is_not_reported_in_t5():
    found = watched(t5(), ids()).diagnose()
    assert [finding for finding in found if finding.kind == "scale"] == []


@needs_t5_attention
@pytest.mark.parametrize("layers", [1, 4])
def test_another_scale_is_reported_in_t5(layers):
    model = t5(layers)
    model.encoder.block[-1].layer[0].SelfAttention.scaling = 3.0
    (finding,) = [finding for finding in watched(model, ids()).diagnose() if finding.kind == "scale"]
    assert finding.layer == layers - 1 and finding.message == "Scores are too large: the scale is not 1."
    assert finding.evidence["scale"] == 3.0 and finding.evidence["scale of this class"] == 1.0
    assert finding.hint.startswith("Pass scale=1; ")


@pytest.mark.parametrize(
    ("name", "is_unscaled"),
    [
        ("MT5Attention", True),
        ("LongT5LocalAttention", True),
        ("GPTNeoSelfAttention", True),
        ("Gemma4TextAttention", True),
        ("WhisperAttention", True),
        ("GPTNeoXAttention", False),
        ("LlamaAttention", False),
        ("Gemma3Attention", False),
    ],
)
def test_layers_without_a_scale_are_known_by_class(name, is_unscaled):
    assert (UNSCALED_LAYERS.fullmatch(name) is not None) is is_unscaled


def test_fault_9_a_mask_of_the_opposite_polarity():
    def invert(mask):
        return ~mask if mask.dtype == torch.bool else torch.where(mask < 0, 0.0, torch.finfo(mask.dtype).min)

    model = bert()
    with with_mask(model.encoder.layer[1].attention.self, invert):
        recording = watched(model, ids(), attention_mask=padded("right"))
    finding = find_only(recording, "inverted mask", attention_mask=padded("right"))
    assert (finding.severity, finding.layer, finding.batch) == ("error", 1, (1,))
    model = Plain()
    model.layers[0].options = {"attn_mask": ~torch.ones(12, 12, dtype=torch.bool).tril()}
    finding = find_only(watched(model, ids()), "inverted mask")
    assert finding.layer == 0 and "only to later tokens" in finding.message


def test_fault_10_dropout_in_evaluation():
    model = Plain().eval()
    model.layers[2].options["dropout_p"] = 0.1
    found = watched(model, ids()).diagnose()
    assert [(finding.kind, finding.layer) for finding in found.by_severity("error")] == [("dropout", 2)]
    assert found.by_severity("error")[0].evidence["dropout_p"] == 0.1
    assert watched(model.train(), ids()).diagnose().by_severity("error") == []


def test_fault_11_a_slow_kernel():
    model = Plain()
    bias = torch.zeros(12, 12).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    model.layers[1].options = {"attn_mask": bias.requires_grad_()}
    with regard.watch(model) as recording:
        model(ids())
    finding = find_only(recording, "slow kernel")
    assert (finding.severity, finding.layer) == ("warning", 1)
    assert finding.evidence == {"kernel": "math", "bytes stored": f"{2 * 4 * 12 * 12 * 4:,}"}


@pytest.mark.parametrize("key", [(2, 1, 5, 8), (1, 4, 5, 8)])
def test_a_broadcast_key_is_named_as_the_cause_of_a_slow_kernel(key):
    query, key = torch.randn(2, 4, 5, 8), torch.randn(key)
    recording = watched(PassedAttention(), query, key)
    if runs_fused(query, key):
        assert recording.diagnose() == []
    else:
        hint = find_only(recording, "slow kernel").hint
        assert "broadcast" in hint and "enable_gqa=True" in hint and "mask" not in hint
    assert watched(PassedAttention(), query, key.expand_as(query)).diagnose() == []
    if key.shape[1] == 1:
        assert watched(PassedAttention(), query, key, enable_gqa=True).diagnose() == []


def gemma3():
    """It looks up positions twice: for layers with a window, and for those without."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=2, head_dim=8, sliding_window=20,
        layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, gpt2, gemma3])
@pytest.mark.parametrize("wrong", [False, True])
def test_fault_12_cached_steps_at_wrong_positions(make, wrong):
    model, tokens = make(), ids()
    with torch.no_grad(), regard.watch(model) as recording:
        past = model(tokens[:, :9], use_cache=True).past_key_values
        for at in (9, 10, 11):
            positions = torch.full((2, 1), at + 1 if wrong else at)
            model(tokens[:, at : at + 1], past_key_values=past, position_ids=positions, use_cache=True)
    if not wrong:
        assert recording.diagnose().by_severity("error") == []
        return
    finding = find_only(recording, "positions")
    assert (finding.severity, finding.rows) == ("error", (9,))
    assert (finding.evidence["position"], finding.evidence["expected"]) == (10, 9)


def test_fault_13_is_causal_aligned_to_the_wrong_corner():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, n, 8, generator=generator) for n in (3, 8))
    finding = find_only(watched(PassedAttention(), q, k, is_causal=True), "causal alignment")
    assert finding.severity == "error" and finding.evidence["keys masked in every row"] == 5


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("wrong", [False, True])
def test_fault_13_in_a_step_of_a_cache(new, wrong):
    """The prefill is aligned correctly; the step is not."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 8 + new, 8, generator=generator) for _ in range(2))
    model = PassedAttention()
    right = {"attn_mask": causal_lower_right(new, 8 + new)}
    with torch.no_grad(), regard.watch(model) as recording:
        model(q[:, :, :8], k[:, :, :8], is_causal=True)
        model(q[:, :, 8:], k, **({"is_causal": True} if wrong else right))
    assert recording[""].shape == (1, 2, 8 + new, 8 + new)
    if not wrong:
        assert recording.diagnose() == []
        return
    finding = find_only(recording, "causal alignment")
    assert (finding.severity, finding.rows) == ("error", tuple(range(8, 8 + new)))
    assert finding.evidence == {"rows that mask their own key": new, "keys visible to row 8": 1}


class SilentAttention(torch.nn.Linear):
    """Attention that calls no watched function."""

    def forward(self, x):
        return torch.softmax(super().forward(x) @ x.mT, -1) @ x


def test_a_layer_that_was_not_captured_is_reported():
    model = torch.nn.ModuleDict({"attention": SilentAttention(4, 4)})
    watch = regard.watch(model)
    recording = watch.__enter__()
    model["attention"](torch.ones(2, 4))
    with pytest.raises(regard.NotCapturedError):
        watch.__exit__(None, None, None)
    error, finding = recording.diagnose()
    assert (error.kind, error.severity) == ("nothing recorded", "error")
    assert (finding.kind, finding.module, finding.severity) == ("not captured", "attention", "warning")


class PassedAttention(torch.nn.Module):
    def forward(self, query, key, **options):
        return torch.nn.functional.scaled_dot_product_attention(query, key, key, **options)


@pytest.mark.parametrize("shape", [(7, 4), (2, 7, 4), (2, 2, 3, 7, 4), (1, 2, 0, 4), (1, 2, 1, 4)])
def test_any_shape_is_checked(shape):
    query = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    recording = watched(PassedAttention(), query, query, is_causal=True)
    assert recording.diagnose().by_severity("error") == [] and len(recording.heads()) == (
        shape[-3] if len(shape) > 2 else 1
    )
    if shape[-2] < 2 or runs_fused(query, query, is_causal=True):
        assert recording.diagnose().by_severity("warning") == []
    else:
        assert f"query of {len(shape)} axes" in find_only(recording, "slow kernel").hint


def test_a_recording_of_measures_is_checked_for_dropout_and_kernel():
    model = PassedAttention().eval()
    with torch.no_grad(), regard.watch(model, measures="default") as recording:
        model(*[torch.randn(1, 2, 5, 4)] * 2, dropout_p=0.5)
    assert {finding.kind for finding in recording.diagnose()} == {"dropout", "slow kernel"}


def test_findings_print_one_to_a_block():
    model = Plain()
    model.layers[1].options = {}
    text = str(watched(model, ids()).diagnose())
    assert text.startswith("1 error in 3 layers, 12 heads\n\nerror: weight on the future. Tokens attend")
    where, evidence, hint = text.splitlines()[3:6]
    assert where == "  where     layer 1, layers.1, rows 0–10"
    assert evidence.startswith("  evidence  mean share 0.") and hint.startswith(
        "  hint      Pass is_causal=True"
    )


@pytest.mark.parametrize("shape", [(2, 9), (3, 12), (2, 14)])
def test_an_attention_mask_that_fits_no_layer_is_rejected(shape):
    recording = watched(Plain(), ids())
    expected = f"received attention_mask of shape {shape}; expected (batch, keys) of a layer: (2, 12)"
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        recording.diagnose(attention_mask=torch.ones(shape))
    assert recording.diagnose(attention_mask=torch.ones(1, 12)) == []


def test_an_attention_mask_that_is_not_0_or_1_is_rejected():
    recording = watched(Plain(), ids())
    with pytest.raises(ArgumentError, match=r"recording\.diagnose: .* 1 for a token and 0 for padding"):
        recording.diagnose(attention_mask=torch.zeros(2, 12) - 1e9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_padding_on_the_axis_of_the_heads_is_named(side, causal, kind):
    """A mask (1, batch, n, n) broadcasts if there are as many heads as batch entries."""
    attention_mask = torch.ones(3, 11, dtype=torch.long)
    attention_mask[1, slice(0, 4) if side == "left" else slice(7, 11)] = 0
    attention_mask[2, slice(0, 2) if side == "left" else slice(9, 11)] = 0
    is_token = attention_mask.bool()[:, None]
    visible = is_token.expand(-1, 11, -1)
    if causal:  # each token attends to its own key, padding too
        visible = visible & torch.ones(11, 11, dtype=torch.bool).tril() | torch.eye(11, dtype=torch.bool)
    layer = MaskedHeads()
    found = {}
    for shape in ((1, 3, 11, 11), (3, 1, 11, 11)):
        mask = visible.reshape(shape)
        if kind is torch.float32:
            mask = torch.zeros(shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        with regard.watch(layer) as recording:
            layer(torch.randn(3, 11, 12, generator=torch.Generator().manual_seed(1)), mask)
        findings = recording.diagnose(attention_mask=attention_mask, causal=causal)
        found[shape] = {finding.kind for finding in findings.by_severity("error")}
    assert found == {(1, 3, 11, 11): {"padding masked by head"}, (3, 1, 11, 11): set()}


class MaskedHeads(torch.nn.Module):
    """Three heads of 4 numbers that attend by a mask."""

    def forward(self, x, mask):
        heads = x.unflatten(-1, (3, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


TYPES = ["sliding_attention", "full_attention"]


def gemma3(types, **options):
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": len(types), "layer_types": list(types), "intermediate_size": 32}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5} | options
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).eval()


def find_windows(model, **inputs):
    with regard.watch(model) as recording:
        model(ids(), **inputs)
    findings = recording.diagnose(attention_mask=inputs.get("attention_mask"))
    return [finding for finding in findings if finding.kind == "window not as configured"]


@pytest.mark.parametrize(
    "inputs", [{}, {"attention_mask": padded("left")}, {"attention_mask": padded("right")}]
)
def test_windows_on_the_wrong_layers_are_named(inputs):
    model = gemma3(TYPES)
    assert find_windows(model, **inputs) == []
    model.config.layer_types = TYPES[::-1]  # by which the model chooses masks; the layers keep their own type
    wide, narrow = find_windows(model, **inputs)
    assert (wide.layer, wide.severity, wide.evidence["sliding_window of the layer"]) == (0, "error", 5)
    assert narrow.layer == 1 and narrow.evidence["keys of the widest row"] == 5
    assert narrow.evidence["layer_type of the layer"] == "all keys"


@pytest.mark.parametrize("change", [1, -1])
def test_a_window_that_is_off_by_one_is_named(change):
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5, intermediate_size=32)
    ).eval()
    assert find_windows(model) == []
    model.model.config = copy.deepcopy(model.config)  # by which the model chooses masks
    model.model.config.sliding_window += change
    found = find_windows(model)
    assert [finding.layer for finding in found] == [0, 1, 2, 3]
    assert found[0].evidence["keys of the widest row"] == 5 + change


@pytest.mark.parametrize("starts", [(0, 4), (0, 1, 2, 9)])
def test_packed_documents_are_no_windows(starts):
    positions = torch.arange(12)
    for start in starts:
        positions[start:] = torch.arange(12 - start)
    model = gemma3(TYPES)
    assert find_windows(model, position_ids=positions.expand(2, -1), use_cache=False) == []


def test_windows_that_are_not_used_are_not_expected():
    config = transformers.Qwen2Config(
        **SIZES, num_key_value_heads=2, intermediate_size=32, sliding_window=5, use_sliding_window=True,
        max_window_layers=2,
    )  # fmt: skip
    assert find_windows(transformers.Qwen2ForCausalLM(config).eval()) == []
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=32, sliding_window=5)
    assert find_windows(transformers.Qwen2ForCausalLM(config).eval()) == []


def test_weights_that_are_not_finite_say_that_query_and_key_are_unknown():
    model = llama().half()
    attention = get_attention(model, 1)
    with torch.no_grad():
        attention.q_proj.weight *= 400
        attention.k_proj.weight *= 400
    model.set_attn_implementation("eager")
    finding = find_only(watched(model, ids()), "NaN or inf")
    assert finding.layer == 1 and finding.evidence["in"] == "weights"
    assert "Query and key are unknown" in finding.message and "input" in finding.message


@pytest.mark.parametrize("offset", [1, 2])
def test_a_mask_that_is_almost_triangular_was_meant_to_be_causal(offset):
    n = 9 * offset
    query = torch.randn(1, 2, n, 8)
    mask = torch.ones(n, n, dtype=torch.bool).tril(offset)
    finding = find_only(watched(PassedAttention(), query, query, attn_mask=mask), "weight on the future")
    assert finding.severity == "error" and finding.evidence["extra keys"] == offset
    assert f"each row i attends to key i + {offset}" in finding.message and finding.evidence["first row"] == 0


def test_windows_and_padding_of_encoders_are_no_shifted_triangle():
    query = torch.randn(1, 2, 12, 8)
    band = torch.ones(12, 12, dtype=torch.bool).tril(1).triu(-1)
    few = (torch.arange(12) < 2).expand(12, 12)
    for mask in (band, few):
        findings = watched(PassedAttention(), query, query, attn_mask=mask).diagnose()
        assert "weight on the future" not in {finding.kind for finding in findings}


def test_a_layer_that_is_not_sliding_may_know_the_window():
    """EXAONE 4 stores the window in every layer, and MiniMax has windows in layers of full attention."""
    sizes = SIZES | {"num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 5}
    config = transformers.Exaone4Config(**sizes, layer_types=TYPES * 2)
    assert find_windows(transformers.Exaone4ForCausalLM(config).eval()) == []
    types = ["full_attention", "linear_attention"] * 2
    config = transformers.MiniMaxConfig(**sizes, layer_types=types, num_local_experts=2, head_dim=8)
    assert find_windows(transformers.MiniMaxForCausalLM(config).eval()) == []


def test_a_configuration_that_differs_between_layers_states_nothing():
    """As transformers raises for an attribute that each layer has in a configuration of its own."""

    class PerLayer:
        @property
        def sliding_window(self):
            raise RuntimeError("'sliding_window' is a per-layer attribute")

    model = Plain()
    for module in model.modules():
        module.config = PerLayer()
    assert find_windows(model) == []


class PortedAttention(torch.nn.Module):
    """Causal attention with a softmax of its own, a soft cap that its configuration states, and learnt sinks."""

    def __init__(self, uses_sinks):
        super().__init__()
        self.qkv, self.uses_sinks = torch.nn.Linear(32, 96), uses_sinks
        self.sinks = torch.nn.Parameter(torch.zeros(4))
        self.config = transformers.Gemma2Config(attn_logit_softcapping=5.0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = 5.0 * torch.tanh(q @ k.mT * 8**-0.5 / 5.0)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.uses_sinks:
            sinks = self.sinks.reshape(1, 4, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("uses_sinks", [True, False])
def test_a_softmax_of_its_own_may_have_sinks_and_a_soft_cap(uses_sinks):
    """Its rows tell whether there is a sink; its scores, and so a soft cap, are not known."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), PortedAttention(uses_sinks)).eval()
    with torch.no_grad(), regard.watch(model) as recording:
        model(ids())
    kinds = [finding.kind for finding in recording.diagnose() if finding.severity == "error"]
    assert kinds == ([] if uses_sinks else ["sinks not used"])
