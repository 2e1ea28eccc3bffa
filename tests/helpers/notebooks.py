"""The pages of the site that are notebooks, and their code run in this process."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
CHAPTERS = sorted((DOCS / "book").glob("[01]*.md"))
EXERCISES = sorted((DOCS / "exercises").glob("[01]*.md"))
# The guides of other packages are no notebooks: tests/third_party runs their code.
GUIDES = [
    path for path in sorted((DOCS / "guides").glob("[0-9]*.md")) if "{code-cell}" in path.read_text("utf-8")
]
NOTEBOOKS = CHAPTERS + EXERCISES + GUIDES

# The pages that take seconds run every night only.
LONG = (
    *(
        "14-real-model",
        "15-which-heads-matter",
        "17-train-one",
        "21-cache-policy",
        "20-many-ranks",
        "14-watch-a-training-run",
        "17-attention-over-an-image",
    ),
    *("12-head-worth", "06-long-context", "04-entropy-penalty"),
)
FAST = [path for path in NOTEBOOKS if path.stem not in LONG]


def list_cells(page: Path) -> list[dict]:
    """Split a page into the cells of its notebook, without outputs."""
    parts = re.split(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", page.read_text("utf-8"), flags=re.M | re.DOTALL)
    cells = []
    for number, part in enumerate(parts):
        kind = "code" if number % 2 else "markdown"
        cells.append({"cell_type": kind, "source": re.sub(r"^:\w+:.*\n", "", part, flags=re.M)})
    return cells


def run_notebook(page: Path) -> list[dict]:
    """Run the cells of a page one after the other; return them with what they print and display."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    cells = list_cells(page)
    try:
        shell = InteractiveShell()
        for cell in cells:
            if cell["cell_type"] == "code":
                with capture_output() as captured, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    shell.run_cell(cell["source"]).raise_error()
                cell["outputs"] = [
                    {"text": captured.stdout},
                    *({"data": out.data} for out in captured.outputs),
                ]
    finally:
        for prompt in ("ps1", "ps2", "ps3"):  # with them, later tests would seem to run at a prompt
            vars(sys).pop(prompt, None)
    return cells
