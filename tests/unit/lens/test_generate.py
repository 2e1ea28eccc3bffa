"""Prefill and steps of `generate()` with every kind of cache: one matrix, equal to that of one pass, or an error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tiny_models import TINY, list_functions, needs_t5_attention  # noqa: E402

NEW = 9
GENERATES = [name for name, tiny in TINY.items() if tiny.generates]


@pytest.fixture(autouse=True)
def check_nothing_stays_patched():
    before = list_functions()
    with torch.no_grad():
        yield
    after = list_functions()
    assert [name for name, function in after.items() if before.get(name, function) is not function] == []


def generate(model, inputs, **options):
    given = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    config = hf.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    if isinstance(model, hf.WhisperForConditionalGeneration):
        # Whisper's own method splits audio into segments; call the method that all models share.
        config.decoder_start_token_id, config.bos_token_id, config.eos_token_id = 3, 1, 2
        return hf.GenerationMixin.generate(model, **given, generation_config=config)
    return model.generate(**given, generation_config=config)


def one_pass_inputs(model, inputs, tokens):
    """Return the inputs of a single pass over the generated sequence."""
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": tokens[:, :-1]}
    ahead = torch.ones(len(tokens), NEW - 1, dtype=torch.long)
    real = torch.cat([inputs["attention_mask"], ahead], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens[:, :-1], "attention_mask": real, "position_ids": positions}


def assert_same_calls(recording, index, one):
    """Compare call `index` of every layer, the sequences of one cache, with a pass over the sequence."""
    assert list(recording) == list(one)
    for layer in recording:
        weights, others = recording.calls(layer)[index].matrix.to_dense(), one[layer].to_dense()
        assert_matches(weights, others, others, dtype="float32", score_error=2e-5, ordinary=True, what=layer)


def assert_same(recording, one, real=None):
    assert list(recording) == list(one)
    for layer in recording:
        A, B = recording[layer], one[layer]
        assert A.shape == B.shape, layer
        weights, others = A.to_dense(), B.to_dense()
        if real is not None and A.shape[-2] == real.shape[1]:
            live = (real.cumsum(1) > 0)[:, None].expand(A.shape[:-1])
            weights, others = weights[live], others[live]
        # Steps add in a different order than one pass, and so do all layers below.
        assert_matches(weights, others, others, dtype="float32", score_error=2e-5, ordinary=True, what=layer)


def check(name, side, **options):
    model, inputs = TINY[name].build(), TINY[name].inputs(side)
    plain = generate(model, inputs, **options)
    with regard.watch(model) as recording:
        tokens = generate(model, inputs, **options)
    assert torch.equal(tokens, plain)
    given = one_pass_inputs(model, inputs, tokens)
    with regard.watch(model) as one:
        model(**given)
    assert_same(recording, one, given.get("attention_mask"))
    return recording, one


@pytest.mark.parametrize(
    ("name", "side"), [(n, s) for n in GENERATES for s in (("none", "left") if TINY[n].pads else ("none",))]
)
def test_steps_are_rows_of_one_matrix(name, side):
    recording, one = check(name, side)
    for layer in recording:
        (call,) = recording.calls(layer)
        is_encoder = "encoder.layers" in layer or layer.startswith("encoder.block")
        assert call.steps == (1 if is_encoder else NEW)
        if "fully masked" not in repr(one[layer].mask):
            assert recording[layer].mask == one[layer].mask


T5 = pytest.param("T5", marks=needs_t5_attention)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", T5, "Gemma 2"])
def test_static_caches(name, side):
    check(name, side, cache_implementation="static")


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_prompt_in_chunks_through_one_cache(name):
    model, inputs = TINY[name].build(), TINY[name].inputs("none")
    tokens = inputs["input_ids"]
    with regard.watch(model) as recording:
        cache = hf.DynamicCache(config=model.config)
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 11)):
            model(input_ids=tokens[:, start:stop], past_key_values=cache)
    with regard.watch(model) as one:
        model(input_ids=tokens)
    assert_same(recording, one)
    assert recording.calls("model.layers.0.self_attn")[0].steps == 4


def test_memory_is_that_of_one_pass():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model) as recording:
        tokens = generate(model, inputs)
    with regard.watch(model) as one:
        model(**one_pass_inputs(model, inputs, tokens))
    assert recording.nbytes == one.nbytes


def test_the_window_of_a_rolling_cache_keeps_absolute_positions():
    model, inputs = TINY["Mistral"].build(), TINY["Mistral"].inputs("none")
    with regard.watch(model) as recording:
        generate(model, inputs)
    A = recording["model.layers.0.self_attn"]
    assert A.shape[-2:] == (19, 19) and A.mask == regard.sliding_window(5)


def test_a_cache_that_was_cut_back_keeps_both_continuations():
    """A loop that proposes three tokens, keeps one, and crops the cache."""
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    tokens = inputs["input_ids"]
    proposed = torch.cat([tokens[:, :6], tokens[:, :2]], 1)
    with regard.watch(model) as recording:
        cache = hf.DynamicCache(config=model.config)
        model(input_ids=proposed[:, :5], past_key_values=cache)
        model(input_ids=proposed[:, 5:], past_key_values=cache)
        cache.crop(-2)
        model(input_ids=tokens[:, 6:], past_key_values=cache)
    for index, sequence in enumerate((proposed, tokens)):
        with regard.watch(model) as one:
            model(input_ids=sequence)
        assert_same_calls(recording, index, one)


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_beam_search_is_rejected(name):
    model, inputs = TINY[name].build(), TINY[name].inputs("none")
    with regard.watch(model) as recording:
        generate(model, inputs, num_beams=3)
    decoding = [layer for layer in recording if not layer.startswith("encoder")]
    assert decoding
    for layer in decoding:
        with pytest.raises(ArgumentError, match=r"[Rr]un the model once on the generated sequence"):
            recording[layer]
        assert all(call.query.shape[0] == 6 for call in recording.calls(layer))


@pytest.mark.parametrize("name", ["Llama", "BART"])
def test_speculative_decoding_is_rejected(name):
    model, inputs = TINY[name].build(), TINY[name].inputs("none", batch=1)
    # An end token that differs from BART's start token: in 5.0 and 5.10 this decoding ends at once if they are equal.
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": 60}
    plain = generate(model, inputs, **options)
    with regard.watch(model) as recording:
        assert torch.equal(generate(model, inputs, **options), plain)
    for layer in (layer for layer in recording if "encoder.layers" not in layer):
        with pytest.raises(
            ArgumentError, match="speculative decoding, which discards proposed tokens"
        ) as error:
            recording[layer]
        assert "Run the model once" in error.value.hint
    for method in (
        recording.heads,
        recording.diagnose,
        lambda: recording.find(1, 0),
        lambda: recording.rollout(1),
    ):
        with pytest.raises(ArgumentError, match="discards proposed tokens"):
            method()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_calls_of_an_assistant_model_are_not_recorded(attention):
    """Its layers run inside a method of the watched model, whose calls they are not."""
    model, assistant = TINY["Llama"].build(), TINY["Llama"].build()
    model.set_attn_implementation(attention)
    assistant.set_attn_implementation(attention)
    for parameter in assistant.parameters():
        parameter.mul_(1.5)
    inputs = TINY["Llama"].inputs("none", batch=1)
    with regard.watch(model) as one:
        model(**inputs)
    with regard.watch(model) as recording, regard.watch(assistant) as of_assistant:
        model.generate(
            **inputs, assistant_model=assistant, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    assert list(recording) == list(one)
    assert list(of_assistant) == list(one)
    ablated = regard.interventions.ablate(0, heads=0)
    with regard.intervene(model, ablated) as run:
        model.generate(
            **inputs, assistant_model=assistant, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    assert [row["module"] for row in run.applied] == list(one)[:1]


def test_two_passes_are_two_calls():
    model, inputs = TINY["GPT-2"].build(), TINY["GPT-2"].inputs("none")
    with regard.watch(model) as recording:
        model(**inputs)
        model(**inputs)
    with pytest.raises(ArgumentError, match=r"2 calls .*recording.calls\('transformer.h.0.attn'\)"):
        recording["transformer.h.0.attn"]
    first, second = recording.calls("transformer.h.0.attn")
    assert torch.equal(first.matrix.to_dense(), second.matrix.to_dense())


def test_without_a_cache_the_hint_names_the_last_call():
    model = TINY["Llama"].build()
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(**TINY["Llama"].inputs("none"), max_new_tokens=3, do_sample=False, use_cache=False)
    name = next(iter(recording))
    with pytest.raises(regard.ArgumentError) as caught:
        recording[name]
    assert f"recording.calls({name!r})[-1].matrix" in str(caught.value) and "[0]" not in str(caught.value)
    assert [call.shape[-1] for call in recording.calls(name)] == [11, 12, 13]


def test_equal_keys_are_not_a_cache():
    """Keys that were computed again are equal, but not the same tensor, so the rows are not joined."""

    class Attention(torch.nn.Module):
        def forward(self, query, key):
            return torch.nn.functional.scaled_dot_product_attention(query, key, key)

    layer, key = Attention(), torch.randn(1, 2, 11, 8)
    with regard.watch(layer) as recording:
        layer(torch.randn(1, 2, 3, 8), key.clone())
        layer(torch.randn(1, 2, 1, 8), key.clone())
    assert [call.shape[-2:] for call in recording.calls("")] == [(3, 11), (1, 11)]
    with regard.watch(layer) as recording:  # one tensor: queries of one decoder over one encoder
        layer(torch.randn(1, 2, 3, 8), key)
        layer(torch.randn(1, 2, 1, 8), key)
    assert recording[""].shape == (1, 2, 4, 11)


def test_one_query_over_two_values_is_two_calls():
    """As in differential attention."""

    class Attention(torch.nn.Module):
        def forward(self, query, key):
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(query, key, key) - attend(query, key, 2 * key)

    layer = Attention()
    with regard.watch(layer) as recording:
        layer(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    first, second = recording.calls("")
    assert first.shape == second.shape == (1, 2, 5, 5)


def test_a_watch_makes_few_calls_of_its_own():
    """What a watch adds to a short `generate()` is small: a step stores its rows."""
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, prompt = hf.LlamaForCausalLM(config).eval(), torch.arange(1, 11)[None]
    source, calls = str(Path(regard.__file__).parent), 0

    def run(profile=None):
        # Entering is not counted: it looks for names in every module that other tests imported.
        with regard.watch(model) as recording:
            sys.setprofile(profile)
            tokens = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True, pad_token_id=0)
            sys.setprofile(None)
        return tokens, recording

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(source)

    run()  # reads the installed files, and imports what is imported later
    before = sys.getprofile()
    try:
        tokens, recording = run(count)
    finally:
        sys.setprofile(before)
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0))
    assert {call.steps for name in recording for call in recording.calls(name)} == {tokens.shape[1] - 10}
    assert 500 < calls < 1800, calls
