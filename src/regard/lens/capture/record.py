"""From what went through a call to its record: held once, recognised, and held against what the function returned."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from regard.errors import RegardError
from regard.lens.call import Call
from regard.lens.capture.mask_recognition import Rules, read, seen_up_to
from regard.lens.capture.wrappers import Passed
from regard.measures import Measure
from regard.score_mods import ScoreMod, softcap

Tensor = Any  # the types of torch are not followed


@dataclass
class Keep:
    """What is kept of a call."""

    device: Any
    dtype: Any
    copy: bool
    values: bool
    measures: Mapping[str, Measure] | Callable[[Call], dict[str, Any]] | None

    def __post_init__(self) -> None:
        # Layers pass the same mask on: it is read once, as long as it lives.
        self._last: tuple[Any, Any, Rules] | None = None


def call_of(
    module: nn.Module, name: str, passed: Passed, keep: Keep, biases: Sequence[ScoreMod]
) -> Call | tuple[str, str]:
    """The record of a call; or why there is none, and the hint."""
    query, key = passed.query.detach(), passed.key.detach()
    if query.is_nested or key.is_nested:
        return "nested tensors", "Pad the batch instead: torch.nested.to_padded_tensor, with a mask."
    if passed.attn_mask is not None and not isinstance(passed.attn_mask, torch.Tensor):
        kind = type(passed.attn_mask).__name__
        return f"a {kind} for a mask ({passed.kernel})", _EAGER
    key = _once(key, query)
    try:
        call = _recognised(module, name, passed, query, key, keep, biases)
    except RegardError as error:
        return f"{passed.kernel}, of which no matrix can be made ({error})", _EAGER
    if passed.kernel.startswith("transformers") or passed.weights is not None:
        with torch.no_grad():
            found = _held_against(call, passed, module)
        if found is None:
            why = f"{passed.kernel} returned other weights than softmax(scale · query keyᵀ + mask) of its arguments"
            return why, _EAGER
        call = found
    if keep.measures is not None:
        with torch.no_grad():
            if callable(keep.measures):
                results = keep.measures(call)
            else:
                results = call.matrix.measure(**keep.measures)._asdict()
        return replace(call, query=None, key=None, lse=None, measured=results, extent=call.shape)
    return _hold(call, passed, keep)


_EAGER = "Load the model with attn_implementation='sdpa', or 'eager' where it has no other."


def _once(key: Tensor, query: Tensor) -> Tensor:
    """The key without the repetitions that make every head of a group one of its own."""
    heads = key.shape[-3] if key.ndim > 2 else 1
    if heads == 1 or key.shape[-3] != query.shape[-3] or not key.numel():
        return key
    edge = key[..., [0, -1], :]
    alike = (edge[..., 1:, :, :] == edge[..., :-1, :, :]).movedim(-3, 0).flatten(1).all(1).tolist()
    size = alike.index(False) + 1 if False in alike else heads
    if size == 1 or heads % size or alike != [(i + 1) % size != 0 for i in range(heads - 1)]:
        return key
    grouped = key.unflatten(-3, (heads // size, size))
    one = grouped.select(-3, 0)
    if not all(torch.equal(one, grouped.select(-3, i)) for i in range(1, size)):
        return key
    return one.clone(memory_format=torch.contiguous_format)


def _recognised(
    module: nn.Module, name: str, passed: Passed, query: Tensor, key: Tensor, keep: Keep, biases: Any
) -> Call:
    q_len, kv_len = query.shape[-2], key.shape[-2]
    mask = _whole_mask(passed, query, kv_len)
    rules = _read(mask, passed, q_len, kv_len, tuple(query.shape[:-2]), keep, biases)
    if biases and rules.nbytes and mask is not None and mask.shape[-1] == kv_len > q_len:
        # A cache with room to spare: the bias is told from the keys that are there.
        used = seen_up_to(mask)
        shorter = _read(mask[..., :used], passed, q_len, used, tuple(query.shape[:-2]), keep, biases)
        if not shorter.nbytes:
            key, rules = key[..., :used, :], shorter
    scale = passed.scale
    return Call(
        name=name,
        layer=type(module).__name__,
        query=query,
        key=key,
        rules=rules,
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
        kernel=passed.kernel,
        lse=None if passed.lse is None else passed.lse.detach(),
        softcap=None if passed.softcap is None else softcap(passed.softcap),
        sink=None if passed.sink is None else passed.sink.detach().reshape(-1),
        dropout_p=float(passed.dropout_p),
        is_causal=bool(passed.is_causal),
        training=module.training,
        origin=(weakref.ref(passed.key), _version(passed.key)),
    )


def _whole_mask(passed: Passed, query: Tensor, kv_len: int) -> Tensor | None:
    """Mask and position bias as one tensor, cut to the keys that there are."""
    mask, added = passed.attn_mask, passed.position_bias
    if mask is None and added is None:
        return None
    if mask is not None and mask.ndim == 2 and passed.kernel.startswith("transformers"):
        mask = mask[:, None, None, :].to(torch.bool)  # padding, as flash kernels take it
    mask, added = (
        each[..., :kv_len] if each is not None and each.shape[-1] > kv_len else each for each in (mask, added)
    )
    if mask is None or added is None:
        return added if mask is None else mask
    if mask.dtype == torch.bool:
        return torch.where(mask, added, torch.finfo(added.dtype).min)
    return added + mask


def _read(
    mask: Tensor | None,
    passed: Passed,
    q_len: int,
    kv_len: int,
    lead: tuple[int, ...],
    keep: Keep,
    biases: Any,
) -> Rules:
    if mask is None:
        return read(None, is_causal=passed.is_causal, q_len=q_len, kv_len=kv_len, lead=lead)
    sinks = passed.sink is not None
    known = (_version(mask), q_len, kv_len, lead, sinks)
    last = keep._last
    if last is not None and last[0]() is mask and last[1] == known:
        return last[2]
    rules = read(
        mask, is_causal=passed.is_causal, q_len=q_len, kv_len=kv_len, lead=lead, biases=biases, sinks=sinks
    )
    keep._last = (weakref.ref(mask), known, rules)
    return rules


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)


def _written(tensor: Tensor) -> bool:
    """Whether a tensor has been written into, as a cache with room to spare is, and may be again."""
    version = _version(tensor)
    if version is None:
        return bool(tensor.untyped_storage().nbytes() > tensor.nbytes)
    return version > 0


def _hold(call: Call, passed: Passed, keep: Keep) -> Call:
    """The call, its tensors as they are to be kept."""

    def hold(tensor: Tensor) -> Tensor:
        if keep.device is None and keep.dtype is None:
            return tensor.clone() if keep.copy or _written(tensor) else tensor
        return tensor.to(device=keep.device or tensor.device, dtype=keep.dtype or tensor.dtype, copy=True)

    query, key = call.query, call.key
    call.query, call.key = hold(query), hold(key)
    kept = [tensor for tensor, old in ((call.query, query), (call.key, key)) if tensor is old]
    call.versions = tuple((tensor, tensor._version) for tensor in kept if not tensor.is_inference())
    if keep.dtype is not None or keep.device is not None:
        call.lse = (
            None if call.query.dtype != query.dtype or call.lse is None else call.lse.to(call.query.device)
        )
        call.sink = None if call.sink is None else call.sink.to(call.query.device)
    if keep.values:
        call.value = hold(_once(passed.value.detach(), query))
        call.output = None if passed.output is None else hold(passed.output.detach())
    return call


# Held against what came back

_ROUNDINGS = 64


def _held_against(call: Call, passed: Passed, module: nn.Module) -> Call | None:
    """The call, or the same with causality that its function adds by itself, whichever gives what came back."""
    tries = [call]
    if passed.attn_mask is None and not passed.is_causal and getattr(module, "is_causal", False):
        shape = {"q_len": call.query.shape[-2], "kv_len": call.key.shape[-2]}
        tries.append(replace(call, rules=read(None, is_causal=True, lead=(), **shape), is_causal=True))
    for each in tries:
        if _agrees(
            replace(each), passed, module
        ):  # a copy: its matrix is made before it is known what is kept
            return each
    return None


def _agrees(call: Call, passed: Passed, module: nn.Module) -> bool:
    """Whether some rows are what the function returned, up to rounding: its weights, or at least its output."""
    count = call.query.shape[-2]
    rows = sorted({0, count // 3, count // 2, count - 1})
    part = call.matrix.lazy[..., rows, :]
    ours = part.to_dense()
    if passed.weights is not None:
        theirs = passed.weights.detach()[..., rows, :].to(ours.dtype)
        most = part.scores[...].abs()
        most = float(torch.where(most.isfinite(), most, 0.0).amax())
        near = _ROUNDINGS * torch.finfo(passed.query.dtype).eps * (1 + most)
        if _weights_agree(ours, theirs, near, passed.dropout_p if module.training else 0.0):
            return True
    # Some tell weights that are not what the output was made with: a sink may be left out of them.
    return _outputs_agree(call, passed, rows, ours)


def _weights_agree(ours: Tensor, theirs: Tensor, near: float, dropped: float) -> bool:
    if theirs.shape[-1] > ours.shape[-1] and not theirs[..., ours.shape[-1] :].any():
        theirs = theirs[..., : ours.shape[-1]]  # a cache with room to spare
    if theirs.ndim < ours.ndim and theirs.shape[-3:-2] != ours.shape[-3:-2]:
        ours = ours.mean(-3)  # averaged over heads
    if theirs.numel() != ours.numel():
        return False
    theirs = theirs.reshape(ours.shape)
    fits = (theirs * (1 - dropped) - ours).abs() <= near * ours.amax(-1, keepdim=True)
    if dropped:
        fits |= theirs == 0
    # NaN is right where ours is NaN too, and is what eager attention makes of a row that sees nothing.
    fits |= theirs.isnan() & (ours.isnan() | (ours == 0).all(-1, keepdim=True))
    return bool(fits.all())


def _outputs_agree(call: Call, passed: Passed, rows: list[int], ours: Tensor) -> bool:
    if passed.output is None or passed.dropout_p or passed.output.ndim != passed.value.ndim:
        return False
    value = _once(passed.value.detach(), call.query).to(ours.dtype)
    groups = ours.shape[-3] // value.shape[-3]
    expected = ours @ value.repeat_interleave(groups, -3)
    theirs = passed.output.detach().transpose(-2, -3)[..., rows, :].to(ours.dtype)
    if theirs.shape != expected.shape:
        return False
    near = _ROUNDINGS * torch.finfo(passed.query.dtype).eps * float(value.abs().amax())
    return bool(((theirs - expected).abs() <= near).all())
