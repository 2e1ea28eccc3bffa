"""The survey: what it reads, what it measures, what it writes, and how that is opened."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

import pyarrow as pa
import pyarrow.parquet as pq

import regard
from examples.induction import encode, load
from regard.lens.watch import watch
from regard.models import LoadedModel
from regard.survey import SurveyError
from regard.survey.corpus import Corpus, Shard, lines
from regard.survey.head_stats import Offsets, profile
from regard.survey.schema import DISTANCES, KINDS, WINDOWS, Rows, batch_of, schema_of, widths
from regard.survey.worker_client import python_path
from regard.survey.worker_process import Model, Task, tokenizer_of, weights_of
from tests.helpers.survey_checks import assert_whole, run, write_corpus
from tests.helpers.survey_models import tiny
from tests.helpers.survey_stub import Stub

# -- What it reads ----------------------------------------------------------------------------------------


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.data())
def test_stretches_of_a_file_give_every_line_once(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=4)))
    edges = [0, *cuts, len(data)]
    found = [
        each
        for start, stop in itertools.pairwise(edges)
        if start < stop
        for each in lines(io.BytesIO(data), start, stop, 100)
    ]
    at, expected = 0, []
    for line in data.split(b"\n"):
        expected += [(at, line)] if line.strip() else []
        at += len(line) + 1
    assert found == expected


def test_blocks_do_not_matter(monkeypatch):
    data = b"one\ntwo\n\nthree, which is longer\nfour"
    whole = list(lines(io.BytesIO(data), 0, len(data), 10))
    assert whole == [(0, b"one"), (4, b"two"), (9, None), (32, b"four")]
    monkeypatch.setattr("regard.survey.corpus.BLOCK", 3)
    assert list(lines(io.BytesIO(data), 0, len(data), 10)) == whole


def read(corpus: Corpus):
    return {each.id: each for shard in corpus.shards() for each in corpus.documents(shard)}


def test_text_lines_and_tables_are_read_and_ids_say_where(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.txt").write_text("\ufeffa text")
    (tmp_path / ".hidden").write_text("left out")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "name": 1}\n\n{"text": "two"}')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'))
    (tmp_path / "d.txt.bz2").write_bytes(bz2.compress(b"five"))
    pq.write_table(
        pa.table({"text": ["six", None, "seven"], "name": ["x", "y", "z"]}),
        tmp_path / "e.parquet",
        row_group_size=2,
    )
    found = read(Corpus(str(tmp_path), label="name", per_shard=1))
    assert {name: each.text for name, each in found.items()} == {
        "b.jsonl@0": "one", "b.jsonl@28": "two", "c.jsonl.gz@0": "three", "c.jsonl.gz@18": "four",
        "d.txt.bz2": "five", "deep/a.txt": "a text",
        "e.parquet@0": "six", "e.parquet@1": "", "e.parquet@2": "seven",
    }  # fmt: skip
    assert found["b.jsonl@0"].label == "1" and found["e.parquet@2"].label == "z"
    assert found["e.parquet@1"].problem == ("not text", "a NoneType where a text is expected")


def test_how_a_corpus_is_cut_does_not_change_what_it_holds(tmp_path):
    write_corpus(tmp_path)
    whole = read(Corpus(str(tmp_path), per_shard=1000))
    assert len(whole) == 40
    for per_shard in (1, 3, 7):
        assert read(Corpus(str(tmp_path), per_shard=per_shard)) == whole
    shard = next(Corpus(str(tmp_path), per_shard=7).shards())
    assert Shard.loads(shard.dumps()) == shard


def test_patterns_choose_files(tmp_path):
    for name in ("a.txt", "b.md", "deep/c.txt", "deep/er/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert set(read(Corpus(f"{tmp_path}/*.txt"))) == {"a.txt"}
    assert set(read(Corpus(f"{tmp_path}/**/*.txt"))) == {"a.txt", "deep/c.txt", "deep/er/d.txt"}
    assert set(read(Corpus(f"{tmp_path}/deep/*"))) == {"c.txt"}
    assert set(read(Corpus(f"{tmp_path}/b.md"))) == {"b.md"}
    assert set(read(Corpus(f"file://{tmp_path}"))) == {"a.txt", "b.md", "deep/c.txt", "deep/er/d.txt"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "half', "a line that is not JSON"),
        (b"[1, 2]", "a line of JSON that is a list"),
        (b'{"body": "x"}', "a NoneType where a text is expected"),
        (b'{"text": 7}', "a int where a text is expected"),
        (b'{"text": "\\ud800"}', "no UTF-8"),
        (b'{"text": "  "}', "nothing but white space"),
    ],
)
def test_a_line_that_is_no_text_says_why(line, reason, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line)
    (document,) = read(Corpus(str(tmp_path))).values()
    assert document.problem is not None
    assert document.problem[0] == "not text" and reason in document.problem[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "where nothing is"),
        ("*.nothing", "in which no file is"),
        ("t.parquet", "no column 'text'"),
    ],
)
def test_a_corpus_that_is_none_is_refused(path, words, tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(regard.ArgumentError, match=words):
        list(Corpus(f"{tmp_path}/{path}").shards())


# -- What it measures -------------------------------------------------------------------------------------

TEXT = "Everything should be made as simple as possible. Everything should be said once. " * 3


@pytest.fixture(scope="module")
def writer():
    return load("text")


@pytest.fixture(scope="module")
def recording(writer):
    with torch.no_grad(), watch(writer) as recording:
        writer(encode(TEXT))
    return recording


def test_numbers_are_those_of_seen_heads(recording):
    ids = encode(TEXT)[0].tolist()
    table, copies = recording.heads(ids, windows=WINDOWS), {}
    found = [profile(recording.calls(name)[0], [ids], copies) for name in recording]
    assert list(found[0]) == list(widths())
    for name in ("entropy", "first", "previous", "distance", "heavy", "duplicate", "induction"):
        ours = np.concatenate([each[name] for each in found])
        np.testing.assert_allclose(ours, table.column(name), rtol=1e-6, err_msg=name)
    for window in WINDOWS:
        ours = np.concatenate([each[f"within_{window}"] for each in found])
        np.testing.assert_allclose(ours, table.column(f"within_{window}"), rtol=1e-6)


def test_histograms_and_kept_windows_are_those_of_the_dense_matrix(recording):
    (name, *_) = recording
    call = recording.calls(name)[0]
    found = profile(call, None, {})
    weights = call.matrix.to_dense().double().numpy()[0]  # (heads, n, n)
    rows, keys = np.indices(weights.shape[1:])
    apart = rows - keys
    for each in range(DISTANCES):
        low = 0 if each == 0 else 2 ** (each - 1)
        high = 1 if each == 0 else 2**each if each < DISTANCES - 1 else 10**9
        inside = (apart >= low) & (apart < high)
        expected = np.where(inside, weights, 0.0).sum((1, 2)) / weights.shape[1]
        np.testing.assert_allclose(found["distance_histogram"][:, each], expected, atol=1e-6)
    for window in WINDOWS[:3]:
        kept = (apart < window) | (keys == 0)
        expected = np.where(kept, weights, 0.0).sum((1, 2)) / weights.shape[1]
        np.testing.assert_allclose(found[f"kept_{window}"], expected, atol=1e-6)
    bits = call.matrix.entropy().double().numpy()[0] / np.log(2)
    for head, own in enumerate(bits):
        expected = np.histogram(own, bins=[-1, *range(1, 17), 99])[0] / own.size
        np.testing.assert_allclose(found["entropy_histogram"][head], expected)
    for name in ("distance_histogram", "entropy_histogram"):
        np.testing.assert_allclose(found[name].sum(-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.sliding_window(4)])
@pytest.mark.parametrize("xp", [np.asarray, torch.tensor])
def test_offsets_are_sums_along_diagonals_however_tiles_fall(xp, mask, small):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 11, 5)), rng.normal(size=(2, 3, 11, 5))
    A = regard.attention(xp(query), xp(key), mask=mask)
    dense = np.asarray(A.to_dense())
    counted = rng.integers(0, 2, (2, 1, 11)).astype(bool)
    for rows in (None, counted):
        kept = dense if rows is None else dense * rows[..., None]
        expected = np.stack([np.trace(kept, n, -2, -1) for n in range(-10, 11)], -1)
        np.testing.assert_allclose(np.asarray(A.measure(Offsets(rows)).offsets), expected, atol=1e-12)


def test_between_two_sequences_there_are_no_distances():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad(), watch(torch.nn.ModuleDict({"cross_attn": layer})) as recording:
        layer(torch.randn(1, 3, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8))
    found = profile(recording.calls("cross_attn")[0], [[1, 2, 3, 4, 5]], {})
    assert np.isfinite(found["entropy"]).all() and np.isfinite(found["first"]).all()
    for name in ("distance", "previous", "within_64", "kept_64", "distance_histogram", "induction"):
        assert np.isnan(found[name]).all()


def test_watch_hands_each_call_to_a_function(writer):
    with (
        torch.no_grad(),
        watch(writer, keep="measures", measures=lambda call: {"rows": call.shape[-2]}) as recording,
    ):
        writer(encode("seven b"))
    assert [recording.calls(name)[0].measured for name in recording] == [{"rows": 7}] * len(recording)


# -- What it writes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def survey(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("survey") / "out"
    return run(corpus, out, model="tests.helpers.survey_models:tiny", max_tokens=64)


def test_a_survey_has_a_row_for_every_document_layer_and_head(survey, corpus):
    assert_whole(survey.path, corpus, survey, rows_each=4)
    table = survey.dataset.to_table()
    assert table.schema.equals(schema_of(widths()))
    assert len(table) == 40 * 4
    assert table.column("layer").to_pylist()[:4] == [0, 0, 1, 1]
    assert set(table.column("tokens").to_pylist()) == {64} and all(table.column("cut").to_pylist())
    assert repr(survey) == (
        "Survey of tests.helpers.survey_models:tiny: 40 documents, 2,560 tokens, 2 layers, 4 heads, 0 quarantined"
    )


def test_its_rows_are_what_the_lens_says_of_each_document(survey, corpus):
    model, _ = tiny()
    text = (corpus / "03.txt").read_text()
    with torch.no_grad(), watch(model) as recording:
        model(encode(text)[:, :64])
    table = recording.heads(encode(text)[0, :64].tolist(), windows=[64])
    ours = survey.to_pandas().query("document == '03.txt'")
    assert ours["module"].tolist() == table.column("module")
    for name in ("entropy", "previous", "distance", "first", "heavy", "duplicate", "induction", "within_64"):
        np.testing.assert_allclose(ours[name], table.column(name), rtol=1e-5)


def test_rows_take_the_same_bytes_whatever_the_length(tmp_path):
    model = Model(Task(model="tests.helpers.survey_models:tiny", measures=KINDS, max_tokens=10_000))

    def size(length):
        rows = model.measure("".join(chr(97 + n * n % 26) for n in range(length)))
        assert rows["tokens"] == length
        batch = batch_of([Rows("document", None, rows)], schema_of(widths()))
        return batch.nbytes / len(batch)

    assert size(256) == size(2048) == size(17)


def test_means_by_head_count_documents_or_tokens(tmp_path):
    (tmp_path / "corpus").mkdir()
    texts = {"a.txt": "short", "b.txt": "a text that is longer than the other one"}
    for name, text in texts.items():
        (tmp_path / "corpus" / name).write_text(text)
    survey = run(tmp_path / "corpus", tmp_path / "out")
    rows = [Stub().measure(text) for text in texts.values()]
    by_document, by_token = survey.heads(), survey.heads("tokens")
    assert by_document.column("documents").to_pylist() == [2] * 6
    assert by_token.column("tokens").to_pylist() == [sum(map(len, texts.values()))] * 6
    shares = np.array([len(text) for text in texts.values()]) / sum(map(len, texts.values()))
    for name in ("entropy", "kept_128"):
        np.testing.assert_allclose(by_document.column(name), (rows[0][name] + rows[1][name]) / 2, rtol=1e-6)
        expected = shares[0] * rows[0][name] + shares[1] * rows[1][name]
        np.testing.assert_allclose(by_token.column(name), expected, rtol=1e-6)
    np.testing.assert_allclose(
        by_document.column("entropy_histogram").to_pylist(),
        (rows[0]["entropy_histogram"] + rows[1]["entropy_histogram"]) / 2,
        rtol=1e-6,
    )
    with pytest.raises(regard.ArgumentError, match='"documents" or "tokens"'):
        survey.heads("layers")


def test_nothing_to_tell_is_null_and_left_out_of_means(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("abcdefg")  # no token comes twice
    (tmp_path / "corpus/b.txt").write_text("abcabca")
    survey = run(
        tmp_path / "corpus",
        tmp_path / "out",
        model="tests.helpers.survey_models:tiny",
        measures=["copies", "heavy"],
    )
    table = survey.dataset.to_table()
    assert [name for name in table.schema.names if name in widths()] == ["heavy", "duplicate", "induction"]
    assert table.column("induction").to_pylist()[:4] == [None] * 4
    assert survey.heads().column("induction").to_pylist() == table.column("induction").to_pylist()[4:]


def test_frames_have_the_same_rows(survey):
    import polars

    pandas, frame = survey.to_pandas(), survey.to_polars(["document", "entropy"])
    assert isinstance(frame, polars.DataFrame) and frame.columns == ["document", "entropy"]
    assert pandas["entropy"].tolist() == frame["entropy"].to_list()


def test_labels_are_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "some text", "name": "the first"}))
    survey = run(tmp_path / "a.jsonl", tmp_path / "out", text="body", label="name")
    table = survey.dataset.to_table()
    assert set(table.column("label").to_pylist()) == {"the first"}
    assert set(table.column("document").to_pylist()) == {"a.jsonl@0"}


def test_progress_is_told(corpus, tmp_path):
    told = []
    run(corpus, tmp_path / "out", workers=2, progress=told.append)
    assert [each.shards for each in told] == sorted(each.shards for each in told)
    last = told[-1]
    assert (last.documents, last.quarantined, last.shards, last.of, last.left) == (40, 0, 8, 8, 0.0)
    assert last.tokens == regard.survey.open(tmp_path / "out").tokens and last.rate > 0


# -- What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measures": ["entrpy"]}, "measures with 'entrpy'"),
        ({"measures": []}, "no measures"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"workers": 0}, "workers 0"),
        ({"engine": "spark"}, "engine 'spark'"),
        ({"model": lambda: None}, "cannot be sent to another process"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(options, words, corpus, tmp_path):
    with pytest.raises(regard.ArgumentError, match=words):
        run(corpus, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_out_may_not_lie_among_the_documents(corpus, tmp_path):
    with pytest.raises(regard.ArgumentError, match="inside the corpus"):
        run(corpus, corpus / "out")
    with pytest.raises(regard.ArgumentError, match="inside the corpus"):
        run(f"{corpus}/**/*.parquet", corpus / "out")
    assert not (corpus / "out").exists()
    assert not Corpus(f"{corpus}/*.txt").holds(corpus / "out")
    assert not Corpus(str(corpus)).holds(tmp_path / "out")
    assert not Corpus("s3://pages").holds(tmp_path / "out")


def test_a_corpus_travels_without_its_listing(corpus):
    listed = Corpus(str(corpus), per_shard=3)
    assert len(listed.files) == 17
    again = pickle.loads(pickle.dumps(listed))
    assert again == listed and "files" not in vars(again)


def test_a_survey_that_has_just_begun_is_empty(survey, tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps(survey.settings))
    fresh = regard.survey.open(tmp_path)
    assert not fresh.complete and fresh.documents == 0 and len(fresh.to_pandas()) == 0
    assert repr(fresh).endswith("0 quarantined, 0 of 8 shards so far")
    assert fresh.heads().column("entropy").null_count == 4


def test_what_is_no_survey_is_not_opened(survey, tmp_path):
    with pytest.raises(regard.ArgumentError, match=r"where no settings\.json is"):
        regard.survey.open(tmp_path)
    settings = {**survey.settings, "schema": 99}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(regard.ArgumentError, match="a survey of schema 99"):
        regard.survey.open(tmp_path)


@pytest.mark.parametrize("call", ["open('a')", "run('a', 'b', 'c')"])
def test_without_the_extra_one_line_says_what_to_install(call):
    code = f"""if True:
        import sys
        sys.modules["pyarrow"] = None
        import regard
        try:
            regard.survey.{call}
        except ImportError as error:
            print(error)
    """
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    name = call.split("(")[0]
    assert done.stdout == f"survey.{name}: pyarrow is not installed. pip install 'regard[survey]'\n"


def test_errors_come_whole_out_of_another_process():
    error = SurveyError("survey", received="this", expected="that", hint="Do so.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is SurveyError and str(again) == str(error) and again.hint == "Do so."


def test_fingerprints_tell_models_and_tokenizers_apart():
    (one, ids), (two, _) = tiny(), tiny(1)
    assert weights_of(one) == weights_of(tiny()[0]) != weights_of(two)
    one.layers[0].norm.weight[3] += 1e-3
    assert weights_of(one) != weights_of(tiny()[0])
    assert tokenizer_of(ids) == "tests.helpers.survey_models:ids" and tokenizer_of(None) == "bytes"


def test_a_model_at_hand_can_be_surveyed(tmp_path):
    model, ids = tiny()
    (tmp_path / "a.txt").write_text("some words")
    opened = LoadedModel("at hand", model, ids)
    survey = regard.survey.run(opened, tmp_path / "a.txt", tmp_path / "out")
    assert survey.settings["model"]["name"] == "at hand" and survey.documents == 1
