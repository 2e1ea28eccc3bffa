"""`attn_implementation="regard"`: outputs are those of sdpa, weights those of eager attention."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from regard.transformers import AttentionWeights  # noqa: E402
from regard.transformers.attention_function import attention_forward, create_mask  # noqa: E402
from tests.helpers.base_models import VARIANTS, build_model  # noqa: E402
from tests.helpers.tiny_models import (  # noqa: E402
    TINY,
    eager_weights,
    needs_t5_attention,
    output_tensors,
    softmax_in_own_dtype,
)


def test_both_functions_are_registered():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    assert hf.AttentionInterface()["regard"] is attention_forward
    assert ALL_MASK_ATTENTION_FUNCTIONS["regard"] is create_mask


def test_a_family_without_sdpa_is_not_taken_for_causal():
    """Its layers do not declare `is_causal`, and `sdpa` would apply a causal mask where it gets none."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = hf.AlignTextModel(hf.AlignTextConfig(vocab_size=50, **sizes)).eval()
    assert not model._supports_sdpa
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        eager = model(tokens).last_hidden_state
        model.set_attn_implementation("regard")
        torch.testing.assert_close(model(tokens).last_hidden_state, eager)


def test_a_family_with_its_own_softmax_gets_the_mask_of_eager():
    """It adds the mask to its scores, where a boolean one would be wrong without an error."""
    config = hf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)
    tokens, kept = torch.arange(8).reshape(2, 4), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    logits = []
    for implementation in ("eager", "regard"):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            logits.append(model(tokens, attention_mask=kept).logits)
    assert torch.equal(*logits)


@pytest.mark.skipif(not hasattr(hf, "DeepseekV4Config"), reason="this release has no DeepSeek-V4")
def test_a_family_that_extends_its_masks_gets_the_mask_of_eager():
    """DeepSeek-V4 appends numbers to the mask, which as booleans would mean the opposite."""
    model, _, inputs, _ = build_model(hf.DeepseekV4Model, hf.DeepseekV4Config, next(iter(VARIANTS)))
    outputs = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*outputs)


CASES = [
    *(("GPT-2", "none"), ("BERT", "right"), ("Llama", "left"), ("Mistral", "right")),
    pytest.param("T5", "left", marks=needs_t5_attention),
    *(("BART", "left"), ("ViT", "none"), ("Whisper", "none"), ("DeepSeek-V3", "none")),
    *(("Gemma 2", "left"), ("GPT-OSS", "right")),
]


@pytest.mark.parametrize(("name", "side"), CASES)
def test_outputs_and_weights(name, side):
    """The whole product of models, padding and generation is in scripts/docs implementation-coverage."""
    tiny, inputs = TINY[name], TINY[name].inputs(side)
    double = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    model = tiny.build("regard")
    with torch.no_grad():
        plain, recorded = model(**inputs), model(**inputs, output_attentions=True)
        eager = tiny.build("eager")(**inputs, output_attentions=True)
        with softmax_in_own_dtype():
            exact = tiny.build("eager", torch.float64)(**double, output_attentions=True)
        reference = (
            None if tiny.implementation == "eager" or name == "GPT-OSS" else tiny.build("sdpa")(**inputs)
        )
    for output in (plain, recorded):
        if reference is None:
            _, naive, wide = (output_tensors(each)[0] for each in (output, eager, exact))
            live = slice(4, None) if side == "left" else slice(None)  # padding may attend to nothing
            ours = output_tensors(output)[0][:, live]
            size = wide.abs().amax()
            assert_matches(ours, wide[:, live], naive[:, live], dtype="float32", magnitude=size, what=name)
        else:
            expected = output_tensors(reference)
            assert all(map(torch.equal, output_tensors(output)[: len(expected)], expected))
    lazy = eager_weights(recorded)
    assert len(lazy) == len(eager_weights(eager)) > 0
    for ours, naive, wide in zip(lazy, eager_weights(eager), eager_weights(exact), strict=True):
        assert isinstance(ours, AttentionWeights) and ours.shape == naive.shape
        dense = ours.to_dense()
        live = dense.sum(-1) > 0
        assert live.float().mean() > 0.7
        assert_matches(dense[live], wide[live], naive[live], dtype="float32", what=name)


def test_weights_that_are_not_requested_cost_nothing():
    model, inputs = TINY["Llama"].build("regard"), TINY["Llama"].inputs("none")
    layer, seen = model.model.layers[0].self_attn, []
    layer.register_forward_hook(lambda module, args, output: seen.append(output[1]))
    with mock.patch("regard.transformers.attention_function._record") as record:
        output = model(**inputs)
        assert output.attentions is None
        if seen == [None]:
            assert not record.called
        else:  # releases without a way to know record every call
            assert record.called


def test_a_recorded_call_does_not_hold_the_model():
    model = TINY["GPT-2"].build("regard")
    weights = model(**TINY["GPT-2"].inputs("none"), output_attentions=True).attentions[0].detach()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None and weights[0, 0, 0, 0] == 1


def test_dense_masks_are_not_held():
    inputs = TINY["Llama"].inputs("left")
    with torch.no_grad():
        output = TINY["Llama"].build("regard")(**inputs, output_attentions=True)
    for weights in output.attentions:
        call = weights._source
        assert call.args.attn_mask is None and call.compact_mask.nbytes == 0
    assert repr(output.attentions[0].matrix.mask) == "causal() & padding([11, 7], side='left')"


def test_a_saved_model_is_loaded_with_the_implementation(tmp_path):
    TINY["Llama"].build().save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="regard")
    inputs = TINY["Llama"].inputs("none")
    with torch.no_grad():
        ours = model(**inputs, output_attentions=True)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(**inputs).logits, ours.logits)
    assert isinstance(ours.attentions[0], AttentionWeights)
    model.set_attn_implementation("regard")
    # transformers itself allows the setting for eager attention only.
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
    with pytest.raises(Exception, match="`output_attentions` attribute is not supported"):
        hf.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="regard", output_attentions=True
        )


def test_watch_and_intervene_read_the_implementation():
    for name in ("Llama", "Gemma 2"):
        model, inputs = TINY[name].build("regard"), TINY[name].inputs("none")
        with torch.no_grad():
            plain = model(**inputs, output_attentions=True)
            with regard.watch(model) as recording:
                watched = model(**inputs)
            with regard.intervene(model, regard.interventions.ablate("model.layers.1.self_attn", heads=0)):
                edited = model(**inputs)
        assert torch.equal(plain.logits, watched.logits) and not torch.equal(plain.logits, edited.logits)
        for matrix, weights in zip(recording.values(), plain.attentions, strict=True):
            assert torch.allclose(matrix.to_dense(), weights.to_dense(), atol=1e-6)


@pytest.mark.parametrize("name", ["indices", "block_indices", "cache"])
def test_arguments_that_sdpa_alone_supports_are_refused(name):
    module, tensor = torch.nn.Identity(), torch.ones(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match='Load it with attn_implementation="sdpa"'):
        attention_forward(module, tensor, tensor, tensor, None, **{name: torch.ones(1)})


def test_dropout_of_capped_scores_is_refused():
    module, tensor = torch.nn.Identity(), torch.ones(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match=r"dropout of 0.1 in a layer with a soft cap or a sink"):
        attention_forward(module, tensor, tensor, tensor, None, dropout=0.1, softcap=20.0)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_a_compiled_model_leaves_its_graph_only_to_record():
    module = torch.nn.Identity()
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    plain, _ = attention_forward(module, query, key, value, None, output_attentions=False)

    def run(*tensors: torch.Tensor, requested: bool) -> object:
        return attention_forward(module, *tensors, None, output_attentions=requested)

    whole = torch.compile(run, backend="eager", fullgraph=True)
    assert torch.equal(whole(query, key, value, requested=False)[0], plain)
    output, weights = torch.compile(run, backend="eager")(query, key, value, requested=True)
    assert torch.equal(output, plain)
    assert torch.allclose((weights.to_dense() @ value).transpose(1, 2), plain, atol=1e-6)
