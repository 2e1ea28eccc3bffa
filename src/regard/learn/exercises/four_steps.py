"""Exercise 1: all four steps for "sat"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import cat
from regard.learn.exercises.answer_types import Numbers
from regard.learn.exercises.exercise import Exercise, Mistake, Part

D_K = cat.Q.shape[-1]
SAT = cat.tokens.index("sat")


def softmax(scores: Any) -> Any:
    """Each row of the scores as shares that sum to 1.

    >>> softmax(np.array([0.0, 0.0]))
    array([0.5, 0.5])
    """
    return ScaledDotProductAttention(d_k=1).compute_weights(np.atleast_2d(scores)).reshape(np.shape(scores))


def four_steps() -> dict[str, Any]:
    """The row of "sat", step by step."""
    scores = cat.K @ cat.Q[2]  # 1. compare: the query of "sat" with every key
    scaled = scores / np.sqrt(4)  # 2. scale: d_k is 4
    exponentials = np.exp(scaled)
    weights = exponentials / exponentials.sum()  # 3. normalise
    output = weights @ cat.V  # 4. aggregate
    return {"scores": scores, "scaled": scaled, "weights": weights, "output": output}


Step = Callable[[Any], Any]


def _with(
    scores: Any = None, scale: Step | None = None, normalise: Step | None = None, mix: Step | None = None
) -> dict[str, Any]:
    """The four steps with some of them replaced, and everything after computed from what they gave."""
    raw = cat.K @ cat.Q[SAT] if scores is None else scores
    scaled = (scale or (lambda s: s / np.sqrt(D_K)))(raw)
    weights = (normalise or softmax)(scaled)
    output = (mix or (lambda w: w @ cat.V))(weights)
    return {"scores": raw, "scaled": scaled, "weights": weights, "output": output}


def _mistakes() -> list[Mistake]:
    def at(part: str, hint: str, **steps: Any) -> Mistake:
        """From this part on: those before it are right, and say nothing."""
        made, order = _with(**steps), ("scores", "scaled", "weights", "output")
        return Mistake(hint, {name: made[name] for name in order[order.index(part) :]})

    every = cat.Q @ cat.K.T / np.sqrt(D_K)
    by_column = (np.exp(every) / np.exp(every).sum(axis=0))[SAT]
    causal = np.where(np.arange(len(cat.tokens)) <= SAT, every[SAT], -np.inf)
    others = [
        at("scores", f'These are the numbers of "{token}"; "sat" is row {SAT} of Q.', scores=cat.K @ cat.Q[i])
        for i, token in enumerate(cat.tokens)
        if i != SAT
    ]
    return [
        at(
            "scores",
            'That is the column of "sat": every query against its key. Asked is its row: its query, Q[2], '
            "against every key.",
            scores=cat.Q @ cat.K[SAT],
        ),
        *others,
        Mistake(
            'That is the whole table, all five queries; asked is the row of "sat" alone.',
            {
                "scores": cat.Q @ cat.K.T,
                "scaled": every,
                "weights": softmax(every),
                "output": softmax(every) @ cat.V,
            },
        ),
        at(
            "scores",
            "You compared the query with the values. It is compared with the keys; values come in step 4.",
            scores=cat.V @ cat.Q[SAT],
        ),
        at("scores", "You compared queries with queries: take K.", scores=cat.Q @ cat.Q[SAT]),
        at("scaled", "The scale is forgotten: divide the scores by √d_k, here √4.", scale=lambda s: s),
        at("scaled", "You divided by d_k; divide by its square root, √4 = 2.", scale=lambda s: s / D_K),
        at("scaled", "You multiplied by √d_k where you should divide.", scale=lambda s: s * np.sqrt(D_K)),
        at(
            "scaled",
            "You divided by the square root of the number of tokens; d_k is the length of a key, 4.",
            scale=lambda s: s / np.sqrt(len(s)),
        ),
        at("scores", "The scores are scaled already: step 1 is the plain dot product.", scores=every[SAT]),
        at(
            "weights",
            "That is the softmax of the scores before scaling: the scale is forgotten on the way.",
            normalise=lambda s: softmax(s * np.sqrt(D_K)),
        ),
        at(
            "weights",
            "You divided by the sum without taking exponentials first: softmax is exp(score) / Σ exp(score).",
            normalise=lambda s: s / s.sum(),
        ),
        at("weights", "These are the exponentials; divide them by their sum.", normalise=np.exp),
        at(
            "weights",
            "These are the exponentials after the maximum was taken off; divide them by their sum.",
            normalise=lambda s: np.exp(s - s.max()),
        ),
        at(
            "weights",
            "The softmax ran over columns: each row, one query over all keys, must sum to 1 (axis=-1).",
            normalise=lambda s: by_column,
        ),
        at(
            "weights",
            "A causal mask was applied; here every token sees all five.",
            normalise=lambda s: softmax(causal),
        ),
        at(
            "weights",
            "All the weight went to the largest score: softmax is soft, every key gets a share.",
            normalise=lambda s: np.eye(len(s))[s.argmax()],
        ),
        at("output", "These are the weights; the output is weights @ V.", mix=lambda w: w),
        at(
            "output",
            'The value of "mat" is left out: its 0.5 in every place counts too, times its weight.',
            mix=lambda w: w[:-1] @ cat.V[:-1],
        ),
        at("output", "You mixed the keys; the weights are for the values, V.", mix=lambda w: w @ cat.K),
        at("output", "You mixed the queries; the weights are for the values, V.", mix=lambda w: w @ cat.Q),
        at(
            "output",
            "That is the plain mean of the values: use the weights.",
            mix=lambda w: cat.V.mean(axis=0),
        ),
        at(
            "output", "That is the plain sum of the values: use the weights.", mix=lambda w: cat.V.sum(axis=0)
        ),
        at(
            "output",
            "That is the value of one token alone; the output mixes all five by their weights.",
            mix=lambda w: cat.V[w.argmax()],
        ),
        at(
            "output",
            "This output was mixed by the weights without scaling.",
            mix=lambda w: softmax(cat.K @ cat.Q[SAT]) @ cat.V,
        ),
    ]


def _explain() -> str:
    steps = ScaledDotProductAttention(D_K).explain(cat.Q, cat.K, cat.V, tokens=cat.tokens, query_idx=SAT)
    return str(steps)


FOUR_STEPS = Exercise(
    title='Exercise 1. All four steps for "sat"',
    task='Work out the row of "sat" by hand: compare its query with every key, scale by √d_k with d_k = 4, '
    "normalise by softmax, and mix the values. Three digits will do. No mask: every token sees all five.",
    given={"tokens": cat.tokens, "Q": cat.Q, "K": cat.K, "V": cat.V},
    parts=(
        Part("scores", 'the dot products of the query of "sat" with the five keys', Numbers("(5,)")),
        Part("scaled", "the scores after scaling", Numbers("(5,)")),
        Part("weights", "what softmax makes of them", Numbers("(5,)")),
        Part("output", "the values mixed by the weights", Numbers("(4,)")),
    ),
    solve=four_steps,
    mistakes=_mistakes,
    explain=_explain,
    imports="import numpy as np\nfrom regard.learn import cat",
)
