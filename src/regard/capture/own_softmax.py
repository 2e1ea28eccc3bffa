"""Read the layers that compute their own weights: wrap softmax and exponential, and follow the result to a product.

The result gets the class `FollowedTensor` for as long as it is followed, so torch passes every operation on it, and
only those, to this file. Casts, dropout, masks, reshapes and permutations are followed. If the softmax axis is then
summed over in a product with another tensor, the operand is the attention matrix. The numbers are never touched. A
softmax of the shape of attention that reaches no product is reported if nothing else of its module is captured.

The output of the product is followed to the reshape that puts the heads side by side. If that merges the heads with the
rows, these are channels and not tokens, as in the cross-covariance attention of XCiT.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.call import CapturedArgs, DenseAttention
from regard.capture.compact_mask import find_edges
from regard.capture.watchers import find_obstacle, iter_running_modules, list_watchers, notify

Tensor = Any  # the types of torch are not followed

KERNEL = "own softmax of the layer"

# Code of regard that computes softmax and exponentials itself, inside the modules of a watched model.
_OWN_CODE = (
    "regard.core",
    "regard.engines",
    "regard.measures",
    "regard.lens",
    "regard.diagnosis",
    "regard.interventions",
)

# Masks add −10,000 or less. A score that is lower than the largest of its row by more than this counts as masked.
MASK_GAP = 5000.0

# Why a softmax over the wrong axis is not read.
OVER_QUERIES = "runs over the queries instead of the keys"

# Operations that permute axes, and that split or merge them.
_PERMUTATIONS = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "mT", "T", "adjoint"}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
_DROPOUTS = {"dropout", "dropout_", "alpha_dropout", "alpha_dropout_"}
# Operations of the same shape that leave each weight as it is, up to rounding, and those that may also set some to 0.
_COPIES = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "data"}
_COPIES |= {"contiguous", "clone", "detach"}
_FILLS = {"nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_", "where", "__setitem__"}
_DIVISIONS = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"}

# What the axes of an output are; the others belong to the batch.
_HEADS, _ROWS, _WIDTH, _BATCH = "heads", "rows", "width", "batch"
_MATRIX_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}
_OPERANDS = ("input", "batch1", "other", "mat2", "batch2")  # their parameters, in order

# Attributes of modules and of their configurations that have the number of heads.
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "attention_heads")


def wrap_softmax(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `torch.softmax` or `Tensor.softmax`."""

    @wraps(original)
    def softmax(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        ndim = getattr(result, "ndim", 0)
        # Over another axis than the last, three axes are no attention: weights of a convolution, or of classes.
        if ndim >= 3 and isinstance(dim, int) and (ndim > 3 or dim in (-1, 2)):
            _start(result, dim, scores, is_normalised=True)
        return result

    return softmax


def wrap_exp(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `torch.exp` or `Tensor.exp`, for a softmax written as an exponential divided by its sum."""

    @wraps(original)
    def exp(*args: Any, **kwargs: Any) -> Tensor:
        result = original(*args, **kwargs)
        if getattr(result, "ndim", 0) >= 3 and _may_be_attention(result, -1):
            _start(result, -1, args[0] if args else kwargs.get("input"), is_normalised=False)
        return result

    return exp


def _start(result: Tensor, dim: int, scores: Tensor, is_normalised: bool) -> None:
    """Follow a result, if a selected module of a watched model is running."""
    modules = [] if _is_own_code() else _list_running_modules()
    if not modules or not list_watchers(modules[0]) or find_obstacle(result) is not None:
        return
    trace = SoftmaxTrace(tuple(result.shape), dim, is_normalised, modules)
    if is_normalised and _may_be_attention(result, dim):
        _notice(trace)
    if type(result) is torch.Tensor:
        _open_traces.add(trace)
        split = trace.shape if len(trace.shape) > 3 else None
        rows = summarise_score_rows(scores, result, dim)
        _mark(result, FollowedState(trace, trace.dim, split, score_rows=rows))


def _list_running_modules() -> list[nn.Module]:
    """List the modules of watched models that are running, the innermost first, without `nn.Softmax`."""
    return [module for module in iter_running_modules() if not isinstance(module, nn.Softmax)]


def _notice(trace: SoftmaxTrace) -> None:
    """Tell the watchers of a module that it computes a softmax, which is reported if it is not read."""
    for watcher, name in list_watchers(trace.modules[0]):
        watcher.notice_softmax(name, trace.modules[0], trace)


def _notify(trace: SoftmaxTrace, product: DenseAttention, split: tuple[int, ...] | None) -> Tensor | None:
    """Pass a product to the watchers of the innermost module that runs both softmax and product.

    Returns the output of the product, if an intervention changes it. The product has the axes that the model gave it.
    `split` is the latest shape of the weights with at least four axes, if they were only reshaped since.
    """
    running = _list_running_modules()
    modules = trace.modules
    module = next((module for module in running if any(module is other for other in modules)), modules[0])
    trace.is_read = True
    dense = arrange_heads(product, split, module)
    if _thread.held is not None:
        _thread.held.append(dense)
    elif list_watchers(module):
        trace.owner = module
        captured = notify(module, CapturedArgs(None, None, None, dense=dense, kernel=KERNEL))
        if captured.edited_output is not None and product.output is not None:
            edited, output = captured.edited_output, product.output.clone()
            arranged = arrange_heads(product._replace(output=output), split, module).output
            assert arranged is not None
            if arranged.ndim < output.ndim:  # two axes of heads, which may not have a view as one
                arranged, edited = output, edited.reshape(output.shape)
            arranged.copy_(edited)
            return output
    return None


class _HeldProducts(threading.local):
    """The list of the innermost `hold_products` block of each thread; None outside of one."""

    held: list[DenseAttention] | None = None


_thread = _HeldProducts()


@contextmanager
def hold_products() -> Iterator[list[DenseAttention]]:
    """Collect the attention that is read inside the block, instead of recording it."""
    outer, _thread.held = _thread.held, []
    try:
        yield _thread.held
    finally:
        _thread.held = outer


def _may_be_attention(weights: Tensor, dim: Any) -> bool:
    """Return whether a softmax has the shape of attention: over keys, (batch, heads, q_len, kv_len), or square."""
    if not isinstance(weights, torch.Tensor) or weights.ndim < 3 or dim not in (-1, weights.ndim - 1):
        return False
    return weights.ndim == 4 or bool(weights.shape[-1] == weights.shape[-2])


def _is_own_code() -> bool:
    """Return whether the caller is code of regard."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("regard.capture", "torch.")):
            return bool(name.startswith(_OWN_CODE))
        frame = frame.f_back  # type: ignore[assignment]
    return False


def summarise_score_rows(scores: Tensor, weights: Tensor, dim: int) -> Tensor | None:
    """Reduce the scores of a softmax, or exponential, to the lse of each row, its first key not masked, and its end.

    The weights alone do not tell: they have no scale, and far below the largest score of a row they are 0.

    Args:
        scores: Input of the softmax.
        weights: Its result, of the same shape.
        dim: Its axis.

    Returns:
        The shape of the scores, with lse, first key and end on the axis of the softmax. In a row that is masked
        altogether, both keys are 0. The lse is NaN if the scores are not known: the model may have subtracted the
        largest one before the softmax. None for subclasses of tensors, and if the result has replaced the scores.
    """
    is_plain = type(scores) is torch.Tensor and type(weights) is torch.Tensor
    if not is_plain or scores is weights or not scores.numel():
        return None
    with torch.no_grad():
        largest, dtype = scores.amax(dim, keepdim=True), torch.promote_types(weights.dtype, torch.float32)
        lse = largest.to(dtype) - weights.amax(dim, keepdim=True).to(dtype).log()
        # A row is masked altogether if the mask was added to every score. Without other rows to compare with, only the
        # lowest number is certain to be a mask; it may have been divided by the scale.
        lowest = max(-1e30, torch.finfo(scores.dtype).min / 2)
        if bool((largest > -MASK_GAP).any()):
            lowest = -MASK_GAP
        visible = scores >= torch.where(largest > lowest, largest - MASK_GAP, torch.inf)
        if bool(largest.nan_to_num(-torch.inf).max() == 0) and bool((visible & (scores < 0)).any()):
            lse = torch.full_like(lse, torch.nan)
        for axis in range(visible.ndim):  # heads, and often batch entries, share their mask: search it once
            first = visible.narrow(axis, 0, 1)
            if axis != dim % visible.ndim and bool((visible == first).all()):
                visible = first
        edges = find_edges(visible, dim, keepdim=True)
        return torch.cat([lse, *(key.to(dtype).expand_as(lse) for key in edges)], dim)


class SoftmaxTrace:
    """One softmax that is followed.

    Args:
        shape: Shape of its result.
        dim: Its axis.
        is_normalised: False for an exponential, whose rows the model still has to divide by their sums.
        modules: The modules that were running, the innermost first.

    Attributes:
        owner: The module whose call was recorded; None if none was.
        fault: Why the softmax is not the weights of a product.
        is_read: Whether the product was found and recorded.
        is_multiplied: Whether an exponential was multiplied by a value before its rows were divided by their sums.
        is_summed: Whether the rows of an exponential were summed, as a softmax sums them.
    """

    owner: nn.Module | None = None

    def __init__(
        self, shape: tuple[int, ...], dim: int, is_normalised: bool, modules: list[nn.Module]
    ) -> None:
        self.shape, self.dim, self.is_normalised = shape, dim % len(shape), is_normalised
        self.modules = modules
        self.fault = "reaches no product with a value"
        self.is_read = self.is_multiplied = self.is_summed = False
        self.thread = threading.get_ident()
        self.followed: list[Any] = []

    def close(self) -> None:
        """Stop following: tensors get their class back."""
        for reference in self.followed:
            tensor = reference()
            if tensor is not None and type(tensor) is FollowedTensor:
                tensor.__class__ = torch.Tensor
                del tensor._regard_state
        self.followed.clear()
        _open_traces.discard(self)

    def check_division(self) -> None:
        """Pass on an exponential that was multiplied by a value, and whose rows were summed, apart from each other."""
        if self.is_multiplied and self.is_summed and not self.is_normalised:
            self.fault = "is divided by its sums only after the product with the value"
            _notice(self)


class FollowedState(NamedTuple):
    """What is known about a followed tensor.

    Args:
        trace: Its softmax.
        axis: The axis of the keys, over which the softmax ran.
        split: The latest shape with at least four axes, if only reshapes came after it.
        is_expanded: Whether an axis of size 1 was inserted.
        undropped: The tensor without dropout; None if there was none.
        dropout_p: Dropout probability.
        score_rows: What `summarise_score_rows` returned, with the axes of the tensor; None if it is not known.
    """

    trace: SoftmaxTrace
    axis: int
    split: tuple[int, ...] | None
    is_expanded: bool = False
    undropped: Tensor | None = None
    dropout_p: float = 0.0
    score_rows: Tensor | None = None


class OutputState(NamedTuple):
    """What each axis is of the output of a product with weights, until its heads are put side by side."""

    trace: SoftmaxTrace
    axes: tuple[str, ...]


_open_traces: set[SoftmaxTrace] = set()


class FollowedTensor(torch.Tensor):  # type: ignore[misc]
    """The class of a tensor while it is followed."""

    _regard_state: FollowedState | OutputState

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _get_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            copy = _copy_before_dropout(name, args, kwargs)
            result = func(*args, **kwargs)
            is_assignment = name == "__setitem__" and type(args[0]) is FollowedTensor
            changed = args[0] if is_assignment else result
            if isinstance(changed, torch.Tensor):
                edited = _follow(func, name, args, kwargs, changed, copy)
                return result if edited is None else edited
        return result


def close_traces(*, all_threads: bool = False) -> None:
    """Stop following every softmax of this thread, or of all threads."""
    for trace in tuple(_open_traces):
        if all_threads or trace.thread == threading.get_ident():
            trace.close()


def _get_name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name == "__get__":  # an attribute such as x.mT
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return str(name)


def _mark(tensor: Tensor, state: FollowedState | OutputState) -> None:
    if type(tensor) is torch.Tensor:
        tensor.__class__ = FollowedTensor
        state.trace.followed.append(weakref.ref(tensor))
    if type(tensor) is FollowedTensor:
        tensor._regard_state = state


def _get_dropout(args: Any, kwargs: Any) -> float:
    """Return the probability that `F.dropout` or `torch.dropout` was called with; 0 if it is inactive."""
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return float(probability) if training else 0.0


def _copy_before_dropout(name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return a copy of a followed tensor that in-place dropout is about to change."""
    if name not in _DROPOUTS or not args or type(args[0]) is not FollowedTensor:
        return None
    is_inplace = name.endswith("_") or kwargs.get("inplace", len(args) > 3 and args[3])
    return args[0].detach().clone() if is_inplace and _get_dropout(args, kwargs) else None


def _follow(
    func: Any, name: str, args: Any, kwargs: Any, result: Tensor, copy: Tensor | None
) -> Tensor | None:
    """Find the product, or mark the result of an operation; return the product if an intervention changes it."""
    operands = args
    if name in _MATRIX_PRODUCTS:
        operands = (*args, *(kwargs[operand] for operand in _OPERANDS if operand in kwargs))
    source = _find_followed(operands)
    if source is None or not result.is_floating_point():
        return None
    state = source._regard_state
    if isinstance(state, OutputState):
        _follow_output(func, name, args, kwargs, source, state, result)
        return None
    if name == "sum" and _get_summed_axis(args, kwargs, source) == state.axis:
        state.trace.is_summed = True
        state.trace.check_division()
    axes = find_product_axes(name, operands, source)
    if axes is not None and state.axis in (axes.key, axes.query):
        is_read, edited = _end_at_product(axes, source, state, result)
        if is_read:
            return edited
    axis = _locate_key_axis(func, name, args, kwargs, source, state.axis, result)
    if axis is None:
        return None
    score_rows = _follow_score_rows(func, name, args, kwargs, source, result, axis)
    if result is source and copy is None and state.undropped is None:
        source._regard_state = state._replace(score_rows=score_rows)
        return None
    undropped, dropout_p = state.undropped, state.dropout_p
    if name in _DROPOUTS:
        if _get_dropout(args, kwargs):
            dropout_p = _get_dropout(args, kwargs)
            undropped = (source.detach() if copy is None else copy) if undropped is None else undropped
    elif undropped is not None:
        undropped = _apply_again(func, name, args, kwargs, source, undropped)
    split = state.split
    if result.ndim > 3:
        split = tuple(result.shape)
    elif name not in _RESHAPES and result.shape != source.shape:
        split = None
    is_expanded = state.is_expanded or name == "unsqueeze"
    _mark(result, FollowedState(state.trace, axis, split, is_expanded, undropped, dropout_p, score_rows))
    return None


def _follow_score_rows(
    func: Any, name: str, args: Any, kwargs: Any, source: Tensor, result: Tensor, axis: int
) -> Tensor | None:
    """Return what is known about the scores after an operation, whose result has the keys on the given axis."""
    state: FollowedState = source._regard_state
    rows = state.score_rows
    if rows is None or name in _DROPOUTS | _COPIES:
        return rows
    if name in _PERMUTATIONS:
        moved: Tensor = func(*(rows if item is source else item for item in args), **kwargs)
        return moved
    if name in _RESHAPES:
        return rows.reshape(*result.shape[:axis], 3, *result.shape[axis + 1 :])
    lse, interval = rows.narrow(state.axis, 0, 1), rows.narrow(state.axis, 1, 2)
    if name in _DIVISIONS:  # of an exponential by its sum: no weight becomes 0
        return torch.cat([torch.full_like(lse, torch.nan), interval], state.axis)
    if name in _FILLS or result.shape != source.shape:  # a part of the keys: the column of a sink is dropped
        return torch.cat([lse, torch.full_like(interval, torch.nan)], state.axis)
    return None


def _find_followed(args: Any) -> Tensor | None:
    """Return the followed tensor among the arguments: weights, or the output of a product if there are none."""
    parts = (part for item in args for part in (item if isinstance(item, list | tuple) else (item,)))
    followed = [part for part in parts if type(part) is FollowedTensor]
    return next(filter(_is_followed_weights, followed), followed[0] if followed else None)


def _is_followed_weights(tensor: Tensor) -> bool:
    return type(tensor) is FollowedTensor and isinstance(tensor._regard_state, FollowedState)


def _get_summed_axis(args: Any, kwargs: Any, source: Tensor) -> int | None:
    """Return the axis that `sum` was called with; None if it was none or several."""
    axis = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if isinstance(axis, list | tuple) and len(axis) == 1:
        axis = axis[0]
    return axis % source.ndim if isinstance(axis, int) else None


def _apply_again(func: Any, name: str, args: Any, kwargs: Any, source: Tensor, undropped: Tensor) -> Tensor:
    """Apply an operation to the tensor without dropout."""
    with torch.no_grad():
        other = undropped.clone() if name.endswith("_") and not name.endswith("__") else undropped
        result: Tensor = func(*(other if item is source else item for item in args), **kwargs)
        return result.detach()


def _locate_key_axis(
    func: Any, name: str, args: Any, kwargs: Any, source: Tensor, axis: int, result: Tensor
) -> int | None:
    """Return the axis of the keys after an operation; None if it does not keep the weights."""
    if name in _PERMUTATIONS:
        return _permute_axes(func, args, kwargs, source).index(axis)
    if name in _RESHAPES:
        return locate_axis(tuple(source.shape), axis, tuple(result.shape))
    if name.endswith("_like") or name.startswith("new_"):
        return None
    if result.shape == source.shape:
        return axis
    is_slice = (
        name in ("__getitem__", "narrow")
        and result.ndim == source.ndim
        and all(size == result.shape[i] for i, size in enumerate(source.shape) if i != axis)
    )
    return axis if is_slice else None  # the column of a sink is dropped after the softmax


def _permute_axes(func: Any, args: Any, kwargs: Any, source: Tensor) -> list[int]:
    """Return which axis of a tensor each axis of its permutation is."""
    # Distinct strides show where each axis went, axes of size 1 included.
    strides = [1 << (6 * i) for i in range(source.ndim)]
    probe = torch.empty_strided(source.shape, strides, device="meta")
    moved = func(*(probe if item is source else item for item in args), **kwargs)
    return [strides.index(stride) for stride in moved.stride()]


def _follow_output(
    func: Any, name: str, args: Any, kwargs: Any, source: Tensor, state: OutputState, result: Tensor
) -> None:
    """Follow the output of a product through permutations and reshapes, until it is known what its rows are."""
    axes: tuple[str, ...] | None = None
    if name in _PERMUTATIONS:
        axes = tuple(state.axes[i] for i in _permute_axes(func, args, kwargs, source))
    elif name in _RESHAPES:
        axes = _reshape_output(state, tuple(source.shape), tuple(result.shape))
    elif name in _COPIES or name in _DROPOUTS:
        axes = state.axes
    if axes is None:
        state.trace.close()
    else:
        _mark(result, OutputState(state.trace, axes))


def _reshape_output(
    state: OutputState, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[str, ...] | None:
    """Return what the axes of an output are after a reshape; None if it merges the heads with another axis.

    Heads are merged with the width of the value. If they are merged with the rows, these are channels, provided that
    the width is then an axis of tokens: it comes before the channels, or is split into the axes of an image. Windows or
    blocks may be merged with their rows as well, and have their width last.
    """
    kept = [i for i, size in enumerate(before) if size != 1]
    new = [i for i, size in enumerate(after) if size != 1]
    old_axes = [state.axes[i] for i in kept]
    new_axes = [_BATCH] * len(after)
    groups = group_axes([before[i] for i in kept], [after[i] for i in new])
    merged = [[old_axes[i] for i in old] for old, _ in groups if len(old) > 1]
    if [_HEADS, _ROWS] in merged:
        is_split = any([old_axes[i] for i in old] == [_WIDTH] and len(parts) > 1 for old, parts in groups)
        if is_split or _WIDTH in old_axes[: old_axes.index(_HEADS)]:
            assert state.trace.owner is not None
            for watcher, name in list_watchers(state.trace.owner):
                watcher.drop_channels(name)
    if any(_HEADS in labels for labels in merged):
        return None
    for old, parts in groups:
        label = old_axes[old[0]] if len(old) == 1 else _BATCH
        for i in parts:
            new_axes[new[i]] = label
        if label == _BATCH and len(old) == 1 < len(parts) and _HEADS not in old_axes:
            new_axes[new[parts[-1]]] = _HEADS  # batch and heads were one axis
    return tuple(new_axes)


def _end_at_product(
    axes: ProductAxes, source: Tensor, state: FollowedState, result: Tensor
) -> tuple[bool, Tensor | None]:
    """Pass on the product and stop following, if it is one of attention.

    Returns whether it is, and the result if an intervention changes it.
    """
    trace, other = state.trace, axes.other
    if _is_followed_weights(other):
        return False, None
    if any(isinstance(tensor, nn.Parameter) for tensor in (other, other._base)):
        return False, None  # such as the embeddings of a vocabulary
    if axes.query is None:
        return False, None  # a mixture, such as that of the outputs of experts
    if source.shape[axes.query] == 1 and (state.is_expanded or trace.shape[trace.dim - 1] != 1):
        return False, None
    # With gradients, so that an intervention may change the weights.
    weights = source if state.undropped is None else state.undropped
    weights = weights.permute(*axes.batch, axes.query, axes.key)
    over_queries = axes.key != state.axis  # weights only if the model divided the rows by their sums
    if not _are_weights(weights.detach(), trace, over_queries):
        if (
            over_queries
            and trace.is_normalised
            and len(trace.shape) == 4
            and weights.shape[-2] == weights.shape[-1]
        ):
            trace.fault = OVER_QUERIES
            _notice(trace)
        trace.is_multiplied = not bool((weights < 0).any())
        trace.check_division()
        return False, None
    value = None if axes.value_axes is None else other.permute(axes.value_axes)
    output = None if axes.output_axes is None else result.permute(axes.output_axes)
    rows = None if state.score_rows is None or over_queries else state.score_rows
    rows = None if rows is None else rows.permute(*axes.batch, axes.query, axes.key)
    trace.close()
    edited = _notify(trace, DenseAttention(weights, value, output, state.dropout_p, rows), state.split)
    if edited is not None:
        assert axes.output_axes is not None
        edited = edited.permute([axes.output_axes.index(i) for i in range(edited.ndim)])
    if axes.output_axes is not None and trace.owner is not None and result.numel():
        labels = [_BATCH] * result.ndim
        for label, axis in zip(
            (_WIDTH, _ROWS, _HEADS)[: result.ndim - 1], axes.output_axes[::-1], strict=False
        ):
            labels[axis] = label
        _open_traces.add(trace)
        _mark(result if edited is None else edited, OutputState(trace, tuple(labels)))
    return True, edited


def _are_weights(weights: Tensor, trace: SoftmaxTrace, over_queries: bool) -> bool:
    """Return whether rows are weights: not negative, with sums of at most 1, and of 1 if the model normalised them.

    The rows of an exponential may sum to 1 by chance if each is a single 1, as the decays of a state-space layer are:
    exp(0) for a token itself, and almost 0 for all before it. These are weights only if the model summed the rows.
    """
    if bool((weights < 0).any()):
        return False
    sums = weights.sum(-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    tolerance = 4 * torch.finfo(weights.dtype).eps + 1e-5
    within = (sums <= 1 + tolerance) | sums.isnan()
    if trace.is_normalised and not over_queries:
        return bool(within.all())
    within &= (sums >= 1 - tolerance) | (sums == 0) | sums.isnan()
    return bool(within.all()) and (trace.is_summed or bool((weights.amax(-1) < 1 - 2 * tolerance).any()))


class ProductAxes(NamedTuple):
    """The axes of a product of weights with a value.

    Args:
        other: The value.
        key: Axis of the weights that is summed over.
        query: Axis of the weights that the value does not have; None if there is none.
        batch: The other axes of the weights.
        value_axes: Axes of the value in the order (…, kv_len, value_dim); None if it has others.
        output_axes: Axes of the result in the order (…, q_len, value_dim); None if it has others.
    """

    other: Tensor
    key: int
    query: int | None
    batch: tuple[int, ...]
    value_axes: tuple[int, ...] | None
    output_axes: tuple[int, ...] | None


def find_product_axes(name: str, args: Any, weights: Tensor) -> ProductAxes | None:
    """Find the axes of a product of weights with another tensor, given the name of a function; None if it is none."""
    if name in _MATRIX_PRODUCTS:
        left, right = args[1:3] if name == "baddbmm" else args[:2]
        if name == "__rmatmul__":
            left, right = right, left
        return _find_matrix_axes(left, right, weights)
    return _find_einsum_axes(args, weights) if name == "einsum" else None


def _find_matrix_axes(left: Tensor, right: Tensor, weights: Tensor) -> ProductAxes | None:
    is_left = left is weights
    other = right if is_left else left
    if other is weights or min(weights.ndim, other.ndim) < 2:
        return None
    last = weights.ndim - 1
    order = tuple(range(other.ndim))
    axes = tuple(range(max(weights.ndim, other.ndim)))
    if not is_left:
        order, axes = (*order[:-2], order[-1], order[-2]), (*axes[:-2], axes[-1], axes[-2])
    # Rows that multiply one matrix without a batch are a linear layer.
    is_batched = other.ndim > 2 or weights.ndim == 2
    query = last - 1 if is_left else last
    return ProductAxes(
        other,
        key=last if is_left else last - 1,
        query=query if is_batched else None,
        batch=tuple(range(last - 1)),
        value_axes=order,
        output_axes=axes,
    )


def _find_einsum_axes(args: Any, weights: Tensor) -> ProductAxes | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or operands[0] is operands[1]:
        return None
    labels = _parse_equation(args[0], [operand.ndim for operand in operands])
    if labels is None:
        return None
    *inputs, output = labels
    position = 0 if operands[0] is weights else 1
    own, others, other = inputs[position], inputs[1 - position], operands[1 - position]
    if len(set(own)) < len(own) or len(set(others)) < len(others):
        return None
    summed = [label for label in own if label in others and label not in output]
    if len(summed) != 1 or any(label not in others and label not in output for label in own):
        return None
    key = summed[0]
    # Without a heads axis in the value, queries and heads are both absent from it: queries are nearer to the keys.
    absent = [label for label in own if label not in others]
    query = absent[-1] if absent else None
    batch = [label for label in own if label not in (key, query)]
    width = [label for label in others if label not in own]
    value_axes = output_axes = None
    if len(width) == 1 and all(label in others for label in batch):
        value_axes = tuple(others.index(label) for label in (*batch, key, *width))
    if len(width) == 1 and query is not None and width[0] in output:
        output_axes = tuple(output.index(label) for label in (*batch, query, *width))
    return ProductAxes(
        other,
        key=own.index(key),
        query=None if query is None else own.index(query),
        batch=tuple(own.index(label) for label in batch),
        value_axes=value_axes,
        output_axes=output_axes,
    )


def _parse_equation(equation: str, ndims: list[int]) -> list[list[str]] | None:
    """Parse an equation into the labels of each operand and of the result; None if it does not fit the operands."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        return None
    inputs = []
    for term, ndim in zip(terms, ndims, strict=True):
        labels = _expand_ellipsis(term, ndim - len(term.replace("...", "")))
        if len(labels) != ndim:
            return None
        inputs.append(labels)
    if not arrow:
        every = [label for labels in inputs for label in labels]
        return [*inputs, sorted(label for label in set(every) if every.count(label) == 1)]
    hidden = max(
        (ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)), default=0
    )
    return [*inputs, _expand_ellipsis(right, hidden)]


def _expand_ellipsis(term: str, hidden: int) -> list[str]:
    """Return the labels of a term; the axes of an ellipsis are counted from its end, as they broadcast."""
    before, dots, after = term.partition("...")
    names = [f"...{i}" for i in range(hidden, 0, -1)] if dots else []
    return [*before, *names, *after]


def locate_axis(before: tuple[int, ...], axis: int, after: tuple[int, ...]) -> int | None:
    """Return where an axis is after a reshape, which keeps the order of the entries; None if it was split or merged.

    >>> locate_axis((2, 4, 5, 7), 3, (8, 5, 7)), locate_axis((2, 4, 5, 7), 2, (2, 4, 35))
    (2, None)
    """
    inner = math.prod(before[axis + 1 :])
    for i in range(len(after) - 1, -1, -1):
        if after[i] == before[axis] and math.prod(after[i + 1 :]) == inner:
            return i
    return None


def group_axes(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Return the smallest groups of neighbouring axes, of size above 0, that a reshape turns into each other.

    >>> group_axes((2, 4, 5, 6), (2, 20, 3, 2))
    [(range(0, 1), range(0, 1)), (range(1, 3), range(1, 2)), (range(3, 4), range(2, 4))]
    """
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        first, second, size, other = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while size != other:
            if size < other:
                size, i = size * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        groups.append((range(first, i), range(second, j)))
    return groups


def arrange_heads(
    product: DenseAttention, split: tuple[int, ...] | None, module: nn.Module
) -> DenseAttention:
    """Return the attention of a product with an axis of heads before the last two.

    If the module does not state their number, each entry of a merged leading axis is a batch entry with one head.
    `split` is that of `_notify`.
    """
    heads, ndim = count_heads(module), product.weights.ndim
    if heads is not None and not _has_heads_here(module, heads, product):
        heads = None  # they are those of several processes
    *lead, q_len, kv_len = product.weights.shape

    def split_lead(part: Tensor, shape: Sequence[int]) -> Tensor | None:
        return part.reshape(*shape, *part.shape[-2:]) if list(part.shape[:-2]) == lead else None

    def arrange(part: Tensor) -> Tensor | None:
        if len(lead) >= 3 and lead[-1] != heads == lead[-2] * lead[-1]:  # kv_heads and the heads of each
            return part.flatten(-4, -3) if part.ndim == ndim else None
        if len(lead) >= 2:
            # The axis of the heads is the last one, unless only another one has their number.
            if lead[-1] == heads or heads not in lead:
                return part
            return part.movedim(lead.index(heads), -3) if part.ndim == ndim else None
        if split is not None and split[-2:] == (q_len, kv_len) and math.prod(split[:-2]) == math.prod(lead):
            return split_lead(part, split[:-2])
        if split is not None and len(split) == 4 and split[-1] == kv_len and [split[0]] == lead:
            # Multi-query attention: rows of (heads, q_len), or (q_len, heads), that share one value.
            is_value = part is product.value
            if is_value:
                return part.unsqueeze(1)
            part = part.unflatten(1, split[1:3])
            return part.transpose(1, 2) if split[2] == heads and split[1] != heads else part
        batch = math.prod(lead)
        known = heads if heads and batch % heads == 0 else 1
        return split_lead(part, (batch // known, known))

    parts = (product.weights, product.value, product.output, product.score_rows)
    weights, value, output, score_rows = (None if part is None else arrange(part) for part in parts)
    is_slice = len(lead) == 1 and split is None and heads is not None and lead[0] % heads != 0
    return DenseAttention(weights, value, output, product.dropout_p, score_rows, is_slice)


def _has_heads_here(module: nn.Module, heads: int, product: DenseAttention) -> bool:
    """Return whether a module has so many heads in this process, if tensor parallelism splits its parameters."""
    local_sizes = {
        local
        for parameter in module.parameters()
        if hasattr(parameter, "device_mesh")
        for local, whole in zip(parameter.to_local().shape, parameter.shape, strict=True)
        if local != whole
    }
    width = 0 if product.value is None else product.value.shape[-1]
    return not local_sizes or heads * width in local_sizes


def count_heads(module: nn.Module) -> int | None:
    """Return the number of heads that a module or its configuration states, or None."""
    for owner in (module, getattr(module, "config", None)):
        for name in _HEAD_COUNTS:
            heads = getattr(owner, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None
