"""The prose check: no forbidden phrase in sources and docs, and a planted one is found."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROSE = runpy.run_path(str(ROOT / "scripts/prose"))


def test_no_file_has_a_forbidden_phrase():
    files = PROSE["list_files"]()
    assert {"README.md", "docs/index.md", "src/regard/errors.py", "src/regard/cli/app.py"} <= set(files)
    found = {
        name: hits for name in files if (hits := PROSE["find_phrases"]((ROOT / name).read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "Rooms that are opened when somebody asks for them.",
        "what is cut is told",
        '"""The same for some rows."""',
        "the short ones are filled up, and the filling must not be seen",
        "2 the question was wrong",
        "Whoever is last may use them up.",
        "broken off, it goes on where it stopped",
    ],
)
def test_a_planted_sentence_is_found(sentence):
    assert PROSE["find_phrases"](f"# A line before it.\n    {sentence}\n")


def test_plain_sentences_are_not():
    text = "Import optional subpackages on first access.\nIf the rows are not contiguous, copy them.\n"
    assert PROSE["find_phrases"](text) == []
