"""One row as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.core.matrix import AttentionMatrix
from regard.plot.axes import BLUE, LINE, LITERAL, SOFT, axes, check_axes, label, literal, named
from regard.plot.maps import check
from regard.render.text import format_number


def row(
    A: AttentionMatrix,
    q_idx: int,
    tokens: Sequence[str] | None = None,
    *,
    ax: Any = None,
    most: int = 24,
    **barh: Any,
) -> Any:
    """The weights of one query as bars, one for each key, from the first down; returns the Axes.

    Of a row longer than `most` its largest weights are drawn, still in the order of the keys, and what the others have
    together, in grey; a sink's share is grey too. Hidden keys say so. One row is computed, whatever the length: it
    is cheap. What else `Axes.barh` takes goes through to it.

    >>> import numpy as np, regard
    >>> ax = row(regard.attention(np.eye(2), np.eye(2), scale=1.0), 0, tokens=["a", "b"])
    >>> [f"{bar.get_width():.4f}" for bar in ax.patches]
    ['0.7311', '0.2689']
    """
    check_axes(ax, "plot.row")
    check(A, "plot.row")
    problem, kv_len = A._problem, A.shape[-1]
    at = A._asked_row("plot.row", q_idx)
    tokens_shown = named(tokens, kv_len, "plot.row", "tokens")
    with problem.engine.detached():
        weights, scores = (
            problem.engine.to_numpy(each[..., at, :]).reshape(kv_len).astype(float) for each in (A, A.scores)
        )
    keys = np.arange(kv_len)
    if kv_len > most:
        keys = np.sort(np.argsort(-np.nan_to_num(weights, nan=np.inf), kind="stable")[:most])
    names = [f"key {j}" if tokens_shown is None else tokens_shown[j] for j in keys]
    if len(keys) < kv_len and tokens_shown is not None:
        names = [f"{name}  {j:,}" for name, j in zip(names, keys, strict=True)]
    lengths, notes = weights[keys].tolist(), ["hidden" if scores[j] == -np.inf else "" for j in keys]
    if len(keys) < kv_len:
        names.append(f"({kv_len - len(keys):,} other keys)")
        lengths.append(float(np.delete(weights, keys).sum()))
    if problem.sink is not None:
        names.append("(sink)")
        lengths.append(max(0.0, 1.0 - float(weights.sum())))
    notes += [""] * (len(names) - len(notes))

    ax = axes(ax, 6.4, min(11.0, max(2.0, 0.24 * len(names) + 1)))
    colours = [BLUE] * len(keys) + [LINE] * (len(names) - len(keys))
    bars = ax.barh(range(len(names)), lengths, **{"color": colours, "height": 0.75} | barh)
    ax.bar_label(
        bars,
        [note or format_number(length) for note, length in zip(notes, lengths, strict=True)],
        padding=3,
        color=SOFT,
    )
    ax.set_ylim(len(names) - 0.5, -0.5)
    label(ax.yaxis, names, None, len(names))
    finite = [length for length in lengths if np.isfinite(length)]
    ax.set_xlim(0, 1.15 * max([*finite, 1e-12]))
    ax.set_xlabel("weight")
    place = int(problem.positions[at])
    own = "" if tokens is None or problem.frame.q_len != kv_len else f' "{literal(tokens[place])}"'
    ax.set_title(f"query {place}{own}", **LITERAL)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
