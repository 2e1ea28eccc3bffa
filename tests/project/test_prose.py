"""Prose of sources and docs: sentences name their actor, and begin with a verb or a noun."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKED = ("src", "docs/*.md", "docs/*.py", "examples/*.py", "benchmarks/*.py", "scripts", "*.md", ".github")
SUFFIXES = ("", ".css", ".js", ".md", ".py", ".yml")

# A sentence opens a docstring or a comment, or follows another one. Rules are about grammar; no single word of the
# field is among them.
OPENING = r'(?:"""|# |// |\. |^)'
RULES = {
    r"\b(?i:nobody|somebody|everybody|anybody|whoever)\b": "name the actor (the caller, the model, a test)",
    OPENING + r"(?:The same|That of|Those of)\b": "start with the verb or name the thing",
    r"\b(?:is|are|was|were|be|been) told\b": "is reported, is printed, is documented",
    r"\b(?:can|could|may|to) be had\b|\bis had\b": "is available, can be computed",
}
INLINE_CODE = re.compile(r"`[^`\n]*`")


def find_phrases(text: str) -> list[tuple[int, str, str]]:
    """Find the phrases to rewrite in a text: line number, phrase, what to write instead."""
    return [
        (number, match[0].strip(), instead)
        for number, line in enumerate(text.splitlines(), start=1)
        for rule, instead in RULES.items()
        for match in re.finditer(rule, INLINE_CODE.sub("", line))
    ]


def list_files() -> list[str]:
    """List the tracked files to check, relative to the root; outside a checkout, skip."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    git = ["git", "ls-files", "--", *CHECKED]
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES]


def test_no_file_has_a_phrase_to_rewrite():
    files = list_files()
    assert {"README.md", "docs/index.md", "src/regard/errors.py"} <= set(files)
    found = {name: hits for name in files if (hits := find_phrases((ROOT / name).read_text("utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "Files that are opened when somebody asks for them.",
        "the path is told",
        '"""The same for some rows."""',
        "Whoever is last may use them up.",
    ],
)
def test_a_planted_sentence_is_found(sentence):
    assert find_phrases(f"# A line before it.\n    {sentence}\n")


def test_plain_sentences_and_words_of_the_field_are_not():
    text = "Import optional subpackages on first access.\nIf the rows are not contiguous, copy them.\n"
    words = "dilated masked padded packed sharded quantised tied held-out hidden states, split heads, cut-off, filled"
    assert find_phrases(f"{text}{words}\n") == []
