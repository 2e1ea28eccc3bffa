"""Edits of many architectures equal the same edits written by hand in eager attention, under the error rule."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers as hf  # noqa: E402

import regard  # noqa: E402
from regard.interventions import ablate, knockout, patch, rescore, restrict  # noqa: E402
from tests.helpers.hand_edits import NAME, HandEdit, attend_by_hand  # noqa: E402
from tests.helpers.tiny_models import TINY, TinyModel, _sizes, needs_t5_attention, output_tensors  # noqa: E402

MORE = {
    "GPT-NeoX": TinyModel(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_sizes())),
    "OPT": TinyModel(
        hf.OPTForCausalLM,
        hf.OPTConfig(**_sizes(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),
    ),
    "Phi-3": TinyModel(hf.Phi3ForCausalLM, hf.Phi3Config(**_sizes(num_key_value_heads=2))),
    "OLMo 2": TinyModel(hf.Olmo2ForCausalLM, hf.Olmo2Config(**_sizes(num_key_value_heads=2))),
    "RoBERTa": TinyModel(hf.RobertaModel, hf.RobertaConfig(**_sizes()), generates=False),
}
MODELS = TINY | MORE
# Layers are numbered in the order in which they run: these have two of the encoder, then self- and cross-attention.
CROSS_ATTENTION = 3
ROUTED = ("DeepSeek-V3", "GPT-OSS")
HEADS = [1, 2]
QUERIES, KEYS = [2, 5, 6], [0, 2, 4]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def mask_edges(q_idx, k_idx):
    return ~(torch.isin(q_idx, torch.tensor(QUERIES)) & torch.isin(k_idx, torch.tensor(KEYS)))


def soft_cap(scores, q_idx, k_idx):
    return torch.where(scores == -torch.inf, scores, 0.5 * torch.tanh(scores / 0.5))


def list_edits(layer, source):
    """Return each edit, with the function that makes the same one by hand from a run by hand of the source."""
    where = {"heads": HEADS}
    by_hand = {
        "knockout": {"keep": mask_edges},
        "first key": {"keep": lambda q, k: (k != 0) | (q < 0)},
        "restrict": {"keep": lambda q, k: (q - k).abs() <= 2},
        "rescore": {"rescore": soft_cap},
        "zero": {"output": torch.zeros_like},
        "half": {"output": lambda output: output / 2},
        "mean": {"output": lambda output: output.mean((0, 2), keepdim=True).expand_as(output)},
    }
    edits = {
        "knockout": knockout(layer, **where, queries=QUERIES, keys=KEYS),
        "first key": knockout(layer, **where, keys=0),
        "restrict": restrict(layer, **where, mask=regard.sliding_window(left=2, right=2, align="upper_left")),
        "rescore": rescore(layer, **where, score_mod=regard.softcap(0.5)),
        "zero": ablate(layer, **where),
        "half": ablate(layer, **where, baseline=0.5),
        "mean": ablate(layer, **where, baseline="mean"),
        **{what: patch(layer, **where, source=source, what=what) for what in ("pattern", "output", "value")},
    }
    for name, edit in edits.items():
        if name in by_hand:
            yield name, edit, lambda _, name=name: [HandEdit(layer, HEADS, **by_hand[name])]
        else:
            yield name, edit, lambda run, name=name: [HandEdit(layer, HEADS, source=run, what=name)]


class Runs:
    """A model as it is, and the same weights with eager attention by hand, at the same dtype and in float64."""

    def __init__(self, tiny, dtype):
        self.dtype, self.options = dtype, {"use_cache": False} if tiny.generates else {}
        self.model = tiny.build(dtype=dtype)
        with attend_by_hand([]):
            self.naive, self.exact = tiny.build(NAME, dtype=dtype), tiny.build(NAME, dtype=dtype).double()

    def run(self, model, inputs, dtype):
        cast = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        return output_tensors(model(**cast, **self.options))[0]

    def run_by_hand(self, model, edits, inputs, dtype):
        with attend_by_hand(edits) as run:
            return self.run(model, inputs, dtype), run


def check_architecture(name, dtype, layer):
    tiny = MODELS[name]
    runs, inputs = Runs(tiny, dtype), tiny.inputs("none")
    others = {key: x if key == "attention_mask" else x.flip(-1) for key, x in inputs.items()}
    with regard.watch(runs.model, values=True) as source:
        runs.run(runs.model, others, dtype)
    _, exact_source = runs.run_by_hand(runs.exact, [], others, torch.float64)
    _, naive_source = runs.run_by_hand(runs.naive, [], others, dtype)
    plain = runs.run(runs.model, inputs, dtype)
    for label, edit, build in list_edits(layer, source):
        with regard.intervene(runs.model, edit, record=True, values=dtype == torch.bfloat16) as run:
            ours = runs.run(runs.model, inputs, dtype)
        exact, by_hand = runs.run_by_hand(runs.exact, build(exact_source), inputs, torch.float64)
        naive, naive_run = runs.run_by_hand(runs.naive, build(naive_source), inputs, dtype)
        if name in ROUTED and dtype == torch.bfloat16:
            # Rounding sends tokens to other experts, so the attention of the edited layer is compared.
            (call,) = run.recording.calls(list(run.recording)[layer])
            ours, exact, naive = call.output, by_hand.outputs[layer], naive_run.outputs[layer]
        error, allowed = (float((output.double() - exact).abs().max()) for output in (ours, naive))
        # The unit of rounding covers runs in which eager attention happens to be exact.
        allowed = 2 * allowed + 4 * torch.finfo(dtype).eps * float(exact.abs().max())
        assert error <= allowed, (name, label, error, allowed)
        if dtype == torch.float32:
            assert float((plain.double() - exact).abs().max()) > 10 * error, (name, label, "changes nothing")
            module = list(run.recording)[layer]
            weights = run.recording[module].to_dense().double()
            assert float((weights - by_hand.weights[layer]).abs().max()) < 2e-6, (name, label)
    assert torch.equal(runs.run(runs.model, inputs, dtype), plain)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_t5_attention if n == "T5" else ()) for n in MODELS]
)
def test_edits_equal_eager_attention_by_hand(name):
    check_architecture(name, torch.float32, layer=0)


@pytest.mark.parametrize("name", ["BART", "Whisper", pytest.param("T5", marks=needs_t5_attention)])
def test_edits_of_cross_attention_equal_eager_attention_by_hand(name):
    check_architecture(name, torch.float32, layer=CROSS_ATTENTION)


IN_HALF_PRECISION = ("GPT-2", "Llama", "Gemma 2", "GPT-OSS", "BART", "DeepSeek-V3")  # in CI


@pytest.mark.parametrize(
    "name",
    [
        *IN_HALF_PRECISION,
        *(
            pytest.param(n, marks=[pytest.mark.nightly, *([needs_t5_attention] if n == "T5" else [])])
            for n in MODELS
            if n not in IN_HALF_PRECISION
        ),
    ],
)
def test_edits_in_bfloat16_equal_eager_attention_by_hand(name):
    check_architecture(name, torch.bfloat16, layer=0)


# -- generate() -------------------------------------------------------------------------------------------

NEW_TOKENS = 7


def generate(tiny, layer, cache):
    """Generate with edits; return the logits of each step, those of one pass by hand, and of one without edits."""
    runs, inputs = Runs(tiny, torch.float32), tiny.inputs("none")
    edits = [
        knockout(layer, heads=HEADS, queries=slice(4, None), keys=[1, 3, 9, 12]),
        ablate(layer, heads=3, queries=slice(8, None)),
    ]

    def zero_from_8(output):
        return torch.where(torch.arange(output.shape[-2])[:, None] >= 8, 0.0, output)

    by_hand = [
        HandEdit(layer, HEADS, keep=lambda q, k: ~((q >= 4) & torch.isin(k, torch.tensor([1, 3, 9, 12])))),
        HandEdit(layer, [3], output=zero_from_8),
    ]
    with regard.intervene(runs.model, edits, record=True) as run:
        generated = runs.model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True, cache_implementation=cache,
        )  # fmt: skip
    sequence = generated.sequences[:, :-1]
    inputs = (
        {"input_ids": sequence} if tiny.input_kind == "tokens" else inputs | {"decoder_input_ids": sequence}
    )
    exact, attended = runs.run_by_hand(runs.exact, by_hand, inputs, torch.float64)
    plain, _ = runs.run_by_hand(runs.exact, [], inputs, torch.float64)
    weights = run.recording[list(run.recording)[layer]].to_dense()
    assert float((weights.double() - attended.weights[layer]).abs().max()) < 2e-6
    return torch.stack(generated.logits, 1), exact[:, -NEW_TOKENS:], plain[:, -NEW_TOKENS:]


@pytest.mark.parametrize(
    "name, layer, cache",
    [
        ("GPT-2", 0, None), ("Llama", 1, "static"), ("Mistral", 0, None), ("Mistral", 1, "static"), ("Qwen3", 1, None),
        ("Gemma 2", 0, "static"), ("GPT-OSS", 0, None), ("DeepSeek-V3", 1, None), ("BART", 2, None),
        ("BART", CROSS_ATTENTION, None), ("Whisper", CROSS_ATTENTION, None),
    ],
)  # fmt: skip
def test_edits_by_position_continue_over_cached_steps(name, layer, cache):
    stepwise, exact, plain = generate(MODELS[name], layer, cache)
    assert float((stepwise - exact).abs().max()) < 1e-5
    assert float((plain - exact).abs().max()) > 1e-2


@pytest.mark.parametrize("what", ["pattern", "output", "value"])
def test_patches_from_a_short_run_continue_over_a_rolling_cache(what):
    model, tokens = MODELS["Mistral"].build(), MODELS["Mistral"].inputs("none")["input_ids"]
    with regard.watch(model, values=True) as source:
        model(input_ids=tokens.flip(-1)[:, :4])
    edit = patch(0, heads=HEADS, source=source, what=what)
    with regard.intervene(model, edit):
        one_pass = model(input_ids=tokens, use_cache=False).logits
    with regard.intervene(model, edit, record=True) as run:
        cache = hf.DynamicCache(config=model.config)
        pieces = [
            model(input_ids=piece, past_key_values=cache).logits
            for piece in tokens.split([3, 2, *[1] * 6], 1)
        ]
    assert float((torch.cat(pieces, 1) - one_pass).abs().max()) < 1e-5
    plain = model(input_ids=tokens, use_cache=False).logits
    assert float((plain - one_pass).abs().max()) > 1e-2
    assert sum(call.shape[-2] for call in run.recording.calls(next(iter(run.recording)))) == tokens.shape[1]


def test_calls_that_begin_after_evictions_are_recorded_with_their_edits():
    """Beams begin a call of their own, at keys of a window whose first position is not 0."""
    model, tokens = MODELS["Mistral"].build(), MODELS["Mistral"].inputs("none", batch=1)["input_ids"]
    edit = knockout(0, heads=HEADS, keys=[2, 6, 8])
    with regard.intervene(model, edit, record=True) as whole:
        model(input_ids=tokens, use_cache=False)
    with regard.intervene(model, edit, record=True) as run:
        cache = hf.DynamicCache(config=model.config)
        model(input_ids=tokens[:, :8], past_key_values=cache)
        cache.batch_repeat_interleave(2)
        for token in tokens[:, 8:].split(1, 1):
            model(input_ids=token.repeat(2, 1), past_key_values=cache)
    name = next(iter(run.recording))
    prompt, steps = run.recording.calls(name)
    assert prompt.shape[-2:] == (8, 8) and steps.steps == 3
    weights, expected = steps.matrix.to_dense(), whole.recording[name].to_dense()
    assert float((weights - expected[..., -3:, -weights.shape[-1] :]).abs().max()) < 1e-6
