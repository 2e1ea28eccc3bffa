"""The figures of the README, made from what the benchmarks kept: python benchmarks/figures.py writes them anew.

benchmarks/run.py keeps its rows in history.jsonl; pages.py and model_page.py keep theirs in pages.json, with --write.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
KEPT = HERE / "pages.json"


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure in milliseconds; printed with the range it has."""
    found = {}
    for name in rounds[0]:
        times = [each[name] for each in rounds]
        found[name] = statistics.median(times)
        print(f"{name:<38} {found[name]:8.0f} ms, from {min(times):.0f} to {max(times):.0f}")
    return found


def keep(name: str, found: dict[str, float]) -> None:
    """One script's figures, in place of those it kept before."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept[name] = {each: round(value, 3) for each, value in found.items()}
    KEPT.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def table() -> str:
    """The lines of the table."""
    record = json.loads((HERE / "history.jsonl").read_text().splitlines()[-1])
    rows: dict[str, Any] = {row["name"]: row for row in record["rows"]}
    pages = json.loads(KEPT.read_text())

    def beside(name: str) -> tuple[str, str]:
        row = rows[name]
        return _time(row["ours_ms"]), f"{_time(row['bare_ms'])}, {row['ratio']:.2f}×"

    deep, model = pages["deep map"], pages["model page"]
    lines: list[tuple[str, str, str]] = [
        ("`A @ value`, 8 heads, 4,096 tokens", *_words(beside("A @ v"), "the bare kernel")),
        ("the same, causal", *_words(beside("A @ v, causal"), "the bare kernel")),
        ("a causal window of 256", *_words(beside("window of 256"), "the kernel with that mask")),
        (
            "output, entropy, received, distance and a picture",
            *_words(beside("dense: four measures"), "stored weights"),
        ),
        (
            "131,072 tokens, causal: output, lse, entropy, received, picture",
            *_words(beside("131,072 tokens, causal"), "the bare kernel's output"),
        ),
        ("… and then any 512 × 512 tile of it", _time(rows["131,072 tokens: then any tile"]["ours_ms"]), "–"),
        (
            "the page of MiniLM's 72 heads, 512 tokens",
            f"{model['MB file']:.1f} MB in {model['seconds']:.1f} s, painted after {_time(model['first paint'])}",
            "BertViz 1.4.1: 869 MB in 29 s",
        ),
        (
            "the map of one head, 131,072 tokens",
            f"{deep['MB file']:.0f} MB, painted after {_time(deep['first paint'])}, a tile in "
            f"{_time(deep['tile, each weight'])} to {_time(deep['tile, mean of 4 × 4'])}",
            "–",
        ),
    ]
    head = ["| float32, two cores | here | beside |", "| --- | --- | --- |"]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])


def _words(times: tuple[str, str], what: str) -> tuple[str, str]:
    ours, (theirs, ratio) = times[0], times[1].split(", ")
    return f"{ours}, {ratio}", f"{theirs}, {what}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.0f} s" if milliseconds >= 1e4 else f"{milliseconds:,.0f} ms"


def written(text: str) -> str:
    """The README with the table as it is now."""
    before, rest = text.split("<!-- figures -->\n")
    return f"{before}<!-- figures -->\n{table()}\n<!-- end -->{rest.split('<!-- end -->')[1]}"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
