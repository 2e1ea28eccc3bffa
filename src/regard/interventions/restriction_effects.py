"""Attribute the change of a metric to the heads that masks restrict, so that the parts add up to the change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.record import CaptureOptions, build_call
from regard.interventions.edits import Edit, as_edits
from regard.interventions.intervene import Intervention, find_output
from regard.interventions.layer_edits import BoundEdit

Tensor = Any  # the types of torch are not followed


class GatedIntervention(Intervention):
    """An intervention whose heads return masked + gate · (unmasked − masked).

    Args:
        model: The model.
        edits: The edits.
        gate: The share of the unmasked output, 0 to 1, the same for every head.

    Attributes:
        gates: The gates of each layer by name, (heads, 1, 1), which require gradients.
    """

    def __init__(self, model: nn.Module, edits: Iterable[Edit], gate: float) -> None:
        super().__init__(model, [BoundEdit(edit, None, None) for edit in as_edits(edits, "effects")], None)
        self._gate = gate
        self.gates: dict[str, Tensor] = {}

    def replaces_output(self, name: str, args: CapturedArgs) -> bool:
        """Return whether the unmasked output is not needed: it always is; the wrappers ask."""
        return False

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Apply the edits to a call and mix both outputs; the wrappers call it."""
        edited = super().edit(module, name, args)
        if edited.edited_output is None:
            return edited
        options = CaptureOptions(device=None, dtype=None, copy=False, values=False, measures=None)
        call = build_call(module, name, args._replace(edits=None, edited_output=None), options, self._biases)
        assert isinstance(call, Call)
        unmasked, masked = find_output(call, args), edited.edited_output
        gate = torch.full((masked.shape[-3], 1, 1), self._gate, dtype=masked.dtype, device=masked.device)
        self.gates[name] = gate.requires_grad_()
        return edited._replace(edited_output=masked + self.gates[name] * (unmasked - masked))


def attribute_restriction(
    model: nn.Module,
    run: Callable[[], Tensor],
    edits: Iterable[Edit],
    *,
    steps: int = 4,
) -> dict[str, Tensor]:
    """Attribute the change of a metric under masks to the masked heads, by integrated gradients.

    All heads go from masked to unmasked together, and the gradient of each head's gate is integrated along the way.
    The parts add up to metric(masked) − metric(unmasked), up to the error of the integration (Sundararajan et al.,
    1703.01365). The cost is one forward and one backward pass for each step, whatever the number of heads.

    Args:
        model: The model, with parameters that need no gradient.
        run: Runs the model and returns the metric, a scalar.
        edits: Restrictions of heads.
        steps: Number of gradients along the way.

    Returns:
        For each restricted layer, the part of each head, (heads,). Positive: the metric is larger with the mask.
    """
    parts: dict[str, Tensor] = {}
    listed = as_edits(edits, "effects")
    for step in range(steps):
        gated = GatedIntervention(model, listed, (step + 0.5) / steps)
        with torch.enable_grad(), gated:
            metric = run()
        if not gated.gates:
            return {}
        gradients = torch.autograd.grad(metric, list(gated.gates.values()), allow_unused=True)
        for name, gradient in zip(gated.gates, gradients, strict=True):
            gate = gated.gates[name]
            part = torch.zeros_like(gate) if gradient is None else -gradient.detach() / steps
            parts[name] = parts.get(name, 0) + part[:, 0, 0]
    return parts
