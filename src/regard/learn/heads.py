"""Multi-head attention: project, split into heads, attend in each head, merge, project."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.attention import scaled_dot_product_attention
from regard.learn.validation import Floats, TrueMeans, as_count, as_floats, read_mask


class MultiHeadAttention:
    """Attention with `num_heads` heads, each on its own `embed_dim / num_heads` columns.

    The projections `W_Q`, `W_K`, `W_V` and `W_O` are arrays (embed_dim, embed_dim) that multiply from the right. A
    model learns them; here they are random, and you can assign others.

    Args:
        embed_dim: Number of entries in each token.
        num_heads: Number of heads; divides `embed_dim`.
        seed: Seed of the random projections.

    >>> heads = MultiHeadAttention(embed_dim=4, num_heads=2)
    >>> heads.W_Q = heads.W_K = heads.W_V = heads.W_O = np.eye(4)
    >>> output, weights = heads(np.eye(4)[:3])
    >>> output.shape, weights.shape
    ((3, 4), (2, 3, 3))
    >>> weights[1].round(2)  # the second head has columns 2 and 3, where only the third token is not 0
    array([[0.33, 0.33, 0.33],
           [0.33, 0.33, 0.33],
           [0.25, 0.25, 0.5 ]])
    """

    def __init__(self, embed_dim: int, num_heads: int, *, seed: int = 0) -> None:
        self.embed_dim = as_count("MultiHeadAttention", "embed_dim", embed_dim, minimum=1)
        self.num_heads = as_count("MultiHeadAttention", "num_heads", num_heads, minimum=1)
        if self.embed_dim % self.num_heads:
            divisors = [n for n in range(1, self.embed_dim + 1) if self.embed_dim % n == 0]
            wider = embed_dim + num_heads - embed_dim % num_heads
            raise ArgumentError(
                "MultiHeadAttention",
                received=f"embed_dim {embed_dim} and num_heads {num_heads}",
                expected="an embed_dim that divides into num_heads equal parts",
                hint=f"Choose num_heads from {divisors}, or embed_dim {wider}.",
            )
        self.head_dim = self.embed_dim // self.num_heads

        # A variance of 1 / embed_dim keeps the entries of x @ W about as large as those of x.
        rng = np.random.default_rng(seed)
        shape, spread = (self.embed_dim, self.embed_dim), self.embed_dim**-0.5
        self.W_Q: Floats = rng.normal(scale=spread, size=shape)
        self.W_K: Floats = rng.normal(scale=spread, size=shape)
        self.W_V: Floats = rng.normal(scale=spread, size=shape)
        self.W_O: Floats = rng.normal(scale=spread, size=shape)

    def forward(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike | None = None,
        value: npt.ArrayLike | None = None,
        mask: npt.ArrayLike | None = None,
        true_means: TrueMeans | None = None,
    ) -> tuple[Floats, Floats]:
        """Attend with all heads: self-attention without `key`, cross-attention with it.

        Args:
            query: Tokens (…, q_len, embed_dim).
            key: Tokens (…, kv_len, embed_dim); `query` by default.
            value: Tokens (…, kv_len, embed_dim); `key` by default.
            mask: Boolean, True = attend; broadcasts to the shape of the weights. Or of 0 and 1, with `true_means`.
            true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
                True means attend.

        Returns:
            The output (…, q_len, embed_dim) and the weights of every head (…, num_heads, q_len, kv_len).

        >>> heads = MultiHeadAttention(embed_dim=6, num_heads=3)
        >>> output, weights = heads.forward(np.ones((2, 5, 6)), key=np.ones((2, 7, 6)))
        >>> output.shape, weights.shape
        ((2, 5, 6), (2, 3, 5, 7))
        """
        if key is None and value is not None:
            raise ArgumentError(
                "MultiHeadAttention",
                received="a value without a key",
                expected="a key for every value",
                hint="Pass key= too. If keys and values come from one sequence, key= alone is enough.",
            )
        mask = read_mask("MultiHeadAttention", mask, true_means)
        key = query if key is None else key
        value = key if value is None else value

        Q = self.split_heads(self._project("query", query, "W_Q"))  # (…, num_heads, q_len, head_dim)
        K = self.split_heads(self._project("key", key, "W_K"))  # (…, num_heads, kv_len, head_dim)
        V = self.split_heads(self._project("value", value, "W_V"))
        mixed, weights = scaled_dot_product_attention(Q, K, V, mask)
        return self._project("mixed", self.merge_heads(mixed), "W_O"), weights

    __call__ = forward

    def split_heads(self, x: npt.ArrayLike) -> Floats:
        """Split the columns into heads.

        Args:
            x: An array (…, n, embed_dim).

        Returns:
            The heads (…, num_heads, n, head_dim).

        >>> MultiHeadAttention(embed_dim=4, num_heads=2).split_heads([[0, 1, 2, 3], [4, 5, 6, 7]])
        array([[[0., 1.],
                [4., 5.]],
        <BLANKLINE>
               [[2., 3.],
                [6., 7.]]])
        """
        x = as_floats("split_heads", "x", x, "n", "embed_dim")
        self._check_shape("split_heads", x.shape, x.shape[-1:], (self.embed_dim,), "(…, n, embed_dim)")
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).swapaxes(-3, -2)

    def merge_heads(self, x: npt.ArrayLike) -> Floats:
        """Concatenate the heads: the inverse of `split_heads`.

        Args:
            x: Heads (…, num_heads, n, head_dim).

        Returns:
            The heads side by side (…, n, embed_dim).

        >>> heads = MultiHeadAttention(embed_dim=4, num_heads=2)
        >>> heads.merge_heads([[[0, 1], [4, 5]], [[2, 3], [6, 7]]])
        array([[0., 1., 2., 3.],
               [4., 5., 6., 7.]])
        """
        x = as_floats("merge_heads", "x", x, "num_heads", "n", "head_dim")
        sizes, expected = (x.shape[-3], x.shape[-1]), (self.num_heads, self.head_dim)
        self._check_shape("merge_heads", x.shape, sizes, expected, "(…, num_heads, n, head_dim)")
        *lead, _, n, _ = x.shape
        return x.swapaxes(-3, -2).reshape(*lead, n, self.embed_dim)

    def parameters(self) -> dict[str, Floats]:
        """Return the arrays that a model would learn, by name.

        >>> {name: array.shape for name, array in MultiHeadAttention(embed_dim=4, num_heads=2).parameters().items()}
        {'W_Q': (4, 4), 'W_K': (4, 4), 'W_V': (4, 4), 'W_O': (4, 4)}
        """
        return {"W_Q": self.W_Q, "W_K": self.W_K, "W_V": self.W_V, "W_O": self.W_O}

    def _project(self, name: str, x: npt.ArrayLike, by: str) -> Floats:
        x = as_floats("MultiHeadAttention", name, x, "n", "embed_dim")
        W = as_floats("MultiHeadAttention", by, getattr(self, by), "embed_dim", "embed_dim")
        width, square = (self.embed_dim,), (self.embed_dim, self.embed_dim)
        self._check_shape(f"MultiHeadAttention, {name}", x.shape, x.shape[-1:], width, "(…, n, embed_dim)")
        self._check_shape(f"MultiHeadAttention, {by}", W.shape, W.shape, square, "(embed_dim, embed_dim)")
        with np.errstate(invalid="ignore", over="ignore"):  # a masked row may be infinite
            return x @ W

    def _check_shape(
        self,
        operation: str,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        expected: tuple[int, ...],
        form: str,
    ) -> None:
        if sizes != expected:
            raise ArgumentError(
                operation,
                received=f"an array of shape {shape}",
                expected=f"shape {form} with embed_dim {self.embed_dim}, num_heads {self.num_heads} "
                f"and head_dim {self.head_dim}",
                hint="Pass an array of that shape, or build a MultiHeadAttention that fits the array.",
            )
