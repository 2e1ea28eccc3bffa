"""Run surveys in tests, and check that a finished one is complete and correct."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import regard
from regard.jobs.corpus import Corpus
from regard.jobs.manifest import read_manifest
from regard.jobs.shards import METADATA_KEY
from tests.helpers.survey_stub import Stub

SETTINGS: dict[str, Any] = {"shard_size": 5, "timeout": 60.0}
STUB_ROWS = 6  # rows of a document


def run(corpus: Path, out: Path, model: Any = None, **options: Any) -> regard.survey.Survey:
    """Run a survey, by default with the stand-in for a model."""
    return regard.survey.run(model or Stub(), corpus, out, **{**SETTINGS, **options})


def write_corpus(folder: Path) -> Path:
    """Write forty pages of Python's own help: as text files, as JSON lines and as Parquet."""
    pages = [topics[name][:2000] for name in sorted(topics)[:40]]
    for number, page in enumerate(pages[:15]):
        (folder / f"{number:02}.txt").write_text(page)
    lines = "".join(json.dumps({"text": page}) + "\n" for page in pages[15:30])
    (folder / "lines.jsonl").write_text(lines)
    pq.write_table(pa.table({"text": pages[30:]}), folder / "table.parquet", row_group_size=3)
    return folder


def finish(corpus: Path, out: Path, serial: regard.survey.Survey) -> list[str]:
    """Resume a survey and check it; resume it again and check that nothing changes. Return the notes."""
    notes: list[str] = []
    run(corpus, out, progress=lambda progress: notes.append(progress.note))
    assert_whole(out, corpus, serial)
    before = read_state(out)
    run(corpus, out)
    assert read_state(out) == before
    return [note for note in notes if note]


def open_files(out: Path) -> regard.survey.Survey:
    """Load the files of a survey, or of another run over a corpus, whose columns `regard.survey.load` refuses."""
    settings = json.loads((out / "settings.json").read_text())
    return regard.survey.Survey(out, settings, read_manifest(out / "manifest.jsonl")[0])


def assert_whole(out: Path, corpus: Path, serial: regard.survey.Survey, rows_each: int = STUB_ROWS) -> None:
    """Check that each document is committed or quarantined exactly once, in the manifest and in the files."""
    plan = Corpus(str(corpus), shard_size=serial.settings["corpus"]["shard_size"])
    expected = {
        shard.number: [document.id for document in plan.iter_documents(shard)] for shard in plan.iter_shards()
    }
    all_ids = [document for ids in expected.values() for document in ids]
    assert len(set(all_ids)) == len(all_ids) > 0

    committed, damaged_lines = read_manifest(out / "manifest.jsonl")
    assert damaged_lines == 0
    by_manifest = {number: entry["ids_sha256"] for number, entry in committed.items()}
    digests = {
        number: hashlib.sha256("".join(f"{document}\n" for document in ids).encode()).hexdigest()
        for number, ids in expected.items()
    }
    assert by_manifest == digests

    found: list[str] = []
    for number, ids in expected.items():
        path = out / committed[number]["file"]
        measured = pq.read_table(path).column("document").to_pylist()
        metadata = json.loads(pq.read_metadata(path).metadata[METADATA_KEY.encode()])
        quarantined = [document["document"] for document in metadata["quarantined"]]
        assert metadata["quarantined"] == committed[number]["quarantined"]
        assert len(measured) == rows_each * len(set(measured))
        assert sorted([*set(measured), *quarantined]) == sorted(ids)
        found += [*set(measured), *quarantined]
    assert sorted(found) == sorted(all_ids)

    survey = open_files(out)
    assert survey.complete and survey.find_damaged() == []
    assert survey.documents + len(survey.quarantined) == len(all_ids)
    assert survey.dataset.to_table().equals(serial.dataset.to_table())
    assert survey.heads().equals(serial.heads())
    names = {"settings.json", "manifest.jsonl", "lock", *(path.name for path in survey.files)}
    assert {path.name for path in out.iterdir()} == names


def read_state(out: Path) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and content of every file except the lock."""
    files = (path for path in out.iterdir() if path.name != "lock")
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
