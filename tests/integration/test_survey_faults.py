"""Whatever happens to a survey, the same call finishes it: every document once, and nothing left lying about."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import regard
from regard.survey import SurveyError
from regard.survey import driver as _job
from regard.survey.corpus import Corpus
from regard.survey.executors import Local
from regard.survey.schema import KINDS, widths
from regard.survey.shard_writer import Work, Worker
from regard.survey.worker_process import PickledModel, Task
from tests.helpers.survey_checks import (
    DISKS,
    FAULTS,
    KILLS,
    MODELS,
    RESUMING,
    assert_whole,
    drive,
    finish,
    interrupt,
    run,
    state,
    write_corpus,
)
from tests.helpers.survey_stub import Stub, Unsteady

SHARDS = 8


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def serial(corpus, tmp_path_factory):
    return run(corpus, tmp_path_factory.mktemp("serial") / "out")


def broken(said: list[str]) -> list[str]:
    """What was said of shards that the manifest named and that were not there, or not whole."""
    return [note for note in said if "broken" in note or "damaged" in note]


def test_the_serial_run_is_whole(corpus, serial):
    assert serial.settings["shards"] == SHARDS
    assert_whole(serial.path, corpus, serial)


# -- A driver that is killed ------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", KILLS)
def test_a_killed_driver_is_resumed(fault, seed, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(SHARDS)
    done = drive(corpus, tmp_path / "out", fault, count)
    assert done.returncode == -9, done.stderr
    assert not broken(finish(corpus, tmp_path / "out", serial))


@pytest.mark.parametrize("fault", RESUMING)
def test_a_driver_killed_while_it_resumes_is_resumed(fault, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{fault} {seed}"), tmp_path / "out"
    interrupt(chance, corpus, out, SHARDS)
    assert drive(corpus, out, fault, 1).returncode == -9
    assert not broken(finish(corpus, out, serial))


# -- A model's process that is killed ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", MODELS)
def test_a_killed_model_is_started_again(fault, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{fault} {seed}"), tmp_path / "out"
    resumed = chance.randrange(2)
    if resumed:
        interrupt(chance, corpus, out, SHARDS - 1)
    done = drive(corpus, out, fault, 1 if resumed else 1 + chance.randrange(SHARDS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("killed")
    assert_whole(out, corpus, serial)
    assert not finish(corpus, out, serial)


# -- A disk that is full ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", DISKS)
def test_a_full_disk_stops_the_run_and_harms_nothing(fault, seed, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(2 if fault == "full by limit" else SHARDS - 1)
    done = drive(corpus, tmp_path / "out", fault, count)
    assert done.returncode == 3, done.stderr
    assert "Make room, then run the same again" in done.stdout
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]
    assert not broken(finish(corpus, tmp_path / "out", serial))
    assert not serial.quarantined  # no document was blamed


# -- Files that are damaged afterwards --------------------------------------------------------------------


def damaged(path: Path, how: str, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[chance.randrange(len(data)) :]
    elif how == "a flipped bit":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.unlink()
    if how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "gone"])
def test_a_damaged_shard_is_measured_again_and_said(how, seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"{how} {seed}"), tmp_path / "out"
    survey = run(corpus, out)
    victim = chance.choice(survey.files)
    damaged(victim, how, chance)
    assert regard.survey.open(out).broken() == [victim.name]
    (note,) = finish(corpus, out, serial)
    assert f"shard {int(victim.stem[6:])} is broken" in note and "measured again" in note


def test_a_damaged_manifest_costs_its_shard_alone(seed, corpus, serial, tmp_path):
    chance, out = random.Random(f"manifest {seed}"), tmp_path / "out"
    run(corpus, out)
    path = out / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    which = chance.randrange(SHARDS - 1)
    at = chance.randrange(len(lines[which]) - 1)
    lines[which] = lines[which][:at] + bytes([lines[which][at] ^ 1]) + lines[which][at + 1 :]
    path.write_bytes(b"".join(lines))
    said: list[str] = []
    again = run(corpus, out, progress=lambda progress: said.append(progress.note))
    assert any("damaged" in note for note in said)
    assert again.complete and again.dataset.to_table().equals(serial.dataset.to_table())


def test_a_torn_last_line_is_mended(corpus, serial, tmp_path):
    out = tmp_path / "out"
    run(corpus, out)
    path = out / "manifest.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert not regard.survey.open(out).complete
    (note,) = finish(corpus, out, serial)
    assert "last line was not written whole" in note


# -- One driver at a time, and the same settings ----------------------------------------------------------


def test_a_second_driver_is_refused_in_a_line(corpus, tmp_path):
    out, told = tmp_path / "out", []

    def second(progress):
        if not told:
            with pytest.raises(SurveyError) as refused:
                run(corpus, out)
            told.append(str(refused.value))

    run(corpus, out, progress=second)
    assert f"process {os.getpid()} on" in told[0] and "one driver at a time" in told[0]
    assert "\n" not in told[0].strip()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": 7}, "max_tokens was 1024 and is 7"),
        ({"measures": ["entropy"]}, "measures was"),
        ({"shard": 4}, "corpus.per_shard was 5 and is 4"),
        ({"model": "tests.helpers.survey_models:tiny"}, "model.weights was"),
        ({"max_bytes": 10**6}, "corpus.max_bytes was 16777216 and is 1000000"),
    ],
)
def test_a_change_refuses_to_resume_and_is_named(change, named, serial, corpus):
    before = state(serial.path)
    with pytest.raises(regard.ArgumentError, match="begun otherwise") as refused:
        run(corpus, serial.path, **change)
    assert named in str(refused.value)
    assert state(serial.path) == before


def test_a_corpus_that_changed_refuses_to_resume(corpus, tmp_path):
    import shutil

    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    run(copy, tmp_path / "out")
    (copy / "new.txt").write_text("one more")
    with pytest.raises(regard.ArgumentError, match=r"corpus\.files was 17 and is 18"):
        run(copy, tmp_path / "out")


def test_a_directory_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(regard.ArgumentError, match=r"which holds 'thesis\.tex' and no survey"):
        run(corpus, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# -- Workers that do what they should not -----------------------------------------------------------------


def test_a_shard_that_comes_twice_is_committed_once(corpus, serial, tmp_path, monkeypatch):
    class Twice(Local):
        def run(self, work, shards, tell):
            worker = Worker(work)
            for shard in shards:
                yield from (worker(shard), worker(shard))
            worker.close()

    monkeypatch.setitem(_job.ENGINES, "twice", Twice)
    run(corpus, tmp_path / "out", engine="twice")
    assert_whole(tmp_path / "out", corpus, serial)
    assert len((tmp_path / "out/manifest.jsonl").read_text().splitlines()) == SHARDS


def test_a_worker_with_other_weights_stops_the_run(corpus, tmp_path):
    with pytest.raises(SurveyError, match="a worker whose weights differ from the driver's"):
        run(corpus, tmp_path / "out", model=Unsteady(), workers=2)
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]


def test_a_worker_that_outlived_its_driver_writes_nothing(corpus, tmp_path):
    (tmp_path / "lock").write_text("process 1 on another, run new")
    task = Task(PickledModel.of(Stub()), KINDS, 64)
    source = Corpus(str(corpus), per_shard=5)
    worker = Worker(Work(task, source, str(tmp_path), "old", widths(), 60.0, Stub().about()))
    receipt = worker(next(source.shards()))
    worker.close()
    assert "another run has taken over" in str(receipt["error"])
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_nobody_is_left_when_a_run_is_broken_off(corpus, tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def stop(progress):
        if progress.shards == 2:
            raise Enough

    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            started.append(self)

    monkeypatch.setattr("regard.survey.worker_client.subprocess.Popen", Noted)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(Enough):
        run(corpus, tmp_path / "out", workers=2, progress=stop)
    assert {thread.name for thread in threading.enumerate()} <= before
    assert len(started) >= 2 and all(process.poll() is not None for process in started)
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp-" in path.name]
    assert regard.survey.open(tmp_path / "out").documents >= 10


# -- Documents that do harm -------------------------------------------------------------------------------

POISON = {
    "raises": b"POISON raise",
    "hangs": b"POISON hang",
    "kills": b"POISON kill",
    "kills by a fault": b"POISON segfault",
    "not text": b"\xff\xfe text",
    "not text: empty": b" \n",
    "too long": b"x" * 5000,
}


def test_poison_goes_to_quarantine_with_the_reason_and_the_rest_is_measured(seed, corpus, tmp_path):
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
    assert {each["kind"] for each in survey.quarantined} == kinds
    aside = {each["document"]: each for each in survey.quarantined}
    poisons = {text: kind.split(":")[0].split(" by")[0] for kind, text in POISON.items()}
    assert {name: each["kind"] for name, each in aside.items()} == {
        f"{number:02}.txt": poisons[text] for number, text in enumerate(texts) if text in poisons
    }
    reasons = " ".join(each["reason"] for each in survey.quarantined)
    for words in ("this document cannot be read", "within 1 s", "SIGKILL", "SIGSEGV", "UTF-8", "4,000 bytes"):
        assert words in reasons
    assert survey.documents == len(healthy)
    assert_whole(out, folder, survey)
    before = state(out)
    run(folder, out, timeout=1.0, max_bytes=4000)
    assert state(out) == before


def test_a_document_that_kills_its_process_once_is_measured(corpus, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text(f"POISON kill {tmp_path / 'once'}")
    survey = run(folder, tmp_path / "out")
    assert survey.documents == 1 and survey.quarantined == []


def test_a_model_that_cannot_run_is_refused_before_anything_is_written(corpus, tmp_path):
    with pytest.raises(SurveyError, match="these weights are nowhere"):
        run(corpus, tmp_path / "out", model="tests.helpers.survey_models:broken")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lock"}


def test_the_faults_can_be_told_apart():
    assert len(FAULTS) == len(KILLS) + len(RESUMING) + len(DISKS) + len(MODELS)
    assert Stub().measure("a")["entropy"][0] != Stub().measure("b")["entropy"][0]
