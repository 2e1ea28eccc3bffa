"""Edits by position over the cached steps of `generate()`: the result of generating without a cache."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard.interventions import ablate, knockout, restrict  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402

NEW = 9


def build(name):
    model = TINY[name].build()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model, tokens, **options):
    given = {"input_ids": tokens}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
    with torch.no_grad():
        out = model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits, 1)


def draw_tokens(*shape, seed=5):
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


def check_edit(model, edit, tokens, **options):
    """Generate with the edit, with and without a cache; the edit changes the result."""
    _, plain = generate(model, tokens, use_cache=False, **options)
    with regard.intervene(model, edit):
        expected, logits = generate(model, tokens, use_cache=False, **options)
    with regard.intervene(model, edit):
        sequences, cached = generate(model, tokens, **options)
    assert torch.equal(sequences, expected)
    assert float((cached - logits).abs().max()) < 1e-4 * float(logits.abs().max())
    assert float((plain - logits).abs().max()) > 1e-3 * float(logits.abs().max())


CROSS = {
    "BART": "model.decoder.layers.1.encoder_attn",
    "T5": "decoder.block.1.layer.1.EncDecAttention",
}


@pytest.mark.parametrize("name", list(CROSS))
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_cross_attention_edits_in_beam_search(name, beams):
    model = build(name)
    edit = knockout(CROSS[name], queries=slice(2, None), keys=slice(0, 8))
    check_edit(model, edit, draw_tokens(2, 11), num_beams=beams)


@pytest.mark.parametrize(
    "layer, queries, keys",
    [
        (CROSS["T5"], "D2", "E5"),
        ("decoder.block.1.layer.0.SelfAttention", "D2", "D1"),
        ("encoder.block.1.layer.0.SelfAttention", "E5", "E2"),
    ],
)
def test_texts_of_two_sequences(layer, queries, keys):
    """`tokens` are the encoder's, `query_tokens` the decoder's, in every layer."""
    model, source, target = build("T5"), draw_tokens(1, 7), draw_tokens(1, 4)
    names = {"tokens": [f"E{i}" for i in range(7)], "query_tokens": [f"D{i}" for i in range(4)]}
    logits = []
    for by_text in (True, False):
        places = (queries, keys) if by_text else (int(queries[1:]), int(keys[1:]))
        edit = knockout(layer, queries=places[0], keys=places[1])
        with torch.no_grad(), regard.intervene(model, edit, **(names if by_text else {})):
            logits.append(model(input_ids=source, decoder_input_ids=target).logits)
    with torch.no_grad():
        plain = model(input_ids=source, decoder_input_ids=target).logits
    assert torch.equal(*logits) and not torch.equal(logits[0], plain)


@pytest.mark.parametrize("edits_self_attention", [False, True])
def test_cross_attention_edits_beside_edited_self_attention(edits_self_attention):
    """The rows of cross-attention are those of the self-attention before it, edited or not."""
    model = build("BART")
    edits = [knockout(CROSS["BART"], queries=slice(2, None), keys=slice(0, 8))]
    if edits_self_attention:
        edits.append(ablate("model.decoder.layers.1.self_attn", heads=1, queries=slice(3, None)))
    check_edit(model, edits, draw_tokens(2, 11), num_beams=2)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "edit",
    [
        knockout(0, heads=[0, 1], queries=slice(13, None), keys=slice(9, 15)),
        ablate(1, heads=[0, 2], queries=slice(14, None)),
        restrict([0, 1], mask=regard.sliding_window(left=2, right=0)),
    ],
    ids=["knockout", "ablate", "restrict"],
)
def test_rolling_caches_and_beams(edit, beams):
    check_edit(build("Mistral"), edit, draw_tokens(2, 11), num_beams=beams)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_guidance_edits_both_prompts(name):
    """Two caches take turns; their windows hold the same tokens."""
    tokens = draw_tokens(1, 11)
    other = tokens.clone()
    other[0, 2] = 63 - other[0, 2]
    edit = knockout([0, 1], queries=slice(13, None), keys=slice(9, 15))
    check_edit(build(name), edit, tokens, negative_prompt_ids=other, guidance_scale=1.5)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_assisted_decoding_edits_the_tokens_that_stay(name):
    """Rejected tokens are cut from the cache. Greedy decoding gives the same text with and without an assistant."""
    model, assistant, tokens = build(name), build(name), draw_tokens(1, 11)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(8)), alpha=0.05)
    edit = ablate(1, heads=[0, 2], queries=slice(13, None))
    plain, _ = generate(model, tokens)
    with regard.intervene(model, edit):
        expected, _ = generate(model, tokens, use_cache=False)
        sequences, _ = generate(model, tokens, assistant_model=assistant)
    assert torch.equal(sequences, expected) and not torch.equal(sequences, plain)
