"""`regard compare`: it prints what `regard.compare` returns."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from tests.helpers.command_line import INDUCTION  # noqa: E402

LINE = "abcde abcde abcde"
PORT = """
import torch
from examples.induction import load

def scaled():
    model = load()
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.q_proj.weight *= 2
    return model
"""


@pytest.fixture
def port(tmp_path, monkeypatch):
    """A module with a model whose queries are twice as large."""
    (tmp_path / "port.py").write_text(PORT)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield "port:scaled"
    sys.modules.pop("port", None)


def test_two_runs_of_a_model_agree(run):
    out, err = run("compare", INDUCTION, INDUCTION, "-t", LINE)
    assert out.startswith("No difference in 2 layers and the output.\n\nlayer  module")
    assert err.count("17 tokens, 2 layers, 8 heads") == 2


def test_a_dtype_differs_by_rounding(run):
    out, err = run("compare", INDUCTION, INDUCTION, "-t", LINE, "--dtype-b", "bfloat16", "--json")
    record = json.loads(out)
    assert err == "" and record["kind"] == "rounding" and record["agrees"] is True and record["first"] is None
    assert (record["a"]["model"]["dtype"], record["b"]["model"]["dtype"]) == ("float32", "bfloat16")
    assert [row["kind"] for row in record["layers"]] == ["rounding", "rounding"]


def test_models_that_differ_exit_with_1(run, port):
    out, _ = run("compare", INDUCTION, port, "-t", LINE, code=1)
    assert out.startswith(
        "The runs diverge in layer 0: scale.\n\nerror: scale. The scores of B are 2 × the scores of A"
    )
    assert "inherited" in out and "  hint      " in out
    out, _ = run("compare", INDUCTION, port, "-t", LINE, "--layers", "layers.1*", "--json", code=1)
    record = json.loads(out)
    assert record["first"]["module"] == "layers.0.attention.q_proj" and len(record["layers"]) == 1


def test_a_module_after_the_last_layer_is_named(run, tmp_path, monkeypatch):
    (tmp_path / "louder.py").write_text(
        "from examples.induction import load\n\n"
        "def make():\n"
        "    model = load()\n"
        "    list(model.children())[-1].weight.data *= 2\n"
        "    return model\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    out, _ = run("compare", INDUCTION, "louder:make", "-t", LINE, code=1)
    sys.modules.pop("louder", None)
    assert "error: module." in out and "2 times as large in B" in out
    assert out.count("no difference") == 2


def test_recordings_are_read(run, port, tmp_path):
    pytest.importorskip("safetensors")
    from examples.induction import load

    model = load()
    with torch.no_grad(), regard.watch(model, values=True) as recording:
        model(torch.tensor([list(LINE.encode())]))
    recording.save(tmp_path / "a.safetensors")
    assert run("compare", tmp_path / "a.safetensors", tmp_path / "a.safetensors").out.startswith(
        "No difference"
    )
    assert "No difference" in run("compare", tmp_path / "a.safetensors", INDUCTION, "-t", LINE).out
    assert "scale" in run("compare", tmp_path / "a.safetensors", port, "-t", LINE, code=1).out
    _, err = run("compare", tmp_path / "a.safetensors", INDUCTION, code=2)
    assert "received no text" in err
