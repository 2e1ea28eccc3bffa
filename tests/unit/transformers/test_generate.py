"""Generated text with `attn_implementation="regard"`: tokens of sdpa, weights of eager attention, keys stored once."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard.testing import assert_matches  # noqa: E402
from regard.transformers import UnrecordedWeights, choose_layers  # noqa: E402
from tests.helpers.tensors import limit_score_error  # noqa: E402
from tests.helpers.tiny_models import TINY, needs_t5_attention, softmax_in_own_dtype  # noqa: E402

STEPS = 9
OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
}
CASES = [
    *(("Llama", "greedy"), ("Llama", "sampling"), ("Llama", "static"), ("Llama", "beams")),
    *(
        ("Mistral", "greedy"),
        ("Mistral", "static"),
        pytest.param("T5", "static", marks=needs_t5_attention),
        ("BART", "greedy"),
        ("GPT-OSS", "static"),
    ),
]


def generate(model: Any, name: str, **options: Any) -> Any:
    """Generate from two prompts, the second padded on the left."""
    inputs = TINY[name].inputs("left")
    inputs.pop("decoder_input_ids", None)
    torch.manual_seed(0)
    given = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, **options}
    return model.generate(**inputs, **given, return_dict_in_generate=True, output_logits=True)


def list_steps(output: Any) -> list[tuple[Any, ...]]:
    """List the weights of each step: those of self-attention, then those of cross-attention."""
    if getattr(output, "decoder_attentions", None) is None:
        return list(output.attentions)
    return [a + b for a, b in zip(output.decoder_attentions, output.cross_attentions, strict=True)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_logits_and_weights(name, mode):
    model = TINY[name].build("regard")
    ours = generate(model, name, output_attentions=True, **OPTIONS[mode])
    eager = generate(TINY[name].build("eager"), name, output_attentions=True, **OPTIONS[mode])
    with softmax_in_own_dtype():
        exact = generate(
            TINY[name].build("eager", torch.float64), name, output_attentions=True, **OPTIONS[mode]
        )
    assert torch.equal(ours.sequences, eager.sequences) and torch.equal(ours.sequences, exact.sequences)
    if name != "GPT-OSS":
        plain = generate(TINY[name].build("sdpa"), name, **OPTIONS[mode])
        assert torch.equal(ours.sequences, plain.sequences) and all(
            map(torch.equal, ours.logits, plain.logits)
        )
    steps = [list_steps(output) for output in (ours, eager, exact)]
    assert len(steps[0]) == len(steps[1]) == STEPS
    for lazy, naive, wide in zip(*steps, strict=True):
        for a, b, c in zip(lazy, naive, wide, strict=True):
            assert a.shape == b.shape
            dense = a.to_dense()
            live = dense.sum(-1) > 0
            drift = limit_score_error(a.matrix)
            assert_matches(dense[live], c[live], b[live], dtype="float32", score_error=drift, what=name)


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("Llama", None),
        ("Llama", "static"),
        ("Mistral", None),
        pytest.param("T5", None, marks=needs_t5_attention),
    ],
)
def test_keys_are_stored_once(name, cache):
    output = generate(TINY[name].build("regard"), name, output_attentions=True, cache_implementation=cache)
    steps = list_steps(output)
    for layer in range(len(steps[0])):
        stores = {id(step[layer]._source.store) for step in steps}
        assert len(stores) == 1
        store = steps[0][layer]._source.store
        assert store.nbytes <= 300 * store.read(0, 1).nbytes  # 20 tokens, and room for 256


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("inference", [False, True])
def test_weights_stay_right_when_a_static_cache_is_used_again(name, inference):
    model = TINY[name].build("regard")
    cache = hf.StaticCache(model.config, max_cache_len=24)
    prompts = torch.randint(3, 61, (2, 1, 9), generator=torch.Generator().manual_seed(0))

    def run(prompt: Any) -> list[Any]:
        cache.reset()
        rows = []
        for tokens in (prompt[:, :6], prompt[:, 6:7], prompt[:, 7:8], prompt[:, 8:]):
            seen = int(cache.get_seq_length()) + tokens.shape[1]
            output = model(
                tokens,
                attention_mask=torch.ones(1, seen, dtype=torch.long),
                past_key_values=cache,
                output_attentions=True,
            )
            rows.append(output.attentions)
        return rows

    with torch.inference_mode() if inference else torch.no_grad():
        first = run(prompts[0])
        before = [layer.to_dense() for step in first for layer in step]
        again = run(prompts[0])
        run(prompts[1])
    after = [layer.to_dense() for step in again for layer in step]
    assert all(map(torch.equal, before, after))
    assert after[-1].sum() == pytest.approx(4)


def test_a_cropped_cache_begins_a_new_store():
    model = TINY["Llama"].build("regard")
    tokens = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cache = model(tokens[:, :7]).past_key_values
        long = model(tokens[:, 7:9], past_key_values=cache, output_attentions=True).attentions[1]
        cache.crop(-3)
        short = model(tokens[:, 8:], past_key_values=cache, output_attentions=True).attentions[1]
        expected = model(torch.cat([tokens[:, :6], tokens[:, 8:]], 1), output_attentions=True).attentions[1]
        whole = model(tokens, output_attentions=True).attentions[1]
    assert torch.allclose(short[..., -1, :], expected[..., -1, :], atol=1e-6)
    assert torch.allclose(long.to_dense(), whole[..., -2:, :], atol=1e-6)


def test_two_texts_in_turn_are_kept_apart():
    """Texts that differ in one early token: most keys of the first layer are the same numbers."""
    model = TINY["Llama"].build("regard")
    texts = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    texts[1, 2] = 60
    with torch.no_grad():
        caches = [model(text[None, :7], output_attentions=True).past_key_values for text in texts]
        held = []
        for at in (7, 8):
            for text, cache in zip(texts, caches, strict=True):
                output = model(text[None, at : at + 1], past_key_values=cache, output_attentions=True)
                held.append((text[: at + 1], output.attentions))
        for text, attentions in held:
            whole = model(text[None], output_attentions=True).attentions
            for row, matrix in zip(attentions, whole, strict=True):
                assert torch.allclose(row[..., 0, :], matrix[..., -1, :], atol=1e-6)


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.utils.output_capturing") is None,
    reason="this release of transformers collects the weights of all threads in one list",
)
def test_threads_do_not_share_stores():
    model = TINY["Llama"].build("regard")
    results: dict[int, Any] = {}

    def run(seed: int) -> None:
        torch.manual_seed(seed)
        prompt = torch.randint(3, 61, (1, 6), generator=torch.Generator().manual_seed(seed))
        results[seed] = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6, do_sample=False,
            output_attentions=True, return_dict_in_generate=True,
        )  # fmt: skip

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for output in results.values():
        with torch.no_grad():
            whole = model(output.sequences, output_attentions=True).attentions
        for at, step in enumerate(output.attentions[1:]):
            for row, matrix in zip(step, whole, strict=True):
                assert torch.allclose(row[0, :, 0], matrix[0, :, 6 + at, : 7 + at], atol=1e-6)


def test_chosen_layers_of_generated_text():
    model = TINY["Llama"].build("regard")
    choose_layers(model, 1)
    output = generate(model, "Llama", output_attentions=True)
    assert all(isinstance(step[0], UnrecordedWeights) for step in output.attentions)
    assert all(step[1].shape[-1] == 11 + at for at, step in enumerate(output.attentions))


def test_steps_of_one_cache_share_their_keys_on_another_device():
    output = generate(TINY["Llama"].build("regard"), "Llama", output_attentions=True)
    moved = [step[0].to("meta") for step in output.attentions]
    assert {str(weights.device) for weights in moved} == {"meta"}
    assert len({id(weights._source.store) for weights in moved}) == 1
    assert moved[3].shape == output.attentions[3][0].shape
