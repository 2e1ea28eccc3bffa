"""Functions with one planted fault each: the kit names that fault and no other."""

from __future__ import annotations

import numpy as np
import pytest

from regard.testing import check_conformance
from regard.testing.conformance.known_faults import FAULTS
from tests.helpers.nightly import keep_in_ci

pytestmark = pytest.mark.slow  # no engine is tested here


def attention(
    query, key, value, mask=None, scale=None, is_causal=False, *, compute_scores=None, mask_scores=None,
    softmax=None, product=None, allow=None, finish=None,
):  # fmt: skip
    """A correct function in NumPy, independent of the kit; a fault replaces one of its parts."""
    if key.shape[-3] not in (0, query.shape[-3]):
        key, value = (np.repeat(x, query.shape[-3] // x.shape[-3], axis=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (compute_scores or (lambda q, k, s: q @ k.swapaxes(-1, -2) * s))(query, key, scale)
    allowed = (allow or build_allowed)(scores.shape, mask, is_causal)
    weights = (softmax or rows_softmax)((mask_scores or select_scores)(scores, allowed))
    output = (product or careful_product)(weights, allowed, value)
    return finish(output) if finish else output


def build_allowed(shape, mask, is_causal):
    allowed = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
    q_len, kv_len = shape[-2:]
    return allowed & np.tri(q_len, kv_len, kv_len - q_len, dtype=bool) if is_causal else allowed


def select_scores(scores, allowed):
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


def wrap(change):
    """The correct function with its arguments or its return value changed."""

    def broken(query, key, value, mask=None, scale=None, is_causal=False):
        return change(query, key, value, mask, scale, is_causal)

    return broken


def with_scale(factor):
    return wrap(
        lambda q, k, v, mask, scale, causal: attention(
            q, k, v, mask, factor(q, k, v) if scale is None else scale, causal
        )
    )


def with_mask(change):
    return wrap(
        lambda q, k, v, mask, scale, causal: attention(
            q, k, v, None if mask is None else change(mask), scale, causal
        )
    )


def with_triangle(build):
    def allow(shape, mask, is_causal):
        allowed = build_allowed(shape, mask, False)
        return allowed & build(*shape[-2:]) if is_causal else allowed

    return with_part(allow=allow)


def after_softmax(scores, allowed):
    weights = rows_softmax(scores)
    return np.where(allowed, weights, 0)


def split(array, heads):
    return array.reshape(
        array.shape[0], heads, array.shape[1], array.shape[2] // heads
    )  # without a transpose


def with_packed_heads(split_heads, join_heads):
    def broken(query, key, value, num_heads, mask=None):
        heads = (split_heads(x, num_heads) for x in (query, key, value))
        return join_heads(attention(*heads, mask), query.shape[0])

    return broken


def split_correctly(array, heads):
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads).swapaxes(1, 2)


def join_correctly(array, batch):
    array = array.swapaxes(1, 2)
    return array.reshape(*array.shape[:2], array.shape[2] * array.shape[3])


def in_place(query, key, value, mask=None):
    output = attention(query, key, value, mask)
    query *= query.shape[-1] ** -0.5
    return output


def with_dropout(query, key, value, mask=None, rng=np.random.default_rng(0)):  # noqa: B008
    output = attention(query, key, value, mask)
    return output * (rng.random(output.shape) > 0.5) * 2


def with_groups(repeat):
    def broken(query, key, value, mask=None):
        group = query.shape[1] // key.shape[1]
        return attention(query, *(repeat(x, group) for x in (key, value)), mask)

    return broken


def compute_weights(query, key, value, mask=None):
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
    # name of the fault: (function, fields of its convention)
    "scale missing": (with_scale(lambda q, k, v: 1.0), LOWER),
    "scale by head_dim": (with_scale(lambda q, k, v: 1 / q.shape[-1]), LOWER),
    "scale inverted": (with_scale(lambda q, k, v: q.shape[-1] ** 0.5), LOWER),
    "scale of another axis": (with_scale(lambda q, k, v: k.shape[-2] ** -0.5 if k.size else 1.0), LOWER),
    "scale twice": (with_part(compute_scores=lambda q, k, s: (q * s) @ (k * s).swapaxes(-1, -2)), LOWER),
    "scale ignored": (wrap(lambda q, k, v, m, s, c: attention(q, k, v, m, None, c)), LOWER),
    "scale 0 ignored": (wrap(lambda q, k, v, m, s, c: attention(q, k, v, m, s or None, c)), LOWER),
    "scale after softmax": (
        wrap(lambda q, k, v, m, s, c: attention(q, k, v, m, 1.0, c) * (s if s is not None else q.shape[-1] ** -0.5)),
        LOWER,
    ),
    "mask inverted": (with_mask(np.logical_not), LOWER),
    "mask ignored": (with_mask(lambda mask: None), LOWER),
    "mask transposed": (with_mask(lambda mask: mask.swapaxes(-1, -2)), LOWER),
    "mask of first batch entry": (with_mask(lambda mask: mask[:1] if mask.ndim == 4 else mask), LOWER),
    "mask of first head": (with_mask(lambda mask: mask[:, :1] if mask.ndim == 4 else mask), LOWER),
    "mask of first query": (with_mask(lambda mask: mask[..., :1, :]), LOWER),
    "masked scores 0": (
        with_part(
            mask_scores=lambda scores, allowed: np.where(allowed, scores, 0),
            product=lambda weights, allowed, value: careful_product(weights, np.ones_like(allowed), value),
        ),
        LOWER,
    ),
    "mask added": (
        with_part(
            mask_scores=lambda scores, allowed: scores + allowed,
            product=lambda weights, allowed, value: careful_product(weights, np.ones_like(allowed), value),
        ),
        LOWER,
    ),
    "masked weights not renormalised": (with_part(mask_scores=after_softmax, softmax=lambda weights: weights), LOWER),
    "causal corner": (with_triangle(lambda q_len, kv_len: np.tri(q_len, kv_len, dtype=bool)), LOWER),
    "causal ignored": (with_triangle(lambda q_len, kv_len: True), LOWER),
    "causal sees one ahead": (with_triangle(lambda q, k: np.tri(q, k, k - q + 1, dtype=bool)), LOWER),
    "causal misses itself": (with_triangle(lambda q, k: np.tri(q, k, k - q - 1, dtype=bool)), LOWER),
    "causal sees the future": (with_triangle(lambda q, k: np.tri(k, q, q - k, dtype=bool).T), LOWER),
    "causal always": (
        with_part(allow=lambda shape, mask, is_causal: build_allowed(shape, mask, True)), LOWER
    ),
    "causal ignored if masked": (
        wrap(lambda q, k, v, m, s, c: attention(q, k, v, m, s, c and m is None)), LOWER
    ),
    "mask ignored if causal": (wrap(lambda q, k, v, m, s, c: attention(q, k, v, None if c else m, s, c)), LOWER),
    "softmax in base 2": (with_part(softmax=lambda scores: rows_softmax(scores * np.log(2))), LOWER),
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
    "masked key leaks": (with_part(mask_scores=lambda scores, allowed: scores + np.where(allowed, 0, -np.inf)), LOWER),
    "masked value leaks": (with_part(product=plain_product), LOWER),
    "live NaN lost": (with_part(finish=lambda output: np.nan_to_num(output, posinf=np.inf)), LOWER),
    "heads mixed": (with_packed_heads(split, join_correctly), PACKED),
    "heads interleaved": (
        with_packed_heads(
            lambda x, h: x.reshape(*x.shape[:2], x.shape[2] // h, h).transpose(0, 3, 1, 2), join_correctly
        ),
        PACKED,
    ),
    "heads reversed": (with_packed_heads(split_correctly, lambda x, batch: join_correctly(x[:, ::-1], batch)), PACKED),
    "positions and heads swapped": (attention, {"layout": "b n h d", "causal_argument": None}),
    "groups tiled": (with_groups(lambda x, group: np.tile(x, (1, group, 1, 1))), {"grouped": True}),
    "first key head": (
        with_groups(lambda x, group: np.repeat(x[:, :1], x.shape[1] * group, axis=1)), {"grouped": True}
    ),
    "key and value swapped": (wrap(lambda q, k, v, m, s, c: attention(q, v, k, m, s, c)), LOWER),
    "query and key swapped": (wrap(lambda q, k, v, m, s, c: attention(k, q, v, m, s, c)), LOWER),
    "weights returned": (compute_weights, {}),
    "pair swapped": (lambda q, k, v, mask=None: (compute_weights(q, k, v, mask), attention(q, k, v, mask)), {}),
    "weights transposed": (
        lambda q, k, v, mask=None: (attention(q, k, v, mask), compute_weights(q, k, v, mask).swapaxes(-1, -2)), {}
    ),
    "arguments changed": (in_place, {}),
    "nondeterministic": (with_dropout, {}),
}  # fmt: skip


def test_every_known_fault_has_a_broken_function():
    on_tensors = {"half precision", *(fault.name for fault in FAULTS if fault.name.startswith("gradient"))}
    assert {fault.name for fault in FAULTS} - on_tensors == BROKEN.keys() - {
        "arguments changed",
        "nondeterministic",
    }


# One or two of each kind.
SAMPLE = (
    *("scale missing", "scale 0 ignored", "mask inverted", "mask of first head", "masked scores 0"),
    *("causal corner", "causal misses itself", "mask ignored if causal", "softmax over queries", "no shift"),
    *("last block dropped", "empty rows NaN", "masked value leaks", "live NaN lost", "heads mixed"),
    *("groups tiled", "key and value swapped", "pair swapped", "nondeterministic"),
)


@pytest.mark.parametrize("name", keep_in_ci(BROKEN, *SAMPLE))
def test_the_planted_fault_is_the_only_finding(name):
    fn, described = BROKEN[name]
    report = check_conformance(fn, **described)
    assert [finding.kind for finding in report.findings] == [name], str(report)


def test_a_correct_function_has_no_findings():
    report = check_conformance(attention, causal="lower_right", grouped=True)
    assert report.ok, str(report)
    assert {row.verdict for row in report.capabilities} == {"yes", "skipped"}
