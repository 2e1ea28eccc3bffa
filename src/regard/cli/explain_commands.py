"""`regard explain` and `regard explore`: the built-in example, or matrices from a file. They need NumPy only."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from rich.text import Text

from regard.cli.files import read_matrices, select_head
from regard.cli.output import NUMBER_STYLE, Printer, style_text
from regard.cli.page_files import check_output, save_page
from regard.core.attention import attention
from regard.errors import ArgumentError
from regard.learn.examples import cat
from regard.masks import causal as causal_mask
from regard.render.text import escape_unprintable

# Tokens that an error lists.
MAX_TOKENS = 8
# The attributes of an explanation that --json prints.
FIELDS = (
    *("query", "key", "value", "scale", "score_mods", "masks", "raw_scores", "scaled_scores", "scores", "shift"),
    *("exponentials", "sink_exponential", "total", "weights", "contributions", "output"),
)  # fmt: skip


def explain(printer: Printer, file: Path | None, query: str, head: str | None, causal: bool) -> int:
    """Print the four steps of a query.

    Args:
        printer: Prints the result.
        file: JSON or NPZ file with the matrices; None for the built-in example.
        query: A position, or a token.
        head: Index into the leading axes, e.g. "0,3".
        causal: Apply a causal mask.

    Returns:
        The exit code.
    """
    inputs = _load_inputs(file, head, causal, "explain")
    A = attention(inputs["query"], inputs["key"], mask=inputs["mask"], scale=inputs["scale"])
    tokens = inputs["tokens"]
    explanation = A.explain(_find_query(query, tokens, A.shape), inputs["value"], tokens)
    printer.record(
        {"title": explanation.title, "tokens": list(explanation.key_tokens)}
        | {name: getattr(explanation, name) for name in FIELDS}
    )
    for line in str(explanation).split("\n"):
        printer.print(_style_line(line))
    return 0


def explore(
    printer: Printer, name: str, file: Path | None, output: Path, head: str | None, causal: bool, show: bool
) -> int:
    """Write one of the pages of `regard.explore`.

    Args:
        printer: Prints the result.
        name: Name of the explorer.
        file: JSON or NPZ file with the matrices; None for the built-in example.
        output: File to write.
        head: Index into the leading axes, e.g. "0,3".
        causal: Apply a causal mask.
        show: Open the page in a browser.

    Returns:
        The exit code.
    """
    check_output(output, "explore")
    from regard import explore

    explorer = getattr(explore, name)
    inputs: dict[str, Any] = {}
    if file is not None or causal or head is not None:
        loaded = _load_inputs(file, head, causal, "explore")
        inputs = {key: value for key, value in loaded.items() if value is not None}
    parameters = inspect.signature(explorer).parameters
    unsupported = [key for key in inputs if key not in parameters and key != "value"]
    if unsupported or (inputs and "query" not in parameters):
        accepted = ", ".join(parameters) if "query" in parameters else "no input but the built-in example"
        raise ArgumentError(
            "explore",
            received=f"{', '.join(unsupported)} for {name}",
            expected=f"input that this page shows: {accepted}",
            hint=f"Use regard.explore.{name} in Python." if name == "code" else "Omit it.",
        )
    page = explorer(**{key: value for key, value in inputs.items() if key in parameters})
    save_page(printer, page, output, show, {"explorer": name})
    return 0


def _load_inputs(file: Path | None, head: str | None, causal: bool, operation: str) -> dict[str, Any]:
    inputs: dict[str, Any]
    if file is None:
        inputs = {"query": cat.Q, "key": cat.K, "value": cat.V, "tokens": list(cat.tokens)}
        inputs |= {"mask": None, "scale": None}
    else:
        inputs = read_matrices(file, operation)
    inputs = select_head(inputs, head, operation)
    if causal:
        inputs["mask"] = causal_mask() if inputs["mask"] is None else inputs["mask"] & causal_mask()
    return inputs


def _find_query(query: str, tokens: list[str] | None, shape: tuple[int, ...]) -> int:
    """Return the position of a query, given as a position or as a token."""
    try:
        return int(query)
    except ValueError:
        positions = [i for i, token in enumerate(tokens or []) if token == query]
    if shape[0] != shape[1] or len(positions) != 1:
        problem = (
            f"which occurs at {', '.join(map(str, positions))}" if positions else "which is not a token here"
        )
        raise ArgumentError(
            "explain",
            received=f"--query {query}, {problem}",
            expected="the position of a query, or a token that occurs once",
            hint=f"Use a position (0–{shape[0] - 1}){_list_tokens(tokens)}.",
        )
    return positions[0]


def _list_tokens(tokens: list[str] | None) -> str:
    """List the first tokens, for the hint of an error."""
    if not tokens:
        return ""
    shown = [*tokens[:MAX_TOKENS], *(["…"] if len(tokens) > MAX_TOKENS else [])]
    return f" or one of: {', '.join(map(escape_unprintable, shown))}"


def _style_line(line: str) -> Text:
    """Style a line of the explanation: step titles bold, bars in colour, masked keys dim."""
    text = style_text(line)
    if line[:1].isdigit() or line.startswith("How "):
        text.stylize("bold")
    text.highlight_regex("█+", NUMBER_STYLE)
    text.highlight_regex(" masked$", "dim")
    return text
