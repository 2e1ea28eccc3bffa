"""The guides whose code needs other packages or a long run: every block runs, and makes the picture that is stored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.doc_blocks import ELSEWHERE, run_page
from tests.third_party.packages import load

GUIDES = Path(__file__).parents[2] / "docs/guides"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_blocks_of_a_guide_run_and_make_its_picture(name, tmp_path, monkeypatch):
    pyplot, image = load("matplotlib.pyplot"), load("matplotlib.image")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / name).read_text("utf-8")
    assert run_page(text, name) >= 2
    pyplot.close("all")
    [stored] = re.findall(r"\(pictures/(\w+\.png)\)", text)
    made, kept = image.imread(tmp_path / stored), image.imread(GUIDES / "pictures" / stored)
    assert made.shape == kept.shape and made.std() > 0.02


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_block_has_more_than_ten_lines(name):
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (GUIDES / name).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [[line for line in block.splitlines() if line.strip()] for block in blocks]
    assert max(map(len, lines)) <= 11  # ten, and the import
