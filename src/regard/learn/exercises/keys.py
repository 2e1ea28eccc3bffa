"""Exercises 3 and 4: keys equal to queries, and keys at right angles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.learn.attention import scaled_dot_product_attention
from regard.learn.examples import three_tokens
from regard.learn.exercises.answer_types import ChoiceAnswer, NumericAnswer, TokenAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart, Mistake
from regard.learn.exercises.four_steps import softmax
from regard.learn.masks import create_causal_mask
from regard.render.text import format_number, format_vector

# -- 3. K = Q -----------------------------------------------------------------------------------------------

X = three_tokens.Q
LAST = len(X) - 1


def _compute_weights(Q: Any, mask: Any = None) -> Any:
    return scaled_dot_product_attention(Q, Q, Q, mask)[1]


# Each choice and the weights it leads to; a test computes which choice is right.
CHANGES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a": ("leave out the scale", lambda: _compute_weights(X * X.shape[-1] ** 0.25)),
    "b": (
        "give all vectors the same length",
        lambda: _compute_weights(X / np.linalg.norm(X, axis=-1, keepdims=True)),
    ),
    "c": ("add a causal mask", lambda: _compute_weights(X, create_causal_mask(len(X)))),
    "d": ("append more dimensions, filled with zeros", lambda: _compute_weights(np.pad(X, ((0, 0), (0, 8))))),
}


def solve_keys_equal_queries() -> dict[str, Any]:
    """Compare three tokens with themselves and each other."""
    Q = three_tokens.Q
    scores = Q @ Q.T / np.sqrt(Q.shape[-1])
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    most = weights.argmax(axis=-1)
    same_length = Q / np.linalg.norm(Q, axis=-1, keepdims=True)
    assert ((same_length @ same_length.T).argmax(axis=-1) == range(len(Q))).all()
    return {
        "itself": "yes" if (most == range(len(Q))).all() else "no",
        "most": most,
        "weights": weights[2],
        "change": "b",  # q·k ≤ |q||k|, which is |q|² = q·q if all lengths are equal
    }


def _list_equal_mistakes() -> list[Mistake]:
    raw = X @ X.T
    weights = _compute_weights(X)
    self_score, best_score = format_number(raw[LAST, LAST]), format_number(raw[LAST].max())
    reasons = {
        "a": "Scaling divides all scores of a row alike: it changes how sharp a row is, not which key wins.",
        "c": "The key that beats t2 is t1, which comes earlier: a causal mask does not mask it.",
        "d": "Zeros add nothing to a dot product; only the scale changes, for the whole row.",
    }
    return [
        Mistake(
            f"Look at row t2: with itself it scores {self_score}, with t1 {best_score}. A longer key can win.",
            {"itself": "yes", "most": np.arange(len(X))},
        ),
        Mistake(
            "You looked down the columns: which token attends most to each. Look for the largest weight of each row.",
            {"most": weights.argmax(axis=0)},
        ),
        Mistake(
            "That is the column of t2, or a softmax over columns: the weights of a query are a row that sums to 1 "
            "(axis=-1).",
            {"weights": weights[:, LAST]},
        ),
        Mistake("Those are the tokens attended to least.", {"most": weights.argmin(axis=-1)}),
        Mistake("The scale is missing: divide the scores by √d_k, here √4.", {"weights": softmax(raw[LAST])}),
        Mistake("You divided by d_k; divide by its square root.", {"weights": softmax(raw[LAST] / 4)}),
        Mistake(
            "You divided by the sum without taking exponentials first.",
            {"weights": raw[LAST] / raw[LAST].sum()},
        ),
        Mistake("These are scores: take their softmax.", {"weights": raw[LAST]}),
        Mistake("These are scores: take their softmax.", {"weights": raw[LAST] / 2}),
        *(
            Mistake(f"That is the row of t{i}; give the row of t2, the last.", {"weights": weights[i]})
            for i in range(LAST)
        ),
        Mistake("That is the whole table; give the row of t2, its last.", {"weights": weights}),
        *(Mistake(hint, {"change": letter}) for letter, hint in reasons.items()),
    ]


def _explain_equal() -> str:
    raw, weights = X @ X.T, _compute_weights(X)
    lengths = np.linalg.norm(X, axis=-1)
    lines = [
        "No. The weights, row by row:",
        *(f"  t{i}  {format_vector(row)}  attends most to t{row.argmax()}" for i, row in enumerate(weights)),
        f"t2 scores {format_number(raw[2, 2])} with itself and {format_number(raw[2, 1])} with t1, because a dot "
        f"product grows with the length of the key:",
        f"the lengths are {format_vector(lengths)}.",
        "If all lengths are equal, q·k ≤ |q||k| = q·q, so no key beats the token itself (b). The four changes:",
    ]
    for letter, (change, compute) in CHANGES.items():
        lines.append(
            f"  {letter}. {change}: each attends most to {['t' + str(j) for j in compute().argmax(axis=-1)]}"
        )
    return "\n".join(lines)


KEYS_EQUAL_QUERIES = Exercise(
    title="Exercise 3. Keys equal to queries",
    chapter=3,
    task="Let K = Q. Does every token attend most to itself? Work it out for these three (d_k = 4), then choose the "
    "change that makes it true for any vectors:\n"
    + "\n".join(f"{letter}. {change}" for letter, (change, _) in CHANGES.items()),
    given={"tokens": three_tokens.tokens, "Q = K": X},
    parts=(
        ExercisePart("itself", "does every token attend most to itself?", ChoiceAnswer(("yes", "no"))),
        ExercisePart(
            "most", "the token that each of the three attends to most", TokenAnswer(three_tokens.tokens)
        ),
        ExercisePart("weights", "the weights of t2", NumericAnswer("(3,)")),
        ExercisePart("change", "the letter of the change", ChoiceAnswer(tuple(CHANGES))),
    ),
    solve=solve_keys_equal_queries,
    list_mistakes=_list_equal_mistakes,
    explain=_explain_equal,
    imports="import numpy as np\nfrom regard.learn import three_tokens",
)

# -- 4. Orthogonal keys -------------------------------------------------------------------------------------

KEYS = np.eye(4)[:3] * 2
VALUES = np.array([[6.0, 0.0], [0.0, 6.0], [3.0, 3.0]])
ACROSS = np.array([0.0, 0.0, 0.0, 3.0])
SHARE = 0.99


def solve_orthogonal_keys() -> dict[str, Any]:
    """Attend to three orthogonal keys."""
    K = 2 * np.eye(4)[:3]
    V = np.array([[6, 0], [0, 6], [3, 3]])

    def weights(query: Any) -> Any:
        scaled = K @ query / np.sqrt(4)
        return np.exp(scaled) / np.exp(scaled).sum()

    # The weight is e^s / (e^s + 2) for s = L²/√4; so e^s = 2 · 0.99 / 0.01, and L² = √4 · s.
    length = np.sqrt(np.sqrt(4) * np.log(2 * 0.99 / 0.01))
    return {
        "weights": weights(K[1]),
        "output": weights(K[1]) @ V,
        "across": weights(np.array([0, 0, 0, 3])),
        "length": length,
    }


def _list_orthogonal_mistakes() -> list[Mistake]:
    raw = KEYS @ KEYS[1]
    weights = softmax(raw / 2)
    odds = 2 * SHARE / (1 - SHARE)

    def make(hint: str, wrong: Any, **more: Any) -> Mistake:
        """Make a mistake in the weights that carries over to the output."""
        return Mistake(hint, {"weights": wrong, "output": wrong @ VALUES, **more})

    return [
        make(
            "The scale is missing: divide the scores by √d_k, here √4.",
            softmax(raw), length=math.sqrt(math.log(odds)),
        ),
        make(
            "You divided by d_k; divide by its square root, √4 = 2.",
            softmax(raw / 4), length=math.sqrt(4 * math.log(odds)),
        ),
        make(
            "Keys at right angles score 0, and exp(0) is 1, not 0: each still gets a share.",
            np.array([0.0, 1.0, 0.0]), across=np.zeros(3),
        ),
        make("These are the scores: take their softmax.", raw),
        make("These are the scaled scores: take their softmax.", raw / 2),
        make("These are the exponentials; divide them by their sum.", np.exp(raw / 2), across=np.ones(3)),
        make(
            "That counts four keys. The vectors have four numbers, but there are three keys.",
            np.exp(raw / 2) / (np.exp(raw / 2).sum() + 1), across=np.full(3, 1 / 4),
            length=math.sqrt(2 * math.log(3 * SHARE / (1 - SHARE))),
        ),
        make("The query is the second key, so its own score is the largest: look at K @ query.", np.full(3, 1 / 3)),
        *(
            make(f"That is for key {i} as the query; the query is key 1, the second.", softmax(KEYS @ KEYS[i] / 2))
            for i in (0, 2)
        ),
        Mistake("These are the weights; the output is weights @ V.", {"output": weights}),
        Mistake("You mixed the keys; apply the weights to the values, V.", {"output": weights @ KEYS}),
        Mistake("That is the plain mean of the values: use the weights.", {"output": VALUES.mean(axis=0)}),
        Mistake(
            "It cannot prefer one key: a query at right angles to all of them scores 0 with each.",
            {"across": weights},
        ),
        *(
            Mistake(
                "It cannot prefer one key: a query at right angles to all of them scores 0 with each.",
                {"across": np.eye(3)[i]},
            )
            for i in range(3)
        ),
        Mistake("A softmax of three equal scores is defined: exp(0) is 1.", {"across": np.full(3, np.nan)}),
        Mistake("That is L²; take its root.", {"length": 2 * math.log(odds)}),
        Mistake("That is the scaled score L²/√4; solve for L.", {"length": math.log(odds)}),
        Mistake(
            "You counted one other key; there are two, each with exp(0) = 1.",
            {"length": math.sqrt(2 * math.log(odds / 2))},
        ),
        Mistake(
            "You used the logarithm to base 10; the inverse of exp is the natural logarithm.",
            {"length": math.sqrt(2 * math.log10(odds))},
        ),
        Mistake(
            "You used the logarithm to base 2; the inverse of exp is the natural logarithm.",
            {"length": math.sqrt(2 * math.log2(odds))},
        ),
        Mistake(
            "The scale is on the wrong side: L² / √4 = s, so L² = √4 · s.",
            {"length": math.sqrt(math.log(odds) / 2)},
        ),
    ]  # fmt: skip


def _explain_orthogonal() -> str:
    answer, raw = solve_orthogonal_keys(), KEYS @ KEYS[1]
    length = answer["length"]
    grown = softmax(np.array([0.0, length**2 / 2, 0.0]))
    return (
        f"The query is the second key: its scores are {format_vector(raw)}, scaled {format_vector(raw / 2)}.\n"
        f"At right angles a score is 0, and exp(0) = 1, so the other keys still get a share: "
        f"{format_vector(answer['weights'])}.\n"
        f"The output is {format_vector(answer['output'])}.\n"
        f"A query at right angles to every key scores 0 with each: {format_vector(answer['across'])}. It matches "
        "no key, and still gets the mean of the values.\n"
        f"For a share of {SHARE}: e^s / (e^s + 2) = {SHARE}, so s = ln(2 · {SHARE} / {format_number(1 - SHARE)}) = "
        f"{format_number(length**2 / 2)}, and L = √(√4 · s) = {format_number(length)}.\n"
        f"Check: with that length the weights are {format_vector(grown)}."
    )


ORTHOGONAL_KEYS = Exercise(
    title="Exercise 4. Keys at right angles",
    chapter=6,
    task="Three keys of length 2, each at right angles to the others; d_k = 4. What are the weights?",
    given={"K": KEYS, "V": VALUES, "query": KEYS[1], "across": ACROSS},
    parts=(
        ExercisePart("weights", "the weights of the query, which equals the second key", NumericAnswer("(3,)")),
        ExercisePart("output", "its output", NumericAnswer("(2,)", atol=6e-3)),
        ExercisePart(
            "across", "the weights of the query called across, at right angles to all keys", NumericAnswer("(3,)")
        ),
        ExercisePart(
            "length",
            f"let the query equal the second key, and all keys have length L: the L at which that key gets a "
            f"weight of {SHARE}",
            NumericAnswer(rtol=2e-3),
        ),
    ),
    solve=solve_orthogonal_keys,
    list_mistakes=_list_orthogonal_mistakes,
    explain=_explain_orthogonal,
)  # fmt: skip
