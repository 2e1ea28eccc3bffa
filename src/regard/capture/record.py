"""Build the record of a call from its captured arguments, and verify it with what the function returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from regard.capture.call import Call, CapturedArgs
from regard.capture.compact_mask import (
    CompactMask,
    FlexScoreMod,
    count_used_keys,
    find_mask,
    recognise_mask,
    recognise_tiles,
)
from regard.capture.module_names import read_attribute, walk_modules
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument
from regard.masks import Mask
from regard.measures import Measure
from regard.score_mods import ScoreMod, bias, relative_bias, softcap

Tensor = Any  # the types of torch are not followed

# Tolerance of the comparison with returned weights and outputs, in units of the dtype's epsilon.
TOLERANCE = 64

# Default limit of the weights that `watch` records of layers that compute their own softmax.
MAX_DENSE_BYTES = 1 << 30

# Layers share their masks: those of self-attention with and without a window, and of cross-attention.
MAX_RECENT_MASKS = 4

_LOAD_HINT = "Load the model with attn_implementation='sdpa', or 'eager' if it has no other."


@dataclass
class CaptureOptions:
    """What `watch` records of each call.

    Args:
        device: Move the tensors to this device; None leaves them.
        dtype: Convert the tensors to this dtype; None leaves them.
        copy: Copy the tensors.
        values: Also record value and output.
        measures: Record the results of these measures, or of this function, instead of query and key.
        max_dense_bytes: Record at most this many bytes of weights of layers that compute their own softmax.
        grad: Record the tensors with their graph.
    """

    device: Any = None
    dtype: Any = None
    copy: bool = False
    values: bool = False
    measures: Mapping[str, Measure] | Callable[[Call], dict[str, Any]] | None = None
    max_dense_bytes: int = MAX_DENSE_BYTES
    grad: bool = False

    def __post_init__(self) -> None:
        self._masks = RecentMasks()

    @property
    def is_default(self) -> bool:
        """Whether query and key are recorded as they are, and nothing else."""
        return self.keeps_tensors and not (self.copy or self.values or self.grad) and self.measures is None

    @property
    def keeps_tensors(self) -> bool:
        """Whether device and dtype stay those of the model."""
        return self.device is None and self.dtype is None

    def detach(self, tensor: Tensor) -> Tensor:
        """Return a tensor without its graph, unless the graph is recorded."""
        return tensor if self.grad else tensor.detach()


class RecentMasks:
    """Masks and biases that were recognised lately: the layers of a model share theirs, so each is recognised once."""

    def __init__(self) -> None:
        # Weak references to the arrays, their versions and sizes, copies of those without a version, and the result.
        self._recent: list[tuple[list[Any], Any, list[Any], CompactMask]] = []
        # Versions and copies of masks, biases and arrays by the original: layers that share it share the copy.
        self._copies: Any = WeakIdKeyDictionary()

    def recognise(self, args: CapturedArgs, kv_len: int, biases: Iterable[ScoreMod]) -> CompactMask:
        """Recognise mask and bias of a call; `biases` of the model may explain an additive mask."""
        arrays = [array for array in (args.attn_mask, args.position_bias) if array is not None]
        if not arrays or isinstance(args.attn_mask, Mask):  # which may hold an array without a version
            return recognise_call_mask(args, kv_len)
        sizes = (args.query.shape[:-1], kv_len, args.is_causal, args.sink is None)
        settings = (sizes, [_version(array) for array in arrays])
        for references, known, copies, compact in self._recent:
            if known == settings and all(map(_is_unchanged, arrays, references, copies)):
                return compact
        compact = recognise_call_mask(args, kv_len, tuple(biases))
        alive = [entry for entry in self._recent if all(reference() is not None for reference in entry[0])]
        copies = [_copy_arrays(array) if _version(array) is None else None for array in arrays]
        references = [weakref.ref(array) for array in arrays]
        self._recent = [*alive[1 - MAX_RECENT_MASKS :], (references, settings, copies, compact)]
        return compact

    def store(self, part: Any, copy: bool) -> Any:
        """Return a mask, a bias or an array with copies of its arrays, unless they need none."""
        arrays = list(_list_arrays(part))
        versions = [_version(array) for array in arrays]
        if not arrays or not (copy or any(version != 0 for version in versions)):
            return part
        known, stored = self._copies.get(part, (None, None))
        is_known = known == versions and all(
            version is not None or _are_equal(array, old)
            for array, old, version in zip(arrays, _list_arrays(stored), versions, strict=True)
        )
        if not is_known:
            stored = _copy_arrays(part)
            self._copies[part] = versions, stored
        return stored


def recognise_call_mask(args: CapturedArgs, kv_len: int, biases: Sequence[ScoreMod] = ()) -> CompactMask:
    """Recognise mask and bias of a call, in O(n) memory as far as they consist of intervals."""
    q_len, mask = args.query.shape[-2], args.attn_mask
    if isinstance(mask, BlockMask | Mask):
        lead = tuple(args.query.shape[:-2]) if isinstance(mask, Mask) else mask.kv_num_blocks.shape[:2]
        compact = recognise_tiles(mask, lead, q_len, kv_len)
        if args.position_bias is not None:
            compact = replace(compact, bias=bias(args.position_bias.detach()[..., :kv_len]))
        return compact
    if args.is_causal and args.position_bias is not None:
        causal = torch.ones((q_len, kv_len), dtype=torch.bool, device=args.position_bias.device).tril()
        args = args._replace(attn_mask=causal, is_causal=False)
    return recognise_mask(
        combine_mask_and_bias(args, kv_len),
        is_causal=args.is_causal,
        q_len=q_len,
        kv_len=kv_len,
        lead=tuple(args.query.shape[:-2]),
        biases=biases,
        sinks=args.sink is not None,
    )


def _is_unchanged(array: Any, reference: Any, copy: Tensor | None) -> bool:
    """Return whether a mask is one that was recognised; in inference mode it has no version, so it is compared."""
    return reference() is array and (copy is None or _are_equal(array, copy))


def _are_equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b))


def _version(array: Any) -> int | None:
    """Return how often a tensor was written to in place; None if that is not known: in inference mode, or of NumPy."""
    if isinstance(array, BlockMask):
        return 0
    if isinstance(array, np.ndarray):
        return None
    return None if array.is_inference() else int(array._version)


def _list_arrays(part: Any) -> Iterator[Any]:
    """List the arrays that a mask or a bias, or a combination of masks, holds."""
    if isinstance(part, torch.Tensor | np.ndarray):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _list_arrays(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _list_arrays(getattr(part, field.name))


def _copy_arrays(part: Any) -> Any:
    """Copy a mask or a bias with the arrays that it holds."""
    if isinstance(part, torch.Tensor):
        # Axes along which a mask is expanded take no memory, and neither do they in the copy.
        axes = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in part.stride())
        return part[axes].clone().expand(part.shape)
    if isinstance(part, np.ndarray):
        return part.copy()
    if isinstance(part, tuple):
        return tuple(map(_copy_arrays, part))
    if next(_list_arrays(part), None) is None:
        return part
    held = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return replace(part, **{name: _copy_arrays(item) for name, item in held.items()})


def find_position_biases(model: nn.Module) -> Iterator[ScoreMod]:
    """Yield the relative position biases that a model such as T5 adds to its scores."""
    for _, module in walk_modules(model):
        table = read_attribute(module, "relative_attention_bias")
        if isinstance(table, nn.Embedding):
            try:
                yield relative_bias(
                    table.weight.detach(),
                    bidirectional=not getattr(module, "is_decoder", False),
                    max_distance=getattr(module, "relative_attention_max_distance", 128),
                    align="lower_right",
                )
            except ArgumentError:  # not a table of this kind; the bias is recorded as an array
                continue


@dataclass(frozen=True)
class Uncaptured:
    """Why a call cannot be recorded, and a hint; `is_intended` if the layer has no weights of tokens by design."""

    reason: str
    hint: str
    is_intended: bool = False


def build_call(
    module: nn.Module, name: str, args: CapturedArgs, options: CaptureOptions, biases: Sequence[ScoreMod]
) -> Call | Uncaptured:
    """Build the record of a call, or say why it cannot be recorded; `biases` may explain its additive mask."""
    if args.query is None:
        if options.grad:
            return Uncaptured("it computes its own softmax, which is recorded without gradients", _LOAD_HINT)
        return _finish(_build_dense(module, name, args), args, options)
    query, key = options.detach(args.query), options.detach(args.key)
    if query.is_nested or key.is_nested:
        return Uncaptured(
            "it was called with nested tensors",
            "Pad the batch instead: torch.nested.to_padded_tensor, with a mask.",
        )
    if args.attn_mask is not None and not isinstance(args.attn_mask, torch.Tensor | BlockMask | Mask):
        mask_class = type(args.attn_mask).__name__
        return Uncaptured(f"its mask is a {mask_class} ({args.kernel})", _LOAD_HINT)
    call: Call | None = None
    try:
        call = _recognise(module, name, args, query, drop_repeated_heads(key, query), options, biases)
        reason = (
            f"{args.kernel} returned other weights than softmax(scale · query keyᵀ + mask) of its arguments"
        )
    except RegardError as error:
        reason = f"no matrix can be computed for {args.kernel} ({error})"
    has_result = args.kernel.startswith(("transformers", "torch: flex")) or args.weights is not None
    if call is not None and has_result:
        with torch.no_grad():
            # Copies, since `matrix` is cached before the tensors are stored.
            readings = _list_readings(call, args, module)
            call = next((read for read in readings if _reproduces(replace(read), args, module)), None)
    if call is None and args.dense is not None and not options.grad:
        call = _build_dense(module, name, args)
    return Uncaptured(reason, _LOAD_HINT) if call is None else _finish(call, args, options)


def _build_dense(module: nn.Module, name: str, args: CapturedArgs) -> Call:
    """Build the record of a call whose weights are given; its query and key have a head_dim of 0."""
    assert args.dense is not None
    weights, value, score_rows = args.dense.weights.detach(), args.dense.value, args.dense.score_rows
    *batch, heads, q_len, kv_len = weights.shape
    if value is not None:
        value = drop_repeated_heads(value.detach(), weights)
        if value.ndim != weights.ndim or heads % value.shape[-3]:
            value = None
    kv_heads = heads if value is None else value.shape[-3]
    return Call(
        name=name,
        layer_class=type(module).__name__,
        query=weights.new_empty((*batch, heads, q_len, 0)),
        key=weights.new_empty((*batch, kv_heads, kv_len, 0)),
        compact_mask=find_mask(weights, None if score_rows is None else score_rows[..., 1:]),
        scale=1.0,
        kernel=args.kernel,
        lse=None if score_rows is None else score_rows[..., 0],
        weights=weights,
        cached=value,
        dropout_p=args.dense.dropout_p,
        training=module.training,
    )


def _finish(call: Call, args: CapturedArgs, options: CaptureOptions) -> Call:
    """Apply the edits of an intervention to a call, and compute its measures or store its tensors."""
    if args.edits is not None:
        # The kernel's lse is that of the rows before the edits.
        lse = call.lse if args.edited_output is None else None
        with torch.no_grad():
            call = args.edits.edit_call(replace(call, edits=args.edits, lse=lse))
    if options.measures is not None:
        with torch.no_grad():
            if callable(options.measures):
                results = options.measures(call)
                if not isinstance(results, dict):
                    raise ArgumentTypeError(
                        "watch",
                        received=f"measures that returned {describe_argument(results)}",
                        expected="a function that returns results by name, as a dict",
                        hint='For example measures=lambda call: {"entropy": call.matrix.entropy()}.',
                    )
            else:
                results = call.matrix.measure(**options.measures)._asdict()
        dropped: dict[str, Any] = dict.fromkeys(("query", "key", "lse", "weights", "cached"))
        return replace(call, **dropped, measures=results, stored_shape=call.shape)
    return _store_tensors(call, args, options)


def drop_repeated_heads(key: Tensor, query: Tensor) -> Tensor:
    """Return a key, (…, heads, kv_len, head_dim), with one head for each group, if the model repeated it."""
    heads = key.shape[-3] if key.ndim > 2 else 1
    if heads == 1 or key.shape[-3] != query.shape[-3] or not key.numel():
        return key
    if not torch.equal(key[..., 0, 0, :], key[..., 1, 0, :]):
        return key  # almost always
    ends = key[..., [0, -1], :]
    same_as_next = (ends[..., 1:, :, :] == ends[..., :-1, :, :]).movedim(-3, 0).flatten(1).all(1).tolist()
    size = same_as_next.index(False) + 1 if False in same_as_next else heads
    if size == 1 or heads % size or same_as_next != [(i + 1) % size != 0 for i in range(heads - 1)]:
        return key
    grouped = key.unflatten(-3, (heads // size, size))
    first = grouped.select(-3, 0)
    if not all(torch.equal(first, grouped.select(-3, i)) for i in range(1, size)):
        return key
    return first.clone(memory_format=torch.contiguous_format)


def _recognise(
    module: nn.Module,
    name: str,
    args: CapturedArgs,
    query: Tensor,
    key: Tensor,
    options: CaptureOptions,
    biases: Sequence[ScoreMod],
) -> Call:
    q_len, kv_len = query.shape[-2], key.shape[-2]
    compact = options._masks.recognise(args, kv_len, biases)
    if args.score_mod is not None:
        compact = replace(compact, bias=FlexScoreMod(args.score_mod))
    mask, is_tiled = None, isinstance(args.attn_mask, BlockMask | Mask)
    if options.grad or compact.nbytes:
        mask = combine_mask_and_bias(args._replace(attn_mask=None) if is_tiled else args, kv_len)
        if options.grad and mask is not None and mask.requires_grad:
            if not is_tiled:
                compact = recognise_mask(None, is_causal=False, q_len=q_len, kv_len=kv_len)
            compact = replace(compact, bias=bias(mask))  # learnt, so its numbers are not recognised
    if mask is not None and not is_tiled and biases and compact.nbytes and mask.shape[-1] == kv_len > q_len:
        # A static cache: the bias is recognised from the keys in use.
        used = count_used_keys(mask)
        shorter = args._replace(attn_mask=mask[..., :used], position_bias=None)
        recognised = recognise_call_mask(shorter, used, biases)
        if not recognised.nbytes:
            key, compact = key[..., :used, :], recognised
    return Call(
        name=name,
        layer_class=type(module).__name__,
        query=query,
        key=key,
        compact_mask=compact,
        scale=args.resolved_scale,
        kernel=args.kernel,
        lse=None if args.lse is None else args.lse.detach(),
        softcap=None if args.softcap is None else softcap(args.softcap),
        sink=None if args.sink is None else options.detach(args.sink),
        dropout_p=float(args.dropout_p),
        is_causal=bool(args.is_causal),
        is_broadcast=_is_broadcast(args),
        training=module.training,
        num_missing_values=_count_missing_values(args, q_len, kv_len, compact),
        source_key=(weakref.ref(args.key), _version(args.key)),
    )


def _count_missing_values(args: CapturedArgs, q_len: int, kv_len: int, compact: CompactMask) -> int:
    """Count the values of a cached step's own tokens that are absent, or 0 as in a buffer that was not written.

    Kernels may read past the end of a value that is shorter than the key, so the call itself does not fail.
    """
    value = args.value
    if q_len >= kv_len or value is None or value.is_nested:
        return 0
    if value.shape[-2] < kv_len:
        return min(q_len, kv_len - int(value.shape[-2]))
    used = compact.count_used_keys(kv_len)
    own = value.detach()[..., max(0, used - q_len) : used, :]
    return 0 if bool(own.any()) else q_len


def _is_broadcast(args: CapturedArgs) -> bool:
    """Return whether key or value have other leading axes than the query; with `enable_gqa`, heads may differ."""
    stop = -3 if args.enable_gqa else -2
    lead = args.query.shape[:stop]
    return any(part is not None and part.shape[:stop] != lead for part in (args.key, args.value))


def combine_mask_and_bias(args: CapturedArgs, kv_len: int) -> Tensor | None:
    """Combine mask and position bias into one tensor, truncated to the keys."""
    mask, bias = args.attn_mask, args.position_bias
    if mask is None and bias is None:
        return None
    if mask is not None and mask.ndim == 2 and args.kernel.startswith("transformers"):
        mask = mask[:, None, None, :].to(torch.bool)  # a padding mask, as flash kernels take it
    mask, bias = (
        array[..., :kv_len] if array is not None and array.shape[-1] > kv_len else array
        for array in (mask, bias)
    )
    if mask is None or bias is None:
        return bias if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def _store_tensors(call: Call, args: CapturedArgs, options: CaptureOptions) -> Call:
    """Copy, move or reference the tensors of a call, as the options ask."""

    def store(tensor: Tensor, copy: bool = options.copy) -> Tensor:
        tensor = tensor.resolve_neg()  # a lazy sign has no bits to compare
        if options.keeps_tensors:
            # A tensor that was written to in place, as a static cache is, may be again; in inference mode all may be.
            return tensor.clone() if copy or _version(tensor) != 0 else tensor
        device, dtype = options.device or tensor.device, options.dtype or tensor.dtype
        return tensor.to(device=device, dtype=dtype, copy=True)

    query, key = call.query, call.key
    call.query, call.key = store(query), store(key)
    pairs = [(call.query, query), (call.key, key)]
    if call.weights is not None:
        weights, cached = call.weights, call.cached
        call.weights, call.cached = store(weights), None if cached is None else store(cached)
        pairs = [(call.weights, weights)]
    references = [stored for stored, old in pairs if stored is old]
    copies = options.copy or not options.keeps_tensors
    held = {name: getattr(call.compact_mask, name) for name in ("dense_mask", "bias", "tiled_mask")}
    held = {name: options._masks.store(part, copies) for name, part in held.items() if part is not None}
    if held:
        call.compact_mask = replace(call.compact_mask, **held)
        arrays = (array for part in held.values() for array in _list_arrays(part))
        references += [array for array in arrays if isinstance(array, torch.Tensor)]
    if call.sink is not None:
        call.sink = call.sink.clone() if copies or _version(call.sink) != 0 else call.sink
        references.append(call.sink)
    call.versions = tuple([(tensor, tensor._version) for tensor in references if not tensor.is_inference()])
    if not options.keeps_tensors:
        converted = call.query.dtype != query.dtype
        call.lse = None if converted or call.lse is None else call.lse.to(call.query.device)
        call.sink = None if call.sink is None else call.sink.to(call.query.device)
    if options.values and call.weights is not None and args.dense is not None:
        call.value = call.cached
        output = args.dense.output if args.edited_output is None else args.edited_output
        # Always a copy: some layers add a convolution or relative positions to the output in place.
        call.output = None if output is None else store(output.detach(), copy=True)
    elif options.values and args.value is not None:
        call.value = store(drop_repeated_heads(options.detach(args.value), query))
        output = args.output if args.edited_output is None else args.edited_output
        if output is not None:
            # A copy of the output would not be a part of the graph, so its gradient would be None.
            is_kept = options.grad and not options.copy and options.keeps_tensors
            call.output = output if is_kept else store(options.detach(output), copy=True)
    return call


def _list_readings(call: Call, args: CapturedArgs, module: nn.Module) -> Iterator[Call]:
    """Yield the call, and the other ways to read its mask."""
    yield call
    if args.attn_mask is None and not args.is_causal and getattr(module, "is_causal", False):
        lengths = {"q_len": call.query.shape[-2], "kv_len": call.key.shape[-2]}
        causal = recognise_mask(None, is_causal=True, **lengths)
        yield replace(call, compact_mask=causal, is_causal=True)
    if isinstance(args.attn_mask, BlockMask):
        # Its function may depend on batch entry and head even if the blocks do not.
        *_, batch, heads, q_len, kv_len = call.shape
        mask = recognise_tiles(args.attn_mask, (batch, heads), q_len, kv_len)
        yield replace(call, compact_mask=replace(mask, bias=call.compact_mask.bias))


def _reproduces(call: Call, args: CapturedArgs, module: nn.Module) -> bool:
    """Return whether some rows equal the returned weights, or at least the returned output, up to rounding."""
    count = call.query.shape[-2]
    rows = sorted({0, count // 3, count // 2, count - 1})
    part = call.matrix.lazy[..., rows, :]
    ours = part.to_dense()
    if args.weights is not None:
        theirs = args.weights.detach()[..., rows, :].to(ours.dtype)
        scores = part.scores[...].abs()
        largest = float(torch.where(scores.isfinite(), scores, 0.0).amax())
        tolerance = TOLERANCE * torch.finfo(args.query.dtype).eps * (1 + largest)
        if _weights_agree(ours, theirs, tolerance, args.dropout_p if module.training else 0.0):
            return True
    # Some functions return weights that differ from those of the output: a sink may be missing.
    return _outputs_agree(call, args, rows, ours)


def _weights_agree(ours: Tensor, theirs: Tensor, tolerance: float, dropout: float) -> bool:
    if theirs.shape[-1] > ours.shape[-1] and not theirs[..., ours.shape[-1] :].any():
        theirs = theirs[..., : ours.shape[-1]]  # of a static cache
    if theirs.ndim < ours.ndim and theirs.numel() != ours.numel():
        ours = ours.mean(-3)  # averaged over heads
    if theirs.numel() != ours.numel():
        return False
    theirs = theirs.reshape(ours.shape)
    agree = (theirs * (1 - dropout) - ours).abs() <= tolerance * ours.amax(-1, keepdim=True)
    if dropout:
        agree |= theirs == 0
    # Eager attention returns NaN in a fully masked row, where ours is 0.
    agree |= theirs.isnan() & (ours.isnan() | (ours == 0).all(-1, keepdim=True))
    return bool(agree.all())


def _outputs_agree(call: Call, args: CapturedArgs, rows: list[int], ours: Tensor) -> bool:
    if args.output is None or args.dropout_p or args.output.ndim != args.value.ndim:
        return False
    value = drop_repeated_heads(args.value.detach(), call.query).to(ours.dtype)
    groups = ours.shape[-3] // value.shape[-3]
    expected = ours @ value.repeat_interleave(groups, -3)
    theirs = args.output.detach()[..., rows, :].to(ours.dtype)
    if theirs.shape != expected.shape:
        return False
    tolerance = TOLERANCE * torch.finfo(args.query.dtype).eps * float(value.abs().amax())
    return bool(((theirs - expected).abs() <= tolerance).all())
