"""The torch engine: operations of the block loop on tensors. `torch_fused` calls the fused kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from operator import attrgetter
from typing import Any

import array_api_compat.torch as array_api
import numpy as np
import torch

from regard.accumulators import Accumulator
from regard.engines import native, triton_pass
from regard.engines import torch_fused as fused
from regard.engines.compensated import CompensatedSum
from regard.engines.torch_precision import has_float64, use_full_precision
from regard.errors import ArgumentTypeError, describe_argument
from regard.frame import is_contiguous
from regard.masks import Mask
from regard.problem import Problem, find_arrays
from regard.types import Array, IntArray
from regard.validation import as_array

Tensor = Any  # torch's types are not checked
_get_version = attrgetter("_version")


class TorchNamespace:
    """The array API on torch: new arrays are on one device, and float64 by default, as accumulators should be.

    If the device has no float64, `float64` is float32, and `zeros` without a dtype returns a `CompensatedSum`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_float64 = has_float64(device)
        self.float64 = torch.float64 if self._has_float64 else torch.float32

    def __getattr__(self, name: str) -> Any:
        function = getattr(array_api, name)
        setattr(self, name, function)
        return function

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        if self._device.type == "cpu":
            array = array if isinstance(array, torch.Tensor) else _copy_to_tensor(array)
            return array.to(device=self._device, dtype=dtype)
        if not isinstance(array, torch.Tensor):
            array = np.asarray(array)
            if array.ndim == 1 and array.dtype == np.int64 and is_contiguous(array):
                # Made on the device: a copy to it may wait for what it computes.
                array = torch.arange(int(array[0]), int(array[-1]) + 1, device=self._device)
            else:
                array = _copy_to_tensor(array)
        if dtype is None and array.dtype == torch.float64:
            dtype = self.float64
        # Converted before it is moved: the device may lack the dtype.
        return (array if dtype is None else array.to(dtype)).to(self._device, non_blocking=True)

    def zeros(self, shape: Any, dtype: Any = None) -> Any:
        if dtype is None and not self._has_float64:
            high, low = (torch.zeros(shape, dtype=torch.float32, device=self._device) for _ in range(2))
            return CompensatedSum(high, low, self)
        return torch.zeros(shape, dtype=dtype or torch.float64, device=self._device)

    def empty(self, shape: Any, dtype: Any = None) -> Array:
        return torch.empty(shape, dtype=dtype or self.float64, device=self._device)

    def full(self, shape: Any, value: Any, dtype: Any = None) -> Array:
        return torch.full(shape, value, dtype=dtype or self.float64, device=self._device)

    def arange(self, *limits: int) -> Array:
        return torch.arange(*limits, device=self._device)

    def clip(self, array: Array, low: Any, high: Any) -> Array:
        return torch.clamp(array, low, high)  # array_api_compat's takes longer than a small tile

    def vecdot(self, x: Array, y: Array) -> Array:
        return torch.linalg.vecdot(x, y)  # array_api_compat's multiplies single rows: ten times slower

    def where(self, condition: Any, x: Any, y: Any) -> Array:
        # torch.where keeps the dtype of the tensor beside a plain number, as NumPy does.
        return torch.where(condition, x, y)


class TorchEngine:
    """Operations on tensors of one device; half precision is upcast to float32."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_type = device, device.type
        self.is_asynchronous = device.type != "cpu"
        self.xp: Any = TorchNamespace(device)

    # Arrays

    def owns(self, array: object) -> bool:
        return isinstance(array, torch.Tensor) and array.device == self.device

    def to_numpy(self, array: Array) -> Any:
        if not isinstance(array, torch.Tensor):
            return np.asarray(array)
        array = array.detach().cpu()
        return (array.float() if array.dtype is torch.bfloat16 else array).numpy()  # NumPy has no bfloat16

    def as_float(self, array: Any, operation: str, name: str) -> Array:
        if not isinstance(array, torch.Tensor):
            array = as_array(array, operation, name)
            if array.dtype.kind in "iuf" or array.dtype.name == "bfloat16":
                array = self.xp.asarray(array)
        is_tensor = isinstance(array, torch.Tensor)
        if is_tensor and array.is_floating_point():
            return array if array.device == self.device else self._move(array, operation, name)
        if not is_tensor or array.dtype == torch.bool or array.is_complex():
            raise ArgumentTypeError(
                operation,
                received=f"{name} as {describe_argument(array)}",
                expected="real numbers",
                hint=f"Convert it first: {name}.{'float()' if is_tensor else 'astype(float)'}.",
            )
        return array.to(device=self.device, dtype=torch.get_default_dtype())

    def _move(self, array: Array, operation: str, name: str) -> Array:
        """Move a CPU scalar to this device; refuse other tensors of another device."""
        if array.device.type == "cpu" and array.ndim == 0:
            return array.to(self.device)
        raise ArgumentTypeError(
            operation,
            received=f"{name} on {array.device}",
            expected=f"{self.device}, where the query is",
            hint=f"Move it: {name}.to({str(self.device)!r}).",
        )

    def count_changes(self, arrays: Sequence[Any]) -> list[int]:
        try:
            return list(map(_get_version, arrays))
        except (
            AttributeError,
            RuntimeError,
        ):  # not a tensor, or one made in inference mode, which has no version
            tensors = (x for x in arrays if isinstance(x, torch.Tensor))
            return [x._version for x in tensors if not x.is_inference()]

    def working_dtype(self, *arrays: Array) -> Any:
        dtype = torch.float32
        for array in arrays:
            dtype = torch.promote_types(dtype, array.dtype)
        return dtype

    def cast(self, array: Array, dtype: Any) -> Array:
        return array if array.dtype is dtype else array.to(dtype)

    def take(self, array: Array, pairs: IntArray, positions: IntArray, dtype: Any) -> Array:
        is_single = bool(len(pairs)) and bool((pairs == pairs[0]).all())
        is_slice = is_single or is_contiguous(pairs)
        if is_slice:
            array = array[int(pairs[0]) : (int(pairs[0]) if is_single else int(pairs[-1])) + 1]
        if is_contiguous(positions):
            array = array[:, int(positions[0]) : int(positions[-1]) + 1]
        else:
            array = array[:, torch.tensor(positions, device=self.device)]
        if not is_slice:  # last, since it copies: grouped heads repeat their pair
            array = array[_make_index(pairs.tobytes(), self.device)]
        return array.to(dtype)

    # The block loop

    def compute_scores(self, query: Array, key: Array, scale: float) -> Array:
        return (query @ key.mT).mul_(scale)

    def compute_weights(
        self, query: Array, key: Array, lse: Array, allowed: Array | None, buffers: list[Array]
    ) -> tuple[Array, Array]:
        shape = (len(lse), query.shape[1], key.shape[1])
        size = math.prod(shape)
        if not buffers or len(buffers[0]) < size:
            buffers[:] = (torch.empty(size, dtype=query.dtype, device=self.device) for _ in range(2))
        logs, weights = (buffer[:size].view(shape) for buffer in buffers)
        torch.bmm(query.expand(len(lse), -1, -1), key.expand(len(lse), -1, -1).mT, out=logs)
        # exp is many times slower where it overflows or its result is subnormal. A rounded weight must not exceed 1.
        logs.sub_(lse).clamp_(math.log(torch.finfo(logs.dtype).tiny), 0.0)
        torch.exp(logs, out=weights)
        return logs, weights if allowed is None else weights.mul_(allowed)

    def exponentiate(self, scores: Array, shift: Array) -> Array:
        return (scores - shift).exp_()

    def softmax(self, scores: Array) -> Array | None:
        weights = torch.softmax(scores, -1)
        return weights if math.isfinite(weights.sum().item()) else None

    def segment_reduce(self, array: Array, sizes: tuple[int, ...], axis: int, reduce: str) -> Array:
        function = torch.amax if reduce == "max" else torch.sum
        if min(sizes) == max(sizes):
            return function(array.unflatten(axis, (len(sizes), sizes[0])), dim=axis)
        if len(sizes) <= 16 or reduce == "max":
            return torch.stack([function(segment, dim=axis) for segment in array.split(sizes, axis)], axis)
        # One matrix product for many short segments; over long ones it would round more than a sum does.
        membership = _segment_membership(sizes, array.dtype, self.device)

        def add_up(terms: Tensor) -> Tensor:
            return terms @ membership if axis == -1 else membership.mT @ terms

        # 0 · NaN is NaN: the product spreads it into every segment.
        if self.is_asynchronous:  # without asking whether there is one
            has_nan = add_up(array.isnan().to(array.dtype)) > 0
            return torch.where(has_nan, math.nan, add_up(array.nan_to_num(0.0)))
        sums = add_up(array)
        if sums.isnan().any():
            return torch.stack([segment.sum(axis) for segment in array.split(sizes, axis)], axis)
        return sums

    def topk(self, weights: Array, k: int) -> tuple[Array, Array]:
        if self.is_asynchronous:  # below, ties are looked for, which would wait for the device
            ranked = torch.where(weights.isnan(), math.inf, weights)
            columns = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :k]
            return weights.gather(-1, columns), columns
        length = weights.shape[-1]
        size = 1 << max(0, round(math.log2(length / k) / 2))
        groups = -(-length // size)
        if size < 2 or groups < k:
            values, columns = torch.topk(weights, k)
            is_tied = _has_ties(weights, values, k)
        else:
            # The k largest lie in the k groups of largest maximum. The columns of a group are `groups` apart, so that
            # the maxima are a reduction over the second last axis, which is fast.
            missing = size * groups - length
            padded = torch.nn.functional.pad(weights, (0, missing), value=-math.inf) if missing else weights
            maxima = padded.unflatten(-1, (size, groups)).amax(-2)
            best = torch.topk(maxima, k)
            steps = torch.arange(0, size * groups, groups, device=self.device)
            candidates = (best.indices[..., None] + steps).flatten(-2)
            candidate_weights = padded.gather(-1, candidates)
            values, chosen = torch.topk(candidate_weights, k)
            columns = candidates.gather(-1, chosen)
            smallest = values[..., -1:]
            other_groups = (maxima >= smallest).sum(-1) > (best.values >= smallest).sum(-1)
            is_tied = _has_ties(candidate_weights, values, k) | (other_groups & (smallest > 0).squeeze(-1))
        if is_tied.any():
            # torch.topk does not define which of equal weights it returns; a stable sort returns the first ones.
            order = torch.sort(weights[is_tied], dim=-1, descending=True, stable=True)
            columns = columns.clone()  # the gradient of torch.topk reads its own
            values[is_tied], columns[is_tied] = order.values[..., :k], order.indices[..., :k]
        return values, columns

    @property
    def suppress_warnings(self) -> Callable[[], AbstractContextManager[Any]]:
        # Autocast and reduced-precision products would round the scores to 8 bits.
        return lambda: use_full_precision(self.device_type)

    # The compiled pass

    def name_compiled_pass(self, problem: Problem) -> str:
        arrays = (problem.query, problem.key)
        is_plain = all(type(array) in (torch.Tensor, torch.nn.Parameter) for array in arrays)
        if not is_plain or torch.compiler.is_compiling():
            return ""
        name = triton_pass.describe_pass(problem)
        if name or self.device.type != "cpu":
            return name
        return native.describe_pass(problem) if problem.dtype in (torch.float32, torch.float64) else ""

    def can_accumulate(self, problem: Problem, accumulator: Accumulator) -> bool:
        return not triton_pass.describe_pass(problem) or triton_pass.can_accumulate(accumulator)

    def accumulate(
        self,
        problem: Problem,
        accumulators: Sequence[Accumulator],
        known_max: Array | None,
        known_sum: Array | None,
    ) -> tuple[list[Any], Array, Array | None] | None:
        if triton_pass.describe_pass(problem):
            return triton_pass.accumulate(problem, accumulators, known_max, known_sum)

        query, key, largest = (
            _to_array(array, problem.dtype) for array in (problem.query, problem.key, known_max)
        )
        total = _to_array(known_sum, torch.float64)
        threads = torch.get_num_threads()
        results = native.accumulate(problem, query, key, accumulators, largest, total, threads)
        return tuple(map(_to_tensors, results))

    def prefers_compiled_pass(self, problem: Problem) -> bool:
        return bool(triton_pass.describe_pass(problem) and self.name_compiled_pass(problem))

    def keeps_exponentials(self, problem: Problem) -> bool:
        return bool(
            self.name_compiled_pass(problem)
            and not triton_pass.describe_pass(problem)
            and native.keeps_exponentials(problem)
        )

    def name_measured_product(
        self, problem: Problem, value: Array, accumulators: Sequence[Accumulator]
    ) -> str:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not self.name_compiled_pass(problem):
            return ""
        if self.device.type == "cpu" and self.keeps_exponentials(problem):
            is_plain = self.working_dtype(value) == problem.dtype and value.numel()
            return self.name_compiled_pass(problem) if is_plain else ""
        if not self.prefers_compiled_pass(problem):
            return ""
        return triton_pass.describe_product(problem, value, accumulators)

    def run_measured_product(
        self, problem: Problem, value: Array, value_index: IntArray, accumulators: Sequence[Accumulator]
    ) -> tuple[Array, list[Any], Array, Array] | None:
        if triton_pass.describe_pass(problem):
            return triton_pass.run_product(problem, value, value_index, accumulators)
        query, key, wide = (_to_array(array, problem.dtype) for array in (problem.query, problem.key, value))
        threads = torch.get_num_threads()
        found = native.multiply(problem, query, key, wide, value_index, accumulators, threads)
        if found is None:
            return None
        output, *rest = map(_to_tensors, found)
        return output.to(value.dtype), *rest

    # Fused kernels

    def can_fuse(self, problem: Problem) -> bool:
        return fused.find_kernel(problem)[0] is not None

    def kernel_name(self, problem: Problem) -> str:
        kernel, reason = fused.find_kernel(problem)
        name = f"torch: block loop ({reason})" if kernel is None else f"torch: {kernel.name}"
        fault = triton_pass.describe_fault(self.device)
        return f"{name}; {fault}" if fault else name

    def run_fused_product(
        self, problem: Problem, value: Array, value_index: IntArray
    ) -> tuple[Array, Array | None, str] | None:
        if not torch.is_autocast_enabled(self.device_type):
            return fused.run_fused_product(problem, value, value_index)
        # Autocast does not reach the private operators, but would convert, or refuse, what is merged around them.
        with torch.autocast(self.device_type, enabled=False):
            return fused.run_fused_product(problem, value, value_index)

    def prepare_fast_product(
        self, query: Array, key: Array, mask: Mask | None, scale: float
    ) -> Callable[[Any, bool], tuple[Array, Array | None, str] | None] | None:
        return fused.prepare_fast_product(query, key, mask, scale, self)

    def find_largest_norm(self, array: Array, dtype: Any) -> float:
        return float(array.detach().to(dtype).norm(dim=-1).amax()) if array.numel() else 0.0

    # Gradients

    def requires_grad(self, problem: Problem, *arrays: Array) -> bool:
        if not torch.is_grad_enabled():
            return False
        if problem.query.requires_grad or problem.key.requires_grad:
            return True
        own = find_arrays(problem.sink, problem.score_mods) if problem.score_mods or problem.has_sink else ()
        return any(map(fused.requires_grad, (*own, *arrays)))

    def differentiate(
        self, problem: Problem, measures: Sequence[Any], bands: Sequence[IntArray]
    ) -> list[Any]:
        from regard.engines.torch_gradients import differentiate

        return differentiate(problem, measures, bands)

    def checkpoint(self, function: Callable[..., Array], *arrays: Array) -> Array:
        if not any(map(fused.requires_grad, arrays)):
            return function(*arrays)
        from torch.utils.checkpoint import checkpoint

        return checkpoint(function, *arrays, use_reentrant=False, preserve_rng_state=False)

    @property
    def no_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        context: Callable[[], AbstractContextManager[Any]] = torch.no_grad
        return context

    @property
    def enable_grad(self) -> Callable[[], AbstractContextManager[Any]]:
        # Inference mode records no graph even inside `torch.enable_grad()`; leaving it enables gradients.
        is_inference = torch.is_inference_mode_enabled()
        if torch.is_grad_enabled() and not is_inference:
            return nullcontext
        return lambda: torch.inference_mode(False) if is_inference else torch.enable_grad()


def _copy_to_tensor(array: Any) -> Tensor:
    """Copy an array to a tensor; torch refuses negative strides, swapped bytes, and dtypes that it lacks."""
    array = np.asarray(array)
    if (
        array.dtype.char in "?bBhilqfd" and array.dtype.isnative
    ):  # most arrays; a dtype takes long to say its name
        return torch.from_numpy(array.copy())
    is_bfloat16, is_long = array.dtype.name == "bfloat16", array.dtype.itemsize > 8
    dtype = np.float32 if is_bfloat16 else np.float64 if is_long else array.dtype.newbyteorder("=")
    tensor = torch.from_numpy(np.array(array, dtype=dtype, order="C"))
    return tensor.to(torch.bfloat16) if is_bfloat16 else tensor


def _to_array(tensor: Tensor, dtype: Any) -> Any:
    """Convert a tensor to a NumPy array, if possible of the same memory; None stays."""
    return None if tensor is None else tensor.to(dtype).numpy(force=True)


def _to_tensors(result: Any) -> Any:
    """Convert arrays, in lists and tuples too, to tensors that share their memory."""
    if isinstance(result, list | tuple):
        return type(result)(map(_to_tensors, result))
    return None if result is None else torch.from_numpy(result)


def _has_ties(weights: Tensor, values: Tensor, k: int) -> Tensor:
    """Return whether more than k weights of a row are as large as its k-th, or NaN; zeros may tie in any order."""
    smallest = values[..., -1:]
    return (((weights >= smallest).sum(-1) > k) & (smallest > 0).squeeze(-1)) | values.isnan().any(-1)


@lru_cache(maxsize=256)
def _segment_membership(sizes: tuple[int, ...], dtype: Any, device: torch.device) -> Tensor:
    """Return which segment each position belongs to, as ones in a matrix (length, segments)."""
    return torch.eye(len(sizes), dtype=dtype).repeat_interleave(torch.tensor(sizes), 0).to(device)


@lru_cache(maxsize=256)
def _make_index(index: bytes, device: torch.device) -> Tensor:
    """Return int64 numbers as a tensor; tiles of grouped heads use the same index again and again."""
    return torch.tensor(np.frombuffer(index, np.int64), device=device)
