"""Exercise 6: causal and padding masks, and both together."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.learn.exercises.answer_types import MaskAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart, Mistake
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.render.table import format_table

LENGTHS, MAX_LENGTH = (3, 5), 5
CALLS = (((3, 5), 5), ((1, 4, 2), 6))  # (lengths, max_length) of each call


def solve_masks() -> dict[str, Any]:
    """Return the three masks as functions."""

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


def _list_mistakes() -> list[Mistake]:
    causal, padding = create_causal_mask, create_padding_mask

    def real(lengths: Any, n: int) -> Any:
        return padding(lengths, n)[:, 0, 0]

    return [
        Mistake(
            "The masks are inverted. True means attend: you marked the masked keys.",
            {
                "causal": lambda n: ~causal(n),
                "padding": lambda lengths, n: ~padding(lengths, n),
                "both": lambda lengths, n: ~causal(n) & ~padding(lengths, n),
            },
        ),
        Mistake(
            "That is the upper triangle: each query would attend to itself and the future. Rows are queries, and a "
            "query attends to a key if kv_idx <= q_idx.",
            {"causal": lambda n: causal(n).T, "both": lambda lengths, n: causal(n).T & padding(lengths, n)},
        ),
        Mistake(
            "The diagonal is missing: a token may attend to itself, and the first would have no key at all.",
            {
                "causal": _triangle(-1),
                "both": lambda lengths, n: _triangle(-1)(n) & padding(lengths, n),
            },
        ),
        Mistake(
            "One diagonal too many: each token attends to the next one, which it has to predict.",
            {"causal": _triangle(1), "both": lambda lengths, n: _triangle(1)(n) & padding(lengths, n)},
        ),
        Mistake("This masks nothing.", {"causal": lambda n: np.ones((n, n), bool)}),
        Mistake(
            "Only the diagonal: a token may attend to earlier tokens too.",
            {"causal": lambda n: np.eye(n, dtype=bool)},
        ),
        Mistake(
            "One key too many: with length 3 the real keys are 0, 1 and 2, so kv_idx < length.",
            {"padding": lambda lengths, n: np.arange(n) <= np.asarray(lengths)[:, None, None, None]},
        ),
        Mistake(
            "That masks keys on the left; here the padding follows the tokens.",
            {"padding": lambda lengths, n: padding(lengths, n)[..., ::-1]},
        ),
        Mistake(
            "The right rows, without the axes for heads and queries: real[:, None, None, :] makes them "
            "(batch, 1, 1, max_length).",
            {"padding": real},
        ),
        Mistake(
            "An axis of length one is missing: (batch, 1, 1, max_length) has one for heads and one for queries.",
            {"padding": lambda lengths, n: real(lengths, n)[:, None, :]},
        ),
        Mistake(
            "That masks the padded queries. Keys are the last axis: real[:, None, None, :].",
            {"padding": lambda lengths, n: real(lengths, n)[:, None, :, None]},
        ),
        Mistake(
            "That is | (or): a key would be attended to if either mask allows it. Both must allow it: &.",
            {"both": lambda lengths, n: causal(n) | padding(lengths, n)},
        ),
        Mistake(
            "That is +, which counts; both must allow the key: &.",
            {"both": lambda lengths, n: causal(n).astype(int) + padding(lengths, n)},
        ),
        Mistake(
            "That is ^, true if exactly one mask allows the key; both must allow it: &.",
            {"both": lambda lengths, n: causal(n) ^ padding(lengths, n)},
        ),
        Mistake(
            "That is the causal mask alone: the padded keys are still attended to.",
            {"both": lambda lengths, n: np.broadcast_to(causal(n), (len(lengths), 1, n, n))},
        ),
        Mistake(
            "That is the causal mask alone: the padded keys are still attended to.",
            {"both": lambda _, n: causal(n)},
        ),
        Mistake(
            "That is the padding mask alone: the future is still attended to.",
            {"both": lambda lengths, n: np.broadcast_to(padding(lengths, n), (len(lengths), 1, n, n))},
        ),
        Mistake("That is the padding mask alone: the future is still attended to.", {"both": padding}),
        Mistake(
            "You masked the rows of padded queries. Mask keys, the last axis: a fully masked row needs care, and the "
            "output of a padded query is not used.",
            {"both": lambda lengths, n: causal(n) & real(lengths, n)[:, None, :, None]},
        ),
        Mistake(
            "The axis of heads is missing: (batch, 1, n, n). In (batch, n, n) the batch is aligned with heads.",
            {"both": lambda lengths, n: (causal(n) & padding(lengths, n))[:, 0]},
        ),
    ]


def _explain() -> str:
    causal, padding = create_causal_mask(MAX_LENGTH), create_padding_mask(LENGTHS, MAX_LENGTH)
    both = causal & padding

    def draw(mask: Any) -> list[str]:
        return ["".join("■" if attend else "·" for attend in row) for row in mask]

    last = draw(np.broadcast_to(padding[0, 0], causal.shape))
    rows = [["causal", f"padding, length {LENGTHS[0]}", "both"]]
    rows += [list(row) for row in zip(draw(causal), last, draw(both[0, 0]), strict=True)]
    lines = format_table(rows, align="left").split("\n")
    return "\n".join(
        [
            "Rows are queries, columns are keys; ■ is True: attend.",
            *lines,
            f"Shapes: causal {causal.shape}, padding {padding.shape}, both {both.shape}. The axes of length one "
            "broadcast over heads and queries.",
            f"Every row of both still has a key: {bool(both.any(axis=-1).all())}.",
        ]
    )


MASKS = Exercise(
    title="Exercise 6. Causal and padding masks",
    chapter=7,
    task="Write the two masks every language model needs, and combine them. True = attend; rows are queries, "
    "columns are keys. The batch has two sequences of 3 and 5 real tokens, padded at the end to 5.",
    given={"lengths": LENGTHS, "max_length": MAX_LENGTH},
    parts=(
        ExercisePart(
            "causal",
            "each position attends to itself and earlier positions",
            MaskAnswer("(5, 5)"),
            "seq_len",
            ((MAX_LENGTH,), (3,)),
        ),
        ExercisePart(
            "padding",
            "only real tokens are attended to",
            MaskAnswer("(2, 1, 1, 5)"),
            "lengths, max_length",
            CALLS,
        ),
        ExercisePart("both", "the two combined", MaskAnswer("(2, 1, 5, 5)"), "lengths, max_length", CALLS),
    ),
    solve=solve_masks,
    list_mistakes=_list_mistakes,
    explain=_explain,
)
