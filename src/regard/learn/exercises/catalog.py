"""The eight exercises in the order of the book: each is a task, a solution, the known mistakes and an explanation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from regard.core.attention import attention as build_matrix
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.block import NumpyMultiHeadAttention
from regard.learn.checked import scaled_dot_product_attention
from regard.learn.examples import cat, three_tokens
from regard.learn.exercises.exercise import (
    AttentionFunctionAnswer,
    ChoiceAnswer,
    Exercise,
    ExercisePart,
    MaskAnswer,
    Mistake,
    NumericAnswer,
    TokenAnswer,
    make_mistakes,
)
from regard.learn.masks import create_causal_mask, create_padding_mask
from regard.learn.softmax_alternatives import softmax
from regard.render.table import format_table
from regard.render.text import format_number, format_vector
from regard.validation import check_count

# -- 1. All four steps --------------------------------------------------------------------------------------

D_K = cat.Q.shape[-1]
SAT = cat.tokens.index("sat")


def solve_four_steps() -> dict[str, Any]:
    """Compute the row of "sat" step by step."""
    scores = cat.K @ cat.Q[2]  # 1. compare: the query of "sat" with every key
    scaled = scores / np.sqrt(4)  # 2. scale: d_k is 4
    exponentials = np.exp(scaled)
    weights = exponentials / exponentials.sum()  # 3. normalise
    output = weights @ cat.V  # 4. aggregate
    return {"scores": scores, "scaled": scaled, "weights": weights, "output": output}


Transform = Callable[[Any], Any]


def _score_row(i: int, _: Any) -> Any:
    return cat.K @ cat.Q[i]


def _list_step_mistakes() -> Iterator[Mistake]:
    table = cat.Q @ cat.K.T / np.sqrt(D_K)
    by_column = (np.exp(table) / np.exp(table).sum(axis=0))[SAT]
    causal = np.where(np.arange(len(cat.tokens)) <= SAT, table[SAT], -np.inf)
    right: dict[str, Transform] = {
        "scores": lambda query: cat.K @ query,
        "scaled": lambda scores: scores / np.sqrt(D_K),
        "weights": softmax,
        "output": lambda weights: weights @ cat.V,
    }
    wrong: dict[str, dict[str, Transform]] = {
        "scaled": {
            "The scale is missing: divide the scores by √d_k, here √4.": lambda s: s,
            "You divided by d_k; divide by its square root, √4 = 2.": lambda s: s / D_K,
            "You multiplied by √d_k; divide by it.": lambda s: s * np.sqrt(D_K),
            "You divided by the square root of the number of tokens; d_k is the length of a key, 4.": (
                lambda s: s / np.sqrt(len(s))
            ),
        },
        "scores": {
            'That is the column of "sat": every query against its key. You need its row: its query, Q[2], '
            "against every key.": lambda _: cat.Q @ cat.K[SAT],
            **{
                f'These are the numbers of "{token}"; "sat" is row {SAT} of Q.': partial(_score_row, i)
                for i, token in enumerate(cat.tokens)
                if i != SAT
            },
            "You compared the query with the values. Compare it with the keys; the values come in step 4.": (
                lambda query: cat.V @ query
            ),
            "You compared queries with queries: use K.": lambda query: cat.Q @ query,
            "These scores are already scaled: step 1 is the plain dot product.": lambda _: table[SAT],
        },
        "weights": {
            "That is the softmax of the scores before scaling: the scale is missing.": lambda s: softmax(
                s * 2
            ),
            "You divided by the sum without taking exponentials first: softmax is exp(score) / Σ exp(score).": (
                lambda s: s / s.sum()
            ),
            "These are the exponentials; divide them by their sum.": np.exp,
            "These are the exponentials after subtracting the maximum; divide them by their sum.": (
                lambda s: np.exp(s - s.max())
            ),
            "The softmax ran over columns: each row, one query over all keys, must sum to 1 (axis=-1).": (
                lambda _: by_column
            ),
            "You applied a causal mask; here every token attends to all five.": lambda _: softmax(causal),
            "All the weight went to the largest score: softmax is soft, every key gets a share.": (
                lambda s: np.eye(len(s))[s.argmax()]
            ),
        },
        "output": {
            "These are the weights; the output is weights @ V.": lambda w: w,
            'The value of "mat" is missing: its entries of 0.5 count too, times its weight.': (
                lambda w: w[:-1] @ cat.V[:-1]
            ),
            "You mixed the keys; apply the weights to the values, V.": lambda w: w @ cat.K,
            "You mixed the queries; apply the weights to the values, V.": lambda w: w @ cat.Q,
            "That is the plain mean of the values: use the weights.": lambda _: cat.V.mean(axis=0),
            "That is the plain sum of the values: use the weights.": lambda _: cat.V.sum(axis=0),
            "That is the value of one token alone; the output mixes all five by their weights.": (
                lambda w: cat.V[w.argmax()]
            ),
            "This output comes from the weights without scaling.": lambda _: (
                softmax(cat.K @ cat.Q[SAT]) @ cat.V
            ),
        },
    }
    for step, replacements in wrong.items():
        for hint, replacement in replacements.items():
            result: Any = cat.Q[SAT]
            answer: dict[str, Any] = {}
            for name, compute in right.items():
                result = (replacement if name == step else compute)(result)
                if name == step or answer:  # a mistake changes this part and the later ones
                    answer[name] = result
            yield Mistake(hint, answer)
    rows = {"scores": cat.Q @ cat.K.T, "scaled": table, "weights": softmax(table)}
    hint = 'That is the whole table, all five queries; give the row of "sat" only.'
    yield Mistake(hint, {**rows, "output": softmax(table) @ cat.V})


FOUR_STEPS = Exercise(
    title='Exercise 1. All four steps for "sat"',
    chapter=4,
    task='Work out the row of "sat" by hand: compare its query with every key, scale by √d_k with d_k = 4, '
    "normalise by softmax, and mix the values. Three digits are enough. There is no mask: every token attends to "
    "all five.",
    given={"tokens": cat.tokens, "Q": cat.Q, "K": cat.K, "V": cat.V},
    parts=(
        ExercisePart(
            "scores", 'the dot products of the query of "sat" with the five keys', NumericAnswer("(5,)")
        ),
        ExercisePart("scaled", "the scores after scaling", NumericAnswer("(5,)")),
        ExercisePart("weights", "the softmax of the scaled scores", NumericAnswer("(5,)")),
        ExercisePart("output", "the values mixed by the weights", NumericAnswer("(4,)")),
    ),
    solve=solve_four_steps,
    list_mistakes=_list_step_mistakes,
    explain=lambda: str(build_matrix(cat.Q, cat.K).explain(SAT, value=cat.V, tokens=cat.tokens)),
    imports="import numpy as np\nfrom regard.learn import cat",
)


# -- 2. Without scaling -------------------------------------------------------------------------------------

WIDE = 512
ROUNDED = "Keep more digits of the spread: the exponential amplifies the rounding error."


def solve_without_scaling() -> dict[str, Any]:
    """Compute the row of "The", and the spread at d_k = 512."""
    scores = cat.K @ cat.Q[0]  # the query of "The"
    weights = np.exp(scores) / np.exp(scores).sum()
    scaled = np.exp(scores / np.sqrt(4)) / np.exp(scores / np.sqrt(4)).sum()
    spread = np.sqrt(512)  # a sum of 512 products, each of variance 1, has variance 512
    return {
        "weights": weights,
        "sharper": weights.max() / scaled.max(),
        "spread": spread,
        "ratio": np.exp(spread),  # exp(a) / exp(b) = exp(a − b)
    }


def _list_unscaled_mistakes() -> list[Mistake]:
    scores = cat.K @ cat.Q[0]
    plain, scaled = softmax(scores), softmax(scores / 2)
    largest, usual, spread = plain.max(), scaled.max(), math.sqrt(WIDE)
    in_one_part = {
        "weights": {
            "You multiplied by √d_k; without scaling the scores stay as they are.": softmax(scores * 2),
            "These are the scores: take their softmax.": scores,
            "You divided by the sum without taking exponentials first: softmax is exp(score) / Σ exp(score).": (
                scores / scores.sum()
            ),
            "These are the exponentials; divide them by their sum.": np.exp(scores),
            "That is the column: every query against the key of the token. Use its query against every key.": (
                softmax(cat.Q @ cat.K[0])
            ),
            **{
                f'These are the weights of "{token}"; "The" is row 0.': softmax(cat.K @ query)
                for token, query in zip(cat.tokens[1:], cat.Q[1:], strict=True)
            },
        },
        "sharper": {
            "The ratio is inverted: divide the largest weight without scaling by the one with scaling.": (
                usual / largest
            ),
            "That is the difference of the two; give the ratio, how many times larger it is.": largest
            - usual,
            "That is the relative increase; how many times larger is one more.": largest / usual - 1,
            "Those are the smallest weights; compare the largest.": plain.min() / scaled.min(),
            "That is the ratio of the scores; the softmax changes it. Compare the weights.": 2.0,
            "That is the largest weight itself; divide it by the one with scaling.": largest,
        },
        "spread": {"That is the scale factor; the spread is its inverse.": 1 / spread},
        "ratio": {
            "That is the difference of the scores; the weights are exponentials, so take exp of it.": spread,
            "That is the share of the larger one; give larger ÷ smaller.": 1.0,
            "That is smaller ÷ larger; invert it.": math.exp(-spread),
            "Softmax uses powers of e, not of 2.": 2**spread,
        },
    }
    return [
        Mistake(
            "That is with scaling; leave out the division by √d_k.",
            {"weights": scaled, "sharper": 1.0, "spread": 1.0, "ratio": math.e},
        ),
        Mistake(
            "That is the variance; the spread is the standard deviation, its square root.",
            {"spread": float(WIDE), "ratio": float(np.exp(np.float64(WIDE)))},
        ),
        Mistake(
            "That is for d_k = 4, as in the example; here d_k is 512.", {"spread": 2.0, "ratio": math.exp(2)}
        ),
        Mistake(
            "A product of two entries of variance 1 has variance 1, so the variance of the score is 512.",
            {"spread": math.sqrt(2 * WIDE), "ratio": math.exp(math.sqrt(2 * WIDE))},
        ),
        *make_mistakes(in_one_part),
        *(Mistake(ROUNDED, {"ratio": math.exp(round(spread, digits))}) for digits in (1, 0)),
    ]


def _explain_unscaled() -> str:
    answer, scores = solve_without_scaling(), cat.K @ cat.Q[0]
    scaled = softmax(scores / 2)
    return (
        f'The scores of "The" are {format_vector(scores)}.\n'
        f"Their softmax as they are:      {format_vector(answer['weights'])}\n"
        f"… and after dividing by √4 = 2: {format_vector(scaled)}\n"
        f"The largest grows from {format_number(scaled.max())} to {format_number(answer['weights'].max())}, "
        f"{format_number(answer['sharper'])} times as much. That is a small change, since d_k is only 4.\n"
        f"At d_k = {WIDE} a score is a sum of {WIDE} products of variance 1: variance {WIDE}, "
        f"spread √{WIDE} = {format_number(answer['spread'])}.\n"
        f"Two keys whose scores differ by that much get weights in the ratio exp({format_number(answer['spread'])}) = "
        f"{format_number(answer['ratio'])}: one key takes all.\n"
        f"Divided by √{WIDE}, the same two scores differ by 1, and the ratio is e = {format_number(math.e)}."
    )


WITHOUT_SCALING = Exercise(
    title="Exercise 2. Without scaling",
    chapter=5,
    task='How much sharper are the weights without the division by √d_k? Start with "The" in the five tokens '
    "(d_k = 4), then take d_k = 512, for queries and keys with independent entries of mean 0 and variance 1.",
    given={"tokens": cat.tokens, "query of The": cat.Q[0], "K": cat.K},
    parts=(
        ExercisePart("weights", 'the weights of "The" without scaling', NumericAnswer("(5,)")),
        ExercisePart(
            "sharper",
            "its largest weight without scaling, divided by its largest weight with it",
            NumericAnswer(),
        ),
        ExercisePart(
            "spread", "the standard deviation of an unscaled score at d_k = 512", NumericAnswer(rtol=2e-3)
        ),
        ExercisePart(
            "ratio",
            "two keys whose unscaled scores differ by one such standard deviation: how many times larger is the "
            "larger weight?",
            NumericAnswer(rtol=0.01),
        ),
    ),
    solve=solve_without_scaling,
    list_mistakes=_list_unscaled_mistakes,
    explain=_explain_unscaled,
    imports="import numpy as np\nfrom regard.learn import cat",
)

# -- 5. The scale for another variance ----------------------------------------------------------------------

VARIANCE_CALLS = ((64, 9), (16, 0.25))


def solve_variance() -> dict[str, Any]:
    """Return each part as a function of d_k and σ²."""
    return {
        "variance": lambda d_k, sigma2: d_k * sigma2 * sigma2,  # d_k products, each of variance σ² · σ²
        "scale": lambda d_k, sigma2: 1 / np.sqrt(d_k * sigma2 * sigma2),  # = 1 / (√d_k · σ²)
        "keys_only": lambda d_k, sigma2: 1 / np.sqrt(d_k * sigma2),  # each product of variance 1 · σ²
    }


def _list_variance_mistakes() -> list[Mistake]:
    root: Any = np.sqrt
    in_one_part: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
        "variance": {
            "That is the standard deviation; the variance is its square.": lambda d_k, s2: root(d_k) * s2,
            "That is for variance 1: the entries have σ².": lambda d_k, s2: d_k,
            "d_k independent products are added, and their variances add up: d_k times, not d_k² times.": (
                lambda d_k, s2: d_k**2 * s2**2
            ),
            "The variances are multiplied in a product, not added.": lambda d_k, s2: 2 * d_k * s2,
        },
        "scale": {
            "The root of σ⁴ is missing: √(d_k · σ⁴) = √d_k · σ².": lambda d_k, s2: 1 / (root(d_k) * s2**2),
        },
        "keys_only": {
            "That is for queries and keys both of variance σ²; now the queries have variance 1.": (
                lambda d_k, s2: 1 / (root(d_k) * s2)
            ),
        },
    }
    return [
        Mistake(
            "Both factors of each product vary: its variance is σ² · σ², not σ².",
            {
                "variance": lambda d_k, s2: d_k * s2,
                "scale": lambda d_k, s2: 1 / root(d_k * s2),
                "keys_only": lambda d_k, s2: 1 / root(d_k * root(s2)),
            },
        ),
        Mistake(
            "You are given σ², and σ⁴ is its square: use its second power, not its fourth.",
            {"variance": lambda d_k, s2: d_k * s2**4, "scale": lambda d_k, s2: 1 / root(d_k * s2**4)},
        ),
        Mistake(
            "That is the variance of one product; a score is the sum of d_k of them.",
            {
                "variance": lambda d_k, s2: s2**2,
                "scale": lambda d_k, s2: 1 / s2,
                "keys_only": lambda d_k, s2: 1 / root(s2),
            },
        ),
        Mistake(
            "That is the scale for entries of variance 1; with σ² the scores spread more.",
            {"scale": lambda d_k, s2: 1 / root(d_k), "keys_only": lambda d_k, s2: 1 / root(d_k)},
        ),
        Mistake(
            "You divided by the variance; to make the variance 1, divide by the standard deviation.",
            {"scale": lambda d_k, s2: 1 / (d_k * s2**2), "keys_only": lambda d_k, s2: 1 / (d_k * s2)},
        ),
        Mistake(
            "That is the divisor; the factor to multiply the scores by is one over it.",
            {"scale": lambda d_k, s2: root(d_k) * s2, "keys_only": lambda d_k, s2: root(d_k * s2)},
        ),
        Mistake(
            "The root of d_k is missing: √(d_k · σ⁴) = √d_k · σ².",
            {"scale": lambda d_k, s2: 1 / (d_k * s2), "keys_only": lambda d_k, s2: 1 / (d_k * root(s2))},
        ),
        Mistake(
            "The scores spread more, so the factor must be smaller: divide by σ², do not multiply.",
            {"scale": lambda d_k, s2: s2 / root(d_k), "keys_only": lambda d_k, s2: root(s2 / d_k)},
        ),
        *make_mistakes(in_one_part),
    ]


def _explain_variance() -> str:
    (d_k, sigma2), answer = VARIANCE_CALLS[0], solve_variance()
    rng = np.random.default_rng(0)
    query, key = rng.normal(scale=math.sqrt(sigma2), size=(2, 20_000, d_k))
    scores = (query * key).sum(axis=-1)
    variance, scale = answer["variance"](d_k, sigma2), answer["scale"](d_k, sigma2)
    return (
        "A score is a sum of d_k products. Each product of two independent entries of mean 0 has variance σ² · σ²,\n"
        f"and variances of independent terms add up: d_k · σ⁴ = {d_k} · {format_number(sigma2)}² = "
        f"{format_number(variance)}.\n"
        "To make it 1, divide by the standard deviation, √d_k · σ²:\n"
        f"the factor is 1 / (√{d_k} · {format_number(sigma2)}) = {format_number(scale)}.\n"
        "If the queries have variance 1, a product has variance σ², and the factor is 1 / (√d_k · σ):\n"
        f"{format_number(answer['keys_only'](d_k, sigma2))}.\n"
        f"Measured on {len(scores):,} random pairs: the variance of the scores is "
        f"{format_number(scores.var().round())}, after scaling {format_number((scores * scale).var().round(2))}."
    )


def _make_part(name: str, question: str) -> ExercisePart:
    return ExercisePart(name, question, NumericAnswer(atol=0.0, rtol=5e-3), "d_k, sigma2", VARIANCE_CALLS)


VARIANCE = Exercise(
    title="Exercise 5. The scale for variance σ²",
    chapter=5,
    task="1/√d_k keeps the variance of the scores at 1 if the entries of queries and keys are independent, with "
    "mean 0 and variance 1. Let their variance be σ² instead. Answer for d_k = 64 and σ² = 9, or with functions "
    "of d_k and σ².",
    given={"d_k": VARIANCE_CALLS[0][0], "sigma2": VARIANCE_CALLS[0][1]},
    parts=(
        _make_part("variance", "the variance of a score q·k before scaling"),
        _make_part("scale", "the factor to multiply the scores by, so that their variance is 1"),
        _make_part(
            "keys_only", "the same factor if only the keys have variance σ² and the queries have variance 1"
        ),
    ),
    solve=solve_variance,
    list_mistakes=_list_variance_mistakes,
    explain=_explain_variance,
)


# -- 3. K = Q -----------------------------------------------------------------------------------------------

X = three_tokens.Q


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
    raw, weights, last = X @ X.T, _compute_weights(X), len(X) - 1
    self_score, best_score = format_number(raw[last, last]), format_number(raw[last].max())
    in_one_part = {
        "most": {
            "You looked down the columns: which token attends most to each. Look for the largest weight of each "
            "row.": weights.argmax(axis=0),
            "Those are the tokens attended to least.": weights.argmin(axis=-1),
        },
        "weights": {
            "That is the column of t2, or a softmax over columns: the weights of a query are a row that sums to 1 "
            "(axis=-1).": weights[:, last],
            "The scale is missing: divide the scores by √d_k, here √4.": softmax(raw[last]),
            "You divided by d_k; divide by its square root.": softmax(raw[last] / 4),
            "You divided by the sum without taking exponentials first.": raw[last] / raw[last].sum(),
            "These are scores: take their softmax.": raw[last],
            **{f"That is the row of t{i}; give the row of t2, the last.": weights[i] for i in range(last)},
            "That is the whole table; give the row of t2, its last.": weights,
        },
        "change": {
            "Scaling divides all scores of a row alike: it changes how sharp a row is, not which key wins.": "a",
            "The key that beats t2 is t1, which comes earlier: a causal mask does not mask it.": "c",
            "Zeros add nothing to a dot product; only the scale changes, for the whole row.": "d",
        },
    }
    return [
        Mistake(
            f"Look at row t2: with itself it scores {self_score}, with t1 {best_score}. A longer key can win.",
            {"itself": "yes", "most": np.arange(len(X))},
        ),
        *make_mistakes(in_one_part),
        Mistake("These are scores: take their softmax.", {"weights": raw[last] / 2}),
    ]


def _explain_equal() -> str:
    raw, weights = X @ X.T, _compute_weights(X)
    lines = [
        "No. The weights, row by row:",
        *(f"  t{i}  {format_vector(row)}  attends most to t{row.argmax()}" for i, row in enumerate(weights)),
        f"t2 scores {format_number(raw[2, 2])} with itself and {format_number(raw[2, 1])} with t1, because a dot "
        f"product grows with the length of the key:",
        f"the lengths are {format_vector(np.linalg.norm(X, axis=-1))}.",
        "If all lengths are equal, q·k ≤ |q||k| = q·q, so no key beats the token itself (b). The four changes:",
    ]
    for letter, (change, compute) in CHANGES.items():
        most = [f"t{j}" for j in compute().argmax(axis=-1)]
        lines.append(f"  {letter}. {change}: each attends most to {most}")
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


def _list_orthogonal_mistakes() -> Iterator[Mistake]:
    raw = KEYS @ KEYS[1]
    weights, exponentials = softmax(raw / 2), np.exp(raw / 2)
    odds = 2 * SHARE / (1 - SHARE)
    flat = "It cannot prefer one key: a query at right angles to all of them scores 0 with each."
    # Wrong weights, which carry over to the output, and the other parts that the mistake changes.
    in_weights: dict[str, tuple[Any, dict[str, Any]]] = {
        "The scale is missing: divide the scores by √d_k, here √4.": (
            softmax(raw),
            {"length": math.sqrt(math.log(odds))},
        ),
        "You divided by d_k; divide by its square root, √4 = 2.": (
            softmax(raw / 4),
            {"length": math.sqrt(4 * math.log(odds))},
        ),
        "Keys at right angles score 0, and exp(0) is 1, not 0: each still gets a share.": (
            np.array([0.0, 1.0, 0.0]),
            {"across": np.zeros(3)},
        ),
        "These are the scores: take their softmax.": (raw, {}),
        "These are the scaled scores: take their softmax.": (raw / 2, {}),
        "These are the exponentials; divide them by their sum.": (exponentials, {"across": np.ones(3)}),
        "That counts four keys. The vectors have four numbers, but there are three keys.": (
            exponentials / (exponentials.sum() + 1),
            {"across": np.full(3, 1 / 4), "length": math.sqrt(2 * math.log(3 * SHARE / (1 - SHARE)))},
        ),
        "The query is the second key, so its own score is the largest: look at K @ query.": (
            np.full(3, 1 / 3),
            {},
        ),
        **{
            f"That is for key {i} as the query; the query is key 1, the second.": (
                softmax(KEYS @ KEYS[i] / 2),
                {},
            )
            for i in (0, 2)
        },
    }
    for hint, (wrong, others) in in_weights.items():
        yield Mistake(hint, {"weights": wrong, "output": wrong @ VALUES, **others})
    in_one_part = {
        "output": {
            "These are the weights; the output is weights @ V.": weights,
            "You mixed the keys; apply the weights to the values, V.": weights @ KEYS,
            "That is the plain mean of the values: use the weights.": VALUES.mean(axis=0),
        },
        "across": {"A softmax of three equal scores is defined: exp(0) is 1.": np.full(3, np.nan)},
        "length": {
            "That is L²; take its root.": 2 * math.log(odds),
            "That is the scaled score L²/√4; solve for L.": math.log(odds),
            "You counted one other key; there are two, each with exp(0) = 1.": math.sqrt(
                2 * math.log(odds / 2)
            ),
            "You used the logarithm to base 10; the inverse of exp is the natural logarithm.": (
                math.sqrt(2 * math.log10(odds))
            ),
            "You used the logarithm to base 2; the inverse of exp is the natural logarithm.": (
                math.sqrt(2 * math.log2(odds))
            ),
            "The scale is on the wrong side: L² / √4 = s, so L² = √4 · s.": math.sqrt(math.log(odds) / 2),
        },
    }
    yield from make_mistakes(in_one_part)
    for wrong in (weights, *np.eye(3)):
        yield Mistake(flat, {"across": wrong})


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
        ExercisePart(
            "weights", "the weights of the query, which equals the second key", NumericAnswer("(3,)")
        ),
        ExercisePart("output", "its output", NumericAnswer("(2,)", atol=6e-3)),
        ExercisePart(
            "across",
            "the weights of the query called across, at right angles to all keys",
            NumericAnswer("(3,)"),
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
)


# -- 6. Causal and padding masks ----------------------------------------------------------------------------

LENGTHS, MAX_LENGTH = (3, 5), 5
MASK_CALLS = (((3, 5), 5), ((1, 4, 2), 6))  # (lengths, max_length) of each call


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


def _list_mask_mistakes() -> list[Mistake]:
    causal, padding = create_causal_mask, create_padding_mask

    def real(lengths: Any, n: int) -> Any:
        return padding(lengths, n)[:, 0, 0]

    def with_padding(hint: str, wrong: Callable[[int], Any]) -> Mistake:
        """Make a mistake in the causal mask that carries over to both masks together."""
        return Mistake(hint, {"causal": wrong, "both": lambda lengths, n: wrong(n) & padding(lengths, n)})

    def repeat(mask: Any, lengths: Any, n: int) -> Any:
        return np.broadcast_to(mask, (len(lengths), 1, n, n))

    in_one_part: dict[str, dict[str, Callable[..., Any]]] = {
        "causal": {
            "This masks nothing.": lambda n: np.ones((n, n), bool),
            "Only the diagonal: a token may attend to earlier tokens too.": lambda n: np.eye(n, dtype=bool),
        },
        "padding": {
            "One key too many: with length 3 the real keys are 0, 1 and 2, so kv_idx < length.": (
                lambda lengths, n: np.arange(n) <= np.asarray(lengths)[:, None, None, None]
            ),
            "That masks keys on the left; here the padding follows the tokens.": (
                lambda lengths, n: padding(lengths, n)[..., ::-1]
            ),
            "The right rows, without the axes for heads and queries: real[:, None, None, :] makes them "
            "(batch, 1, 1, max_length).": real,
            "An axis of length one is missing: (batch, 1, 1, max_length) has one for heads and one for queries.": (
                lambda lengths, n: real(lengths, n)[:, None, :]
            ),
            "That masks the padded queries. Keys are the last axis: real[:, None, None, :].": (
                lambda lengths, n: real(lengths, n)[:, None, :, None]
            ),
        },
        "both": {
            "That is | (or): a key would be attended to if either mask allows it. Both must allow it: &.": (
                lambda lengths, n: causal(n) | padding(lengths, n)
            ),
            "That is +, which counts; both must allow the key: &.": (
                lambda lengths, n: causal(n).astype(int) + padding(lengths, n)
            ),
            "That is ^, true if exactly one mask allows the key; both must allow it: &.": (
                lambda lengths, n: causal(n) ^ padding(lengths, n)
            ),
            "You masked the rows of padded queries. Mask keys, the last axis: a fully masked row needs care, and "
            "the output of a padded query is not used.": (
                lambda lengths, n: causal(n) & real(lengths, n)[:, None, :, None]
            ),
            "The axis of heads is missing: (batch, 1, n, n). In (batch, n, n) the batch is aligned with heads.": (
                lambda lengths, n: (causal(n) & padding(lengths, n))[:, 0]
            ),
        },
    }
    no_padding = "That is the causal mask alone: the padded keys are still attended to."
    no_causal = "That is the padding mask alone: the future is still attended to."
    return [
        Mistake(
            "The masks are inverted. True means attend: you marked the masked keys.",
            {
                "causal": lambda n: ~causal(n),
                "padding": lambda lengths, n: ~padding(lengths, n),
                "both": lambda lengths, n: ~causal(n) & ~padding(lengths, n),
            },
        ),
        with_padding(
            "That is the upper triangle: each query would attend to itself and the future. Rows are queries, and a "
            "query attends to a key if kv_idx <= q_idx.",
            lambda n: causal(n).T,
        ),
        with_padding(
            "The diagonal is missing: a token may attend to itself, and the first would have no key at all.",
            lambda n: np.tri(n, k=-1, dtype=bool),
        ),
        with_padding(
            "One diagonal too many: each token attends to the next one, which it has to predict.",
            lambda n: np.tri(n, k=1, dtype=bool),
        ),
        *make_mistakes(in_one_part),
        Mistake(no_padding, {"both": lambda lengths, n: repeat(causal(n), lengths, n)}),
        Mistake(no_padding, {"both": lambda _, n: causal(n)}),
        Mistake(no_causal, {"both": lambda lengths, n: repeat(padding(lengths, n), lengths, n)}),
        Mistake(no_causal, {"both": padding}),
    ]


def _explain_masks() -> str:
    causal, padding = create_causal_mask(MAX_LENGTH), create_padding_mask(LENGTHS, MAX_LENGTH)
    both = causal & padding
    drawn = [
        ["".join("■" if attend else "·" for attend in row) for row in mask]
        for mask in (causal, np.broadcast_to(padding[0, 0], causal.shape), both[0, 0])
    ]
    rows = [["causal", f"padding, length {LENGTHS[0]}", "both"], *zip(*drawn, strict=True)]
    return "\n".join(
        [
            "Rows are queries, columns are keys; ■ is True: attend.",
            format_table(rows, align="left"),
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
            MASK_CALLS,
        ),
        ExercisePart(
            "both", "the two combined", MaskAnswer("(2, 1, 5, 5)"), "lengths, max_length", MASK_CALLS
        ),
    ),
    solve=solve_masks,
    list_mistakes=_list_mask_mistakes,
    explain=_explain_masks,
)


# -- 7. Eight heads -----------------------------------------------------------------------------------------

HEADS = 8
TOKENS = np.arange(3 * WIDE, dtype=np.float64).reshape(3, WIDE)
SPLIT_CALLS = ((TOKENS, HEADS), (np.arange(5 * 12, dtype=np.float64).reshape(5, 12), 3))


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
    return NumpyMultiHeadAttention(x.shape[-1], num_heads).split_heads(x)


def _list_head_mistakes() -> list[Mistake]:
    def cut(x: Any, h: int) -> Any:
        return x.reshape(len(x), h, -1)  # (n, num_heads, head_dim)

    in_one_part: dict[str, dict[str, Callable[..., Any]]] = {
        "split": {
            "The heads are still inside each row, (n, heads, head_dim): swap the first two axes.": cut,
            "Heads and head_dim are swapped: 8 heads of 64, not 64 heads of 8.": (
                lambda x, h: x.reshape(len(x), -1, h).swapaxes(0, 1)
            ),
            "The last two axes are swapped: give (heads, n, head_dim).": lambda x, h: cut(x, h).transpose(
                1, 2, 0
            ),
            "The heads are in reverse order.": lambda x, h: cut(x, h).swapaxes(0, 1)[::-1],
            "That is one head only; give all eight.": lambda x, h: cut(x, h)[:, 0],
            "Every head has the whole row; each should have its own 64 columns.": (
                lambda x, h: np.broadcast_to(x, (h, *x.shape))
            ),
        },
        "merge": {
            "The heads are stacked below each other; they belong side by side: (n, heads · head_dim).": (
                lambda s: s.reshape(-1, s.shape[-1])
            ),
            "The heads are summed; they belong side by side.": lambda s: s.sum(axis=0),
            "The heads are averaged; they belong side by side.": lambda s: s.mean(axis=0),
            "The heads are concatenated in the wrong order: head 0 comes first.": (
                lambda s: np.concatenate(list(s[::-1]), axis=-1)
            ),
            "The axes are swapped back, but the heads are still separate: reshape to (n, heads · head_dim).": (
                lambda s: s.swapaxes(0, 1)
            ),
            "Nothing is merged yet.": lambda s: s,
        },
    }
    return [
        Mistake(
            "You reshaped directly to (heads, n, head_dim): the shape is right, the numbers are not, because a reshape "
            "moves nothing in memory. Cut each row first, (n, heads, head_dim), then swap the axes.",
            {"split": lambda x, h: x.reshape(h, len(x), -1), "merge": lambda s: s.reshape(s.shape[1], -1)},
        ),
        Mistake(
            "You interleaved the columns, every 8th to the same head. A head has consecutive columns: the first takes "
            "columns 0 to 63. Reshape to (n, heads, head_dim), in this order.",
            {
                "split": lambda x, h: x.reshape(len(x), -1, h).transpose(2, 0, 1),
                "merge": lambda s: s.transpose(1, 2, 0).reshape(s.shape[1], -1),
            },
        ),
        *make_mistakes(in_one_part),
    ]


def _explain_heads() -> str:
    split, wrong = _split(TOKENS, HEADS), TOKENS.reshape(HEADS, len(TOKENS), -1)
    merged, head_dim = NumpyMultiHeadAttention(WIDE, HEADS).merge_heads(split), WIDE // HEADS
    return (
        f"{TOKENS.shape} → cut each row: {(len(TOKENS), HEADS, head_dim)} → swap the first two axes: {split.shape}.\n"
        f"Head 1 of position 0 begins with x[0, {head_dim}] = {split[1, 0, 0]:.0f}.\n"
        f"A direct reshape to {wrong.shape} has the same shape, but its head 1 begins with "
        f"{wrong[1, 0, 0]:.0f}: position 0 alone fills the first heads.\n"
        f"To merge, swap the axes back, then join the last two. Equal to x: {np.array_equal(merged, TOKENS)}."
    )


SPLIT_HEADS = Exercise(
    title="Exercise 7. Eight heads of 512",
    chapter=8,
    task="x = np.arange(3 * 512).reshape(3, 512): three positions of 512 numbers. Split it into eight heads of 64, "
    "each with its own consecutive columns, and merge the heads side by side. Functions are also tested with "
    "other sizes.",
    given={"x": TOKENS, "num_heads": HEADS},
    parts=(
        ExercisePart(
            "split", "x split into its heads", NumericAnswer("(8, 3, 64)"), "x, num_heads", SPLIT_CALLS
        ),
        ExercisePart(
            "merge",
            "the heads side by side again",
            NumericAnswer("(3, 512)"),
            "split",
            tuple((_split(*call),) for call in SPLIT_CALLS),
        ),
    ),
    solve=solve_split_heads,
    list_mistakes=_list_head_mistakes,
    explain=_explain_heads,
)


# -- 8. Write attention -------------------------------------------------------------------------------------


def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    """Compute one head: query (q_len, d_k), key (kv_len, d_k), value (kv_len, d_v)."""
    one_head = ScaledDotProductAttention(d_k=query.shape[-1])
    mask = np.broadcast_to(True if mask is None else mask, (len(query), len(key)))
    output = np.zeros((len(query), value.shape[-1]))
    for i, visible in enumerate(mask):
        if visible.any():  # a fully masked row stays zeros
            output[i], _ = one_head.forward(
                query[i], key[visible], value[visible]
            )  # masked keys are left out
    return output


def many_heads(query: Any, key: Any, value: Any, num_heads: Any, mask: Any = None) -> Any:
    """Compute several heads, which are side by side in the last axis."""
    d_k, d_v = query.shape[-1] // num_heads, value.shape[-1] // num_heads
    mask = np.broadcast_to(True if mask is None else mask, (num_heads, len(query), len(key)))
    outputs = []
    for h in range(num_heads):
        key_columns, value_columns = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
        outputs.append(
            attention(query[:, key_columns], key[:, key_columns], value[:, value_columns], mask[h])
        )
    return np.concatenate(outputs, axis=-1)  # side by side again


def write_attention() -> dict[str, Any]:
    """Return both functions."""
    return {"attention": attention, "many_heads": many_heads}


def _explain_attention() -> str:
    functions = write_attention()
    lines = ["The class is that of chapter 4. Only the keys that a query attends to are passed to it."]
    for part in WRITE_ATTENTION.parts:
        report = part.answer_type.parse(functions[part.name])
        calls = sum(row.num_calls for row in report.capabilities)
        lines.append(f"{part.name}: {calls} calls of the conformance kit, {len(report.findings)} findings.")
    lines.append("Leaving out a masked key is safer than giving it a weight of 0, because 0 · NaN is NaN.")
    return "\n".join(lines)


WRITE_ATTENTION = Exercise(
    title="Exercise 8. Write attention yourself",
    chapter=8,
    task="Start with one head, in loops or with the class of chapter 4: query (q_len, d_k), key (kv_len, d_k), "
    "value (kv_len, d_v), output (q_len, d_v). The mask broadcasts to (q_len, kv_len), True = attend. A masked key or "
    "value must not change the output, even if it is NaN, and a fully masked row is zeros. Then write it for several "
    "heads: query, key and value have their heads side by side in the last axis, as in exercise 7, and so has the "
    "output; the mask may have an axis of heads in front. You may answer with the first function alone. Both are "
    "passed to regard.testing.check_conformance, which describes what it finds.",
    given={},
    parts=(
        ExercisePart(
            "attention",
            "attention for one head, returning the output",
            AttentionFunctionAnswer("n d", heads=False),
        ),
        ExercisePart(
            "many_heads", "the same for several heads", AttentionFunctionAnswer("n (h d)", heads=True)
        ),
    ),
    solve=write_attention,
    list_mistakes=list,
    explain=_explain_attention,
    imports="import math\n\nimport numpy as np",
    helpers=(ScaledDotProductAttention, attention, many_heads),
)


EXERCISES: tuple[Exercise, ...] = (
    FOUR_STEPS,
    WITHOUT_SCALING,
    KEYS_EQUAL_QUERIES,
    ORTHOGONAL_KEYS,
    VARIANCE,
    MASKS,
    SPLIT_HEADS,
    WRITE_ATTENTION,
)


def get_exercise(operation: str, n: int) -> Exercise:
    """Return an exercise by its number, or raise an ArgumentError of the operation."""
    hint = "exercises.show(1) is the first."
    return EXERCISES[check_count(n, 1, len(EXERCISES), f"exercises.{operation}", "n", "", hint) - 1]
