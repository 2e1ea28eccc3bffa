"""The guarantees of the design about masks: algebra, equality and repr, block classification, skipped blocks."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

import regard
from regard import attention
from regard.engines.native import use_instruction_set
from regard.masks import causal, dense, document, first, padding, prefix, sliding_window
from regard.problem import Problem
from regard.tiling import use_tile_sizes

ATOMS = {
    "causal()": causal(),
    "causal(align='lower_right')": causal("lower_right"),
    "sliding_window(4)": sliding_window(4),
    "sliding_window([3, 9], align='upper_left')": sliding_window([3, 9], align="upper_left"),
    "sliding_window(left=2, right=5)": sliding_window(left=2, right=5),
    "sliding_window(left=None, right=[1, 6])": sliding_window(right=[1, 6]),
    "padding([7, 21])": padding([7, 21]),
    "padding(9, side='left')": padding(9, side="left"),
    "first(3) | causal()": prefix(3),
    "first(5)": first(5),
    "document([0, 0, 2])": document([0, 0, 2]),
    "document([0, 1], query_ids=[1])": document([0, 1], query_ids=[1]),
    "dense([[True, False]])": dense([[True, False]]),
    "~dense([[True, False]])": regard.masks.dense([[True, False]], true_means="ignore"),
    "causal() & padding([3, 5]) & (sliding_window(512) | first(4))":
        causal() & padding([3, 5]) & (sliding_window(512) | first(4)),
    "~(causal() & first(2)) | ~document([1, 1])": ~(causal() & first(2)) | ~document([1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("text", ATOMS)
def test_a_mask_is_a_value_that_its_repr_spells(text):
    mask, names = ATOMS[text], {name: getattr(regard.masks, name) for name in regard.masks.__all__}
    assert repr(mask) == text
    again = copy.deepcopy(eval(text, names))  # `causal()` returns the same object each time
    assert again == mask and hash(again) == hash(mask) and again is not mask
    assert [other for other in ATOMS.values() if other == mask] == [mask]
    assert ~~mask == mask and mask & mask == mask and mask | mask == mask and ~mask != mask
    assert mask & first(8) == first(8) & mask and mask & first(8) != mask | first(8)
    assert mask & first(8) != mask & first(8) & padding(9) and mask | first(8) != mask | first(8) | padding(9)


SHAPE = (2, 2, 29, 29)
IN_SHAPE = [
    *(mask for text, mask in ATOMS.items() if "document" not in text and "dense" not in text),
    document(np.sort(np.random.default_rng(19).integers(0, 4, (2, 29)), axis=-1)),
    document(np.arange(29) % 3),
    dense(np.random.default_rng(20).random((2, 29, 29)) < 0.9),
    dense((np.arange(29) < 11)[None, :]),
]


def test_masks_combine_as_booleans_do():
    for a, b in itertools.product(IN_SHAPE, repeat=2):
        x, y = a.to_dense(*SHAPE), b.to_dense(*SHAPE)
        assert np.array_equal((a & b).to_dense(*SHAPE), x & y)
        assert np.array_equal((a | ~b).to_dense(*SHAPE), x | ~y)


def test_a_block_is_classified_correctly():
    rng = np.random.default_rng(21)
    said = set()
    for a, b in itertools.product(IN_SHAPE, repeat=2):
        for mask in (a, a & b, a | ~b):
            allowed = mask.to_dense(*SHAPE)
            (q_lo, q_hi), (kv_lo, kv_hi) = (sorted(rng.choice(30, 2, replace=False)) for _ in range(2))
            block = allowed[..., q_lo:q_hi, kv_lo:kv_hi]
            state = mask.classify(range(q_lo, q_hi), range(kv_lo, kv_hi), shape=SHAPE)
            said.add(state)
            assert state == "partial" or block.any() == block.all() == (state == "full"), mask
    assert said == {"empty", "full", "partial"}


@pytest.mark.parametrize(
    "mask, state",
    [
        (causal(), ("empty", "partial", "full")),
        (sliding_window(4), ("empty", "partial", "empty")),
        (~causal(), ("full", "partial", "empty")),
        (padding(13), ("empty", "partial", "full")),
        (padding(16, side="left"), ("full", "partial", "empty")),
        (first(8), ("empty", "empty", "full")),
        (document(np.arange(29) // 6), ("empty", "partial", "empty")),
        (dense(np.tri(29, dtype=bool)), ("empty", "partial", "full")),
    ],
    ids=repr,
)
def test_a_block_is_empty_full_or_partial(mask, state):
    blocks = (range(0, 8), range(20, 28)), (range(10, 18), range(10, 18)), (range(20, 28), range(0, 8))
    assert tuple(mask.classify(*block, shape=(29, 29)) for block in blocks) == state


@use_tile_sizes(rows=8, columns=16)
@use_instruction_set(None)  # of the block loop
def test_empty_blocks_are_skipped(monkeypatch):
    rows, n = 8, 256
    computed, scores = [], Problem.scores
    monkeypatch.setattr(Problem, "scores", lambda *a, **b: computed.append(1) or scores(*a, **b))
    query = np.random.default_rng(22).normal(size=(n, 3))
    counts = {}
    for name, mask in (
        ("all", None),
        ("causal", causal()),
        ("window", sliding_window(4)),
        ("first", first(9)),
    ):
        computed.clear()
        assert np.isfinite(attention(query, query, mask=mask).lse).all()
        counts[name] = len(computed)
    bands = n // rows
    # A band of 8 rows with a window of 4 touches one block of 16 keys, or two at its edge.
    assert counts == {"all": bands * 16, "causal": bands * 17 // 2, "window": bands + 15, "first": bands}


# -- Rows 10 and 18: the future, and a cache ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask", [causal(), causal() & sliding_window(4), causal() & (sliding_window(4) | first(2))], ids=repr
)
def test_10_a_changed_future_token_never_changes_a_past_output(mask):
    rng = np.random.default_rng(10)
    query, key, value = rng.normal(size=(3, 2, 23, 5))
    before = attention(query, key, mask=mask) @ value
    for t in (1, 9, 22):
        changed = [x.copy() for x in (query, key, value)]
        for x in changed:
            x[:, t:] = rng.normal(size=x[:, t:].shape)
        after = attention(*changed[:2], mask=mask) @ changed[2]
        assert np.array_equal(after[:, :t], before[:, :t]) and not np.allclose(after[:, t:], before[:, t:])


@pytest.mark.parametrize("window", [None, 1, 6, 7, 8, 40])
def test_18_chunks_against_a_cache_equal_the_uncached_pass(window):
    rng = np.random.default_rng(18)
    query, key, value = rng.normal(size=(3, 2, 23, 5))

    def mask(align=None):
        return causal(align) if window is None else sliding_window(window, align=align)

    whole = attention(query, key, mask=mask()) @ value
    for _ in range(5):
        ends = [*np.sort(rng.choice(np.arange(1, 23), 4, replace=False)), 23]
        for start, end in zip([0, *ends], ends, strict=False):
            A = attention(query[:, start:end], key[:, :end], mask=mask("lower_right"))
            np.testing.assert_allclose(A @ value[:, :end], whole[:, start:end], atol=1e-13)


def test_an_unbounded_window_allows_everything_on_its_side():
    query, key = np.zeros((5, 2)), np.zeros((9, 2))
    for size in (9, 2**40, 2**63 - 1):
        A = attention(query, key, mask=sliding_window(left=3, right=size, align="lower_right"))
        assert np.array_equal(A.to_dense() > 0, np.arange(9) >= np.arange(4, 9)[:, None] - 3)
