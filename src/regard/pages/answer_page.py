"""Build the page of an answer: its tokens, coloured by the part of the prompt that got most of their attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from regard.pages.encoding import encode_array
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable
from regard.types import Array, IntArray


class AnswerRow(NamedTuple):
    """Which head a row of the masses belongs to; None for a mean over heads or layers."""

    layer: int | None
    head: int | None


def build_answer_page(
    *,
    title: str,
    names: Sequence[str],
    num_spans: int,
    tokens: Sequence[str],
    first: int,
    prompt: int | None,
    prompt_tokens: Sequence[str],
    prompt_labels: IntArray,
    rows: Sequence[AnswerRow],
    masses: Array,
    lookback: Array,
    note: str = "",
) -> Page:
    """Build the page from plain data.

    Args:
        title: Title of the page.
        names: Names of the spans, then of the rest of the prompt and of the generated tokens.
        num_spans: How many of the names are spans.
        tokens: Texts of the tokens of the answer.
        first: Position of the first of them.
        prompt: Number of tokens of the prompt; None if there is none, and the tokens are all tokens of a text.
        prompt_tokens: Texts of the prompt.
        prompt_labels: Index of the name of each of them, −1 for padding.
        rows: The head of each row of the masses.
        masses: (rows, tokens, names).
        lookback: Lookback ratio, (rows, tokens).
        note: What the page leaves out, if anything.

    Returns:
        The page.
    """
    runs = [
        {"name": int(label), "text": join_tokens([escape_token(prompt_tokens[i]) for i in run])}
        for label, run in groupby(range(len(prompt_labels)), key=lambda i: prompt_labels[i])
    ]
    record = {
        "title": escape_unprintable(title),
        "names": [escape_unprintable(name) for name in names],
        "spans": num_spans,
        "tokens": [escape_token(token) for token in tokens],
        "first": first,
        "prompt": prompt,
        "runs": runs,
        "rows": [row._asdict() for row in rows],
        "masses": encode_array(masses.astype(np.float16), early=True),
        "lookback": encode_array(lookback.astype(np.float16), early=True),
        "note": note,
    }
    return build_page(escape_unprintable(title), "answerPage", record)


def escape_token(token: object) -> str:
    """Return the text of a token on one line; one that is empty is shown as a dot."""
    return escape_unprintable(str(token)) or "·"


def join_tokens(tokens: Sequence[str]) -> str:
    """Join tokens as running text; a mark of a word start, or its absence before ##, sets the spaces.

    >>> join_tokens(["Ġthe", "Ġcat", "s"]), join_tokens(["the", "cat", "##s"])
    (' the cats', 'the cats')
    """
    if any(token.startswith(("Ġ", "▁")) for token in tokens):
        return "".join(f" {token[1:]}" if token[0] in "Ġ▁" else token for token in tokens)
    if any(token.startswith(" ") for token in tokens):
        return "".join(tokens)
    words = (token[2:] if token.startswith("##") else f" {token}" for token in tokens)
    return "".join(words).removeprefix(" ")
