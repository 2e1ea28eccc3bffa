"""Write the table of figures in the README from stored benchmark results: python benchmarks/figures.py.

benchmarks/run.py stores its rows in history.jsonl; pages.py and model_page.py store theirs in pages.json with --write.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
PAGE_FIGURES = HERE / "pages.json"


def compute_medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure in milliseconds, and print it with its range."""
    medians = {}
    for name in rounds[0]:
        times = [figures[name] for figures in rounds]
        medians[name] = statistics.median(times)
        print(f"{name:<38} {medians[name]:8.0f} ms, from {min(times):.0f} to {max(times):.0f}")
    return medians


def store_figures(script: str, figures: dict[str, float]) -> None:
    """Replace the stored figures of one script."""
    stored = json.loads(PAGE_FIGURES.read_text()) if PAGE_FIGURES.exists() else {}
    stored[script] = {name: round(value, 3) for name, value in figures.items()}
    PAGE_FIGURES.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")


def format_table() -> str:
    """Return the table as Markdown."""
    record = json.loads((HERE / "history.jsonl").read_text().splitlines()[-1])
    rows: dict[str, Any] = {row["name"]: row for row in record["rows"]}
    pages = json.loads(PAGE_FIGURES.read_text())

    def compare(name: str, baseline: str) -> tuple[str, str]:
        row = rows[name]
        return (
            f"{_format_time(row['ours_ms'])}, {row['ratio']:.2f}×",
            f"{_format_time(row['bare_ms'])}, {baseline}",
        )

    model_page = pages["model page"]
    lines: list[tuple[str, str, str]] = [
        ("`A @ value`, 8 heads, 4,096 tokens", *compare("A @ v", "the bare kernel")),
        (
            "output, entropy, received weight, distance and a picture",
            *compare("dense: four measures", "stored weights"),
        ),
        (
            "the page of MiniLM's 72 heads, 512 tokens",
            f"{model_page['MB file']:.1f} MB in {model_page['seconds']:.1f} s",
            "869 MB in 29 s, BertViz 1.4.1",
        ),
    ]
    head = ["| | regard | compared with |", "| --- | --- | --- |"]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])


def _format_time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.0f} s" if milliseconds >= 1e4 else f"{milliseconds:,.0f} ms"


def insert_table(text: str) -> str:
    """Return the text of the README with the current table."""
    before, rest = text.split("<!-- figures -->\n")
    return f"{before}<!-- figures -->\n{format_table()}\n<!-- end -->{rest.split('<!-- end -->')[1]}"


if __name__ == "__main__":
    README.write_text(insert_table(README.read_text()))
