"""The notebook that checks a hosted device: it installs first, and its cells run here on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/selfcheck.ipynb"


def read_code() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_valid_and_stores_no_output():
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(
        not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell
    )


def test_the_first_cell_installs_what_the_others_import():
    install, *rest = read_code()
    assert install == '%pip install --quiet "regard[torch]" ml_dtypes'
    extras = (ROOT / "pyproject.toml").read_text()
    assert "\ntorch = [" in extras
    lines = [line for cell in rest for line in cell.splitlines() if line.startswith(("import ", "from "))]
    assert {line.split()[1].split(".")[0] for line in lines} == {"json", "regard", "torch"}


def test_the_cells_run_on_the_cpu(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from regard.testing import device_check

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(device_check, "CASE_SECONDS", 1.0)
    monkeypatch.setattr(device_check, "CPU_LENGTHS", (64,))
    names: dict[str, object] = {}
    for cell in read_code()[1:]:
        exec(cell, names)
    assert names["device"] == "cpu"
    *speed, printed = capsys.readouterr().out.splitlines()
    assert len(speed) == 2 and all("× bare, estimated " in line for line in speed)
    report = json.loads(printed)
    assert report["ok"] and report["device"]["device"]["type"] == "cpu"
    assert {run["setting"] for run in report["device"]["cases"]} == {"as it is", "autocast", "TF32"}
