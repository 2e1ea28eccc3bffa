"""Follow the result of a softmax to the product with a value, and return the weights of that product.

The result gets the class `FollowedTensor` for as long as it is followed, so torch passes every operation on it, and
only those, to this file. Casts, dropout, masks, reshapes and permutations are followed. If the softmax axis is then
summed over in a product with another tensor, the operand is the attention matrix. The numbers are never touched.

The output of the product is followed to the reshape that puts the heads side by side. If that merges the heads with the
rows, these are channels and not tokens, as in the cross-covariance attention of XCiT.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.product_axes import ProductAxes, find_product_axes, group_axes, locate_axis

Tensor = Any  # the types of torch are not followed

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


class WeightProduct(NamedTuple):
    """A product with weights that a softmax returned.

    Args:
        weights: (…, q_len, kv_len), without dropout.
        value: (…, kv_len, value_dim); None if it has other axes.
        output: (…, q_len, value_dim); None if it has other axes.
        split: The latest shape of the weights with at least four axes, if they were only reshaped since.
        dropout_p: Probability of the dropout that the product includes.
        score_rows: (…, q_len, 3): lse, first key and end of each row, as `summarise_score_rows` returns them, NaN
            where they are not known; None if nothing is known.
    """

    weights: Tensor
    value: Tensor | None
    output: Tensor | None
    split: tuple[int, ...] | None
    dropout_p: float
    score_rows: Tensor | None = None


class SoftmaxTrace:
    """One softmax that is followed.

    Args:
        shape: Shape of its result.
        dim: Its axis.
        is_normalised: False for an exponential, whose rows the model still has to divide by their sums.

    Attributes:
        on_product: Called with the product; with None if `fault` says why it cannot be read. Returns the output if an
            intervention changes it.
        on_channels: Called if the rows of the product are channels and not tokens; None if the layer was not recorded.
        fault: Why the softmax is not the weights of a product.
        is_read: Whether the product was found and recorded.
        is_multiplied: Whether an exponential was multiplied by a value before its rows were divided by their sums.
        is_summed: Whether the rows of an exponential were summed, as a softmax sums them.
    """

    on_product: Callable[[WeightProduct | None], Tensor | None]
    on_channels: Callable[[], None] | None = None

    def __init__(self, shape: tuple[int, ...], dim: int, is_normalised: bool) -> None:
        self.shape, self.dim, self.is_normalised = shape, dim % len(shape), is_normalised
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
            self.on_product(None)


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
    """What is known about the output of a product with weights, until its heads are put side by side.

    Args:
        trace: The softmax.
        axes: What each axis is.
    """

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


def follow(result: Tensor, trace: SoftmaxTrace, score_rows: Tensor | None) -> None:
    """Follow the result of a softmax, and what `summarise_score_rows` returned, to the product with a value."""
    if type(result) is torch.Tensor:
        _open_traces.add(trace)
        split = trace.shape if len(trace.shape) > 3 else None
        _mark(result, FollowedState(trace, trace.dim, split, score_rows=score_rows))


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
    """Find the product, or mark the result of an operation that keeps the weights.

    Returns:
        The result of the product, if an intervention changes it; else None.
    """
    source = _find_followed(args)
    if source is None or not result.is_floating_point():
        return None
    state = source._regard_state
    if isinstance(state, OutputState):
        _follow_output(func, name, args, kwargs, source, state, result)
        return None
    if name == "sum" and _get_summed_axis(args, kwargs, source) == state.axis:
        state.trace.is_summed = True
        state.trace.check_division()
    axes = find_product_axes(name, args, source)
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
    """Apply an operation to the tensor without dropout, too."""
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
            assert state.trace.on_channels is not None
            state.trace.on_channels()
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

    Returns:
        Whether it is, and the result if an intervention changes it.
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
            trace.on_product(None)
        trace.is_multiplied = not bool((weights < 0).any())
        trace.check_division()
        return False, None
    value = None if axes.value_axes is None else other.permute(axes.value_axes)
    output = None if axes.output_axes is None else result.permute(axes.output_axes)
    rows = None if state.score_rows is None or over_queries else state.score_rows
    rows = None if rows is None else rows.permute(*axes.batch, axes.query, axes.key)
    trace.close()
    edited = trace.on_product(WeightProduct(weights, value, output, state.split, state.dropout_p, rows))
    if edited is not None:
        assert axes.output_axes is not None
        edited = edited.permute([axes.output_axes.index(i) for i in range(edited.ndim)])
    if axes.output_axes is not None and trace.on_channels is not None and result.numel():
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
