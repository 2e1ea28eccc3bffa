"""Attribute a metric to heads and edges by gradients: `attribution`."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from regard.capture.call import Call, CapturedArgs, LayerCall
from regard.capture.record import CaptureOptions
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.interventions.edits import Edit, as_edits
from regard.interventions.intervene import Intervention, find_output
from regard.interventions.layer_edits import BoundEdit, LayerEdits, compute_mean_output
from regard.interventions.model_runs import Metric, check_metric, record_run, run_model
from regard.interventions.placement import Placement
from regard.lens.head_table import as_numpy_per_head
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.watch import Watch, check_model
from regard.measures import Measure
from regard.measures.base import as_slice, copy_with
from regard.problem import Problem, broadcast_index
from regard.types import Array, IntArray, Namespace
from regard.validation import check_count

Tensor = Any  # the types of torch are not followed
FloatArray = Any
# For each call of a layer, the output with which the path begins, and its change up to the end.
Path = Sequence[tuple[Tensor, Tensor]]
OPERATION = "attribution"
_lock = threading.RLock()


@dataclass(frozen=True)
class Attribution:
    """First-order effects of each head and edge on a metric; `attribution` returns it.

    Attributes:
        metric: The value of the metric, the mean over the batch.
        heads: One row for each layer and head, largest |effect| first: `module`, `layer`, `call`, `head`; `effect`, the
            sum of gradient · (baseline − output), which estimates what `effects` measures; `output`, the sum of
            gradient · output; and `attention`, the sum of |gradient · weight| over all edges.
        edges: The edges of each head with the largest |gradient · weight|, largest first: `module`, `layer`, `call`,
            `head`, `query`, `key` (positions), `batch`, `weight`, `gradient` and their `product`.
        completeness: With `steps` > 1, one row for each layer: `module`, `layer`; `effect`, the sum over its heads;
            `change`, the change of the metric if all outputs of the layer are replaced with the baseline; `gap`, the
            difference between the two; and `points`, the number of gradients computed. Empty without steps.
        gradients: For each layer that was called once, dL/dO: (…, heads, q_len, value_dim).
        recording: The recording of the run, with values, outputs and graph.

    >>> import torch
    >>> from regard.interventions import attribution
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> found = attribution(layer, torch.ones(1, 3, 8), lambda output: output[0, -1, 0])
    >>> len(found.heads), found.edges.columns[3:6]
    (2, ['head', 'query', 'key'])
    """

    metric: float
    heads: Table
    edges: Table
    completeness: Table
    gradients: dict[str, Tensor] = field(repr=False)
    recording: Recording = field(repr=False)
    _received: dict[str, Tensor] = field(repr=False)

    def weight_gradients(self, name: str, queries: Any = slice(None)) -> Tensor:
        """Compute dL/dA of some queries: the gradient of the output times the values.

        Args:
            name: Name of a module that was called once.
            queries: Positions as a slice, an integer or a list. Default: all, which needs q_len × kv_len numbers for
                each head.

        Returns:
            (…, heads, queries, kv_len); an integer drops the axis of queries.
        """
        value, gradient = self._find_call(name).value, self.gradients[name]
        assert value is not None
        value = value.detach()
        value = value.repeat_interleave(gradient.shape[-3] // value.shape[-3], -3)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        picked = gradient[..., [queries] if isinstance(queries, int) else queries, :].to(wide)
        result = picked @ value.to(wide).mT
        return result[..., 0, :] if isinstance(queries, int) else result

    def by_query(self, name: str) -> Tensor:
        """Return the sum of gradient · weight of each query, which is gradient · output: (…, heads, q_len).

        Args:
            name: Name of a module that was called once.
        """
        output = self._find_call(name).output
        assert output is not None
        return (widen(self.gradients[name]) * widen(output.detach())).sum(-1)

    def by_key(self, name: str) -> Tensor:
        """Return the sum of gradient · weight of each key: (…, heads, kv_len).

        Args:
            name: Name of a module that was called once.
        """
        self._find_call(name)
        return self._received[name]

    def _find_call(self, name: str) -> Call:
        calls = self.recording.calls(name)
        if len(calls) > 1:
            raise ArgumentError(
                OPERATION,
                received=f"{name!r}, which was called {len(calls)} times",
                expected="a layer that was called once",
                hint="The rows of `heads` and `edges` include the number of the call.",
            )
        return calls[0]

    def __str__(self) -> str:
        return f"metric {self.metric:.4g}\n\n{self.heads}"


def attribution(
    model: nn.Module,
    inputs: Any,
    metric: Metric,
    *,
    baseline: Literal["zero", "mean"] | Recording = "zero",
    steps: int = 1,
    max_gap: float = 0.01,
    edges: int = 8,
) -> Attribution:
    """Attribute a metric to every head and edge of a model, with one forward and one backward pass.

    For each head, the function computes gradient · output, and for each edge, gradient · weight. Both are first-order
    estimates. The first estimates how the metric changes if the head is ablated, which `effects` measures: attribution
    patching (Nanda 2023; Syed et al., 2310.10348). The gradient of the weights, dL/dA = dL/dO · Vᵀ, is computed in
    tiles, so memory is O(n). Summed over a row, gradient · weight equals gradient · output up to rounding.

    Args:
        model: The model, in eval mode. Its parameters and their gradients are not changed.
        inputs: Token ids, or any tensor that the model takes as its first argument; or a mapping with the keyword
            arguments of the model.
        metric: A function from the model's output to one number for each batch entry, (batch,), or to a single number,
            such as `logit_difference(…)`. Its mean over the batch is attributed.
        baseline: Output of an ablated head: "zero"; "mean", the mean of its outputs over the tokens of the batch,
            without padding; or a recording of another run with `watch(values=True)`, whose outputs are used.
        steps: Maximum number of points per layer at which the gradient for `effect` is computed. With one point, which
            is the model without edits, one backward pass serves all layers, but the gradient is not informative where a
            softmax is saturated. With more points, `effect` is integrated along the path from the outputs of a layer to
            the baseline, one layer at a time (integrated gradients, Sundararajan et al., 1703.01365). Summed over the
            heads of a layer, it should equal the change of the metric if the layer is ablated. `completeness` gives the
            gap between the two. Each layer uses at least 3 points, and more where its gap is large. The other columns
            and the edges do not depend on `steps`.
        max_gap: Points are added to a layer until its gap, summed over the path, is below this fraction of the range of
            the metric along the path. If the gap is larger after `steps` points, a warning is issued. Jumps in the
            metric, for example at a router, leave a gap that more points cannot close.
        edges: Number of edges of each head to list.

    Returns:
        The tables of heads and edges, and the gradients.

    Raises:
        ArgumentTypeError: If `inputs`, `metric` or `baseline` has the wrong type, or the metric is not a tensor.
        ArgumentError: If the metric has the wrong shape or does not depend on any attention layer, an output was not
            captured, the baseline has different shapes, or `max_gap` is negative.
        NotCapturedError: If a layer cannot be recorded with gradients; the message says why.

    >>> import torch
    >>> from regard.interventions import attribution
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> found = attribution(layer, torch.ones(1, 3, 8), lambda output: output[0, -1, 0])
    >>> found.heads.columns
    ['module', 'layer', 'call', 'head', 'effect', 'output', 'attention']
    """
    model = check_model(model, OPERATION)
    check_metric(metric, OPERATION)
    check_count(edges, 1, None, OPERATION, "edges", "", "It is the number of edges of each head to list.")
    check_count(steps, 1, None, OPERATION, "steps", "", "One step takes a single backward pass.")
    if not isinstance(baseline, Recording) and baseline not in ("zero", "mean"):
        raise ArgumentTypeError(
            OPERATION,
            received=f"baseline as {describe_argument(baseline)}",
            expected='"zero", "mean" or a Recording',
            hint="Record the other run with regard.watch(model, values=True).",
        )
    if isinstance(max_gap, bool) or not isinstance(max_gap, Real) or not 0 <= float(max_gap) < math.inf:
        raise ArgumentError(
            OPERATION,
            received=f"max_gap={max_gap!r}",
            expected="a number of at least 0, as a fraction of the range of the metric",
            hint="For example max_gap=0.01.",
        )

    def run() -> Tensor:
        num_logits = getattr(metric, "num_logits", None)
        output = run_model(model, inputs, OPERATION, num_logits=num_logits, require_grad=True)
        return _check_metric(metric(output)).mean()

    effects: dict[str, FloatArray] = {}
    completeness, incomplete = Table(), Table()
    with require_input_gradients(model), torch.enable_grad():
        value, recording = record_run(model, run, grad=True, values=True)
        layer_calls = recording._layer_calls()
        if not all(getattr(entry.call.output, "requires_grad", False) for entry in layer_calls):
            # No embedding is before these layers: the model reads its tokens from a parameter.
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
            value, recording = record_run(model, run, grad=True, values=True)
            layer_calls = recording._layer_calls()
        gradients = _compute_gradients(value, layer_calls)
        for layer, name in enumerate(recording):
            path = [_find_path(i, call, baseline) for i, call in enumerate(recording.calls(name))]
            own = [gradients[i] for i, entry in enumerate(layer_calls) if entry.module == name]
            start = value.item(), _compute_slopes(own, path)
            effects[name] = start[1]
            if steps > 1:
                evaluate = partial(_evaluate_point, model=model, layer=name, path=path, run=run)
                eps = torch.finfo(path[0][0].dtype).eps
                effects[name], found, is_complete = _integrate_path(evaluate, start, steps, max_gap, eps)
                completeness.append({"module": name, "layer": layer} | found)
                incomplete += [] if is_complete else completeness[-1:]
    if incomplete:
        worst = incomplete.sort("gap")[0]
        more = "" if len(incomplete) == 1 else f" (and {len(incomplete) - 1} more)"
        warnings.warn(
            f"attribution: the effects of {worst['module']!r}{more} are not complete within max_gap={max_gap:g}. After "
            f"{worst['points']} points they add up to {worst['effect']:.4g}, but ablating the layer changes the metric "
            f"by {worst['change']:.4g}. Pass more steps, or measure the heads with interventions.effects.",
            stacklevel=2,
        )
    with torch.no_grad():
        return _build(value.item(), layer_calls, gradients, recording, edges, effects, completeness)


@contextmanager
def require_input_gradients(model: nn.Module) -> Iterator[None]:
    """Let only the embeddings of a model require gradients, so that activations have a graph and no weight has one.

    In a model without embeddings all parameters do, unless its inputs do. Everything is restored afterwards. Threads
    take turns, since each restores what it found.
    """
    with _lock:
        before = {parameter: parameter.requires_grad for parameter in model.parameters()}
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        chosen = {id(weight) for weight in embeddings} or {id(parameter) for parameter in before}
        try:
            for parameter in before:
                parameter.requires_grad_(id(parameter) in chosen and parameter.is_floating_point())
            yield
        finally:
            for parameter, required in before.items():
                parameter.requires_grad_(required)


def _check_metric(value: Any) -> Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(
            OPERATION,
            received=f"a metric that returns {describe_argument(value)}",
            expected="a tensor (batch,) or a single number, computed from the model's output",
            hint="Do not call .item(), float() or .detach(): the gradient flows through the metric.",
        )
    if value.ndim > 1 or not value.requires_grad:
        is_constant = value.ndim <= 1
        raise ArgumentError(
            OPERATION,
            received="a metric without a gradient"
            if is_constant
            else f"a metric of shape {tuple(value.shape)}",
            expected="one number for each batch entry, or a single number, computed from the model's output",
            hint="Do not detach it, and do not run the model under torch.no_grad()."
            if is_constant
            else "Select a token, or return a sum or mean: output.logits[:, -1, answer].",
        )
    return value


def _compute_gradients(value: Tensor, layer_calls: list[LayerCall]) -> list[Tensor]:
    """Compute dL/dO of every call; zeros where the metric does not depend on it."""
    outputs: list[Any] = [entry.call.output for entry in layer_calls]
    for entry, output in zip(layer_calls, outputs, strict=True):
        if output is None or entry.call.steps > 1:
            raise ArgumentError(
                OPERATION,
                received=f"a run of {entry.module!r} whose output was not captured"
                if output is None
                else f"{entry.call.steps} cached calls of {entry.module!r}",
                expected="layers that call an attention function on the whole sequence",
                hint="Pass need_weights=False to torch.nn.MultiheadAttention, and run a sequence without a cache.",
            )
    needed = [output for output in outputs if output.requires_grad]
    found = iter(torch.autograd.grad(value, needed, allow_unused=True) if needed else ())
    gradients = [next(found) if output.requires_grad else None for output in outputs]
    if not any(gradient is not None for gradient in gradients):
        raise ArgumentError(
            OPERATION,
            received="a metric that does not depend on any attention layer",
            expected="a metric of the model's output",
            hint="Compute the metric from its argument, not from another run.",
        )
    pairs = zip(gradients, outputs, strict=True)
    return [torch.zeros_like(output) if gradient is None else gradient for gradient, output in pairs]


def _build(
    metric: float,
    layer_calls: list[LayerCall],
    gradients: list[Tensor],
    recording: Recording,
    num_edges: int,
    effects: dict[str, FloatArray],
    completeness: Table,
) -> Attribution:
    heads, edges = Table(), Table()
    received: dict[str, Tensor] = {}
    for (layer, module, index, call), gradient in zip(layer_calls, gradients, strict=True):
        place = {"module": module, "layer": layer, "call": index}
        value, output, wide = call.value, call.output, widen(gradient)
        assert value is not None and output is not None
        output = widen(output.detach())
        total = _add_batch((wide * output).sum((-2, -1)))
        effect = effects[module].reshape(-1, len(total))[index]
        k = min(num_edges, math.prod(call.shape[-2:]))
        sums: EdgeSums = call.matrix.measure(edges=EdgeGradients(value.detach(), gradient, k)).edges
        columns = {"effect": effect, "output": total, "attention": _add_batch(sums.magnitude)}
        for head in range(len(effect)):
            numbers = {name: float(column[head]) for name, column in columns.items()}
            heads.append(place | {"head": head} | numbers)
        edges += _list_edges(place, sums, k, num_edges)
        received[module] = sums.received
    single = {name for name in recording if len(recording.calls(name)) == 1}
    by_name = {
        entry.module: gradient
        for entry, gradient in zip(layer_calls, gradients, strict=True)
        if entry.module in single
    }
    heads = Table(sorted(heads, key=lambda row: -abs(row["effect"])))
    edges = Table(sorted(edges, key=lambda row: -abs(row["product"])))
    return Attribution(metric, heads, edges, completeness, by_name, recording, received)


def _add_batch(tensor: Tensor) -> FloatArray:
    """Add up the batch entries of a number for each head: (…, heads) to (heads,), in NumPy."""
    by_head = as_numpy_per_head(tensor)
    return by_head.reshape(-1, by_head.shape[-1]).sum(0)


def _list_edges(place: dict[str, Any], sums: EdgeSums, k: int, count: int) -> list[dict[str, Any]]:
    """List the largest edges of each head, over all batch entries."""
    heads = sums.queries.shape[-2] if sums.queries.ndim > 1 else 1
    columns = [array.reshape(-1, heads, k).tolist() for array in sums[2:]]
    rows = []
    for head in range(heads):
        found = [
            place
            | {"head": head, "query": query, "key": key, "batch": batch}
            | {"weight": weight, "gradient": gradient, "product": weight * gradient}
            for batch, entry in enumerate(zip(*columns, strict=True))
            for query, key, weight, gradient in zip(*(column[head] for column in entry), strict=True)
            if query >= 0
        ]
        rows += sorted(found, key=lambda row: -abs(row["product"]))[:count]
    return rows


def _find_path(index: int, call: Call, baseline: str | Recording) -> tuple[Tensor, Tensor]:
    """Return the output of a call, and its change to what ablated heads would return: (…, heads, q_len, value_dim)."""
    assert call.output is not None
    output = call.output.detach()
    wide = widen(output)
    if baseline == "zero":
        return output, -wide
    if baseline == "mean":
        mean = compute_mean_output(replace(call, output=output))
        return output, (mean[:, None] if output.ndim > 2 else mean) - wide
    assert isinstance(baseline, Recording)
    others = baseline.calls(call.name)
    other = others[index].output if index < len(others) else None
    if other is None or other.shape != output.shape:
        raise ArgumentError(
            OPERATION,
            received=f"a baseline whose {call.name!r} has "
            + ("no output" if other is None else f"outputs of shape {tuple(other.shape)}"),
            expected=f"outputs of shape {tuple(output.shape)}",
            hint="Record a run on inputs of the same length: regard.watch(model, values=True).",
        )
    return output, other.detach().to(wide) - wide


class _PathWatch(Watch):
    """A watch that moves the outputs of one layer to a place on their path, and makes them leaves of the graph."""

    binds_context = True

    def __init__(self, model: nn.Module, layer: str, path: Path, place: float) -> None:
        super().__init__(model, {layer}, CaptureOptions())
        self._path, self._place = path, place
        self.leaves: list[Tensor] = []

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Replace the output of a call; the wrappers call it."""
        output, change = self._path[len(self.leaves)]
        leaf = (output + self._place * change).to(output.dtype).requires_grad_()
        self.leaves.append(leaf)
        # Mask and scores stay as they are.
        edits = LayerEdits(name, (), Placement((1, 1))) if args.edits is None else args.edits
        return args._replace(edits=edits, edited_output=leaf)

    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record nothing."""


def _evaluate_point(
    place: float, model: nn.Module, layer: str, path: Path, run: Callable[[], Tensor]
) -> tuple[float, FloatArray]:
    """Return the metric with the outputs of a layer at a place of their path, 0 to 1, and its slopes there."""
    watching = _PathWatch(model, layer, path, place)
    with torch.enable_grad(), watching:
        value = run()
    gradients = torch.autograd.grad(value, watching.leaves, allow_unused=True)
    return value.item(), _compute_slopes(gradients, path)


def _compute_slopes(gradients: Sequence[Tensor | None], path: Path) -> FloatArray:
    """Compute what each head adds to the derivative along a path, over the batch: (calls · heads,), float64.

    Args:
        gradients: Gradient of the output of each call, (…, heads, q_len, value_dim); None for zeros.
    """
    slopes = []
    for gradient, (output, change) in zip(gradients, path, strict=True):
        wide = widen(torch.zeros_like(output) if gradient is None else gradient)
        slopes.append(_add_batch((wide * change).sum((-2, -1))))
    return np.concatenate(slopes)


def _integrate_path(
    evaluate: Callable[[float], tuple[float, FloatArray]],
    start: tuple[float, FloatArray],
    max_points: int,
    max_gap: float,
    eps: float,
) -> tuple[FloatArray, dict[str, Any], bool]:
    """Integrate a derivative from 0 to 1 by Simpson's rule, with more points where the metric changes otherwise.

    The sum over a part of the path should be the change of the metric over that part. The part with the largest gap is
    halved, until the gaps are a small share of the result.

    Returns:
        The integral of each head, (calls · heads,); a row of `Attribution.completeness`; and whether its gap is as
        small as it was to be, never if it is NaN.
    """
    points = {0.0: start, 0.5: evaluate(0.5), 1.0: evaluate(1.0)}

    def integrate(first: float, last: float) -> tuple[FloatArray, float]:
        """Return the integral over a part of the path, and the gap."""
        (a, at_a), (_, at_middle), (b, at_b) = (points[at] for at in (first, (first + last) / 2, last))
        effects = (last - first) / 6 * (at_a + 4 * at_middle + at_b)
        return effects, abs(float(effects.sum()) - (b - a))

    parts = {(0.0, 1.0): integrate(0.0, 1.0)}
    while True:
        metrics = [metric for metric, _ in points.values()]
        # The metric at each point is rounded, so shorter parts do not close a gap of that size.
        allowed = max_gap * (max(metrics) - min(metrics)) + 4 * eps * max(map(abs, metrics)) * len(parts)
        if sum(gap for _, gap in parts.values()) <= allowed or len(points) + 2 > max_points:
            break
        first, last = max(parts, key=lambda ends: parts[ends][1])
        del parts[first, last]
        middle = (first + last) / 2
        for ends in ((first, middle), (middle, last)):
            points[sum(ends) / 2] = evaluate(sum(ends) / 2)
            parts[ends] = integrate(*ends)
    effects = np.sum([part for part, _ in parts.values()], 0)
    total, change = float(effects.sum()), points[1.0][0] - start[0]
    gap = abs(total - change)
    return effects, {"effect": total, "change": change, "gap": gap, "points": len(points)}, gap <= allowed


class EdgeSums(NamedTuple):
    """What `EdgeGradients` computes of a matrix, for each head.

    Attributes:
        magnitude: Σ |weight · gradient| over all edges: (…, heads), float64 if the device has it.
        received: Σ weight · gradient over the queries of each key: (…, heads, kv_len), likewise.
        queries: Query of each of the k edges with the largest |weight · gradient|, largest first; −1 if a head has
            fewer edges whose product is not 0: (…, heads, k).
        keys: Their keys: (…, heads, k).
        weights: Their weights: (…, heads, k).
        gradients: Their gradients: (…, heads, k).
    """

    magnitude: Array
    received: Array
    queries: Array
    keys: Array
    weights: Array
    gradients: Array


@dataclass(frozen=True, eq=False, repr=False)
class EdgeGradients(Measure):
    """Sums of weight · gradient, and the edges of each head where it is largest, in one pass and O(n) memory.

    The result is an `EdgeSums`.

    Args:
        value: (…, kv_heads, kv_len, value_dim).
        gradient: dL/dO, the gradient of the output, (…, heads, q_len, value_dim).
        k: Number of edges of each head.

    >>> import numpy as np, regard
    >>> A = regard.attention(np.zeros((1, 2)), np.zeros((4, 2)))
    >>> sums = A.measure(EdgeGradients(np.array([[1.0], [-3], [0], [2]]), np.array([[2.0]]), 2)).edge_gradients
    >>> sums.magnitude, sums.keys, sums.gradients
    (array(3.), array([1, 3]), array([-6.,  4.]))
    """

    value: Array
    gradient: Array
    k: int
    _problem: Problem | None = None
    _value_index: IntArray | None = None
    _gradient_index: IntArray | None = None
    reads_scores: ClassVar[bool] = False

    def bind(self, problem: Problem) -> Measure:
        leading = problem.frame.leading_shape
        indices = []
        for array in (self.value, self.gradient):
            heads = array.shape[-3] if array.ndim > 2 else 1
            groups = leading[-1] // heads if leading and array.ndim > 2 else 1
            indices.append(broadcast_index(array, leading, groups, "attribution", "array")[problem.pair_ids])
        flat = [array.reshape((-1, *array.shape[-2:])) for array in (self.value, self.gradient)]
        return copy_with(
            self,
            value=flat[0],
            gradient=flat[1],
            _problem=problem,
            _value_index=indices[0],
            _gradient_index=indices[1],
        )

    def init(self, shape: tuple[int, int, int], xp: Namespace) -> EdgeSums:
        pairs, _, kv_len = shape
        places = (xp.full((pairs, self.k), -1, dtype=xp.int64) for _ in range(2))
        numbers = (xp.zeros((pairs, self.k)) for _ in range(2))
        return EdgeSums(xp.zeros(pairs), xp.zeros((pairs, kv_len)), *places, *numbers)

    def step(
        self, state: EdgeSums, weights: Array, _: Any, q_idx: Array, kv_idx: Array, xp: Namespace
    ) -> EdgeSums:
        problem = self._problem
        assert problem is not None and self._value_index is not None and self._gradient_index is not None
        rows, columns = as_slice(q_idx), as_slice(kv_idx)
        take = problem.engine.take
        gradient = take(self.gradient, self._gradient_index, np.arange(rows.start, rows.stop), problem.dtype)
        value = take(self.value, self._value_index, np.arange(columns.start, columns.stop), problem.dtype)
        gradients = problem.engine.compute_scores(gradient, value, 1.0)  # dL/dA of the tile
        gradients = xp.broadcast_to(gradients, weights.shape)
        products = gradients * weights
        sizes = xp.abs(products)
        state.magnitude[...] += xp.sum(sizes, axis=(-2, -1))
        state.received[:, columns] += xp.sum(products, axis=-2)
        self._insert(state, sizes, weights, gradients, rows.start, columns.start, xp)
        return state

    def _insert(
        self,
        state: EdgeSums,
        sizes: Array,
        weights: Array,
        gradients: Array,
        row: int,
        column: int,
        xp: Namespace,
    ) -> None:
        """Merge the largest edges of a tile, whose first entry is (row, column), into those found before."""
        assert self._problem is not None
        found = xp.abs(state.weights * state.gradients)  # 0 where there is no edge yet
        is_better = xp.max(sizes, axis=(-2, -1)) > found[:, -1]
        if not xp.any(is_better):
            return
        pairs = xp.nonzero(is_better)[0]
        width = sizes.shape[-1]
        flat = [array[pairs].reshape((len(pairs), -1)) for array in (sizes, weights, gradients)]
        top, places = self._problem.engine.topk(flat[0], min(self.k, flat[0].shape[-1]))
        is_edge = top > 0
        tile = (
            xp.where(is_edge, row + places // width, -1),
            xp.where(is_edge, column + places % width, -1),
            *(xp.astype(xp.take_along_axis(array, places, axis=-1), found.dtype) for array in flat[1:]),
        )
        both = [xp.concat([old[pairs], new], axis=-1) for old, new in zip(state[2:], tile, strict=True)]
        ranks = xp.concat([found[pairs], xp.astype(top, found.dtype)], axis=-1)
        order = xp.argsort(-ranks, axis=-1, stable=True)[:, : self.k]
        for old, new in zip(state[2:], both, strict=True):
            old[pairs] = xp.take_along_axis(new, order, axis=-1)

    def merge(self, a: EdgeSums, b: EdgeSums) -> EdgeSums:
        raise TypeError("EdgeGradients has no gradients of its own, and is not merged")


class _GatedIntervention(Intervention):
    """An intervention whose heads return masked + gate · (unmasked − masked), with one gate for all."""

    def __init__(self, model: nn.Module, edits: Iterable[Edit], gate: float) -> None:
        super().__init__(model, [BoundEdit(edit) for edit in edits], None)
        self._gate = gate
        self.gates: dict[str, Tensor] = {}  # of each layer by name, (heads, 1, 1), which require gradients

    def replaces_output(self, name: str, args: CapturedArgs) -> bool:
        """Return whether the unmasked output is not needed: it always is; the wrappers ask."""
        return False

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Apply the edits to a call and mix both outputs; the wrappers call it."""
        edited = super().edit(module, name, args)
        if edited.edited_output is None:
            return edited
        call = self._build(module, name, args, self._plain_options)
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

    `run` runs the model, whose parameters need no gradient, and returns the metric, a scalar. The result has the part
    of each head of each restricted layer, (heads,). It is positive if the metric is larger with the mask.
    """
    parts: dict[str, Tensor] = {}
    listed = as_edits(edits, "effects")
    for step in range(steps):
        gated = _GatedIntervention(model, listed, (step + 0.5) / steps)
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
