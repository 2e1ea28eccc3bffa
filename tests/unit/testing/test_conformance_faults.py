"""Functions broken on purpose, one fault each: the kit names it, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from regard.testing import check_conformance
from regard.testing.conformance.known_faults import FAULTS

pytestmark = pytest.mark.slow  # faults of engines are not found here


def attention(
    query, key, value, mask=None, scale=None, is_causal=False, *, scores_of=None, hide=None, softmax=None, product=None,
    allow=None, finish=None,
):  # fmt: skip
    """A right function in NumPy, written apart from the kit's; a fault replaces one of its parts."""
    if key.shape[-3] not in (0, query.shape[-3]):
        key, value = (np.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (scores_of or (lambda q, k, s: q @ k.swapaxes(-1, -2) * s))(query, key, scale)
    allowed = (allow or allowed_of)(scores.shape, mask, is_causal)
    weights = (softmax or rows_softmax)((hide or select)(scores, allowed))
    output = (product or careful_product)(weights, allowed, value)
    return finish(output) if finish else output


def allowed_of(shape, mask, is_causal):
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    q_len, kv_len = shape[-2:]
    return allowed & np.tri(q_len, kv_len, kv_len - q_len, dtype=bool) if is_causal else allowed


def select(scores, allowed):
    return np.where(allowed, scores, -np.inf)


def rows_softmax(scores, axis=-1):
    top = np.max(scores, axis=axis, keepdims=True, initial=-np.inf)
    exponentials = np.exp(scores - np.where(top == -np.inf, 0, top))
    total = exponentials.sum(axis=axis, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def careful_product(weights, allowed, value):
    output = weights @ np.where(np.isfinite(value), value, 0)
    for index in np.argwhere(~np.isfinite(value)):
        *lead, key, column = index
        rows = allowed[(*lead, slice(None), key)]
        output[(*lead, rows, column)] += weights[(*lead, rows, key)] * value[tuple(index)]
    return output


def with_part(**parts):
    def broken(query, key, value, mask=None, scale=None, is_causal=False):
        return attention(query, key, value, mask, scale, is_causal, **parts)

    return broken


def changed(change):
    """The right function with its arguments, or what it returns, changed."""

    def broken(query, key, value, mask=None, scale=None, is_causal=False):
        return change(query, key, value, mask, scale, is_causal)

    return broken


def scaled_by(factor):
    return changed(
        lambda q, k, v, mask, scale, causal: attention(
            q, k, v, mask, factor(q, k, v) if scale is None else scale, causal
        )
    )


def masked_by(change):
    return changed(
        lambda q, k, v, mask, scale, causal: attention(
            q, k, v, None if mask is None else change(mask), scale, causal
        )
    )


def triangle(build):
    def allow(shape, mask, is_causal):
        allowed = allowed_of(shape, mask, False)
        return allowed & build(*shape[-2:]) if is_causal else allowed

    return with_part(allow=allow)


def after_softmax(scores, allowed):
    weights = rows_softmax(scores)
    return np.where(allowed, weights, 0)


def split(array, heads):
    return array.reshape(
        array.shape[0], heads, array.shape[1], array.shape[2] // heads
    )  # not moved by a transpose


def packed(split_heads, join_heads):
    def broken(query, key, value, num_heads, mask=None):
        heads = (split_heads(x, num_heads) for x in (query, key, value))
        return join_heads(attention(*heads, mask), query.shape[0])

    return broken


def right_split(array, heads):
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads).swapaxes(1, 2)


def right_join(array, batch):
    array = array.swapaxes(1, 2)
    return array.reshape(*array.shape[:2], array.shape[2] * array.shape[3])


def in_place(query, key, value, mask=None):
    output = attention(query, key, value, mask)
    query *= query.shape[-1] ** -0.5
    return output


def with_dropout(query, key, value, mask=None, rng=np.random.default_rng(0)):  # noqa: B008
    output = attention(query, key, value, mask)
    return output * (rng.random(output.shape) > 0.5) * 2


def grouped_by(repeat):
    def broken(query, key, value, mask=None):
        group = query.shape[1] // key.shape[1]
        return attention(query, *(repeat(x, group) for x in (key, value)), mask)

    return broken


def weights_of(query, key, value, mask=None):
    width = key.shape[-2]
    identity = np.broadcast_to(np.eye(width), (*key.shape[:-1], width))
    return attention(query, key, identity, mask)


def no_shift(scores):
    exponentials = np.exp(scores)
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / np.where(total == 0, 1, total)


def counting_padded_block(scores, block=16):
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    exponentials = np.exp(scores - top)
    total = exponentials.sum(-1, keepdims=True) + (-scores.shape[-1] % block) * np.exp(-top)
    return exponentials / np.where(total == 0, 1, total)


def uniform_when_empty(scores):
    return rows_softmax(np.where(np.isneginf(scores), -1e9, scores))


def nan_when_empty(scores):
    return np.where(
        np.isneginf(scores).all(-1, keepdims=True) & (scores.shape[-1] > 0), np.nan, rows_softmax(scores)
    )


def plain_product(weights, allowed, value):
    return weights @ value


def nan_rows_shown(weights, allowed, value):
    return careful_product(weights, allowed | np.isnan(weights), value)


def without_last_block(query, key, value, mask=None, block=32):
    kept = key.shape[-2] // block * block or key.shape[-2]
    mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., :kept]
    return attention(query, key[..., :kept, :], value[..., :kept, :], mask)


LOWER, PACKED = {"causal": "lower_right"}, {"layout": "b n (h d)"}

BROKEN = {
    # name of the fault: (function, what is said of it)
    "scale missing": (scaled_by(lambda q, k, v: 1.0), LOWER),
    "scale by head_dim": (scaled_by(lambda q, k, v: 1 / q.shape[-1]), LOWER),
    "scale inverted": (scaled_by(lambda q, k, v: q.shape[-1] ** 0.5), LOWER),
    "scale of another axis": (scaled_by(lambda q, k, v: k.shape[-2] ** -0.5 if k.size else 1.0), LOWER),
    "scale twice": (with_part(scores_of=lambda q, k, s: (q * s) @ (k * s).swapaxes(-1, -2)), LOWER),
    "scale ignored": (changed(lambda q, k, v, m, s, c: attention(q, k, v, m, None, c)), LOWER),
    "scale 0 as none": (changed(lambda q, k, v, m, s, c: attention(q, k, v, m, s or None, c)), LOWER),
    "scale after softmax": (
        changed(lambda q, k, v, m, s, c: attention(q, k, v, m, 1.0, c) * (s if s is not None else q.shape[-1] ** -0.5)),
        LOWER,
    ),
    "mask inverted": (masked_by(np.logical_not), LOWER),
    "mask ignored": (masked_by(lambda mask: None), LOWER),
    "mask transposed": (masked_by(lambda mask: mask.swapaxes(-1, -2)), LOWER),
    "mask of first batch entry": (masked_by(lambda mask: mask[:1] if mask.ndim == 4 else mask), LOWER),
    "mask of first head": (masked_by(lambda mask: mask[:, :1] if mask.ndim == 4 else mask), LOWER),
    "mask of first query": (masked_by(lambda mask: mask[..., :1, :]), LOWER),
    "hidden scores 0": (
        with_part(
            hide=lambda scores, allowed: np.where(allowed, scores, 0),
            product=lambda weights, allowed, value: careful_product(weights, np.ones_like(allowed), value),
        ),
        LOWER,
    ),
    "mask added": (
        with_part(
            hide=lambda scores, allowed: scores + allowed,
            product=lambda weights, allowed, value: careful_product(weights, np.ones_like(allowed), value),
        ),
        LOWER,
    ),
    "hidden weights not renormalised": (with_part(hide=after_softmax, softmax=lambda weights: weights), LOWER),
    "causal corner": (triangle(lambda q_len, kv_len: np.tri(q_len, kv_len, dtype=bool)), LOWER),
    "causal ignored": (triangle(lambda q_len, kv_len: True), LOWER),
    "causal sees one ahead": (triangle(lambda q, k: np.tri(q, k, k - q + 1, dtype=bool)), LOWER),
    "causal misses itself": (triangle(lambda q, k: np.tri(q, k, k - q - 1, dtype=bool)), LOWER),
    "causal sees the future": (triangle(lambda q, k: np.tri(k, q, q - k, dtype=bool).T), LOWER),
    "softmax over queries": (with_part(softmax=lambda scores: rows_softmax(scores, -2)), LOWER),
    "softmax over heads": (with_part(softmax=lambda scores: rows_softmax(scores, 1)), LOWER),
    "softmax over batch": (with_part(softmax=lambda scores: rows_softmax(scores, 0)), LOWER),
    "softmax over the matrix": (with_part(softmax=lambda scores: rows_softmax(scores, None)), LOWER),
    "softmax missing": (with_part(softmax=lambda scores: np.where(np.isneginf(scores), 0, scores)), LOWER),
    "no shift": (with_part(softmax=no_shift), LOWER),
    "one more in the denominator": (
        with_part(softmax=lambda scores: rows_softmax(np.insert(scores, scores.shape[-1], 0, -1))[..., :-1]), LOWER
    ),
    "padded block counted": (with_part(softmax=counting_padded_block), LOWER),
    "last block dropped": (without_last_block, {}),
    "empty rows NaN": (with_part(softmax=nan_when_empty, product=nan_rows_shown), LOWER),
    "empty rows attend": (
        with_part(
            softmax=uniform_when_empty,
            product=lambda weights, allowed, value: careful_product(weights, allowed | (weights > 0), value),
        ),
        LOWER,
    ),
    "masked key leaks": (with_part(hide=lambda scores, allowed: scores + np.where(allowed, 0, -np.inf)), LOWER),
    "masked value leaks": (with_part(product=plain_product), LOWER),
    "live NaN hidden": (with_part(finish=lambda output: np.nan_to_num(output, posinf=np.inf)), LOWER),
    "heads mixed": (packed(split, right_join), PACKED),
    "heads interleaved": (
        packed(lambda x, h: x.reshape(*x.shape[:2], x.shape[2] // h, h).transpose(0, 3, 1, 2), right_join), PACKED
    ),
    "heads reversed": (packed(right_split, lambda x, batch: right_join(x[:, ::-1], batch)), PACKED),
    "positions and heads swapped": (attention, {"layout": "b n h d", "causal_argument": None}),
    "groups tiled": (grouped_by(lambda x, group: np.tile(x, (1, group, 1, 1))), {"grouped": True}),
    "first key head": (
        grouped_by(lambda x, group: np.repeat(x[:, :1], x.shape[1] * group, axis=1)), {"grouped": True}
    ),
    "key and value swapped": (changed(lambda q, k, v, m, s, c: attention(q, v, k, m, s, c)), LOWER),
    "query and key swapped": (changed(lambda q, k, v, m, s, c: attention(k, q, v, m, s, c)), LOWER),
    "weights returned": (weights_of, {}),
    "pair swapped": (lambda q, k, v, mask=None: (weights_of(q, k, v, mask), attention(q, k, v, mask)), {}),
    "weights transposed": (
        lambda q, k, v, mask=None: (attention(q, k, v, mask), weights_of(q, k, v, mask).swapaxes(-1, -2)), {}
    ),
    "arguments changed": (in_place, {}),
    "chance": (with_dropout, {}),
}  # fmt: skip


def test_every_known_fault_has_a_broken_function():
    on_tensors = {"half precision", *(fault.name for fault in FAULTS if fault.name.startswith("gradient"))}
    assert {fault.name for fault in FAULTS} - on_tensors == BROKEN.keys() - {"arguments changed", "chance"}


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_named_and_alone(name):
    fn, described = BROKEN[name]
    report = check_conformance(fn, **described)
    assert [finding.name for finding in report.findings] == [name], str(report)


def test_the_right_function_has_no_findings():
    report = check_conformance(attention, causal="lower_right", grouped=True)
    assert report.ok, str(report)
    assert {row.verdict for row in report.capabilities} == {"yes", "skipped"}
