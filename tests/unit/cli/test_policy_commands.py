"""`regard policy`: output, the page, errors and exit codes."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

from regard.jobs.shards import EVICTION_WINDOWS
from regard.policy import FULL, CachePolicy
from regard.survey import RunOptions
from tests.helpers.policy_checks import (
    INDUCTION_MODEL,
    TEXT_MODEL,
    LocalVerifier,
    build_policy,
    draw_repeated,
)
from tests.helpers.survey_files import write_survey

BAD = build_policy(INDUCTION_MODEL, {(0, 0): (1, 0)})


@pytest.fixture
def local(monkeypatch):
    """The commands verify in this process instead of in workers."""
    verifier = LocalVerifier(INDUCTION_MODEL, draw_repeated(1, 2))
    monkeypatch.setattr(
        CachePolicy,
        "verify",
        lambda policy, model, corpus, out, *, bound, effects, **_: verifier.verify(
            policy, bound, effects=effects
        ),
    )


def test_verify_prints_the_verdict_writes_the_page_and_exits_with_1_if_the_policy_fails(run, local, tmp_path):
    path, page = BAD.save(tmp_path / "policy.json"), tmp_path / "policy.html"
    command = ["policy", "verify", INDUCTION_MODEL, path, "texts.jsonl", "-o", page]
    captured = run(*command, code=1)
    assert captured.out.startswith("The policy fails: KL ") and "top-1 agreement" in captured.out
    assert "Cache policy of" in page.read_text()
    record = json.loads(run(*command, "--json", code=1).out)
    assert record["holds"] is False and record["kl"] > 0.5 and record["page"] == str(page)
    assert json.loads(run(*command, "--json", "--bound", "50").out)["holds"] is True


def test_errors_are_usage_errors(run, tmp_path):
    missing = run("policy", "verify", INDUCTION_MODEL, tmp_path / "none.json", "texts", code=2)
    assert missing.err.startswith("regard policy: cannot open ")
    survey = write_survey(tmp_path / "survey", ["a", "b"])
    refused = run("policy", "make", survey.path, "-o", tmp_path / "policy.json", code=2)
    assert "without the sizes of keys and values" in refused.err
    settings = json.loads((survey.path / "settings.json").read_text())
    sizes = {"kv_heads": [1, 1, 1], "head_dim": [4] * 3, "value_dim": [4] * 3, "bytes_per_number": 4}
    (survey.path / "settings.json").write_text(json.dumps(settings | {"cache": sizes}))
    refused = run("policy", "make", survey.path, "-o", tmp_path / "policy.json", code=2)
    assert "layers differ in heads" in refused.err


def test_a_policy_of_another_model_is_a_usage_error(run, tmp_path):
    path = BAD.save(tmp_path / "policy.json")
    (tmp_path / "a.txt").write_text("some words")
    refused = run("policy", "verify", TEXT_MODEL, path, tmp_path / "a.txt", code=2)
    assert "a model with the layer 'layers.2.attention'" in refused.err


def test_a_page_to_open_needs_a_file(run, tmp_path):
    path = BAD.save(tmp_path / "policy.json")
    refused = run("policy", "verify", INDUCTION_MODEL, path, "texts", "--open", code=2)
    assert "received --open without -o" in refused.err


def test_every_option_of_a_run_can_be_passed(run, tmp_path, monkeypatch):
    """The commands pass on each field of RunOptions, and `tighten` its number of rounds."""
    passed = {}
    monkeypatch.setattr(CachePolicy, "tighten", lambda policy, *_, **options: passed.update(options) or 1 / 0)
    given = {"max_bytes": 9, "threads": 3, "workers": 2, "executor": "ray", "dtype": "auto", "timeout": 2.5}
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    path = BAD.save(tmp_path / "policy.json")
    run("policy", "tighten", "a", path, "b", "-o", tmp_path / "c", "--max-rounds", 64, *options, code=4)
    assert passed.keys() == {"max_rounds", "progress"} | {field.name for field in fields(RunOptions)}
    assert passed["max_rounds"] == 64 and passed.items() >= given.items()


def test_make_writes_the_policy_that_the_rows_of_the_survey_give(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.helpers.survey_files.HEADS", [3, 3])
    survey = write_survey(tmp_path / "survey", [f"{number}" for number in range(8)])
    settings = json.loads((survey.path / "settings.json").read_text())
    sizes = {"kv_heads": [1, 1], "head_dim": [4, 4], "value_dim": [4, 4], "bytes_per_number": 2}
    (survey.path / "settings.json").write_text(json.dumps(settings | {"cache": sizes}))
    path = tmp_path / "policy.json"
    captured = run("policy", "make", survey.path, "-o", path, "--keep", "0.5", "--sinks", "4")
    policy = CachePolicy.load(path)
    assert captured.out.startswith(policy.summary())
    rows = survey.to_pandas()
    needs = []
    for head in range(3):
        own = rows[(rows["layer"] == 0) & (rows["head"] == head)]
        tokens, evicted = own["tokens"].to_numpy(), np.stack(own["evicted_4"].to_numpy())
        for number, window in enumerate(EVICTION_WINDOWS):
            affected = np.maximum(0, tokens - window - 4).sum()
            if affected and (evicted[:, number] * tokens).sum() / affected <= 0.5:
                needs.append(window)
                break
        else:
            needs.append(1 << 40)
    assert policy.windows.tolist() == [[FULL if max(needs) == 1 << 40 else max(needs)], [FULL]]
    assert policy.about["num_heads"] == 3 and policy.about["settings"]["keep"] == 0.5
