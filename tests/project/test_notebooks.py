"""The pages that are notebooks, run in this process: every number in the text is one that a cell computes."""

from __future__ import annotations

import re

import pytest

from tests.helpers.nightly import keep_in_ci
from tests.helpers.notebooks import FAST, NOTEBOOKS, run_notebook

pytest.importorskip("IPython")
pytestmark = pytest.mark.slow


def shown(cell: dict) -> str:
    """The code of a cell and the text that it printed."""
    outputs = cell.get("outputs", [])
    texts = [out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in outputs]
    markdown = [out.get("data", {}).get("text/markdown", "") for out in outputs]
    return "\n".join("".join(text) for text in [cell["source"], *texts, *markdown])


def unsupported(notebook: list[dict]) -> set[str]:
    """Numbers with a decimal point in the text that occur in no cell."""
    prose = "\n".join("".join(cell["source"]) for cell in notebook if cell["cell_type"] == "markdown")
    prose = re.sub(r"\]\([^)]*\)|(?:arXiv|doi):\S+|`[^`]*`", "", prose)  # links, papers, names in code
    code = "\n".join(shown(cell) for cell in notebook if cell["cell_type"] == "code")
    return {number for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", prose) if number not in code}


@pytest.mark.parametrize("source", keep_in_ci(NOTEBOOKS, *FAST), ids=lambda path: path.stem)
def test_a_page_runs_and_computes_the_numbers_in_its_text(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unsupported(run_notebook(source)) == set()


def test_a_number_that_no_cell_computes_is_reported():
    code = {"cell_type": "code", "source": ["x = 0.25"], "outputs": [{"text": ["0.75\n"]}]}
    prose = {"cell_type": "markdown", "source": ["0.25 and 0.75, but 0.33; see [1](https://a.example/0.5)."]}
    assert unsupported([prose, code]) == {"0.33"}
