"""Exercise 1: all four steps for "sat"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.core.attention import attention
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import cat
from regard.learn.exercises.answer_types import NumericAnswer
from regard.learn.exercises.exercise import Exercise, ExercisePart, Mistake

D_K = cat.Q.shape[-1]
SAT = cat.tokens.index("sat")


def softmax(scores: Any) -> Any:
    """Compute the softmax of each row of scores.

    >>> softmax(np.array([0.0, 0.0]))
    array([0.5, 0.5])
    """
    return ScaledDotProductAttention(d_k=1).compute_weights(np.atleast_2d(scores)).reshape(np.shape(scores))


def solve_four_steps() -> dict[str, Any]:
    """Compute the row of "sat" step by step."""
    scores = cat.K @ cat.Q[2]  # 1. compare: the query of "sat" with every key
    scaled = scores / np.sqrt(4)  # 2. scale: d_k is 4
    exponentials = np.exp(scaled)
    weights = exponentials / exponentials.sum()  # 3. normalise
    output = weights @ cat.V  # 4. aggregate
    return {"scores": scores, "scaled": scaled, "weights": weights, "output": output}


Transform = Callable[[Any], Any]


def _replace_steps(
    scores: Any = None,
    scale: Transform | None = None,
    normalise: Transform | None = None,
    aggregate: Transform | None = None,
) -> dict[str, Any]:
    """Compute the four steps with some of them replaced, and the later ones from their results."""
    raw = cat.K @ cat.Q[SAT] if scores is None else scores
    scaled = (scale or (lambda s: s / np.sqrt(D_K)))(raw)
    weights = (normalise or softmax)(scaled)
    output = (aggregate or (lambda w: w @ cat.V))(weights)
    return {"scores": raw, "scaled": scaled, "weights": weights, "output": output}


def _list_mistakes() -> list[Mistake]:
    def make(part: str, hint: str, **steps: Any) -> Mistake:
        """Make a mistake at this part, which changes it and the later parts but not the earlier ones."""
        results, order = _replace_steps(**steps), ("scores", "scaled", "weights", "output")
        return Mistake(hint, {name: results[name] for name in order[order.index(part) :]})

    table = cat.Q @ cat.K.T / np.sqrt(D_K)
    by_column = (np.exp(table) / np.exp(table).sum(axis=0))[SAT]
    causal = np.where(np.arange(len(cat.tokens)) <= SAT, table[SAT], -np.inf)
    others = [
        make(
            "scores", f'These are the numbers of "{token}"; "sat" is row {SAT} of Q.', scores=cat.K @ cat.Q[i]
        )
        for i, token in enumerate(cat.tokens)
        if i != SAT
    ]
    return [
        make(
            "scores",
            'That is the column of "sat": every query against its key. You need its row: its query, Q[2], '
            "against every key.",
            scores=cat.Q @ cat.K[SAT],
        ),
        *others,
        Mistake(
            'That is the whole table, all five queries; give the row of "sat" only.',
            {
                "scores": cat.Q @ cat.K.T,
                "scaled": table,
                "weights": softmax(table),
                "output": softmax(table) @ cat.V,
            },
        ),
        make(
            "scores",
            "You compared the query with the values. Compare it with the keys; the values come in step 4.",
            scores=cat.V @ cat.Q[SAT],
        ),
        make("scores", "You compared queries with queries: use K.", scores=cat.Q @ cat.Q[SAT]),
        make("scaled", "The scale is missing: divide the scores by √d_k, here √4.", scale=lambda s: s),
        make("scaled", "You divided by d_k; divide by its square root, √4 = 2.", scale=lambda s: s / D_K),
        make("scaled", "You multiplied by √d_k; divide by it.", scale=lambda s: s * np.sqrt(D_K)),
        make(
            "scaled",
            "You divided by the square root of the number of tokens; d_k is the length of a key, 4.",
            scale=lambda s: s / np.sqrt(len(s)),
        ),
        make(
            "scores", "These scores are already scaled: step 1 is the plain dot product.", scores=table[SAT]
        ),
        make(
            "weights",
            "That is the softmax of the scores before scaling: the scale is missing.",
            normalise=lambda s: softmax(s * np.sqrt(D_K)),
        ),
        make(
            "weights",
            "You divided by the sum without taking exponentials first: softmax is exp(score) / Σ exp(score).",
            normalise=lambda s: s / s.sum(),
        ),
        make("weights", "These are the exponentials; divide them by their sum.", normalise=np.exp),
        make(
            "weights",
            "These are the exponentials after subtracting the maximum; divide them by their sum.",
            normalise=lambda s: np.exp(s - s.max()),
        ),
        make(
            "weights",
            "The softmax ran over columns: each row, one query over all keys, must sum to 1 (axis=-1).",
            normalise=lambda s: by_column,
        ),
        make(
            "weights",
            "You applied a causal mask; here every token attends to all five.",
            normalise=lambda s: softmax(causal),
        ),
        make(
            "weights",
            "All the weight went to the largest score: softmax is soft, every key gets a share.",
            normalise=lambda s: np.eye(len(s))[s.argmax()],
        ),
        make("output", "These are the weights; the output is weights @ V.", aggregate=lambda w: w),
        make(
            "output",
            'The value of "mat" is missing: its entries of 0.5 count too, times its weight.',
            aggregate=lambda w: w[:-1] @ cat.V[:-1],
        ),
        make(
            "output", "You mixed the keys; apply the weights to the values, V.", aggregate=lambda w: w @ cat.K
        ),
        make(
            "output",
            "You mixed the queries; apply the weights to the values, V.",
            aggregate=lambda w: w @ cat.Q,
        ),
        make(
            "output",
            "That is the plain mean of the values: use the weights.",
            aggregate=lambda w: cat.V.mean(axis=0),
        ),
        make(
            "output",
            "That is the plain sum of the values: use the weights.",
            aggregate=lambda w: cat.V.sum(axis=0),
        ),
        make(
            "output",
            "That is the value of one token alone; the output mixes all five by their weights.",
            aggregate=lambda w: cat.V[w.argmax()],
        ),
        make(
            "output",
            "This output comes from the weights without scaling.",
            aggregate=lambda w: softmax(cat.K @ cat.Q[SAT]) @ cat.V,
        ),
    ]


def _explain() -> str:
    return str(attention(cat.Q, cat.K).explain(SAT, value=cat.V, tokens=cat.tokens))


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
    list_mistakes=_list_mistakes,
    explain=_explain,
    imports="import numpy as np\nfrom regard.learn import cat",
)
