"""Multi-head attention, and the transformer block: attention and a feed-forward network with residual connections.

    pre-norm     x = x + attention(norm(x))       then  x = x + feed_forward(norm(x))
    post-norm    x = norm(x + attention(x))       then  x = norm(x + feed_forward(x))

Attention moves information between tokens; the feed-forward network works on each token separately. The residual
connection (the `x +`) is a direct path through the block, and the normalisation keeps the numbers at the same scale.
The transformer was first published with post-norm (Vaswani et al., 1706.03762); pre-norm came later and makes the
training of deep stacks more stable.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from regard.learn.checked import scaled_dot_product_attention
from regard.learn.validation import (
    Floats,
    MaskLike,
    TrueMeans,
    as_choice,
    as_floats,
    read_mask,
    require,
)


class Layer:
    """A part of a model. Its arrays are what a model would learn, and its layers have arrays of their own."""

    def parameters(self) -> dict[str, Floats]:
        """Return the arrays that a model would learn, by name, such as "W_Q" or "attention.W_Q" in a block.

        >>> heads = NumpyMultiHeadAttention(embed_dim=4, num_heads=2)
        >>> {name: array.shape for name, array in heads.parameters().items()}
        {'W_Q': (4, 4), 'W_K': (4, 4), 'W_V': (4, 4), 'W_O': (4, 4)}
        """
        found: dict[str, Floats] = {}
        for name, value in vars(self).items():
            if isinstance(value, Layer):
                found |= {f"{name}.{inner}": array for inner, array in value.parameters().items()}
            elif isinstance(value, np.ndarray):
                found[name] = value
        return found

    def parameter_count(self) -> int:
        """Count the numbers that a model would learn."""
        return sum(array.size for array in self.parameters().values())


class NumpyMultiHeadAttention(Layer):
    """Multi-head attention in NumPy, written to be read. Each head has its own `embed_dim / num_heads` columns.

    The projections `W_Q`, `W_K`, `W_V` and `W_O` are arrays (embed_dim, embed_dim) that multiply from the right. A
    model learns them; here they are random, and you can assign others.

    Args:
        embed_dim: Number of entries in each token.
        num_heads: Number of heads; divides `embed_dim`.
        seed: Seed of the random projections.

    >>> heads = NumpyMultiHeadAttention(embed_dim=4, num_heads=2)
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
        received = f"embed_dim {embed_dim} and num_heads {num_heads}"
        hint = f"Choose num_heads from {[n for n in range(1, embed_dim + 1) if embed_dim % n == 0]}."
        require(embed_dim % num_heads == 0, "NumpyMultiHeadAttention", received, "heads of equal width", hint)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads

        # A variance of 1 / embed_dim keeps the entries of x @ W about as large as those of x.
        rng = np.random.default_rng(seed)
        shape, spread = (embed_dim, embed_dim), embed_dim**-0.5
        self.W_Q: Floats = rng.normal(scale=spread, size=shape)
        self.W_K: Floats = rng.normal(scale=spread, size=shape)
        self.W_V: Floats = rng.normal(scale=spread, size=shape)
        self.W_O: Floats = rng.normal(scale=spread, size=shape)

    def forward(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        mask: MaskLike = None,
        true_means: TrueMeans = None,
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

        >>> heads = NumpyMultiHeadAttention(embed_dim=6, num_heads=3)
        >>> output, weights = heads.forward(np.ones((2, 5, 6)), key=np.ones((2, 7, 6)))
        >>> output.shape, weights.shape
        ((2, 5, 6), (2, 3, 5, 7))
        """
        mask = read_mask("NumpyMultiHeadAttention", mask, true_means)
        key = query if key is None else key
        value = key if value is None else value

        query, key, value = (
            as_floats("NumpyMultiHeadAttention", "tokens", x, "n", "embed_dim") for x in (query, key, value)
        )
        with np.errstate(invalid="ignore", over="ignore"):  # a masked row may be infinite
            Q = self.split_heads(query @ self.W_Q)  # (…, num_heads, q_len, head_dim)
            K = self.split_heads(key @ self.W_K)  # (…, num_heads, kv_len, head_dim)
            V = self.split_heads(value @ self.W_V)
            mixed, weights = scaled_dot_product_attention(Q, K, V, mask)
            return self.merge_heads(mixed) @ self.W_O, weights

    __call__ = forward

    def split_heads(self, x: ArrayLike) -> Floats:
        """Split the columns into heads.

        Args:
            x: An array (…, n, embed_dim).

        Returns:
            The heads (…, num_heads, n, head_dim).

        >>> NumpyMultiHeadAttention(embed_dim=4, num_heads=2).split_heads([[0, 1, 2, 3], [4, 5, 6, 7]])
        array([[[0., 1.],
                [4., 5.]],
        <BLANKLINE>
               [[2., 3.],
                [6., 7.]]])
        """
        x = as_floats("split_heads", "x", x, "n", "embed_dim")
        return x.reshape(*x.shape[:-1], self.num_heads, self.head_dim).swapaxes(-3, -2)

    def merge_heads(self, x: ArrayLike) -> Floats:
        """Concatenate the heads: the inverse of `split_heads`.

        Args:
            x: Heads (…, num_heads, n, head_dim).

        Returns:
            The heads side by side (…, n, embed_dim).

        >>> heads = NumpyMultiHeadAttention(embed_dim=4, num_heads=2)
        >>> heads.merge_heads([[[0, 1], [4, 5]], [[2, 3], [6, 7]]])
        array([[0., 1., 2., 3.],
               [4., 5., 6., 7.]])
        """
        x = as_floats("merge_heads", "x", x, "num_heads", "n", "head_dim")
        *lead, _, n, _ = x.shape
        return x.swapaxes(-3, -2).reshape(*lead, n, self.embed_dim)


def relu(x: ArrayLike) -> Floats:
    """Compute max(x, 0).

    Args:
        x: An array of any shape.

    Returns:
        An array of the same shape.

    >>> relu([-2, 0, 3])
    array([0., 0., 3.])
    """
    return np.maximum(as_floats("relu", "x", x), 0.0)


def gelu(x: ArrayLike) -> Floats:
    """Compute x times the probability that a standard normal number is below x: a smooth ReLU.

    Args:
        x: An array of any shape.

    Returns:
        An array of the same shape.

    >>> gelu([-2, 0, 3]).round(3)
    array([-0.046,  0.   ,  2.996])
    """
    x = as_floats("gelu", "x", x)
    below = [math.erfc(-z) / 2 for z in (x / math.sqrt(2)).flat]  # NumPy has no error function
    return x * np.array(below, dtype=np.float64).reshape(x.shape)


ACTIVATIONS = {"relu": relu, "gelu": gelu}


class LayerNorm(Layer):
    """Normalise each token to mean 0 and variance 1, then multiply by `gain` and add `bias`, (embed_dim,) each.

    Args:
        embed_dim: Number of entries in each token.
        eps: Number added to the variance, at least 0.

    >>> LayerNorm(embed_dim=4)([[1, 2, 3, 4]]).round(3)
    array([[-1.342, -0.447,  0.447,  1.342]])
    """

    def __init__(self, embed_dim: int, *, eps: float = 1e-5) -> None:
        self.embed_dim, self.eps = embed_dim, eps
        self.gain: Floats = np.ones(embed_dim)
        self.bias: Floats = np.zeros(embed_dim)

    def forward(self, x: ArrayLike) -> Floats:
        """Normalise each token.

        Args:
            x: Tokens (…, embed_dim).

        Returns:
            The normalised tokens (…, embed_dim).
        """
        x, expected = as_floats("LayerNorm", "x", x, "embed_dim"), f"x of shape (…, {self.embed_dim})"
        hint = "Build a LayerNorm with the embed_dim of your tokens."
        require(x.shape[-1] == self.embed_dim, "LayerNorm", f"x of shape {x.shape}", expected, hint)
        mean = x.mean(axis=-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
        normalised: Floats = (x - mean) / np.sqrt(variance + self.eps)
        return normalised * self.gain + self.bias

    __call__ = forward


class FeedForward(Layer):
    """A network with one hidden layer, applied to each token separately: activation(x W_1 + b_1) W_2 + b_2.

    `W_1` (embed_dim, hidden_dim) and `W_2` (hidden_dim, embed_dim) are random, the biases are 0; you can assign others.

    Args:
        embed_dim: Number of entries in each token.
        hidden_dim: Number of entries in the hidden layer.
        activation: "relu" or "gelu".
        seed: Seed of the random parameters.

    >>> network = FeedForward(embed_dim=2, hidden_dim=2)
    >>> network.W_1, network.W_2 = np.eye(2), np.eye(2)
    >>> network([[1, -1]])
    array([[1., 0.]])
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, activation: str = "relu", seed: int = 0) -> None:
        self.embed_dim, self.hidden_dim = embed_dim, hidden_dim
        self.activation = as_choice("FeedForward", "activation", activation, ACTIVATIONS)
        # A separate stream: with the same seed, the attention of a block draws different numbers.
        rng = np.random.default_rng([seed, 1])
        self.W_1: Floats = rng.normal(scale=embed_dim**-0.5, size=(embed_dim, hidden_dim))
        self.b_1: Floats = np.zeros(hidden_dim)
        self.W_2: Floats = rng.normal(scale=hidden_dim**-0.5, size=(hidden_dim, embed_dim))
        self.b_2: Floats = np.zeros(embed_dim)

    def forward(self, x: ArrayLike) -> Floats:
        """Apply the network to each token.

        Args:
            x: Tokens (…, embed_dim).

        Returns:
            The output (…, embed_dim).
        """
        x = as_floats("FeedForward", "x", x, "embed_dim")
        hidden = ACTIVATIONS[self.activation](x @ self.W_1 + self.b_1)  # (…, hidden_dim)
        return hidden @ self.W_2 + self.b_2

    __call__ = forward


class TransformerBlock(Layer):
    """Multi-head attention and a feed-forward network, each with a residual connection and a normalisation.

    Its parts are `attention`, `feed_forward`, `attention_norm` and `feed_forward_norm`; you can read and assign their
    arrays.

    Args:
        embed_dim: Number of entries in each token.
        num_heads: Number of heads; divides `embed_dim`.
        hidden_dim: Number of entries in the hidden layer; four times `embed_dim` by default.
        norm: "pre" or "post".
        activation: "relu" or "gelu".
        seed: Seed of the random parameters.

    >>> block = TransformerBlock(embed_dim=6, num_heads=2)
    >>> output, weights = block(np.random.default_rng(0).normal(size=(5, 6)))
    >>> output.shape, weights.shape
    ((5, 6), (2, 5, 5))
    >>> block.parameter_count()  # 4·6² for attention, 2·6·24 + 24 + 6 for the network, 4·6 for the two norms
    486
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_dim: int | None = None,
        norm: str = "pre",
        activation: str = "relu",
        seed: int = 0,
    ) -> None:
        self.norm = as_choice("TransformerBlock", "norm", norm, ["pre", "post"])
        self.attention = NumpyMultiHeadAttention(embed_dim, num_heads, seed=seed)
        self.attention_norm = LayerNorm(embed_dim)
        hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.feed_forward = FeedForward(embed_dim, hidden_dim, activation=activation, seed=seed)
        self.feed_forward_norm = LayerNorm(embed_dim)

    def forward(
        self, x: ArrayLike, mask: MaskLike = None, true_means: TrueMeans = None
    ) -> tuple[Floats, Floats]:
        """Run the block.

        Args:
            x: Tokens (…, n, embed_dim).
            mask: Boolean, True = attend; broadcasts to the shape of the weights. Or of 0 and 1, with `true_means`.
            true_means: What True and 1 in the mask stand for, "attend" or "ignore". Without it, the mask is boolean and
                True means attend.

        Returns:
            The output (…, n, embed_dim) and the weights of every head (…, num_heads, n, n).

        >>> block = TransformerBlock(embed_dim=4, num_heads=2, norm="post")
        >>> output, weights = block.forward(np.eye(4)[:3], mask=np.tri(3, dtype=bool))
        >>> weights[:, 0]  # the first token attends to itself only
        array([[1., 0., 0.],
               [1., 0., 0.]])
        """
        x = as_floats("TransformerBlock", "x", x, "n", "embed_dim")
        mask = read_mask("TransformerBlock", mask, true_means)
        with np.errstate(invalid="ignore", over="ignore"):  # a masked row may be infinite
            if self.norm == "pre":
                attended, weights = self.attention(self.attention_norm(x), mask=mask)
                x = x + attended
                x = x + self.feed_forward(self.feed_forward_norm(x))
            else:
                attended, weights = self.attention(x, mask=mask)
                x = self.attention_norm(x + attended)
                x = self.feed_forward_norm(x + self.feed_forward(x))
        return x, weights

    __call__ = forward


def dropout(weights: ArrayLike, rate: float, *, seed: int = 0) -> Floats:
    """Set each weight to 0 with probability `rate`, and divide the others by 1 − rate.

    A row then sums to 1 only on average. Models do this in training, so that no output depends on a single key, and not
    afterwards.

    Args:
        weights: Weights of any shape.
        rate: Probability to drop a weight, at least 0 and below 1.
        seed: Seed of the random choice.

    Returns:
        Weights of the same shape.

    Raises:
        ArgumentError: If the rate is negative, or 1 or more.

    >>> dropout([[0.25, 0.25, 0.25, 0.25]], rate=0.5, seed=1)
    array([[0.5, 0.5, 0. , 0.5]])
    """
    weights = as_floats("dropout", "weights", weights)
    hint = "It is the chance that a weight is dropped, for example 0.1; 0 drops nothing."
    require(0 <= rate < 1, "dropout", f"rate {rate:g}", "rate of at least 0 and below 1", hint)
    kept = np.random.default_rng(seed).random(weights.shape) >= rate
    return np.where(kept, weights / (1 - rate), 0.0)
