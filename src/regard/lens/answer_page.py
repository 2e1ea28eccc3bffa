"""Collect the plain data of the page that `SpanMass.page` returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.lens.layer_spans import LayerSpans, mean_defined
from regard.lens.spans import GENERATED, OTHER
from regard.pages.answer_page import AnswerRow, build_answer_page
from regard.pages.html import Page
from regard.types import Array, IntArray

# Bytes of a number in the page: two, and a third more as text.
NUMBER_BYTES = 8 / 3


def build_page(
    layers: Sequence[LayerSpans],
    names: tuple[str, ...],
    positions: IntArray,
    prompt: int | None,
    labels: IntArray,
    tokens: Sequence[str],
    *,
    batch: int,
    title: str | None,
    max_bytes: int,
) -> Page:
    """Build the page.

    Args:
        layers: The masses of each layer.
        names: Names of the spans and of the rest.
        positions: Position of each token of the answer.
        prompt: Number of tokens of the prompt; None for one pass.
        labels: Index of the name of each token of the prompt.
        tokens: Texts of the whole sequence.
        batch: The batch entry.
        title: Title of the page; a default if None.
        max_bytes: If the numbers of all heads take more bytes, the page holds means.

    Returns:
        The page.
    """
    per_row = len(positions) * (len(names) + 1) * NUMBER_BYTES
    rows, masses, lookback, note = _reduce_rows(layers, batch, max_bytes / max(per_row, 1))
    first, last = int(positions[0]), int(positions[-1])
    return build_answer_page(
        title=title or "What the answer read",
        names=names,
        num_spans=sum(name not in (OTHER, GENERATED) for name in names),
        tokens=tokens[first : last + 1],
        first=first,
        prompt=prompt,
        prompt_tokens=tokens[: len(labels)],
        prompt_labels=labels,
        rows=rows,
        masses=masses,
        lookback=lookback,
        note=note,
    )


def _reduce_rows(
    layers: Sequence[LayerSpans], batch: int, max_rows: float
) -> tuple[list[AnswerRow], Array, Array, str]:
    """Return the masses of every head, of every layer if they are too many, or else their mean."""
    heads = [(layer, head) for layer in layers for head in range(layer.mass.shape[1])]
    if len(heads) <= max_rows:
        rows = [AnswerRow(layer.layer, head) for layer, head in heads]
        masses = np.concatenate([layer.mass[batch] for layer in layers])
        return rows, masses, np.concatenate([layer.lookback[batch] for layer in layers]), ""
    masses = np.stack([layer.mass[batch].mean(0) for layer in layers])
    lookback = np.stack([mean_defined(layer.lookback[batch], 0) for layer in layers])
    if len(layers) <= max_rows:
        rows = [AnswerRow(layer.layer, None) for layer in layers]
        note = f"Means over the heads of each layer; {len(heads):,} heads would not fit."
        return rows, masses, lookback, note
    note = f"Means over {len(layers):,} layers of {len(heads):,} heads, which would not fit."
    return [AnswerRow(None, None)], masses.mean(0)[None], mean_defined(lookback, 0)[None], note
