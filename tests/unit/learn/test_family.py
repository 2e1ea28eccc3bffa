"""The fifteen mechanisms against the library, in any order of work, and as their descriptions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import learn
from regard.errors import ArgumentError
from regard.learn import CheckedAttention, cat, family
from regard.positions import rope
from regard.score_mods import alibi_slopes, relative_bias, relative_buckets, softcap

CAT = json.loads((Path(__file__).parents[2] / "data/worked_examples.json").read_text("utf-8"))["cat"]

every_mechanism = pytest.mark.parametrize("mechanism", family.MECHANISMS, ids=lambda m: m.name)

NAMED = {mechanism.name: mechanism for mechanism in family.MECHANISMS}

# No deadline: the machine may be busy.
drawn = settings(deadline=None, max_examples=60)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def close(actual: Any, expected: Any) -> None:
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_names_of_the_fifteen_mechanisms():
    assert list(NAMED) == [
        "scaled_dot_product", "multi_head", "causal", "cross", "multi_query", "grouped_query", "relative_bias",
        "rotary", "alibi", "linear", "sliding_window", "block_sparse", "flash", "kv_cache", "sink_softcap",
    ]  # fmt: skip


Arrays = tuple[Any, Any, Any]


def product(A: Any, V: Any) -> tuple[Any, Any]:
    return A @ V, A.to_dense()


def by_heads(Q: Any, K: Any, V: Any, heads: int, kv_heads: int) -> tuple[Any, Any]:
    def split(x: Any, parts: int) -> Any:
        return np.stack(np.split(x, parts, axis=-1))

    A = regard.attention(split(Q, heads), split(K, kv_heads), enable_gqa=True)
    output, weights = product(A, split(V, kv_heads))
    return np.concatenate(list(output), axis=-1), weights


def one_head(Q: Any, K: Any, V: Any, **options: Any) -> tuple[Any, Any]:
    output, weights = product(regard.attention(Q[None], K[None], **options), V[None])
    return output[0], weights[0]


def rotary(Q: Any, K: Any, V: Any) -> tuple[Any, Any]:
    first = len(K) - len(Q)
    options: dict[str, Any] = {"layout": "half", "base": 100.0}
    Q, K = rope(Q, np.arange(first, len(K)), **options), rope(K, **options)
    return product(regard.attention(Q, K), V)


def block_sparse(Q: Any, K: Any, V: Any) -> tuple[Any, Any]:
    place = np.arange(len(K))
    ids, everywhere = place // 2, place == 4
    first = len(K) - len(Q)
    mask = regard.masks.document(ids, ids[first:])
    mask = mask | regard.masks.dense(everywhere[None, :] | everywhere[first:, None])
    return product(regard.attention(Q, K, mask=mask), V)


LOWER: dict[str, Any] = {"align": "lower_right"}

TABLE = NAMED["relative_bias"].options["table"]

LIBRARY: dict[str, Callable[..., tuple[Any, Any]]] = {
    "scaled_dot_product": one_head,
    "multi_head": lambda *qkv: by_heads(*qkv, 2, 2),
    "causal": lambda *qkv: one_head(*qkv, mask=regard.causal(**LOWER)),
    "cross": one_head,
    "multi_query": lambda *qkv: by_heads(*qkv, 2, 1),
    "grouped_query": lambda *qkv: by_heads(*qkv, 4, 2),
    "relative_bias": lambda *qkv: one_head(
        *qkv,
        score_mod=relative_bias(np.array(TABLE)[:, None], bidirectional=True, max_distance=6, **LOWER),
    ),
    "rotary": rotary,
    "alibi": lambda *qkv: one_head(*qkv, score_mod=regard.alibi([0.5], **LOWER)),
    "linear": lambda Q, K, V: product(regard.linear_attention(Q, K), V),
    "sliding_window": lambda *qkv: one_head(*qkv, mask=regard.sliding_window(3, **LOWER)),
    "block_sparse": block_sparse,
    "flash": one_head,
    "kv_cache": lambda *qkv: one_head(*qkv, mask=regard.causal(**LOWER)),
    "sink_softcap": lambda *qkv: one_head(*qkv, score_mod=softcap(2.0), sink=0.0),
}


@every_mechanism
def test_mechanism_agrees_with_the_library_on_the_example(mechanism):
    (output, weights), given = mechanism.run(), mechanism.example
    expected = LIBRARY[mechanism.name](given.Q, given.K, given.V)
    close(output, expected[0])
    close(weights, expected[1])


@every_mechanism
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 7), (1, 11)])
def test_mechanism_agrees_with_the_library_on_random_inputs(mechanism, q_len, kv_len):
    # The last query is aligned with the last key, as with align="lower_right" in regard.
    columns = mechanism.example.K.shape[-1]
    Q, K, V = draw(q_len, 4), draw(kv_len, columns, seed=1), draw(kv_len, columns, seed=2)
    output, weights = mechanism.build().forward(Q, K, V)
    expected = LIBRARY[mechanism.name](Q, K, V)
    close(output, expected[0])
    close(weights, expected[1])


@every_mechanism
def test_mechanism_accepts_a_batch_and_a_mask(mechanism):
    columns = mechanism.example.K.shape[-1]
    Q, K, V = draw(2, 3, 5, 4), draw(2, 3, 5, columns, seed=1), draw(2, 3, 5, columns, seed=2)
    mask = np.random.default_rng(3).random((5, 5)) < 0.6
    output, weights = mechanism.build().forward(Q, K, V, mask=mask)
    assert not weights[..., ~mask].any()
    for b, h in np.ndindex(2, 3):
        alone = mechanism.build().forward(Q[b, h], K[b, h], V[b, h], mask)
        close(output[b, h], alone[0])
        close(weights[b, h], alone[1])


MASKING = ["causal", "sliding_window", "block_sparse", "kv_cache"]


@pytest.mark.parametrize("name", MASKING)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_masked_keys_and_values_have_no_effect(name, poison):
    clean = NAMED[name].build()(cat.Q, cat.K, cat.V)
    V, K = cat.V.copy(), cat.K.copy()
    V[3], K[3] = poison, poison
    output, weights = NAMED[name].build()(cat.Q, K, V)
    blind = clean[1][:, 3] == 0
    assert blind.any()
    close(output[blind], clean[0][blind])
    close(weights[blind], clean[1][blind])


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("scaled_dot_product", "{}"),
        ("flash", "{}"),
        ("causal", "causal_{}"),
        ("kv_cache", "causal_{}"),
    ],
)
def test_published_numbers(name, fact):
    output, weights = NAMED[name].run()
    assert np.abs(weights - CAT[fact.format("weights")]).max() <= 0.5e-4
    assert np.abs(output - CAT[fact.format("output")]).max() <= 0.5e-4


def test_multi_head_splits_columns_as_in_the_book():
    assert NAMED["multi_head"].options == {"num_heads": CAT["heads"], "d_k": CAT["d_k_per_head"]}
    heads = learn.NumpyMultiHeadAttention(embed_dim=4, num_heads=2)
    heads.W_Q = heads.W_K = heads.W_V = heads.W_O = np.eye(4)
    split = [family.MultiHead(d_k=2, num_heads=2).split(x, 2) for x in (cat.Q, cat.K, cat.V)]
    close(split[1], heads.split_heads(cat.K))
    output, weights = NAMED["multi_head"].run()
    for h, columns in enumerate((slice(0, 2), slice(2, 4))):
        alone = CheckedAttention(d_k=2)(cat.Q[:, columns], cat.K[:, columns], cat.V[:, columns])
        close(output[:, columns], alone[0])
        close(weights[h], alone[1])


@drawn
@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_any_tile_size_gives_the_plain_numbers(q_len, kv_len, tile, seed, masked):
    Q, K, V = 4 * draw(q_len, 3, seed=seed), draw(kv_len, 3, seed=seed + 1), draw(kv_len, 2, seed=seed + 2)
    mask = np.random.default_rng(seed).random((q_len, kv_len)) < 0.4 if masked else None
    plain = CheckedAttention(d_k=3)(Q, K, V, mask)
    tiled = family.Flash(d_k=3, tile_size=tile)(Q, K, V, mask)
    close(tiled[0], plain[0])
    close(tiled[1], plain[1])


@pytest.mark.parametrize("tile", [1, 2, 5])
def test_tiles_of_large_scores_neither_overflow_nor_leak(tile):
    K = 1e3 * cat.K
    V = np.where(np.arange(5)[:, None] == 1, np.nan, cat.V)
    mask = np.arange(5) != 1  # masks the largest score of row 0 and the NaN value
    plain = CheckedAttention(d_k=4)(cat.Q, K, V, mask)
    tiled = family.Flash(d_k=4, tile_size=tile)(cat.Q, K, V, mask)
    close(tiled[0], plain[0])
    close(tiled[1], plain[1])


@drawn
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 99))
def test_any_chunk_size_gives_the_causal_numbers(chunks, seed):
    n = sum(chunks)
    Q, K, V = (draw(2, n, 3, seed=seed + i) for i in range(3))
    output, weights = family.Causal(d_k=3)(Q, K, V)
    decode, start = family.Cached(d_k=3), 0
    for size in chunks:
        new = slice(start, start + size)
        mixed, row = decode(Q[:, new], K[:, new], V[:, new])
        start += size
        close(row, weights[:, new, :start])
        close(mixed, output[:, new])
    decode.clear()
    close(decode(Q, K, V)[0], output)


def test_a_failed_call_leaves_the_cache_unchanged():
    decode = family.Cached(d_k=4)
    decode(cat.Q[:2], cat.K[:2], cat.V[:2])
    with pytest.raises(ArgumentError):
        decode(cat.Q[2:3], cat.K[2:3], cat.V[2:4])
    close(decode(cat.Q[2:], cat.K[2:], cat.V[2:])[0], NAMED["causal"].run()[0][2:])


def test_linear_attention_from_its_state():
    attention = family.Linear(d_k=3)
    Q, K, V = draw(2, 7, 3), draw(2, 11, 3, seed=1), draw(2, 11, 5, seed=2)
    close(attention.compute_output_from_state(Q, attention.compute_state(K, V)), attention(Q, K, V)[0])
    # States are additive: the keys may come in parts.
    parts = [attention.compute_state(K[:, part], V[:, part]) for part in (slice(4), slice(4, None))]
    whole = (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
    close(attention.compute_output_from_state(Q, whole), attention(Q, K, V)[0])


@drawn
@given(st.integers(2, 9).map(lambda n: 4 * n), st.integers(10, 200))
def test_buckets_agree_with_the_library(size, max_distance):
    away = np.arange(-300, 301)
    ours = family.RelativeBias(d_k=1, table=np.zeros(size), max_distance=max_distance).compute_buckets(away)
    theirs = relative_buckets(away, buckets=size, max_distance=max_distance, bidirectional=True)
    assert (ours == theirs).all()


def test_two_and_three_steps_share_a_bucket():
    buckets = NAMED["relative_bias"].build().compute_buckets(np.arange(-4, 5))
    assert buckets.tolist() == [3, 2, 2, 1, 0, 5, 6, 6, 7]


def test_rotary_scores_depend_on_the_distance_only():
    rotary = NAMED["rotary"].build()
    Q, K = np.tile(cat.Q[1], (5, 1)), np.tile(cat.K[4], (5, 1))
    scores = rotary.compute_scores(Q, K)
    for offset in range(-4, 5):
        along = np.diagonal(scores, offset)
        close(along, np.full_like(along, along[0]))
    assert len(np.unique(scores.round(9))) > 1
    close(np.linalg.norm(rotary.rotate(cat.K), axis=-1), np.linalg.norm(cat.K, axis=-1))


def test_descriptions_of_the_settings_are_true():
    plain = NAMED["scaled_dot_product"].run()[1]
    assert (NAMED["sink_softcap"].run()[1].sum(axis=-1) < 0.99).all()
    assert (np.ptp(NAMED["linear"].run()[1], axis=-1) < np.ptp(plain, axis=-1)).all()
    assert (NAMED["block_sparse"].run()[1][4] > 0).all()
    assert (NAMED["block_sparse"].run()[1][:, 4] > 0).all()
    largest = plain.argmax(axis=-1) // NAMED["flash"].options["tile_size"]
    assert (largest[0], largest[3]) == (0, 1)
    assert alibi_slopes(8).max() == NAMED["alibi"].options["slope"]
    # If row 0 attends to itself only, another row is worked out too.
    for mechanism in family.MECHANISMS:
        alone = np.count_nonzero(np.atleast_3d(mechanism.run()[1])[0]) == 1
        assert mechanism.worked_rows[0] == 0
        assert len(mechanism.worked_rows) == 2 or not alone


def test_pooled_heads_are_group_means():
    Q, K, V = draw(5, 6), draw(5, 6, seed=1), draw(5, 6, seed=2)
    close(family.mean_pool_heads(K, 3, 3), K)
    close(family.mean_pool_heads(K, 3, 1), (K[:, :2] + K[:, 2:4] + K[:, 4:]) / 3)
    same = np.tile(K[:, :2], 3)
    many = family.MultiHead(d_k=2, num_heads=3)(Q, same, np.tile(V[:, :2], 3))
    one = family.MultiQuery(d_k=2, num_heads=3)(Q, family.mean_pool_heads(same, 3, 1), V[:, :2])
    close(one[0], many[0])
    close(one[1], many[1])
