"""The survey on Ray Data: the same files as without it, whichever of its processes is killed."""

from __future__ import annotations

import random
from functools import partial

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import ray

from regard.survey import SurveyError
from regard.survey import driver as _job
from regard.survey.executors import start
from tests.helpers.survey_checks import (
    WRITES,
    Deadly,
    assert_whole,
    drive,
    finish,
    interrupt,
    run,
    state,
    write_corpus,
)

# Ray Data warns of its own settings as it makes them.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start(2, object_store_memory=250_000_000)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def serial(corpus, tmp_path_factory):
    return run(corpus, tmp_path_factory.mktemp("serial") / "out")


def test_two_workers_of_ray_and_the_laptop_write_the_same_rows(corpus, tmp_path):
    options = {"model": "tests.helpers.survey_models:text", "max_tokens": 96, "workers": 2}
    ours = run(corpus, tmp_path / "local", **options)
    seen: list[int] = []
    rays = run(
        corpus,
        tmp_path / "ray",
        engine="ray",
        progress=lambda progress: seen.append(progress.shards),
        **options,
    )
    assert rays.documents == 40 and rays.complete
    assert_whole(tmp_path / "ray", corpus, ours, rows_each=sum(ours.settings["heads"]))
    assert [file.read_bytes() for file in ours.files] == [file.read_bytes() for file in rays.files]
    assert set(range(1, 9)) <= set(seen)  # each was committed when it came
    # What one engine began, the other finds finished.
    before = state(tmp_path / "ray")
    run(corpus, tmp_path / "ray", **options)
    assert state(tmp_path / "ray") == before


def test_whichever_process_a_document_kills_every_other_is_measured(seed, corpus, tmp_path):
    chance = random.Random(f"ray {seed}")
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    harm = ["POISON raise", "POISON hang", "POISON kill", " ", "POISON kill-worker 0"]
    kinds = ["raises", "hangs", "kills", "not text", "kills"]
    # An actor of Ray that is killed before, while or after it writes; its shard is started again.
    once = [f"POISON kill-worker {chance.randrange(100)} {tmp_path / name}" for name in ("one", "two")]
    texts += harm + once
    chance.shuffle(texts)
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    survey = run(folder, tmp_path / "out", engine="ray", workers=2, timeout=2.0)
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()
    aside = {texts[int(each["document"][:2])]: each for each in survey.quarantined}
    assert {text: each["kind"] for text, each in aside.items()} == dict(zip(harm, kinds, strict=True))
    assert "3 workers were lost" in aside["POISON kill-worker 0"]["reason"]
    assert survey.documents == len(texts) - len(harm)
    # What is left of it, measured without Ray and without what would kill this process.
    (folder / f"{texts.index(harm[-1]):02}.txt").write_text(" ".join(["POISON raise"]).ljust(len(harm[-1])))
    assert_whole(tmp_path / "out", folder, run(folder, tmp_path / "serial", timeout=2.0))


@pytest.mark.parametrize("resumed", [False, True])
def test_actors_killed_around_their_writes_are_started_again(
    resumed, seed, corpus, serial, tmp_path, monkeypatch
):
    chance, out = random.Random(f"{resumed} {seed}"), tmp_path / "out"
    if resumed:
        interrupt(chance, corpus, out, 5)
    faults = [(when, 1 if resumed else 1 + chance.randrange(2), tmp_path / when) for when in WRITES]
    with monkeypatch.context() as patch:
        patch.setattr(_job, "Corpus", partial(Deadly, faults))
        run(corpus, out, engine="ray", workers=2)
    assert all(happened.exists() for _, _, happened in faults)
    assert_whole(out, corpus, serial)
    assert not finish(corpus, out, serial)


@pytest.mark.parametrize("fault", ["after a write", "during the manifest"])
def test_a_killed_driver_of_ray_is_resumed_without_it(fault, seed, cluster, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(8)
    done = drive(corpus, tmp_path / "out", fault, count, "ray", RAY_ADDRESS=cluster)
    assert done.returncode == -9, done.stderr
    finish(corpus, tmp_path / "out", serial)  # its actors may still be there


def test_a_model_that_cannot_run_is_told_as_the_laptop_tells_it(corpus, tmp_path):
    with pytest.raises(SurveyError, match="these weights are nowhere"):
        run(corpus, tmp_path / "out", engine="ray", model="tests.helpers.survey_models:broken")
