"""What must hold of every finished survey, and the driver that faults are made in.

python tests/survey_checks.py CORPUS OUT FAULT COUNT [ENGINE]
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import regard
from regard.survey import manifest as _ledger
from regard.survey import shard_writer as _shard
from regard.survey.corpus import Corpus
from regard.survey.schema import KEY
from tests.helpers.survey_stub import Stub

SETTINGS: dict[str, Any] = {"shard": 5, "timeout": 60.0}
PER_DOCUMENT = 6  # rows of the stub


def run(corpus: Path, out: Path, model: Any = None, **options: Any) -> Any:
    """A survey with the stand-in for a model, or another."""
    return regard.survey.run(model or Stub(), corpus, out, **{**SETTINGS, **options})


def write_corpus(folder: Path) -> Path:
    """Forty pages of Python's own help: as text, as lines, as a table."""
    pages = [topics[name][:2000] for name in sorted(topics)[:40]]
    for number, page in enumerate(pages[:15]):
        (folder / f"{number:02}.txt").write_text(page)
    lines = "".join(json.dumps({"text": page}) + "\n" for page in pages[15:30])
    (folder / "lines.jsonl").write_text(lines)
    pq.write_table(pa.table({"text": pages[30:]}), folder / "table.parquet", row_group_size=3)
    return folder


def drive(corpus: Path, out: Path, fault: str, count: int, *engine: str, **env: str) -> Any:
    """A driver of its own in which a fault happens."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root / "src", root, root / "tests")))
    command = [sys.executable, __file__, str(corpus), str(out), fault, str(count), *engine]
    env = {**os.environ, "PYTHONPATH": paths, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def interrupt(chance: random.Random, corpus: Path, out: Path, most: int) -> None:
    """A run whose driver is killed somewhere, after one shard at least and `most` at most."""
    fault = chance.choice(sorted(KILLS.keys() - {"before the settings"}))
    assert drive(corpus, out, fault, 1 + chance.randrange(1, most)).returncode == -9


def finish(corpus: Path, out: Path, serial: Any) -> list[str]:
    """Resume, see that all is there and right, resume once more, see that nothing was done. What was said, too."""
    said: list[str] = []
    run(corpus, out, progress=lambda progress: said.append(progress.note))
    assert_whole(out, corpus, serial)
    before = state(out)
    run(corpus, out)
    assert state(out) == before
    return [note for note in said if note]


def assert_whole(out: Path, corpus: Path, serial: Any, rows_each: int = PER_DOCUMENT) -> None:
    """Committed and quarantined are the input, each id once, by the manifest and by the files, and no more."""
    plan = Corpus(str(corpus), per_shard=serial.settings["corpus"]["per_shard"])
    expected = {shard.number: [each.id for each in plan.documents(shard)] for shard in plan.shards()}
    everything = [each for ids in expected.values() for each in ids]
    assert len(set(everything)) == len(everything) > 0

    committed, bad = _ledger.read_manifest(out / "manifest.jsonl")
    assert bad == 0
    by_manifest = {n: entry["ids"] for n, entry in committed.items()}
    digest = {
        n: hashlib.sha256("".join(f"{each}\n" for each in ids).encode()).hexdigest()
        for n, ids in expected.items()
    }
    assert by_manifest == digest

    found: list[str] = []
    for number, ids in expected.items():
        path = out / committed[number]["file"]
        table = pq.read_table(path)
        measured = table.column("document").to_pylist()
        about = json.loads(pq.read_metadata(path).metadata[KEY.encode()])
        aside = [each["document"] for each in about["quarantined"]]
        assert about["quarantined"] == committed[number]["quarantined"]
        assert len(measured) == rows_each * len(set(measured))
        assert sorted([*set(measured), *aside]) == sorted(ids)
        found += [*set(measured), *aside]
    assert sorted(found) == sorted(everything)

    survey = regard.survey.open(out)
    assert survey.complete and survey.broken() == []
    assert survey.documents + len(survey.quarantined) == len(everything)
    assert survey.dataset.to_table().equals(serial.dataset.to_table())
    assert survey.heads().equals(serial.heads())
    names = {"settings.json", "manifest.jsonl", "lock", *(path.name for path in survey.files)}
    assert {path.name for path in out.iterdir()} == names


def state(out: Path) -> dict[str, tuple[int, bytes]]:
    """Every file but the lock, when it was written and what it holds."""
    files = (path for path in out.iterdir() if path.name != "lock")
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# -- Faults -----------------------------------------------------------------------------------------------


class At:
    """Calls a function at one call of another, before it or after it, and counts."""

    def __init__(self, holder: Any, name: str, count: int, do: Any, after: bool = False) -> None:
        self.left, self.do, self.after = count, do, after
        self.original = getattr(holder, name)
        setattr(holder, name, lambda *args, **named: self.call(*args, **named))

    def call(self, *args: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.after:
            self.do(*args)
        result = self.original(*args, **named)
        if self.left == 0 and self.after:
            self.do(*args)
        return result


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_line(ledger: Any, entry: dict[str, Any]) -> None:
    line = _ledger.line_of(entry)
    os.write(ledger._manifest.fileno(), line[: len(line) // 2])
    die()


def half_a_file(then: Any) -> Any:
    def do(writer: Any, *_: Any) -> None:
        writer._flush()
        writer._file.flush()
        then()

    return do


def kill_models(*_: Any) -> None:
    """Kill the processes that this one started, and say that there were some."""
    started = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    for process in (int(each) for some in started for each in some):
        os.kill(process, signal.SIGKILL)
        print("killed", process)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Where a worker can be interrupted: given which of its shards, and what then happens.
WRITES: dict[str, Any] = {
    "before a write": lambda n, then: At(_shard.Writer, "__init__", n, then),
    "during a write": lambda n, then: At(_shard.Writer, "finish", n, half_a_file(then)),
    "after a write": lambda n, then: At(_shard, "checked", n, then, after=True),
}
KILLS = {
    "before a write": lambda n: WRITES["before a write"](n, die),
    "during a write": lambda n: WRITES["during a write"](n, die),
    "after a write": lambda n: At(_ledger.Manifest, "commit", n, die),
    "between name and manifest": lambda n: At(_ledger.Manifest, "_add", n, die),
    "during the manifest": lambda n: At(_ledger.Manifest, "_add", n, half_a_line),
    "after the manifest": lambda n: At(_ledger.Manifest, "_add", n, die, after=True),
    "before the settings": lambda n: At(_ledger.Manifest, "settle", 1, die),
}
RESUMING = {
    "before resuming": lambda n: At(_ledger.Manifest, "recover", 1, die),
    "while resuming": lambda n: At(_ledger.Manifest, "sweep", 1, die),
    "after resuming": lambda n: At(_ledger.Manifest, "recover", 1, die, after=True),
}
DISKS = {
    "full for rows": lambda n: At(_shard.Writer, "write", 5 * n, full),
    "full for a footer": lambda n: At(_shard.Writer, "finish", n, full),
    "full for the manifest": lambda n: At(_ledger.Manifest, "_add", n, full),
    "full by limit": lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * n, -1)),
}
MODELS = {
    f"its model killed {when}": lambda n, at=at: at(n, kill_models)  # type: ignore[misc]
    for when, at in WRITES.items()
}
FAULTS = {**KILLS, **RESUMING, **DISKS, **MODELS}


class Deadly(Corpus):
    """A corpus that brings faults to whichever process it is sent to: each is the end of one of them.

    A fault is (when, which of a process's shards, a file that says that it happened).
    """

    def __init__(self, faults: list[tuple[str, int, Path]], *settings: Any) -> None:
        super().__init__(*settings)
        object.__setattr__(self, "_faults", faults)

    def __reduce__(self) -> Any:
        return _arrived, (os.getpid(), self._faults, super().__reduce__()[1])  # type: ignore[attr-defined]


def _arrived(sender: int, faults: list[tuple[str, int, Path]], settings: tuple[Any, ...]) -> Corpus:
    def once(happened: Path) -> None:
        try:
            happened.touch(exist_ok=False)
        except FileExistsError:
            return
        die()

    if os.getpid() != sender:
        for when, count, happened in faults:
            WRITES[when](count, lambda *_, happened=happened: once(happened))
    return Corpus(*settings)


if __name__ == "__main__":
    corpus, out, fault, count, *engine = sys.argv[1:]
    FAULTS[fault](int(count))
    try:
        run(Path(corpus), Path(out), **{"engine": engine[0], "workers": 2} if engine else {})
    except regard.survey.SurveyError as error:
        print(error)
        sys.exit(3)
