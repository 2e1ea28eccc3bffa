"""Exercise 6: causal and padding masks, and both together."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.learn.exercises.answer_types import Table
from regard.learn.exercises.exercise import Exercise, Mistake, Part
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.render.table import format_table

LENGTHS, MAX_LENGTH = (3, 5), 5
PADDED = (((3, 5), 5), ((1, 4, 2), 6))  # what functions are called with


def masks() -> dict[str, Any]:
    """The three masks as functions."""

    def causal(seq_len: Any) -> Any:
        position = np.arange(seq_len)
        return position[None, :] <= position[:, None]  # kv_idx <= q_idx

    def padding(lengths: Any, max_length: Any) -> Any:
        real = np.arange(max_length) < np.asarray(lengths)[:, None]  # (batch, max_length)
        return real[:, None, None, :]

    def both(lengths: Any, max_length: Any) -> Any:
        return causal(max_length) & padding(lengths, max_length)

    return {"causal": causal, "padding": padding, "both": both}


def _triangle(shift: int) -> Any:
    return lambda n: np.tri(n, k=shift, dtype=bool)


def _mistakes() -> list[Mistake]:
    causal, padding = create_causal_mask, create_padding_mask

    def real(lengths: Any, n: int) -> Any:
        return padding(lengths, n)[:, 0, 0]

    hidden = "True means attend: you marked what is to be hidden."
    return [
        Mistake(
            f"The masks are inverted. {hidden}",
            {
                "causal": lambda n: ~causal(n),
                "padding": lambda lengths, n: ~padding(lengths, n),
                "both": lambda lengths, n: ~causal(n) & ~padding(lengths, n),
            },
        ),
        Mistake(
            "That is the upper triangle: each query would see itself and the future. Rows are queries, and a key "
            "is seen where kv_idx <= q_idx.",
            {"causal": lambda n: causal(n).T, "both": lambda lengths, n: causal(n).T & padding(lengths, n)},
        ),
        Mistake(
            "The diagonal is missing: a token may see itself, and the first would see nothing at all.",
            {
                "causal": _triangle(-1),
                "both": lambda lengths, n: _triangle(-1)(n) & padding(lengths, n),
            },
        ),
        Mistake(
            "One diagonal too many: each token sees the next one, which it is to predict.",
            {"causal": _triangle(1), "both": lambda lengths, n: _triangle(1)(n) & padding(lengths, n)},
        ),
        Mistake("This hides nothing.", {"causal": lambda n: np.ones((n, n), bool)}),
        Mistake(
            "Only the diagonal: a token may see what came before it too.",
            {"causal": lambda n: np.eye(n, dtype=bool)},
        ),
        Mistake(
            "One key too many: with length 3 the real keys are 0, 1 and 2, so kv_idx < length.",
            {"padding": lambda lengths, n: np.arange(n) <= np.asarray(lengths)[:, None, None, None]},
        ),
        Mistake(
            "That hides keys on the left; the padding here follows the tokens.",
            {"padding": lambda lengths, n: padding(lengths, n)[..., ::-1]},
        ),
        Mistake(
            "The right rows, without the axes for heads and queries: real[:, None, None, :] makes them "
            "(batch, 1, 1, max_length).",
            {"padding": real},
        ),
        Mistake(
            "One axis of one is missing: (batch, 1, 1, max_length) has one for heads and one for queries.",
            {"padding": lambda lengths, n: real(lengths, n)[:, None, :]},
        ),
        Mistake(
            "That hides the padded queries. Keys are the last axis: real[:, None, None, :].",
            {"padding": lambda lengths, n: real(lengths, n)[:, None, :, None]},
        ),
        Mistake(
            "That is | (or): a key would be seen where either mask allows it. Both must: &.",
            {"both": lambda lengths, n: causal(n) | padding(lengths, n)},
        ),
        Mistake(
            "That is + and counts; both must hold: &.",
            {"both": lambda lengths, n: causal(n).astype(int) + padding(lengths, n)},
        ),
        Mistake(
            "That is ^, true where exactly one holds; both must: &.",
            {"both": lambda lengths, n: causal(n) ^ padding(lengths, n)},
        ),
        Mistake(
            "That is the causal mask alone: the padded keys are still seen.",
            {"both": lambda lengths, n: np.broadcast_to(causal(n), (len(lengths), 1, n, n))},
        ),
        Mistake(
            "That is the causal mask alone: the padded keys are still seen.", {"both": lambda _, n: causal(n)}
        ),
        Mistake(
            "That is the padding mask alone: the future is still seen.",
            {"both": lambda lengths, n: np.broadcast_to(padding(lengths, n), (len(lengths), 1, n, n))},
        ),
        Mistake("That is the padding mask alone: the future is still seen.", {"both": padding}),
        Mistake(
            "You hid the rows of padded queries. Hide keys, the last axis: a row that sees nothing needs care, and "
            "nobody reads what a padded query gets.",
            {"both": lambda lengths, n: causal(n) & real(lengths, n)[:, None, :, None]},
        ),
        Mistake(
            "The axis of heads is missing: (batch, 1, n, n). (batch, n, n) would be broadcast over the heads.",
            {"both": lambda lengths, n: (causal(n) & padding(lengths, n))[:, 0]},
        ),
    ]


def _explain() -> str:
    causal, padding = create_causal_mask(MAX_LENGTH), create_padding_mask(LENGTHS, MAX_LENGTH)
    both = causal & padding

    def marks(mask: Any) -> list[str]:
        return ["".join("■" if seen else "·" for seen in row) for row in mask]

    last = marks(np.broadcast_to(padding[0, 0], causal.shape))
    rows = [["causal", f"padding, length {LENGTHS[0]}", "both"]]
    rows += [list(row) for row in zip(marks(causal), last, marks(both[0, 0]), strict=True)]
    lines = format_table(rows, align="left").split("\n")
    return "\n".join(
        [
            "Rows are queries, columns keys, ■ is True: attend.",
            *lines,
            f"Shapes: causal {causal.shape}, padding {padding.shape}, both {both.shape}. The axes of one are repeated "
            "over heads and queries.",
            f"Every row of both still sees a key: {bool(both.any(axis=-1).all())}.",
        ]
    )


MASKS = Exercise(
    title="Exercise 6. Causal and padding masks",
    task="Write the two masks every language model needs, and combine them. True = attend; rows are queries, "
    "columns are keys. A batch of two sequences of 3 and 5 real tokens, filled up at the end to 5.",
    given={"lengths": LENGTHS, "max_length": MAX_LENGTH},
    parts=(
        Part(
            "causal",
            "each position sees itself and what came before",
            Table("(5, 5)"),
            "seq_len",
            ((MAX_LENGTH,), (3,)),
        ),
        Part("padding", "only real tokens are seen", Table("(2, 1, 1, 5)"), "lengths, max_length", PADDED),
        Part("both", "the two combined", Table("(2, 1, 5, 5)"), "lengths, max_length", PADDED),
    ),
    solve=masks,
    mistakes=_mistakes,
    explain=_explain,
)
