"""Gradients along a path from a baseline to the outputs of a layer: integrated gradients, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.engines.torch_precision import widen
from regard.lens.capture.call import Call
from regard.lens.capture.captured_args import CapturedArgs
from regard.lens.capture.record import CaptureOptions
from regard.lens.watch import Watch
from regard.masks import Mask
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed


class ReplacedOutput:
    """The edits of a call whose output alone is replaced: mask and scores stay as they are."""

    bound = ()

    def edit_mask(self, mask: Mask | None) -> Mask | None:
        return mask

    def edit_score_mods(self, score_mods: tuple[ScoreMod, ...]) -> tuple[ScoreMod, ...]:
        return score_mods

    def edit_call(self, call: Call) -> Call:
        return call

    def extends(self, other: Any) -> bool:
        return isinstance(other, ReplacedOutput)

    def join(self, first: Any, shape: tuple[int, ...]) -> ReplacedOutput:
        return self


class PathWatch(Watch):
    """A watch that moves the outputs of one layer along the path to a baseline, and makes them leaves of the graph.

    Args:
        model: The model.
        layer: Name of the attention layer.
        share: 1 for the outputs themselves, 0 for the baseline.
        find_baseline: Function of the number of the call and its output that returns the baseline.
    """

    def __init__(
        self, model: nn.Module, layer: str, share: float, find_baseline: Callable[[int, Tensor], Tensor]
    ) -> None:
        options = CaptureOptions(device=None, dtype=None, copy=False, values=False, measures=None)
        super().__init__(model, {layer}, options)
        self._share, self._find_baseline = share, find_baseline
        self.leaves: list[Tensor] = []
        self.changes: list[Tensor] = []  # baseline − output of each call

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Replace the output of a call; the wrappers call it."""
        output = args.output if args.edited_output is None else args.edited_output
        assert output is not None, "attribution has captured it before"
        output = output.detach()
        change = self._find_baseline(len(self.leaves), output) - output
        leaf = (output + (1 - self._share) * change).to(output.dtype).requires_grad_()
        self.leaves.append(leaf)
        self.changes.append(change)
        edits = ReplacedOutput() if args.edits is None else args.edits
        return args._replace(edits=edits, edited_output=leaf)

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record nothing."""


def integrate_gradients(
    model: nn.Module,
    layer: str,
    steps: int,
    find_baseline: Callable[[int, Tensor], Tensor],
    run: Callable[[], Tensor],
) -> list[Tensor]:
    """Integrate gradient · (baseline − output) of one layer along the straight path between them, by midpoints.

    Summed over the heads, it is the change of the metric if the layer is ablated, up to the error of the steps.

    Args:
        model: The model.
        layer: Name of the attention layer.
        steps: Number of points of the path.
        find_baseline: Function of the number of the call and its output that returns the baseline.
        run: Runs the model and returns the metric, one number.

    Returns:
        For each call of the layer, the effect of each head: (…, heads), float64 if the device has it.
    """
    totals: list[Tensor] = []
    for step in range(steps):
        watching = PathWatch(model, layer, (step + 0.5) / steps, find_baseline)
        with torch.enable_grad(), watching:
            value = run()
        found = torch.autograd.grad(value, watching.leaves, allow_unused=True)
        parts = [
            widen(torch.zeros(leaf.shape[:-2], device=leaf.device))
            if gradient is None
            else (widen(gradient) * widen(change)).sum((-2, -1)) / steps
            for gradient, leaf, change in zip(found, watching.leaves, watching.changes, strict=True)
        ]
        totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
    return totals
