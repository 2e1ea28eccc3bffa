"""Softmax and its rivals: ways to turn a row of scores into shares, side by side.

Most of them take two steps: make a part of each score that is not negative, then divide by the sum of the parts.
They differ in the part:

    softmax               exp(score / temperature)      every key has a share; shifting all scores changes nothing
    normalised_sigmoid    1 / (1 + exp(−score))         high scores saturate: the best cannot stand out
    normalised_relu       max(score, 0)                 scores below 0 get nothing; none above 0, no share at all
    divide_by_sum         the score itself              negative shares, and no meaning where the sum is 0
    divide_by_maximum     the score itself              divided by the largest: nothing makes the sum 1

Two take another way. `hardmax` gives everything to the largest score and has no gradient; `sparsemax` is the
distribution nearest to the scores, with true zeros. All work on the last axis; a mask is boolean, True = attend, and a
row that sees nothing is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.validation import Bools, Floats, as_floats, as_mask, as_number
from regard.render.table import format_table


def softmax(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None, temperature: float = 1.0) -> Floats:
    """The shares exp(score / temperature), divided by their sum; scores are (…, kv_len).

    A low temperature sharpens: at 0 it is `hardmax`. A high one evens out: at infinity all shares are equal.

    >>> softmax([0, 1, 2]).round(3)
    array([0.09 , 0.245, 0.665])
    >>> softmax([1000, 1001, 1002]).round(3)  # the same distances, the same shares
    array([0.09 , 0.245, 0.665])
    >>> softmax([0, 1, 2], temperature=np.inf).round(3)
    array([0.333, 0.333, 0.333])
    """
    hint = "1 changes nothing, less sharpens, more evens out."
    temperature = as_number("softmax", "temperature", temperature, hint)
    if temperature == 0:
        return hardmax(scores, mask)
    scores, seen = _rows("softmax", scores, mask)
    # The distance is taken first: however low the temperature, the largest exponent is exactly 0.
    with np.errstate(over="ignore", invalid="ignore"):
        distances = (scores - _largest(scores, seen)) / temperature
    return _shares(np.exp(np.where(seen, distances, -np.inf)), seen)


def hardmax(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """Everything to the largest score of each row, in equal parts where several are largest; (…, kv_len).

    >>> hardmax([[0, 1, 2], [3, 0, 3]])
    array([[0. , 0. , 1. ],
           [0.5, 0. , 0.5]])
    """
    scores, seen = _rows("hardmax", scores, mask)
    return _shares(np.where(scores == _largest(scores, seen), 1.0, 0.0), seen)


def sparsemax(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """The distribution nearest to each row of scores, by straight distance; (…, kv_len).

    It comes to max(score − threshold, 0), the threshold such that the shares sum to 1; scores below it get exactly 0
    (Martins & Astudillo, 1602.02068).

    >>> sparsemax([0, 1, 1.5])  # the threshold is 0.75
    array([0.  , 0.25, 0.75])
    """
    scores, seen = _rows("sparsemax", scores, mask)
    distances = np.where(seen, scores - _largest(scores, seen), -np.inf)
    falling = -np.sort(-distances, axis=-1)  # the largest, 0, comes first; hidden scores come last
    # With the k largest kept, the threshold is (their sum − 1) / k. Keep as many as lie above their own threshold.
    counts = np.arange(1, scores.shape[-1] + 1)
    thresholds = (np.cumsum(falling, axis=-1) - 1) / counts
    kept = (falling > thresholds).sum(axis=-1, keepdims=True)
    if scores.shape[-1] == 0:
        return scores
    threshold = np.take_along_axis(thresholds, np.maximum(kept - 1, 0), axis=-1)
    # A row that sees nothing has no threshold; one must be named all the same, to subtract it.
    threshold = np.where(seen.any(axis=-1, keepdims=True), threshold, 0.0)
    return np.maximum(distances - threshold, 0.0)


def normalised_sigmoid(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """The sigmoid of each score, divided by their sum; (…, kv_len).

    >>> normalised_sigmoid([0, 0, 100]).round(3)  # the sigmoid of 100 is 1, and that of 0 is already a half
    array([0.25, 0.25, 0.5 ])
    """
    scores, seen = _rows("normalised_sigmoid", scores, mask)
    return _shares((1 + np.tanh(scores / 2)) / 2, seen)  # the sigmoid, in a form that cannot overflow


def normalised_relu(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """What each score has above 0, divided by the sum; a row with nothing above 0 is zeros; (…, kv_len).

    >>> normalised_relu([[-1, 1, 3], [-1, -2, -3]])
    array([[0.  , 0.25, 0.75],
           [0.  , 0.  , 0.  ]])
    """
    scores, seen = _rows("normalised_relu", scores, mask)
    return _shares(np.maximum(scores, 0.0), seen)


def divide_by_sum(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """Each score divided by the sum of its row: no distribution once a score is negative; (…, kv_len).

    >>> divide_by_sum([[1, 1, 2], [-1, 1, 2]])
    array([[ 0.25,  0.25,  0.5 ],
           [-0.5 ,  0.5 ,  1.  ]])
    """
    scores, seen = _rows("divide_by_sum", scores, mask)
    return _quotient(scores, scores.sum(axis=-1, keepdims=True), seen)


def divide_by_maximum(scores: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> Floats:
    """Each score divided by the largest of its row: the best gets 1, and the sum may be anything; (…, kv_len).

    >>> divide_by_maximum([1, 1, 2])
    array([0.5, 0.5, 1. ])
    """
    scores, seen = _rows("divide_by_maximum", scores, mask)
    return _quotient(scores, _largest(scores, seen), seen)


def softmax_jacobian(weights: npt.ArrayLike) -> Floats:
    """How each weight answers to each score: diag(weights) − weights weightsᵀ, (…, kv_len, kv_len).

    Entry [i, j] is the derivative of weight i by score j. It is made of the weights alone, and vanishes as one of them
    nears 1: a saturated softmax hands no gradient back.

    >>> softmax_jacobian([0.75, 0.25])
    array([[ 0.1875, -0.1875],
           [-0.1875,  0.1875]])
    >>> bool(np.abs(softmax_jacobian(softmax([40, 0, 0, 0, 0]))).max() < 1e-16)
    True
    """
    weights = as_floats("softmax_jacobian", "weights", weights, "kv_len")
    own = weights[..., :, None] * np.eye(weights.shape[-1])
    return own - weights[..., :, None] * weights[..., None, :]


RIVALS: dict[str, Callable[..., Floats]] = {
    rival.__name__: rival
    for rival in (
        softmax,
        sparsemax,
        hardmax,
        normalised_sigmoid,
        normalised_relu,
        divide_by_sum,
        divide_by_maximum,
    )
}


@dataclass(frozen=True, eq=False)
class Shares:
    """What one rival makes of a row: its `weights` (kv_len,), and how they bear two changes of the scores.

    `shift_moves` is the largest change of a weight when 1 is added to every score, `doubling_moves` that when every
    score is doubled.

    >>> shares = compare_rivals([2.0, 1.0, 0.0]).shares["softmax"]
    >>> shares.shift_moves < 1e-12, round(shares.doubling_moves, 4)
    (True, 0.2016)
    """

    name: str
    weights: Floats
    shift_moves: float
    doubling_moves: float


@dataclass(frozen=True, eq=False)
class RivalTable:
    """What every rival makes of the same `scores` (kv_len,): one of `Shares` for each, under its name in `shares`.

    >>> list(compare_rivals([2.0, 1.0, 0.0]).shares)[:3]
    ['softmax', 'sparsemax', 'hardmax']
    """

    scores: Floats
    shares: dict[str, Shares]

    def __str__(self) -> str:
        keys = [f"{score:g}" for score in self.scores]
        rows = [
            [
                name,
                *(f"{weight:.4f}" for weight in row.weights),
                f"{row.weights.sum():.4f}",
                f"{row.shift_moves:.4f}",
                f"{row.doubling_moves:.4f}",
            ]
            for name, row in self.shares.items()
        ]
        return format_table(rows, ["score", *keys, "sum", "+1 moves", "×2 moves"])


def compare_rivals(scores: npt.ArrayLike) -> RivalTable:
    """The weights that every rival gives to one row of scores, (kv_len,), as an object that prints as a table.

    >>> print(compare_rivals([1, 0.5, 0, -1]))
                 score       1     0.5       0       -1     sum  +1 moves  ×2 moves
               softmax  0.4740  0.2875  0.1744   0.0641  1.0000    0.0000    0.1832
             sparsemax  0.7500  0.2500  0.0000   0.0000  1.0000    0.0000    0.2500
               hardmax  1.0000  0.0000  0.0000   0.0000  1.0000    0.0000    0.0000
    normalised_sigmoid  0.3444  0.2933  0.2356   0.1267  1.0000    0.0440    0.0733
       normalised_relu  0.6667  0.3333  0.0000   0.0000  1.0000    0.2222    0.0000
         divide_by_sum  2.0000  1.0000  0.0000  -2.0000  1.0000    2.0000    0.0000
     divide_by_maximum  1.0000  0.5000  0.0000  -1.0000  0.5000    1.0000    0.0000
    """
    row = as_floats("compare_rivals", "scores", scores, "kv_len")
    if row.ndim != 1 or row.size == 0:
        raise ArgumentError(
            "compare_rivals",
            received=f"scores of shape {row.shape}",
            expected="one row of scores, of shape (kv_len,)",
            hint="Take one query of them, as in scores[0].",
        )
    shares = {}
    for name, rival in RIVALS.items():
        weights = rival(row)
        shift, doubling = (np.abs(rival(changed) - weights).max() for changed in (row + 1, row * 2))
        shares[name] = Shares(name, weights, float(shift), float(doubling))
    return RivalTable(row, shares)


def _rows(operation: str, scores: npt.ArrayLike, mask: npt.ArrayLike | None) -> tuple[Floats, Bools]:
    """The scores with 0 where they are hidden, so that nothing hidden can matter, and what may be seen."""
    scores = as_floats(operation, "scores", scores, "kv_len")
    seen = np.ones(scores.shape, dtype=bool) if mask is None else as_mask(operation, mask, scores.shape)
    seen = seen & (scores != -np.inf)  # a score of −inf is the other way to hide a key
    return np.where(seen, scores, 0.0), seen


def _largest(scores: Floats, seen: Bools) -> Floats:
    """The largest score that each row may see; 0 where it sees nothing."""
    largest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf, where=seen)
    return np.where(largest == -np.inf, 0.0, largest)


def _shares(parts: Floats, seen: Bools) -> Floats:
    """The parts that may be seen, divided by their sum; zeros where there is nothing to divide."""
    parts = np.where(seen, parts, 0.0)
    total = parts.sum(axis=-1, keepdims=True)
    shares = parts / np.where(total == 0.0, 1.0, total)
    return np.where(seen, shares, 0.0)  # a NaN spoils what is seen, no more


def _quotient(parts: Floats, divisor: Floats, seen: Bools) -> Floats:
    """The quotient as it comes, infinite where it must be, but zeros where nothing is seen."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(seen, parts / divisor, 0.0)
