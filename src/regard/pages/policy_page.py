"""Build the page of a verified cache policy: the verdict, every head, the tests and the worst documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard.pages.html import Page, build_page
from regard.pages.report_page import shorten
from regard.render.text import escape_unprintable


def build_policy_page(
    *,
    title: str,
    verdict: str,
    holds: bool,
    facts: Sequence[tuple[str, str]],
    heads: Sequence[Mapping[str, Any]],
    measures: Sequence[tuple[str, str]],
    documents: Sequence[Mapping[str, Any]],
) -> Page:
    """Build the page from plain data.

    Args:
        title: Title of the page.
        verdict: The result as a sentence.
        holds: Whether the policy holds.
        facts: Names and values, as text.
        heads: module, layer and head of each head, and one number for each measure, None if it is undefined.
        measures: Names of the numbers, each with its meaning.
        documents: document, name, tokens, kl, agreement, loss and policy_loss of the worst documents.

    Returns:
        The page.
    """
    modules = {int(row["layer"]): str(row["module"]) for row in heads}
    record = {
        "title": escape_unprintable(title),
        "verdict": escape_unprintable(verdict),
        "holds": holds,
        "facts": [[escape_unprintable(name), escape_unprintable(value)] for name, value in facts],
        "modules": [escape_unprintable(modules.get(layer, "")) for layer in range(max(modules) + 1)],
        "layers": [int(row["layer"]) for row in heads],
        "heads": [int(row["head"]) for row in heads],
        "measures": [
            {"name": name, "caption": caption, "means": [row[name] for row in heads]}
            for name, caption in measures
        ],
        "documents": [
            [
                shorten(str(row["name"] or row["document"])),
                int(row["tokens"]),
                *(float(row[name]) for name in ("kl", "agreement", "loss", "policy_loss")),
            ]
            for row in documents
        ],
    }
    return build_page(escape_unprintable(title), "policyPage", record)
