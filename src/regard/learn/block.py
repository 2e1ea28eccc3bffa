"""The block that attention lives in: two steps, each added to what came in.

    pre-norm     x = x + attention(norm(x))       then  x = x + feed_forward(norm(x))
    post-norm    x = norm(x + attention(x))       then  x = norm(x + feed_forward(x))

Attention moves information between tokens; the feed-forward network works on each token by itself. The residual
(the `x +`) leaves a straight way through the block, and the normalisation keeps the numbers at one size. Post-norm is
how the transformer was first published (Vaswani et al., 1706.03762); pre-norm, which trains deep stacks more calmly,
came after.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.heads import MultiHeadAttention
from regard.learn.validation import Floats, as_choice, as_count, as_floats, as_number


def relu(x: npt.ArrayLike) -> Floats:
    """What is above 0, and 0 for the rest, in the shape of x.

    >>> relu([-2, 0, 3])
    array([0., 0., 3.])
    """
    return np.maximum(as_floats("relu", "x", x), 0.0)


def gelu(x: npt.ArrayLike) -> Floats:
    """x times the chance that a standard normal number lies below it: a ReLU without the corner, in the shape of x.

    >>> gelu([-2, 0, 3]).round(3)
    array([-0.046,  0.   ,  2.996])
    """
    x = as_floats("gelu", "x", x)
    below = [math.erfc(-z) / 2 for z in (x / math.sqrt(2)).flat]  # NumPy has no error function
    return x * np.array(below, dtype=np.float64).reshape(x.shape)


ACTIVATIONS = {"relu": relu, "gelu": gelu}


class LayerNorm:
    """Each token's numbers brought to mean 0 and variance 1, then times `gain` plus `bias`, (embed_dim,) each.

    >>> LayerNorm(embed_dim=4)([[1, 2, 3, 4]]).round(3)
    array([[-1.342, -0.447,  0.447,  1.342]])
    """

    def __init__(self, embed_dim: int, *, eps: float = 1e-5) -> None:
        self.embed_dim = as_count("LayerNorm", "embed_dim", embed_dim, minimum=1)
        self.eps = as_number("LayerNorm", "eps", eps, "It keeps equal numbers from dividing 0 by 0.")
        self.gain: Floats = np.ones(self.embed_dim)
        self.bias: Floats = np.zeros(self.embed_dim)

    def forward(self, x: npt.ArrayLike) -> Floats:
        """The normalised x, (…, embed_dim) as it came."""
        x = _of_width("LayerNorm", x, self.embed_dim)
        gain = _of_shape("LayerNorm", "gain", self.gain, self.embed_dim)
        bias = _of_shape("LayerNorm", "bias", self.bias, self.embed_dim)
        mean = x.mean(axis=-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
        normalised: Floats = (x - mean) / np.sqrt(variance + self.eps)
        return normalised * gain + bias

    __call__ = forward

    def parameters(self) -> dict[str, Floats]:
        """The arrays a model would learn, by name."""
        return {"gain": self.gain, "bias": self.bias}


class FeedForward:
    """A network of one hidden layer, applied to each token by itself: activation(x W_1 + b_1) W_2 + b_2.

    `W_1` is (embed_dim, hidden_dim), `W_2` (hidden_dim, embed_dim). They begin at random, the same for the same `seed`,
    and may be set; `activation` is "relu" or "gelu".

    >>> network = FeedForward(embed_dim=2, hidden_dim=2)
    >>> network.W_1, network.W_2 = np.eye(2), np.eye(2)
    >>> network([[1, -1]])
    array([[1., 0.]])
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, activation: str = "relu", seed: int = 0) -> None:
        self.embed_dim = as_count("FeedForward", "embed_dim", embed_dim, minimum=1)
        self.hidden_dim = as_count("FeedForward", "hidden_dim", hidden_dim, minimum=1)
        self.activation = as_choice("FeedForward", "activation", activation, ACTIVATIONS)
        # A stream of its own: with the same seed, the attention of a block draws other numbers.
        rng = np.random.default_rng([seed, 1])
        narrow, wide = self.embed_dim, self.hidden_dim
        self.W_1: Floats = rng.normal(scale=narrow**-0.5, size=(narrow, wide))
        self.b_1: Floats = np.zeros(wide)
        self.W_2: Floats = rng.normal(scale=wide**-0.5, size=(wide, narrow))
        self.b_2: Floats = np.zeros(narrow)

    def forward(self, x: npt.ArrayLike) -> Floats:
        """The output (…, embed_dim), token by token."""
        x = _of_width("FeedForward", x, self.embed_dim)
        W_1 = _of_shape("FeedForward", "W_1", self.W_1, self.embed_dim, self.hidden_dim)
        b_1 = _of_shape("FeedForward", "b_1", self.b_1, self.hidden_dim)
        W_2 = _of_shape("FeedForward", "W_2", self.W_2, self.hidden_dim, self.embed_dim)
        b_2 = _of_shape("FeedForward", "b_2", self.b_2, self.embed_dim)
        hidden = ACTIVATIONS[self.activation](x @ W_1 + b_1)  # (…, hidden_dim)
        return hidden @ W_2 + b_2

    __call__ = forward

    def parameters(self) -> dict[str, Floats]:
        """The arrays a model would learn, by name."""
        return {"W_1": self.W_1, "b_1": self.b_1, "W_2": self.W_2, "b_2": self.b_2}


class TransformerBlock:
    """Attention by `num_heads` heads and a feed-forward network, each with its residual and its normalisation.

    Its parts are `attention`, `feed_forward`, `attention_norm` and `feed_forward_norm`; their arrays may be looked at
    and set. `norm` is "pre" or "post"; `hidden_dim` is four times `embed_dim` unless given.

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

    def forward(self, x: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> tuple[Floats, Floats]:
        """The output (…, n, embed_dim), shaped as x, and the weights of every head (…, num_heads, n, n).

        The mask, True = attend, broadcasts to the shape of the weights.

        >>> block = TransformerBlock(embed_dim=4, num_heads=2, norm="post")
        >>> output, weights = block.forward(np.eye(4)[:3], mask=np.tri(3, dtype=bool))
        >>> weights[:, 0]  # the first token sees itself alone
        array([[1., 0., 0.],
               [1., 0., 0.]])
        """
        x = as_floats("TransformerBlock", "x", x, "n", "embed_dim")
        with np.errstate(invalid="ignore", over="ignore"):  # inf may turn NaN in a row that the mask hides
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
        """The arrays a model would learn, by name: "attention.W_Q", "feed_forward.b_1" and so on."""
        parts: dict[str, MultiHeadAttention | LayerNorm | FeedForward] = {
            "attention": self.attention,
            "attention_norm": self.attention_norm,
            "feed_forward": self.feed_forward,
            "feed_forward_norm": self.feed_forward_norm,
        }
        return {
            f"{part}.{name}": array for part, own in parts.items() for name, array in own.parameters().items()
        }

    def parameter_count(self) -> int:
        """How many numbers a model would learn, counted array by array."""
        return sum(array.size for array in self.parameters().values())


def dropout(weights: npt.ArrayLike, rate: float, *, seed: int = 0) -> Floats:
    """The weights with each set to 0 with chance `rate` and the others divided by 1 − rate; in the same shape.

    A row then sums to 1 only on average. It is done in training, so that no output leans on one key, and left out
    afterwards.

    >>> dropout([[0.25, 0.25, 0.25, 0.25]], rate=0.5, seed=1)
    array([[0.5, 0.5, 0. , 0.5]])
    """
    weights = as_floats("dropout", "weights", weights)
    hint = "It is the chance that a weight is dropped: 0.1, say; 0 drops nothing."
    rate = as_number("dropout", "rate", rate, hint)
    if rate >= 1:
        raise ArgumentError("dropout", received=f"rate {rate:g}", expected="rate below 1", hint=hint)
    kept = np.random.default_rng(seed).random(weights.shape) >= rate
    return np.where(kept, weights / (1 - rate), 0.0)


def _of_width(operation: str, x: npt.ArrayLike, embed_dim: int) -> Floats:
    x = as_floats(operation, "x", x, "embed_dim")
    if x.shape[-1] != embed_dim:
        raise ArgumentError(
            operation,
            received=f"x of shape {x.shape}",
            expected=f"x of shape (…, {embed_dim}), since embed_dim is {embed_dim}",
            hint=f"Make one with embed_dim={x.shape[-1]}, or pass tokens of {embed_dim} numbers.",
        )
    return x


def _of_shape(operation: str, name: str, array: npt.ArrayLike, *shape: int) -> Floats:
    floats = as_floats(operation, name, array)
    if floats.shape != shape:
        raise ArgumentError(
            f"{operation}, {name}",
            received=f"an array of shape {floats.shape}",
            expected=f"shape {shape}, as it was when the {operation} was made",
            hint=f"Set {name} to an array of that shape, or make a {operation} of another size.",
        )
    return floats
