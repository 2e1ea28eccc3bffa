"""A transformer block: attention and a feed-forward network, each with a residual connection and a normalisation.

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
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.heads import MultiHeadAttention
from regard.learn.validation import Floats, TrueMeans, as_choice, as_count, as_floats, as_number, read_mask


def relu(x: npt.ArrayLike) -> Floats:
    """Compute max(x, 0).

    Args:
        x: An array of any shape.

    Returns:
        An array of the same shape.

    >>> relu([-2, 0, 3])
    array([0., 0., 3.])
    """
    return np.maximum(as_floats("relu", "x", x), 0.0)


def gelu(x: npt.ArrayLike) -> Floats:
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


class LayerNorm:
    """Normalise each token to mean 0 and variance 1, then multiply by `gain` and add `bias`, (embed_dim,) each.

    Args:
        embed_dim: Number of entries in each token.
        eps: Number added to the variance, at least 0.

    >>> LayerNorm(embed_dim=4)([[1, 2, 3, 4]]).round(3)
    array([[-1.342, -0.447,  0.447,  1.342]])
    """

    def __init__(self, embed_dim: int, *, eps: float = 1e-5) -> None:
        self.embed_dim = as_count("LayerNorm", "embed_dim", embed_dim, minimum=1)
        self.eps = as_number("LayerNorm", "eps", eps, "It prevents a division by 0 if all entries are equal.")
        self.gain: Floats = np.ones(self.embed_dim)
        self.bias: Floats = np.zeros(self.embed_dim)

    def forward(self, x: npt.ArrayLike) -> Floats:
        """Normalise each token.

        Args:
            x: Tokens (…, embed_dim).

        Returns:
            The normalised tokens (…, embed_dim).
        """
        x = _check_tokens("LayerNorm", x, self.embed_dim)
        gain = _check_parameter("LayerNorm", "gain", self.gain, self.embed_dim)
        bias = _check_parameter("LayerNorm", "bias", self.bias, self.embed_dim)
        mean = x.mean(axis=-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
        normalised: Floats = (x - mean) / np.sqrt(variance + self.eps)
        return normalised * gain + bias

    __call__ = forward

    def parameters(self) -> dict[str, Floats]:
        """Return the arrays that a model would learn, by name."""
        return {"gain": self.gain, "bias": self.bias}


class FeedForward:
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
        self.embed_dim = as_count("FeedForward", "embed_dim", embed_dim, minimum=1)
        self.hidden_dim = as_count("FeedForward", "hidden_dim", hidden_dim, minimum=1)
        self.activation = as_choice("FeedForward", "activation", activation, ACTIVATIONS)
        # A separate stream: with the same seed, the attention of a block draws different numbers.
        rng = np.random.default_rng([seed, 1])
        narrow, wide = self.embed_dim, self.hidden_dim
        self.W_1: Floats = rng.normal(scale=narrow**-0.5, size=(narrow, wide))
        self.b_1: Floats = np.zeros(wide)
        self.W_2: Floats = rng.normal(scale=wide**-0.5, size=(wide, narrow))
        self.b_2: Floats = np.zeros(narrow)

    def forward(self, x: npt.ArrayLike) -> Floats:
        """Apply the network to each token.

        Args:
            x: Tokens (…, embed_dim).

        Returns:
            The output (…, embed_dim).
        """
        x = _check_tokens("FeedForward", x, self.embed_dim)
        W_1 = _check_parameter("FeedForward", "W_1", self.W_1, self.embed_dim, self.hidden_dim)
        b_1 = _check_parameter("FeedForward", "b_1", self.b_1, self.hidden_dim)
        W_2 = _check_parameter("FeedForward", "W_2", self.W_2, self.hidden_dim, self.embed_dim)
        b_2 = _check_parameter("FeedForward", "b_2", self.b_2, self.embed_dim)
        hidden = ACTIVATIONS[self.activation](x @ W_1 + b_1)  # (…, hidden_dim)
        return hidden @ W_2 + b_2

    __call__ = forward

    def parameters(self) -> dict[str, Floats]:
        """Return the arrays that a model would learn, by name."""
        return {"W_1": self.W_1, "b_1": self.b_1, "W_2": self.W_2, "b_2": self.b_2}


class TransformerBlock:
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
        self.attention = MultiHeadAttention(embed_dim, num_heads, seed=seed)
        hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.feed_forward = FeedForward(embed_dim, hidden_dim, activation=activation, seed=seed)
        self.attention_norm = LayerNorm(embed_dim)
        self.feed_forward_norm = LayerNorm(embed_dim)

    def forward(
        self, x: npt.ArrayLike, mask: npt.ArrayLike | None = None, true_means: TrueMeans | None = None
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

    def parameters(self) -> dict[str, Floats]:
        """Return the arrays that a model would learn, by name: "attention.W_Q", "feed_forward.b_1" and so on."""
        parts: dict[str, MultiHeadAttention | LayerNorm | FeedForward] = {
            "attention": self.attention,
            "attention_norm": self.attention_norm,
            "feed_forward": self.feed_forward,
            "feed_forward_norm": self.feed_forward_norm,
        }
        return {
            f"{part}.{name}": array
            for part, layer in parts.items()
            for name, array in layer.parameters().items()
        }

    def parameter_count(self) -> int:
        """Count the numbers that a model would learn."""
        return sum(array.size for array in self.parameters().values())


def dropout(weights: npt.ArrayLike, rate: float, *, seed: int = 0) -> Floats:
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
    rate = as_number("dropout", "rate", rate, hint)
    if rate >= 1:
        raise ArgumentError("dropout", received=f"rate {rate:g}", expected="rate below 1", hint=hint)
    kept = np.random.default_rng(seed).random(weights.shape) >= rate
    return np.where(kept, weights / (1 - rate), 0.0)


def _check_tokens(operation: str, x: npt.ArrayLike, embed_dim: int) -> Floats:
    x = as_floats(operation, "x", x, "embed_dim")
    if x.shape[-1] != embed_dim:
        raise ArgumentError(
            operation,
            received=f"x of shape {x.shape}",
            expected=f"x of shape (…, {embed_dim}), since embed_dim is {embed_dim}",
            hint=f"Build it with embed_dim={x.shape[-1]}, or pass tokens of {embed_dim} numbers.",
        )
    return x


def _check_parameter(operation: str, name: str, array: npt.ArrayLike, *shape: int) -> Floats:
    floats = as_floats(operation, name, array)
    if floats.shape != shape:
        raise ArgumentError(
            f"{operation}, {name}",
            received=f"an array of shape {floats.shape}",
            expected=f"shape {shape}, as when the {operation} was built",
            hint=f"Assign an array of that shape to {name}, or build a {operation} of another size.",
        )
    return floats
