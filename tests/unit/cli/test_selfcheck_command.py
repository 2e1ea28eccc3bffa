"""`regard selfcheck`: a table or JSON, and exit code 1 if something is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from regard.engines.numpy import NumpyEngine
from regard.testing import device_check, installation


def test_selfcheck_passes_here(run):
    out, err = run("selfcheck", "-n", "4", "--json")
    record = json.loads(out)
    assert err == "" and record["ok"] and record["cases"]["count"] == 4
    out, _ = run("selfcheck", "-n", "2")
    assert "2 cases on numpy" in out and "0 of " in out and out.endswith("\nok\n")


def test_the_report_is_a_file_to_post(run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(device_check, "find_device", lambda: asked.append("here") or None)
    out, _ = run("selfcheck", "-n", "2", "--report", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and report["cases"]["count"] == 2 and asked == ["here"]
    assert str(tmp_path) not in json.dumps(report) and "Wrote " in out


def test_a_report_that_cannot_be_written_is_an_error_before_the_check(run, tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "check_installation", lambda *_, **__: pytest.fail("it ran"))
    for path in (tmp_path / "none" / "report.json", tmp_path):
        _, err = run("selfcheck", "--report", str(path), code=2)
        assert path.name in err


def test_selfcheck_fails_if_an_engine_is_wrong(run, monkeypatch):
    monkeypatch.setattr(NumpyEngine, "exponentiate", lambda self, scores, shift: np.exp2(scores - shift))
    out, _ = run("selfcheck", "-n", "8", code=1)
    assert "problem: " in out and "checks against the definition failed" in out
    assert "paste the output of 'regard selfcheck --json' into an issue" in out
    record = json.loads(run("selfcheck", "-n", "8", "--json", code=1).out)
    assert not record["ok"] and record["cases"]["failed"] > 0


def test_selfcheck_of_a_device(run, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(device_check, "CASE_SECONDS", 0.5)
    monkeypatch.setattr(device_check, "CPU_LENGTHS", (64,))
    out, _ = run("selfcheck", "-n", "1", "--device", "cpu")
    for words in (
        "kernel of the device",
        "causal_corner upper_left",
        "autocast",
        "measures, block loop",
        "checked in ",
    ):
        assert words in out
    assert (
        "problem: the device nowhere cannot be used"
        in run("selfcheck", "-n", "1", "--device", "nowhere", code=1).out
    )
