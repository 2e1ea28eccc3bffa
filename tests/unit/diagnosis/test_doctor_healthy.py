"""`regard.doctor` finds no error in healthy models of more than sixty architectures."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from regard import doctor  # noqa: E402
from tests.helpers.healthy_models import HEALTHY, REQUIRES, VISION_LANGUAGE  # noqa: E402

# ModernBERT of transformers 5.0 compiles functions when its file is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

# Models that read no tokens have fewer experiments.
FEW_PASSES = {"ViT", "DINOv2", "CLIP", "Swin", "timm ViT", "timm Swin", "timm EVA-02"}


def test_there_are_sixty_healthy_models_and_five_that_read_images_and_text():
    assert len(HEALTHY) - len(REQUIRES) >= 60 and len(VISION_LANGUAGE) >= 5
    assert set(VISION_LANGUAGE) < set(HEALTHY)


def runs_in_chunks(model, ids):
    """Return whether a model runs on several tokens after a cache; StableLM of transformers 5.0 does not."""
    cache = model(ids[:, :4], use_cache=True).past_key_values
    try:
        return model(ids[:, 4:7], past_key_values=cache).logits.shape[1] == 3
    except RuntimeError:
        return False


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_has_no_errors(name):
    if name in REQUIRES:
        pytest.importorskip(REQUIRES[name])
    model, inputs = HEALTHY[name]()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    findings = doctor(model, inputs)
    assert findings.by_severity("error") == [], findings
    failed = [
        check.name for check in findings.checks if "raised" in check.reason or "does not run" in check.reason
    ]
    expected = []
    if name == "StableLM" and not runs_in_chunks(model, inputs["input_ids"]):
        expected = ["cache, chunks of three"]
    assert failed == expected, findings.checks
    passes = int(re.search(r"(\d+) forward passes", findings.scope)[1])
    assert (4 if name in FEW_PASSES else 12) <= passes <= 60
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["Llama 4", "Cohere 2"])
def test_layers_that_have_no_positions_on_purpose_are_no_warning(name):
    findings = doctor(*HEALTHY[name]())
    assert not [finding for finding in findings if finding.kind.startswith("rotary")], findings


def test_a_norm_after_the_rotation_on_purpose_is_no_error():
    findings = doctor(*HEALTHY["HunYuan"]())
    assert not findings.by_severity("error"), findings
    assert "norm after rotary" not in {finding.kind for finding in findings}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "GPT-2", "Qwen3", "BERT", "T5"])
def test_a_model_in_float64_has_no_finding_unless_padding_makes_it_return_nan(name, implementation):
    """Eager attention masks with the lowest float64, which is −inf in its float32 softmax: NaN in rows of padding."""
    model, inputs = HEALTHY[name]()
    model = model.double()
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{name} of this release has no {implementation} attention")
    padded = {key: value for key, value in inputs.items() if key != "attention_mask"}
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, :4] = 0
    with torch.no_grad():
        output = model(**padded, attention_mask=mask)[0]
    returns_nan = bool(output[1, -1].isnan().any())
    findings = doctor(model, inputs)
    assert [finding.kind for finding in findings] == ["NaN or inf"] * returns_nan, findings
    if returns_nan:
        assert findings[0].severity == "error" and "layers.0.self_attn" in findings[0].module
