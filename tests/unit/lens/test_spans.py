"""Masses on spans of the prompt equal dense sums of eager attention, for every kind of cache; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError, IndexOutOfRangeError  # noqa: E402
from regard.lens import token_spans  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tiny_models import TINY, needs_t5_attention  # noqa: E402

NEW, PROMPT = 9, 11
SPANS = {"system": (0, 3), "documents": [slice(4, 6), (8, 10)]}
COLUMNS = {"system": [0, 1, 2], "documents": [4, 5, 8, 9], "other": [3, 6, 7, 10]}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def generate(model, inputs, **options):
    given = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    config = hf.GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    return model.generate(**given, generation_config=config)


def run_eager(name, inputs, tokens, dtype, monkeypatch):
    """Return the weights of each layer of an eager pass over the generated text, (layers, batch, heads, n, n)."""
    model = TINY[name].build("eager", dtype)
    softmax = torch.nn.functional.softmax  # transformers computes it in float32, whatever the model's dtype
    monkeypatch.setattr(
        torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=x.dtype)
    )
    real = torch.cat([inputs["attention_mask"], torch.ones(len(tokens), NEW - 1, dtype=torch.long)], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    output = model(
        input_ids=tokens[:, :-1], attention_mask=real, position_ids=positions, output_attentions=True
    )
    return torch.stack(output.attentions).double().numpy()


def sum_spans(weights, columns):
    return np.stack([weights[..., keys].sum(-1) for keys in columns.values()], -1)


def lookback(weights, real):
    """Compute the lookback ratio of rows that produced a token, (layers, batch, heads, NEW − 1, kv_len)."""
    ratios = np.full(weights.shape[:-1], np.nan)
    for i in range(1, weights.shape[-2]):
        context = weights[..., i, :PROMPT].sum(-1) / real.sum(1)[None, :, None]
        new = weights[..., i, PROMPT:].sum(-1) / i
        ratios[..., i] = context / (context + new)
    return ratios


@pytest.mark.parametrize(
    ("name", "side", "cache"),
    [
        ("Llama", "left", "dynamic"),  # grouped heads
        ("Mistral", "none", "dynamic"),  # the window of 5 evicts keys
        ("Mistral", "left", "static"),
        pytest.param("Llama", "none", "static", marks=pytest.mark.nightly),
        pytest.param("Mistral", "left", "dynamic", marks=pytest.mark.nightly),
        pytest.param("GPT-2", "left", "dynamic", marks=pytest.mark.nightly),
        pytest.param("Gemma 2", "left", "dynamic", marks=pytest.mark.nightly),
        pytest.param("Qwen3", "left", "static", marks=pytest.mark.nightly),
    ],
)
def test_masses_are_dense_sums(name, side, cache, monkeypatch):
    model, inputs = TINY[name].build(), TINY[name].inputs(side)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    plain = generate(model, inputs, **options)
    with regard.watch(model, spans=SPANS) as recording:
        tokens = generate(model, inputs, **options)
    assert torch.equal(tokens, plain)
    mass = recording.span_mass()
    assert mass.names == ("system", "documents", "other", "generated") and mass.prompt == PROMPT
    assert mass.positions.tolist() == list(range(PROMPT, PROMPT + NEW)) and list(mass) == list(recording)
    exact, naive = (
        run_eager(name, inputs, tokens, dtype, monkeypatch)[..., PROMPT - 1 :, :]
        for dtype in (torch.float64, torch.float32)
    )
    columns = {**COLUMNS, "generated": list(range(PROMPT, PROMPT + NEW - 1))}
    ours = np.stack([mass[layer] for layer in recording])
    assert ours.dtype == np.float32 and ours.shape == (2, 2, 4, NEW, 4)
    sums = [sum_spans(weights, columns) for weights in (exact, naive)]
    assert_matches(ours, *sums, dtype="float32", magnitude=1.0, score_error=2e-5, ordinary=True, what="mass")
    ratios = [lookback(weights, inputs["attention_mask"].numpy()) for weights in (exact, naive)]
    ours = np.stack(list(mass.lookback.values()))
    assert_matches(ours, *ratios, dtype="float32", magnitude=1.0, score_error=2e-4, what="lookback")


def test_spans_of_each_batch_entry():
    """A batch with other spans in each entry equals each entry alone."""
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    spans = [{"a": (0, 2), "b": (2, 7)}, {"b": (5, 6)}]
    with regard.watch(model, spans=spans) as recording:
        generate(model, inputs)
    mass = recording.span_mass()
    for i, own in enumerate(spans):
        alone = recording.span_mass(own)
        for layer in recording:
            for name in own:
                expected = alone[layer][i, ..., alone.names.index(name)]
                got = mass[layer][i, ..., mass.names.index(name)]
                assert_matches(got, expected, expected, dtype="float32", what=f"{layer} {name}")
    assert (mass["model.layers.0.self_attn"][1, ..., 0] == 0).all()


def test_one_pass_has_a_row_for_each_token():
    model, inputs = TINY["BERT"].build(), TINY["BERT"].inputs("left")
    with regard.watch(model, spans={"a": (4, 8)}) as recording:
        model(**inputs)
    mass = recording.span_mass()
    assert mass.names == ("a", "other") and mass.prompt is None and len(mass.positions) == PROMPT
    for layer in recording:
        dense = recording[layer].to_dense().numpy()
        expected = np.stack([dense[..., 4:8].sum(-1), dense.sum(-1) - dense[..., 4:8].sum(-1)], -1)
        assert_matches(mass[layer], expected, expected, dtype="float32", magnitude=1.0, what=layer)
        assert np.isnan(mass.lookback[layer]).all()


def test_a_pass_over_a_finished_text_with_its_prompt():
    """The remedy for beam search: one pass over the text, and the length of its prompt."""
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans=SPANS) as steps:
        tokens = generate(model, inputs)
    with regard.watch(model, spans=SPANS) as one:
        model(input_ids=tokens[:, :-1])
    expected, mass = steps.span_mass(), one.span_mass(prompt=PROMPT)
    assert mass.positions.tolist() == expected.positions.tolist() and mass.names == expected.names
    for layer in steps:
        assert_matches(
            mass[layer], expected[layer], expected[layer], dtype="float32", magnitude=1.0, score_error=2e-5
        )
    with regard.watch(model, spans=SPANS) as beams:
        generate(model, inputs, num_beams=2)
    with pytest.raises(ArgumentError, match="beam search"):
        beams.span_mass()
    with pytest.raises(IndexOutOfRangeError, match="prompt=99"):
        one.span_mass(prompt=99)


def test_several_texts_and_runs_without_a_cache():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans=SPANS) as both:
        tokens = generate(model, inputs)
        generate(model, {**inputs, "input_ids": inputs["input_ids"].flip(0)})
    with pytest.raises(ArgumentError, match="2 calls"):
        both.span_mass()
    first, second = both.span_mass(call=0), both.span_mass(call=-1)
    layer = "model.layers.1.self_attn"
    assert np.array_equal(first[layer], second[layer][::-1])
    with pytest.raises(IndexOutOfRangeError, match="call=2"):
        both.span_mass(call=2)
    with regard.watch(model, spans=SPANS) as uncached:
        again = generate(model, inputs, use_cache=False)
    assert torch.equal(tokens, again)
    mass = uncached.span_mass(call=-1, prompt=PROMPT)
    assert_matches(mass[layer], first[layer], first[layer], dtype="float32", magnitude=1.0, score_error=2e-5)


@needs_t5_attention
def test_spans_of_an_encoder_are_read_by_cross_attention():
    model, inputs = TINY["T5"].build(), TINY["T5"].inputs("none")
    with regard.watch(model, spans=SPANS) as recording:
        generate(model, inputs)
    mass = recording.span_mass()
    assert list(mass) == [name for name in recording if "EncDec" in name] and len(mass) == 2
    assert mass.names == ("system", "documents", "other")
    for layer in mass:
        dense = recording[layer].to_dense().double().numpy()
        expected = sum_spans(dense, COLUMNS)
        assert_matches(mass[layer], expected, expected, dtype="float32", magnitude=1.0, score_error=2e-6)


def test_the_plan_names_what_ran_and_the_fallback():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans={"a": (0, 3)}) as recording:
        generate(model, inputs)
    plan = recording.span_mass().plan
    assert plan.startswith("model.layers.0.self_attn and 1 more: ") and "spans" in plan

    class OwnSoftmax(torch.nn.Linear):
        def forward(self, x):
            return (x @ super().forward(x).mT).softmax(-1) @ x

    own = OwnSoftmax(8, 8)
    with regard.watch(own, spans={"a": (0, 3)}) as recording:
        own(torch.randn(2, 5, 8))
    mass = recording.span_mass()
    assert "block loop" in mass.plan
    expected = recording[""].to_dense()[..., :3].sum(-1).numpy()
    assert_matches(mass[""][..., 0], expected, expected, dtype="float32", magnitude=1.0)


def test_more_spans_than_a_product_takes():
    """With more columns than a fused call is given, a pass over the tiles computes the same masses."""
    query, key = torch.randn(2, 1, 4, 60, 8, generator=torch.Generator().manual_seed(0)).unbind()

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(query, key, x, is_causal=True)

    model, value = Layer(1, 1), torch.randn(1, 4, 60, 8)
    spans = {str(i): (i, i + 1) for i in range(40)}
    with regard.watch(model, spans=spans) as recording:
        model(value)
    mass, dense = recording.span_mass(), recording[""].to_dense().double()
    expected = torch.cat([dense[..., :40], dense[..., 40:].sum(-1, keepdim=True)], -1).numpy()
    assert_matches(mass[""], expected, expected, dtype="float32", magnitude=1.0, score_error=2e-6)


def test_tables():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans=SPANS) as recording:
        generate(model, inputs)
    mass = recording.span_mass(layers="model.layers.1.*")
    heads = mass.heads()
    assert heads.columns == ["module", "layer", "head", *mass.names, "lookback"] and len(heads) == 4
    assert heads[2]["layer"] == 1 and sum(heads[2][name] for name in mass.names) == pytest.approx(1, abs=1e-5)
    assert heads[2]["system"] == pytest.approx(mass["model.layers.1.self_attn"][:, 2, :, 0].mean(), abs=1e-6)
    texts = [f"t{i}" for i in range(PROMPT + NEW)]
    rows = mass.tokens(texts, batch=1)
    assert len(rows) == NEW and rows[0]["token"] == f"t{PROMPT}" and np.isnan(rows[0]["lookback"])
    expected = mass.lookback["model.layers.1.self_attn"][1, :, 3].mean()
    assert rows[3]["lookback"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(IndexOutOfRangeError, match="batch=2"):
        mass.tokens(batch=2)
    with pytest.raises(ArgumentError, match="19 tokens"):
        mass.tokens(texts[:-1])


def test_the_lift_of_a_span_does_not_depend_on_its_length():
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("left")
    with regard.watch(model, spans=SPANS) as recording:
        generate(model, inputs)
    mass = recording.span_mass()
    table = {row["span"]: row for row in mass.spans()}
    real = inputs["attention_mask"].numpy()
    shares, uniform = np.stack([mass[layer] for layer in mass]).mean((0, 2)), np.zeros((2, NEW, 4))
    for batch in range(2):
        for row in range(NEW):
            counts = [real[batch, columns].sum() for columns in COLUMNS.values()]
            uniform[batch, row] = np.array([*counts, row]) / (real[batch].sum() + row)
    for index, name in enumerate(mass.names):
        seen = uniform[..., index] > 0
        lift = (shares[..., index][seen] / uniform[..., index][seen]).mean()
        np.testing.assert_allclose(table[name]["lift"], lift, rtol=1e-5)
        np.testing.assert_allclose(table[name]["share"], shares[..., index].mean(), rtol=1e-5)
    assert table["generated"]["tokens"] == (NEW - 1) / 2

    # A model that spreads its attention evenly prefers no span, short or long.
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    with regard.watch(model, spans=SPANS) as recording:
        generate(model, inputs)
    np.testing.assert_allclose([row["lift"] for row in recording.span_mass().spans()], 1, rtol=1e-5)


def test_saved_recordings_know_their_prompt(tmp_path):
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans=SPANS) as recording:
        generate(model, inputs)
    recording.save(tmp_path / "r.safetensors")
    again = regard.load_recording(tmp_path / "r.safetensors")
    with pytest.raises(ArgumentError, match="no spans"):
        again.span_mass()
    mass, expected = again.span_mass(SPANS), recording.span_mass()
    assert mass.prompt == PROMPT
    for layer in recording:
        assert np.array_equal(mass[layer], expected[layer])


@pytest.mark.parametrize(
    ("spans", "error", "match"),
    [
        ({"a": (0, 4), "b": (3, 6)}, ArgumentError, "'a' and 'b' that share tokens"),
        ({"a": [(0, 4), (3, 6)]}, ArgumentError, "two ranges of span 'a'"),
        ({"a": (3, 3)}, ArgumentError, "empty"),
        ({"a": []}, ArgumentError, "empty"),
        ({"a": (-2, 3)}, IndexOutOfRangeError, "from 0"),
        ({"a": "the text"}, ArgumentTypeError, "token_spans"),
        ({"a": slice(0, 4, 2)}, ArgumentTypeError, "range of tokens"),
        ({"a": (True, 4)}, ArgumentTypeError, "range of tokens"),
        ({"a": (0.0, 4)}, ArgumentTypeError, "range of tokens"),
        ({"generated": (0, 2)}, ArgumentError, "named 'generated'"),
        ({}, ArgumentError, "no spans"),
        ([], ArgumentTypeError, "spans as a list"),
        ("system", ArgumentTypeError, "spans as"),
    ],
)
def test_spans_that_are_refused_before_the_run(spans, error, match):
    with pytest.raises(error, match=match):
        regard.watch(torch.nn.Linear(1, 1), spans=spans)


def test_spans_that_are_refused_after_the_run():
    """Nothing is lost: the recording takes other spans."""
    model, inputs = TINY["Llama"].build(), TINY["Llama"].inputs("none")
    with regard.watch(model, spans={"a": (0, PROMPT + 1)}) as recording:
        generate(model, inputs)
    with pytest.raises(IndexOutOfRangeError, match=r"'a' of tokens 0 to 12.*11 tokens of the prompt"):
        recording.span_mass()
    with pytest.raises(ArgumentError, match="'a' of tokens 11 to 11, which is empty"):
        recording.span_mass({"a": slice(PROMPT, None)})
    with pytest.raises(ArgumentError, match="3 batch entries"):
        recording.span_mass([{"a": (0, 1)}] * 3)
    with pytest.raises(ArgumentError, match="matches no layer"):
        recording.span_mass({"a": (0, 1)}, layers="encoder.*")
    assert recording.span_mass({"a": slice(3, None)}).labels.tolist() == 2 * [[1] * 3 + [0] * 8]
    with pytest.raises(ArgumentError, match="spans and measures"):
        regard.watch(model, spans=SPANS, measures="default")


def test_spans_of_characters():
    text = "System: be brief.\nDoc: cats sleep. Question: who sleeps?"
    offsets = [(0, 0)] + [
        (i, min(i + 3, len(text))) for i in range(0, len(text), 3)
    ]  # tokens of three characters
    found = token_spans(text, {"doc": "Doc: cats sleep.", "question": (34, len(text))}, offsets)
    start = text.index("Doc")
    assert found["doc"] == (1 + start // 3, 1 + 34 // 3) and found["question"] == (1 + 34 // 3, len(offsets))
    padded = np.array([[(0, 0)] * 2 + offsets, offsets + [(0, 0)] * 2])
    first, second = token_spans([text, text], [{"doc": "Doc: cats sleep."}, {}], torch.tensor(padded))
    # The last token has one character of the document, and two of the question, which is no span here.
    assert first == {"doc": (2 + found["doc"][0], 3 + found["doc"][1])} and second == {}
    for spans, error, match in (
        ({"a": "dogs"}, ArgumentError, "occurs 0 times"),
        ({"a": "leep"}, ArgumentError, "occurs 2 times"),
        ({"a": (0, 999)}, IndexOutOfRangeError, "characters of the text"),
        ({"a": (5, 5)}, ArgumentError, "empty"),
        ({"a": 7}, ArgumentTypeError, "range"),
    ):
        with pytest.raises(error, match=match):
            token_spans(text, spans, offsets)
    with pytest.raises(ArgumentError, match="contains no token"):
        token_spans(text, {"question": (50, 54)}, offsets[:5])
    with pytest.raises(ArgumentError, match="offsets of shape"):
        token_spans([text, text], {"a": "Doc"}, offsets)


def test_spans_of_a_real_tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", padding_side="left"
    )
    texts = ["you are kind. cats sleep all day. who sleeps?", "you are kind. dogs bark. who barks loudly?"]
    encoded = tokenizer(texts, return_offsets_mapping=True, padding=True, return_tensors="pt")
    spans = token_spans(
        texts, [{"doc": "cats sleep all day."}, {"doc": "dogs bark."}], encoded["offset_mapping"]
    )
    assert spans == [{"doc": (4, 9)}, {"doc": (5, 8)}]
