"""Exercises 2 and 5: why scores are scaled, and the scale for entries of another variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.learn.examples import cat
from regard.learn.exercises.answer_types import NumericAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart, Mistake
from regard.learn.exercises.four_steps import softmax
from regard.render.text import format_number, format_vector

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
    spread = math.sqrt(WIDE)
    others = [
        Mistake(f'These are the weights of "{token}"; "The" is row 0.', {"weights": softmax(cat.K @ query)})
        for token, query in zip(cat.tokens[1:], cat.Q[1:], strict=True)
    ]
    return [
        Mistake(
            "That is with scaling; leave out the division by √d_k.",
            {"weights": scaled, "sharper": 1.0, "spread": 1.0, "ratio": math.e},
        ),
        Mistake(
            "You multiplied by √d_k; without scaling the scores stay as they are.",
            {"weights": softmax(scores * 2)},
        ),
        Mistake("These are the scores: take their softmax.", {"weights": scores}),
        Mistake(
            "You divided by the sum without taking exponentials first: softmax is exp(score) / Σ exp(score).",
            {"weights": scores / scores.sum()},
        ),
        Mistake("These are the exponentials; divide them by their sum.", {"weights": np.exp(scores)}),
        Mistake(
            "That is the column: every query against the key of the token. Use its query against every key.",
            {"weights": softmax(cat.Q @ cat.K[0])},
        ),
        *others,
        Mistake(
            "The ratio is inverted: divide the largest weight without scaling by the one with scaling.",
            {"sharper": scaled.max() / plain.max()},
        ),
        Mistake(
            "That is the difference of the two; give the ratio, how many times larger it is.",
            {"sharper": plain.max() - scaled.max()},
        ),
        Mistake(
            "That is the relative increase; how many times larger is one more.",
            {"sharper": plain.max() / scaled.max() - 1},
        ),
        Mistake(
            "Those are the smallest weights; compare the largest.", {"sharper": plain.min() / scaled.min()}
        ),
        Mistake(
            "That is the ratio of the scores; the softmax changes it. Compare the weights.",
            {"sharper": 2.0},
        ),
        Mistake(
            "That is the largest weight itself; divide it by the one with scaling.", {"sharper": plain.max()}
        ),
        Mistake(
            "That is the variance; the spread is the standard deviation, its square root.",
            {"spread": float(WIDE), "ratio": _exp(WIDE)},
        ),
        Mistake("That is the scale factor; the spread is its inverse.", {"spread": 1 / spread}),
        Mistake(
            "That is for d_k = 4, as in the example; here d_k is 512.", {"spread": 2.0, "ratio": math.exp(2)}
        ),
        Mistake(
            "A product of two entries of variance 1 has variance 1, so the variance of the score is 512.",
            {"spread": math.sqrt(2 * WIDE), "ratio": math.exp(math.sqrt(2 * WIDE))},
        ),
        Mistake(
            "That is the difference of the scores; the weights are exponentials, so take exp of it.",
            {"ratio": spread},
        ),
        Mistake("That is the share of the larger one; give larger ÷ smaller.", {"ratio": 1.0}),
        Mistake("That is smaller ÷ larger; invert it.", {"ratio": math.exp(-spread)}),
        Mistake("Softmax uses powers of e, not of 2.", {"ratio": 2**spread}),
        *(Mistake(ROUNDED, {"ratio": math.exp(round(spread, digits))}) for digits in (1, 0)),
    ]


def _exp(x: float) -> float:
    return float(np.exp(np.float64(x)))


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

CALLS = ((64, 9), (16, 0.25))


def solve_variance() -> dict[str, Any]:
    """Return each part as a function of d_k and σ²."""
    return {
        "variance": lambda d_k, sigma2: d_k * sigma2 * sigma2,  # d_k products, each of variance σ² · σ²
        "scale": lambda d_k, sigma2: 1 / np.sqrt(d_k * sigma2 * sigma2),  # = 1 / (√d_k · σ²)
        "keys_only": lambda d_k, sigma2: 1 / np.sqrt(d_k * sigma2),  # each product of variance 1 · σ²
    }


def _list_variance_mistakes() -> list[Mistake]:
    usual = "That is the scale for entries of variance 1; with σ² the scores spread more."
    return [
        Mistake(
            "Both factors of each product vary: its variance is σ² · σ², not σ².",
            {
                "variance": lambda d_k, s2: d_k * s2,
                "scale": lambda d_k, s2: 1 / np.sqrt(d_k * s2),
                "keys_only": lambda d_k, s2: 1 / np.sqrt(d_k * np.sqrt(s2)),
            },
        ),
        Mistake(
            "That is the standard deviation; the variance is its square.",
            {"variance": lambda d_k, s2: np.sqrt(d_k) * s2},
        ),
        Mistake("That is for variance 1: the entries have σ².", {"variance": lambda d_k, s2: d_k}),
        Mistake(
            "You are given σ², and σ⁴ is its square: use its second power, not its fourth.",
            {
                "variance": lambda d_k, s2: d_k * s2**4,
                "scale": lambda d_k, s2: 1 / np.sqrt(d_k * s2**4),
            },
        ),
        Mistake(
            "d_k independent products are added, and their variances add up: d_k times, not d_k² times.",
            {"variance": lambda d_k, s2: d_k**2 * s2**2},
        ),
        Mistake(
            "That is the variance of one product; a score is the sum of d_k of them.",
            {
                "variance": lambda d_k, s2: s2**2,
                "scale": lambda d_k, s2: 1 / s2,
                "keys_only": lambda d_k, s2: 1 / np.sqrt(s2),
            },
        ),
        Mistake(
            "The variances are multiplied in a product, not added.",
            {"variance": lambda d_k, s2: 2 * d_k * s2},
        ),
        Mistake(
            usual, {"scale": lambda d_k, s2: 1 / np.sqrt(d_k), "keys_only": lambda d_k, s2: 1 / np.sqrt(d_k)}
        ),
        Mistake(
            "You divided by the variance; to make the variance 1, divide by the standard deviation.",
            {"scale": lambda d_k, s2: 1 / (d_k * s2**2), "keys_only": lambda d_k, s2: 1 / (d_k * s2)},
        ),
        Mistake(
            "That is the divisor; the factor to multiply the scores by is one over it.",
            {"scale": lambda d_k, s2: np.sqrt(d_k) * s2, "keys_only": lambda d_k, s2: np.sqrt(d_k * s2)},
        ),
        Mistake(
            "The root of d_k is missing: √(d_k · σ⁴) = √d_k · σ².",
            {"scale": lambda d_k, s2: 1 / (d_k * s2), "keys_only": lambda d_k, s2: 1 / (d_k * np.sqrt(s2))},
        ),
        Mistake(
            "The root of σ⁴ is missing: √(d_k · σ⁴) = √d_k · σ².",
            {"scale": lambda d_k, s2: 1 / (np.sqrt(d_k) * s2**2)},
        ),
        Mistake(
            "The scores spread more, so the factor must be smaller: divide by σ², do not multiply.",
            {"scale": lambda d_k, s2: s2 / np.sqrt(d_k), "keys_only": lambda d_k, s2: np.sqrt(s2 / d_k)},
        ),
        Mistake(
            "That is for queries and keys both of variance σ²; now the queries have variance 1.",
            {"keys_only": lambda d_k, s2: 1 / (np.sqrt(d_k) * s2)},
        ),
    ]


def _explain_variance() -> str:
    (d_k, sigma2), answer = CALLS[0], solve_variance()
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
    return ExercisePart(name, question, NumericAnswer(atol=0.0, rtol=5e-3), "d_k, sigma2", CALLS)


VARIANCE = Exercise(
    title="Exercise 5. The scale for variance σ²",
    chapter=5,
    task="1/√d_k keeps the variance of the scores at 1 if the entries of queries and keys are independent, with "
    "mean 0 and variance 1. Let their variance be σ² instead. Answer for d_k = 64 and σ² = 9, or with functions "
    "of d_k and σ².",
    given={"d_k": CALLS[0][0], "sigma2": CALLS[0][1]},
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
