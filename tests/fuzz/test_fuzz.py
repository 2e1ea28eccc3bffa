"""A small share of the bad input that `scripts/fuzz` draws, and inputs that once ended in a traceback."""

from __future__ import annotations

import gzip
import itertools
import json
import time
import tracemalloc
import wave
import zipfile
from pathlib import Path
from random import Random

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

import regard
from regard.cli.files import read_matrices
from regard.errors import ArgumentError
from regard.jobs.corpus import Corpus
from regard.jobs.manifest import Manifest, format_entry, iter_entries, read_manifest
from regard.learn.exercises.submission import load_progress
from regard.models.audio import read_wav
from regard.pages.html import build_page
from regard.policy.files import read_policy, write_policy
from regard.survey import SurveyError
from tests.fuzz import runner
from tests.fuzz.recording_targets import _split, write_recordings
from tests.fuzz.runner import Target, run_inputs
from tests.fuzz.survey_targets import write_survey
from tests.fuzz.targets import TARGETS

FEW = {"arguments": 5, "survey-shards": 20, "survey-settings": 60, "tokens": 60, "pages": 60, "answers": 80}


@pytest.mark.parametrize("name", TARGETS)
def test_bad_input_is_refused_with_a_hint_or_read(name: str) -> None:
    report = run_inputs(TARGETS[name], range(FEW.get(name, 150)), limit_memory=False)
    assert report.failures == {}, report.first
    assert report.refused < report.inputs == FEW.get(name, 150)  # not everything is refused


def test_the_runner_notices_what_it_looks_for(tmp_path: Path) -> None:
    def build(folder: Path):
        def run(rng: Random) -> None:
            kind = rng.randrange(4)
            if kind == 0:
                raise KeyError("no hint")
            if kind == 1:
                (tmp_path / "outside").write_text("x")
            if kind == 2:
                (folder / "inside").write_text("x")
            if kind == 3:
                raise ArgumentError("f", received="x", expected="y", hint="Pass y.")

        return run

    report = run_inputs(Target("broken", 1, build), range(100), limit_memory=False)
    found = {kind.split(" at ")[0] for kind in report.failures}
    assert found == {"KeyError", "UnexpectedResult"} and 0 < report.refused < 60
    again = run_inputs(Target("broken", 1, build), range(100), limit_memory=False)
    assert (again.failures, again.first) == (report.failures, report.first)


@pytest.mark.parametrize("action", [lambda: time.sleep(30), lambda: all(True for _ in iter(int, 1))])
def test_the_runner_stops_an_input_that_waits_or_computes_too_long(action, monkeypatch) -> None:
    timers = {number: (timer, 0.2) for number, (timer, _) in runner.TIMERS.items()}
    monkeypatch.setattr(runner, "TIMERS", timers)
    calls = itertools.count()  # the first five are for warming up
    target = Target("slow", 1, lambda folder: lambda rng: action() if next(calls) >= 5 else None)
    (failure,) = run_inputs(target, range(1), limit_memory=False).failures
    assert "more than 0.2 seconds" in failure


# -- Found by fuzzing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(calls={"a": 1}),
        lambda header: header.pop("causal"),
        lambda header: header["calls"][0].update(scale="large"),
        lambda header: header["calls"][0].update(query="no such array"),
        lambda header: header["calls"][0].update(query=header["calls"][0]["compact_mask"]["start"]),
        lambda header: header["calls"][0]["compact_mask"].update(bias={"kind": "unheard-of"}),
        lambda header: header["calls"][0]["compact_mask"].update(bias={"kind": "bias", "array": None}),
        lambda header: header["calls"][0]["compact_mask"].update(start=header["calls"][0]["key"]),
    ],
)
def test_a_recording_with_a_damaged_header_is_refused(change, tmp_path: Path) -> None:
    table, header, data = _split(write_recordings(tmp_path)[1])
    change(header)
    table["__metadata__"] = {"regard": json.dumps(header)}
    text = json.dumps(table).encode()
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ArgumentError, match="header is damaged"):
        regard.load_recording(path)


def test_a_line_of_thousands_of_brackets_is_quarantined(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + '\n{"text": "fine"}\n')
    corpus = Corpus(str(tmp_path / "a.jsonl"))
    documents = [document for shard in corpus.iter_shards() for document in corpus.iter_documents(shard)]
    assert [document.problem and document.problem[0] for document in documents] == ["not text", None]


def test_a_damaged_archive_is_quarantined_and_the_lines_before_it_are_read(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%s"}\n' % Random(i).randbytes(1000).hex().encode() for i in range(2000))
    packed = gzip.compress(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-2000] + b"\xff" * 2000)
    corpus = Corpus(str(tmp_path))
    documents = [document for shard in corpus.iter_shards() for document in corpus.iter_documents(shard)]
    assert len(documents) > 1000 and all(document.problem is None for document in documents[:-1])
    assert documents[-1].problem is not None and documents[-1].problem[0] == "unreadable"
    assert len({document.id for document in documents}) == len(documents)


def test_a_name_with_half_a_character_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "fine", "name": "\ud800"}) + "\n")
    corpus = Corpus(str(tmp_path / "a.jsonl"), name_field="name")
    (document,) = (d for shard in corpus.iter_shards() for d in corpus.iter_documents(shard))
    assert document.name == "?" and document.problem is None


def test_text_of_a_table_that_is_not_utf8_is_quarantined(tmp_path: Path) -> None:
    damaged = pa.StringArray.from_buffers(
        2, pa.py_buffer(np.array([0, 2, 6], np.int32)), pa.py_buffer(b"\x80\x81fine")
    )
    pq.write_table(pa.table({"text": damaged}), tmp_path / "a.parquet")
    corpus = Corpus(str(tmp_path / "a.parquet"))
    documents = [document for shard in corpus.iter_shards() for document in corpus.iter_documents(shard)]
    assert [document.text for document in documents] == ["", "fine"]
    assert documents[0].problem[0] == "not text" and "UTF-8" in documents[0].problem[1]


def test_a_policy_with_a_lone_surrogate_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    write_policy(path, ["\ud800"], [[None]], [[0]], {"model": "\udfff"})
    assert read_policy(path) == (["\ud800"], [[None]], [[0]], {"model": "\udfff"})


def test_parquet_inside_an_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    with pytest.raises(ArgumentError, match="Decompress it"):
        list(Corpus(str(tmp_path)).iter_shards())


def test_a_manifest_names_no_file_outside_its_survey(tmp_path: Path) -> None:
    out = write_survey(tmp_path)
    path = out / "manifest.jsonl"
    first, *others = iter_entries(path)
    path.write_bytes(b"".join(map(format_entry, [{**first, "file": "../outside.parquet"}, *others])))
    outside = tmp_path / "outside.parquet"
    outside.write_text("not part of the survey")
    assert len(regard.survey.load(out).files) == len(others) == read_manifest(path)[1] + 1
    with Manifest(out, "survey.run") as manifest:
        _, notes = manifest.recover()
    assert "lines of the manifest are damaged" in notes[0] and outside.exists()


def test_a_damaged_shard_is_named_with_what_to_do(tmp_path: Path) -> None:
    out = write_survey(tmp_path)
    shard = out / "shard-000001.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SurveyError, match=r"shard-000001\.parquet, which is missing or damaged"):
        regard.survey.load(out).heads()


@pytest.mark.parametrize(
    ("text", "says"),
    [("[]", "not a JSON object"), ("{", "not valid JSON"), (None, "heads \\[1, 0\\]")],
)
def test_damaged_settings_are_refused(text, says, tmp_path: Path) -> None:
    path = write_survey(tmp_path) / "settings.json"
    path.write_text(text or json.dumps({**json.loads(path.read_text()), "heads": [1, 0]}))
    with pytest.raises(ArgumentError, match=says):
        regard.survey.load(path.parent)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("scale", [1, 2], "one number"),
        ("query", [[10**400]], "not an array of numbers"),
        ("mask", [[True], [True, False]], "neither boolean"),
    ],
)
def test_matrices_that_are_none_are_refused(name, value, says, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"query": [[1.0]], "key": [[1.0]], name: value}))
    with pytest.raises(ArgumentError, match=says):
        read_matrices(path, "explain")


def test_sound_that_states_more_samples_than_it_has_takes_no_memory_for_them(tmp_path: Path) -> None:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(200))
    content = path.read_bytes().replace(b"data" + (200).to_bytes(4, "little"), b"data\x00\x00\x00\x10")
    path.write_bytes(content[:4] + b"\x00\x00\x00\x20" + content[8:])  # 256 MiB in a file of 512
    tracemalloc.start()
    samples, _ = read_wav(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) == 100 and peak < 1 << 20


def test_an_archive_larger_than_memory_is_refused(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "m.npz"
    np.savez_compressed(path, query=np.zeros((1000, 1000)), key=np.zeros((1, 1000)))
    assert path.stat().st_size < 50_000
    monkeypatch.setattr("regard.cli.files.MAX_ARCHIVE_BYTES", 1 << 20)
    with pytest.raises(ArgumentError, match="its arrays take 8,008,"):
        read_matrices(path, "explain")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("query.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ArgumentError, match="not an NPZ file"):
        read_matrices(path, "explain")


def test_progress_of_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    entry = {"attempts": "two", "right_parts": [], "solved": 7, "hint": ""}
    path.write_text(json.dumps({"format": 1, "exercises": {"1": entry}}))
    with pytest.raises(ArgumentError, match="a progress file of format 1"):
        load_progress(path)


def test_a_title_with_half_a_character_is_saved(tmp_path: Path) -> None:
    build_page("a\ud800b", "weights", {"tokens": ["\ud800"]}).save(tmp_path / "page.html")
    assert "<title>a?b</title>" in (tmp_path / "page.html").read_text("utf-8")
