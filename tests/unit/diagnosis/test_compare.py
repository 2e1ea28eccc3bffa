"""`regard.compare`: the first layer where two runs diverge, and the kind of difference."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
import regard.lens  # noqa: E402
from regard.diagnosis.compare import match_layers  # noqa: E402
from regard.nn import from_transformers  # noqa: E402
from tests.helpers.planted_bugs import PLANTED_BUGS, SIZES, make_inputs  # noqa: E402
from tests.helpers.planted_models import HEAD_DIM, PlantedGPT  # noqa: E402
from tests.helpers.port_bugs import PORT_BUGS  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

# The lens refuses to read this one, and says why.
REFUSED = "softmax over the queries"
COMPARED = {name: bug for name, bug in PLANTED_BUGS.items() if name != REFUSED}


def record(model, *args, values=True, **inputs):
    with torch.no_grad(), regard.watch(model, values=values) as recording:
        model(*args, **inputs)
    return recording


def record_bug(bug, clean, values=True):
    model = bug.build_clean() if clean else bug.build()
    with regard.watch(model, values=values) as recording:
        bug.run(model, clean)
    return recording


@cache
def compare_bug(name):
    """Compare a planted bug with its clean twin, and the twin with itself."""
    bug = PLANTED_BUGS[name]
    clean = record_bug(bug, clean=True)
    return regard.compare(clean, record_bug(bug, clean=True)), regard.compare(
        clean, record_bug(bug, clean=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_planted_bug_is_named_by_its_clean_twin(name):
    bug = PLANTED_BUGS[name]
    same, comparison = compare_bug(name)
    assert same.kind == "no difference"
    assert comparison.kind == bug.difference
    assert comparison.first.layer == bug.layer
    assert comparison.first.hint and not comparison.agrees


@pytest.mark.slow
def test_every_planted_bug_is_named_by_compare_or_doctor():
    by_compare = {name for name in COMPARED if compare_bug(name)[1].kind == PLANTED_BUGS[name].difference}
    by_doctor = set()
    for name in PLANTED_BUGS.keys() - by_compare:
        bug = PLANTED_BUGS[name]
        model = bug.build()
        cached = model.decode if getattr(model, "is_decoder", False) else None
        findings = regard.doctor(model, bug.inputs(), causal=bug.causal, cached=cached)
        by_doctor |= {name for finding in findings if finding.kind in bug.kinds}
    assert len(PLANTED_BUGS) >= 28 and by_doctor == {REFUSED}
    assert by_compare | by_doctor == PLANTED_BUGS.keys()


def test_the_reason_why_a_layer_was_not_captured_is_repeated():
    bug = PLANTED_BUGS[REFUSED]
    clean, model = record_bug(bug, clean=True), bug.build()
    with pytest.raises(regard.NotCapturedError), regard.watch(model) as recording:
        bug.run(model)
    with pytest.raises(regard.ArgumentError, match="runs over the queries instead of the keys"):
        regard.compare(clean, recording)


def compare_gpt(fault, values=True, **options):
    ids = make_inputs()["input_ids"]
    return regard.compare(
        record(PlantedGPT(**options).eval(), ids, values=values),
        record(PlantedGPT(fault, **options).eval(), ids, values=values),
    )


def test_a_mask_that_one_layer_lost_is_found_there():
    ids = make_inputs()["input_ids"]
    clean, faulty = PlantedGPT().eval(), PlantedGPT("causal mask missing", only=(1,)).eval()
    comparison = regard.compare(record(clean, ids), record(faulty, ids))
    assert (comparison.kind, comparison.first.layer, comparison.first.module) == ("mask", 1, "blocks.1.attn")
    assert comparison.layers.column("kind") == ["no difference", "mask", "inherited"]
    assert "none instead of causal()" in comparison.first.message
    assert "is_causal=True" in comparison.first.hint


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rope twice", "applied twice"),
        ("rope positions in bfloat16", "rounded"),
        ("rope on the query only", "once less"),
        ("rope backwards on the key", "opposite direction"),
        ("rope on the axis of the heads", "head index"),
        ("rope base of another model", "base 500 instead of 10,000"),
        ("rope pairs of another layout", "half layout instead of the interleaved layout"),
        ("rope pairs of query and key differ", "half layout instead of the interleaved layout"),
    ],
)
def test_a_turn_is_described(fault, text):
    comparison = compare_gpt(fault, values=False)
    assert comparison.kind == "rotary positions" and text in comparison.first.message


@pytest.mark.parametrize(
    ("fault", "ratio", "text"),
    [
        ("scale twice", HEAD_DIM**-0.5, "scales twice"),
        ("scale missing", HEAD_DIM**0.5, "does not scale"),
        ("scale of the model width", 0.5, "√d_model"),
    ],
)
def test_a_factor_is_explained(fault, ratio, text):
    comparison = compare_gpt(fault, values=False)
    assert comparison.kind == "scale" and text in comparison.first.hint
    assert math.isclose(comparison.first.evidence["ratio"], ratio, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("causal mask inverted", "The mask is inverted"),
        ("padding mask inverted", "The padding mask is inverted"),
        ("padding mask of another batch entry", "each other's padding masks"),
        ("padding mask too weak", "-4 is too weak"),
        ("own key masked", "masks each token's own key"),
        ("causal aligned to the first key", "is_causal aligns to the first key"),
        ("rope on the query only", "both query and key"),
        ("position 0 in every cached step", "continue after the cached tokens"),
    ],
)
def test_the_hint_names_the_mistake(name, text):
    assert text in compare_bug(name)[1].first.hint


def test_only_the_first_layer_of_a_broken_cache_is_reported():
    comparison = compare_bug("cache overwrites its last key")[1]
    assert [finding.kind for finding in comparison.findings] == ["cache"]
    assert comparison.layers.column("kind") == ["cache", "inherited", "inherited"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BART"])
def test_a_copy_in_half_precision_differs_by_rounding(name, dtype):
    tiny = TINY[name]
    inputs = tiny.inputs("left")
    comparison = regard.compare(record(tiny.build(), **inputs), record(tiny.build(dtype=dtype), **inputs))
    assert comparison.kind == "rounding" and comparison.agrees and comparison.first is None
    assert all(0 < row["query"] < 0.1 for row in comparison.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fault_is_found_in_half_precision(dtype):
    ids = make_inputs()["input_ids"]
    clean = record(PlantedGPT().eval(), ids)
    faults = {
        "rope twice": "rotary positions",
        "scale twice": "scale",
        "key heads tiled": "kv heads reordered",
    }
    for fault, kind in faults.items():
        comparison = regard.compare(clean, record(PlantedGPT(fault).eval().to(dtype), ids))
        assert (comparison.kind, comparison.first.layer) == (kind, 0)


def build_deep(dtype=torch.float32):
    config = TINY["Llama"].config
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 12, "initializer_range": 0.2})
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).eval().to(dtype)


def test_rounding_may_grow_with_depth_and_a_fault_stands_out():
    ids = TINY["Llama"].inputs("none")["input_ids"]
    clean = record(build_deep(), ids)
    comparison = regard.compare(clean, record(build_deep(torch.bfloat16), ids))
    assert comparison.kind == "rounding"
    assert comparison.layers[-1]["query"] > 2 * comparison.layers[0]["query"]
    faulty = build_deep(torch.bfloat16)
    with torch.no_grad():
        faulty.model.layers[8].self_attn.q_proj.weight.mul_(8**-0.5)
    comparison = regard.compare(clean, record(faulty, ids))
    assert (comparison.kind, comparison.first.layer) == ("scale", 8)
    assert "scales twice" in comparison.first.hint


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Llama", "T5"])
def test_eager_and_sdpa_agree(name, side):
    tiny = TINY[name]
    inputs = tiny.inputs(side)
    if not tiny.model_class._supports_sdpa:
        pytest.skip("this release of transformers has no SDPA for it")
    eager = tiny.build("eager")
    comparison = regard.compare(record(eager, **inputs), record(tiny.build("sdpa"), **inputs))
    equal = ("no difference", "rounding")
    if (name, side) == ("GPT-2", "left"):
        weights = eager(**inputs, output_attentions=True).attentions[0]
        if not weights[
            1, 0, 0, 1:
        ].any():  # transformers 5.0: padded queries stay causal in eager attention only
            equal = ("mask",)
    assert comparison.kind in equal, comparison


class Ported(torch.nn.Module):
    """An attention module of transformers as a layer of regard."""

    def __init__(self, module):
        super().__init__()
        self.layer, self.options = from_transformers(module)

    def forward(self, hidden_states, *_, **__):
        return self.layer(hidden_states, **self.options), None


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "GPT-OSS"])
def test_a_port_to_layers_of_regard_agrees(name):
    original, port = TINY[name].build(), TINY[name].build()
    inputs = {"input_ids": TINY[name].inputs("none")["input_ids"]}
    blocks = port.transformer.h if name == "GPT-2" else port.model.layers
    attribute = "attn" if name == "GPT-2" else "self_attn"
    for block in blocks:
        setattr(block, attribute, Ported(getattr(block, attribute)).eval())
    comparison = regard.compare(record(original, **inputs), record(port, **inputs))
    assert comparison.kind in ("no difference", "rounding"), comparison
    assert comparison.layers[0]["module_b"].endswith(f"{attribute}.layer")
    with torch.no_grad():
        getattr(blocks[1], attribute).layer.v_proj.weight.mul_(2)
    comparison = regard.compare(record(original, **inputs), record(port, **inputs))
    assert (comparison.kind, comparison.first.layer) == ("projection", 1)
    assert "value" in comparison.first.message


def test_a_port_of_a_torch_layer_agrees():
    torch.manual_seed(0)
    original = torch.nn.MultiheadAttention(48, 4, batch_first=True).eval()
    port = regard.nn.MultiheadAttention.from_torch(original)
    x = torch.randn(2, 11, 48)
    with torch.no_grad(), regard.watch(original, values=True) as a:
        original(x, x, x, need_weights=False)
    assert regard.compare(a, record(port, x)).kind in ("no difference", "rounding")


def test_heads_in_another_order_with_their_projection_agree_in_later_layers():
    model, other = TINY["GPT-2"].build(), TINY["GPT-2"].build()
    order = [2, 0, 3, 1]
    attention = other.transformer.h[0].attn
    with torch.no_grad():
        weight, bias = attention.c_attn.weight, attention.c_attn.bias
        weight.copy_(weight.view(32, 3, 4, 8)[:, :, order].reshape(32, 96))
        bias.copy_(bias.view(3, 4, 8)[:, order].reshape(96))
        attention.c_proj.weight.copy_(attention.c_proj.weight.view(4, 8, 32)[order].reshape(32, 32))
    inputs = TINY["GPT-2"].inputs("none")
    comparison = regard.compare(record(model, **inputs), record(other, **inputs))
    assert comparison.kind == "heads permuted" and str(tuple(order)) in comparison.first.message
    assert comparison.layers.column("kind") == ["heads permuted", "rounding"]


def test_a_port_whose_scores_agree_is_equivalent():
    ids = make_inputs()["input_ids"]
    clean, port = PlantedGPT().eval(), PlantedGPT().eval()
    with torch.no_grad():
        for block in port.blocks:
            block.attn.q_proj.weight.mul_(4)
            block.attn.q_proj.bias.mul_(4)
            block.attn.k_proj.weight.mul_(0.25)
            block.attn.k_proj.bias.mul_(0.25)
    comparison = regard.compare(record(clean, ids), record(port, ids))
    assert comparison.kind == "equivalent" and comparison.agrees
    assert "The scores agree, although the query of B is 4 × A's" in comparison.notes[0]


def test_a_cached_run_agrees_with_a_whole_one():
    ids = make_inputs()["input_ids"]
    model = PlantedGPT().eval()
    with torch.no_grad(), regard.watch(model, values=True) as cached:
        model.decode(ids, SIZES)
    comparison = regard.compare(record(model, ids), cached)
    assert comparison.kind == "rounding" and comparison.notes == ()


def test_generate_agrees_with_and_without_a_cache():
    model = TINY["Llama"].build()
    ids = TINY["Llama"].inputs("none")["input_ids"]
    recordings = []
    for use_cache in (True, False):
        with torch.no_grad(), regard.watch(model, values=True) as recording:
            model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=use_cache, eos_token_id=None)
        recordings.append(recording)
    assert regard.compare(*recordings).kind == "rounding"
    assert regard.compare(*reversed(recordings)).kind == "rounding"


def test_layers_of_a_port_are_matched_in_order():
    clean = PlantedGPT().eval()
    ids = make_inputs()["input_ids"]
    port = torch.nn.ModuleDict({"decoder": PlantedGPT("rope twice", only=(2,)).eval()})
    port.forward = port["decoder"].forward
    comparison = regard.compare(record(clean, ids), record(port, ids))
    assert comparison.first.module == "blocks.2.attn / decoder.blocks.2.attn"
    assert comparison.layers[0]["module_b"] == "decoder.blocks.0.attn"
    assert "matched in order" in comparison.notes[0] and "module_b" in repr(comparison)
    assert match_layers(["a", "b", "c"], ["b", "c", "d"]) == ([("b", "b"), ("c", "c")], ["a"], ["d"])


def test_layers_that_one_run_lacks_are_reported_last():
    ids = make_inputs()["input_ids"]
    clean = record(PlantedGPT().eval(), ids)
    model = PlantedGPT().eval()
    with torch.no_grad(), regard.watch(model, layers="blocks.0*") as first:
        model(ids)
    comparison = regard.compare(clean, first)
    assert comparison.kind == "layers missing" and len(comparison.findings) == 2
    assert "blocks.1.attn" in comparison.first.message


def test_prompts_that_part_are_compared_up_to_there():
    ids = make_inputs()["input_ids"][:1]
    other = ids.clone()
    other[:, 6:] = other[:, 6:] % 60 + 1
    model = PlantedGPT().eval()
    a, b = record(model, ids), record(model, other)
    comparison = regard.compare(a, b)
    assert comparison.kind == "other tokens" and comparison.first.rows == tuple(range(6, 11))
    comparison = regard.compare(a, b, tokens_a=ids, tokens_b=other)
    assert comparison.kind == "other tokens" and "from position 6 on" in comparison.notes[0]
    assert comparison.layers.column("query") == [0.0, 0.0, 0.0]
    faulty = record(PlantedGPT("scale twice", only=(1,)).eval(), other)
    comparison = regard.compare(a, faulty, tokens_a=ids, tokens_b=other)
    assert (comparison.kind, comparison.first.layer) == ("scale", 1)


def test_a_longer_prompt_is_compared_as_far_as_the_shorter():
    ids = make_inputs()["input_ids"][:1]
    model = PlantedGPT().eval()
    a, b = record(model, ids[:, :7]), record(model, ids)
    comparison = regard.compare(a, b)
    assert comparison.kind == "other tokens" and comparison.first.layer == 0
    assert "the first 7 rows are compared" in comparison.notes[0]
    assert max(comparison.layers.column("query")) < 1e-5
    faulty = record(PlantedGPT("causal mask missing", only=(2,)).eval(), ids)
    assert (regard.compare(a, faulty).kind, regard.compare(a, faulty).first.layer) == ("mask", 2)
    comparison = regard.compare(a, record(model, ids.flip(1)))
    assert comparison.kind == "other tokens" and "only settings are compared" in comparison.notes[0]


def test_sizes_that_differ_are_reported():
    small = TINY["Llama"].build()
    config = type(small.config).from_dict(small.config.to_dict() | {"head_dim": 16})
    large = hf.LlamaForCausalLM(config).eval()
    inputs = TINY["Llama"].inputs("none")
    comparison = regard.compare(record(small, **inputs), record(large, **inputs))
    assert (
        comparison.kind == "shape" and "(2, 4, 11, 16) instead of (2, 4, 11, 8)" in comparison.first.message
    )


def test_recordings_that_were_saved_or_hold_measures_are_compared(tmp_path):
    pytest.importorskip("safetensors")
    ids = make_inputs()["input_ids"]
    clean, faulty = record(PlantedGPT().eval(), ids), record(PlantedGPT("rope twice").eval(), ids)
    for name, recording in {"a": clean, "b": faulty}.items():
        recording.save(tmp_path / f"{name}.safetensors")
    loaded = [regard.load_recording(tmp_path / f"{name}.safetensors") for name in "ab"]
    assert regard.compare(clean, loaded[0]).kind == "no difference"
    assert repr(regard.compare(*loaded)) == repr(regard.compare(clean, faulty))
    measured = []
    for fault in ("", "", "rope twice"):
        model = PlantedGPT(fault).eval()
        with torch.no_grad(), regard.watch(model, measures={"entropy": regard.Entropy()}) as recording:
            model(ids)
        measured.append(recording)
    assert regard.compare(*measured[:2]).kind == "no difference"
    assert regard.compare(*measured[1:]).kind == "measures"


class OwnSoftmax(torch.nn.Module):
    """An encoder that computes its own softmax, or calls the fused kernel."""

    def __init__(self, fused=False, factor=1.0, order=(0, 1, 2, 3), causal=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(61, 48)
        self.project = torch.nn.ModuleList(torch.nn.Linear(48, 144) for _ in range(2))
        self.fused, self.factor, self.order, self.causal = fused, factor, list(order), causal

    def forward(self, ids):
        x = self.embed(ids)
        for project in self.project:
            q, k, v = project(x).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)[:, :, self.order]
            if self.fused:
                y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            else:
                scores = q @ k.mT * (self.factor * 12**-0.5)
                if self.causal:
                    scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
                y = scores.softmax(-1) @ v
            x = x + y.transpose(1, 2).flatten(2)
        return x


def test_layers_with_their_own_softmax_are_compared_by_their_weights():
    ids = make_inputs()["input_ids"]
    clean = record(OwnSoftmax().eval(), ids)
    assert clean.calls(next(iter(clean)))[0].weights is not None
    assert regard.compare(clean, record(OwnSoftmax().eval(), ids)).kind == "no difference"
    assert regard.compare(clean, record(OwnSoftmax(fused=True).eval(), ids)).kind == "rounding"
    comparison = regard.compare(clean, record(OwnSoftmax(factor=2.0).eval(), ids))
    assert comparison.kind == "scale" and math.isclose(comparison.first.evidence["ratio"], 2, rel_tol=1e-3)
    assert regard.compare(clean, record(OwnSoftmax(order=(1, 0, 3, 2)).eval(), ids)).kind == "heads permuted"
    assert regard.compare(clean, record(OwnSoftmax(causal=True).eval(), ids)).kind == "mask"
    other = OwnSoftmax().eval()
    torch.nn.init.normal_(other.project[0].weight[:48])
    comparison = regard.compare(clean, record(other, ids))
    assert (comparison.kind, comparison.first.module) == ("module", "project.0")
    with torch.no_grad(), regard.watch(other) as unknown:
        other(ids)
    assert regard.compare(clean, unknown).kind == "weights"


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_masks_and_score_mods_of_flex_attention_are_compared():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Flex(torch.nn.Module):
        """One layer of flex_attention."""

        def __init__(self, mask_mod, score_mod=None):
            super().__init__()
            torch.manual_seed(0)
            self.project, self.score_mod = torch.nn.Linear(32, 96), score_mod
            self.block_mask = flex.create_block_mask(mask_mod, None, None, 24, 24, device="cpu")

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return flex.flex_attention(q, k, v, self.score_mod, self.block_mask)

    def causal(b, h, q, k):
        return q >= k

    def strided(b, h, q, k):
        return (q >= k) & ((q - k) % 3 == 0)

    def double(score, b, h, q, k):
        return score * 2

    x = torch.linspace(-1, 1, 24 * 32).sin().reshape(1, 24, 32)
    runs = [record(Flex(*args).eval(), x) for args in ((causal,), (strided,), (strided,), (causal, double))]
    assert regard.compare(runs[0], runs[1]).kind == "mask"
    assert regard.compare(runs[1], runs[2]).kind == "no difference"
    assert regard.compare(runs[0], runs[3]).kind == "bias"


def test_values_are_compared_if_both_runs_have_them():
    assert compare_gpt("values projected like keys").first.layer == 0
    comparison = compare_gpt("values projected like keys", values=False)
    assert comparison.first.layer == 1 and "watch(values=True)" in comparison.first.hint
    ids = make_inputs()["input_ids"]
    clean = record(PlantedGPT().eval(), ids)
    comparison = regard.compare(clean, record(PlantedGPT().eval(), ids, values=False))
    assert comparison.kind == "no difference" and "value" not in comparison.table_rows()[0]


def test_a_comparison_is_data_text_and_html():
    comparison = compare_gpt("scale twice")
    record = json.loads(json.dumps(comparison.as_dict()))
    assert record["kind"] == "scale" and record["first"]["layer"] == 0 and len(record["layers"]) == 3
    text = repr(comparison)
    assert text.startswith("The runs diverge in layer 0: scale.") and "inherited" in text
    html = comparison._repr_html_()
    assert "scale" in html and "inherited" in html and "<script" not in html
    same = compare_gpt("")
    assert (
        repr(same).startswith("No difference in 3 layers and the output.") and same.as_dict()["first"] is None
    )


def test_wrong_arguments_are_refused():
    ids = make_inputs()["input_ids"]
    recording = record(PlantedGPT().eval(), ids)
    for other in (PlantedGPT(), "model"):
        with pytest.raises(regard.ArgumentTypeError, match="two recordings, or models with their inputs"):
            regard.compare(recording, other)
    with pytest.raises(regard.ArgumentError, match="empty recording"):
        regard.compare(recording, regard.lens.Recording())


# Modules between and after attention layers


def build_llama(**options):
    config = TINY["Llama"].config
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 3} | options)
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config).eval()


LLAMA_INPUTS = {"input_ids": torch.arange(1, 23).reshape(2, 11)}


def compare_llama(change, inputs=LLAMA_INPUTS, dtype=torch.float32):
    model = build_llama()
    with torch.no_grad():
        change(model)
    return regard.compare(record(build_llama(), **inputs), record(model.to(dtype), **inputs))


def test_the_output_of_the_model_is_compared():
    comparison = compare_llama(lambda model: model.model.norm.weight.mul_(1.1))
    assert comparison.layers.column("kind") == ["no difference"] * 3 and not comparison.agrees
    assert (comparison.kind, comparison.first.module, comparison.first.layer) == ("module", "model.norm", -1)
    assert "LlamaRMSNorm" in comparison.first.message and "1.1 times as large" in comparison.first.message
    assert comparison.first.evidence["input"] == 0
    assert math.isclose(comparison.first.evidence["output"], 0.1 / 1.1, rel_tol=1e-3)
    assert comparison.summary == "The runs diverge in model.norm: module."
    same = compare_llama(lambda model: None)
    assert same.summary == "No difference in 3 layers and the output." and same.output == 0


@pytest.mark.parametrize("name", ["BERT", "ViT"])
def test_every_output_of_the_model_is_compared(name):
    inputs = TINY[name].inputs("none")
    original, port = TINY[name].build(), TINY[name].build()
    assert {"last_hidden_state", "pooler_output"} <= original(**inputs).keys()
    assert regard.compare(original, port, inputs).kind == "no difference"
    with torch.no_grad():
        port.pooler.dense.weight.mul_(2)
    comparison = regard.compare(original, port, inputs)
    assert (comparison.kind, comparison.first.module) == ("module", "pooler.dense")


def test_patches_that_are_projected_otherwise_are_no_other_tokens():
    inputs = TINY["ViT"].inputs("none")
    original, port = TINY["ViT"].build(), TINY["ViT"].build()
    torch.nn.init.normal_(port.embeddings.patch_embeddings.projection.weight)
    comparison = regard.compare(original, port, inputs)
    assert (comparison.kind, comparison.first.module) == ("module", "embeddings.patch_embeddings.projection")


def test_an_output_that_was_not_recorded_is_stated():
    model = build_llama()
    runs = [record(model, values=values, **LLAMA_INPUTS) for values in (True, False)]
    expected = "No difference in 3 layers; the output of the model was not recorded: watch(values=True)."
    assert regard.compare(*runs).summary == expected


def replace_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def test_another_class_of_module_is_named():
    comparison = compare_llama(replace_activation)
    assert comparison.first.module == "model.layers.1.mlp.act_fn" and comparison.first.layer == 2
    assert "SiLUActivation in A, GELU in B" in comparison.first.message
    assert comparison.layers.column("kind") == ["no difference", "no difference", "module"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.2.mlp.down_proj",
        "model.norm",
        "lm_head",
    ],
)
def test_the_module_whose_weight_was_changed_is_named(name, dtype):
    comparison = compare_llama(lambda model: model.get_submodule(name).weight[::2].mul_(3), dtype=dtype)
    assert (comparison.kind, comparison.first.module) == ("module", name)


def test_code_between_two_modules_is_named():
    class Block(torch.nn.Module):
        """Attention, and a residual with a factor."""

        def __init__(self, factor):
            super().__init__()
            self.norm, self.attn = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
            self.out, self.factor = torch.nn.Linear(16, 16), factor

        def forward(self, x):
            q, k, v = self.attn(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).flatten(2)) * self.factor + x

    def build(factor):
        torch.manual_seed(0)
        return torch.nn.Sequential(Block(1.0), Block(factor), torch.nn.LayerNorm(16)).eval()

    x = torch.linspace(-1, 1, 160).sin().reshape(2, 5, 16)
    comparison = regard.compare(build(1.0), build(0.5), x)
    assert (comparison.kind, comparison.first.module) == ("module", "1")
    assert "1 (Block) has the same input but a different output" in comparison.first.message
    assert "the code around them" in comparison.first.message


class Renamed(torch.nn.Module):
    """A decoder whose modules have other names, and a fused projection if `fused`."""

    def __init__(self, names, fused, activation):
        super().__init__()
        torch.manual_seed(0)
        self.names, self.fused = names, fused
        weights = [
            torch.randn(48, 16) / 4,
            torch.randn(16, 16) / 4,
            torch.randn(32, 16) / 4,
            torch.randn(16, 32) / 4,
        ]
        self.parts = torch.nn.ModuleDict({names[0]: torch.nn.Embedding(61, 16)})
        torch.nn.init.normal_(self.parts[names[0]].weight)
        for layer in range(2):
            projections = weights[0].split(48 if fused else 16)
            for word, weight in zip(
                (*(f"p{i}" for i in range(len(projections))), "o", "up", "down"),
                (*projections, *weights[1:]),
                strict=True,
            ):
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data = weight * (layer + 1)
                self.parts[f"{names[1]}{layer}{word}"] = linear
            self.parts[f"{names[1]}{layer}act"] = activation if layer else torch.nn.ReLU()

    def forward(self, ids):
        x = self.parts[self.names[0]](ids)
        for layer in range(2):
            get = lambda word: self.parts[f"{self.names[1]}{layer}{word}"]  # noqa: B023, E731
            projected = torch.cat([get(f"p{i}")(x) for i in range(1 if self.fused else 3)], -1)
            q, k, v = projected.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + get("o")(y.transpose(1, 2).flatten(2))
            x = x + get("down")(get("act")(get("up")(x)))
        return x


@pytest.mark.parametrize("fused", [False, True])
def test_modules_with_other_names_are_matched(fused):
    ids = make_inputs()["input_ids"]
    original = Renamed(("embed", "layer"), False, torch.nn.ReLU()).eval()
    port = Renamed(("wte", "h"), fused, torch.nn.ReLU()).eval()
    assert regard.compare(original, port, ids).agrees
    faulty = Renamed(("wte", "h"), fused, torch.nn.GELU()).eval()
    comparison = regard.compare(original, faulty, ids)
    assert comparison.first.module == "parts.layer1act / parts.h1act"
    assert "ReLU in A, GELU in B" in comparison.first.message


def test_a_difference_that_ends_is_not_the_module():
    def change(model):
        attention = model.model.layers[0].self_attn
        attention.q_proj.weight.mul_(4)
        attention.k_proj.weight.mul_(0.25)
        model.model.norm.weight.mul_(2)

    comparison = compare_llama(change)
    assert comparison.first.module == "model.norm"


def test_a_prefix_is_compared_if_later_tokens_cannot_matter():
    model, ids = build_llama(), LLAMA_INPUTS["input_ids"]
    longer = record(model, input_ids=ids)
    faulty = build_llama()
    replace_activation(faulty)
    comparison = regard.compare(record(faulty, input_ids=ids[:, :7]), longer)
    assert comparison.first.module == "model.layers.1.mlp.act_fn"
    with torch.no_grad(), regard.watch(model, values=True) as cached:
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    comparison = regard.compare(record(model, input_ids=tokens[:, :-1]), cached)
    assert comparison.agrees and comparison.missing_output


def test_a_fault_of_the_prompt_is_not_the_tokens_that_were_generated_from_it():
    faulty = build_llama()
    replace_activation(faulty)
    with torch.no_grad():
        faulty.model.layers[1].mlp.down_proj.weight.mul_(20)
    runs = []
    for model in (build_llama(), faulty):
        with torch.no_grad(), regard.watch(model, values=True) as recording:
            tokens = model.generate(**LLAMA_INPUTS, max_new_tokens=4, do_sample=False, eos_token_id=None)
        runs.append((recording, tokens))
    assert not torch.equal(runs[0][1], runs[1][1])
    comparison = regard.compare(runs[0][0], runs[1][0])
    assert comparison.first.module == "model.layers.1.mlp.act_fn"


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma 2"])
def test_a_cache_that_keeps_no_more_than_the_window_agrees(name, side):
    model, inputs = TINY[name].build(), TINY[name].inputs(side)
    runs = []
    for use_cache in (True, False):
        with torch.no_grad(), regard.watch(model, values=True) as recording:
            model.generate(
                **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, use_cache=use_cache
            )
        runs.append(recording)
    assert regard.compare(*runs).kind == "rounding" and regard.compare(*reversed(runs)).kind == "rounding"


# Values that are not finite


def test_where_nan_began_comes_before_any_other_difference():
    def change(model):
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
        model.model.layers[1].mlp.down_proj.weight[3, 3] = torch.nan

    comparison = compare_llama(change)
    assert (comparison.kind, comparison.first.module) == ("NaN or inf", "model.layers.1.mlp.down_proj")
    assert comparison.first.layer == 2 and "whose input is finite" in comparison.first.message
    assert [finding.kind for finding in comparison.findings] == ["NaN or inf", "scale"]
    comparison = compare_llama(lambda model: model.lm_head.weight[5].fill_(torch.inf))
    assert (comparison.kind, comparison.first.module, comparison.first.layer) == ("NaN or inf", "lm_head", -1)
    both = (
        record(break_head(build_llama()), **LLAMA_INPUTS),
        record(break_head(build_llama()), **LLAMA_INPUTS),
    )
    assert regard.compare(*both).agrees
    assert "A has NaN" in regard.compare(both[0], record(build_llama(), **LLAMA_INPUTS)).first.message


def break_head(model):
    with torch.no_grad():
        model.lm_head.weight[5, 5] = torch.nan
    return model


def test_scores_that_overflow_in_eager_attention_are_no_mask():
    def build(implementation, factor):
        model = build_llama(initializer_range=0.25).half()
        with torch.no_grad():
            for linear in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
                linear.weight.mul_(factor)
        model.set_attn_implementation(implementation)
        return model

    clean, faulty = build("sdpa", 1), build("eager", 400)
    comparison = regard.compare(clean, faulty, LLAMA_INPUTS)
    assert comparison.kind == "NaN or inf" and comparison.first.layer == 1
    assert (
        "between model.layers.1.self_attn.v_proj and model.layers.1.self_attn.o_proj"
        in comparison.first.message
    )
    assert "query, key and scores are unknown" in comparison.first.message
    assert all(finding.kind != "mask" for finding in comparison.findings)
    runs = [record(model, values=False, **LLAMA_INPUTS) for model in (clean, faulty)]
    comparison = regard.compare(*runs)
    assert comparison.kind == "NaN or inf" and "unknown" in comparison.first.message


# Hints


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one key head for all", "one key-value head to all query heads"),
        ("padding mask of heads, not of entries", "Head h of B has the mask of batch entry h"),
        ("cross-attention with queries from the encoder", "Swap the two"),
        ("Gemma 3 with windows on the wrong layers", "the mask of A's layers 0, 2 is on B's layers 1, 3"),
        ("OPT without the offset of its positions", "Compare the offset of the position table"),
        ("GPT-NeoX with queries, keys and values in blocks", "in blocks (all queries, all keys, all values)"),
        ("heads merged channel by channel", "Merge heads with"),
        ("QK norm forgotten", "blocks.0.attn.k_norm, blocks.0.attn.q_norm ran in A only"),
        ("norm of the key forgotten", "blocks.0.attn.k_norm ran in A only"),
        ("QK norm after the rotation", "Compare the code before blocks.0.attn.q_norm"),
        ("values rotated", "not to the value"),
        ("scale of the key width", "√kv_heads"),
        ("causal mask of one token more", "the key after each token"),
        ("cached keys rotated by the positions of the step", "rotate cached keys by their own positions"),
    ],
)
def test_the_hint_names_the_mistake_of_a_port(name, text):
    bug = PORT_BUGS[name]
    comparison = regard.compare(record_bug(bug, clean=True), record_bug(bug, clean=False))
    assert (comparison.kind, comparison.first.layer) == (bug.difference, bug.layer)
    assert text in comparison.first.hint


def test_layers_that_attend_to_their_own_states_are_not_swapped():
    comparison = compare_llama(
        lambda model: torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.weight)
    )
    assert comparison.kind == "projection" and "q_proj (Linear) is the first module" in comparison.first.hint


# Models


def test_models_are_run_on_the_inputs_and_their_weights_compared():
    original, port = build_llama(), build_llama()
    assert regard.compare(original, port, LLAMA_INPUTS).kind == "no difference"
    with torch.no_grad():
        port.model.norm.weight.mul_(1.1)
    for comparison in (
        regard.compare(original, port, LLAMA_INPUTS),
        regard.compare(original, port, LLAMA_INPUTS["input_ids"]),
        regard.compare(original, port, LLAMA_INPUTS, inputs_b={**LLAMA_INPUTS, "use_cache": False}),
    ):
        assert (
            comparison.first.module == "model.norm" and comparison.first.hint == "Its weights differ: weight."
        )
    comparison = regard.compare(record(original, **LLAMA_INPUTS), port, LLAMA_INPUTS)
    assert comparison.first.module == "model.norm" and "Compare its weights" in comparison.first.hint
    port = build_llama(rms_norm_eps=1.0)
    comparison = regard.compare(original, port, LLAMA_INPUTS)
    assert comparison.first.module == "model.layers.0.input_layernorm"
    assert "Its weights agree: compare its settings" in comparison.first.hint


def test_the_trace_is_saved_and_its_size_is_bounded(tmp_path):
    pytest.importorskip("safetensors")
    model, ids = build_llama(), torch.arange(400)[None] % 60
    runs = [record(model, input_ids=ids)]
    model.model.norm.weight.data *= 1.1
    runs.append(record(model, input_ids=ids))
    assert all(len(event.output[0]) == 32 for event in runs[0]._trace.events if event.output is not None)
    for name, run in zip("ab", runs, strict=True):
        run.save(tmp_path / name)
    loaded = [regard.load_recording(tmp_path / name) for name in "ab"]
    assert repr(regard.compare(*loaded)) == repr(regard.compare(*runs))
    assert regard.compare(*loaded).first.module == "model.norm"


def test_recording_the_modules_leaves_outputs_bit_identical():
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), encoder, torch.nn.ReLU(inplace=True)).eval()
    x = torch.linspace(-1, 1, 160).sin().reshape(2, 5, 16)
    with torch.no_grad():
        expected = model(x)
        with regard.watch(model, values=True) as recording:
            output = model(x)
    assert torch.equal(output, expected)
    assert [event.name for event in recording._trace.events] == ["0", "2", ""]
