"""Run the Python blocks of a Markdown page."""

from __future__ import annotations

import doctest
import re

# Guides that tests/third_party runs, in an environment of its own.
ELSEWHERE = (
    "25-words-of-a-diffusion-model.md",
    "26-a-vision-transformer-of-timm.md",
    "27-contacts-of-a-protein.md",
    "28-a-long-answer-over-an-image.md",
)


def run_page(text: str, name: str) -> int:
    """Run the blocks of a page one after the other with the same names; how many there were."""
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        if ">>>" not in block:
            exec(compile(block, f"{name}, block {number}", "exec"), names)
            continue
        example = doctest.DocTestParser().get_doctest(block, names, f"{name}, block {number}", name, 0)
        report: list[str] = []
        failed = doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
        names = example.globs
        assert not failed.failed, "".join(report)
    return len(blocks)
