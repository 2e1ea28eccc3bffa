"""The survey on Ray Data: it writes the same files as without Ray, whichever of its processes is killed."""

from __future__ import annotations

import random
from functools import partial

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ray")

import ray

from regard.jobs.driver import start_ray
from regard.survey import SurveyError, driver
from tests.helpers import policy_faults
from tests.helpers.survey_checks import assert_whole, finish, open_files, read_state, run, write_corpus
from tests.helpers.survey_faults import WRITES, FaultyCorpus, interrupt, run_driver

pytestmark = [
    pytest.mark.nightly,  # Ray takes long to start
    # Ray Data warns about its own settings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
    # Ray 2.40 leaves its processes and files to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-seed")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--seeds")))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(2, object_store_memory=250_000_000)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def serial(corpus, tmp_path_factory):
    return run(corpus, tmp_path_factory.mktemp("serial") / "out")


def test_ray_and_the_local_executor_write_the_same_rows(corpus, tmp_path):
    options = {"model": "tests.helpers.survey_models:text", "max_tokens": 96, "workers": 2}
    local = run(corpus, tmp_path / "local", **options)
    reported: list[int] = []
    ray_survey = run(
        corpus,
        tmp_path / "ray",
        executor="ray",
        progress=lambda progress: reported.append(progress.shards),
        **options,
    )
    assert ray_survey.documents == 40 and ray_survey.complete
    assert_whole(tmp_path / "ray", corpus, local, rows_each=sum(local.settings["heads"]))
    assert [file.read_bytes() for file in local.files] == [file.read_bytes() for file in ray_survey.files]
    assert set(range(1, 9)) <= set(reported)  # each was committed as it arrived
    # The other executor finds the survey finished.
    before = read_state(tmp_path / "ray")
    run(corpus, tmp_path / "ray", **options)
    assert read_state(tmp_path / "ray") == before


def test_a_verification_on_ray_is_that_of_the_local_executor(corpus, tmp_path):
    local = policy_faults.verify(corpus, tmp_path / "local")
    on_ray = policy_faults.verify(corpus, tmp_path / "ray", executor="ray", workers=2)
    assert len(on_ray.documents) == 40 and on_ray.summary == local.summary
    assert_whole(tmp_path / "ray", corpus, open_files(tmp_path / "local"))


def test_documents_that_kill_a_process_do_not_affect_the_others(seed, corpus, tmp_path):
    chance = random.Random(f"ray {seed}")
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    harm = ["POISON raise", "POISON hang", "POISON kill", " ", "POISON kill-worker 0"]
    kinds = ["error", "timeout", "crash", "not text", "crash"]
    # Kills an actor before, while or after it writes; Ray restarts its shard.
    once = [f"POISON kill-worker {chance.randrange(100)} {tmp_path / name}" for name in ("one", "two")]
    texts += harm + once
    chance.shuffle(texts)
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    survey = run(folder, tmp_path / "out", executor="ray", workers=2, timeout=2.0)
    assert (tmp_path / "one").exists() and (tmp_path / "two").exists()
    quarantined = {texts[int(document["document"][:2])]: document for document in survey.quarantined}
    found = {text: document["kind"] for text, document in quarantined.items()}
    assert found == dict(zip(harm, kinds, strict=True))
    assert "3 workers were lost" in quarantined["POISON kill-worker 0"]["reason"]
    assert survey.documents == len(texts) - len(harm)
    # Measured again without Ray, and without the document that would kill this process.
    (folder / f"{texts.index(harm[-1]):02}.txt").write_text(" ".join(["POISON raise"]).ljust(len(harm[-1])))
    assert_whole(tmp_path / "out", folder, run(folder, tmp_path / "serial", timeout=2.0))


@pytest.mark.parametrize("resumed", [False, True])
def test_actors_killed_around_a_write_are_restarted(resumed, seed, corpus, serial, tmp_path, monkeypatch):
    chance, out = random.Random(f"{resumed} {seed}"), tmp_path / "out"
    if resumed:
        interrupt(chance, corpus, out, 5)
    faults = [(when, 1 if resumed else 1 + chance.randrange(2), tmp_path / when) for when in WRITES]
    with monkeypatch.context() as patch:
        patch.setattr(driver, "Corpus", partial(FaultyCorpus, faults))
        run(corpus, out, executor="ray", workers=2)
    assert all(happened.exists() for _, _, happened in faults)
    assert_whole(out, corpus, serial)
    assert not finish(corpus, out, serial)


@pytest.mark.parametrize("fault", ["after a write", "during the manifest"])
def test_a_killed_ray_driver_is_resumed_without_ray(fault, seed, cluster, corpus, serial, tmp_path):
    count = 1 + random.Random(f"{fault} {seed}").randrange(8)
    done = run_driver(corpus, tmp_path / "out", fault, count, "ray", RAY_ADDRESS=cluster)
    assert done.returncode == -9, done.stderr
    finish(corpus, tmp_path / "out", serial)  # its actors may still run


def test_a_model_that_does_not_run_raises_as_with_the_local_executor(corpus, tmp_path):
    with pytest.raises(SurveyError, match="these weights do not exist"):
        run(corpus, tmp_path / "out", executor="ray", model="tests.helpers.survey_models:broken")
