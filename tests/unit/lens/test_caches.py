"""Every way to use a cache, recorded and compared with eager attention: which calls are one sequence, and its rows."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from transformers.cache_utils import QuantizedLayer  # noqa: E402

import regard.transformers  # noqa: E402
from regard.engines import torch_kernels  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

NEW = 7


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def build(name="Llama"):
    """Build a model and its eager twin; neither stops early."""
    models = TINY[name].build(), TINY[name].build("eager")
    for model in models:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    return models


def draw_tokens(*shape, seed=5):
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def log_eager(model):
    """Collect the weights of every call of a model with eager attention, by layer."""
    weights, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith(("self_attn", "encoder_attn", "SelfAttention", "EncDecAttention")):

            def log(_, args, output, name=name):
                weights.setdefault(name, []).append(output[1])

            handles.append(module.register_forward_hook(log))
    yield weights
    for handle in handles:
        handle.remove()


def run_both(models, run):
    """Run a procedure with both models; return the recording and the eager weights of each layer."""
    model, eager = models
    with regard.watch(model) as recording:
        result = run(model)
    with log_eager(eager) as weights:
        expected = run(eager)
    if torch.is_tensor(result):
        assert torch.equal(result, expected)
    return recording, weights


def stack_rows(calls, evicts=False):
    """Stack the weights of consecutive calls, each over the newest keys if the cache evicts and the first otherwise."""
    rows = sum(call.shape[-2] for call in calls)
    stacked, end = [], 0
    for call in calls:
        end += call.shape[-2]
        start = end - call.shape[-1] if evicts else 0
        stacked.append(
            torch.nn.functional.pad(call[..., : rows - start], (start, max(0, rows - start - call.shape[-1])))
        )
    return torch.cat(stacked, -2)


def assert_equal_weights(call, expected, what):
    weights = call.matrix.to_dense()
    assert weights.shape == expected.shape, what
    # The layers below differ in rounding.
    assert_matches(weights, expected, expected, dtype="float32", score_error=2e-5, ordinary=True, what=what)


@pytest.mark.parametrize("length", [11, 1_200])
@pytest.mark.parametrize("differs_at", [0, 7, -1])
def test_guidance_keeps_two_prompts_apart(length, differs_at):
    """Prompts that differ in one token have almost the same keys, at any length."""
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2048, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).eval()
    eager = hf.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    prompt = draw_tokens(1, length)
    other = prompt.clone()
    other[0, differs_at] = 63 - other[0, differs_at]

    def run(model):
        return model.generate(
            prompt, negative_prompt_ids=other, guidance_scale=1.5, max_new_tokens=NEW, do_sample=False
        )

    recording, weights = run_both((model, eager), run)
    for name, calls in weights.items():
        assert len(recording.calls(name)) == 2
        for index, call in enumerate(recording.calls(name)):
            assert_equal_weights(call, stack_rows(calls[index::2]), f"{name}, prompt {index}")


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("turns", [(0, 1, 0, 1), (0, 0, 1, 1), (1, 2, 0, 2, 1, 0)])
def test_interleaved_caches(name, turns):
    """Several caches take turns; the prompts share all tokens but one."""
    models = build(name)
    prompts = draw_tokens(1, 9).repeat(3, 1)
    prompts[:, 2] = torch.tensor([5, 6, 7])

    def run(model):
        caches = [hf.DynamicCache(config=model.config) for _ in prompts]
        for tokens, cache in zip(prompts, caches, strict=True):
            model(tokens[None], past_key_values=cache)
        for step, index in enumerate(turns):
            model(draw_tokens(1, 2, seed=step), past_key_values=caches[index])

    recording, weights = run_both(models, run)
    for layer, calls in weights.items():
        for index, call in enumerate(recording.calls(layer)):
            steps = [
                calls[index],
                *(calls[len(prompts) + i] for i, turn in enumerate(turns) if turn == index),
            ]
            assert_equal_weights(call, stack_rows(steps, evicts=name == "Mistral"), f"{layer}, cache {index}")


def log_beams(eager, run):
    """Run beam search; return the tokens of the beams that are running at its last call."""
    tokens, orders = [], []

    def log_tokens(_, args, kwargs):
        tokens.append(kwargs.get("decoder_input_ids", kwargs.get("input_ids")))

    reorder = (
        hf.EncoderDecoderCache.reorder_cache
        if eager.config.is_encoder_decoder
        else hf.DynamicCache.reorder_cache
    )
    owner = hf.EncoderDecoderCache if eager.config.is_encoder_decoder else hf.DynamicCache
    handle = eager.register_forward_pre_hook(log_tokens, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            owner, "reorder_cache", lambda self, order: (orders.append(order), reorder(self, order))[1]
        )
        run(eager)
    handle.remove()
    running = tokens[0]
    for order, step in zip(orders, tokens[1:], strict=False):
        running = torch.cat([running[order], step], 1)
    return running, orders


@pytest.mark.parametrize("name", ["Llama", "Mistral", "BART"])
@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_follows_the_running_beams(name, beams):
    models = build(name)
    prompt = draw_tokens(2, 9)

    def run(model):
        return model.generate(
            prompt, num_beams=beams, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )

    recording, _ = run_both(models, run)
    running, orders = log_beams(models[1], run)
    assert any(not torch.equal(order, torch.arange(len(order))) for order in orders)
    with log_eager(models[1]) as weights:
        if models[1].config.is_encoder_decoder:
            models[1](input_ids=prompt.repeat_interleave(beams, 0), decoder_input_ids=running)
        else:
            models[1](running)
    for layer, (expected,) in weights.items():
        if "encoder.layers" not in layer:
            (call,) = recording.calls(layer)
            assert_equal_weights(call, expected, layer)


def test_beams_whose_order_is_not_known_stay_separate_calls():
    """Edited self-attention is not joined over a new order of the beams, so it cannot place cross-attention."""
    (model, eager), prompt = build("BART"), draw_tokens(1, 9)
    edit = regard.interventions.ablate("model.decoder.layers.1.self_attn", heads=1, queries=slice(1, 6))
    options = {"num_beams": 4, "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    with regard.intervene(model, edit, record=True) as run:
        model.generate(prompt, **options)
    layer = "model.decoder.layers.1.encoder_attn"
    with log_eager(eager) as weights, regard.intervene(eager, edit):
        eager.generate(prompt, **options)
    assert len(run.recording.calls(layer)) > 1
    rows = [row for call in run.recording.calls(layer) for row in call.matrix.to_dense().unbind(-2)]
    for row, expected in zip(rows, (call[..., 0, :] for call in weights[layer]), strict=True):
        assert_matches(row, expected, expected, dtype="float32", score_error=2e-5, ordinary=True, what=layer)


def test_assisted_decoding_records_no_rejected_token():
    models, prompt = build(), draw_tokens(1, 9)
    assistant = TINY["Llama"].build()
    for weight in assistant.parameters():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(8)), alpha=0.05)
    assistant.generation_config.eos_token_id = None

    def run(model):
        return model.generate(prompt, assistant_model=assistant, max_new_tokens=2 * NEW, do_sample=False)

    with regard.watch(models[0]) as recording:
        tokens = run(models[0])
    with log_eager(models[1]) as weights:
        models[1](tokens[:, :-1])
    for layer, (expected,) in weights.items():
        (call,) = recording.calls(layer)
        A, rows = call.matrix, expected.shape[-2]
        assert A.shape[-2] >= rows  # the last proposals may be longer than the text
        ours = A[..., :rows, :rows]
        assert_matches(ours, expected, expected, dtype="float32", score_error=2e-5, ordinary=True, what=layer)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_candidates_of_contrastive_search(name):
    """Each step expands the cache to three candidates and keeps one of them."""
    models, prompt = build(name), draw_tokens(1, 9)

    def run(model):
        cache = hf.DynamicCache(config=model.config)
        model(prompt, past_key_values=cache)
        kept = prompt
        for step in range(4):
            cache.batch_repeat_interleave(3)
            candidates = draw_tokens(3, 1, seed=step)
            model(candidates, past_key_values=cache)
            running = torch.cat([kept.repeat(3, 1), candidates], 1)
            cache.batch_select_indices(torch.tensor([step % 3]))
            kept = running[step % 3][None]
        return running

    model, eager = models
    with regard.watch(model) as recording:
        running = run(model)
    with log_eager(eager) as weights:
        eager(running)
    for layer, (expected,) in weights.items():
        assert_equal_weights(recording.calls(layer)[-1], expected, layer)
        assert [call.shape[-2] for call in recording.calls(layer)] == [10, 11, 12, 13]


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("lengths", [(3, 5), (5, 3), (4, 4), (1, 1, 2)])
def test_a_prefix_that_several_suffixes_share(name, lengths):
    models, prefix = build(name), draw_tokens(1, 4)
    suffixes = [draw_tokens(1, length, seed=30 + i) for i, length in enumerate(lengths)]

    def run(model):
        shared = hf.DynamicCache(config=model.config)
        model(prefix, past_key_values=shared)
        for suffix in suffixes:
            model(suffix, past_key_values=copy.deepcopy(shared))

    recording, weights = run_both(models, run)
    assert not any("cache" in finding.kind for finding in recording.diagnose())
    for layer, (first, *calls) in weights.items():
        for i, (call, expected) in enumerate(zip(recording.calls(layer), calls, strict=True)):
            stacked = stack_rows([first, expected], evicts=name == "Mistral")
            assert_equal_weights(call, stacked, f"{layer}, suffix {i}")


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("copy_is_first", [True, False])
def test_a_cache_and_its_copy_take_different_ways(steps, copy_is_first):
    """The steps after the fork are alike but for the cache that the model is given."""
    models = build()

    def run(model):
        cache = hf.DynamicCache(config=model.config)
        for tokens in (draw_tokens(1, 6), *draw_tokens(steps, 1, 1)):
            model(tokens, past_key_values=cache)
        caches = [copy.deepcopy(cache), cache] if copy_is_first else [cache, copy.deepcopy(cache)]
        for seed, own in enumerate(caches):
            for token in draw_tokens(4, 1, 1, seed=seed):
                model(token, past_key_values=own)

    recording, weights = run_both(models, run)
    assert not recording.diagnose()
    for layer, calls in weights.items():
        shared, ways = calls[: 1 + steps], (calls[1 + steps : 5 + steps], calls[5 + steps :])
        assert len(recording.calls(layer)) == 2
        for call, own in zip(recording.calls(layer), ways, strict=True):
            assert_equal_weights(call, stack_rows([*shared, *own]), layer)


def test_threads_that_generate_the_same_text(monkeypatch):
    """Another thread records a step while this one runs the kernel of the same step."""
    (model, eager), prompt, steps = build(), draw_tokens(2, 6), draw_tokens(12, 2, 1)
    run_kernel, turns = torch_kernels.rerun_flash_with_lse, threading.Barrier(2)

    def run_slowly(*args):
        time.sleep(0.002)
        return run_kernel(*args)

    monkeypatch.setattr(torch_kernels, "rerun_flash_with_lse", run_slowly)

    def generate():
        with torch.no_grad():
            cache = hf.DynamicCache(config=model.config)
            model(prompt, past_key_values=cache)
            for step, tokens in enumerate(steps):
                if step < 8:
                    turns.wait()
                model(tokens, past_key_values=cache)

    with regard.watch(model) as recording:
        threads = [threading.Thread(target=generate) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = eager(torch.cat([prompt, *steps], 1), output_attentions=True).attentions
    assert not recording.diagnose()
    for layer, weights in zip(recording, expected, strict=True):
        assert len(recording.calls(layer)) == 2
        for call in recording.calls(layer):
            assert_equal_weights(call, weights, layer)


def is_refused(matrix):
    """Return whether a matrix cannot be read because the model overwrote its keys."""
    try:
        matrix.to_dense()
    except regard.ArgumentError as error:
        return "the model overwrote" in str(error)
    return False


@pytest.mark.parametrize("at", [0, 1, 5])
def test_keys_that_the_model_changes_between_steps(at):
    """The rows before are refused: their keys are gone."""
    model, eager = build()

    def run(model, **options):
        cache, attentions = hf.DynamicCache(config=model.config), []
        for step, tokens in enumerate((draw_tokens(1, 6), *draw_tokens(8, 1, 1))):
            attentions.append(model(tokens, past_key_values=cache, **options).attentions)
            if step == at:
                cache.layers[0].keys.mul_(1.5)
        return attentions

    with regard.watch(model) as recording:
        run(model)
    layer = next(iter(recording))
    expected = [weights[0] for weights in run(eager, output_attentions=True)]
    before, after = recording.calls(layer)
    with pytest.raises(regard.ArgumentError, match="the model overwrote after the call"):
        before.matrix.to_dense()
    rows = [torch.nn.functional.pad(weights, (0, 14 - weights.shape[-1])) for weights in expected[at + 1 :]]
    assert_equal_weights(after, torch.cat(rows, -2), "after")

    model.set_attn_implementation("regard")
    lazy = [weights[0] for weights in run(model, output_attentions=True)]
    for step, (matrix, weights) in enumerate(zip(lazy, expected, strict=True)):
        if step <= at and is_refused(matrix):
            continue
        torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=0)


class RoundedLayer(QuantizedLayer):
    """A quantized layer of transformers whose numbers are rounded to 1/8."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round()

    def _dequantize(self, tensor):
        return tensor / 8


def test_a_quantized_cache_changes_old_keys():
    """Whenever it quantizes more keys, it begins another sequence; every call has the weights it was computed with."""
    models, prompt = build(), draw_tokens(2, 9)

    def run(model):
        cache = hf.Cache(
            layers=[RoundedLayer(residual_length=3) for _ in range(model.config.num_hidden_layers)]
        )
        for step, tokens in enumerate([prompt, *(draw_tokens(2, 1, seed=i) for i in range(8))]):
            model(tokens, past_key_values=cache, attention_mask=torch.ones(2, 9 + step, dtype=torch.long))

    recording, weights = run_both(models, run)
    for layer, calls in weights.items():
        recorded = recording.calls(layer)
        assert 1 < len(recorded) < len(calls)
        rows = iter(calls)
        for number, call in enumerate(recorded):
            weights_of_call = call.matrix.to_dense()
            begin = 0
            while begin < weights_of_call.shape[-2]:
                expected = next(rows)
                q_len, kv_len = expected.shape[-2:]
                ours = weights_of_call[..., begin : begin + q_len, :kv_len]
                what = f"{layer}, call {number}"
                assert_matches(
                    ours, expected, expected, dtype="float32", score_error=2e-5, ordinary=True, what=what
                )
                begin += q_len
        assert next(rows, None) is None


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma 2"])
def test_two_static_caches_take_turns(name):
    models = build(name)
    prompts = draw_tokens(1, 9).repeat(2, 1)
    prompts[1, 3] = 63 - prompts[1, 3]

    def run(model):
        caches = [hf.StaticCache(config=model.config, max_cache_len=32) for _ in prompts]
        for start, stop in ((0, 7), (7, 8), (8, 9)):
            for tokens, cache in zip(prompts, caches, strict=True):
                model(tokens[None, start:stop], past_key_values=cache)

    recording, _ = run_both(models, run)
    for index, tokens in enumerate(prompts):
        with log_eager(models[1]) as weights:
            models[1](tokens[None])
        for layer, (expected,) in weights.items():
            call = recording.calls(layer)[index]
            ours = call.matrix.to_dense()[..., :9]
            assert_matches(
                ours, expected, expected, dtype="float32", score_error=2e-5, ordinary=True, what=layer
            )


def test_positions_follow_a_batch_that_shrinks():
    """Entries with padding leave the batch, and the positions of the rest go on."""
    model, prompt = TINY["Llama"].build(), draw_tokens(3, 9)
    real = torch.ones(3, 12, dtype=torch.long)
    real[1, :4] = 0
    with regard.watch(model) as recording:
        cache = hf.DynamicCache(config=model.config)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        model(prompt, attention_mask=real[:, :9], position_ids=positions[:, :9], past_key_values=cache)
        kept = torch.tensor([2, 1])
        cache.batch_select_indices(kept)
        for step in range(9, 12):
            model(
                draw_tokens(2, 1, seed=step), attention_mask=real[kept, : step + 1],
                position_ids=positions[kept, step : step + 1], past_key_values=cache,
            )  # fmt: skip
    assert not any(finding.kind == "positions" for finding in recording.diagnose())


@pytest.mark.parametrize("shared", [0, 3, 8])
def test_a_static_cache_that_is_reset_begins_another_text(shared):
    """The second prompt may share its first tokens with what is left in the buffer."""
    models = build()
    prompts = draw_tokens(2, 9)
    prompts[1, :shared] = prompts[0, :shared]

    def run(model):
        cache = hf.StaticCache(config=model.config, max_cache_len=14)
        for tokens in prompts:
            model(tokens[None, :7], past_key_values=cache)
            model(tokens[None, 7:], past_key_values=cache)
            cache.reset()

    recording, _ = run_both(models, run)
    for index, tokens in enumerate(prompts):
        with log_eager(models[1]) as weights:
            models[1](tokens[None])
        for layer, (expected,) in weights.items():
            assert len(recording.calls(layer)) == 2
            ours = recording.calls(layer)[index].matrix.to_dense()
            assert not ours[..., 9:].any()
            assert_matches(
                ours[..., :9],
                expected,
                expected,
                dtype="float32",
                score_error=2e-5,
                ordinary=True,
                what=layer,
            )
