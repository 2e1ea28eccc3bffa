"""The optimiser of the story model: Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic polynomial by Keller Jordan, https://kellerjordan.github.io/posts/muon/


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace the singular values of matrices by numbers near 1, by Newton-Schulz iterations.

    `torch.optim.Muon` computes in bfloat16, which CPUs without bfloat16 instructions emulate slowly.

    Args:
        matrices: Matrices (count, rows, columns).
        steps: Number of iterations.

    Returns:
        Matrices of the same shape, with singular values between about 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are orthogonalised matrices; matrices of one shape are computed as one batch.

    Args:
        matrices: Parameters with two dimensions.
        lr: Learning rate.
        momentum: Decay of the momentum.
        weight_decay: Decay of the weights, multiplied by the learning rate.
    """

    def __init__(
        self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        groups = [{"params": [m for m in matrices if tuple(m.shape) == shape]} for shape in shapes]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters from their gradients.

        Args:
            closure: Not supported.
        """
        for group in self.param_groups:
            parameters, momentum = group["params"], group["momentum"]
            steps = []
            for parameter in parameters:
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - momentum)
                steps.append(parameter.grad.lerp(average, momentum))  # Nesterov
            rows, columns = parameters[0].shape
            updates = orthogonalise(torch.stack(steps)) * max(1, rows / columns) ** 0.5
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
