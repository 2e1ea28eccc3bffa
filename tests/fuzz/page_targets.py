"""Tokens, titles and payloads: whatever a string holds, pages and notebooks stay what they are."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.inputs import change_json, draw_string, draw_value
from tests.fuzz.runner import RunInput, Target, UnexpectedResult


class Outline(HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        handlers = [name for name, _ in attrs if name.startswith("on")]
        self.elements.append(f"{tag} {' '.join(handlers)}".strip())
        if tag == "script":
            self._script = dict(attrs).get("id") or ""
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def read_outline(html: str) -> Outline:
    outline = Outline()
    outline.feed(html)
    outline.close()
    return outline


def to_plain(value: Any) -> Any:
    """Return what the JSON of a page has for a value."""
    if isinstance(value, str):  # two surrogates that happen to be a pair are one character
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {to_plain(str(key)): to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list) else value


def build_payloads(_: Path) -> RunInput:
    from regard.pages.html import encode_record

    record = {
        "tokens": ["The", "cat"],
        "numbers": [1.5, 2],
        "heads": {"0": {"name": "a", "weights": [[0.5]]}},
    }

    def run(rng: Random) -> None:
        changed = change_json(rng, record)
        text = encode_record(changed)
        if not text.isascii() or any(char in text for char in "<>&"):
            raise UnexpectedResult(f"the record {changed!r} as {text!r}")
        if json.loads(text) != to_plain(changed):
            raise UnexpectedResult(f"the record {changed!r} came back otherwise")

    return run


def build_pages(_: Path) -> RunInput:
    from regard.pages.html import build_page

    expected = read_outline(build_page("a", "weights", {"tokens": ["b"]}).html)

    def run(rng: Random) -> None:
        tokens = [draw_string(rng) for _ in range(3)]
        title = draw_string(rng)
        page = build_page(title, "weights", {"tokens": tokens, "value": draw_value(rng)})
        repr(page)
        found = read_outline(page.html)
        if found.elements != expected.elements:
            raise UnexpectedResult(f"other elements with {title!r} and {tokens!r}")
        if json.loads(found.scripts["record"])["tokens"] != to_plain(tokens):
            raise UnexpectedResult(f"other tokens than {tokens!r}")
        if read_outline(page._repr_html_()).elements != ["iframe", "script"]:
            raise UnexpectedResult(f"a notebook shows more than a frame with {title!r}")
        page.html.encode()

    return run


def build_tokens(_: Path) -> RunInput:
    import regard
    from regard.render.text import escape_unprintable

    A = regard.attention(np.eye(3), np.eye(3), mask=regard.causal())

    def run(rng: Random) -> None:
        tokens = [draw_string(rng) for _ in range(3)]
        for token in tokens:
            shown = escape_unprintable(token)
            if not all(char.isprintable() for char in shown):
                raise UnexpectedResult(f"{token!r} is printed as {shown!r}")
            shown.encode()
        explanation = A.explain(rng.randrange(3), np.eye(3), tokens)
        text, html = str(explanation), explanation._repr_html_()
        if "\x1b" in text or "\0" in text:
            raise UnexpectedResult(f"a control character of {tokens!r} is printed")
        text.encode()
        html.encode()
        allowed = {"div", "p", "b", "strong", "table", "thead", "tbody", "tr", "th", "td", "span", "bdi"}
        others = set(read_outline(html).elements) - allowed
        if others:
            raise UnexpectedResult(f"the elements {others} with {tokens!r}")

    return run


TARGETS = (
    Target("payloads", 150, build_payloads),
    Target("pages", 8, build_pages),
    Target("tokens", 20, build_tokens),
)
