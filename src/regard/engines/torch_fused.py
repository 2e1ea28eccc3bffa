"""Products by fused kernels, and their gradients over a block of keys.

Two guarantees that the kernels do not give are restored here: rows without live keys become zeros, and where NaN or
inf could reach a row that must not depend on it, the block loop takes over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.engines import torch_kernels as kernels
from regard.engines import torch_lowering as lowering
from regard.engines.native.library import load_library
from regard.engines.torch_bands import UPCAST, BlockwiseProduct, KernelCall, differentiate_bands, run_bands
from regard.engines.torch_kernels import Kernel
from regard.engines.torch_precision import has_ieee_products
from regard.frame import Frame, is_contiguous
from regard.masks import Mask
from regard.problem import Problem, find_arrays
from regard.score_mods import ScoreMod
from regard.types import IntArray

Tensor = Any  # torch's types are not checked

# Outputs of at most so many entries, of these dtypes, are scanned for NaN and inf on one core.
MAX_SCANNED, _SCANNED = 1 << 15, (torch.float32, torch.float64)
# With fewer keys the kernel returns zeros for a row whose scores are all NaN, as if it were empty.
FEW_KEYS = 64
# Most entries of a mask, for each (batch, head) pair, that is not split into bands and blocks.
MAX_TILE_ENTRIES = 1 << 16
# Most entries, over all pairs, of a tile that matrices with equal masks share.
SHARED_TILE_ENTRIES = 16 * MAX_TILE_ENTRIES
MAX_PAIRS = kernels.MAX_PAIRS


def run_fused_product(
    problem: Problem, value: Tensor, value_index: IntArray
) -> tuple[Tensor, Tensor | None, str] | None:
    """Compute `A @ value` with a fused kernel.

    Args:
        problem: Matrix in canonical form.
        value: (own pairs, kv_len, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).

    Returns:
        Output (pairs, rows, value_dim), lse (pairs, rows) and the name of the kernel; None if no fused kernel may be
        used. The lse is None if torch computed it with reduced precision.
    """
    kernel, _ = find_kernel(problem)
    common = torch.promote_types(torch.promote_types(problem.query.dtype, problem.key.dtype), value.dtype)
    if kernel is None or not value.numel() or (kernel.dtypes is not None and common not in kernel.dtypes):
        return None
    mask, tensors = problem.mask, (problem.query, problem.key, value)
    learns_bias = any(map(requires_grad, find_arrays(problem.score_mods)))
    differentiates = learns_bias or any(map(requires_grad, (*tensors, problem.sink)))
    if learns_bias or (differentiates and kernel.backward is None):
        return None  # the kernel has no gradient for them
    checked = tensors if mask is not None or problem.score_mods else tensors[:2]
    if (len(checked) > 2 or problem.key.shape[-2] < FEW_KEYS) and not _all_finite(*checked):
        return None
    outputs, lses, num_calls = [], [], 0
    names: set[str] = set()
    for group in _split_pairs(problem):
        q, k, v, sink, call = _prepare_call(problem.select_pairs(group), value, value_index, kernel, names)
        bands = call.bands
        is_single_call = (
            len(bands) == 1 and len(bands[0].blocks) == 1 and not bands[0].blocks[0].has_tile and sink is None
        )
        if differentiates and not is_single_call:
            output, lse = BlockwiseProduct.apply(q, k, v, sink, call)
        else:
            output, lse = run_bands(q, k, v, sink, call)
        if not (bool((lse < math.inf).all()) and _all_finite(output)):
            return None  # a live NaN or inf, which the kernel spreads farther than guaranteed
        outputs.append(output[0, ..., : value.shape[-1]])
        lses.append(lse[0])
        num_calls += sum([len(band.blocks) for band in bands])
    used = " and ".join(sorted(names)) or kernel.name
    name = f"torch: {used}, {lowering.describe_bands(bands, num_calls)}"
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not _has_exact_lse(kernel, common, problem.query.device.type):
        return output, None, name
    return output, lses[0] if len(lses) == 1 else torch.cat(lses), name


def run_fused_backward(
    problem: Problem, value: Tensor, value_index: IntArray, grad: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the gradients of query, key and value with a fused kernel, for a block of the keys of each row.

    Args:
        problem: Matrix in canonical form, or a block of its keys, without a sink; float32 or wider.
        value: Values of these keys: (own pairs, keys, value_dim).
        value_index: For each pair of the matrix, its pair in `value`: (pairs,).
        grad: Gradient of the output: (pairs, rows, value_dim).
        output: Output of each row over all keys: (pairs, rows, value_dim).
        lse: Logsumexp of each row over all keys: (pairs, rows).

    Returns:
        The gradients, of the shapes of query, key and value; None if no fused kernel may be used.
    """
    kernel, _ = find_kernel(problem)
    if kernel is None or kernel.backward is None or not value.numel():
        return None
    if not _all_finite(problem.query, problem.key, value, grad, output):
        return None
    with torch.enable_grad():
        leaves = [array.detach().requires_grad_() for array in (problem.query, problem.key, value)]
        own = replace(problem, query=leaves[0], key=leaves[1])
        totals = [torch.zeros_like(leaf) for leaf in leaves]
        for group in _split_pairs(problem):
            q, k, v, _, call = _prepare_call(own.select_pairs(group), leaves[2], value_index, kernel, set())
            lead = slice(int(group[0]), int(group[-1]) + 1)
            padding = (0, v.shape[-1] - grad.shape[-1])
            own_grad, own_output = (torch.nn.functional.pad(x[lead], padding)[None] for x in (grad, output))
            with torch.no_grad():
                grads = differentiate_bands(q, k, v, own_grad, own_output, lse[lead][None], call)
            # Back through the padding and the choice of heads.
            found = torch.autograd.grad((q, k, v), leaves, grads, allow_unused=True)
            totals = [total if x is None else total + x for total, x in zip(totals, found, strict=True)]
    return totals[0], totals[1], totals[2]


def _prepare_call(
    part: Problem, value: Tensor, value_index: IntArray, kernel: Kernel, names: set[str]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, KernelCall]:
    """Convert a group of pairs to the tensors and the calls that a kernel takes, and its sink."""
    common = torch.promote_types(torch.promote_types(part.query.dtype, part.key.dtype), value.dtype)
    width = max(part.query.shape[-1], value.shape[-1])
    if width != min(part.query.shape[-1], value.shape[-1]):
        width = -(-width // 16) * 16  # if padding is needed anyway, pad to whole vectors
    k_index, v_index = part.key_index, value_index[part.pair_ids]
    can_group = kernel.takes_groups and np.array_equal(k_index, v_index)
    group_size = _find_group_size(k_index) if can_group else 1
    q = _to_heads(part.query, part.query_index, width, common)
    scale = part.scale
    if scale <= 0:  # the kernel masks before it scales: −inf · 0 would be NaN
        q, scale = (-q, -scale) if scale else (q * 0.0, 1.0)
    k = _to_heads(part.key, k_index[::group_size], width, common)
    v = _to_heads(value, v_index[::group_size], width, common)
    q_range = range(int(part.positions[0]), int(part.positions[-1]) + 1)
    bands = lowering.lower_mask(part.frame, part.mask, q_range, part.kv_range, bool(part.score_mods))
    sink = None if part.sink is None else part.frame.per_head(part.sink, "sink").expand(len(part.pair_ids))
    # The CPU's operator reads a mask tile as the dtype of the query, whatever its own dtype is. CUDA's takes no
    # other dtype, which 0 and −inf do not need.
    is_exact = kernel.dtypes is not None and not part.score_mods
    wide = replace(part, dtype=common if is_exact else torch.promote_types(part.dtype, common))
    build_tile = lowering.make_tile_builder(wide)
    return q, k, v, sink, KernelCall(kernel, bands, q_range.start, part.first_key, build_tile, scale, names)


class MaskTile:
    """The numbers that a small mask adds to the scores, kept until an array of the mask is changed in place.

    Args:
        mask: Mask of the matrix.
        frame: All (batch, head) pairs, (batch, heads), and the lengths.
        dtype: Dtype of query and key.
        engine: The torch engine of their device.
        is_shared: Whether matrices with an equal mask may use the same numbers, as the layers of a model do.
    """

    def __init__(self, mask: Mask, frame: Frame, dtype: Any, engine: Any, *, is_shared: bool) -> None:
        self._mask, self._frame, self._dtype, self._engine = mask, frame, dtype, engine
        self._is_shared = is_shared
        self._arrays = [] if is_shared else find_arrays(mask)
        self._changes: list[int] | None = None

    @staticmethod
    def prepare(mask: Mask, frame: Frame, query: Tensor, key: Tensor, engine: Any) -> MaskTile | None:
        """Return the tile of a mask of query and key, (batch, heads, length, head_dim); None if it is not small."""
        batch, heads = frame.leading_shape
        entries, pairs = frame.q_len * frame.kv_len, batch * heads if mask.varies_by_head else batch
        total = pairs * entries
        if entries > MAX_TILE_ENTRIES or total > max(SHARED_TILE_ENTRIES, query.numel() + key.numel()):
            return None
        is_shared = (
            mask.is_constant
            and total <= SHARED_TILE_ENTRIES
            and type(query) is type(key) is torch.Tensor
            and not torch.compiler.is_compiling()
        )
        return MaskTile(mask, frame, query.dtype, engine, is_shared=is_shared)

    def read(self) -> Tensor:
        """Return the numbers, (batch or 1, heads or 1, q_len or 1, kv_len)."""
        changes = self._engine.count_changes(self._arrays)
        if changes != self._changes:
            build = _build_shared_tile if self._is_shared else _build_tile
            self._changes, self._built = changes, build(self._mask, self._frame, self._dtype, self._engine)
        return self._built

    def find_empty_rows(self) -> Tensor:
        """Return which rows have no live keys: (batch, heads, q_len)."""
        return (self._built == -math.inf).all(-1).expand(*self._frame.leading_shape, self._frame.q_len)


def _build_tile(mask: Mask, frame: Frame, dtype: Any, engine: Any) -> Tensor:
    """Build the numbers that a mask adds to the scores: (batch or 1, heads or 1, q_len or 1, kv_len)."""
    batch, heads = frame.leading_shape
    is_whole = mask.varies_by_head or heads == 1
    part = frame if is_whole else frame.select(np.arange(0, batch * heads, heads))
    allowed = mask.allows_all(part, engine.xp)
    own = (batch, heads) if mask.varies_by_head and len(allowed) > 1 else (len(allowed), 1)
    # The numbers that the public function converts a boolean mask to.
    tile = torch.full(allowed.shape, -math.inf, dtype=dtype).masked_fill_(allowed, 0.0)
    return tile.view(*own, *tile.shape[1:])


@lru_cache(maxsize=8)
def _build_shared_tile(mask: Mask, frame: Frame, dtype: Any, engine: Any) -> Tensor:
    """Build the numbers of a mask without arrays, of which equal masks share a copy: at most 32 MB in float32."""
    with torch.inference_mode(False):  # a tensor made in this mode could not be used with gradients later
        return _build_tile(mask, frame, dtype, engine)


class FastProduct(NamedTuple):
    """`A @ value` in one kernel call: query and key are checked once, so that a call checks only its value.

    Attributes:
        kernel: The kernel that runs.
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        is_causal: Whether the kernel masks the future.
        tile: Any other mask, if it is small.
        scale: Factor of the products.
        device_type: Device type of query and key. Asking a tensor for it costs microseconds.
        shape: Shape that the value must have.
        dtype: Dtype that the value must have.
        name: Name of the kernel for `A.kernel`.
        num_outputs: Number of entries of the output.
        num_rows: Number of rows of all (batch, head) pairs.
        scan: Compiled check of a small result, or None. An operator of torch costs 30 µs instead of 10 after the kernel
            has read so many keys that the processor's caches hold nothing else.
    """

    kernel: Kernel
    query: Tensor
    key: Tensor
    is_causal: bool
    tile: MaskTile | None
    scale: float
    device_type: str
    shape: tuple[int, ...]
    dtype: Any
    name: str
    num_outputs: int
    num_rows: int
    scan: Callable[[bool, int, int, int, int], int] | None

    def run(self, value: Any, needs_lse: bool) -> tuple[Tensor, Tensor | None, str] | None:
        """Return output, lse and the name of the kernel; None if value or result are not what the kernel takes."""
        if type(value) is not torch.Tensor or value.shape != self.shape or value.dtype is not self.dtype:
            return None
        if value.stride()[3] != 1:
            return None
        tile = None if self.tile is None else self.tile.read()
        output, lse = self.kernel.forward(self.query, self.key, value, self.is_causal, tile, self.scale)
        if not self._passes_scan(output, lse):
            # NaN or inf in the kernel's input shows in its output; then the block loop decides which rows get it.
            if not _all_finite(output):
                return None
            if self.tile is not None or self.shape[2] < FEW_KEYS:
                num_empty = self.num_rows - int(torch.count_nonzero(lse)) if self.kernel.is_cpu_flash else -1
                is_empty = self.tile.find_empty_rows() if self.tile is not None and num_empty else None
                num_found = 0 if is_empty is None else int(is_empty.sum())
                if num_found != num_empty and not _all_finite(self.query, self.key):
                    return None  # a row of NaN may look empty
                if is_empty is not None:
                    output = output.masked_fill(is_empty[..., None], 0.0)
                    lse = lse.masked_fill(is_empty, -math.inf)
        if not needs_lse or not _has_exact_lse(self.kernel, self.dtype, self.device_type):
            return output, None, self.name
        return output, lse, self.name

    def _passes_scan(self, output: Tensor, lse: Tensor) -> bool:
        """Return whether a small output is finite and no lse is 0."""
        if self.scan is None or not (output.is_contiguous() or output.transpose(1, 2).is_contiguous()):
            return False  # the kernel returns the layout of the query
        addresses = output.data_ptr(), self.num_outputs, lse.data_ptr(), self.num_rows
        return bool(self.scan(self.dtype is torch.float64, *addresses))


def prepare_fast_product(
    query: Tensor, key: Tensor, mask: Mask | None, scale: float, engine: Any
) -> Callable[[Any, bool], tuple[Tensor, Tensor | None, str] | None] | None:
    """Return `FastProduct.run` if query, key and mask are what the kernel takes; None otherwise.

    Args:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, kv_len, head_dim).
        mask: Mask of the matrix.
        scale: Factor of the products.
        engine: The torch engine of their device.
    """
    q_shape, k_shape = query.shape, key.shape
    if not len(q_shape) == len(k_shape) == 4:
        return None
    batch, heads, q_len, head_dim = q_shape
    k_batch, kv_heads, kv_len, _ = k_shape
    if batch != k_batch or not (batch and heads and q_len and head_dim and kv_heads and kv_len):
        return None
    dtype, device_type = query.dtype, engine.device_type
    if not (dtype is key.dtype and scale > 0 and query.stride()[3] == key.stride()[3] == 1):
        return None
    kernel = kernels.get_kernel(device_type)
    if kernel is None or (heads != kv_heads and (heads % kv_heads or not kernel.takes_groups)):
        return None  # one query head of several key heads is not a group
    is_causal, tile, num_outputs = False, None, query.numel()
    if mask is not None:
        frame = Frame((batch, heads), q_len, kv_len)
        diagonal = mask.diagonal(frame)
        if diagonal is not None and (diagonal == 0 or diagonal >= kv_len - 1):
            is_causal = diagonal == 0 and kv_len > 1
        elif not kernel.is_cpu_flash or (tile := MaskTile.prepare(mask, frame, query, key, engine)) is None:
            return None
    if kernel.dtypes is not None:
        if dtype not in kernel.dtypes or batch * heads > MAX_PAIRS:
            return None
        kernel = kernel.select(query, key, key, is_causal, scale)  # the value has the shape of the key
    name = kernel.masked_name if tile else kernel.causal_name if is_causal else kernel.unmasked_name
    is_small = kernel.is_cpu_flash and dtype in _SCANNED and num_outputs <= MAX_SCANNED
    library = load_library() if is_small else None
    product = FastProduct(
        kernel, query, key, is_causal, tile, scale, device_type, k_shape, dtype, name, num_outputs,
        batch * heads * q_len, None if library is None else library.regard_is_sound,
    )  # fmt: skip
    return product.run


def _has_exact_lse(kernel: Kernel, dtype: Any, device_type: str) -> bool:
    """Return whether the lse of a kernel may be kept: it is not if torch rounds the inputs of float32 products.

    At half precision the lse of the CPU's kernel is no better than that, and the block loop computes a better one.
    """
    if dtype in UPCAST:
        return kernel.has_float32_lse
    return dtype is not torch.float32 or has_ieee_products(device_type)


def find_kernel(problem: Problem) -> tuple[Kernel | None, str]:
    """Return the fused kernel for a problem, or None and the reason."""
    if not (problem.query.numel() and problem.key.numel() and len(problem.pair_ids)):
        return None, "an axis is empty"
    kernel = kernels.get_kernel(problem.query.device.type)
    if kernel is None:
        return None, f"no fused kernel on {problem.query.device.type}"
    dtype = torch.promote_types(problem.query.dtype, problem.key.dtype)
    if kernel.dtypes is not None and dtype not in kernel.dtypes:
        name = str(dtype).removeprefix("torch.")
        return None, f"no fused kernel for {name} on {problem.query.device.type}"
    if not is_contiguous(problem.positions):
        return None, "the rows are not contiguous"
    for score_mod in problem.score_mods:
        if type(score_mod).additive_bias is ScoreMod.additive_bias:
            return None, f"no fused kernel takes {score_mod}"
    return kernel, ""


def requires_grad(array: object) -> bool:
    """Return whether a gradient of an array is required."""
    return isinstance(array, torch.Tensor) and array.requires_grad and torch.is_grad_enabled()


# Tensors as the kernel takes them


def _all_finite(*tensors: Tensor) -> bool:
    """Return whether the sum of each tensor is finite; if a sum overflows, the block loop does the work."""
    sums = (tensor.detach().sum(dtype=UPCAST.get(tensor.dtype)) for tensor in tensors)
    return all(math.isfinite(total.item()) for total in sums)


def _split_pairs(problem: Problem) -> list[IntArray]:
    """Return all pairs as one group, or one group per batch entry if the mask differs between them."""
    count = len(problem.pair_ids)
    if problem.mask is None or not problem.mask.varies_by_batch or count < 2:
        return np.split(np.arange(count), range(MAX_PAIRS, count, MAX_PAIRS))
    return problem.frame.split_batch()


def _find_group_size(index: IntArray) -> int:
    """Return how many consecutive pairs share each key pair if that is regular; 1 otherwise."""
    changes = np.flatnonzero(np.diff(index)) + 1
    size = int(changes[0]) if len(changes) else len(index)
    is_regular = (
        len(index) % size == 0
        and np.array_equal(index, index[::size].repeat(size))
        and is_contiguous(index[::size])
    )
    return size if is_regular else 1


def _to_heads(array: Tensor, index: IntArray, width: int, dtype: Any) -> Tensor:
    """Convert to (1, heads, length, width) for the kernel: last axis contiguous and padded with zeros."""
    if is_contiguous(index):
        array = array[int(index[0]) : int(index[-1]) + 1]
    else:
        array = array[torch.tensor(index, device=array.device)]
    array = array.to(dtype)[None]
    if array.shape[-1] != width:
        return torch.nn.functional.pad(array, (0, width - array.shape[-1]))
    return array if array.stride(-1) == 1 else array.contiguous()
