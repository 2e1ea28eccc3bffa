"""A recurrent network, the predecessor of attention: one state, updated token by token.

    state_t = tanh(state_{t−1} W + x_t U)

The last state must hold everything the network knows about the text, no matter how long the text is. A step cannot
start before the previous one is finished. The contribution of an early token is multiplied by W and squashed by tanh
at every later step; `compute_influence` measures how much is left. Attention reaches every token in one step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.validation import Floats, as_count, as_floats


class RecurrentNetwork:
    """A recurrent network that reads one token at a time into a state of fixed size.

    The parameters `U` (embed_dim, hidden_dim) and `W` (hidden_dim, hidden_dim) are random; you can assign others.

    Args:
        embed_dim: Number of entries in each token.
        hidden_dim: Number of entries in the state.
        seed: Seed of the random parameters.

    >>> states = RecurrentNetwork(embed_dim=2, hidden_dim=3)(np.ones((5, 2)))
    >>> states.shape  # one state after each token; the last one represents the whole text
    (5, 3)
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, seed: int = 0) -> None:
        self.embed_dim = as_count("RecurrentNetwork", "embed_dim", embed_dim, minimum=1)
        self.hidden_dim = as_count("RecurrentNetwork", "hidden_dim", hidden_dim, minimum=1)
        rng = np.random.default_rng(seed)
        self.U: Floats = rng.normal(scale=self.embed_dim**-0.5, size=(self.embed_dim, self.hidden_dim))
        self.W: Floats = rng.normal(scale=self.hidden_dim**-0.5, size=(self.hidden_dim, self.hidden_dim))

    def forward(self, x: npt.ArrayLike) -> Floats:
        """Read a sequence, and return the state after each token.

        Args:
            x: Tokens (n, embed_dim).

        Returns:
            States (n, hidden_dim).

        Raises:
            ArgumentError: If `x` is not one sequence of tokens of that size.
        """
        x = as_floats("RecurrentNetwork", "x", x, "n", "embed_dim")
        if x.ndim != 2 or x.shape[-1] != self.embed_dim:
            raise ArgumentError(
                "RecurrentNetwork",
                received=f"x of shape {x.shape}",
                expected=f"x of shape (n, {self.embed_dim}), one sequence",
                hint="Call it once for each sequence, or build a network with the embed_dim of your tokens.",
            )
        states = np.zeros((len(x), self.hidden_dim))
        state = np.zeros(self.hidden_dim)
        for t, token in enumerate(x):  # these steps cannot run in parallel
            state = np.tanh(state @ self.W + token @ self.U)
            states[t] = state
        return states

    __call__ = forward

    def compute_influence(self, x: npt.ArrayLike) -> Floats:
        """Compute the influence of each token: the norm of the last state's derivative with respect to it.

        Args:
            x: Tokens (n, embed_dim).

        Returns:
            One number for each token (n,).

        >>> network = RecurrentNetwork(embed_dim=1, hidden_dim=1)
        >>> network.U, network.W = np.array([[1.0]]), np.array([[0.5]])
        >>> network.compute_influence([[0], [0], [0]])  # halved at every step
        array([0.25, 0.5 , 1.  ])
        """
        states = self.forward(x)
        derivative = np.eye(self.hidden_dim)  # of the last state with respect to the state after token t
        norms = np.zeros(len(states))
        for t in reversed(range(len(states))):
            slope = 1 - states[t] ** 2  # the derivative of tanh
            norms[t] = np.linalg.norm((self.U * slope) @ derivative)
            derivative = (self.W * slope) @ derivative
        return norms
