"""Exercise 7: split 512 columns into eight heads, and merge them."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.learn.exercises.answer_types import NumericAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart, Mistake
from regard.learn.heads import MultiHeadAttention

HEADS, WIDTH = 8, 512
X = np.arange(3 * WIDTH, dtype=np.float64).reshape(3, WIDTH)
SMALL, SMALL_HEADS = np.arange(5 * 12, dtype=np.float64).reshape(5, 12), 3


def solve_split_heads() -> dict[str, Any]:
    """Return the two functions."""

    def split(x: Any, num_heads: Any) -> Any:
        n, width = x.shape
        x = x.reshape(n, num_heads, width // num_heads)  # cut each row into heads, in order
        return x.swapaxes(0, 1)  # (num_heads, n, head_dim)

    def merge(split: Any) -> Any:
        num_heads, n, head_dim = split.shape
        split = split.swapaxes(0, 1)  # back to (n, num_heads, head_dim) first
        return split.reshape(n, num_heads * head_dim)

    return {"split": split, "merge": merge}


def _split(x: Any, num_heads: int) -> Any:
    return MultiHeadAttention(x.shape[-1], num_heads).split_heads(x)


def _list_mistakes() -> list[Mistake]:
    def cut(x: Any, h: int) -> Any:
        return x.reshape(len(x), h, -1)  # (n, num_heads, head_dim)

    return [
        Mistake(
            "You reshaped directly to (heads, n, head_dim): the shape is right, the numbers are not, because a reshape "
            "moves nothing in memory. Cut each row first, (n, heads, head_dim), then swap the axes.",
            {"split": lambda x, h: x.reshape(h, len(x), -1), "merge": lambda s: s.reshape(s.shape[1], -1)},
        ),
        Mistake(
            "The heads are still inside each row, (n, heads, head_dim): swap the first two axes.",
            {"split": cut},
        ),
        Mistake(
            "You interleaved the columns, every 8th to the same head. A head has consecutive columns: the first takes "
            "columns 0 to 63. Reshape to (n, heads, head_dim), in this order.",
            {
                "split": lambda x, h: x.reshape(len(x), -1, h).transpose(2, 0, 1),
                "merge": lambda s: s.transpose(1, 2, 0).reshape(s.shape[1], -1),
            },
        ),
        Mistake(
            "Heads and head_dim are swapped: 8 heads of 64, not 64 heads of 8.",
            {"split": lambda x, h: x.reshape(len(x), -1, h).swapaxes(0, 1)},
        ),
        Mistake(
            "The last two axes are swapped: give (heads, n, head_dim).",
            {"split": lambda x, h: cut(x, h).transpose(1, 2, 0)},
        ),
        Mistake("The heads are in reverse order.", {"split": lambda x, h: cut(x, h).swapaxes(0, 1)[::-1]}),
        Mistake(
            "That is one head only; give all eight.",
            {"split": lambda x, h: cut(x, h)[:, 0]},
        ),
        Mistake(
            "Every head has the whole row; each should have its own 64 columns.",
            {"split": lambda x, h: np.broadcast_to(x, (h, *x.shape))},
        ),
        Mistake(
            "The heads are stacked below each other; they belong side by side: (n, heads · head_dim).",
            {"merge": lambda s: s.reshape(-1, s.shape[-1])},
        ),
        Mistake("The heads are summed; they belong side by side.", {"merge": lambda s: s.sum(axis=0)}),
        Mistake("The heads are averaged; they belong side by side.", {"merge": lambda s: s.mean(axis=0)}),
        Mistake(
            "The heads are concatenated in the wrong order: head 0 comes first.",
            {"merge": lambda s: np.concatenate(list(s[::-1]), axis=-1)},
        ),
        Mistake(
            "The axes are swapped back, but the heads are still separate: reshape to (n, heads · head_dim).",
            {"merge": lambda s: s.swapaxes(0, 1)},
        ),
        Mistake("Nothing is merged yet.", {"merge": lambda s: s}),
    ]


def _explain() -> str:
    split = _split(X, HEADS)
    merged = MultiHeadAttention(WIDTH, HEADS).merge_heads(split)
    wrong = X.reshape(HEADS, len(X), -1)
    return (
        f"{X.shape} → cut each row: {(len(X), HEADS, WIDTH // HEADS)} → swap the first two axes: {split.shape}.\n"
        f"Head 1 of position 0 begins with x[0, {WIDTH // HEADS}] = {split[1, 0, 0]:.0f}.\n"
        f"A direct reshape to {wrong.shape} has the same shape, but its head 1 begins with "
        f"{wrong[1, 0, 0]:.0f}: position 0 alone fills the first heads.\n"
        f"To merge, swap the axes back, then join the last two. Equal to x: {np.array_equal(merged, X)}."
    )


CALLS = ((X, HEADS), (SMALL, SMALL_HEADS))

SPLIT_HEADS = Exercise(
    title="Exercise 7. Eight heads of 512",
    chapter=8,
    task="x = np.arange(3 * 512).reshape(3, 512): three positions of 512 numbers. Split it into eight heads of 64, "
    "each with its own consecutive columns, and merge the heads side by side. Functions are also tested with "
    "other sizes.",
    given={"x": X, "num_heads": HEADS},
    parts=(
        ExercisePart("split", "x split into its heads", NumericAnswer("(8, 3, 64)"), "x, num_heads", CALLS),
        ExercisePart(
            "merge",
            "the heads side by side again",
            NumericAnswer("(3, 512)"),
            "split",
            tuple((_split(*call),) for call in CALLS),
        ),
    ),
    solve=solve_split_heads,
    list_mistakes=_list_mistakes,
    explain=_explain,
)
