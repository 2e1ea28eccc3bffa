"""`Recording.find`, `Recording.rollout` and `Recording.save`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")

import regard  # noqa: E402
from regard import ArgumentError, ArgumentTypeError, IndexOutOfRangeError  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from tests.helpers.tensors import limit_score_error  # noqa: E402
from tests.helpers.tiny_models import needs_t5_attention  # noqa: E402

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, intermediate_size=16, initializer_range=0.5)
    return transformers.BertModel(config).eval()


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=16, num_key_value_heads=1, initializer_range=0.5
    )
    return transformers.LlamaForCausalLM(config).eval()


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5Model(config).eval()


def read_record(page) -> dict:
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html)[1])


def watched(model, *args, **kwargs):
    with torch.no_grad(), regard.watch(model) as recording:
        model(*args, **kwargs)
    return recording


# -- A trained model --------------------------------------------------------------------------------------


def test_the_head_that_resolves_it_is_found(minilm):
    model, tokenizer = minilm
    inputs = tokenizer("The cat sat on the mat because it was tired.", return_tensors="pt")
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    recording = watched(model, **inputs)
    table = recording.find("it", "cat", tokens)
    assert len(table) == 6 * 12
    # Layers and heads are counted from 0: the last of both.
    assert (table[0]["module"], table[0]["layer"], table[0]["head"]) == (
        "encoder.layer.5.attention.self",
        5,
        11,
    )
    assert table[0]["weight"] == pytest.approx(0.71, abs=0.005)
    assert table[1]["weight"] < 0.5
    assert recording.diagnose(tokens).by_severity("error") == []


# -- find -------------------------------------------------------------------------------------------------


def test_rows_are_sorted_by_weight():
    ids = torch.arange(1, 8)[None]
    recording = watched(bert(), ids)
    tokens = ["▁the", "▁cat", "▁sat", "▁on", "▁the", "▁mat", "."]
    table = recording.find("mat", "cat", tokens)
    assert table == recording.find(5, 1) == recording.find(-2, "▁cat", tokens)
    weights = table.column("weight")
    assert weights == sorted(weights, reverse=True) and len(weights) == 6
    for row in table:
        assert (row["query"], row["key"]) == (5, 1)
        A = recording[row["module"]].to_dense()[0, row["head"]]
        assert row["weight"] == pytest.approx(float(A[5, 1]), rel=2e-5)  # from the lse; scores reach 30


def test_a_text_that_occurs_twice_gives_the_pair_with_the_largest_weight():
    recording = watched(bert(), torch.arange(1, 8)[None])
    tokens = list("abacaba")
    for row in recording.find("a", "b", tokens):
        A = recording[row["module"]].to_dense()[0, row["head"]]
        pairs = {(i, j): float(A[i, j]) for i in (0, 2, 4, 6) for j in (1, 5)}
        best = max(pairs, key=pairs.get)
        assert (row["query"], row["key"]) == best and row["weight"] == pytest.approx(pairs[best])


def test_batch_entries_have_their_own_tokens():
    ids = torch.arange(1, 15).reshape(2, 7)
    recording = watched(bert(), ids)
    tokens = [list("abcdefg"), list("gfedcba")]
    table = recording.find("a", "b", tokens, batch=1)
    assert {(row["query"], row["key"]) for row in table} == {(6, 5)}
    row = table[0]
    assert row["weight"] == pytest.approx(float(recording[row["module"]].to_dense()[1, row["head"], 6, 5]))
    with pytest.raises(IndexOutOfRangeError, match="one of 2 batch entries"):
        recording.find(0, 1, batch=2)


def test_cross_attention():
    recording = watched(t5(), input_ids=torch.arange(1, 6)[None], decoder_input_ids=torch.arange(1, 4)[None])
    table = recording.find("z", "c", tokens=list("abcde"), query_tokens=["x", "y", "z"])
    assert {row["module"].split(".")[-1] for row in table} == {"EncDecAttention"}
    assert {(row["query"], row["key"]) for row in table} == {(2, 2)}
    assert recording.find("z", 2, query_tokens=["x", "y", "z"]) == table
    for wrong in ({"tokens": list("abcd")}, {"query_tokens": ["x", "z"]}):
        given = {"tokens": list("abcde"), "query_tokens": ["x", "y", "z"]} | wrong
        count, role = (4, "key of a layer: 5") if "tokens" in wrong else (2, "query of a layer: 3")
        with pytest.raises(ArgumentError, match=rf"received {count} tokens .* each {role}"):
            recording.find("z", "c", **given)
    inside = recording.find("e", "a", tokens=list("abcde"))
    assert all(row["module"].startswith("encoder.") for row in inside) and len(inside) == 4
    assert {row["module"].split(".")[0] for row in recording.find(4, 4)} == {"encoder"}


def test_a_page_labels_two_sequences():
    source, target = list("abcde"), ["x", "y", "z"]
    recording = watched(t5(), input_ids=torch.arange(1, 6)[None], decoder_input_ids=torch.arange(1, 4)[None])

    def labels(*tokens, **named):
        """Return the texts of queries and keys of each kind of layer on the page."""
        record = read_record(recording.page(*tokens, **named))
        texts = [*record["texts"], None]
        found = {}
        for layer in record["layers"]:
            side, kind = layer["module"].split(".")[0], layer["module"].split(".")[-1]
            number = [-1 if layer[name] is None else layer[name] for name in ("query_text", "key_text")]
            found[f"{side} {kind}"] = tuple(texts[i] for i in number)
        return list(found.values())  # of the encoder, the decoder, and cross-attention

    assert labels(source, query_tokens=target) == [(source,) * 2, (target,) * 2, (target, source)]
    assert labels(source) == [(source,) * 2, (None,) * 2, (None, source)]
    assert labels(query_tokens=target) == labels(target) == [(None,) * 2, (target,) * 2, (target, None)]


def test_generated_tokens_are_searched():
    model = llama()
    with torch.no_grad(), regard.watch(model) as recording:
        text = model.generate(torch.arange(1, 6)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    tokens = [f"t{i}" for i in range(text.shape[1])]
    row = recording.find("t7", "t2", tokens)[0]
    once = watched(model, text[:, :-1])
    assert row["weight"] == pytest.approx(
        float(once[row["module"]].to_dense()[0, row["head"], 7, 2]), rel=1e-4
    )


def test_capitals_matter_only_if_both_spellings_occur():
    recording = watched(bert(), torch.arange(1, 5)[None])
    assert recording.find("Cat", "THE", ["the", "cat", "sat", "."]) == recording.find(1, 0)
    both = ["Cat", "cat", "sat", "."]
    assert recording.find("sat", "Cat", both) == recording.find(2, 0)
    assert recording.find("sat", "cat", both) == recording.find(2, 1)


def test_missing_tokens_raise_with_a_hint():
    recording = watched(bert(), torch.arange(1, 5)[None])
    tokens = ["the", "cat", "sat", "."]
    with pytest.raises(ArgumentError, match=r"query='cats'; expected one of the tokens, such as 'cat'"):
        recording.find("cats", "the", tokens)
    with pytest.raises(ArgumentError, match=r"query='cat' and no tokens.*convert_ids_to_tokens"):
        recording.find("cat", "the")
    with pytest.raises(ArgumentError, match=r"received 2 tokens .* each key of a layer: 4"):
        recording.find("cat", "the", ["the", "cat"])
    with pytest.raises(IndexOutOfRangeError, match=r"query=9; expected a position from 0 to 3"):
        recording.find(9, 0)
    with pytest.raises(ArgumentTypeError, match="the text of a token, or its position"):
        recording.find(1.5, 0)
    with pytest.raises(ArgumentError, match=r"query_tokens= of the decoder"):
        recording.find("cat", "the", tokens, query_tokens=tokens)
    with (
        pytest.warns(regard.lens.EmptyRecordingWarning),
        regard.watch(bert(), measures="default") as measured,
    ):
        pass
    assert measured.find(0, 1) == []


# -- rollout ----------------------------------------------------------------------------------------------


def dense_rollout(recording, names, batch=0):
    n = recording[names[0]].shape[-1]
    product = np.eye(n)
    for name in names:
        A = recording[name].to_dense()[batch].double().numpy().mean(0)
        product = (0.5 * A + 0.5 * np.eye(n)) @ product
    return product


@pytest.mark.parametrize("make", [bert, llama])
def test_rollout_equals_the_dense_product_at_512_tokens(make):
    ids = torch.randint(1, 50, (2, 512), generator=torch.Generator().manual_seed(0))
    recording = watched(make(), ids)
    expected = dense_rollout(recording, list(recording), batch=1)
    for token in (0, 200, -1):
        found = recording.rollout(token, batch=1)
        np.testing.assert_allclose(found, expected[token], rtol=1e-4, atol=1e-7)
        assert found.sum() == pytest.approx(1, abs=1e-5)


LONG = """
import resource, torch, regard

class Attend(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

model = torch.nn.Sequential(Attend(), Attend())
x = torch.randn(1, 1, 32768, 4, generator=torch.Generator().manual_seed(0))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with torch.no_grad(), regard.watch(model) as recording:
    model(x)
before = peak()
share = recording.rollout(32767)
print(len(share), share.sum(), peak() - before)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_rollout_at_32768_tokens_stores_no_matrix():
    """Measured in a separate process; one matrix would take 4,096 MB."""
    ran = subprocess.run([sys.executable, "-c", LONG], check=True, capture_output=True, text=True, env=ENV)
    length, total, grown = map(float, ran.stdout.split())
    assert length == 32_768 and total == pytest.approx(1, abs=1e-3)
    assert grown < 256


def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Attend(torch.nn.Module):
    """Attention without parameters, (batch, heads, n, dim)."""

    def forward(self, x):
        return attend(x)


class Repeated(torch.nn.Module):
    """One layer that three depths share, as in ALBERT."""

    def __init__(self):
        super().__init__()
        self.layer = Attend()

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return x


@pytest.mark.parametrize("depth", [1, 2])
def test_rollout_is_of_one_pass(depth):
    """Two passes over texts of the same length are two rollouts, not one of twice the depth."""
    model = torch.nn.Sequential(*(Attend() for _ in range(depth)))
    x, other = torch.randn(2, 1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    one = watched(model, x)
    np.testing.assert_allclose(one.rollout(-1), dense_rollout(one, list(one))[-1], rtol=1e-5)
    with torch.no_grad(), regard.watch(model) as two:
        model(x)
        model(other)
    with pytest.raises(ArgumentError, match=r"2 calls of '0' from several passes.* Watch one pass at a time"):
        two.rollout(-1)
    with torch.no_grad(), regard.watch(torch.nn.ModuleDict({"model": model})) as inside:
        model(x)
        model(other)
    with pytest.raises(ArgumentError, match="several passes"):
        inside.rollout(-1)


def test_rollout_of_a_layer_that_several_depths_share(tmp_path):
    model, x = Repeated(), torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    recording, expected = watched(model, x), np.eye(5)
    for _ in range(3):
        weights = (x @ x.mT / 2).softmax(-1)[0].double().numpy().mean(0)
        expected, x = (0.5 * weights + 0.5 * np.eye(5)) @ expected, attend(x)
    np.testing.assert_allclose(recording.rollout(-1), expected[-1], rtol=1e-5)
    recording.save(tmp_path / "recording.safetensors")
    loaded = regard.load_recording(tmp_path / "recording.safetensors")
    np.testing.assert_allclose(loaded.rollout(-1), expected[-1], rtol=1e-5)


@pytest.mark.parametrize("batch", [1, -2, 9])
@pytest.mark.parametrize("tokens", [None, list("abcde")])
def test_batch_entries_that_do_not_exist(batch, tokens):
    recording = watched(torch.nn.Sequential(Attend()), torch.ones(1, 2, 5, 4))
    for read in (
        lambda: recording.find(0, 1, tokens, batch=batch),
        lambda: recording.rollout(0, tokens, batch=batch),
        lambda: recording.page(tokens, batch=batch),
    ):
        with pytest.raises(IndexOutOfRangeError, match=f"batch={batch}; expected batch=0"):
            read()


def test_rollout_by_text_and_stack():
    recording = watched(t5(), input_ids=torch.arange(1, 6)[None], decoder_input_ids=torch.arange(1, 4)[None])
    with pytest.raises(
        ArgumentError, match=r'decoder.block of 3 tokens, encoder.block of 5 .* layers="encoder'
    ):
        recording.rollout(0)
    names = [name for name in recording if name.startswith("encoder.")]
    expected = dense_rollout(recording, names)[3]
    np.testing.assert_allclose(recording.rollout("d", list("abcde"), layers="encoder.*"), expected, rtol=1e-4)
    with pytest.raises(ArgumentError, match=r"query='a', which is at 0, 2; .* recording\.rollout\(2\)"):
        recording.rollout("a", list("abacd"), layers="encoder.*")
    with pytest.raises(ArgumentError, match="list\\(recording\\) lists the names"):
        recording.rollout(0, layers="nothing.*")


# -- save and load ----------------------------------------------------------------------------------------


def gemma2():
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SMALL,
        intermediate_size=16,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        attn_implementation="eager",  # in 5.0 and 5.10 the default is SDPA, which drops the soft cap
    )
    return transformers.Gemma2Model(config).eval()


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SMALL,
        intermediate_size=16,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
    )
    return transformers.GptOssModel(config).eval()


def build_inputs(model):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    inputs = {"input_ids": torch.arange(18).reshape(2, 9), "attention_mask": mask}
    return inputs | (
        {"decoder_input_ids": inputs["input_ids"][:, :5]} if model.config.is_encoder_decoder else {}
    )


@pytest.mark.parametrize("make", [bert, llama, pytest.param(t5, marks=needs_t5_attention), gemma2, gpt_oss])
def test_a_saved_recording_loads_as_it_was(make, tmp_path):
    model = make()
    recording = watched(model, **build_inputs(model))
    recording.save(tmp_path / "recording.safetensors")
    again = regard.load_recording(tmp_path / "recording.safetensors")
    assert repr(again) == repr(recording)
    for name in recording:
        (old,), (new,) = recording.calls(name), again.calls(name)
        assert torch.equal(new.query, old.query) and torch.equal(new.key, old.key)
        # Loaded arrays have other strides, with which some processors multiply in another order.
        dense, drift = old.matrix.to_dense(), limit_score_error(old.matrix)
        assert_matches(new.matrix.to_dense(), dense, dense, dtype="float32", score_error=drift)
        assert repr(new.mask) == repr(old.mask) and repr(new.score_mods) == repr(old.score_mods)
        fields = (
            "layer_class",
            "scale",
            "kernel",
            "query_offset",
            "steps",
            "is_causal",
            "training",
            "dropout_p",
        )
        assert [getattr(new, field) for field in fields] == [getattr(old, field) for field in fields]
    assert str(again.heads()) == str(recording.heads())
    before, after = recording.diagnose(), again.diagnose()
    assert [(f.kind, f.severity, f.message) for f in after] == [
        (f.kind, f.severity, f.message) for f in before
    ]
    assert after.summary == before.summary
    # A file holds no positions, and the checks of positions say so.
    changed = {new.name for old, new in zip(before.checks, after.checks, strict=True) if old != new}
    assert changed <= {"positions of padded tokens", "packed documents"}


def test_joined_cross_attention_keeps_its_query_offset(tmp_path):
    model = t5()
    with torch.no_grad(), regard.watch(model) as recording:
        out = model.encoder(torch.arange(1, 8)[None])
        past = None
        for token in range(4):
            made = model.decoder(
                torch.tensor([[token]]), encoder_hidden_states=out[0], past_key_values=past, use_cache=True
            )
            past = made.past_key_values
    recording.save(tmp_path / "a")
    again = regard.load_recording(tmp_path / "a")
    assert {name: again.calls(name)[0].query_offset for name in again} == {
        name: recording.calls(name)[0].query_offset for name in recording
    }
    assert {call.steps for name in again for call in again.calls(name)} == {1, 4}


def test_generated_steps_and_measures_are_saved(tmp_path):
    model = llama()
    with torch.no_grad(), regard.watch(model) as recording:
        model.generate(torch.arange(1, 6)[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
    recording.save(tmp_path / "a")
    again = regard.load_recording(tmp_path / "a")
    assert again.heads() == recording.heads() and again.find(7, 2) == recording.find(7, 2)
    measures = {"entropy": regard.Entropy(), "top": regard.TopK(2)}
    with torch.no_grad(), regard.watch(model, measures=measures) as measured:
        model(torch.arange(1, 6)[None])
    measured.save(tmp_path / "b")
    for name in measured:
        (old,), (new,) = measured.calls(name), regard.load_recording(tmp_path / "b").calls(name)
        assert new.shape == old.shape and torch.equal(new.measures["entropy"], old.measures["entropy"])
        assert torch.equal(new.measures["top"].indices, old.measures["top"].indices)


def test_the_file_is_safetensors_and_json(tmp_path):
    model = llama()
    recording = watched(model, **build_inputs(model))
    recording.save(tmp_path / "recording.safetensors")
    with safetensors.safe_open(tmp_path / "recording.safetensors", "pt") as file:
        header = json.loads(file.metadata()["regard"])
        names = set(file.keys())
    assert header["format"] == "regard.lens 1" and len(header["calls"]) == 3
    assert header["calls"][0]["mask"] == "causal() & padding([9, 6], side='left')"
    assert {"0.query", "0.key", "0.start", "0.stop"} <= names


class Odd(regard.ScoreMod):
    def apply(self, scores, frame, q_idx, kv_idx, xp):
        return scores * 1


def test_what_cannot_be_written_or_read_raises_with_a_hint(tmp_path):
    recording = watched(bert(), torch.arange(1, 5)[None])
    recording.calls(next(iter(recording)))[0].softcap = Odd()
    with pytest.raises(
        ArgumentError, match=r"recording\.save: received the score modification .* regard\.score_mods\.bias"
    ):
        recording.save(tmp_path / "a")
    model = bert()
    with torch.no_grad(), regard.watch(model, measures=lambda call: {"text": call.name}) as measured:
        model(torch.arange(1, 5)[None])
    with pytest.raises(
        ArgumentError, match=r"recording\.save: received 'text', a measure that returned a str"
    ):
        measured.save(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"no such thing")
    with pytest.raises(ArgumentError, match=r"load_recording: received 'b', which is not a safetensors file"):
        regard.load_recording(tmp_path / "b")
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, str(tmp_path / "c"))
    with pytest.raises(
        ArgumentError, match=r"'c', a file of format None; .* recording\.save\(path\) writes one"
    ):
        regard.load_recording(tmp_path / "c")


@pytest.mark.parametrize(
    "layers", ["encoder.layer.1", "*.1", ["encoder.layer.1.attention"], "encoder.layer.1.*"]
)
def test_layers_are_selected_with_everything_inside(layers):
    """A name means the same in a watch, an edit and an analysis."""
    model, ids = bert(), torch.arange(1, 7)[None]
    recording = watched(model, ids)
    name = next(name for name in recording if name.startswith("encoder.layer.1."))
    assert list(recording.span_mass({"all": (0, 6)}, layers=layers)) == [name]
    np.testing.assert_allclose(
        recording.rollout(3, layers=layers), dense_rollout(recording, [name])[3], rtol=1e-4
    )
    with torch.no_grad(), regard.watch(model, layers=layers) as part:
        model(ids)
    edit = regard.interventions.knockout(layers, queries=3, keys=0)
    with torch.no_grad(), regard.intervene(model, edit) as run:
        model(ids)
    assert list(part) == run.applied.column("module") == [name]
