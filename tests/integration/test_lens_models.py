"""`regard.watch` on twelve architectures of transformers: outputs stay, and weights equal those of eager attention."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tiny_models import (  # noqa: E402
    TINY,
    TinyModel,
    eager_weights,
    list_functions,
    needs_t5_attention,
    output_tensors,
)

SIDES = [
    (name, side)
    for name, tiny in TINY.items()
    for side in (("none", "left", "right") if tiny.pads else ("none",))
]


@pytest.fixture(autouse=True)
def check_nothing_stays_patched():
    before = list_functions()
    with torch.no_grad():
        yield
    after = list_functions()
    assert [name for name, function in after.items() if before.get(name, function) is not function] == []


def find_live_rows(real: object, weights: object, causal: bool) -> np.ndarray:
    """Find the rows that attend to a key: with padding on the left, a causal row before the first token does not."""
    rows = np.ones((*weights.shape[:1], weights.shape[-2]), bool)
    if real is not None and causal and weights.shape[-2] == weights.shape[-1] == real.shape[1]:
        rows = np.cumsum(np.asarray(real), 1) > 0
    return rows


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_outputs_stay_and_weights_equal_eager_attention(name, side, monkeypatch):
    tiny = TINY[name]
    model, inputs = tiny.build(), tiny.inputs(side)
    plain = model(**inputs)
    with regard.watch(model) as recording:
        watched = model(**inputs)
    for before, after in zip(output_tensors(plain), output_tensors(watched), strict=True):
        assert torch.equal(before, after)

    naive = eager_weights(tiny.build("eager")(**inputs, output_attentions=True))
    double = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    with monkeypatch.context() as patch:
        # Many models compute the softmax in float32 whatever their dtype.
        softmax = torch.nn.functional.softmax
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        exact = eager_weights(tiny.build("eager", torch.float64)(**double, output_attentions=True))
    assert len(recording) == len(exact)
    for layer, definition, rough in zip(recording, exact, naive, strict=True):
        A = recording[layer]
        assert A.shape == definition.shape
        rows = find_live_rows(
            inputs.get("attention_mask"), definition, "causal" in repr(A.mask) or "window" in repr(A.mask)
        )
        if model.config._attn_implementation == "eager":
            rows = np.ones_like(rows)  # fully masked rows are compared, too
        pick = torch.tensor(np.broadcast_to(rows[:, None], definition.shape[:-1]))
        assert_matches(
            A.to_dense()[pick], definition[pick], rough[pick], dtype="float32", what=f"{name} {layer}"
        )


MASKS = {
    ("GPT-2", "none"): "causal()",
    ("GPT-2", "left"): "causal() & padding([11, 7], side='left')",
    ("GPT-2", "right"): "causal() & padding([11, 7])",
    ("BERT", "none"): "None",
    ("BERT", "left"): "padding([11, 7], side='left')",
    ("BERT", "right"): "padding([11, 7])",
    ("Mistral", "none"): "sliding_window(5)",
    ("Mistral", "left"): "sliding_window(5) & padding([11, 7], side='left')",
    ("DeepSeek-V3", "left"): "causal() & padding([11, 7], side='left')",
    ("GPT-OSS", "right"): "sliding_window(5) & padding([11, 7])",
}


@pytest.mark.parametrize(("name", "side"), MASKS)
def test_masks_are_recognised(name, side):
    tiny = TINY[name]
    model = tiny.build()
    with regard.watch(model) as recording:
        model(**tiny.inputs(side))
    A = next(iter(recording.values()))
    assert repr(A.mask) == MASKS[name, side]
    # Only queries, keys and lse are held, nothing of q_len × kv_len.
    call = recording.calls(next(iter(recording)))[0]
    lse = 0 if call.lse is None else call.lse.nbytes
    assert call.nbytes == call.query.nbytes + call.key.nbytes + lse


@needs_t5_attention
def test_the_bias_of_t5_is_recognised_by_its_table():
    model, inputs = TINY["T5"].build(), TINY["T5"].inputs("left")
    with regard.watch(model) as recording:
        model(**inputs)
    for layer in recording:
        score_mods = recording.calls(layer)[0].score_mods
        if "EncDec" in layer:
            assert score_mods == ()
        else:
            (bias,) = score_mods
            stack = model.encoder if layer.startswith("encoder") else model.decoder
            table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            assert torch.equal(bias.table, table) and bias.bidirectional is layer.startswith("encoder")
    assert recording.nbytes == sum(call.nbytes for layer in recording for call in recording.calls(layer))


def test_keys_of_a_group_are_stored_once():
    model, inputs = (
        TINY["Llama"].build(),
        TINY["Llama"].inputs("left"),
    )  # padded: transformers repeats the keys
    with regard.watch(model) as recording:
        model(**inputs)
    (call, *_) = recording.calls("model.layers.0.self_attn")
    assert (call.query.shape[1], call.key.shape[1]) == (4, 2)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Mistral", "Qwen3", "DeepSeek-V3", "Gemma 2", "GPT-OSS"])
def test_a_changed_future_token_changes_no_past_row(name):
    tiny = TINY[name]
    model, inputs = tiny.build(), tiny.inputs("none")
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 8:] = 5
    with regard.watch(model) as recording:
        model(**inputs)
    with regard.watch(model) as other:
        model(**changed)
    for layer in recording:
        weights, others = recording[layer].to_dense(), other[layer].to_dense()
        assert not weights[..., :8, 8:].any()
        torch.testing.assert_close(weights[..., :8, :], others[..., :8, :], atol=1e-6, rtol=0)
        assert not torch.equal(weights, others)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_either_implementation_is_captured(implementation):
    model, inputs = TINY["Llama"].build(implementation), TINY["Llama"].inputs("right")
    with regard.watch(model) as recording:
        model(**inputs)
    kernels = {recording.calls(layer)[0].kernel for layer in recording}
    assert kernels == {
        {"sdpa": "torch: flash on CPU", "eager": "transformers: eager_attention_forward"}[implementation]
    }


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
UNCAPTURED = {
    "Longformer": TinyModel(hf.LongformerModel, hf.LongformerConfig(**SIZES, attention_window=4)),
    "YOSO": TinyModel(hf.YosoModel, hf.YosoConfig(**SIZES, use_expectation=True)),
}
REASONS = {
    "Longformer": r"computes a softmax of shape \(2, 12, 4, 5\) that reaches no product with a value",
    "YOSO": "computes its weights without calling a watched function",
}


@pytest.mark.parametrize("name", UNCAPTURED)
def test_layers_that_call_no_watched_function_are_rejected(name):
    model, inputs = UNCAPTURED[name].build(), UNCAPTURED[name].inputs("none")
    with (
        pytest.raises(
            NotCapturedError,
            match=rf"was not captured.*{REASONS[name]}",
        ) as error,
        regard.watch(model),
    ):
        model(**inputs)
    assert "Attention" in str(error.value) and "layers=" in error.value.hint


def test_a_model_without_attention_is_rejected():
    model = hf.MambaModel(
        hf.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).eval()
    with pytest.raises(NotCapturedError, match="was not captured"), regard.watch(model):
        model(torch.arange(3, 9)[None])


def test_an_attention_function_with_other_weights_is_read_from_its_softmax():
    computed = []

    def louder(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        weights = (1.5 * scaling * query @ key.repeat_interleave(2, 1).mT + attention_mask).softmax(-1)
        computed.append(weights)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), weights

    hf.AttentionInterface.register("louder", louder)
    hf.AttentionMaskInterface.register("louder", hf.masking_utils.eager_mask)
    try:
        model = TINY["Llama"].build("louder")
        with regard.watch(model) as recording:
            model(**TINY["Llama"].inputs("left"))
        for layer, weights in zip(recording, computed, strict=True):
            assert torch.equal(recording[layer].to_dense(), weights)
            assert recording.calls(layer)[0].kernel == "transformers: louder"
        assert hf.AttentionInterface._global_mapping["louder"] is louder
    finally:
        del (
            hf.AttentionInterface._global_mapping["louder"],
            hf.AttentionMaskInterface._global_mapping["louder"],
        )


def test_a_registered_attention_function_is_captured_by_its_arguments():
    def quiet(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        weights = (scaling * query @ key.repeat_interleave(2, 1).mT + attention_mask).softmax(-1)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    hf.AttentionInterface.register("quiet", quiet)
    hf.AttentionMaskInterface.register("quiet", hf.masking_utils.eager_mask)
    try:
        model, plain = TINY["Llama"].build("quiet"), TINY["Llama"].build("eager")
        with regard.watch(model) as recording:
            model(**TINY["Llama"].inputs("left"))
        with regard.watch(plain) as eager:
            plain(**TINY["Llama"].inputs("left"))
        for layer in recording:
            torch.testing.assert_close(recording[layer].to_dense(), eager[layer].to_dense())
    finally:
        del hf.AttentionInterface._global_mapping["quiet"], hf.AttentionMaskInterface._global_mapping["quiet"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype):
    tiny = TINY["Llama"]
    model, inputs = tiny.build(dtype=dtype), tiny.inputs("left")
    plain = model(**inputs).logits
    with regard.watch(model) as recording:
        assert torch.equal(model(**inputs).logits, plain)
    A = recording["model.layers.0.self_attn"]
    assert A.dtype == torch.float32
    exact = tiny.build("eager")(**inputs, output_attentions=True).attentions[0]
    rough = tiny.build("eager", dtype)(**inputs, output_attentions=True).attentions[0]
    rows = (inputs["attention_mask"].cumsum(1)[:, None] > 0).expand(A.shape[:-1])
    name = str(dtype).removeprefix("torch.")
    assert_matches(A.to_dense()[rows], exact[rows], rough.float()[rows], dtype=name)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_dropout_stays_the_same(implementation):
    tiny = TINY["Llama"]
    model, inputs = tiny.build(implementation), tiny.inputs("right")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.4
    model.train()
    torch.manual_seed(7)
    plain = model(**inputs).logits
    torch.manual_seed(7)
    with regard.watch(model) as recording:
        assert torch.equal(model(**inputs).logits, plain)
    call = recording.calls("model.layers.0.self_attn")[0]
    assert (call.dropout_p, call.training) == (0.4, True)
    with regard.watch(model.eval()) as still:
        model(**inputs)
    # The matrix has the weights before dropout.
    torch.testing.assert_close(call.matrix.to_dense(), still["model.layers.0.self_attn"].to_dense())
