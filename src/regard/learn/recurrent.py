"""What came before attention: one state, carried from token to token.

    state_t = tanh(state_{t−1} W + x_t U)

Whatever the network is to know at the end must fit into the last state, however long the text was; no step can begin
before the one before it is done; and what an early token wrote is multiplied by W and squeezed by tanh at every step
after. `influence` measures how much is left. Attention reaches every token in one step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.learn.validation import Floats, as_count, as_floats


class Recurrence:
    """A recurrent network of `hidden_dim` numbers that reads tokens of `embed_dim` numbers, one after the other.

    `U` (embed_dim, hidden_dim) and `W` (hidden_dim, hidden_dim) begin at random, the same for the same `seed`, and may
    be set.

    >>> states = Recurrence(embed_dim=2, hidden_dim=3)(np.ones((5, 2)))
    >>> states.shape  # one state after each token; the last stands for the whole text
    (5, 3)
    """

    def __init__(self, embed_dim: int, hidden_dim: int, *, seed: int = 0) -> None:
        self.embed_dim = as_count("Recurrence", "embed_dim", embed_dim, minimum=1)
        self.hidden_dim = as_count("Recurrence", "hidden_dim", hidden_dim, minimum=1)
        rng = np.random.default_rng(seed)
        self.U: Floats = rng.normal(scale=self.embed_dim**-0.5, size=(self.embed_dim, self.hidden_dim))
        self.W: Floats = rng.normal(scale=self.hidden_dim**-0.5, size=(self.hidden_dim, self.hidden_dim))

    def forward(self, x: npt.ArrayLike) -> Floats:
        """The state after each token of x (n, embed_dim), as (n, hidden_dim)."""
        x = as_floats("Recurrence", "x", x, "n", "embed_dim")
        if x.ndim != 2 or x.shape[-1] != self.embed_dim:
            raise ArgumentError(
                "Recurrence",
                received=f"x of shape {x.shape}",
                expected=f"x of shape (n, {self.embed_dim}), one sequence",
                hint="Loop over a batch and call it for each; make one of the size of your tokens.",
            )
        states = np.zeros((len(x), self.hidden_dim))
        state = np.zeros(self.hidden_dim)
        for t, token in enumerate(x):  # no way to do these steps side by side
            state = np.tanh(state @ self.W + token @ self.U)
            states[t] = state
        return states

    __call__ = forward

    def influence(self, x: npt.ArrayLike) -> Floats:
        """How much the last state would change with each token, (n,): the size of its derivative by that token.

        >>> network = Recurrence(embed_dim=1, hidden_dim=1)
        >>> network.U, network.W = np.array([[1.0]]), np.array([[0.5]])
        >>> network.influence([[0], [0], [0]])  # halved at every step
        array([0.25, 0.5 , 1.  ])
        """
        states = self.forward(x)
        left = np.eye(self.hidden_dim)  # the derivative of the last state by the state after token t
        sizes = np.zeros(len(states))
        for t in reversed(range(len(states))):
            slope = 1 - states[t] ** 2  # the derivative of tanh
            sizes[t] = np.linalg.norm((self.U * slope) @ left)
            left = (self.W * slope) @ left
        return sizes
