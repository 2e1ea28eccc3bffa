"""After any fault the same call finishes a survey: every document once, and no stray files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import regard
from regard.jobs.corpus import Corpus
from regard.jobs.driver import EXECUTORS, LocalExecutor
from regard.jobs.model_runner import PickledModel
from regard.jobs.shards import ShardJob, ShardWorker
from regard.survey import SurveyError
from regard.survey.driver import SurveySpec
from regard.survey.schema import MEASURES, list_columns
from tests.helpers.nightly import keep_in_ci
from tests.helpers.survey_checks import assert_whole, finish, read_state, run, write_corpus
from tests.helpers.survey_faults import DISKS, FAULTS, KILLS, RESUMING, WORKERS, interrupt, run_driver
from tests.helpers.survey_stub import KilledStub, Stub, UnstableStub

SHARDS = 8


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-seed")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--seeds")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def serial(corpus, tmp_path_factory):
    return run(corpus, tmp_path_factory.mktemp("serial") / "out")


def find_damage(notes: list[str]) -> list[str]:
    """The notes about committed shards that are missing or damaged."""
    return [note for note in notes if "damaged" in note]


def test_the_serial_run_is_whole(corpus, serial):
    assert serial.settings["shards"] == SHARDS
    assert_whole(serial.path, corpus, serial)


# -- Killed drivers ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", keep_in_ci(KILLS, "between rename and manifest"))
def test_a_killed_driver_is_resumed(fault, seed, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(SHARDS)
    done = run_driver(corpus, tmp_path / "out", fault, count)
    assert done.returncode == -9, done.stderr
    assert not find_damage(finish(corpus, tmp_path / "out", serial))


@pytest.mark.parametrize("fault", keep_in_ci(RESUMING, "while resuming"))
def test_a_driver_killed_while_it_resumes_is_resumed(fault, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{fault} {seed}"), tmp_path / "out"
    interrupt(chance, corpus, out, SHARDS)
    assert run_driver(corpus, out, fault, 1).returncode == -9
    assert not find_damage(finish(corpus, out, serial))


# -- Killed worker processes ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", keep_in_ci(WORKERS, "worker killed during a write"))
def test_a_killed_worker_process_is_restarted(fault, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{fault} {seed}"), tmp_path / "out"
    resumed = chance.randrange(2)
    if resumed:
        interrupt(chance, corpus, out, SHARDS - 1)
    done = run_driver(corpus, out, fault, 1 if resumed else 1 + chance.randrange(SHARDS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("killed")
    assert_whole(out, corpus, serial)
    assert not finish(corpus, out, serial)


# -- A full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", keep_in_ci(DISKS, "full for rows"))
def test_a_full_disk_stops_the_run_without_damage(fault, seed, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(2 if fault == "full by limit" else SHARDS - 1)
    done = run_driver(corpus, tmp_path / "out", fault, count)
    assert done.returncode == 3, done.stderr
    assert "Free some space, then run the same command again to resume." in done.stdout
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]
    assert not find_damage(finish(corpus, tmp_path / "out", serial))
    assert not serial.quarantined  # no document was blamed


# -- Damaged files --------------------------------------------------------------------


def damage(path: Path, how: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[chance.randrange(len(data)) :]
    elif how == "a flipped bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.unlink()
    if how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "gone"])
def test_a_damaged_shard_is_reported_and_measured_again(how, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{how} {seed}"), tmp_path / "out"
    survey = run(corpus, out)
    victim = chance.choice(survey.files)
    damage(victim, how, chance)
    assert regard.survey.load(out).find_damaged() == [victim.name]
    (note,) = finish(corpus, out, serial)
    assert f"shard {int(victim.stem[6:])} is damaged" in note and "measured again" in note


def test_a_damaged_line_of_the_manifest_affects_its_shard_only(seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"manifest {seed}"), tmp_path / "out"
    run(corpus, out)
    path = out / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    which = chance.randrange(SHARDS - 1)
    at = chance.randrange(len(lines[which]) - 1)
    lines[which] = lines[which][:at] + bytes([lines[which][at] ^ 1]) + lines[which][at + 1 :]
    path.write_bytes(b"".join(lines))
    notes: list[str] = []
    again = run(corpus, out, progress=lambda progress: notes.append(progress.note))
    assert any("damaged" in note for note in notes)
    assert again.complete and again.dataset.to_table().equals(serial.dataset.to_table())


def test_an_incomplete_last_line_is_removed(corpus, serial, tmp_path):
    out = tmp_path / "out"
    run(corpus, out)
    path = out / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert not regard.survey.load(out).complete
    (note,) = finish(corpus, out, serial)
    assert "the last line of the manifest is incomplete" in note


# -- One driver at a time, and the same settings ----------------------------------------------------------


def test_a_second_driver_is_rejected_in_one_line(corpus, tmp_path):
    out, messages = tmp_path / "out", []

    def run_second(progress):
        if not messages:
            with pytest.raises(SurveyError) as caught:
                run(corpus, out)
            messages.append(str(caught.value))

    run(corpus, out, progress=run_second)
    assert f"locked by process {os.getpid()} on" in messages[0] and "one driver at a time" in messages[0]
    assert "\n" not in messages[0].strip()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 7}, "max_tokens was 1024 and is 7"),
        ({"measures": ["entropy"]}, "measures was"),
        ({"shard_size": 4}, "corpus.shard_size was 5 and is 4"),
        ({"model": "tests.helpers.survey_models:tiny"}, "model.weights was"),
        ({"max_bytes": 10**6}, "corpus.max_bytes was 16777216 and is 1000000"),
    ],
)
def test_changed_settings_raise_and_are_named(change, named, serial, corpus):
    before = read_state(serial.path)
    with pytest.raises(regard.ArgumentError, match="started with other settings") as caught:
        run(corpus, serial.path, **change)
    assert named in str(caught.value)
    assert read_state(serial.path) == before


def test_a_changed_corpus_raises(corpus, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    run(copy, tmp_path / "out")
    (copy / "new.txt").write_text("one more")
    with pytest.raises(regard.ArgumentError, match=r"corpus\.files was 17 and is 18"):
        run(copy, tmp_path / "out")


def test_a_directory_with_other_files_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(regard.ArgumentError, match=r"which contains 'thesis\.tex' but no settings"):
        run(corpus, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# -- Misbehaving workers -----------------------------------------------------------------


def test_a_shard_that_returns_twice_is_committed_once(corpus, serial, tmp_path, monkeypatch):
    class RepeatingExecutor(LocalExecutor):
        def run(self, job, shards, on_progress):
            worker = ShardWorker(job)
            for shard in shards:
                yield from (worker(shard), worker(shard))
            worker.close()

    monkeypatch.setitem(EXECUTORS, "repeating", RepeatingExecutor)
    run(corpus, tmp_path / "out", executor="repeating")
    assert_whole(tmp_path / "out", corpus, serial)
    assert len((tmp_path / "out/manifest.jsonl").read_text().splitlines()) == SHARDS


def test_a_worker_with_other_weights_stops_the_run(corpus, tmp_path):
    with pytest.raises(SurveyError, match="a worker whose weights differ from the driver's"):
        run(corpus, tmp_path / "out", model=UnstableStub(), workers=2)
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]


def test_a_worker_that_outlived_its_driver_writes_nothing(corpus, tmp_path):
    (tmp_path / "lock").write_text("process 1 on another, run new")
    spec = SurveySpec(PickledModel.dump(Stub(), "survey.run"), MEASURES)
    source = Corpus(str(corpus), shard_size=5)
    job = ShardJob(spec, source, str(tmp_path), "old", list_columns(), Stub().describe())
    worker = ShardWorker(job)
    error = worker(next(source.iter_shards()))
    worker.close()
    assert isinstance(error, SurveyError) and "another run has taken over" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_interrupted_run_leaves_no_threads_or_processes(corpus, tmp_path, monkeypatch):
    class StopRun(Exception):
        pass

    def stop(progress):
        if progress.shards == 2:
            raise StopRun

    started = []

    class RecordedPopen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr("regard.jobs.worker.subprocess.Popen", RecordedPopen)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(StopRun):
        run(corpus, tmp_path / "out", workers=2, progress=stop)
    assert {thread.name for thread in threading.enumerate()} <= before
    assert len(started) >= 2 and all(process.poll() is not None for process in started)
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]
    assert regard.survey.load(tmp_path / "out").documents >= 10


# -- Harmful documents -------------------------------------------------------------------------------

POISON = {
    "error": b"POISON raise",
    "timeout": b"POISON hang",
    "crash": b"POISON kill",
    "crash by a fault": b"POISON segfault",
    "not text": b"\xff\xfe text",
    "not text: empty": b" \n",
    "too long": b"x" * 5000,
}


def test_harmful_documents_are_quarantined_with_the_reason(seed, corpus, tmp_path):
    chance = random.Random(f"poison {seed}")
    folder = tmp_path / "corpus"
    folder.mkdir()
    healthy = [path.read_bytes() for path in sorted(corpus.glob("*.txt"))]
    texts = [*healthy, *POISON.values()]
    chance.shuffle(texts)
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_bytes(text)
    out = tmp_path / "out"
    survey = run(folder, out, timeout=1.0, max_bytes=4000, workers=2)
    kinds = {name.split(":")[0].split(" by")[0] for name in POISON}
    assert {document["kind"] for document in survey.quarantined} == kinds
    quarantined = {document["document"]: document for document in survey.quarantined}
    poisons = {text: kind.split(":")[0].split(" by")[0] for kind, text in POISON.items()}
    assert {name: document["kind"] for name, document in quarantined.items()} == {
        f"{number:02}.txt": poisons[text] for number, text in enumerate(texts) if text in poisons
    }
    reasons = " ".join(document["reason"] for document in survey.quarantined)
    for words in ("this document cannot be read", "within 1 s", "SIGKILL", "SIGSEGV", "UTF-8", "4,000 bytes"):
        assert words in reasons
    assert survey.documents == len(healthy)
    assert_whole(out, folder, survey)
    before = read_state(out)
    run(folder, out, timeout=1.0, max_bytes=4000)
    assert read_state(out) == before


def test_a_document_that_crashes_its_process_once_is_measured(corpus, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(f"POISON kill {tmp_path / 'once'}")
    survey = run(folder, tmp_path / "out")
    assert survey.documents == 1 and survey.quarantined == []


def test_a_process_that_is_killed_before_it_is_ready_is_started_once_more(corpus, tmp_path):
    once, twice = (KilledStub(tmp_path / f"starts{times}", times) for times in (1, 2))
    survey = run(corpus, tmp_path / "once", model=once)
    assert survey.complete and once.starts.read_text() == "xx"
    with pytest.raises(SurveyError, match="the worker process ended by SIGKILL before it was ready"):
        run(corpus, tmp_path / "twice", model=twice)


def test_a_model_that_does_not_run_raises_before_anything_is_written(corpus, tmp_path):
    with pytest.raises(
        SurveyError, match=r"which failed to run; .* The worker reported: .* these weights do not exist"
    ):
        run(corpus, tmp_path / "out", model="tests.helpers.survey_models:broken")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lock"}


def test_faults_and_documents_are_distinct():
    assert len(FAULTS) == len(KILLS) + len(RESUMING) + len(DISKS) + len(WORKERS)
    assert Stub().measure("a")["entropy"][0] != Stub().measure("b")["entropy"][0]
