"""Collect the plain data of the page that `SpanMass.page` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.lens.span_mass import SpanMass, mean_defined
from regard.lens.spans import GENERATED, OTHER
from regard.pages.answer_page import AnswerRow, build_answer_page
from regard.pages.html import Page
from regard.types import Array

# Bytes of a number in the page: two, and a third more as text.
NUMBER_BYTES = 8 / 3


def build_page(
    mass: SpanMass, tokens: Sequence[Any], *, batch: int, title: str | None, max_bytes: int
) -> Page:
    """Build the page.

    Args:
        mass: The masses.
        tokens: Texts of the whole sequence.
        batch: The batch entry.
        title: Title of the page; a default if None.
        max_bytes: If the numbers of all heads take more bytes, the page holds means.

    Returns:
        The page.
    """
    texts = [str(token) for token in tokens]
    rows, masses, lookback, note = _reduce_rows(mass, batch, max_bytes)
    labels = mass.labels[batch if len(mass.labels) > 1 else 0]
    first, last = int(mass.positions[0]), int(mass.positions[-1])
    return build_answer_page(
        title=title or "What the answer read",
        names=mass.names,
        num_spans=sum(name not in (OTHER, GENERATED) for name in mass.names),
        tokens=texts[first : last + 1],
        first=first,
        prompt=mass.prompt,
        prompt_tokens=texts[: len(labels)],
        prompt_labels=labels,
        rows=rows,
        masses=masses,
        lookback=lookback,
        note=note,
    )


def _reduce_rows(mass: SpanMass, batch: int, max_bytes: int) -> tuple[list[AnswerRow], Array, Array, str]:
    """Return the masses of every head, of every layer if they are too many, or else their mean."""
    per_row = len(mass.positions) * (len(mass.names) + 1) * NUMBER_BYTES
    heads = [(layer, head) for layer in mass.layers for head in range(layer.mass.shape[1])]
    if len(heads) * per_row <= max_bytes:
        rows = [AnswerRow(layer.layer, head) for layer, head in heads]
        masses = np.concatenate([layer.mass[batch] for layer in mass.layers])
        return rows, masses, np.concatenate([layer.lookback[batch] for layer in mass.layers]), ""
    masses = np.stack([layer.mass[batch].mean(0) for layer in mass.layers])
    lookback = np.stack([mean_defined(layer.lookback[batch], 0) for layer in mass.layers])
    if len(mass.layers) * per_row <= max_bytes:
        rows = [AnswerRow(layer.layer, None) for layer in mass.layers]
        return (
            rows,
            masses,
            lookback,
            f"Means over the heads of each layer; {len(heads):,} heads would not fit.",
        )
    note = f"Means over {len(mass.layers):,} layers of {len(heads):,} heads, which would not fit."
    return [AnswerRow(None, None)], masses.mean(0)[None], mean_defined(lookback, 0)[None], note
