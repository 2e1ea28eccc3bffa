"""`recording.align`: the times of transformers, which needs eager attention for them, from the kernels of SDPA."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import regard  # noqa: E402
from regard import AttentionMatrix  # noqa: E402
from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError  # noqa: E402
from regard.lens.alignment import group_words  # noqa: E402
from tests.helpers.model_folders import build_speaking_whisper, build_whisper_tokenizer  # noqa: E402

HEADS = [[0, 1], [1, 0], [1, 1]]
OPTIONS = {"do_sample": True, "max_new_tokens": 16, "language": "en", "task": "transcribe"}


@pytest.fixture(scope="module")
def whisper():
    verbosity = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    yield build_speaking_whisper()[0]
    hf.logging.set_verbosity(verbosity)


@pytest.fixture(autouse=True)
def run_sdpa(whisper):
    whisper.set_attn_implementation("sdpa")  # `return_token_timestamps` leaves it at eager
    assert whisper.model.config._attn_implementation == "sdpa"


def make_audio(batch=1, seed=0, frames=(100, 100)):
    features = torch.randn(batch, 8, 100, generator=torch.Generator().manual_seed(seed))
    mask = torch.stack([(torch.arange(100) < count).long() for count in frames[:batch]])
    return {"input_features": features, "attention_mask": mask}


def record(model, inputs, seed=0, **options):
    torch.manual_seed(seed)
    with regard.watch(model) as recording:
        output = model.generate(**inputs, **OPTIONS | options)
    return recording, output


def generate_eager(model, inputs, seed=0, **options):
    torch.manual_seed(seed)
    return model.generate(**inputs, **OPTIONS | options, return_token_timestamps=True)


@pytest.mark.parametrize(
    ("batch", "frames", "options"),
    [
        (1, (100,), {}),
        (1, (70,), {}),
        (2, (100, 61), {}),
        (1, (100,), {"language": None}),  # one more call detects the language
        (1, (100,), {"max_new_tokens": 1}),
    ],
    ids=["whole", "padded", "batch", "detected language", "one token"],
)
@pytest.mark.filterwarnings(
    "ignore:__array_wrap__:DeprecationWarning"
)  # of transformers' repetition of a tensor
def test_times_are_those_of_transformers(whisper, batch, frames, options):
    moved = 0
    for seed in range(3):
        inputs = make_audio(batch, seed, frames)
        recording, ids = record(whisper, inputs, seed, **options)
        assert recording.calls("model.decoder.layers.0.encoder_attn")[-1].kernel == "torch: flash on CPU"
        expected = generate_eager(whisper, inputs, seed, **options)
        whisper.set_attn_implementation("sdpa")
        torch.testing.assert_close(ids, expected["sequences"], rtol=0, atol=0)
        prompt = 4 if options.get("max_new_tokens") == 1 else None  # one call, whose rows are all prompt
        for entry, count in enumerate(frames):
            alignment = recording.align(ids, heads=HEADS, frames=count // 2, batch=entry, prompt=prompt)
            times = alignment.times.astype(np.float32)
            np.testing.assert_array_equal(times, expected["token_timestamps"][entry].numpy())
            moved += len(set(times.tolist())) > 2
    assert moved or "max_new_tokens" in options  # else the times say little


def test_one_head_is_computed_at_a_time(whisper, monkeypatch):
    recording, ids = record(whisper, make_audio())
    shapes, to_dense = [], AttentionMatrix.to_dense
    monkeypatch.setattr(AttentionMatrix, "to_dense", lambda A: shapes.append(A.shape) or to_dense(A))
    rows = ids.shape[1] - 1
    recording.align(ids, heads=HEADS)
    assert shapes == [(rows, 50)] * 3


def test_one_pass_over_a_transcript_gives_the_same_times(whisper):
    inputs = make_audio(seed=4)
    recording, ids = record(whisper, inputs, 4)
    prompt = torch.tensor([[295, 296, 299, 301]])
    with torch.no_grad(), regard.watch(whisper, layers="*.encoder_attn") as one:
        whisper(inputs["input_features"], decoder_input_ids=torch.cat([prompt, ids], 1)[:, :-1])
    alignment = one.align(ids, heads=HEADS, prompt=4)
    np.testing.assert_array_equal(alignment.times, recording.align(ids, heads=HEADS).times)
    names = [(f"model.decoder.layers.{layer}.encoder_attn", head) for layer, head in HEADS]
    np.testing.assert_array_equal(one.align(ids, heads=names, prompt=4).times, alignment.times)


def test_a_saved_recording_and_a_cut_transcript_are_aligned(whisper, tmp_path):
    recording, ids = record(whisper, make_audio(seed=2), 2)
    recording.save(tmp_path / "recording.safetensors")
    saved = regard.load_recording(tmp_path / "recording.safetensors")
    expected = recording.align(ids, heads=HEADS)
    np.testing.assert_array_equal(saved.align(ids, heads=HEADS).times, expected.times)
    cut = recording.align(ids[:, :9], heads=HEADS)
    assert cut.matrix.shape == (9, 50) and len(cut.times) == 9
    later = recording.align(ids, heads=HEADS, start=30.0, seconds_per_frame=0.04)
    np.testing.assert_allclose(later.times, 30 + 2 * expected.times)
    assert later.tokens()[0]["start"] == 30.0
    assert repr(later) == "Alignment(16 tokens, 50 frames of 0.04 s)"


def list_windows(output):
    """Return the first segment of each window."""
    return list({id(segment["result"]): segment for segment in reversed(output["segments"][0])}.values())[
        ::-1
    ]


def test_windows_of_a_long_recording_are_calls(whisper):
    features = torch.randn(1, 8, 250, generator=torch.Generator().manual_seed(5))
    inputs = {"input_features": features, "attention_mask": torch.ones(1, 250, dtype=torch.long)}
    options = {"return_timestamps": True, "return_segments": True, "max_new_tokens": 8, "do_sample": False}
    recording, output = record(whisper, inputs, **options)
    expected = generate_eager(whisper, inputs, **options)
    windows = list_windows(output)
    calls = recording.calls("model.decoder.layers.1.encoder_attn")
    assert len(windows) == len(calls) > 1
    for index, (ours, theirs) in enumerate(zip(windows, list_windows(expected), strict=True)):
        times = theirs["result"]["token_timestamps"]
        start = float(theirs["token_timestamps"][0] - times[theirs["idxs"][0]])
        ids, frames = ours["result"][3:], min(50, (250 - round(100 * start)) // 2)
        aligned = recording.align(
            ids, heads=HEADS, call=index, frames=frames
        )  # no <|notimestamps|> in the prompt
        np.testing.assert_array_equal(aligned.times.astype(np.float32), times[3:].numpy())
        later = recording.align(ids, heads=HEADS, call=index, frames=frames, start=start)
        part = slice(theirs["idxs"][0] - 3, theirs["idxs"][1] - 3)
        np.testing.assert_allclose(later.times[part], theirs["token_timestamps"], rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"expected one of \d+ calls of the decoder, which have"):
        recording.align(ids, heads=HEADS)


def test_a_speech_model_other_than_whisper():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "conv_channels": 8}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
    config = hf.Speech2TextConfig(**sizes, input_feat_per_channel=8, init_std=0.3, decoder_start_token_id=2)
    model = hf.Speech2TextForConditionalGeneration(config).eval()
    features = torch.randn(1, 80, 8)
    with regard.watch(model) as recording:
        ids = model.generate(features, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    alignment = recording.align(ids[:, 1:], heads=[(0, 0), (1, 1)], seconds_per_frame=0.04)
    rows, columns = alignment.path
    assert alignment.matrix.shape == (5, 20) and len(alignment.times) == 6
    assert (
        (np.diff(alignment.times) >= 0).all() and (np.diff(rows) >= 0).all() and (np.diff(columns) >= 0).all()
    )


# -- Words --------------------------------------------------------------------------------------------------

TEXTS = [
    " the cat sat on the mat, because it was tired.",
    ' don\'t (sit) on "the mat"; "don\'t!" - été - well-known',
    " naïve 猫が座った 🐈‍⬛ cat… ...!",
    "no space before ¿que? [it] - ",
    " 3.14 % of 2,000 a/b 'quoted' it's",
    " the  two  spaces",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("language", ["english", "chinese"])
def test_words_are_those_of_transformers(text, language):
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = build_whisper_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    words, _, indices = _combine_tokens_into_words(tokenizer, list(ids), language)
    ours = group_words(ids, tokenizer, spaces=language == "english")
    assert [(word.text, list(range(word.start, word.stop))) for word in ours] == list(
        zip(words, indices, strict=True)
    )


def test_bytes_that_are_no_character_end_where_they_are():
    tokenizer = build_whisper_tokenizer()
    first, *_ = tokenizer("猫", add_special_tokens=False)["input_ids"]
    ids = [first, *tokenizer(" the cat", add_special_tokens=False)["input_ids"]]
    assert [word.text for word in group_words(ids, tokenizer)] == ["\ufffd", " the", " cat"]
    ids = tokenizer(" \ufffd the", add_special_tokens=False)["input_ids"]
    assert [word.text for word in group_words(ids, tokenizer)] == [" \ufffd", " the"]


def test_words_have_the_times_of_the_pipeline(whisper):
    tokenizer = build_whisper_tokenizer()
    recording, _ = record(whisper, make_audio())
    ids = tokenizer("<|0.00|> the cat, don't été<|0.80|>", add_special_tokens=False)["input_ids"]
    assert len(ids) == 8
    alignment = recording.align(ids, heads=HEADS)
    words = alignment.words(tokenizer)
    output = {"tokens": np.array([ids]), "token_timestamps": np.array([alignment.times])}
    _, optional = tokenizer._decode_asr(
        [output], return_timestamps="word", return_language=None, time_precision=0.02
    )
    ours = [
        {"text": row["word"], "timestamp": (round(row["start"], 2), round(row["end"], 2))} for row in words
    ]
    assert ours == [
        {"text": chunk["text"], "timestamp": tuple(map(float, chunk["timestamp"]))}
        for chunk in optional["chunks"]
    ]
    assert words.column("word") == [" the", " cat,", " don't", " été"]
    assert alignment.tokens(tokenizer).column("token")[:2] == ["<|0.00|>", "Ġthe"]


def test_a_language_token_of_a_language_without_spaces_makes_characters_words():
    tokenizer = build_whisper_tokenizer()
    ids = tokenizer("<|zh|>猫が座る", add_special_tokens=False)["input_ids"]
    assert [word.text for word in group_words(ids, tokenizer)] == list("猫が座る")
    assert [word.text for word in group_words(ids, tokenizer, spaces=True)] == ["猫が座る"]


def test_tokens_of_sentencepiece_keep_their_spaces():
    """Its tokens mark the start of a word, and decoding one by one would lose the spaces."""
    import tokenizers

    pieces = {"<unk>": 0, "▁the": 1, "▁ca": 2, "t": 3, ".": 4, "▁sat": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, []))
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    words = group_words([1, 2, 3, 4, 5], tokenizer)
    assert [(word.text, word.start, word.stop) for word in words] == [
        ("the", 0, 1),
        (" cat.", 1, 4),
        (" sat", 4, 5),
    ]


# -- Refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": [(5, 0)]}, ArgumentError, "heads of layer 5; expected a layer with cross-attention: 0, 1."),
        ({"heads": [("model.decoder.layers.0.self_attn", 0)]}, ArgumentError, "Pass a number, or a name such as"),
        ({"heads": [(0, 2)]}, IndexOutOfRangeError, "head 2 of model.decoder.layers.0.encoder_attn; expected"),
        ({"heads": []}, ArgumentTypeError, "expected pairs of decoder layer and head"),
        ({"heads": 3}, ArgumentTypeError, "expected pairs of decoder layer and head"),
        ({"heads": [(0, 1, 2)]}, ArgumentTypeError, "expected pairs of decoder layer and head"),
        ({"frames": 51}, ArgumentError, "frames=51; expected the number of frames that are audio, from 1 to 50"),
        ({"frames": 0}, ArgumentError, "frames=0"),
        ({"prompt": 20}, ArgumentError, "prompt=20; expected the number of decoder tokens before the transcript"),
        ({"filter_width": 4}, ArgumentError, "filter_width=4; expected an odd number"),
        ({"batch": 1}, IndexOutOfRangeError, "batch=1"),
        ({"call": 2}, ArgumentError, "call=2; expected one of 1 calls of the decoder, which have 19 rows"),
        ({"tokens": list(range(17))}, ArgumentError, "17 tokens; expected the generated tokens: at most 16"),
        ({"tokens": "the cat"}, ArgumentTypeError, "tokens as str"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(whisper, options, error, message):
    recording, ids = record(whisper, make_audio())
    given = {"tokens": ids, "heads": HEADS} | options
    with pytest.raises(error, match=re.escape(message)):
        recording.align(given.pop("tokens"), **given)


def test_recordings_that_cannot_be_aligned(whisper):
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with regard.watch(layer) as recording:
        layer(torch.ones(1, 3, 8))
    with pytest.raises(ArgumentError, match="expected a recording of a model with an encoder and a decoder"):
        recording.align([1, 2], heads=[(0, 0)])
    inputs = make_audio()
    ids = torch.tensor([[295, 301, 5, 6, 7]])
    with torch.no_grad(), regard.watch(whisper) as one:
        whisper(inputs["input_features"], decoder_input_ids=ids)
    with pytest.raises(ArgumentError, match="one call with 5 rows and no prompt"):
        one.align(ids[:, 2:], heads=HEADS)
    with torch.no_grad(), regard.watch(whisper) as broken:
        whisper(inputs["input_features"] * float("nan"), decoder_input_ids=ids)
    with pytest.raises(ArgumentError, match=r"NaN in the weights of head 1 .* recording.diagnose"):
        broken.align(ids[:, 2:], heads=HEADS, prompt=2)
    with pytest.raises(ArgumentTypeError, match=r"alignment.words: received tokenizer as a NoneType"):
        one.align(ids[:, 2:], heads=HEADS, prompt=2).words(None)
    recording, ids = record(whisper, inputs, num_beams=2, do_sample=False)
    with pytest.raises(ArgumentError, match="beam search"):
        recording.align(ids, heads=HEADS)
