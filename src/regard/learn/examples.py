"""The inputs of the worked examples in the book; the results are computed where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.learn.validation import Floats

Table = Sequence[Sequence[float]]


@dataclass(frozen=True, eq=False)
class Example:
    """Queries (q_len, d_k), keys (kv_len, d_k), values (kv_len, d_v), and a token for each key.

    >>> cat.tokens
    ('The', 'cat', 'sat', 'on', 'mat')
    >>> cat.Q @ cat.K[1]  # each query against the key of "cat"
    array([2., 0., 2., 1., 1.])
    """

    tokens: tuple[str, ...]
    Q: Floats
    K: Floats
    V: Floats


@dataclass(frozen=True, eq=False)
class ScoreExample:
    """Queries (q_len, d_k) and keys (kv_len, d_k), without values, for lessons about scores.

    >>> (magnitude.Q @ magnitude.K.T)[0]
    array([ 5., 15.,  7.])
    """

    tokens: tuple[str, ...]
    Q: Floats
    K: Floats


@dataclass(frozen=True, eq=False)
class ProjectionExample:
    """Embeddings X (n, d), a token for each, and the matrices that project them to Q, K and V: Q = X @ W_Q.

    >>> (projection.X @ projection.W_Q).shape
    (3, 4)
    """

    tokens: tuple[str, ...]
    X: Floats
    W_Q: Floats
    W_K: Floats
    W_V: Floats


def _read_only(rows: Table) -> Floats:
    """Convert rows to a read-only float64 array, because all users share it."""
    array = np.array(rows, dtype=np.float64)
    array.setflags(write=False)
    return array


# Five tokens of four numbers: the main example of the book.
cat = Example(
    tokens=("The", "cat", "sat", "on", "mat"),
    Q=_read_only([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]),
    K=_read_only([[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]),
    V=_read_only([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]),
)

# Two queries, three keys: small enough to work out by hand, and not square.
tiny_head = Example(
    tokens=("k0", "k1", "k2"),
    Q=_read_only([[1, 0], [0, 1]]),
    K=_read_only([[1, 0], [1, 1], [0, 1]]),
    V=_read_only([[1, 0], [0, 2], [1, 1]]),
)

# What does the pronoun refer to? One query, "it", against three earlier words.
pronoun = Example(
    tokens=("animal", "street", "because"),
    Q=_read_only([[3, 1]]),
    K=_read_only([[3, 1], [1, 4], [1.5, 0.5]]),
    V=_read_only([[2.0, 1.5], [0.5, 0.3], [-0.5, 1.2]]),
)

# Keys equal to queries, so that the scores are symmetric although the weights are not.
three_tokens = Example(
    tokens=("t0", "t1", "t2"),
    Q=_read_only([[3, 1, 0, 0], [1, 4, 0, 0], [2, 2, 0, 0]]),
    K=_read_only([[3, 1, 0, 0], [1, 4, 0, 0], [2, 2, 0, 0]]),
    V=_read_only([[1, 0, 0, 0], [0, 1, 0, 0], [0.5, 0.5, 0, 0]]),
)

# Three tokens of three numbers, to step through every multiplication.
three_by_three = Example(
    tokens=("cats", "like", "fish"),
    Q=_read_only([[1, 0, 2], [0, 2, 1], [1, 1, 0]]),
    K=_read_only([[1, 1, 0], [0, 1, 1], [2, 0, 1]]),
    V=_read_only([[1, 0, 2], [0, 3, 1], [2, 1, 0]]),
)

# Two keys in the direction of the query and one in another: a dot product depends on length too.
magnitude = ScoreExample(
    tokens=("short aligned", "long aligned", "misaligned"),
    Q=_read_only([[3, 1]]),
    K=_read_only([[1.5, 0.5], [4.5, 1.5], [1, 4]]),
)

# Three embeddings. The matrices are torch.randn(4, 4) * 0.5, drawn in this order after torch.manual_seed(42).
projection = ProjectionExample(
    tokens=("bank", "river", "loan"),
    X=_read_only([[0.5, 0.3, 0.8, 0.2], [0.2, 0.9, 0.1, 0.3], [0.8, 0.1, 0.4, 0.7]]),
    W_Q=_read_only(
        [
            [0.96345764, 0.74364203, 0.4503586, -1.0527605],
            [0.33920923, -0.61727244, -0.021533739, -0.8023335],
            [-0.37606764, 0.8243615, -0.19623932, -0.70180357],
            [-0.36394066, -0.2797151, -0.38441944, 0.3812227],
        ]
    ),
    W_K=_read_only(
        [
            [0.82115847, -0.079798736, -0.24869877, 0.21979463],
            [-0.37906557, 0.5391588, 0.40040028, 0.8403103],
            [0.6395622, 0.6482114, 0.30523324, 0.6673689],
            [-0.11581216, 0.020879745, -0.12578765, 0.42992926],
        ]
    ),
    W_V=_read_only(
        [
            [-0.69233686, -0.43561807, -0.11168296, 0.8586807],
            [0.15944016, -0.21225949, 0.15286046, -0.38729626],
            [-0.77878624, 0.49781805, -0.43989292, -0.30057102],
            [-0.6370756, 1.0613925, -0.61732656, -0.24395694],
        ]
    ),
)
