"""One attention call, and the definition of attention as replaceable steps: what a function with one fault returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

Align = Literal["upper_left", "lower_right"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call, independent of the layout of any function.

    Args:
        query: (batch, heads, q_len, head_dim), in numbers that `dtype` represents exactly.
        key: (batch, kv_heads, kv_len, head_dim).
        value: (batch, kv_heads, kv_len, value_dim).
        dtype: The dtype to call the function with.
        mask: Booleans (q_len, kv_len), or with all four axes, where an axis of size one broadcasts. Default: none.
        causal: The corner of the causal triangle. Default: not causal.
        scale: The scale to pass. Default: none is passed.
        memory: The memory layout of the arrays: "contiguous", "transposed", "sliced", "expanded" or "reversed".
    """

    query: Any
    key: Any
    value: Any
    dtype: str = "float64"
    mask: Any = None
    causal: Align | None = None
    scale: float | None = None
    memory: str = "contiguous"

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        batch, heads, q_len, head_dim = self.query.shape
        _, kv_heads, kv_len, value_dim = self.value.shape
        return {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len,
            "head_dim": head_dim, "value_dim": value_dim,
        }  # fmt: skip

    def build_mask(self) -> Any:
        """Return which keys each query may attend to, booleans (…, q_len, kv_len)."""
        q_len, kv_len = self.query.shape[-2], self.key.shape[-2]
        mask = np.ones((q_len, kv_len), bool) if self.mask is None else np.asarray(self.mask, bool)
        return mask & build_causal_mask(q_len, kv_len, self.causal)

    def slice_axis(self, axis: str, part: slice) -> AttentionCall:
        """Return the call with a slice of one axis."""
        query, key, value, mask = self.query, self.key, self.value, self.mask
        if axis == "batch":
            query, key, value = query[part], key[part], value[part]
        elif axis == "heads":
            query, key, value = query[:, part], key[:, part], value[:, part]
        elif axis == "q_len":
            query = query[:, :, part]
        elif axis == "kv_len":
            key, value = key[:, :, part], value[:, :, part]
        elif axis == "head_dim":
            query, key = query[..., part], key[..., part]
        else:
            value = value[..., part]
        if mask is not None:
            mask_axis = {"batch": -4, "heads": -3, "q_len": -2, "kv_len": -1}.get(axis)
            if mask_axis is not None and -mask_axis <= mask.ndim and mask.shape[mask_axis] > 1:
                mask = mask[(slice(None),) * (mask.ndim + mask_axis) + (part,)]
        return replace(self, query=query, key=key, value=value, mask=mask)


def build_causal_mask(q_len: int, kv_len: int, align: Align | None) -> Any:
    """Build a boolean causal mask of shape (q_len, kv_len). If `align` is None, every entry is True.

    >>> build_causal_mask(2, 3, "lower_right").astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    if align is None:
        return np.ones((q_len, kv_len), bool)
    return np.tri(q_len, kv_len, kv_len - q_len if align == "lower_right" else 0, dtype=bool)


class AttentionResult(NamedTuple):
    """The result of an attention function, in canonical form."""

    output: Any  # (batch, heads, q_len, value_dim)
    weights: Any = None  # (batch, heads, q_len, kv_len), if the function returns them
    gradients: Any = None  # of query, key and value, if the probe needs them
    inputs_changed: bool = False  # whether the function wrote into its arguments


def repeat_kv_heads(array: Any, heads: int) -> Any:
    """Repeat each key head for heads / kv_heads query heads in a row."""
    kv_heads = array.shape[1]
    return array if kv_heads in (0, heads) else np.repeat(array, heads // kv_heads, axis=1)


def resolve_scale(call: AttentionCall) -> float:
    """Return the scale of a call, by default 1/√head_dim."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def get_mask(call: AttentionCall) -> Any:
    """Return the mask of a call, True = attend."""
    return np.True_ if call.mask is None else call.mask


def get_causal_mask(call: AttentionCall) -> Any:
    """Return the causal mask of a call, True = attend."""
    if call.causal is None:
        return np.True_
    return build_causal_mask(call.query.shape[-2], call.key.shape[-2], call.causal)


def sum_live_values(weights: Any, live: Any, value: Any) -> Any:
    """Compute weights @ value over live entries only, because 0 · NaN is NaN."""
    if np.isfinite(value).all():
        return weights @ value
    return np.where(live[..., None], weights[..., None] * value[..., None, :, :], 0).sum(-2)


def return_both(output: Any, weights: Any) -> tuple[Any, Any]:
    """Return the pair (output, weights)."""
    return output, weights


@dataclass(frozen=True)
class Steps:
    """The definition, one step for each field. A fault replaces some of them."""

    # Query, key and value; repeated key or value heads; scale, mask and causal mask of a call, True = attend.
    arrange: Callable[..., Any] = lambda query, key, value: (query, key, value)
    repeat_heads: Callable[..., Any] = repeat_kv_heads
    scale: Callable[..., Any] = resolve_scale
    mask: Callable[..., Any] = get_mask
    causal: Callable[..., Any] = get_causal_mask
    # The masked scores, and which of them may have weight; what is subtracted before the exponential.
    mask_scores: Callable[..., Any] = lambda scores, allowed: (np.where(allowed, scores, -np.inf), allowed)
    shift: Callable[..., Any] = lambda scores, axis: np.max(scores, axis, keepdims=True, initial=-np.inf)
    exponential: Callable[..., Any] = np.exp
    axis: Any = -1  # of the softmax
    # The sum of exponentials of scores less `base`; the weights of an empty row; the weights, and which of them count.
    denominator: Callable[..., Any] = lambda exponentials, axis, base: exponentials.sum(axis, keepdims=True)
    empty_row: Callable[..., Any] = lambda scores, kv_len: 0.0
    after_softmax: Callable[..., Any] = lambda call, weights, live, allowed: (weights, live)
    combine: Callable[..., Any] = sum_live_values
    finish: Callable[..., Any] = lambda output: output
    return_value: Callable[..., Any] = return_both
    half_precision: bool = False  # whether every intermediate result is rounded to the dtype of the inputs
    # Gradients:
    backward_scale: Callable[..., Any] = resolve_scale
    backward_centre: bool = (
        True  # whether Σ weight · gradient of the row is subtracted, as the softmax requires
    )
    backward_reaches: tuple[str, ...] = ("query", "key", "value")
    backward_empty: float = 0.0
    backward_key: bool = True  # whether keys that no query attends to stay out of the gradients, NaN included
    backward_value: bool = True  # … and values


DEFINITION = Steps()
HALF_DTYPES = ("float16", "bfloat16")


def run_steps(
    call: AttentionCall, steps: Steps, dtype: Any = np.float64, output_gradient: Any = None
) -> AttentionResult:
    """Compute what a function with these steps returns."""
    with np.errstate(all="ignore"):
        rounds = steps.half_precision and call.dtype in HALF_DTYPES

        def to_half(array: Any) -> Any:
            return round_to(array, call.dtype) if rounds else array

        query, key, value = steps.arrange(*(x.astype(dtype) for x in (call.query, call.key, call.value)))
        heads = query.shape[1]
        key, value = steps.repeat_heads(key, heads), steps.repeat_heads(value, heads)
        scores = to_half(to_half(query @ key.swapaxes(-1, -2)) * dtype(steps.scale(call)))
        allowed = np.broadcast_to(steps.mask(call) & steps.causal(call), scores.shape)
        masked, live = steps.mask_scores(scores, allowed)
        shift = steps.shift(masked, steps.axis)
        base = np.where(shift == -np.inf, 0, shift)
        exponentials = to_half(steps.exponential(masked - base))
        total = steps.denominator(exponentials, steps.axis, base)
        weights = np.where(live, to_half(exponentials / np.where(total == 0, 1, total)), 0)
        is_empty = ~np.any(live, axis=steps.axis, keepdims=True)
        weights = np.where(is_empty, steps.empty_row(scores, scores.shape[-1]), weights)
        weights, live = steps.after_softmax(call, weights, live | (is_empty & (weights != 0)), allowed)
        output = steps.finish(steps.combine(weights, live, value))
        result = AttentionResult(*steps.return_value(output, weights))
        if output_gradient is not None:
            gradients = _compute_gradients((query, key, value), weights, live, output_gradient, call, steps)
            result = result._replace(gradients=gradients)
        return result


def _compute_gradients(
    arrays: tuple[Any, Any, Any], weights: Any, live: Any, output_gradient: Any, call: AttentionCall, steps: Steps
) -> tuple[Any, ...]:  # fmt: skip
    """Compute the gradients of query, key and value; masked entries have none."""
    query, key, value = arrays
    is_visible = live.any(-2)[..., None]
    key = np.where(is_visible, key, 0) if steps.backward_key else key
    value = np.where(is_visible, value, 0) if steps.backward_value else value
    gradient = output_gradient @ value.swapaxes(-1, -2)  # of the weights, then of the scores
    if steps.backward_centre:
        gradient = gradient - (gradient * weights).sum(-1, keepdims=True)
    gradient = weights * gradient
    gradient = np.where(live.any(-1, keepdims=True), gradient, steps.backward_empty)
    gradient = gradient * steps.backward_scale(call)
    of_key, of_value = gradient.swapaxes(-1, -2) @ query, weights.swapaxes(-1, -2) @ output_gradient
    heads, kv_heads = call.sizes["heads"], call.sizes["kv_heads"]
    if heads != kv_heads and of_key.shape[1] == heads:  # the query heads of a group add up
        of_key, of_value = (
            x.reshape(len(x), kv_heads, heads // kv_heads, *x.shape[2:]).sum(2) for x in (of_key, of_value)
        )
    gradients = {"query": gradient @ key, "key": of_key, "value": of_value}
    return tuple(
        array if name in steps.backward_reaches else np.zeros_like(array) for name, array in gradients.items()
    )


def round_to(array: Any, dtype: str) -> Any:
    """Round an array to the numbers of a dtype, and return it in its own dtype.

    >>> round_to(np.array([1.0, 1.001, 1.005], np.float32), "bfloat16")
    array([1.       , 1.       , 1.0078125], dtype=float32)
    """
    array = np.asarray(array)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return array.astype(dtype).astype(array.dtype)
    bits = array.astype(np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(array), even.view(np.float32), array).astype(array.dtype)
