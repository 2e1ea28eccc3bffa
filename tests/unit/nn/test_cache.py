"""The cache: decoding in any chunks equals the uncached pass under the error rule, and a token costs O(1)."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import Mask, ScoreMod, alibi, causal, padding, relative_bias, sliding_window, softcap
from regard.masks import dense, document, first, prefix
from regard.nn import KVCache, MultiheadAttention
from regard.score_mods import bias
from regard.testing import assert_matches

TOKENS = 23
EMBED = 16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build_layer(**options) -> MultiheadAttention:
    torch.manual_seed(1)
    layer = MultiheadAttention(EMBED, 4, num_kv_heads=2, **options).requires_grad_(False)
    for parameter in layer.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return layer


PLAIN, ROTARY = build_layer(sink="learned"), build_layer(rope="half")


def check_output(found, layer, x, **arguments):
    """Compare the cached output with the uncached one in float64: at most twice the error of float32."""
    right = copy.deepcopy(layer).double()(x.double(), **arguments)
    size = float(right.abs().max())
    assert_matches(found, right, layer(x, **arguments), dtype="float32", magnitude=max(size, 1.0))


def in_chunks(layer, x, sizes, cache, **arguments):
    return torch.cat([layer(piece, cache=cache, **arguments) for piece in x.split(sizes, 1)], 1)


def chunkings(total: int):
    """Sizes that add up to the total, some of them 0."""
    cuts = st.lists(st.integers(0, total), max_size=8).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, total], strict=True)])


# -- Any chunking ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=chunkings(TOKENS),
    window=st.none() | st.integers(1, TOKENS + 2),
    keep=st.integers(0, 5),
    layer=st.sampled_from([PLAIN, ROTARY]),
    mods=st.sampled_from([(), (alibi(),), (softcap(1.0), alibi())]),
)
def test_18_any_chunking_equals_the_uncached_pass(sizes, window, keep, layer, mods):
    x, mask = draw(2, TOKENS, EMBED), causal()
    if window is not None:
        mask = causal() & (sliding_window(window) | first(keep))
    cache = KVCache() if window is None else KVCache(window=window, keep_first=keep)
    found = in_chunks(layer, x, sizes, cache, mask=causal(), score_mod=mods)
    check_output(found, layer, x, mask=mask, score_mod=mods)
    assert len(cache) == TOKENS and cache.lengths.tolist() == [TOKENS] * 2
    if window is not None:
        assert cache.columns <= keep + 2 * window + max(sizes)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    side=st.sampled_from(["left", "right"]),
    sizes=chunkings(TOKENS - 9),
    window=st.none() | st.integers(1, 12),
    keep=st.integers(0, 3),
    layer=st.sampled_from([PLAIN, ROTARY]),
    mods=st.sampled_from([(), (alibi(),), (softcap(1.0), alibi())]),
)
def test_18_prompts_of_different_lengths(lengths, side, sizes, window, keep, layer, mods):
    x, most = draw(3, TOKENS, EMBED), max(lengths)
    mask = causal() if window is None else causal() & (sliding_window(window) | first(keep))
    cache = KVCache() if window is None else KVCache(window=window, keep_first=keep)
    prompt = torch.full((3, most, EMBED), 1e3)  # the content of padding must not matter
    real = padding(lengths, side=side).to_dense(3, 1, 1, most).reshape(3, most)
    prompt[torch.tensor(real)] = torch.cat([x[i, :n] for i, n in enumerate(lengths)])
    out = layer(prompt, mask=causal(), score_mod=mods, cache=cache, padding=padding(lengths, side=side))
    rest = torch.stack([x[i, n : n + sum(sizes)] for i, n in enumerate(lengths)])
    more = in_chunks(layer, rest, sizes, cache, mask=causal(), score_mod=mods)
    for i, n in enumerate(lengths):
        row = torch.cat([out[i][torch.tensor(real[i])], more[i]])
        check_output(row[None], layer, x[i : i + 1, : n + sum(sizes)], mask=mask, score_mod=mods)
    assert cache.lengths.tolist() == [n + sum(sizes) for n in lengths]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    window=st.none() | st.integers(1, 6),
    layer=st.sampled_from([PLAIN, ROTARY]),
)
def test_18_cropping(data, window, layer):
    # Append tokens, crop them, and append others: only the last ones count.
    x, noise = draw(2, TOKENS, EMBED), draw(2, TOKENS, EMBED, seed=5)
    cache = KVCache(window=window, keep_first=2 if window else 0)
    mask = causal() if window is None else causal() & (sliding_window(window) | first(2))
    found = torch.zeros(2, TOKENS, EMBED)
    while len(cache) < TOKENS:
        at = len(cache)
        astray = data.draw(st.integers(0, 3))
        if astray:
            layer(noise[:, at : at + astray], mask=causal(), cache=cache)
            try:
                cache.crop(at)
            except regard.ArgumentError:
                assert window is not None and cache.columns < at + astray
                return
            assert len(cache) == at
        step = data.draw(st.integers(1, 5))
        found[:, at : at + step] = layer(x[:, at : at + step], mask=causal(), cache=cache)
    check_output(found, layer, x, mask=mask)


def test_cropping_batch_entries_separately():
    x, cache = draw(2, TOKENS, EMBED), KVCache()
    ROTARY(torch.cat([x[:, :4], x[:, 10:14]], 1), mask=causal(), cache=cache)
    cache.crop([4, 2])
    assert repr(cache) == "KVCache([4, 2] tokens)"
    tokens = torch.stack([x[0, 4:9], x[1, 2:7]])
    found = ROTARY(tokens, mask=causal(), cache=cache)
    whole = ROTARY(x, mask=causal())
    torch.testing.assert_close(found[0], whole[0, 4:9])
    torch.testing.assert_close(found[1], whole[1, 2:7])
    cache.crop(0)
    torch.testing.assert_close(ROTARY(x, mask=causal(), cache=cache), whole)


# -- Masks and score modifications of the sequence -------------------------------------------------------------


@dataclass(frozen=True)
class Even(Mask):
    """Keys at even positions."""

    def allows(self, frame, q_idx, kv_idx, xp):
        return xp.broadcast_to(xp.asarray(kv_idx % 2 == 0), (1, len(q_idx), len(kv_idx)))


@dataclass(frozen=True)
class Nearer(ScoreMod):
    """Scores divided by the distance."""

    def apply(self, scores, frame, q_idx, kv_idx, xp):
        away = np.abs(q_idx[:, None] - kv_idx) + 1.0
        return scores / xp.asarray(away, dtype=scores.dtype)


n = TOKENS
SAID = {
    "causal": ({"mask": causal()}, False),
    "lower right": ({"mask": causal(align="lower_right")}, False),
    "window by head": ({"mask": sliding_window([3, 5, 2, 9])}, False),
    "prefix": ({"mask": prefix(4)}, False),
    "documents": ({"mask": causal() & document(np.repeat([0, 1, 2], [9, 6, n - 15]))}, True),
    "an array": ({"mask": causal() & dense(torch.arange(n)[:, None] * torch.arange(n) % 3 == 0)}, True),
    "one of ours": ({"mask": causal() & (Even() | sliding_window(1))}, False),
    "not the first": ({"mask": causal() & ~first(1) | sliding_window(1)}, False),
    "alibi": ({"mask": causal(), "score_mod": alibi()}, False),
    "relative": (
        {"mask": causal(), "score_mod": relative_bias(draw(8, 4), bidirectional=False)},
        False,
    ),
    "bias": ({"mask": causal(), "score_mod": bias(draw(4, n, n))}, True),
    "a change of ours": ({"mask": causal(), "score_mod": [Nearer(), softcap(1.0)]}, False),
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_masks_and_score_mods_of_the_sequence_apply_to_its_chunks(name, ragged):
    arguments, whole = SAID[name]
    x, cache = draw(2, n, EMBED), KVCache()
    right, B = PLAIN(x, need_matrix=True, **arguments)
    if whole:  # its arrays have the length of the sequence, so the last chunk must end there
        noise = {"mask": causal()}
        PLAIN(x[:, : n - 5], cache=cache, **noise)
        if ragged:
            cache.crop([n - 5, n - 9])
            PLAIN(x[:, n - 9 : n - 5], cache=cache, padding=np.array([[False] * 4, [True] * 4]), **noise)
            assert cache.lengths.tolist() == [n - 5] * 2
        found, A = PLAIN(x[:, n - 5 :], cache=cache, need_matrix=True, **arguments)
        torch.testing.assert_close(found, right[:, n - 5 :], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(A.to_dense(), B[:, :, n - 5 :], atol=2e-6, rtol=1e-5)
        return
    lengths = [6, 4] if ragged else [6, 6]
    PLAIN(x[:, :6], mask=causal(), cache=cache, padding=padding(lengths) if ragged else None)
    tokens = torch.stack([x[i, k : k + 7] for i, k in enumerate(lengths)])
    if name == "prefix":
        cache = KVCache()
        PLAIN(x[:, :6], cache=cache, padding=padding(lengths) if ragged else None, **arguments)
    found, A = PLAIN(tokens, cache=cache, need_matrix=True, **arguments)
    for i, k in enumerate(lengths):
        torch.testing.assert_close(found[i], right[i, k : k + 7], atol=2e-6, rtol=1e-5)
        weights = A.to_dense()[i]
        torch.testing.assert_close(weights[:, :, : k + 7], B[i, :, k : k + 7, : k + 7], atol=2e-6, rtol=1e-5)
        assert not weights[:, :, k + 7 :].any()


def test_one_token_needs_no_mask():
    x, cache, layer = draw(1, 200, EMBED), KVCache(), build_layer()
    layer(x[:, :199], mask=causal(), cache=cache)
    _, A = layer(x[:, 199:], mask=causal(), cache=cache, need_matrix=True)
    assert A.kernel.endswith("no mask") and A.shape == (1, 4, 1, 200)


def test_unbatched_input_with_bias_kv():
    layer, x = build_layer(bias_kv=True, rope="interleaved"), draw(1, TOKENS, EMBED)
    right, B = layer(x, mask=causal(), need_matrix=True)
    cache = KVCache()
    for start in range(0, TOKENS, 4):
        found, A = layer(x[0, start : start + 4], mask=causal(), cache=cache, need_matrix=True)
        torch.testing.assert_close(found, right[0, start : start + 4], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(A.to_dense(), B[0, :, start:], atol=2e-6, rtol=1e-5)


def test_gradients_flow_through_the_cache():
    layer, x = build_layer(rope="half").requires_grad_().double(), draw(2, 9, EMBED).double()
    table = draw(8, 4, seed=3).double()

    def gradients(run):
        layer.zero_grad()
        given, learnt = x.clone().requires_grad_(), table.clone().requires_grad_()
        run(given, relative_bias(learnt, bidirectional=False)).square().sum().backward()
        return [given.grad, learnt.grad, *(p.grad.clone() for p in layer.parameters())]

    mask = causal() & sliding_window(2)
    right = gradients(lambda x, change: layer(x, mask=mask, score_mod=change))
    sizes = [3, 1, 1, 4]
    for window in (None, 2):
        found = gradients(
            lambda x, change, w=window: in_chunks(
                layer, x, sizes, KVCache(window=w), mask=mask, score_mod=change
            )
        )
        for mine, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_rejected_call_leaves_the_cache_unchanged():
    x = draw(2, TOKENS, EMBED)
    for cache in (KVCache(), KVCache(window=3, keep_first=1)):
        ROTARY(x[:, :12], mask=causal(), cache=cache)
        for _ in range(2):
            with pytest.raises(regard.ArgumentError, match="dense"):
                ROTARY(x[:, 12:14], mask=causal() & dense(torch.ones(3, 3).bool()), cache=cache)
        assert len(cache) == 12
        mask = causal() if cache.mask is None else cache.mask
        found = ROTARY(x[:, 12:], mask=causal(), cache=cache)
        torch.testing.assert_close(found, ROTARY(x, mask=mask)[:, 12:], atol=2e-6, rtol=1e-5)


# -- Cost ----------------------------------------------------------------------------------------------------


def test_appending_a_token_copies_only_that_token():
    key = torch.ones(2, 1, 1, 4)
    cache, places = KVCache(), set()
    for i in range(256):
        cache.append(i * key, -i * key)
        places.add(cache._key.data_ptr())
        assert cache.key.data_ptr() == cache._key.data_ptr()  # a view, not a copy
    assert len(places) == 3  # capacities of 64, 128 and 256 tokens
    assert torch.equal(cache.key[1, 0, :, 0], torch.arange(256.0))
    assert torch.equal(cache.value[0, 0, :, 3], -torch.arange(256.0))


def test_a_window_bounds_memory_and_moves_each_token_once():
    key, moves = torch.ones(1, 1, 1, 4), 0
    cache = KVCache(window=16, keep_first=3)
    cache.append(torch.ones(1, 1, 1000, 4), torch.ones(1, 1, 1000, 4))
    for i in range(1000, 1500):
        buffer = cache._key
        cache.append(i * key, i * key)
        moves += buffer is not cache._key
        assert cache.columns <= 3 + 2 * 16 and (i < 1001 or cache._key.shape[2] <= 3 + 3 * 16)
    assert moves <= 1 + 500 / 16
    assert cache.positions[0, :3].tolist() == [0, 1, 2] and cache.positions[0, -16:].tolist() == list(
        range(1484, 1500)
    )
    assert cache.key[0, 0, -16:, 0].tolist() == list(range(1484, 1500))


def test_a_returned_matrix_does_not_change():
    for window in (None, 2):
        x, cache = draw(1, 30, EMBED), KVCache(window=window)
        _, A = ROTARY(x[:, :5], mask=causal(), cache=cache, need_matrix=True)
        before = A.to_dense()
        cache.crop(4)
        for i in range(5, 30):
            ROTARY(x[:, i : i + 1], mask=causal(), cache=cache)
        assert torch.equal(A.to_dense(), before)


# -- Errors ---------------------------------------------------------------------------------------------------


def filled(**options) -> KVCache:
    cache = KVCache(**options)
    for _ in range(40):
        cache.append(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))
    return cache


INVALID = {
    "window of nothing": (lambda: KVCache(window=0), r"window=0.*at least 1 token.*KVCache\(\) keeps every"),
    "a part of a token": (lambda: KVCache(window=2.5), "window=2.5"),
    "first without window": (lambda: KVCache(keep_first=4), "keep_first=4.*used with a window"),
    "crop forward": (lambda: filled().crop(41), r"length 41, after \[40, 40\] tokens.*keeps the first"),
    "crop below": (lambda: filled().crop([3, -1]), "from 0 to the number of tokens received"),
    "crop into evicted tokens": (
        lambda: filled(window=4).crop(20),
        "evicted .* tokens.*or more.*larger window",
    ),
    "another batch": (
        lambda: filled().append(torch.ones(3, 1, 1, 4), torch.ones(3, 1, 1, 4)),
        r"batch 3, kv_heads 1.*cached tokens, \(batch 2, kv_heads 1, n 40, head_dim 4\).*separate KVCache",
    ),
    "padding of another length": (
        lambda: filled().append(*torch.ones(2, 2, 1, 3, 4), real=np.ones((2, 2), bool)),
        r"real of shape \(2, 2\).*\(batch 2, n 3\).*for padding",
    ),
    "another dtype": (
        lambda: filled().append(torch.ones(2, 1, 1, 4).double(), torch.ones(2, 1, 1, 4)),
        "key .*float64 on cpu.*float32 on cpu",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise_an_error_with_a_hint(name):
    call, message = INVALID[name]
    with pytest.raises(regard.ArgumentError, match=message):
        call()


def test_repr_fits_one_line():
    assert repr(KVCache()) == "KVCache(0 tokens)"
    assert repr(filled(window=4)) == "KVCache(40 tokens, 8 of them cached, window=4, keep_first=0)"
