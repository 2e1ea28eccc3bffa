"""`regard explain` and `regard explore`: the example, or matrices from a file. NumPy is enough."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from rich.text import Text

from regard.cli.files import matrices, one_head
from regard.cli.output import NUMBER, Out, styled
from regard.core.attention import attention
from regard.errors import ArgumentError
from regard.learn.examples import cat
from regard.masks import causal as causal_mask
from regard.pages.html import Page
from regard.render.table import format_bytes

FIELDS = (
    *(
        "query",
        "key",
        "value",
        "scale",
        "score_mods",
        "masks",
        "raw_scores",
        "scaled_scores",
        "scores",
        "shift",
    ),
    *("exponentials", "sink_exponential", "total", "weights", "contributions", "output"),
)


def explain(out: Out, file: Path | None, query: str, head: str | None, causal: bool) -> int:
    """Print the four steps of a query."""
    given = _given(file, head, causal, "explain")
    A = attention(given["query"], given["key"], mask=given["mask"], scale=given["scale"])
    tokens = given["tokens"]
    steps = A.explain(_position(query, tokens, A.shape), given["value"], tokens)
    out.record(
        {"title": steps.title, "tokens": list(steps.key_tokens)}
        | {name: getattr(steps, name) for name in FIELDS}
    )
    for line in str(steps).split("\n"):
        out.say(_coloured(line))
    return 0


def explore(
    out: Out, name: str, file: Path | None, output: Path, head: str | None, causal: bool, show: bool
) -> int:
    """Write one of the explorers' pages."""
    check_place(output, "explore")
    from regard import explore

    explorer = getattr(explore, name)
    given: dict[str, Any] = {}
    if file is not None or causal or head is not None:
        given = {key: each for key, each in _given(file, head, causal, "explore").items() if each is not None}
    takes = inspect.signature(explorer).parameters
    refused = [key for key in given if key not in takes and key != "value"]
    if refused or (given and "query" not in takes):
        raise ArgumentError(
            "explore",
            received=f"{', '.join(refused)} for {name}",
            expected="what that page shows: "
            + (", ".join(takes) if "query" in takes else "the example alone"),
            hint=f"In Python regard.explore.{name} takes more." if name == "code" else "Leave it out.",
        )
    page = explorer(**{key: each for key, each in given.items() if key in takes})
    written(out, page, output, show, {"explorer": name})
    return 0


def check_place(output: Path, operation: str) -> None:
    """Refuse a place where no page can be written, before the work is done."""
    missing = not output.parent.is_dir()
    if missing or output.is_dir():
        raise ArgumentError(
            operation,
            received=f"-o {str(output)!r} ({'No such file or directory' if missing else 'Is a directory'})",
            expected="a file in a folder that is there",
            hint=f"Make the folder first: mkdir -p {output.parent}."
            if missing
            else f"Name the file too: -o {output / 'page.html'}.",
        )


def written(out: Out, page: Page, output: Path, show: bool, record: dict[str, Any]) -> None:
    """Save a page, say where it is, and open it if that was asked for."""
    page.save(output)
    bytes_written = output.stat().st_size
    out.record(record | {"title": page.title, "page": str(output), "bytes": bytes_written})
    out.say(styled((page.title, "bold"), f": {output}, ", (format_bytes(bytes_written), NUMBER)))
    if show:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())


def _given(file: Path | None, head: str | None, causal: bool, operation: str) -> dict[str, Any]:
    if file is None:
        given: dict[str, Any] = {"query": cat.Q, "key": cat.K, "value": cat.V, "tokens": list(cat.tokens)}
        given |= {"mask": None, "scale": None}
    else:
        given = matrices(file, operation)
    given = one_head(given, head, operation)
    if causal:
        given["mask"] = causal_mask() if given["mask"] is None else given["mask"] & causal_mask()
    return given


def _position(query: str, tokens: list[str] | None, shape: tuple[int, ...]) -> int:
    """The query that was asked for, by its position or by its token."""
    try:
        return int(query)
    except ValueError:
        found = [i for i, token in enumerate(tokens or []) if token == query]
    if shape[0] != shape[1] or len(found) != 1:
        raise ArgumentError(
            "explain",
            received=f"--query {query}, "
            + ("which names no query here" if not found else f"which stands at {', '.join(map(str, found))}"),
            expected="the position of a query, or a token that occurs once",
            hint=f"There are {shape[0]} queries; they count from 0.",
        )
    return found[0]


def _coloured(line: str) -> Text:
    """A line of the explanation: steps bold, bars in colour, what is hidden dim."""
    text = styled(line)
    if line[:1].isdigit() or line.startswith("How "):
        text.stylize("bold")
    text.highlight_regex("█+", NUMBER)
    text.highlight_regex(" hidden$", "dim")
    return text
