"""Small problems: a matrix of one tile is computed at once, and a call makes few calls of its own."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard import Entropy, TopK, attention, causal, padding
from regard.core.block_loop import compute_whole
from regard.masks import dense, document
from regard.tiling import tile_sizes, use_tile_sizes
from tests.helpers.own_calls import count_own_calls

torch = pytest.importorskip("torch")

QUERY, KEY, VALUE = torch.randn(3, 2, 3, 9, 8, generator=torch.Generator().manual_seed(0)).unbind()
SOME = torch.rand(2, 3, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.8
MASKS = {
    "none": None,
    "causal": causal(),
    "causal and padding": causal() & padding([4, 9]),
    "per head": dense(SOME) | regard.sliding_window(1),
}  # fmt: skip


def convert(array, library):
    return array if library == "torch" else array.numpy()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_single_tile_equals_the_block_loop(library, mask):
    query, key, value = (convert(array, library) for array in (QUERY, KEY, VALUE))

    def compute():
        A = attention(query, key, mask=MASKS[mask])
        assert (compute_whole(A.problem) is not None) == (tile_sizes().whole > 0)
        results = (
            A.to_dense(),
            A[1, 2, 7],
            A[:, 1, ::-2, [5, 0]],
            A @ value,
            A.entropy(),
            A.topk(2).values,
            A.received(),
        )
        return [np.asarray(result) for result in results]

    whole = compute()
    with use_tile_sizes(rows=4, columns=4, whole=0):
        for found, expected in zip(whole, compute(), strict=True):
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_rows_that_a_naive_softmax_gets_wrong_run_in_the_loop(library):
    query, key, value = (convert(array.clone(), library) for array in (QUERY, KEY, VALUE))
    key[:, :, 6:], value[:, :, 6:] = np.nan, np.inf
    A = attention(query, key, mask=padding(6))
    assert compute_whole(A.problem) is not None
    expected = attention(query, key[:, :, :6]) @ value[:, :, :6]
    np.testing.assert_allclose(A @ value, expected, rtol=2e-6, atol=1e-6)  # terms of a sum can cancel
    empty = attention(query, key, mask=padding([0, 6]))
    assert compute_whole(empty.problem) is None
    assert (
        (empty @ value)[0].sum() == 0 and empty.to_dense()[0].sum() == 0 and (empty.entropy()[0] == 0).all()
    )
    key[0, 1, 2] = np.nan
    live = np.asarray(attention(query, key, mask=padding(6)) @ value)
    assert np.isnan(live[0, 1]).all() and np.isfinite(live[0, 0]).all() and np.isfinite(live[1]).all()


def test_a_plan_names_the_single_tile():
    assert attention(QUERY, KEY).plan(Entropy(), TopK(2)) == "torch: block loop, a single tile: entropy, topk"
    with use_tile_sizes(rows=4, columns=4):
        assert "single" not in attention(QUERY, KEY).plan(Entropy()), "the tile does not fit"


def test_an_in_place_change_is_noticed():
    query = QUERY.clone()
    A = attention(query, KEY)
    before = A[0, 0, 3], A.entropy(), A @ VALUE
    query.mul_(2)
    for old, new, other in zip(
        before, (A[0, 0, 3], A.entropy(), A @ VALUE),
        (attention(2 * QUERY, KEY)[0, 0, 3], attention(2 * QUERY, KEY).entropy(), attention(2 * QUERY, KEY) @ VALUE),
        strict=True,
    ):  # fmt: skip
        assert not torch.equal(old, new) and torch.equal(new, other)


# How many functions of this package each call may run: today's number and a half. A call takes about 0.3 µs.
@pytest.mark.parametrize(
    ("run", "limit"),
    [
        (lambda: attention(QUERY, KEY) @ VALUE, 38),
        (lambda: attention(QUERY, KEY, mask=causal()) @ VALUE, 75),
        (lambda: attention(QUERY, KEY, mask=dense(SOME)) @ VALUE, 100),
        (lambda: attention(QUERY, KEY).to_dense(), 85),
        (lambda: attention(QUERY, KEY)[0, 0, 2], 140),
        (lambda: attention(QUERY, KEY).entropy(), 200),
        (lambda: attention(QUERY.numpy(), KEY.numpy()) @ VALUE.numpy(), 40),
        (lambda: attention(QUERY[0].numpy(), KEY[0].numpy()) @ VALUE[0].numpy(), 40),
    ],
    ids=["plain", "causal", "dense mask", "to_dense", "one row", "entropy", "numpy", "numpy, three axes"],
)
def test_a_small_problem_makes_few_calls(run, limit):
    run()  # a kernel is compared with the definition before its first use
    count = sum(count_own_calls(run).values())
    assert count < limit, count


def test_a_ragged_batch_is_one_call_of_the_kernel():
    query = torch.randn(8, 2, 30, 8)
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (8, 30)), -1)
    for mask in (padding(np.arange(3, 11)), causal() & padding(np.arange(3, 11)), document(ids)):
        A = attention(query, query, mask=mask)
        weights = torch.softmax(
            (query @ query.mT * 8**-0.5).masked_fill(
                ~torch.from_numpy(mask.to_dense(8, 2, 30, 30)), -torch.inf
            ),
            -1,
        )
        torch.testing.assert_close(A @ query, weights @ query, rtol=1e-5, atol=1e-5)
        assert A.kernel == "torch: flash on CPU, masked"


def test_one_row_of_one_head_reads_no_other_head():
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 3000, 8)
    expected = torch.softmax(query[0, 2] @ key[0, 2].mT * 8**-0.5, -1)[0]
    poisoned = key.clone()
    poisoned[:, [0, 1, 3]] = torch.nan
    A = attention(query, poisoned)
    torch.testing.assert_close(A[0, 2, 0], expected)


def multiply_dense(allowed, query=QUERY, value=VALUE):
    scores = (query @ KEY.mT * 8**-0.5).masked_fill(~torch.as_tensor(allowed), -torch.inf)
    return torch.nan_to_num(torch.softmax(scores, -1)) @ value


def test_equal_masks_share_their_numbers_whatever_mode_made_them():
    from regard.engines.torch_fused import _build_shared_tile

    _build_shared_tile.cache_clear()
    with torch.inference_mode():
        attention(QUERY, KEY, mask=causal() & padding([4, 9])) @ VALUE
    query = QUERY.clone().requires_grad_()
    output = attention(query, KEY, mask=padding([4, 9]) & causal()) @ VALUE
    assert _build_shared_tile.cache_info().hits == 1
    expected = QUERY.clone().requires_grad_()
    allowed = (causal() & padding([4, 9])).to_dense(2, 1, 9, 9)
    torch.testing.assert_close(output, multiply_dense(allowed, expected))
    output.sum().backward()
    multiply_dense(allowed, expected).sum().backward()
    torch.testing.assert_close(query.grad, expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (1, 6, 9, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_that_differ_in_anything_do_not_share(shape, dtype):
    query, key, value = (x.reshape(*shape[:3], 8).to(dtype) for x in (QUERY, KEY, VALUE))
    batch = shape[0]
    for mask in (
        padding([4] * batch), padding([5] * batch), padding([5] * batch, side="left"), ~padding([4] * batch),
        document([[0] * 4 + [1] * 5] * batch), document([0] * 4 + [1] * 5), regard.sliding_window(2),
        causal() & padding([4] * batch), causal() | padding([4] * batch),
        regard.sliding_window([1, 2, 3] * (shape[1] // 3)),
    ):  # fmt: skip
        for _ in range(2):
            found = attention(query, key, mask=mask) @ value
            scores = (query @ key.mT * 8**-0.5).masked_fill(
                ~torch.from_numpy(mask.to_dense(*shape)), -torch.inf
            )
            torch.testing.assert_close(found, torch.nan_to_num(torch.softmax(scores, -1)) @ value)


def test_a_mask_of_an_array_that_changes_is_read_again():
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    A = attention(QUERY, KEY, mask=dense(allowed) & padding([9, 9]))
    torch.testing.assert_close(A @ VALUE, multiply_dense(allowed))
    allowed[:, 0] = False
    torch.testing.assert_close(A @ VALUE, multiply_dense(allowed))
    torch.testing.assert_close(
        attention(QUERY, KEY, mask=dense(allowed) & padding([9, 9])) @ VALUE, multiply_dense(allowed)
    )
