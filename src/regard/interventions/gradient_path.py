"""Gradients along a path from a baseline to the outputs of a layer: integrated gradients, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs
from regard.capture.record import CaptureOptions
from regard.engines.torch_precision import widen
from regard.lens.head_table import as_numpy_per_head
from regard.lens.watch import Watch
from regard.masks import Mask
from regard.score_mods import ScoreMod

Tensor = Any  # the types of torch are not followed
FloatArray = Any
# For each call of a layer, the output with which the path begins, and its change up to the end.
Path = Sequence[tuple[Tensor, Tensor]]


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
        path: The path.
        place: 0 for the outputs themselves, 1 for the baseline.
    """

    binds_context = True

    def __init__(self, model: nn.Module, layer: str, path: Path, place: float) -> None:
        options = CaptureOptions(device=None, dtype=None, copy=False, values=False, measures=None)
        super().__init__(model, {layer}, options)
        self._path, self._place = path, place
        self.leaves: list[Tensor] = []

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Replace the output of a call; the wrappers call it."""
        output, change = self._path[len(self.leaves)]
        leaf = (output + self._place * change).to(output.dtype).requires_grad_()
        self.leaves.append(leaf)
        edits = ReplacedOutput() if args.edits is None else args.edits
        return args._replace(edits=edits, edited_output=leaf)

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record nothing."""


class PathPoint(NamedTuple):
    """A metric at one point of a path, and its derivative along the path.

    Args:
        metric: The metric.
        slopes: What each head adds to the derivative: (calls · heads,), float64.
    """

    metric: float
    slopes: FloatArray


def evaluate_point(
    place: float, *, model: nn.Module, layer: str, path: Path, run: Callable[[], Tensor]
) -> PathPoint:
    """Run a model with the outputs of a layer at one point of a path, forwards and backwards.

    Args:
        place: The point, from 0 to 1.
        model: The model.
        layer: Name of the attention layer.
        path: The path.
        run: Runs the model and returns the metric, one number.
    """
    watching = PathWatch(model, layer, path, place)
    with torch.enable_grad(), watching:
        value = run()
    gradients = torch.autograd.grad(value, watching.leaves, allow_unused=True)
    return PathPoint(value.item(), compute_slopes(gradients, path))


def compute_slopes(gradients: Sequence[Tensor | None], path: Path) -> FloatArray:
    """Compute gradient · change of each head, added up over the batch: (calls · heads,).

    Args:
        gradients: Gradient of the output of each call, (…, heads, q_len, value_dim); None for zeros.
        path: The path.
    """
    slopes = []
    for gradient, (output, change) in zip(gradients, path, strict=True):
        wide = widen(torch.zeros_like(output) if gradient is None else gradient)
        by_head = as_numpy_per_head((wide * change).sum((-2, -1)))
        slopes.append(by_head.reshape(-1, by_head.shape[-1]).sum(0))
    return np.concatenate(slopes)


class PathIntegral(NamedTuple):
    """The integral of a derivative along a path, compared with the change of the metric from its start to its end.

    Args:
        effects: The integral of each head: (calls · heads,).
        change: The change of the metric.
        num_points: Number of points at which the derivative was taken.
        allowed_gap: The gap to reach.
    """

    effects: FloatArray
    change: float
    num_points: int
    allowed_gap: float

    @property
    def gap(self) -> float:
        """How far the sum of the integrals is from the change of the metric."""
        return abs(float(self.effects.sum()) - self.change)

    @property
    def is_complete(self) -> bool:
        """Whether the gap is as small as it was to be; never if it is NaN."""
        return self.gap <= self.allowed_gap


def integrate_path(
    evaluate: Callable[[float], PathPoint], start: PathPoint, max_points: int, max_gap: float, eps: float
) -> PathIntegral:
    """Integrate a derivative from 0 to 1 by Simpson's rule, with more points where the metric changes otherwise.

    The sum over a part of the path should be the change of the metric over that part. The part with the largest gap is
    halved, until the gaps are a small share of the result.

    Args:
        evaluate: Returns metric and derivative at a point from 0 to 1.
        start: The point 0.
        max_points: Largest number of points; at least 3 are taken.
        max_gap: Sum of the gaps of all parts to reach, as a share of the range of the metric along the path.
        eps: Relative rounding of the metric.
    """
    points = {0.0: start, 0.5: evaluate(0.5), 1.0: evaluate(1.0)}

    def integrate(first: float, last: float) -> tuple[FloatArray, float]:
        """Return the integral over a part of the path, and the gap."""
        a, middle, b = points[first], points[(first + last) / 2], points[last]
        effects = (last - first) / 6 * (a.slopes + 4 * middle.slopes + b.slopes)
        return effects, abs(float(effects.sum()) - (b.metric - a.metric))

    parts = {(0.0, 1.0): integrate(0.0, 1.0)}
    while True:
        metrics = [point.metric for point in points.values()]
        # The metric at each point is rounded, so shorter parts do not close a gap of that size.
        allowed = max_gap * (max(metrics) - min(metrics)) + 4 * eps * max(map(abs, metrics)) * len(parts)
        if sum(gap for _, gap in parts.values()) <= allowed or len(points) + 2 > max_points:
            effects = np.sum([part for part, _ in parts.values()], 0)
            return PathIntegral(effects, points[1.0].metric - start.metric, len(points), allowed)
        first, last = max(parts, key=lambda ends: parts[ends][1])
        del parts[first, last]
        middle = (first + last) / 2
        for ends in ((first, middle), (middle, last)):
            points[sum(ends) / 2] = evaluate(sum(ends) / 2)
            parts[ends] = integrate(*ends)
