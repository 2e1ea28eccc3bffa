"""The corpus: which documents it holds, in which order, and how it is split into shards."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

import regard
from regard.jobs.corpus import Corpus, iter_lines
from tests.helpers.survey_checks import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def read(corpus: Corpus):
    return {
        document.id: document for shard in corpus.iter_shards() for document in corpus.iter_documents(shard)
    }


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.data())
def test_ranges_of_a_file_yield_every_line_once(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=4)))
    edges = [0, *cuts, len(data)]
    found = [
        line
        for start, stop in itertools.pairwise(edges)
        if start < stop
        for line in iter_lines(io.BytesIO(data), start, stop, 100)
    ]
    offset, expected = 0, []
    for line in data.split(b"\n"):
        expected += [(offset, line)] if line.strip() else []
        offset += len(line) + 1
    assert found == expected


def test_lines_do_not_depend_on_the_block_size(monkeypatch):
    data = b"one\ntwo\n\nthree, which is longer\nfour"
    lines = list(iter_lines(io.BytesIO(data), 0, len(data), 10))
    assert lines == [(0, b"one"), (4, b"two"), (9, None), (32, b"four")]
    monkeypatch.setattr("regard.jobs.corpus.BLOCK_BYTES", 3)
    assert list(iter_lines(io.BytesIO(data), 0, len(data), 10)) == lines


def test_text_lines_and_tables_are_read_and_ids_are_positions(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.txt").write_text("\ufeffa text")
    (tmp_path / ".hidden").write_text("skipped")
    (tmp_path / "b.jsonl").write_text('{"text": "one", "name": 1}\n\n{"text": "two"}')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'))
    (tmp_path / "d.txt.bz2").write_bytes(bz2.compress(b"five"))
    pq.write_table(
        pa.table({"text": ["six", None, "seven"], "name": ["x", "y", "z"]}),
        tmp_path / "e.parquet",
        row_group_size=2,
    )
    found = read(Corpus(str(tmp_path), name_field="name", shard_size=1))
    assert {name: document.text for name, document in found.items()} == {
        "b.jsonl@0": "one", "b.jsonl@28": "two", "c.jsonl.gz@0": "three", "c.jsonl.gz@18": "four",
        "d.txt.bz2": "five", "deep/a.txt": "a text",
        "e.parquet@0": "six", "e.parquet@1": "", "e.parquet@2": "seven",
    }  # fmt: skip
    assert found["b.jsonl@0"].name == "1" and found["e.parquet@2"].name == "z"
    assert found["e.parquet@1"].problem == ("not text", "the text field is of type NoneType")


def test_the_shard_size_does_not_change_the_documents(tmp_path):
    write_corpus(tmp_path)
    whole = read(Corpus(str(tmp_path), shard_size=1000))
    assert len(whole) == 40
    for shard_size in (1, 3, 7):
        assert read(Corpus(str(tmp_path), shard_size=shard_size)) == whole


def test_patterns_select_files(tmp_path):
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
        (b'{"text": "half', "the line is not valid JSON: "),
        (b"[1, 2]", "the line is a JSON list, expected an object"),
        (b'{"body": "x"}', "the text field is of type NoneType"),
        (b'{"text": 7}', "the text field is of type int"),
        (b'{"text": "\\ud800"}', "not valid UTF-8"),
        (b'{"text": "  "}', "the text is empty or white space"),
    ],
)
def test_a_line_without_text_has_a_reason(line, reason, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line)
    (document,) = read(Corpus(str(tmp_path))).values()
    assert document.problem is not None
    assert document.problem[0] == "not text" and reason in document.problem[1]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "which does not exist"),
        ("*.nothing", "which contains no files"),
        (
            "t.parquet",
            "no column 'text'; expected .* Its columns are body. Pass the one with the text as text_field.",
        ),
        ("broken.parquet", "is not valid Parquet"),
    ],
)
def test_an_invalid_corpus_raises(path, words, tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "t.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(regard.ArgumentError, match=words):
        list(Corpus(f"{tmp_path}/{path}").iter_shards())


def test_a_corpus_is_pickled_without_its_listing(corpus):
    listed = Corpus(str(corpus), shard_size=3)
    assert len(listed.files) == 17
    again = pickle.loads(pickle.dumps(listed))
    assert again == listed and "files" not in vars(again)


@pytest.mark.parametrize("path", ["", "/*.txt", "/**/*.txt", "/**/*.json*", "/*/*", "/01.txt", "/0*/*.txt"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_corpus_includes_the_files_that_it_would_read(scheme, path, tmp_path):
    """Of all places where a file may be, `includes` says yes to exactly those that the listing then has."""
    names = ("a.txt", "out/b.txt", "out/settings.json", "out/deep/c.jsonl", ".hidden/d.txt", "01.txt/e.txt")
    (tmp_path / "corpus").mkdir()
    corpus = Corpus(f"{scheme}{tmp_path}/corpus{path}")
    included = {name for name in names if corpus.includes(tmp_path / "corpus" / name)}
    for name in names:
        (tmp_path / "corpus" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "corpus" / name).write_text("{}")
    found = [name for name, _ in Corpus(corpus.path).files]
    root = tmp_path / "corpus"
    below = corpus.root.removeprefix("file://")
    assert included == {f"{below}/{name}".removeprefix(f"{root}/").strip("/") for name in found}
    assert not corpus.includes(tmp_path / "elsewhere.txt")
    assert not Corpus("s3://pages").includes(tmp_path / "a.txt")


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_has_gone_is_quarantined_and_the_others_are_read(suffix, tmp_path):
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{suffix}"
        text = b"words" if "txt" in suffix else b'{"text": "words"}'
        path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
        if suffix == "parquet":
            pq.write_table(pa.table({"text": ["words"]}), path)
    corpus = Corpus(str(tmp_path), shard_size=10)
    (shard,) = corpus.iter_shards()
    (tmp_path / f"a.{suffix}").unlink()
    gone, found = corpus.iter_documents(shard)
    assert gone.id.startswith(f"a.{suffix}") and gone.problem[0] == "unreadable"
    assert found.text == "words" and found.problem is None
