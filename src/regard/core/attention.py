"""`attention` and `linear_attention`, which make the matrix: everything they are given is checked here, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.core.broadcasting import leading_shape, resolve_scale
from regard.core.matrix import AttentionMatrix
from regard.core.problem import Spec
from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.frame import Frame
from regard.masks import Mask
from regard.score_mods import ScoreMod

if TYPE_CHECKING:
    from regard.feature_maps import FeatureMap

__all__ = ["attention", "linear_attention"]


def attention(
    query: Any,
    key: Any,
    *,
    mask: Mask | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    scale: float | None = None,
    sink: Any = None,
    enable_gqa: bool = False,
) -> AttentionMatrix:
    """The attention matrix softmax(query keyᵀ · scale + …), lazy: shape (…, heads, q_len, kv_len).

    `query` is (…, heads, q_len, head_dim) and `key` (…, kv_heads, kv_len, head_dim); both may be as plain as
    (n, d). Axes before the last two broadcast; with `enable_gqa=True` each key head serves heads / kv_heads
    query heads in a row. Order of operations: scale (1/√head_dim unless given) → score modifications in the
    order given → mask (True = attend) → sink → softmax. `sink` is a score, one or one for each head, that takes
    its share of every row and gives it to no key.

    >>> A = attention([[1, 0], [0, 1]], [[1, 0], [1, 1], [0, 1]])
    >>> A
    AttentionMatrix(q_len 2, kv_len 3) float64, scale 0.7071
    [0.4011 0.4011 0.1978]
    [0.1978 0.4011 0.4011]
    >>> A @ [[1, 0], [0, 2], [1, 1]]
    array([[0.59888791, 1.        ],
           [0.59888791, 1.20333628]])
    """
    engine = find_engine("attention", query=query, key=key)
    query, key = engine.as_float(query, "attention", "query"), engine.as_float(key, "attention", "key")
    lead, groups = leading_shape(query, key, enable_gqa)
    score_mods = as_score_mods(score_mod)
    if sink is not None:
        sink = engine.as_float(sink, "attention", "sink")
    scale = resolve_scale(scale, query.shape[-1])
    spec = Spec(engine, query, key, mask, score_mods, scale, sink, lead, groups)
    if mask is not None or score_mods or sink is not None:
        _check_fit(spec)
    return AttentionMatrix(spec)


def linear_attention(
    query: Any,
    key: Any,
    *,
    feature_map: str | FeatureMap = "elu",
    mask: Mask | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix:
    """The matrix of linear attention, lazy: weights φ(query) · φ(key), each row divided by its sum.

    `query`, `key`, `mask` and `enable_gqa` are as in `attention`; so is what can be asked of the matrix. A score is
    log(φ(query) · φ(key)), so that the lse is the logarithm of a row's sum. `feature_map` is φ: "elu" (elu(x) + 1),
    "relu", `regard.feature_maps.random_features()`, or a function of one array (…, length, head_dim) that returns
    features (…, length, features), none negative. Where a product is exactly 0 the key is hidden, as by a mask.

    `A @ value` takes time and memory in proportion to the length where the mask leaves few chunks of keys cut:
    none, causal, windows, padding, documents in one piece each. Only what it cuts through is multiplied out, and
    `A.kernel` says how much that is. Entries and measures go over the tiles as those of `attention` do.

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
    from regard.feature_maps import features_of, settle

    operation = "linear_attention"
    engine = find_engine(operation, query=query, key=key)
    query, key = engine.as_float(query, operation, "query"), engine.as_float(key, operation, "key")
    lead, groups = leading_shape(query, key, enable_gqa, operation)
    function, called = settle(feature_map)
    dtype = engine.working_dtype(query, key)
    query, key = (
        engine.cast(features_of(engine.cast(array, dtype), function, called, engine, name), dtype)
        for name, array in (("query", query), ("key", key))
    )
    if query.shape[-1] != key.shape[-1]:
        raise ArgumentError(
            operation,
            received=f"{called} with {query.shape[-1]} features of query and {key.shape[-1]} of key",
            expected="as many features of each",
            hint="Features are compared one by one; their number may not depend on the length.",
        )
    query, offset = rescale_features(query, engine)
    spec = Spec(
        engine,
        query,
        key,
        mask,
        (LogScores(called, offset),),
        1.0,
        None,
        lead,
        groups,
        problem_class=LinearProblem,
    )
    if mask is not None:
        _check_fit(spec)
    return AttentionMatrix(spec)


def layer_matrix(query: Any, key: Any, value: Any, **options: Any) -> AttentionMatrix:
    """The matrix by which a layer mixes `value`, as `attention` makes it; `regard.watch` sees all three here."""
    return attention(query, key, **options)


def as_score_mods(score_mod: ScoreMod | Sequence[ScoreMod] | None) -> tuple[ScoreMod, ...]:
    """None, one or several score modifications, as several."""
    if isinstance(score_mod, list | tuple):
        return tuple(score_mod)
    return () if score_mod is None else (score_mod,)  # type: ignore[return-value]


def _check_fit(spec: Spec) -> None:
    """Refuse a mask, score modification or sink that is none, or that does not fit the matrix."""
    frame = Frame.from_shape(spec.shape)
    check_mask_and_score_mods(spec.mask, spec.score_mods)
    for each in (spec.mask, *spec.score_mods):
        if each is not None:
            each.check(frame)
    if spec.sink is not None:
        frame.per_head(spec.sink, "attention: sink")


def check_mask_and_score_mods(mask: Mask | None, score_mods: Sequence[ScoreMod]) -> None:
    """Refuse a mask or a score modification that is none."""
    if mask is not None:
        hint = "dense(array) for booleans, True = attend; numbers to add are score_mod=bias(array)"
        _check_kind(mask, Mask, "mask", "a mask such as regard.causal()", hint)
    for each in score_mods:
        names = "regard.softcap, alibi, bias or relative_bias"
        _check_kind(each, ScoreMod, "score_mod", names, "bias(array)")


def _check_kind(thing: Any, kind: type, operation: str, expected: str, hint: str) -> None:
    if not isinstance(thing, kind):
        ours = callable(thing) and str(getattr(thing, "__module__", "")).startswith("regard")
        hint = f"Call it: {thing.__name__}()." if ours else f"Wrap it: {hint}."
        raise ArgumentTypeError(operation, received=describe_argument(thing), expected=expected, hint=hint)
