"""Build the inputs of a case: arrays, masks and score modifications, and the same as dense arrays for the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from regard import masks, score_mods
from regard.testing.cases.factors import MASK_ATOMS, Case
from regard.types import Array


@dataclass
class CaseInputs:
    """The inputs of a case.

    Args:
        query: (*lead, q_len, head_dim).
        key: (*kv_lead, kv_len, head_dim).
        value: (*kv_lead, kv_len, value_dim).
        arguments: Keyword arguments of `regard.attention`.
        definition: The corresponding arguments of the reference, as dense arrays.
        ordinary: Whether the fixed bounds of the error rule apply.

    >>> from regard.testing import build_inputs, draw_cases
    >>> case, _ = next(draw_cases(1, seed=0, tile=8))
    >>> build_inputs(case, tile=8).query.shape
    (33, 3)
    """

    query: Array
    key: Array
    value: Array
    arguments: dict[str, Any]
    definition: dict[str, Any]
    ordinary: bool


def build_inputs(case: Case, tile: int) -> CaseInputs | None:
    """Build the arrays and arguments of a case.

    Args:
        case: The case.
        tile: The tile size that the lengths "tile ± 1" and "2 tile + 1" refer to.

    Returns:
        The inputs; None if the case contradicts itself, because no key is masked.

    >>> from regard.testing import build_inputs, draw_cases
    >>> case, _ = next(draw_cases(1, seed=0, tile=8))
    >>> sorted(build_inputs(case, tile=8).arguments)
    ['mask', 'scale']
    """
    rng = np.random.default_rng(case.seed)
    lengths = {"tile - 1": tile - 1, "tile + 1": tile + 1, "2 tile + 1": 2 * tile + 1}
    q_len, kv_len = lengths.get(case.q_len, case.q_len), lengths.get(case.kv_len, case.kv_len)
    lead, kv_lead = {
        "none": ((), ()),
        "three": ((3,), (3,)),
        "batch": ((2, 3), (2, 3)),
        "grouped": ((2, 6), (2, 2)),
        "multi-query": ((2, 3), (2, 1)),
    }[case.heads]
    value_dim = case.head_dim if case.value_dim == "head_dim" else case.value_dim
    query, key = (rng.normal(size=(*x, n, case.head_dim)) for x, n in ((lead, q_len), (kv_lead, kv_len)))
    value = rng.normal(size=(*kv_lead, kv_len, value_dim))
    mask, allowed = build_mask(case.mask, (*lead, q_len, kv_len), rng)
    arguments, definition = _build_change(case.change, (*lead, q_len, kv_len), rng)
    if mask is not None:
        arguments["mask"], definition["mask"] = mask, allowed
    if case.heads == "grouped":
        arguments["enable_gqa"] = True
    if case.values == "large scores":
        query, key = query * 100, key * 100 / np.sqrt(case.head_dim)
    elif case.values == "one-hot":
        query, key = (20 * (x == x.max(-1, keepdims=True)) for x in (query, key))
    elif case.values == "denormal":
        query = query * {"float64": 1e-310, "float32": 1e-40, "bfloat16": 1e-40, "float16": 1e-7}[case.dtype]
    elif case.values == "NaN masked":
        if not _poison_masked(key, value, allowed, kv_lead, rng):
            return None
    elif case.values == "NaN live":
        for array in (x for x in (query, key, value) if x.size):
            array.flat[rng.integers(array.size)] = rng.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore"):
        query, key, value = (
            _lay_out(array.astype(numpy_dtype(case.dtype)), case.layout) for array in (query, key, value)
        )
    ordinary = case.values == "normal" and case.change in ("none", "sink")
    return CaseInputs(query, key, value, arguments, definition, ordinary)


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype of a name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def build_mask(spec: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[masks.Mask | None, Any]:
    """Build a mask and, computed independently of it, the boolean array that it must equal.

    Args:
        spec: A choice of the factor "mask".
        shape: (*lead, q_len, kv_len).
        rng: The source of its random sizes.
    """
    if spec == "none":
        return None, np.ones(shape, bool)
    if spec == "triple":
        a, b, c = rng.choice(MASK_ATOMS, 3)
        (x, x_allowed), (y, y_allowed), (z, z_allowed) = (_build_atom(name, shape, rng) for name in (a, b, c))
        return x & (y | ~z), x_allowed & (y_allowed | ~z_allowed)
    if " & " in spec:
        (x, x_allowed), (y, y_allowed) = (_build_atom(name, shape, rng) for name in spec.split(" & "))
        return x & y, x_allowed & y_allowed
    if " | ~" in spec:
        (x, x_allowed), (y, y_allowed) = (_build_atom(name, shape, rng) for name in spec.split(" | ~"))
        return x | ~y, x_allowed | ~y_allowed
    return _build_atom(spec, shape, rng)


def _build_atom(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[masks.Mask, Any]:
    *lead, q_len, kv_len = shape
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    align: Any = "lower_right" if rng.random() < 0.5 else "upper_left" if q_len != kv_len else None
    at = i + (kv_len - q_len if align == "lower_right" else 0)
    batch = tuple(lead[:-1])
    ones = np.ones(shape, bool)
    if name == "causal":
        return masks.causal(align), ones & (j <= at)
    if name == "window":
        size = rng.integers(1, kv_len + 2, size=lead[-1:])  # one for each head
        heads = size.reshape(*lead[-1:], 1, 1)
        return masks.sliding_window(size, align=align), ones & (j > at - heads) & (j <= at)
    if name == "two_sided":
        left, right = (int(n) for n in rng.integers(0, kv_len // 2 + 2, size=2))
        return masks.sliding_window(left=left, right=right, align=align), ones & (at - left <= j) & (
            j <= at + right
        )
    if name in ("padding", "left_padding", "prefix", "first"):
        lengths = rng.integers(0, kv_len + 1, size=batch)
        count = lengths.reshape(*batch, *(1,) * (len(shape) - len(batch)))
        if name == "padding":
            return masks.padding(lengths), ones & (j < count)
        if name == "left_padding":
            return masks.padding(lengths, side="left"), ones & (j >= kv_len - count)
        if name == "first":
            return masks.first(lengths), ones & (j < count)
        return masks.prefix(lengths, align), ones & ((j < count) | (j <= at))
    if name == "document":
        ids = np.sort(rng.integers(0, 4, size=(*batch, kv_len)), axis=-1)
        query_ids = rng.integers(0, 5, size=(*batch, q_len))
        expand = (1,) * (len(lead) - len(batch))
        same = query_ids.reshape(*batch, *expand, q_len, 1) == ids.reshape(*batch, *expand, 1, kv_len)
        return masks.document(ids, query_ids), ones & same
    array = rng.random((*lead[-1:], q_len, kv_len)) < 0.7
    return masks.dense(array), ones & array


def _build_change(
    name: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Build the arguments for a score modification, sink or scale, and those of the definition."""
    *lead, q_len, kv_len = shape
    heads = lead[-1] if lead else 1
    ahead = np.arange(kv_len)[None, :] - np.arange(q_len)[:, None] - (kv_len - q_len)
    per_head = (heads, 1, 1) if lead else (1, 1)
    if name == "softcap":
        return {"score_mod": score_mods.softcap(2.5)}, {"cap": 2.5}
    if name == "alibi":
        slopes = score_mods.alibi_slopes(heads).reshape(per_head)
        return {"score_mod": score_mods.alibi(align="lower_right")}, {"biases": [-slopes * np.abs(ahead)]}
    if name == "bias":
        array = rng.normal(size=(heads, q_len, kv_len) if lead else (q_len, kv_len)).astype(np.float32)
        array[rng.random(array.shape) < 0.2] = -np.inf
        return {"score_mod": score_mods.bias(array)}, {"biases": [array]}
    if name == "relative_bias":
        table = rng.normal(size=(32, heads)).astype(np.float32)
        bucket = score_mods.relative_buckets(ahead, buckets=32, max_distance=128, bidirectional=True)
        bias = np.moveaxis(table[bucket], -1, 0).reshape(*per_head[:-2], q_len, kv_len)
        return {"score_mod": score_mods.relative_bias(table, bidirectional=True, align="lower_right")}, {
            "biases": [bias]
        }
    if name == "sink":
        sink = rng.normal(size=(heads,) if lead else ()).astype(np.float32) * 3
        return {"sink": sink}, {"sink": sink}
    if name.startswith("scale "):
        scale = float(name.removeprefix("scale "))
        return {"scale": scale}, {"scale": scale}
    return {}, {}


def visible_keys(allowed: Array, kv_lead: tuple[int, ...]) -> Array:
    """Return which keys at least one query may attend to.

    Args:
        allowed: Booleans (*lead, q_len, kv_len), True = attend.
        kv_lead: The leading shape of the keys; grouped heads share a key head.

    Returns:
        Booleans (*kv_lead, kv_len).
    """
    visible = allowed.any(-2)
    if visible.shape[:-1] == kv_lead:
        return visible
    return visible.reshape(*kv_lead, visible.shape[-2] // kv_lead[-1], visible.shape[-1]).any(-2)


def _poison_masked(
    key: Array, value: Array, allowed: Array, kv_lead: tuple[int, ...], rng: np.random.Generator
) -> bool:
    """Put NaN, inf or 1e30 into keys and values that no query may attend to; return False if there are none."""
    masked = ~visible_keys(allowed, kv_lead)
    if not masked.any():
        return False
    poison = rng.choice([np.nan, np.inf, -np.inf, 1e30], size=int(masked.sum()))
    key[masked] = poison[:, None]
    value[masked] = poison[:, None]
    return True


def _lay_out(array: Array, layout: str) -> Array:
    """Copy an array into another memory layout."""
    if layout == "transposed":
        return array.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if layout == "expanded" and array.ndim > 2:
        # Stride 0: every batch entry or head is the first one.
        return np.broadcast_to(array[:1], array.shape)
    if layout == "sliced":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
        wide[..., 1::2] = array
        return wide[..., 1::2]
    if layout == "reversed":
        return array[..., ::-1, :].copy()[..., ::-1, :]
    return array
