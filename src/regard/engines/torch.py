"""The PyTorch engine: the block loop's primitives on tensors. Fused kernels are in `_torch_fused`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import array_api_compat.torch as array_api
import numpy as np
import torch

from regard.engines import torch_fused as fused
from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import is_contiguous
from regard.types import Array, IntArray
from regard.validation import as_array

Tensor = Any  # the types of torch are not followed


class Namespace:
    """The array API on torch, its new arrays on one device; accumulators are float64 unless said."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        function = getattr(array_api, name)
        setattr(self, name, function)
        return function

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        if not isinstance(array, torch.Tensor):
            array = torch.tensor(np.asarray(array))
        return array.to(device=self._device, dtype=dtype)

    def zeros(self, shape: Any, dtype: Any = torch.float64) -> Array:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def empty(self, shape: Any, dtype: Any = torch.float64) -> Array:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def full(self, shape: Any, value: Any, dtype: Any = torch.float64) -> Array:
        return torch.full(shape, value, dtype=dtype, device=self._device)

    def arange(self, *limits: int) -> Array:
        return torch.arange(*limits, device=self._device)

    def vecdot(self, x: Array, y: Array) -> Array:
        return torch.linalg.vecdot(x, y)  # the compatible one is a product of single rows, ten times slower

    def where(self, condition: Any, x: Any, y: Any) -> Array:
        # torch's own keeps the dtype of the tensor beside a plain number, as NumPy does.
        return torch.where(condition, x, y)


class TorchEngine:
    """Primitives on tensors of one device; half precision is raised to float32."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.xp: Any = Namespace(device)

    def owns(self, array: Any) -> bool:
        return isinstance(array, torch.Tensor) and array.device == self.device

    def kernel_name(self, problem: Any) -> str:
        kernel, why_not = fused.usable(problem)
        return f"torch: streaming tiles ({why_not})" if kernel is None else f"torch: {kernel.name}"

    def can_fuse(self, problem: Any) -> bool:
        return fused.usable(problem)[0] is not None

    def fused_product(
        self, problem: Any, value: Array, value_of: IntArray
    ) -> tuple[Array, Array, str] | None:
        return fused.product(problem, value, value_of)

    def needs_exact_rows(self, problem: Any) -> bool:
        return fused.needs_exact_rows(problem)

    def requires_grad(self, problem: Any, *arrays: Array) -> bool:
        changes = (array for change in problem.score_mods for array in vars(change).values())
        return any(map(fused.is_learnt, (problem.query, problem.key, problem.sink, *arrays, *changes)))

    def differentiate(self, problem: Any, measures: Any, bands: Any) -> list[Any]:
        from regard.engines.torch_gradients import differentiate

        return differentiate(problem, measures, bands)

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        if not any(map(fused.is_learnt, arrays)):
            return function(*arrays)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *arrays, use_reentrant=False, preserve_rng_state=False)

    def try_fast_product(self, query: Array, key: Array, value: Any, mask: Any, scale: float) -> Any:
        return fused.quick(query, key, value, mask, scale)

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        # Autocast would lower the scores to half precision.
        return lambda: torch.autocast(self.device.type, enabled=False)

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        context: Callable[[], AbstractContextManager[Any]] = torch.no_grad
        return context

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        if not isinstance(array, torch.Tensor):
            array = torch.as_tensor(as_array(array, operation, name))
        if array.is_floating_point():
            return array if array.device == self.device else self._elsewhere(array, operation, name)
        if array.dtype == torch.bool or array.is_complex():
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)}",
                expected="real numbers",
                hint=f"Convert it first: {name}.float().",
            )
        return array.to(device=self.device, dtype=torch.get_default_dtype())

    def _elsewhere(self, array: Array, operation: str, name: str) -> Array:
        if array.device.type == "cpu" and array.ndim == 0:
            return array.to(self.device)
        raise ArgumentTypeError(
            operation,
            received=f"{name} on {array.device}",
            expected=f"{self.device}, where the query is",
            hint=f"Move it: {name}.to({str(self.device)!r}).",
        )

    def working_dtype(self, *arrays: Array) -> Any:
        dtype = torch.float32
        for array in arrays:
            dtype = torch.promote_types(dtype, array.dtype)
        return dtype

    def cast(self, array: Array, dtype: Any) -> Array:
        return array.to(dtype)

    def to_numpy(self, array: Array) -> Any:
        return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)

    def take(self, array: Array, leads: IntArray, positions: IntArray, dtype: Any) -> Array:
        if len(leads) and (leads == leads[0]).all():
            array = array[int(leads[0])][None]
        elif is_contiguous(leads):
            array = array[int(leads[0]) : int(leads[-1]) + 1]
        else:
            array = array[torch.tensor(leads, device=self.device)]
        if is_contiguous(positions):
            array = array[:, int(positions[0]) : int(positions[-1]) + 1]
        else:
            array = array[:, torch.tensor(positions, device=self.device)]
        return array.to(dtype)

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        return (query @ key.mT).mul_(scale)

    def compute_weights(
        self, query: Array, key: Array, shift: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        shape = (len(shift), query.shape[1], key.shape[1])
        size = math.prod(shape)
        if not buffers or len(buffers[0]) < size:
            buffers[:] = (torch.empty(size, dtype=query.dtype, device=self.device) for _ in range(2))
        logs, weights = (each[:size].view(shape) for each in buffers)
        torch.bmm(query.expand(len(shift), -1, -1), key.expand(len(shift), -1, -1).mT, out=logs)
        # The exponential of what overflows, or becomes subnormal, is many times slower.
        logs.sub_(shift).clamp_(math.log(torch.finfo(logs.dtype).tiny), None if allowed is None else 0.0)
        torch.exp(logs, out=weights)
        return logs, weights if allowed is None else weights.mul_(allowed)

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        return (scores - shift).exp_()

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        take = torch.amax if reduce == "max" else torch.sum
        if min(sizes) == max(sizes):
            return take(array.unflatten(axis, (len(sizes), sizes[0])), dim=axis)
        if len(sizes) <= 16 or reduce == "max":
            return torch.stack([take(run, dim=axis) for run in array.split(sizes, axis)], axis)
        # One product for many short runs; over long ones it would round more than a sum does.
        members = _members(sizes, array.dtype, self.device)
        sums = array @ members if axis == -1 else members.mT @ array
        if sums.isnan().any():  # 0 · NaN is NaN: the product carries it into every segment
            return torch.stack([run.sum(axis) for run in array.split(sizes, axis)], axis)
        return sums

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        length = weights.shape[-1]
        size = 1 << max(0, round(math.log2(length / k) / 2))
        groups = -(-length // size)
        if size < 2 or groups < k:
            values, columns = torch.topk(weights, k, dim=-1)
            crowded = _is_crowded(weights, values, k)
        else:
            # The k largest lie in the k groups of largest maximum; a group's columns are far apart: it folds quickly.
            missing = size * groups - length
            padded = torch.nn.functional.pad(weights, (0, missing), value=-1.0) if missing else weights
            peaks = padded.unflatten(-1, (size, groups)).amax(-2)
            best = torch.topk(peaks, k, dim=-1)
            steps = torch.arange(0, size * groups, groups, device=self.device)
            candidates = (best.indices[..., None] + steps).flatten(-2)
            among = padded.gather(-1, candidates)
            values, chosen = torch.topk(among, k, dim=-1)
            columns = candidates.gather(-1, chosen)
            least = values[..., -1:]
            elsewhere = (peaks >= least).sum(-1) > (best.values >= least).sum(-1)
            crowded = _is_crowded(among, values, k) | (elsewhere & (least > 0).squeeze(-1))
        if crowded.any():
            # topk does not say which of equal weights it takes; a stable sort takes the first ones.
            order = torch.sort(weights[crowded], dim=-1, descending=True, stable=True)
            values[crowded], columns[crowded] = order.values[..., :k], order.indices[..., :k]
        return values, columns


def _is_crowded(weights: Tensor, values: Tensor, k: int) -> Tensor:
    """Whether more than k of a row are as large as the last of its k largest, or NaN; zeros may be any."""
    least = values[..., -1:]
    return (((weights >= least).sum(-1) > k) & (least > 0).squeeze(-1)) | values.isnan().any(-1)


@lru_cache(maxsize=256)
def _members(sizes: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
    """Which run each position is in, as ones in a matrix (length, runs)."""
    return torch.eye(len(sizes), dtype=dtype, device=device).repeat_interleave(torch.tensor(sizes), 0)
