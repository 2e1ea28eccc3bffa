"""Surveys: settings, manifests and shards that were changed, and corpora that hold anything."""

from __future__ import annotations

import bz2
import gzip
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.inputs import CHUNKS, change_bytes, change_json, draw_string, draw_value
from tests.fuzz.runner import RunInput, Target, UnexpectedResult

MAX_BYTES = 4096  # of a document, small so that long ones are cheap to make


@cache
def run_small_survey() -> dict[str, bytes]:
    """Survey six documents in three shards with a stand-in for the model, and return the files."""
    import regard
    from tests.helpers.survey_stub import Stub

    with tempfile.TemporaryDirectory() as folder:
        corpus, out = Path(folder, "corpus"), Path(folder, "survey")
        corpus.mkdir()
        for number in range(5):
            (corpus / f"{number}.txt").write_text(f"text {number}")
        (corpus / "empty.txt").write_text("")
        regard.survey.run(Stub(), corpus, out, shard_size=2)
        return {path.name: path.read_bytes() for path in out.iterdir()}


def write_survey(folder: Path) -> Path:
    """Write a survey of six documents in three shards."""
    out = folder / "survey"
    out.mkdir()
    for name, data in run_small_survey().items():
        (out / name).write_bytes(data)
    return out


def read_survey(out: Path, *, rows: bool = True) -> None:
    """Open a survey and read its manifest, and its rows, too."""
    import regard

    survey = regard.survey.load(out)
    for path in survey.files:
        if path.resolve().parent != out.resolve():
            raise UnexpectedResult("a file outside the survey")
    repr(survey)
    list(survey.quarantined)
    if rows:
        survey.find_damaged()
        survey.heads()


def build_settings(folder: Path) -> RunInput:
    out = write_survey(folder)
    path = out / "settings.json"
    data = path.read_bytes()

    def run(rng: Random) -> None:
        changed = change_json(rng, json.loads(data))
        path.write_bytes(change_bytes(rng, data) if rng.random() < 0.4 else json.dumps(changed).encode())
        read_survey(out, rows=rng.random() < 0.1)

    return run


def build_manifests(folder: Path) -> RunInput:
    from regard.jobs.manifest import format_entry, iter_entries

    out = write_survey(folder)
    path = out / "manifest.jsonl"
    data, entries = path.read_bytes(), list(iter_entries(path))

    def run(rng: Random) -> None:
        if rng.random() < 0.3:
            path.write_bytes(change_bytes(rng, data))
        else:
            lines = [change_json(rng, entry) if rng.random() < 0.5 else entry for entry in entries]
            path.write_bytes(b"".join(_format(format_entry, line) for line in lines))
        read_survey(out, rows=rng.random() < 0.02)

    return run


def _format(format_entry: Any, line: Any) -> bytes:
    try:
        return format_entry(line)
    except UnicodeEncodeError:  # a lone surrogate, which no manifest can hold
        return b"00000000 {}\n"


def build_shards(folder: Path) -> RunInput:
    out = write_survey(folder)
    files = sorted(out.glob("shard-*"))
    contents = [path.read_bytes() for path in files]

    def run(rng: Random) -> None:
        number = rng.randrange(len(files))
        files[number].write_bytes(change_bytes(rng, contents[number]))
        try:
            read_survey(out)
        finally:
            files[number].write_bytes(contents[number])

    return run


def build_resumed(folder: Path) -> RunInput:
    """Resume a survey whose manifest was changed: the driver recovers, deletes and renames files."""
    from regard.jobs.manifest import Manifest, format_entry, iter_entries

    out = write_survey(folder)
    kept = folder / "kept"
    shutil.copytree(out, kept)
    bystander = folder / "shard-bystander.parquet"
    bystander.write_text("not part of the survey")
    path = out / "manifest.jsonl"
    data, entries = path.read_bytes(), list(iter_entries(path))

    def run(rng: Random) -> None:
        if rng.random() < 0.3:
            path.write_bytes(change_bytes(rng, data))
        else:
            lines = [change_json(rng, entry) if rng.random() < 0.5 else entry for entry in entries]
            path.write_bytes(b"".join(_format(format_entry, line) for line in lines))
        try:
            with Manifest(out, "survey.run") as manifest:
                manifest.recover()
        finally:
            for file in kept.glob("shard-*"):
                if not (out / file.name).exists():
                    shutil.copyfile(file, out / file.name)
            if not bystander.exists():
                raise UnexpectedResult("removed a file outside the survey")

    return run


def draw_line(rng: Random) -> bytes:
    """Draw a line of a JSON lines file."""
    record = {"text": "The cat sat", "name": "a", "prompt": "Say: "}
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(CHUNKS) + rng.randbytes(rng.randrange(8))
    if kind == 1:
        return change_bytes(rng, json.dumps(record).encode())
    if kind == 2:
        return (
            b'{"text": "'
            + rng.choice((b"x", b"\\u00e9", "é".encode())) * rng.choice((10, 4000, 5000))
            + b'"}'
        )
    record[rng.choice(list(record))] = draw_value(rng)
    return json.dumps(record).encode()


def check_documents(corpus: Any) -> None:
    """Read every document of a corpus, and check what the rows of a shard need."""
    ids = []
    for shard in corpus.iter_shards():
        for document in corpus.iter_documents(shard):
            ids.append(document.id)
            for text in (document.id, document.text, document.name or "", document.prompt or ""):
                text.encode()  # Arrow writes UTF-8 only
            if document.problem is None and not document.text.strip():
                raise UnexpectedResult("an empty document")
            if len(document.text) + len(document.prompt or "") > MAX_BYTES:
                raise UnexpectedResult("a document that is too long")
    if len(set(ids)) != len(ids):
        raise UnexpectedResult("two documents with one id")


def build_lines(folder: Path) -> RunInput:
    from regard.jobs.corpus import Corpus

    plain, packed = folder / "lines.jsonl", folder / "lines.jsonl.gz"

    def run(rng: Random) -> None:
        data = b"\n".join(draw_line(rng) for _ in range(rng.randrange(1, 6)))
        path = plain
        if rng.random() < 0.1:
            path, data = packed, change_bytes(rng, gzip.compress(data, 1))
        path.write_bytes(data)
        fields = {"name_field": rng.choice((None, "name")), "prompt_field": rng.choice((None, "prompt"))}
        check_documents(Corpus(str(path), **fields, shard_size=rng.choice((1, 3)), max_bytes=MAX_BYTES))

    return run


def build_files(folder: Path) -> RunInput:
    import pyarrow as pa
    from pyarrow import parquet

    from regard.jobs.corpus import Corpus

    texts = folder / "texts"
    texts.mkdir()
    table = folder / "table.parquet"
    parquet.write_table(
        pa.table({"text": ["The cat", "sat", "x" * 5000, None], "name": ["a", "b", "c", "d"]}), table
    )
    rows = table.read_bytes()
    bomb = gzip.compress(b"a" * (1 << 22)), bz2.compress(b"\0" * (1 << 22))

    def run(rng: Random) -> None:
        for path in texts.iterdir():
            path.unlink()
        kind = rng.randrange(5)
        if kind == 0:
            (texts / "t.parquet").write_bytes(change_bytes(rng, rows))
        elif kind == 1:
            (texts / "t.txt.gz").write_bytes(change_bytes(rng, rng.choice(bomb)[: rng.randrange(5000)]))
        elif kind == 2:
            suffix = rng.choice((".txt.bz2", ".jsonl.bz2", ".txt.gz", ".jsonl.gz", ".jsonl.zst", ".txt.lz4"))
            (texts / f"t{suffix}").write_bytes(rng.choice(bomb))
        elif kind == 3:
            (texts / "t.txt").write_bytes(
                change_bytes(rng, draw_string(rng).encode("utf-8", "surrogatepass"))
            )
        else:
            drawn = [draw_string(rng).encode("utf-8", "replace").decode() for _ in range(3)]
            column = rng.choice(
                (pa.array([*drawn, None]), pa.array([1, 2, 3, 4]), pa.array([b"\xff", b"a", b"", None]))
            )
            parquet.write_table(pa.table({"text": column}), texts / "t.parquet")
        check_documents(Corpus(str(texts), shard_size=2, max_bytes=MAX_BYTES))

    return run


TARGETS = (
    Target("survey-settings", 30, build_settings),
    Target("survey-manifests", 90, build_manifests),
    Target("survey-shards", 10, build_shards),
    Target("survey-resumed", 20, build_resumed),
    Target("corpus-lines", 160, build_lines),
    Target("corpus-files", 60, build_files),
)
