"""One row of weights as a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.core.arguments import resolve_row
from regard.core.matrix import AttentionMatrix
from regard.plot.axes import (
    BLUE,
    LINE,
    LITERAL,
    SOFT,
    check_axes,
    ensure_axes,
    format_label,
    format_labels,
    label_axis,
)
from regard.plot.maps import check_one_head
from regard.render.text import format_number


def row(
    A: AttentionMatrix,
    q_idx: int,
    tokens: Sequence[str] | None = None,
    *,
    ax: Any = None,
    max_bars: int = 24,
    **barh: Any,
) -> Any:
    """Draw the weights of one query as bars, one for each key, the first key at the top.

    If the row is longer than `max_bars`, its largest weights are drawn in the order of the keys, and a grey bar shows
    the sum of the others. The weight of a sink is grey too. Masked keys are labelled. Only this row is computed.

    Args:
        A: Matrix of one head, `(q_len, kv_len)`.
        q_idx: Index of the query. Negative indices count from the end.
        tokens: Labels of the keys, `kv_len` strings. Default: positions.
        ax: Axes to draw on. Default: a new figure.
        max_bars: Number of keys to draw.
        **barh: Arguments of `Axes.barh`.

    Returns:
        The Axes.

    Raises:
        ArgumentError: If the matrix has several heads or is empty, or if there are not `kv_len` tokens.
        ArgumentTypeError: If an argument has the wrong type.
        IndexOutOfRangeError: If there is no query `q_idx`.

    >>> import numpy as np, regard
    >>> ax = row(regard.attention(np.eye(2), np.eye(2), scale=1.0), 0, tokens=["a", "b"])
    >>> [f"{bar.get_width():.4f}" for bar in ax.patches]
    ['0.7311', '0.2689']
    """
    check_axes(ax, "plot.row")
    check_one_head(A, "plot.row")
    problem, kv_len = A.problem, A.shape[-1]
    at = resolve_row(A.shape, "plot.row", q_idx)
    labels = format_labels(tokens, kv_len, "plot.row", "tokens")
    with problem.engine.no_grad():
        weights, scores = (
            problem.engine.to_numpy(matrix[..., at, :]).reshape(kv_len).astype(float)
            for matrix in (A, A.scores)
        )
    keys = np.arange(kv_len)
    if kv_len > max_bars:
        keys = np.sort(np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")[:max_bars])
    names = [f"key {j}" if labels is None else labels[j] for j in keys]
    if len(keys) < kv_len and labels is not None:
        names = [f"{name}  {j:,}" for name, j in zip(names, keys, strict=True)]
    lengths, notes = weights[keys].tolist(), ["masked" if scores[j] == -np.inf else "" for j in keys]
    if len(keys) < kv_len:
        names.append(f"({kv_len - len(keys):,} other keys)")
        lengths.append(float(np.delete(weights, keys).sum()))
    if problem.sink is not None:
        names.append("(sink)")
        lengths.append(max(0.0, 1.0 - float(weights.sum())))
    notes += [""] * (len(names) - len(notes))

    ax = ensure_axes(ax, 6.4, min(11.0, max(2.0, 0.24 * len(names) + 1)))
    colours = [BLUE] * len(keys) + [LINE] * (len(names) - len(keys))
    bars = ax.barh(range(len(names)), lengths, **{"color": colours, "height": 0.75} | barh)
    ax.bar_label(
        bars,
        [note or format_number(length) for note, length in zip(notes, lengths, strict=True)],
        padding=3,
        color=SOFT,
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    label_axis(ax.yaxis, names, None, len(names))
    finite = [length for length in lengths if np.isfinite(length)]
    ax.set_xlim(0, 1.15 * max([*finite, 1e-12]))
    ax.set_xlabel("weight")
    position = int(problem.positions[at])
    is_self_attention = problem.frame.q_len == kv_len
    token = f' "{format_label(tokens[position])}"' if tokens is not None and is_self_attention else ""
    ax.set_title(f"query {position}{token}", **LITERAL)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
