"""Gradients that no fused kernel has: of measures, softcaps and learned biases, in O(n) memory.

Each band of rows is a checkpoint: only its result is kept, and it is recomputed in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from regard.engines.compensated import resolve_sums
from regard.engines.torch_product_gradient import differentiate_product
from regard.frame import take_range
from regard.problem import Problem, find_arrays
from regard.tiling import tile_sizes
from regard.types import IntArray

Tensor = Any  # torch's types are not checked


def differentiate(problem: Problem, measures: Sequence[Any], bands: Sequence[IntArray]) -> list[Any]:
    """Compute measures with gradients of all arrays of the problem."""
    if len(measures) == 1 and getattr(measures[0], "transposed", None) is False:  # A @ value
        bound, find = measures[0].bind(problem), partial(_differentiate_bands, problem, measures, bands)
        product = differentiate_product(problem, bound, lambda: find()[0])
        if product is not None:
            return [product]
    return _differentiate_bands(problem, measures, bands)


def _differentiate_bands(problem: Problem, measures: Sequence[Any], bands: Sequence[IntArray]) -> list[Any]:
    xp, inputs = problem.engine.xp, _list_inputs(problem, measures)
    problem = replace(problem, key=_zero_masked_keys(problem, bands))
    bound = [measure.bind(problem) for measure in measures]
    states = [measure.init(problem.shape, xp) for measure in bound]
    sizes = tile_sizes(on_device=problem.engine.is_asynchronous)
    width = sizes.columns  # the backward pass must meet the same tiles

    positions = xp.arange(max(problem.shape))
    has_blocks = False

    def run_band(band: IntArray) -> list[Any]:
        nonlocal has_blocks
        with problem.engine.suppress_warnings():
            blocks = problem.live_blocks(band, width)
            has_blocks = has_blocks or bool(blocks)
            tiles = [problem.scores(band, columns, full) for columns, full in blocks]
            band_states = [measure.init(problem.shape, xp) for measure in bound]
            given = [problem.take_given_weights(band, columns) for columns, _ in blocks]
            raw = [problem.compute_unnormalised_weights(band, columns, full) for columns, full in blocks]
            if given and given[0] is not None:
                weights_of_blocks = given
            elif raw and raw[0] is not None:
                weights_of_blocks = _normalise(raw)
            else:
                weights_of_blocks = _softmax(tiles, problem)
            for (columns, _), tile, weights in zip(blocks, tiles, weights_of_blocks, strict=True):
                q_idx, kv_idx = (
                    take_range(positions, int(tile_range[0]), int(tile_range[-1]) + 1)
                    for tile_range in (band, columns)
                )
                with _CopiedStates(band_states):
                    band_states = [
                        measure.step(state, weights, tile, q_idx, kv_idx, xp)
                        for measure, state in zip(bound, band_states, strict=True)
                    ]
            return band_states

    for band in bands:
        band_states = checkpoint(run_band, band, use_reentrant=False)
        states = [measure.merge(a, b) for measure, a, b in zip(bound, states, band_states, strict=True)]
    results = [measure.finish(resolve_sums(state)) for measure, state in zip(bound, states, strict=True)]
    # Where every row is empty, nothing was computed from the inputs: their gradient is zero, not missing.
    return results if has_blocks else [_add_to_graph(result, inputs) for result in results]


class _CopiedStates(TorchFunctionMode):  # type: ignore[misc]  # torch's types are not checked
    """Let functions read copies of states, which steps change in place: a checkpoint does not notice such a change."""

    def __init__(self, states: Sequence[Any]) -> None:
        super().__init__()
        self._states = [_find_root(part) for part in tree_leaves(states) if isinstance(part, torch.Tensor)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name not in ("__get__", "__getitem__", "__setitem__"):
            is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
            read, named = args[is_in_place:], {key: value for key, value in kwargs.items() if key != "out"}
            read, named = tree_map(self._copy, (read, named))
            args, kwargs = (*args[:is_in_place], *read), kwargs | named
        return func(*args, **kwargs)

    def _copy(self, argument: Any) -> Any:
        is_tensor = isinstance(argument, torch.Tensor)
        is_state = is_tensor and any(_find_root(argument) is state for state in self._states)
        return argument.clone() if is_state else argument


def _find_root(tensor: Tensor) -> Tensor:
    """Return the tensor that a view is of."""
    return tensor if tensor._base is None else tensor._base


def _list_inputs(problem: Problem, measures: Sequence[Any]) -> list[Tensor]:
    """List the tensors that get a gradient."""
    of_measures = (getattr(measure, "array", None) for measure in measures)
    arrays = [problem.query, problem.key, problem.sink, *find_arrays(problem.score_mods), *of_measures]
    return [array for array in arrays if isinstance(array, torch.Tensor) and array.requires_grad]


def _add_to_graph(result: Any, inputs: Sequence[Tensor]) -> Any:
    """Return a result as a function of inputs whose numbers it does not depend on."""
    if isinstance(result, tuple):
        return type(result)(*(_add_to_graph(part, inputs) for part in result))
    # The sum of no entries is 0, whatever the others are.
    zero = sum(array.reshape(-1, 1)[:, :0].sum() for array in inputs)
    return result + zero if result.is_floating_point() else result


def _softmax(tiles: list[Tensor], problem: Problem) -> list[Tensor]:
    """Compute the weights of a band's tiles, without the share of the sink; rows without live keys are zeros."""
    if not tiles:
        return []
    maxima = [tile.detach().amax(-1, keepdim=True) for tile in tiles]
    sink = None
    if problem.sink is not None:
        sink = problem.frame.per_head(problem.sink, "sink").to(problem.dtype)[:, None, None]
        maxima.append(sink.detach().expand_as(maxima[0]))
    shift = torch.cat(maxima, -1).amax(-1, keepdim=True)
    shift = torch.where(shift == -math.inf, 0.0, shift)
    exponentials = [torch.exp(tile - shift) for tile in tiles]
    total = sum(exponential.sum(-1, keepdim=True) for exponential in exponentials)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    total = torch.where(total == 0, 1.0, total)
    # A NaN row is NaN at its live keys only.
    return [
        torch.where(tile == -math.inf, 0.0, exponential / total)
        for tile, exponential in zip(tiles, exponentials, strict=True)
    ]


def _normalise(raw: list[Any]) -> list[Tensor]:
    """Divide weights by their row sum; computed from logarithms instead, 0 would have no gradient."""
    is_zero = [weights == 0 for weights in raw]
    peak = torch.cat([weights.detach().amax(-1, keepdim=True) for weights in raw], -1).amax(-1, keepdim=True)
    raw = [weights / torch.where(peak == 0, 1.0, peak) for weights in raw]
    total = sum(weights.sum(-1, keepdim=True) for weights in raw)
    is_nan, total = total.isnan(), torch.where(total == 0, 1.0, total)
    # A NaN row is NaN at its live keys only.
    return [
        torch.where(is_nan & zero, 0.0, weights / total) for weights, zero in zip(raw, is_zero, strict=True)
    ]


def _zero_masked_keys(problem: Problem, bands: Sequence[IntArray]) -> Tensor:
    """Replace keys that are not finite and masked for every query by zeros: 0 · NaN reaches gradients."""
    array, index = problem.key, problem.key_index
    bad = ~array.isfinite().all(-1)  # (own pairs, kv_len)
    if not bad.any() or (problem.mask is None and not problem.score_mods):
        return array
    columns = bad.any(0).nonzero()[:, 0].cpu().numpy()
    live = torch.zeros((len(index), len(columns)), dtype=torch.bool, device=array.device)
    frame, xp = problem.frame, problem.engine.xp
    for band in bands:
        q_idx = problem.positions[band]
        allowed = torch.ones((1, len(band), len(columns)), dtype=torch.bool, device=array.device)
        if problem.mask is not None:
            allowed = problem.mask.allows(frame, q_idx, columns, xp)
        for score_mod in problem.score_mods:
            added = score_mod.additive_bias(frame, q_idx, columns, xp, problem.dtype)
            allowed = allowed if added is None else allowed & (added != -math.inf)
        live |= allowed.any(-2)
    owner = torch.tensor(index, device=array.device)
    masked = torch.ones_like(bad)
    masked[:, columns] = ~torch.zeros_like(bad[:, columns]).index_put((owner,), live, accumulate=True)
    return torch.where((bad & masked)[..., None], 0.0, array)
