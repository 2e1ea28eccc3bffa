"""A policy from one half of a corpus, verified on the other by worker processes, and resumed after kill -9."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

import regard
from regard.policy import CachePolicy
from tests.helpers.policy_checks import TEXT_MODEL, TEXT_TOKENS, draw_texts, write_lines
from tests.helpers.policy_faults import run_driver, verify
from tests.helpers.survey_checks import assert_whole, open_files, read_state, write_corpus
from tests.helpers.survey_faults import KILLS, RESUMING, WORKERS

SHARDS = 8


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--seeds")))


# -- Both halves of a corpus ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    folder = tmp_path_factory.mktemp("halves")
    return [write_lines(folder / f"{half}.jsonl", draw_texts(half, 24)) for half in (0, 1)]


@pytest.fixture(scope="module")
def survey(halves, tmp_path_factory):
    out = tmp_path_factory.mktemp("survey") / "out"
    return regard.survey.run(TEXT_MODEL, halves[0], out, measures=["distance"], max_tokens=TEXT_TOKENS)


@pytest.mark.nightly
def test_a_policy_from_one_half_is_as_predicted_on_the_other(survey, halves, tmp_path):
    policies = (survey.cache_policy(keep) for keep in (0.9, 0.8, 0.7, 0.6, 0.5))
    policy = next(policy for policy in policies if policy.savings(TEXT_TOKENS) >= 0.5)
    policy = CachePolicy.load(policy.save(tmp_path / "policy.json"))
    found = policy.verify(TEXT_MODEL, halves[1], tmp_path / "out", max_tokens=TEXT_TOKENS)
    assert len(found.documents) == 24 and not found.quarantined
    assert abs(found.prediction_error) < 0.2, found.prediction_error
    assert 0 < found.kl < 0.5 and 0.7 < found.agreement < 1
    assert all(1 < perplexity < 8 for perplexity in found.perplexity)
    assert not found.holds and "exceeds the bound of 0.01" in found.verdict
    assert json.loads(json.dumps(found.summary))["saved"] == policy.savings(TEXT_TOKENS)
    # The same directory is read without running again, with another bound.
    before = read_state(tmp_path / "out")
    again = policy.verify(TEXT_MODEL, halves[1], tmp_path / "out", max_tokens=TEXT_TOKENS, bound=1.0)
    assert read_state(tmp_path / "out") == before
    assert again.holds and again.kl == found.kl
    with pytest.raises(regard.ArgumentError, match=r"other settings: policy\.sha256"):
        survey.cache_policy(keep=0.99).verify(TEXT_MODEL, halves[1], tmp_path / "out", max_tokens=TEXT_TOKENS)


@pytest.mark.nightly
def test_the_choice_follows_keep_sinks_and_granularity(survey):
    order = [survey.cache_policy(keep).savings(TEXT_TOKENS) for keep in (0.99, 0.9, 0.8, 0.7, 0.6)]
    assert order == sorted(order)
    by_head, by_layer = survey.cache_policy(0.6), survey.cache_policy(0.6, granularity="layer")
    widths = np.where(by_head.windows < 0, 1 << 40, by_head.windows)
    assert by_layer.windows.tolist() == [
        [-1 if max(row) == 1 << 40 else max(row)] * 4 for row in widths.tolist()
    ]
    assert (by_head.sinks[by_head.windows > 0] == 4).all()
    assert by_head.about["model"] == survey.settings["model"] and by_head.about["head_dim"] == 32
    with pytest.raises(regard.ArgumentError, match="0, 1, 4"):
        survey.cache_policy(sinks=3)
    with pytest.raises(regard.ArgumentError, match="keep 2"):
        survey.cache_policy(keep=2)


# -- Killed drivers and workers ------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def serial(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("serial") / "out"
    verify(corpus, out)
    return open_files(out)


def resume(corpus, out, serial, *, again=True):
    """Resume a verification and check it; resume it again and check that nothing changes."""
    found = verify(corpus, out)
    assert_whole(out, corpus, serial)
    if not again:
        return
    before = read_state(out)
    assert verify(corpus, out).summary == found.summary
    assert read_state(out) == before


def kill(fault, seed, corpus, serial, out, *, again=True):
    count = 1 + random.Random(f"{fault} {seed}").randrange(SHARDS)
    done = run_driver(corpus, out, fault, count)
    assert done.returncode == -9, done.stderr
    resume(corpus, out, serial, again=again)


@pytest.mark.nightly
def test_a_killed_driver_is_resumed(seed, corpus, serial, tmp_path):
    kill("between rename and manifest", seed, corpus, serial, tmp_path / "out", again=False)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", KILLS)
def test_a_driver_killed_anywhere_is_resumed(fault, seed, corpus, serial, tmp_path):
    kill(fault, seed, corpus, serial, tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.parametrize("fault", RESUMING)
def test_a_driver_killed_while_it_resumes_is_resumed(fault, seed, corpus, serial, tmp_path):
    out = tmp_path / "out"
    assert run_driver(corpus, out, "after a write", 1 + seed % SHARDS).returncode == -9
    assert run_driver(corpus, out, fault, 1).returncode == -9
    resume(corpus, out, serial)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", WORKERS)
def test_a_killed_worker_process_is_restarted(fault, seed, corpus, serial, tmp_path):
    done = run_driver(corpus, tmp_path / "out", fault, 1 + seed % SHARDS)
    assert done.returncode == 0, done.stderr
    resume(corpus, tmp_path / "out", serial)
