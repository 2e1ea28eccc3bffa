"""`regard look` on text, images and sound, with generation, as pages and pictures: models saved to folders."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("PIL")

import regard  # noqa: E402
from regard.lens.alignment import group_words  # noqa: E402
from tests.helpers.command_line import run_process  # noqa: E402
from tests.helpers.model_folders import (  # noqa: E402
    build_byte_tokenizer,
    build_clip,
    build_llava,
    build_speaking_whisper,
    save_llama,
)
from tests.helpers.sounds import make_tone, write_wav  # noqa: E402
from tests.helpers.vision_models import build_vision_model, draw_image  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "--help <img src=x onerror=alert(1)> $x$ [bold]é"  # a legal file name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models with their processors, an image and a WAV file, in one folder."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "llama")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5 = hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))
    t5.save_pretrained(root / "t5")
    build_byte_tokenizer().save_pretrained(root / "t5")
    whisper, tokenizer = build_speaking_whisper()
    whisper.save_pretrained(root / "whisper")
    extractor = hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    hf.WhisperProcessor(extractor, tokenizer).save_pretrained(root / "whisper")
    build_vision_model("ViT", 32, 32).model.save_pretrained(root / "vit")
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(root / "vit")
    build_clip().save_pretrained(root / "clip")
    images = hf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    hf.CLIPProcessor(images, build_byte_tokenizer()).save_pretrained(root / "clip")
    from PIL import Image

    Image.fromarray(draw_image(48, 64)).save(root / "picture.png")
    write_wav(root / "talk.wav", make_tone(300, 0.7) + 0.1 * make_tone(1700, 0.7))
    write_wav(root / "stereo.wav", make_tone(300, 1.5, 44_100), 44_100, channels=2)
    return root


@pytest.fixture
def look(run, models, tmp_path, capsys):
    """Runs `regard look` on a model of the folder, and returns the record of --json, standard error and the output."""
    capsys.readouterr()

    def look(model, *arguments, name="page.html", code=0):
        path = tmp_path / name
        out, err = run("look", models / model, *arguments, "-o", path, "--json", code=code)
        return (json.loads(out) if out else None), err, path

    return look


class Scripts(HTMLParser):
    """Collects the attributes and the tags of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.handlers = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


# -- Text ---------------------------------------------------------------------------------------------------


def test_generated_tokens_are_rows_of_the_page(look, models):
    record, err, path = look("llama", "--text", "the cat", "--generate", 5)
    model = hf.AutoModelForCausalLM.from_pretrained(models / "llama").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(models / "llama")
    given = tokenizer("the cat", return_tensors="pt")
    with regard.watch(model) as recording:
        ids = model.generate(**given, max_new_tokens=5, do_sample=False)
    assert err == "" and record["generated"] == tokenizer.decode(ids[0, 7:], skip_special_tokens=True)
    assert (
        record["tokens"] == ids.shape[1] and record["inputs"] == f"7 tokens and {ids.shape[1] - 7} generated"
    )
    assert [A.shape[-2] for A in recording.values()] == [ids.shape[1] - 1] * 2
    assert f"{ids.shape[1] - 1} tokens" in path.read_text(encoding="utf-8")


def test_an_encoder_decoder_model_shows_all_three_kinds(look):
    record, _, path = look("t5", "--text", "the cat", "--generate", 4)
    assert (record["layers"], record["model"]["class"]) == (6, "T5ForConditionalGeneration")
    assert record["inputs"] == "7 tokens and 4 generated"
    names = set(re.findall(r"(?:en|de)coder\.block\.0\.[\w.]+", path.read_text(encoding="utf-8")))
    assert names == {
        "encoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    }
    record, err, _ = look("t5", "--text", "the cat")
    assert "The decoder reads only its start token; pass --generate N" in err and record["tokens"] == 1


# -- Sound --------------------------------------------------------------------------------------------------


def test_sound_is_transcribed_and_its_words_have_times(look, models):
    record, err, path = look("whisper", "--audio", models / "talk.wav", "--generate", 9)
    assert err == "" and record["layers"] == 5 and record["inputs"] == "0.7 s of audio and 9 generated"
    model = hf.AutoModelForSpeechSeq2Seq.from_pretrained(models / "whisper").eval()
    processor = hf.AutoProcessor.from_pretrained(models / "whisper")
    samples = make_tone(300, 0.7) + 0.1 * make_tone(1700, 0.7)
    inputs = processor.feature_extractor(
        np.round(samples * 32767) / 32768,
        sampling_rate=16_000,
        return_tensors="pt",
        return_attention_mask=True,
    )
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": 9, "language": "<|en|>", "force_unique_generate_call": True}
    expected = model.generate(**inputs, **options, return_dict_in_generate=True, output_attentions=True)
    tokens = expected.sequences[0, 3:].tolist()  # <|notimestamps|>, and what was generated
    assert record["generated"] == processor.tokenizer.decode(tokens, skip_special_tokens=True)
    frames = inputs.attention_mask.sum(-1)
    heads = model.generation_config.alignment_heads
    times = model._extract_token_timestamps(expected, heads, num_frames=frames, num_input_ids=3)[
        0, 3:
    ].tolist()
    words = group_words(tokens, processor.tokenizer)
    assert [word["word"] for word in record["words"]] == [word.text for word in words]
    starts = [times[word.start - 1] for word in words]
    ends = [times[word.stop - 1] for word in words]
    assert [word["start"] for word in record["words"]] == pytest.approx(starts, abs=1e-6)
    assert [word["end"] for word in record["words"]] == pytest.approx(ends, abs=1e-6)
    page = path.read_text(encoding="utf-8")
    assert "model.encoder.layers.0.self_attn" in page and "model.decoder.layers.1.encoder_attn" in page
    assert "0.98 s" in page  # a key of cross-attention


def test_sound_at_another_rate_and_a_transcript(look, models):
    record, err, path = look(
        "whisper", "--audio", models / "stereo.wav", "--text", " the cat sat", name="heads.PNG"
    )
    assert "resampled from 44,100 to 16,000" in err and "1.5 s; truncated to the first 1 s" in err
    assert record["inputs"] == "1.5 s of audio and 6 tokens" and path.read_bytes().startswith(PNG)


# -- Images -------------------------------------------------------------------------------------------------


def test_an_image_as_page_and_as_picture(look, models):
    record, err, path = look("vit", "--image", models / "picture.png")
    assert err == "" and record["inputs"] == "an image of 64 × 48 pixels"
    assert "vit.layers.0.attention" in path.read_text(encoding="utf-8")
    record, _, path = look("vit", "--image", models / "picture.png", name="heads.png")
    assert path.read_bytes().startswith(PNG) and record["page"] == str(path)
    record, _, _ = look("clip", "--image", models / "picture.png")
    assert (
        record["model"]["class"] == "CLIPVisionModel"
        and "only the image encoder is used" in record["notes"][0]
    )


def test_an_image_among_the_tokens_of_a_language_model(look, models, tmp_path):
    folder = models / "llava"
    build_llava().save_pretrained(folder)
    tokenizer = build_byte_tokenizer()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(290 - len(tokenizer))])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = hf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    hf.LlavaProcessor(images, tokenizer, image_token="<image>", **options).save_pretrained(folder)
    record, _, path = look("llava", "--image", models / "picture.png", "--text", "cat?", "--generate", 2)
    assert record["inputs"].startswith("8 tokens with an image") and path.stat().st_size > 10_000
    _, err, _ = look("llava", "--image", models / "picture.png", code=2)
    assert "image alone, for LlavaForConditionalGeneration; expected a text as well" in err


# -- Refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("llama", ["--text", "a", "--image", "picture.png"], "LlamaForCausalLM, which does not read images"),
        ("llama", ["--text", "a", "--audio", "talk.wav"], "LlamaForCausalLM, which does not read audio"),
        ("llama", ["--text", "a", "--generate", "64"], "1 tokens and 64 to generate; expected at most 64 in total"),
        ("llama", [], "no text, image or audio; expected --text, --file, --image or --audio"),
        ("vit", ["--image", "."], "image='.', which cannot be read (Is a directory)"),
        ("vit", ["--text", "a", "--image", "picture.png"], "which does not read text together with an image"),
        ("vit", ["--image", "picture.png", "--generate", "3"], "which does not generate text"),
        ("vit", ["--image", "picture.png", "--audio", "talk.wav"], "an image and audio; expected at most one"),
        ("vit", ["--image", "talk.wav"], "'talk.wav', which cannot be read"),
        ("vit", ["--image", "nowhere.png"], "(No such file or directory)"),
        ("clip", ["--text", "a", "--image", "picture.png"], "no attention connects the encoders"),
        ("whisper", ["--audio", "picture.png"], "file does not start with RIFF id"),
        ("whisper", ["--audio", "nowhere.wav"], "No such file or directory"),
        ("whisper", ["--audio", "talk.wav", "-t", "a", "--generate", "3"], "a transcript of the audio and --generate"),
        ("t5", ["--text", "a", "--generate", "0"], "Invalid value for '--generate'"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line(look, models, monkeypatch, model, arguments, message):
    monkeypatch.chdir(models)
    record, err, path = look(model, *arguments, code=2)
    assert record is None and not path.exists()
    assert err.startswith("regard look: ") and err.count("\n") == 1
    assert message in err


def test_a_page_is_not_named_as_another_format(look):
    _, err, path = look("llama", "--text", "a", name="heads.JPG", code=2)
    assert "expected a file name that ends in .html for a page, or in .png for an image" in err
    assert "heads.png" in err and not path.exists()


def test_a_model_without_a_processor_is_named(look, models, tmp_path):
    bare = models / "bare"
    build_vision_model("ViT", 32, 32).model.save_pretrained(bare)
    _, err, _ = look("bare", "--image", models / "picture.png", code=2)
    assert (
        "without a processor for image" in err
        and "AutoProcessor.from_pretrained(name).save_pretrained" in err
    )


def test_too_many_heads_for_a_picture(look, models, monkeypatch):
    from regard.cli import look_command

    monkeypatch.setattr(look_command, "MAX_HEADS", 7)
    _, err, _ = look("llama", "--text", "the cat", name="a.png", code=2)
    assert "an image of 8 heads; expected from 1 to 7. Choose layers" in err
    record, _, path = look("llama", "--text", "the cat", "--layers", "*.0.*", name="a.png")
    assert record["layers"] == 1 and path.read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_hostile_file_names_are_only_names(run, models, tmp_path, capsys):
    """Names that look like options, markup, formulas and terminal commands; the first run by the real entry point."""
    folder = tmp_path / "m" / f"{HOSTILE}\n\x1b[31m"
    folder.parent.mkdir()
    folder.symlink_to(models / "whisper", target_is_directory=True)
    sound, page = tmp_path / f"{HOSTILE}.wav", tmp_path / f"{HOSTILE}.html"
    sound.write_bytes((models / "talk.wav").read_bytes())
    done = run_process("look", folder, f"--audio={sound}", "--generate", 3, f"--output={page}", timeout=400)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr and "0.7 s of audio" in done.stderr
    scripts = Scripts(page.read_text(encoding="utf-8"))
    assert scripts.handlers == [] and "img" not in scripts.tags
    capsys.readouterr()
    out, err = run("look", folder, f"--audio={tmp_path / HOSTILE}\x1b[31m\n.wav", "-o", page, code=2)
    assert out == "" and err.startswith("regard look: received ") and err.count("\n") == 1
    assert "\x1b" not in err and "No such file" in err
    picture = tmp_path / f"{HOSTILE}.png"
    run("look", folder, f"--audio={sound}", f"--output={picture}", "--layers", "*encoder*0*")
    assert picture.read_bytes().startswith(PNG)
