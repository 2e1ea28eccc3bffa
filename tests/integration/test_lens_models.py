"""The lens on twelve architectures of transformers: nothing changes, and it tells what eager attention tells."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import NotCapturedError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tiny_models import TINY, Tiny, every_name, tensors, told_weights  # noqa: E402

SIDES = [
    (name, side)
    for name, tiny in TINY.items()
    for side in (("none", "left", "right") if tiny.pads else ("none",))
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = every_name()
    with torch.no_grad():
        yield
    after = every_name()
    assert {name: each for name, each in after.items() if before.get(name, each) is not each} == {}


def live(real: object, weights: object, causal: bool) -> np.ndarray:
    """Rows that see a key at all: with padding on the left a causal row before the first token has none."""
    rows = np.ones((*weights.shape[:1], weights.shape[-2]), bool)
    if real is not None and causal and weights.shape[-2] == weights.shape[-1] == real.shape[1]:
        rows = np.cumsum(np.asarray(real), 1) > 0
    return rows


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_nothing_changes_and_weights_are_those_of_eager_attention(name, side, monkeypatch):
    tiny = TINY[name]
    model, inputs = tiny.build(), tiny.inputs(side)
    plain = model(**inputs)
    with regard.watch(model) as recording:
        watched = model(**inputs)
    for before, after in zip(tensors(plain), tensors(watched), strict=True):
        assert torch.equal(before, after)

    naive = told_weights(tiny.build("eager")(**inputs, output_attentions=True))
    double = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
    with monkeypatch.context() as patch:
        # Many models ask for a softmax in float32 whatever they are in.
        softmax = torch.nn.functional.softmax
        patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
        exact = told_weights(tiny.build("eager", torch.float64)(**double, output_attentions=True))
    assert len(recording) == len(exact)
    for layer, definition, rough in zip(recording, exact, naive, strict=True):
        A = recording[layer]
        assert A.shape == definition.shape
        rows = live(
            inputs.get("attention_mask"), definition, "causal" in repr(A.mask) or "window" in repr(A.mask)
        )
        if model.config._attn_implementation == "eager":
            rows = np.ones_like(rows)  # what eager attention makes of dead rows is told, too
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
def test_masks_come_back_by_their_names(name, side):
    tiny = TINY[name]
    model = tiny.build()
    with regard.watch(model) as recording:
        model(**tiny.inputs(side))
    A = next(iter(recording.values()))
    assert repr(A.mask) == MASKS[name, side]
    # Nothing of q_len × kv_len is held: queries, keys, lse.
    call = recording.calls(next(iter(recording)))[0]
    lse = 0 if call.lse is None else call.lse.nbytes
    assert call.nbytes == call.query.nbytes + call.key.nbytes + lse


def test_the_bias_of_t5_is_its_table():
    model, inputs = TINY["T5"].build(), TINY["T5"].inputs("left")
    with regard.watch(model) as recording:
        model(**inputs)
    told = {layer: recording.calls(layer)[0].score_mods for layer in recording}
    for layer, score_mods in told.items():
        if "EncDec" in layer:
            assert score_mods == ()
        else:
            (bias,) = score_mods
            stack = model.encoder if layer.startswith("encoder") else model.decoder
            table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            assert torch.equal(bias.table, table) and bias.bidirectional is layer.startswith("encoder")
    assert recording.nbytes == sum(call.nbytes for layer in recording for call in recording.calls(layer))


def test_keys_of_a_group_are_held_once():
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
def test_either_implementation_is_read(implementation):
    model, inputs = TINY["Llama"].build(implementation), TINY["Llama"].inputs("right")
    with regard.watch(model) as recording:
        model(**inputs)
    kernels = {recording.calls(layer)[0].kernel for layer in recording}
    assert kernels == {
        {"sdpa": "torch: flash on CPU", "eager": "transformers: eager_attention_forward"}[implementation]
    }


BY_THEMSELVES = {
    "BLOOM": Tiny(hf.BloomForCausalLM, hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)),
    "MPT": Tiny(
        hf.MptForCausalLM, hf.MptConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    ),
    "GPT-J": Tiny(
        hf.GPTJForCausalLM,
        hf.GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    ),
}


@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_layers_that_use_no_known_function_are_refused(name):
    model, inputs = BY_THEMSELVES[name].build(), BY_THEMSELVES[name].inputs("none")
    with (
        pytest.raises(NotCapturedError, match=r"gave nothing.*computes its weights by itself") as error,
        regard.watch(model),
    ):
        model(**inputs)
    assert "Attention" in str(error.value) and "layers=" in error.value.hint


def test_a_model_without_attention_is_refused():
    model = hf.MambaModel(
        hf.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4)
    ).eval()
    with pytest.raises(NotCapturedError, match="gave nothing"), regard.watch(model):
        model(torch.arange(3, 9)[None])


def test_an_attention_function_that_does_something_else_is_refused():
    def louder(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        weights = (1.5 * scaling * query @ key.repeat_interleave(2, 1).mT + attention_mask).softmax(-1)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), weights

    hf.AttentionInterface.register("louder", louder)
    hf.AttentionMaskInterface.register("louder", hf.masking_utils.eager_mask)
    try:
        model = TINY["Llama"].build("louder")
        with pytest.raises(NotCapturedError, match="louder returned other weights"), regard.watch(model):
            model(**TINY["Llama"].inputs("left"))
        assert hf.AttentionInterface._global_mapping["louder"] is louder
    finally:
        del (
            hf.AttentionInterface._global_mapping["louder"],
            hf.AttentionMaskInterface._global_mapping["louder"],
        )


def test_an_attention_function_of_ones_own_is_read_from_its_arguments():
    def quiet(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        weights = (scaling * query @ key.repeat_interleave(2, 1).mT + attention_mask).softmax(-1)
        return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), None

    hf.AttentionInterface.register("quiet", quiet)
    hf.AttentionMaskInterface.register("quiet", hf.masking_utils.eager_mask)
    try:
        model, plain = TINY["Llama"].build("quiet"), TINY["Llama"].build("eager")
        with regard.watch(model) as recording:
            model(**TINY["Llama"].inputs("left"))
        with regard.watch(plain) as told:
            plain(**TINY["Llama"].inputs("left"))
        for layer in recording:
            torch.testing.assert_close(recording[layer].to_dense(), told[layer].to_dense())
    finally:
        del hf.AttentionInterface._global_mapping["quiet"], hf.AttentionMaskInterface._global_mapping["quiet"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_half_precision(dtype):
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
def test_dropout_draws_what_it_drew(implementation):
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
    # Dropout is not in the matrix: it is what the layer would weigh without.
    torch.testing.assert_close(call.matrix.to_dense(), still["model.layers.0.self_attn"].to_dense())
