"""Masks: small matrices written out; repr, equality and hash; classification of blocks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

import regard
from regard import Mask, causal, mask, padding, reference, sliding_window
from regard.engines.native import use_instruction_set
from regard.frame import Frame
from regard.masks import between, dense, document, first, prefix
from regard.tiling import use_tile_sizes

UL, LR = "upper_left", "lower_right"


def format_rows(allowed: Any) -> list[str]:
    """Format a boolean matrix as lines of 1 and 0."""
    return ["".join("01"[int(x)] for x in row) for row in allowed]


LITERAL = {
    "causal 3×3": (causal(), "100 110 111"),
    "causal upper left 2×5": (causal(UL), "10000 11000"),
    "causal lower right 2×5": (causal(LR), "11110 11111"),
    "causal upper left 5×2": (causal(UL), "10 11 11 11 11"),
    "causal lower right 5×2": (causal(LR), "00 00 00 10 11"),
    "causal either corner of a square, upper": (causal(UL), "100 110 111"),
    "causal either corner of a square, lower": (causal(LR), "100 110 111"),
    "window of one 3×3": (sliding_window(1), "100 010 001"),
    "window of two 5×5": (sliding_window(2), "10000 11000 01100 00110 00011"),
    "window upper left 2×5": (sliding_window(2, align=UL), "10000 11000"),
    "window lower right 2×5": (sliding_window(2, align=LR), "00110 00011"),
    "window upper left 5×2": (sliding_window(2, align=UL), "10 11 01 00 00"),
    "window lower right 5×2": (sliding_window(2, align=LR), "00 00 00 10 11"),
    "two sides 5×5": (sliding_window(left=2, right=1), "11000 11100 11110 01111 00111"),
    "two sides upper left 2×5": (sliding_window(left=1, right=1, align=UL), "11000 11100"),
    "two sides lower right 2×5": (sliding_window(left=1, right=1, align=LR), "00111 00011"),
    "two sides upper left 5×2": (sliding_window(left=1, right=1, align=UL), "11 11 01 00 00"),
    "two sides lower right 5×2": (sliding_window(left=1, right=1, align=LR), "00 00 10 11 11"),
    "left only upper left 5×2": (sliding_window(left=1, align=UL), "11 11 01 00 00"),
    "left only lower right 2×5": (sliding_window(left=1, align=LR), "00111 00011"),
    "right only upper left 2×5": (sliding_window(right=1, align=UL), "11000 11100"),
    "right only lower right 5×2": (sliding_window(right=1, align=LR), "00 00 10 11 11"),
    "mask of a function 3×4": (mask(lambda b, h, i, j: (i + j) % 2 == 0), "1010 0101 1010"),
    "mask of a constant function 2×3": (mask(lambda b, h, i, j: True), "111 111"),
    "mask of a function and causal": (causal() & mask(lambda b, h, i, j: j != 1), "100 100 101"),
    "padding 2×5": (padding(3), "11100 11100"),
    "padding 5×2": (padding(1), "10 10 10 10 10"),
    "padding of everything": (padding(0), "00000 00000"),
    "padding of nothing": (padding(5), "11111 11111"),
    "left padding 2×5": (padding(3, side="left"), "00111 00111"),
    "left padding of everything": (padding(0, side="left"), "00000 00000"),
    "first 2×5": (first(2), "11000 11000"),
    "first of more than there are": (first(7), "11 11 11 11 11"),
    "prefix 5×5": (prefix(3), "11100 11100 11100 11110 11111"),
    "prefix upper left 2×5": (prefix(3, UL), "11100 11100"),
    "prefix lower right 2×5": (prefix(3, LR), "11110 11111"),
    "prefix upper left 5×2": (prefix(1, UL), "10 11 11 11 11"),
    "prefix lower right 5×2": (prefix(1, LR), "10 10 10 10 11"),
    "document 5×5": (document([0, 0, 3, 3, 0]), "11001 11001 00110 00110 11001"),
    "document 2×5": (document([0, 0, 1, 1, 1], query_ids=[1, 4]), "00111 00000"),
    "document 5×2": (document([7, -1], query_ids=[-1, 7, 7, 2, -1]), "01 10 10 00 01"),
    "between 3×5": (between(slice(1, 3), slice(2, 4)), "00000 00110 00110"),
    "dense": (dense([[True, False, True], [False, False, True]]), "101 001"),
    "dense, one row for all": (dense([[True, False, True]]), "101 101"),
    "dense, one column for all": (dense([[True], [False]]), "111 000"),
    "torch's polarity": (dense([[True, False, True], [False, False, True]], true_means="ignore"), "010 110"),
    "and": (causal(LR) & padding(3), "11100 11100"),
    "or": (sliding_window(1, align=LR) | first(1), "10010 10001"),
    "not": (~causal(UL), "01111 00111"),
    "the example of the module": (
        causal() & padding(4) & (sliding_window(2) | first(1)),
        "10000 11000 11100 10110 10010",
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_each_mask_is_the_matrix_written_here(name: str) -> None:
    mask, rows = LITERAL[name]
    expected = rows.split()
    shape = (len(expected), len(expected[0]))
    assert format_rows(mask.to_dense(*shape)) == expected
    # Also in a matrix, and row by row.
    A = regard.attention(np.zeros((shape[0], 3)), np.zeros((shape[1], 3)), mask=mask)
    assert format_rows(A.to_dense() > 0) == expected
    assert [format_rows(A[i : i + 1] > 0)[0] for i in range(shape[0])] == expected
    # Also on every leading axis.
    assert all(format_rows(head) == expected for head in mask.to_dense(3, 7, *shape).reshape(21, *shape))


@pytest.mark.parametrize("name", LITERAL)
def test_a_block_that_is_called_empty_or_full_is(name: str) -> None:
    mask, rows = LITERAL[name]
    allowed = np.array([[entry == "1" for entry in row] for row in rows.split()])
    frame = Frame.from_shape(allowed.shape)
    q_len, kv_len = allowed.shape
    for q_lo, q_hi in itertools.combinations(range(q_len + 1), 2):
        for kv_lo, kv_hi in itertools.combinations(range(kv_len + 1), 2):
            kinds = mask.classify_blocks(frame, q_lo, q_hi, np.array([kv_lo]), np.array([kv_hi]))
            block = allowed[q_lo:q_hi, kv_lo:kv_hi]
            assert kinds.nonempty[0] or not block.any()
            assert block.all() or not kinds.full[0]


def test_every_kind_of_mask_is_among_them() -> None:
    written = " ".join(f"{name} {mask}" for name, (mask, _) in LITERAL.items())
    assert [name for name in regard.masks.__all__ if name.islower() and name not in written] == []


def test_a_mask_of_ones_own_combines_in_any_order() -> None:
    class Even(Mask):
        def allows(self, frame: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
            return (kv_idx % 2 == 0)[None] & (q_idx >= 0)[:, None]

        def classify_blocks(self, frame: Any, q_lo: int, q_hi: int, kv_lo: Any, kv_hi: Any) -> Any:
            return (kv_hi - kv_lo > 1) | (kv_lo % 2 == 0), np.zeros(len(kv_lo), bool)  # a plain tuple

    expected = ["10000", "10000", "10100", "10100", "10101"]
    for combined in (Even() & causal(), causal() & Even(), ~(~Even() | ~causal())):
        A = regard.attention(np.zeros((5, 3)), np.zeros((5, 3)), mask=combined)
        assert format_rows(A.to_dense() > 0) == expected
        np.testing.assert_allclose(A @ np.eye(5), A.to_dense(), atol=1e-15)


@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**63, np.uint64(2**64 - 1)])
def test_sizes_beyond_every_sequence(size: Any) -> None:
    assert first(size).to_dense(3, 3).all()
    assert format_rows(sliding_window(size).to_dense(3, 3)) == ["100", "110", "111"]
    assert sliding_window(left=size, right=size).to_dense(3, 3).all()


def test_sizes_per_head() -> None:
    windows = sliding_window([1, 3])
    one, three = ["10000", "01000", "00100", "00010", "00001"], ["10000", "11000", "11100", "01110", "00111"]
    assert [format_rows(head) for head in windows.to_dense(2, 5, 5)] == [one, three]
    batches = windows.to_dense(3, 2, 5, 5)
    assert all([format_rows(head) for head in batch] == [one, three] for batch in batches)
    mixed = sliding_window(left=[0, 2], right=1, align=LR)
    assert [format_rows(head) for head in mixed.to_dense(2, 2, 5)] == [["00011", "00001"], ["01111", "00111"]]
    (empty, late) = (
        windows.classify(range(4, 5), range(*keys), shape=(2, 5, 5)) for keys in ((0, 2), (2, 4))
    )
    assert (empty, late) == ("empty", "partial")


def test_lengths_per_batch_entry() -> None:
    shape = (3, 2, 1, 5)
    assert format_rows(padding([2, 0, 5]).to_dense(*shape)[:, 1, 0]) == ["11000", "00000", "11111"]
    assert format_rows(padding([2, 0, 5], side="left").to_dense(*shape)[:, 1, 0]) == [
        "00011",
        "00000",
        "11111",
    ]
    assert format_rows(first([1, 9, 0]).to_dense(*shape)[:, 0, 0]) == ["10000", "11111", "00000"]
    assert format_rows(prefix([1, 3, 0], UL).to_dense(*shape)[:, 0, 0]) == ["10000", "11100", "10000"]
    ids = [[0, 0, 1, 1, 1], [4, 5, 5, 5, 5], [2, 2, 2, 2, 2]]
    mask = document(ids, query_ids=[[1], [4], [3]])
    assert format_rows(mask.to_dense(*shape)[:, 1, 0]) == ["00111", "10000", "00000"]
    A = regard.attention(np.zeros((3, 2, 1, 7)), np.zeros((3, 2, 5, 7)), mask=padding([2, 0, 5]))
    np.testing.assert_allclose(A[:, 0, 0, 0], [1 / 2, 0, 1 / 5])


def test_lengths_need_a_batch_axis() -> None:
    # (heads, q_len, kv_len) has no batch: three lengths could only be meant for heads.
    with pytest.raises(regard.ArgumentError, match=r"heads axis of size one"):
        regard.attention(np.zeros((3, 5, 7)), np.zeros((3, 5, 7)), mask=padding([1, 2, 3]))


@pytest.mark.parametrize("mask", [causal(), sliding_window(2), sliding_window(left=1), prefix(1), ~causal()])
def test_the_corner_must_be_given_if_lengths_differ(mask: Mask) -> None:
    for ask in (
        lambda: mask.to_dense(2, 5),
        lambda: mask.classify(range(1), range(1), shape=(2, 5)),
        lambda: regard.attention(np.zeros((2, 3)), np.zeros((5, 3)), mask=mask),
        lambda: regard.attention(np.zeros((2, 3)), np.zeros((5, 3)), mask=mask & first(1)),
    ):
        with pytest.raises(regard.ArgumentError, match="align"):
            ask()


def test_a_length_beyond_the_keys_is_refused() -> None:
    with pytest.raises(regard.ArgumentError, match="a length of 6 for kv_len 5"):
        padding([3, 6]).to_dense(2, 1, 1, 5)


@pytest.mark.parametrize("array", [[[1, 0]], [[0.0, -np.inf]], np.ones((2, 2), np.uint8)])
def test_only_booleans_are_masks(array: Any) -> None:
    for make in (dense, partial(dense, true_means="ignore")):
        with pytest.raises(regard.ArgumentTypeError, match="True = attend"):
            make(array)


ATOMS = [
    causal(),
    causal(LR),
    causal(UL),
    sliding_window(3),
    sliding_window(2, align=LR),
    sliding_window([2, 3]),
    sliding_window(left=2, right=[0, 1], align=UL),
    sliding_window(left=0, right=3),
    sliding_window(left=3),
    sliding_window(right=2),
    padding(3),
    padding([3, 5]),
    padding([2, 3], side="left"),
    first(4),
    first([1, 2]),
    document([0, 0, 1]),
    document([[0, 1], [1, 1]], query_ids=[2, 0]),
    dense([[True, False]]),
    dense([[False, False]], true_means="ignore"),
]


@pytest.mark.parametrize("mask", ATOMS, ids=repr)
def test_the_repr_evaluates_to_the_mask(mask: Mask) -> None:
    for one in (mask, ~mask, mask & first(9), mask | ~first(9), ~(mask | first(9)) & causal(LR)):
        again = eval(repr(one), vars(regard) | vars(regard.masks))
        assert again == one and hash(again) == hash(one) and repr(again) == repr(one)


def test_masks_that_allow_different_entries_are_not_equal() -> None:
    for a, b in itertools.combinations(ATOMS, 2):
        assert a != b, (a, b)
        assert ~a != a and ~a != b and (a & b) not in (a, b, a | b, ~(a & b))
    assert len({*ATOMS, *(~mask for mask in ATOMS)}) == 2 * len(ATOMS)
    assert causal() != "causal()" and first(1) is not None


def test_equal_masks_of_different_constructors() -> None:
    assert causal() == sliding_window(right=0)
    assert sliding_window(4) == sliding_window(left=3, right=0)
    assert first(3) == padding(3) and hash(first(3)) == hash(padding(3))
    assert prefix(2, LR) == causal(LR) | first(2)
    assert document([0, 1]) == document(np.array([0, 1], np.uint8), query_ids=[0, 1])
    assert dense([[True]], true_means="ignore") == ~dense(np.array([[True]]))
    assert dense(np.eye(3) > 0) == dense(np.eye(3, dtype=bool)) != dense(np.ones((3, 3), bool))
    assert (causal() & first(3)) & causal() == first(3) & causal()


@pytest.mark.parametrize(
    "mask, text",
    [
        (causal() & padding([3, 5]) & (sliding_window(512) | first(4)),
         "causal() & padding([3, 5]) & (sliding_window(512) | first(4))"),
        (causal() | first(1) & ~padding(2), "causal() | first(1) & ~padding(2)"),
        (~(causal() & first(1)), "~(causal() & first(1))"),
        (~~causal(), "causal()"),
        (prefix(2, UL), "first(2) | causal(align='upper_left')"),
        (sliding_window(left=1), "sliding_window(left=1, right=None)"),
        (padding([1, 2], side="left"), "padding([1, 2], side='left')"),
        (padding(np.arange(17)), "padding(<(17,) numbers>)"),
        (dense(np.ones((1, 17), bool)), "dense(<array of shape (1, 17)>)"),
        (dense(np.eye(2, dtype=bool)), "dense([[True, False], [False, True]])"),
    ],
)  # fmt: skip
def test_reprs(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_a_mask_copies_its_parameters() -> None:
    lengths = np.array([3, 5])
    mask = padding(lengths)
    before = hash(mask)
    lengths[:] = 0
    assert mask == padding([3, 5]) and hash(mask) == before


@pytest.mark.parametrize(
    "wrong", [lambda: causal() and first(1), lambda: not causal(), lambda: bool(causal())]
)
def test_a_mask_has_no_truth_value(wrong: Any) -> None:
    with pytest.raises(regard.ArgumentTypeError) as caught:
        wrong()
    assert "causal()" in caught.value.received and "mask & other" in caught.value.hint


@pytest.mark.parametrize("other", [True, np.ones((2, 2), bool), None])
def test_masks_combine_with_masks_only(other: Any) -> None:
    for combine in (lambda: causal() & other, lambda: causal() | other):
        with pytest.raises(regard.ArgumentTypeError, match="dense"):
            combine()


# Blocks

SQUARE = (19, 19)


@pytest.mark.parametrize(
    "mask, q, kv, kind",
    [
        (causal(), (0, 4), (4, 8), "empty"),
        (causal(), (0, 5), (4, 8), "partial"),
        (causal(), (7, 9), (0, 8), "full"),
        (causal(), (6, 9), (0, 8), "partial"),
        (sliding_window(3), (10, 12), (0, 8), "empty"),
        (sliding_window(3), (10, 12), (0, 9), "partial"),
        (sliding_window(3), (10, 12), (9, 12), "partial"),
        (sliding_window(3), (11, 12), (9, 12), "full"),
        (sliding_window(left=3, right=2), (5, 7), (3, 8), "full"),
        (sliding_window(left=3, right=2), (5, 7), (9, 19), "empty"),
        (padding(7), (0, 19), (0, 7), "full"),
        (padding(7), (0, 19), (6, 8), "partial"),
        (padding(7), (3, 5), (7, 19), "empty"),
        (padding(7, side="left"), (3, 5), (0, 12), "empty"),
        (padding(7, side="left"), (3, 5), (12, 19), "full"),
        (first(2), (3, 5), (0, 2), "full"),
        (prefix(5), (0, 4), (0, 5), "full"),
        (prefix(5), (0, 4), (5, 19), "empty"),
        (document([0] * 7 + [1] * 12), (0, 7), (7, 19), "empty"),
        (document([0] * 7 + [1] * 12), (7, 9), (8, 19), "full"),
        (document([0] * 7 + [1] * 12), (6, 9), (8, 19), "partial"),
        (dense(np.eye(19, dtype=bool)), (0, 5), (5, 19), "empty"),
        (dense(np.eye(19, dtype=bool)), (5, 6), (5, 6), "full"),
        (dense(np.arange(19)[None, :] < 4), (5, 9), (4, 19), "empty"),
        (dense(np.arange(19)[:, None] < 4), (0, 4), (4, 19), "full"),
        (~causal(), (0, 4), (4, 8), "full"),
        (~causal(), (7, 9), (0, 8), "empty"),
        (causal() & padding(7), (9, 12), (7, 19), "empty"),
        (causal() & padding(7), (9, 12), (0, 7), "full"),
        (sliding_window(2) | first(3), (9, 12), (0, 3), "full"),
        (sliding_window(2) | first(3), (9, 12), (3, 8), "empty"),
    ],
)
def test_blocks(mask: Mask, q: Any, kv: Any, kind: str) -> None:
    assert mask.classify(range(*q), range(*kv), shape=SQUARE) == kind
    block = mask.to_dense(*SQUARE)[slice(*q), slice(*kv)]
    assert kind == ("full" if block.all() else "partial" if block.any() else "empty")


class Odd(Mask):
    """A custom mask: the keys at an odd distance, and the query's own."""

    def __init__(self) -> None:
        self.evaluated: list[tuple[int, int]] = []

    def allows(self, frame: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        self.evaluated.append((int(q_idx[0]), int(kv_idx[0])))
        ahead = kv_idx[None, :] - q_idx[:, None]
        return xp.asarray((ahead % 2 == 1) | (ahead == 0))[None]


@use_tile_sizes(rows=5, columns=3)
def test_a_custom_mask_needs_only_allows() -> None:
    mask, n = Odd(), 19
    odd = np.array([[(j - i) % 2 == 1 or i == j for j in range(n)] for i in range(n)])
    assert mask.classify(range(0, 1), range(0, 1), shape=SQUARE) == "partial"
    rng = np.random.default_rng(2)
    query, key, value = rng.normal(size=(2, n, 7)), rng.normal(size=(2, n, 7)), rng.normal(size=(2, n, 11))
    for one, allowed in ((mask, odd), (~mask, ~odd), (mask & causal(), odd & np.tri(n, dtype=bool))):
        A = regard.attention(query, key, mask=one)
        expected = reference.attention(query, key, value, mask=allowed)
        np.testing.assert_allclose(A @ value, expected.output, atol=1e-13)
        np.testing.assert_allclose(A.to_dense(), expected.weights, atol=1e-13)


@use_instruction_set(None)  # the tiles of the block loop are counted
@use_tile_sizes(rows=4, columns=4)
def test_empty_and_full_blocks_are_not_evaluated() -> None:
    narrow = Odd()
    regard.attention(np.zeros((11, 3)), np.zeros((11, 3)), mask=causal() & narrow).sum()
    assert sorted(narrow.evaluated) == [(q, kv) for q in (0, 4, 8) for kv in range(0, q + 1, 4)]
    wide = Odd()
    regard.attention(np.zeros((11, 3)), np.zeros((11, 3)), mask=causal() | wide).sum()
    # Below the diagonal the block is full because of causal().
    assert sorted(wide.evaluated) == [(q, kv) for q in (0, 4, 8) for kv in range(q, 11, 4)]


def test_a_mask_without_allows_raises() -> None:
    class Nothing(Mask):
        pass

    with pytest.raises(TypeError, match=r"Nothing must define allows\(frame, q_idx, kv_idx, xp\)"):
        Nothing().to_dense(2, 3)


@pytest.mark.parametrize(
    ("side", "starts", "stops"), [("right", [[0], [0]], [[3], [5]]), ("left", [[3], [1]], [[6], [6]])]
)
def test_a_range_of_keys_has_limits_for_each_pair(side: str, starts: list[Any], stops: list[Any]) -> None:
    start, stop = padding([3, 5], side=side).resolve(Frame((2, 1), 4, 6))
    assert start.dtype == stop.dtype == np.int64
    assert start.tolist() == starts and stop.tolist() == stops


def test_a_mask_from_a_function_is_given_the_batch_entry_and_the_head() -> None:
    q, k = np.zeros((2, 3, 4, 3)), np.zeros((2, 3, 5, 3))
    own = mask(lambda b, h, q_idx, kv_idx: (q_idx + b >= kv_idx) & (kv_idx != h))
    b, h, i, j = np.ogrid[:2, :3, :4, :5]
    expected = (i + b >= j) & (j != h)
    np.testing.assert_array_equal(regard.attention(q, k, mask=own).to_dense() > 0, expected)
    np.testing.assert_array_equal(own.to_dense(2, 3, 4, 5), expected)
    np.testing.assert_array_equal(regard.attention(q, k, mask=own)[1, 2].to_dense() > 0, expected[1, 2])
    # Without a batch, b is 0; without heads, h is 0 as well.
    np.testing.assert_array_equal(own.to_dense(3, 4, 5), expected[0])
    np.testing.assert_array_equal(own.to_dense(4, 5), expected[0, 0])
    assert own == mask(own.function) and own != mask(lambda b, h, q_idx, kv_idx: True)  # type: ignore[attr-defined]


def test_a_mask_from_a_function_reads_arrays_of_its_own() -> None:
    torch = pytest.importorskip("torch")
    ids = np.array([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
    x = np.random.default_rng(0).normal(size=(2, 1, 5, 4))
    expected = (ids[:, None, :, None] == ids[:, None, None, :]).astype(float)
    for arrays in (ids, torch.tensor(ids)):
        same = mask(lambda b, h, q_idx, kv_idx, ids=arrays: ids[b, q_idx] == ids[b, kv_idx])
        for inputs in (x, torch.tensor(x)):
            A = regard.attention(inputs, inputs, mask=same)
            np.testing.assert_array_equal(np.asarray(A) > 0, expected > 0)
