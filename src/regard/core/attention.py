"""The constructors of the matrix, which check all their arguments.

`attention_from_weights` is for layers that computed the weights before the matrix was built.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from regard.core.matrix import AttentionMatrix
from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame, check_matrix_shape, take_block
from regard.masks import Mask
from regard.problem import Problem, Spec, leading_shape, resolve_scale
from regard.score_mods import ScoreMod
from regard.types import Array, ArrayT, IntArray, Namespace

if TYPE_CHECKING:
    from regard.feature_maps import FeatureMap

__all__ = ["attention", "linear_attention"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Arguments that people know from other attention functions, and what to write instead.
_OTHER_ARGUMENTS = {
    "is_causal": "Write mask=regard.causal().",
    "causal": "Write mask=regard.causal().",
    "attn_mask": "Write mask=regard.masks.dense(attn_mask) for booleans, True = attend, or "
    "score_mod=regard.score_mods.bias(attn_mask) for an additive mask.",
    "attention_mask": "Write mask=regard.masks.dense(attention_mask[:, None, None].bool()) for a tokenizer's mask, or "
    "score_mod=regard.score_mods.bias(attention_mask) for an additive mask.",
    "key_padding_mask": "Write mask=regard.padding(lengths), or "
    'regard.masks.dense(key_padding_mask[:, None, None], true_means="ignore").',
    "block_mask": "Write mask=regard.mask(mask_mod).",
    "mask_mod": "Write mask=regard.mask(mask_mod).",
    "bias": "Write score_mod=regard.score_mods.bias(bias).",
    "window_size": "Write mask=regard.sliding_window(size).",
    "alibi_slopes": "Write score_mod=regard.alibi(slopes).",
    "softcap": "Write score_mod=regard.softcap(cap).",
    "softmax_scale": "Write scale=softmax_scale.",
    "scaling": "Write scale=scaling.",
    "dropout_p": "Omit it: the matrix has no dropout. To train with dropout, use regard.nn.MultiheadAttention.",
}


def _hint_at_arguments(function: FunctionT) -> FunctionT:
    """Make a function name the argument to pass if it gets one that another attention function has."""
    accepted = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:  # looked into only now: a call takes microseconds
            unknown = [name for name in kwargs if name not in accepted]
            if len(args) > 2:
                unknown.insert(0, "mask" if isinstance(args[2], Mask) else "value")
            if not unknown:
                raise
        name = function.__name__
        hints = _OTHER_ARGUMENTS | {
            "value": f"Multiply: regard.{name}(query, key) @ value.",
            "mask": "Pass it by name: mask=….",
        }
        raise ArgumentTypeError(
            name,
            received=f"the argument {unknown[0]}",
            expected=", ".join(accepted),
            hint=hints.get(unknown[0], f"help(regard.{name}) explains each of them."),
        )

    return checked  # type: ignore[return-value]


@overload
def attention(
    query: Sequence[Any],
    key: Sequence[Any],
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    scale: float | None = None,
    sink: Array | float | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix[npt.NDArray[np.float64]]: ...


@overload
def attention(
    query: ArrayT,
    key: ArrayT,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    scale: float | None = None,
    sink: Array | float | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix[ArrayT]: ...


@_hint_at_arguments
def attention(
    query: Array,
    key: Array,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    scale: float | None = None,
    sink: Array | float | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix:
    """Return the attention matrix softmax(query keyᵀ · scale + …) as a lazy matrix.

    Order of operations: scale → score modifications in the order given → mask → sink → softmax. NumPy arrays, torch
    tensors and nested lists are accepted; the leading axes of query and key broadcast.

    The matrix references query, key, mask, bias and sink without copying them. If a tensor is changed in place, later
    results use its new values. Changes to NumPy arrays and to tensors from `torch.inference_mode()` cannot be detected:
    do not change them while the matrix is in use, or call `attention(…).copy()`.

    Args:
        query: (…, heads, q_len, head_dim), or just (q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim), or just (kv_len, head_dim).
        mask: Which keys each query may attend to (True = attend), such as `regard.causal()`. Default: all.
        score_mod: One or several score modifications, such as `regard.softcap(50)`.
        scale: Factor that multiplies the products of query and key. Default: 1/√head_dim.
        sink: An extra score without a key in the softmax of every row: a number, or one for each head, (heads,).
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.

    Returns:
        The lazy matrix: (…, heads, q_len, kv_len). Nothing is computed yet.

    Raises:
        ArgumentError: If shapes are incompatible, or `scale` is not a finite number.
        ArgumentTypeError: If an argument has the wrong type; arrays must hold real numbers.

    >>> A = attention([[1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]])
    >>> A
    AttentionMatrix(q_len 2, kv_len 3) float64, scale 0.7071
    [0.4011 0.4011 0.1978]
    [0.1978 0.4011 0.4011]
    >>> A @ [[1, 0], [0, 2], [1, 1]]
    array([[0.59888791, 1.        ],
           [0.59888791, 1.20333628]])
    """
    spec = build_spec(query, key, mask, score_mod, scale, sink, enable_gqa)
    if mask is not None or spec.score_mods or sink is not None:
        check_fits(spec, Frame.from_shape(spec.shape))
    return AttentionMatrix(spec)


def build_spec(
    query: Any, key: Any, mask: Mask | None, score_mod: Any, scale: float | None, sink: Any, enable_gqa: bool
) -> Spec:
    """Convert the arguments of `attention`; mask, score modifications and sink are not checked yet."""
    engine = find_engine("attention", query=query, key=key)
    query, key = engine.as_float(query, "attention", "query"), engine.as_float(key, "attention", "key")
    axes, groups = leading_shape(query, key, enable_gqa)
    score_mods = as_score_mods(score_mod)
    if sink is not None:
        sink = engine.as_float(sink, "attention", "sink")
    scale = resolve_scale(scale, query.shape[-1])
    return Spec(engine, query, key, mask, score_mods, scale, sink, axes, groups)


@_hint_at_arguments
def linear_attention(
    query: ArrayT,
    key: ArrayT,
    *,
    feature_map: str | FeatureMap = "elu",
    mask: Mask | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix[ArrayT]:
    """Return the matrix of linear attention: weights φ(query) · φ(key), each row divided by its sum.

    The matrix has the same methods as the one `attention` returns. A score is log(φ(query) · φ(key)), so the lse is the
    logarithm of a row's sum. If a product is exactly 0, the key counts as masked.

    `A @ value` needs time and memory proportional to the length if few chunks of keys are partially masked, as with
    no mask, a causal mask, windows, padding or contiguous documents. Only partially masked tiles are computed
    explicitly, and `A.kernel` gives their number. Entries and measures are computed by the block loop, as for
    `attention`.

    Args:
        query: (…, heads, q_len, head_dim), or just (q_len, head_dim).
        key: (…, kv_heads, kv_len, head_dim), or just (kv_len, head_dim).
        feature_map: φ: "elu" (elu(x) + 1), "relu", `regard.feature_maps.random_features()`, or a function from an
            array (…, length, head_dim) to non-negative features (…, length, features).
        mask: Which keys each query may attend to (True = attend). Default: all.
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.

    Returns:
        The lazy matrix: (…, heads, q_len, kv_len).

    Raises:
        ArgumentError: If shapes are incompatible, or features are negative or have the wrong shape.
        ArgumentTypeError: If an argument has the wrong type; arrays must hold real numbers.

    >>> A = linear_attention([[1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]])
    >>> A
    AttentionMatrix(q_len 2, kv_len 3) float64, linear attention (elu)
    [0.3333 0.4000 0.2667]
    [0.2667 0.4000 0.3333]
    >>> A @ [[1, 0], [0, 2], [1, 1]]
    array([[0.6       , 1.06666667],
           [0.6       , 1.13333333]])
    """
    from regard.core.linear import LinearProblem, LogScores, rescale_features
    from regard.feature_maps import compute_features, resolve_feature_map

    operation = "linear_attention"
    engine = find_engine(operation, query=query, key=key)
    arrays = [engine.as_float(array, operation, name) for name, array in (("query", query), ("key", key))]
    axes, groups = leading_shape(arrays[0], arrays[1], enable_gqa, operation)
    function, name_of_map = resolve_feature_map(feature_map)
    dtype = engine.working_dtype(*arrays)
    features: Any = (
        engine.cast(compute_features(engine.cast(array, dtype), function, name_of_map, engine, name), dtype)
        for name, array in zip(("query", "key"), arrays, strict=True)
    )
    q_features, k_features = features
    if q_features.shape[-1] != k_features.shape[-1]:
        raise ArgumentError(
            operation,
            received=f"{name_of_map} with {q_features.shape[-1]} features of query and {k_features.shape[-1]} of key",
            expected="the same number of features",
            hint="A feature map must return the same number of features for any length.",
        )
    q_features, offset = rescale_features(q_features, engine)
    spec = Spec(
        engine,
        q_features,
        k_features,
        mask,
        (LogScores(name_of_map, offset),),
        1.0,
        None,
        axes,
        groups,
        problem_class=LinearProblem,
    )
    if mask is not None:
        check_fits(spec, Frame.from_shape(spec.shape))
    return AttentionMatrix(spec)


def layer_attention(
    query: Array, key: Array, value: Array, *, multiply: bool = True, **options: Any
) -> tuple[Array | None, AttentionMatrix]:
    """Return `A @ value` and the matrix A; layers call it so that `regard.watch` also captures value and output."""
    matrix = attention(query, key, **options)
    return (matrix @ value if multiply else None), matrix


def as_score_mods(score_mod: ScoreMod | Sequence[ScoreMod] | None) -> tuple[ScoreMod, ...]:
    """Convert None, one or several score modifications to a tuple."""
    if isinstance(score_mod, (list, tuple)):  # not a union: the compiler of torch 2.9 breaks the graph at one
        return tuple(score_mod)
    return () if score_mod is None else (score_mod,)  # type: ignore[return-value]


def check_fits(spec: Spec, frame: Frame) -> None:
    """Refuse a mask, score modification or sink of the wrong type, or one that does not fit the matrix."""
    check_mask_and_score_mods(spec.mask, spec.score_mods)
    if spec.mask is not None:
        spec.mask.check(frame)
    for score_mod in spec.score_mods:
        score_mod.check(frame)
    if spec.sink is not None:
        frame.per_head(spec.sink, "attention: sink")


def check_mask_and_score_mods(mask: Mask | None, score_mods: Sequence[ScoreMod]) -> None:
    """Refuse a mask that is not a `Mask`, or a score modification that is not a `ScoreMod`."""
    if mask is not None and not isinstance(mask, Mask):
        numbers = "use score_mod=regard.score_mods.bias(array) to add numbers to the scores"
        hint = f"regard.masks.dense(array) for booleans, True = attend; {numbers}"
        _check_type(mask, Mask, "mask", "a mask such as regard.causal()", hint)
    for score_mod in score_mods:
        names = "regard.softcap, regard.alibi, regard.relative_bias or regard.score_mods.bias"
        _check_type(score_mod, ScoreMod, "score_mod", names, "regard.score_mods.bias(array)")


def _check_type(argument: Any, expected_type: type, operation: str, expected: str, hint: str) -> None:
    if not isinstance(argument, expected_type):
        is_ours = callable(argument) and str(getattr(argument, "__module__", "")).startswith("regard")
        if is_ours:
            hint = f"Call it: {argument.__module__}.{argument.__name__}()."
        elif callable(argument) and expected_type is Mask:
            hint = "Wrap a function of b, h, q_idx and kv_idx: mask=regard.mask(function)."
        elif callable(argument):
            hint = f"Functions are not accepted; subclass regard.{expected_type.__name__}, or pass {hint}."
        elif isinstance(argument, str) and expected_type is Mask:
            hint = (
                "Masks are values: mask=regard.causal(), regard.sliding_window(512), regard.padding(lengths)."
            )
        else:
            hint = f"Wrap it: {hint}."
        received = describe_argument(argument)
        raise ArgumentTypeError(operation, received=received, expected=expected, hint=hint)


# Given weights


@dataclass(frozen=True, eq=False)
class LogWeights(ScoreMod):
    """Scores that are the logarithms of given weights, −inf for a weight of 0.

    Attributes:
        weights: (…, heads, q_len, kv_len), none negative.
    """

    weights: Array

    def take(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray) -> Array:
        """Return the weights of a block: (pairs or 1, len(q_idx), len(kv_idx))."""
        return frame.take_pairs(take_block(self.weights, q_idx, kv_idx), 2, "weights")

    def additive_bias(
        self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace, dtype: Any
    ) -> Array:
        weights = xp.astype(xp.asarray(self.take(frame, q_idx, kv_idx)), dtype)
        return xp.where(weights == 0, -xp.inf, xp.log(xp.where(weights == 0, 1.0, weights)))

    def check(self, frame: Frame) -> None:
        check_matrix_shape(self.weights, frame, "weights")

    def __repr__(self) -> str:
        return "given weights"


class GivenWeightsProblem(Problem):
    """A problem without query and key: both have a head_dim of 0, and the only score modification is `LogWeights`."""

    @property
    def can_fuse(self) -> bool:
        return False

    @property
    def kernel(self) -> str:
        return f"{self.engine.name}: block loop (given weights)"

    @property
    def has_large_scores(self) -> bool:
        return False  # the lse is exactly 0

    @property
    def title_suffix(self) -> str:
        return " by given weights"

    def describe(self) -> list[str]:
        return [repr(mod) for mod in self.score_mods]

    @property
    def has_sink(self) -> bool:
        return True

    @property
    def given_lse(self) -> Array:
        xp, (_, rows, kv_len) = self.engine.xp, self.shape
        has_weight = xp.any(self.take_given_weights(np.arange(rows), np.arange(kv_len)) != 0, axis=-1)
        return self.engine.cast(xp.where(has_weight, 0.0, -xp.inf), self.dtype)

    def take_given_weights(self, rows: IntArray, columns: IntArray) -> Array:
        (log_weights,) = self.score_mods
        assert isinstance(log_weights, LogWeights)
        weights = log_weights.take(self.frame, self.positions[rows], columns)
        weights = self.engine.cast(self.engine.xp.asarray(weights), self.dtype)
        return self.engine.xp.broadcast_to(weights, (self.shape[0], *weights.shape[1:]))


def attention_from_weights(
    weights: Array, query: Array, key: Array, *, mask: Mask | None = None, enable_gqa: bool = False
) -> AttentionMatrix:
    """Return a matrix with given weights; its entries are bit-equal to them.

    A score is the logarithm of a weight, and the lse of a row is 0. If a row sums to less than 1, the rest belongs to
    no key, as with a sink.

    Args:
        weights: (…, heads, q_len, kv_len), none negative, each row with a sum of at most 1 up to rounding.
        query: (…, heads, q_len, 0): its axes alone count.
        key: (…, kv_heads, kv_len, 0): its axes alone count.
        mask: The keys that each row attends to, as far as is known; weights outside it must be 0.
        enable_gqa: Whether heads / kv_heads consecutive heads share a value head.

    Returns:
        The matrix: (…, heads, q_len, kv_len).
    """
    engine = find_engine("attention", query=query, key=key)
    axes, groups = leading_shape(query, key, enable_gqa)
    spec = Spec(
        engine,
        query,
        key,
        mask,
        (LogWeights(weights),),
        1.0,
        None,
        axes,
        groups,
        problem_class=GivenWeightsProblem,
    )
    check_fits(spec, Frame.from_shape(spec.shape))
    return AttentionMatrix(spec)
