"""The exercises: common wrong answers, and the hint that each one gets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard.learn import cat, three_tokens
from regard.learn.exercises import check
from regard.learn.exercises.catalog import EXERCISES

NUMBERS = range(1, 9)


def soft(x, axis=-1):
    e = np.exp(np.asarray(x, float))
    return e / e.sum(axis=axis, keepdims=True)


def right(n):
    """Return the answer that the code of the solution computes."""
    names: dict[str, object] = {}
    exec(EXERCISES[n - 1].code, names)
    return names["answer"]


# -- Wrong answers, ten for each exercise: (answer, part of the hint), independent of the checker's own list ----

S = [1, 2, 2, 1, 1.5]  # scores of "sat"
H = [0.5, 1, 1, 0.5, 0.75]  # … scaled
W = [0.1519, 0.2505, 0.2505, 0.1519, 0.1951]
SCORES = cat.Q @ cat.K.T

ONE = [
    # the scale is missing, in all later steps too
    (
        {"scores": S, "scaled": S, "weights": soft(S), "output": soft(S) @ cat.V},
        "scaled: The scale is missing",
    ),
    (
        {"scores": S, "scaled": [0.25, 0.5, 0.5, 0.25, 0.375]},
        "scaled: You divided by d_k; divide by its square root",
    ),
    (
        {"scores": S, "scaled": H, "weights": soft(SCORES / 2, axis=0)[2]},
        "weights: The softmax ran over columns",
    ),
    ({"scores": SCORES[:, 2]}, 'the column of "sat"'),
    ({"scores": [0, 2, 1, 1, 1.5], "scaled": [0, 1, 0.5, 0.5, 0.75]}, 'the numbers of "The"'),
    (
        {"scores": S, "scaled": H, "weights": [0.1333, 0.2667, 0.2667, 0.1333, 0.2]},
        "without taking exponentials",
    ),
    (
        {"scores": S, "scaled": H, "weights": np.exp(H)},
        "These are the exponentials; divide them by their sum",
    ),
    (
        {"scores": S, "scaled": H, "weights": W, "output": W},
        "output: These are the weights; the output is weights @ V",
    ),
    ({"scores": S, "scaled": H, "weights": W, "output": W[:4]}, 'The value of "mat" is missing'),
    ({"scores": S, "scaled": H, "weights": [0.2, 0.3, 0.3, 0.2, 0.2]}, "rounded too coarsely"),
]

TWO = [
    ({"weights": soft(SCORES[0] / 2)}, "That is with scaling"),
    ({"weights": soft(SCORES[0] * 2)}, "You multiplied by √d_k"),
    ({"weights": soft(SCORES[1])}, 'the weights of "cat"'),
    ({"weights": SCORES[0] / SCORES[0].sum()}, "without taking exponentials"),
    ({"weights": soft(SCORES[0]), "sharper": 0.7375}, "sharper: The ratio is inverted"),
    ({"weights": soft(SCORES[0]), "sharper": 0.106}, "the difference of the two"),
    ({"sharper": 1.356, "spread": 512}, "spread: That is the variance"),
    ({"spread": 0.0442}, "the scale factor"),
    ({"spread": 22.63, "ratio": 22.63}, "take exp of it"),
    ({"spread": 22.63, "ratio": math.exp(23)}, "Keep more digits"),
]

SELF = {"itself": False, "most": ["t0", "t1", "t1"], "weights": [0.2119, 0.5761, 0.2119], "change": "b"}
X = three_tokens.Q
A3 = soft(X @ X.T / 2)
THREE = [
    ({"itself": True}, "A longer key can win"),
    ({"itself": "yes", "most": [0, 1, 2]}, "itself: Look at row t2: with itself it scores 8, with t1 10"),
    ({**SELF, "most": [0, 1, 2]}, "most: Look at row t2"),
    ({**SELF, "most": [1, 2, 2]}, "You count from 1"),
    ({**SELF, "most": ["t0", "t1", "t0"]}, "down the columns"),
    ({**SELF, "weights": soft([8, 10, 8])}, "weights: The scale is missing"),
    ({**SELF, "weights": A3[:, 2]}, "the column of t2"),
    ({**SELF, "weights": A3}, "the whole table"),
    ({**SELF, "change": "a"}, "how sharp a row is, not which key wins"),
    ({**SELF, "change": "c"}, "a causal mask does not mask it"),
]

OW = [0.1065, 0.7870, 0.1065]
THIRD = [1 / 3] * 3
FOUR = [
    ({"weights": [0, 1, 0], "output": [0, 6]}, "exp(0) is 1, not 0: each still gets a share"),
    ({"weights": soft([0, 4, 0])}, "The scale is missing"),
    ({"weights": soft([0, 1, 0])}, "You divided by d_k"),
    ({"weights": [0, 4, 0]}, "These are the scores: take their softmax"),
    ({"weights": [0.0963, 0.7112, 0.0963]}, "there are three keys"),
    ({"weights": OW, "output": OW}, "output: These are the weights"),
    ({"weights": OW, "across": [0, 0, 0]}, "across: Keys at right angles score 0, and exp(0) is 1"),
    ({"across": [0.25, 0.25, 0.25]}, "there are three keys"),
    ({"across": THIRD, "length": 10.577}, "length: That is L²; take its root"),
    ({"across": THIRD, "length": 3.0314}, "You counted one other key; there are two"),
]

FIVE = [
    ({"variance": 64 * 9}, "its variance is σ² · σ², not σ²"),
    ({"variance": 72}, "the standard deviation; the variance is its square"),
    ({"variance": 64}, "That is for variance 1"),
    ({"variance": 64 * 64 * 81}, "d_k times, not d_k² times"),
    ({"variance": lambda d_k, sigma2: d_k * sigma2**4}, "its second power, not its fourth"),
    ({"variance": 5184, "scale": 1 / 8}, "the scale for entries of variance 1"),
    ({"variance": 5184, "scale": 1 / 5184}, "scale: You divided by the variance"),
    ({"variance": 5184, "scale": 72}, "That is the divisor"),
    (
        {"variance": lambda d_k, sigma2: d_k * sigma2**2, "scale": lambda d_k, sigma2: 1 / (d_k * sigma2)},
        "The root of d_k is missing",
    ),
    ({"scale": 1 / 72, "keys_only": 1 / 72}, "now the queries have variance 1"),
    ({"variance": lambda d_k, sigma2: 5184}, "is a size hard-coded in the function?"),
]

C = np.tril(np.ones((5, 5), bool))
P = (np.arange(5) < np.array([[3], [5]]))[:, None, None]
SIX = [
    ({"causal": np.triu(np.ones((5, 5), bool), 1)}, "inverted. True means attend"),
    ({"causal": np.triu(np.ones((5, 5), bool))}, "the upper triangle"),
    ({"causal": lambda seq_len: np.tri(seq_len, k=-1, dtype=bool)}, "The diagonal is missing"),
    ({"causal": np.tril(np.ones((5, 5)))}, "make it boolean"),
    ({"causal": np.where(C, 0, -np.inf)}, "the mask to add to the scores"),
    ({"causal": C, "padding": ~P}, "padding: The masks are inverted"),
    ({"causal": C, "padding": P[:, 0, 0]}, "real[:, None, None, :]"),
    ({"causal": C, "padding": P.swapaxes(-1, -2)}, "masks the padded queries"),
    ({"causal": C, "padding": P, "both": C | P}, "That is | (or)"),
    (
        {"causal": C, "padding": lambda lengths, n: np.arange(n) <= np.array(lengths)[:, None, None, None]},
        "One key too many",
    ),
]

XS = np.arange(3 * 512).reshape(3, 512)
SPLIT = XS.reshape(3, 8, 64).swapaxes(0, 1)
SEVEN = [
    ({"split": XS.reshape(8, 3, 64)}, "a reshape moves nothing in memory"),
    ({"split": lambda x, num_heads: x.reshape(num_heads, len(x), -1)}, "a reshape moves nothing in memory"),
    ({"split": XS.reshape(3, 8, 64)}, "swap the first two axes"),
    ({"split": XS.reshape(3, 64, 8).transpose(2, 0, 1)}, "every 8th to the same head"),
    ({"split": XS.reshape(3, 64, 8).swapaxes(0, 1)}, "8 heads of 64, not 64 heads of 8"),
    (
        {"split": lambda x, num_heads: x.reshape(3, 8, 64).swapaxes(0, 1)},
        "split(an array of float64 with shape (5, 12), 3) raised",
    ),
    ({"split": SPLIT, "merge": SPLIT.reshape(3, 512)}, "merge: You reshaped directly"),
    (
        {"split": SPLIT, "merge": np.concatenate(list(SPLIT[::-1]), axis=-1)},
        "concatenated in the wrong order",
    ),
    ({"split": SPLIT, "merge": np.concatenate(list(SPLIT), axis=0)}, "stacked below each other"),
    ({"split": SPLIT, "merge": lambda split: split.sum(axis=0)}, "summed"),
]


def loops(scale=lambda d_k: math.sqrt(d_k), hide=None, seen=lambda m: m):
    """Build attention with loops as a learner writes it, with a parameter for each mistake."""

    def attention(query, key, value, mask=None):
        q_len, kv_len, d_k = len(query), len(key), query.shape[1]
        none = mask is None
        mask = np.broadcast_to(True if none else mask, (q_len, kv_len))
        output = []
        for i in range(q_len):
            keys = [j for j in range(kv_len) if hide is not None or none or seen(mask[i, j])]
            scores = [float(query[i] @ key[j]) / scale(d_k) for j in keys]
            if hide is not None:
                scores = [s if none or seen(mask[i, j]) else hide for j, s in zip(keys, scores, strict=True)]
            top = max(scores, default=0.0)
            exponentials = [math.exp(s - top) for s in scores]
            weights = [e / sum(exponentials) for e in exponentials]
            shares = list(zip(weights, keys, strict=True))
            output.append([sum(w * value[j, c] for w, j in shares) for c in range(value.shape[1])])
        return output

    return attention


def vectors(
    normalise,
    hide=lambda scores, mask: np.where(mask, scores, -np.inf),
    after=lambda w, mask: w,
    mix=np.matmul,
):
    def attention(query, key, value, mask=None):
        mask = np.broadcast_to(True if mask is None else mask, (len(query), len(key)))
        with np.errstate(all="ignore"):
            weights = after(normalise(hide(query @ key.T / np.sqrt(query.shape[-1]), mask)), mask)
            return mix(weights, value)

    return attention


def stable(scores, axis=-1):
    e = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def packed(split, merge):
    def many_heads(query, key, value, num_heads, mask=None):
        one = solved["attention"]
        heads = zip(*(split(x, num_heads) for x in (query, key, value)), strict=True)
        masks = np.broadcast_to(True if mask is None else mask, (num_heads, len(query), len(key)))
        return merge(np.array([one(*head, seen) for head, seen in zip(heads, masks, strict=True)]))

    return {**solved, "many_heads": many_heads}


def cut(x, h):
    return x.reshape(len(x), h, -1).swapaxes(0, 1)


def side_by_side(heads):
    return np.concatenate(list(heads), axis=-1)


solved = right(8)
EIGHT = [
    (loops(scale=lambda d_k: 1), "attention: error: scale missing. The scale is missing."),
    (loops(scale=lambda d_k: d_k), "The scores are divided by head_dim, not by its square root"),
    (loops(seen=lambda m: not m), "The mask is inverted: True drops a key"),
    (loops(hide=-1e9), "Empty rows attend to masked keys"),
    (vectors(stable, mix=lambda weights, value: weights), "The weights are returned, not the output"),
    (vectors(lambda s: stable(s, axis=0)), "Softmax runs over queries"),
    (vectors(stable), "Empty rows are NaN"),
    (vectors(stable, hide=lambda s, m: s, after=lambda w, m: np.where(m, w, 0)), "applied after the softmax"),
    (packed(lambda x, h: x.reshape(h, len(x), -1), side_by_side), "many_heads: error: heads mixed."),
    (packed(lambda x, h: x.reshape(len(x), -1, h).transpose(2, 0, 1), side_by_side), "split as (d h), expected (h d)"),
]  # fmt: skip

WRONG = [
    pytest.param(n, answer, words, id=f"{n}-{words[:40]}")
    for n, answers in zip(NUMBERS, (ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, EIGHT), strict=True)
    for answer, words in answers
]


def test_each_exercise_has_at_least_ten_wrong_answers():
    assert min(sum(case.values[0] == n for case in WRONG) for n in NUMBERS) >= 10


@pytest.mark.parametrize(("n", "answer", "words"), WRONG)
def test_a_wrong_answer_gets_the_fitting_hint(n, answer, words):
    result = check(n, answer)
    assert not result.correct
    assert words in result.hint
    assert "not yet" in str(result)


@pytest.mark.parametrize("n", range(1, 8))
def test_each_known_mistake_gets_its_own_hint(n):
    mistakes, whole = list(EXERCISES[n - 1].list_mistakes()), right(n)
    assert len(mistakes) >= 10
    for mistake in mistakes:
        result = check(n, {**whole, **mistake.answer})
        assert not result.correct, mistake.hint
        assert mistake.hint in result.hint


def test_heads_in_reverse_order_are_recognised():
    hint = check(8, packed(cut, lambda heads: side_by_side(heads[::-1]))).hint
    assert hint.startswith("many_heads: error: heads reversed.")


def test_hints_do_not_mention_the_calling_convention():
    def of_one_query(query, key, value, mask=None):
        return solved["attention"](query[:1], key, value, mask) if len(query) == 1 else 1 / 0

    for answer in (loops(seen=lambda m: not m), of_one_query):
        hint = check(8, answer).hint
        assert not any(word in hint for word in ("describe", "description", "without=", "layout"))


def test_hint_for_an_unknown_fault_names_what_the_failing_calls_share():
    def negative(query, key, value, num_heads, mask=None):
        return solved["many_heads"](query, key, value, num_heads, mask) * (1 if num_heads == 1 else -1)

    assert "differs from the definition for several heads" in check(8, {"many_heads": negative}).hint
