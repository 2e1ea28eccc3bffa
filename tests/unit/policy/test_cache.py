"""`policy.cache`: outputs of the policy as masks, memory of the policy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard.errors import ArgumentError, ArgumentTypeError  # noqa: E402
from regard.policy import FULL, CachePolicy  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.policy_caches import (  # noqa: E402
    build_model,
    draw_tokens,
    make_policy,
    run_cached,
    run_masked,
)
from tests.helpers.tiny_models import TINY  # noqa: E402

LENGTH = 29
CHUNKS = {
    "at once": [LENGTH],
    "single steps": [1] * LENGTH,
    "chunks": [2, 3, 7, 1, 1, 15],
    "prompt and steps": [20, *[1] * 9],
}
SERVED = ("GPT-2", "Llama", "Mistral", "Qwen3", "Gemma 2", "GPT-OSS")
# One run of each family, and all of Llama; the rest of the product runs at night.
CASES = [
    pytest.param(name, chunks, seed, marks=[] if is_chosen else [pytest.mark.nightly])
    for name in SERVED
    for chunks in CHUNKS
    for seed in range(2)
    for is_chosen in [(name == "Llama" and seed == 0) or (chunks, seed) == ("chunks", 1)]
]


def assert_equal(actual, expected):
    """Check float64 results against each other, by the fixed bound of the error rule."""
    assert_matches(actual.numpy(), expected.numpy(), expected.numpy() + 1e-13, dtype="float64", ordinary=True)


@pytest.mark.parametrize(("name", "chunks", "seed"), CASES)
def test_outputs_are_those_of_the_masks(name, chunks, seed):
    model, tokens = build_model(name), draw_tokens(2, LENGTH)
    policy = make_policy(model, seed=seed)
    expected = run_masked(model, policy, tokens)
    assert not torch.allclose(model(tokens, use_cache=False).logits, expected, atol=1e-3)
    assert_equal(run_cached(model, policy.cache(model), tokens, CHUNKS[chunks]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_rule(dtype):
    model, tokens = build_model("Llama", dtype), draw_tokens(2, LENGTH)
    policy = make_policy(model)
    exact = run_masked(build_model("Llama", dtype).double(), policy, tokens)
    masked = run_masked(model, policy, tokens)
    cached = run_cached(model, policy.cache(model), tokens, CHUNKS["chunks"])
    assert_matches(cached.double().numpy(), exact.numpy(), masked.double().numpy(), dtype=str(dtype)[6:])


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", ["Llama", pytest.param("Gemma 2", marks=pytest.mark.nightly)])
def test_padding_on_the_left(name, chunks):
    model, tokens, lengths = build_model(name), draw_tokens(3, LENGTH), (LENGTH - 2, 17, 3)
    policy = make_policy(model, seed=1)
    real = torch.stack([torch.arange(LENGTH) >= LENGTH - length for length in lengths]).long()
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache = policy.cache(model)
    logits = run_cached(
        model, cache, tokens * real, CHUNKS[chunks], attention_mask=real, position_ids=positions
    )
    for row, length in enumerate(lengths):
        # The sinks of a row are its own first tokens, as without padding.
        expected = run_masked(model, policy, tokens[row : row + 1, -length:])
        assert_equal(logits[row, -length:], expected[0])


def test_a_mask_of_the_caller():
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    cache = make_policy(model, seed=1).cache(model)
    expected = run_cached(model, cache, tokens, [12, 5])
    cache.reset()
    causal = torch.ones(17, 17, dtype=torch.bool).tril()
    additive = torch.zeros(17, 17, dtype=torch.float64).masked_fill(~causal, torch.finfo(torch.float64).min)
    with torch.no_grad():
        for part in (slice(12), slice(12, 17)):
            mask = additive[None, None, part, : part.stop]
            logits = model(tokens[:, part], past_key_values=cache, attention_mask=mask).logits
            assert_equal(logits, expected[:, part])


def test_other_caches_and_none_keep_their_outputs():
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    real = torch.ones_like(tokens)
    real[1, :5] = 0
    model.set_attn_implementation("sdpa")
    inputs = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        plain, padded = model(tokens).logits, model(tokens, **inputs).logits
        make_policy(model).cache(model)
        assert torch.equal(model(tokens).logits, plain)
        assert_equal(model(tokens, **inputs).logits[real.bool()], padded[real.bool()])
    for cache in (hf.DynamicCache(), hf.StaticCache(config=model.config, max_cache_len=40)):
        assert_equal(run_cached(model, cache, tokens, CHUNKS["chunks"]), plain)
    rows = run_cached(model, hf.DynamicCache(), tokens, CHUNKS["chunks"], **inputs)
    assert_equal(rows[real.bool()], padded[real.bool()])


def test_bytes_are_those_of_the_policy():
    model = build_model("Llama", torch.float32)
    policy = make_policy(model, [[FULL, 40], [7, FULL]], [[0, 4], [3, 0]])
    cache, length = policy.cache(model), 1024
    run_cached(model, cache, draw_tokens(1, length), [500, 100, *[1] * 24, 400])
    tensors = [tensor for layer in cache.layers for store in layer.stores for tensor in store.slots]
    stored = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert cache.num_bytes == stored
    assert stored == pytest.approx(policy.num_bytes(length), rel=0.02)
    assert stored < 0.6 * length * 2 * 2 * 16 * 4


def test_steps_do_not_copy_what_is_stored():
    model = build_model("Llama", torch.float32)
    cache = make_policy(model, [[FULL, 40]], [[0, 4]]).cache(model)
    tokens = draw_tokens(1, 664)
    run_cached(model, cache, tokens, [600])
    moved, addresses = 0, None
    for step in range(64):
        run_cached(model, cache, tokens[:, 600 + step :], [1])
        stores = [store for layer in cache.layers for store in layer.stores]
        previous, addresses = addresses, [store.slots[0].data_ptr() for store in stores]
        moved += addresses != previous
    assert moved <= 9  # 600 tokens grow by 9 at a time


def test_generate():
    model = build_model("Llama")
    policy = make_policy(model, seed=1)
    inputs = TINY["Llama"].inputs("left")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    cached = model.generate(**inputs, **options, past_key_values=policy.cache(model))
    for row, real in enumerate(inputs["attention_mask"].bool()):
        tokens = inputs["input_ids"][row : row + 1, real]
        for token in cached[row, -12:]:
            logits = run_masked(model, policy, tokens)[0, -1]
            assert logits[token] >= logits[3:].max() - 1e-9
            tokens = torch.cat([tokens, token[None, None]], 1)


def test_beams_are_those_of_separate_runs():
    model = build_model("Llama")
    policy, inputs = make_policy(model, seed=1), TINY["Llama"].inputs("left")
    options = {
        "max_new_tokens": 9,
        "min_new_tokens": 9,
        "do_sample": False,
        "num_beams": 3,
        "output_scores": True,
    }
    options |= {"return_dict_in_generate": True, "length_penalty": 0.0}
    found = model.generate(**inputs, **options, past_key_values=policy.cache(model))
    for row, real in enumerate(inputs["attention_mask"].bool()):
        tokens = torch.cat([inputs["input_ids"][row, real], found.sequences[row, -9:]])[None]
        rows = run_masked(model, policy, tokens)[0, -10:-1]
        score = rows.log_softmax(-1).gather(1, tokens[0, -9:, None]).sum()
        assert score == pytest.approx(float(found.sequences_scores[row]), abs=1e-3)


def test_assisted_generation():
    model, assistant = build_model("Llama"), build_model("Llama")
    policy, prompt = make_policy(model, seed=1), TINY["Llama"].inputs("none", 1)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(0.01)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    plain = model.generate(**prompt, **options, past_key_values=policy.cache(model))
    assisted = model.generate(
        **prompt, **options, past_key_values=policy.cache(model), assistant_model=assistant
    )
    assert torch.equal(plain, assisted)


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_crop_restores_what_left_the_windows(steps):
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    policy = make_policy(model, seed=1)
    expected = run_masked(model, policy, tokens)
    cache = policy.cache(model)
    run_cached(model, cache, tokens, [10])
    cache.activate_past_recording()
    run_cached(model, cache, draw_tokens(2, 12, seed=5), [5, 7] if steps == 12 else [12 - steps, steps])
    cache.crop(-12)
    run_cached(model, cache, tokens[:, 10:], [3, 1])
    cache.crop(0)
    assert cache.get_seq_length() == 14
    assert_equal(run_cached(model, cache, tokens[:, 14:], [15]), expected[:, 14:])


def test_crop_without_recording_is_refused_and_changes_nothing():
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    policy = make_policy(model, [[FULL, 5]], 2)
    expected = run_masked(model, policy, tokens)
    cache = policy.cache(model)
    run_cached(model, cache, tokens, [6])
    cache.crop(-2)
    run_cached(model, cache, tokens[:, 4:], [16])
    with pytest.raises(ArgumentError, match="activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(ArgumentError, match="as a negative number"):
        cache.crop(2)
    assert_equal(run_cached(model, cache, tokens[:, 20:], [9]), expected[:, 20:])


def test_rows_are_reordered_selected_and_repeated():
    model, tokens = build_model("Llama"), draw_tokens(3, LENGTH)
    policy = make_policy(model, seed=1)
    expected = run_masked(model, policy, tokens)
    cache = policy.cache(model)
    run_cached(model, cache, tokens, [20])
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    assert_equal(run_cached(model, cache, tokens[rows, 20:], [1, 2]), expected[rows, 20:23])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0])
    assert_equal(run_cached(model, cache, tokens[rows, 23:], [6]), expected[rows, 23:])


def test_reset_empties_the_cache():
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    policy = make_policy(model, seed=1)
    cache = policy.cache(model)
    run_cached(model, cache, draw_tokens(3, 11, seed=3), [11])
    cache.reset()
    assert (cache.get_seq_length(), cache.num_bytes) == (0, 0)
    assert_equal(run_cached(model, cache, tokens, [LENGTH]), run_masked(model, policy, tokens))


def test_nan_in_padding_and_evicted_tokens_does_not_matter():
    model, tokens = build_model("Llama"), draw_tokens(2, LENGTH)
    policy = make_policy(model, [[3, 5]], [[0, 1]])
    real = torch.ones_like(tokens)
    real[1, :6] = 0
    expected = run_masked(model, policy, tokens[1:, 6:])
    broken = model.get_input_embeddings().weight.data
    broken[0] = float("nan")
    positions = (real.cumsum(1) - 1).clamp(min=0)
    cache = policy.cache(model)
    logits = run_cached(
        model, cache, tokens * real, CHUNKS["prompt and steps"], attention_mask=real, position_ids=positions
    )
    assert_equal(logits[1, 6:], expected[0])


REFUSED = {"T5": "an encoder and a decoder", "DeepSeek-V3": "one cached latent"}


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_served_are_refused(name):
    model = TINY[name].build()
    with pytest.raises(ArgumentError, match=REFUSED[name]):
        CachePolicy([[4, 4]] * 2, [[0, 0]] * 2, ["a", "b"]).cache(model)


def test_whisper_is_refused_and_an_untested_family_is_reported():
    config = hf.WhisperConfig(
        vocab_size=61, d_model=16, decoder_layers=2, decoder_attention_heads=2, pad_token_id=0
    )
    with pytest.raises(ArgumentError, match="the decoder of Whisper"):
        CachePolicy([[4, 4]] * 2, [[0, 0]] * 2, ["a", "b"]).cache(hf.WhisperForCausalLM(config))
    model = build_model("Llama")
    policy = make_policy(model)
    model.config.model_type = "a new family"
    with pytest.warns(UserWarning, match="the family 'a new family' has not been tested"):
        policy.cache(model)


def test_attention_without_the_interface_is_refused():
    config = hf.GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
    model = hf.GPTJForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(ArgumentError, match="GPTJForCausalLM with attention code of its own"):
        CachePolicy([[4] * 4] * 2, [[0] * 4] * 2, ["a", "b"]).cache(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("is_decoder", [True, False])
def test_bert_is_served_as_a_decoder_only(is_decoder):
    config = hf.BertConfig.from_dict(TINY["BERT"].config.to_dict() | {"is_decoder": is_decoder})
    model, tokens = hf.BertLMHeadModel(config).eval().double(), draw_tokens(1, 9)
    layers = [f"bert.encoder.layer.{layer}.attention.self" for layer in range(2)]
    policy = CachePolicy([[3] * 4] * 2, [[1] * 4] * 2, layers)
    if is_decoder:
        expected = run_masked(model, policy, tokens)
        assert_equal(run_cached(model, policy.cache(model), tokens, [5, 1, 3]), expected)
    else:
        with pytest.raises(ArgumentError, match="attends to later tokens"):
            run_cached(model, policy.cache(model), tokens, [9])


def test_wrong_policies_and_models_are_refused():
    model, tokens = build_model("Llama"), draw_tokens(1, 4)
    with pytest.raises(ArgumentError, match="a policy of 1 layers for 2"):
        CachePolicy([[4, 4]], [[0, 0]], ["a"]).cache(model)
    with pytest.raises(ArgumentTypeError, match="a transformers model"):
        make_policy(model).cache(torch.nn.Linear(2, 2))
    with torch.no_grad(), pytest.raises(ArgumentError, match="keys of 2 heads"):
        model(tokens, past_key_values=CachePolicy([[4] * 3] * 2, [[0] * 3] * 2, ["a", "b"]).cache(model))
    cache = make_policy(model).cache(model)
    with pytest.raises(ArgumentError, match="require gradients"):
        model(tokens, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(ArgumentError, match="attn_implementation='sdpa'"):
        model(tokens, past_key_values=cache)


def test_keys_that_change_on_their_way_are_refused():
    model, tokens = build_model("Llama"), draw_tokens(1, 4)
    cache = make_policy(model).cache(model)
    update = cache.update
    cache.update = lambda *args: tuple(tensor.clone() for tensor in update(*args))
    with torch.no_grad(), pytest.raises(ArgumentError, match="did not reach the attention function"):
        model(tokens, past_key_values=cache)


def test_layers_are_matched_by_name():
    model, tokens = build_model("Llama"), draw_tokens(1, LENGTH)
    policy = make_policy(model, seed=1)
    swapped = CachePolicy(policy.windows[::-1], policy.sinks[::-1], policy.layers[::-1], policy.about)
    expected = run_cached(model, policy.cache(model), tokens, [LENGTH])
    assert torch.equal(run_cached(model, swapped.cache(model), tokens, [LENGTH]), expected)
    assert not np.array_equal(policy.windows, swapped.windows)
