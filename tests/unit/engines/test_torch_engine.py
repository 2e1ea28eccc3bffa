"""The torch engine: fused kernels, guarantees that the kernels alone do not give, and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

import regard  # noqa: E402
from regard import (  # noqa: E402
    Coarse,
    Distance,
    Entropy,
    Mass,
    Received,
    Spread,
    TopK,
    alibi,
    attention,
    causal,
    padding,
    sliding_window,
    softcap,
)
from regard.engines import torch_fused  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.engines import torch_lowering as lowering  # noqa: E402
from regard.engines.native import list_instruction_sets  # noqa: E402
from regard.masks import dense, document, first, prefix  # noqa: E402
from regard.score_mods import bias  # noqa: E402
from regard.tiling import tile_sizes  # noqa: E402
from tests.helpers.tensors import draw  # noqa: E402


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_kernel", lambda device_type: None)


# -- Fused kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_product_equals_sdpa_bit_for_bit(dtype, is_causal):
    query, key, value = draw(2, 3, 67, 16, dtype=dtype)
    A = attention(query, key, mask=causal() if is_causal else None)
    assert torch.equal(A @ value, F.scaled_dot_product_attention(query, key, value, is_causal=is_causal))
    assert A.kernel == f"torch: flash on CPU, {'causal' if is_causal else 'no mask'}"


def test_grouped_heads_use_the_fused_kernel():
    query, *_ = draw(2, 6, 67, 16)
    key, value = draw(2, 2, 67, 16, seed=1, count=2)
    A = attention(query, key, mask=causal(), enable_gqa=True)
    expected = F.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), is_causal=True
    )
    torch.testing.assert_close(A @ value, expected)
    assert "flash" in A.kernel


ids = np.repeat(np.arange(5), [300, 17, 500, 120, 163])  # 1,100 tokens

LOWERED = {
    "window": (causal() & sliding_window(100), "blocks"),
    "causal documents": (document(ids) & causal(), "5 blocks"),
    "documents": (document(ids), "5 blocks"),
    "prefix": (prefix(256), "3 blocks"),
    "padding": (padding([700, 1100]), "2 blocks"),
    "sinks and window": (sliding_window(200) | (first(4) & causal()), "blocks"),
    "dense": (
        dense(torch.rand(1100, 1100, generator=torch.Generator().manual_seed(0)) < 0.3),
        "with a mask tile",
    ),
    "lower right": (causal(align="lower_right"), "causal"),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_mask_is_lowered_without_building_n_by_n(name, monkeypatch):
    mask, words = LOWERED[name]
    query, key, value = draw(2, 2, 1100, 8)
    tiles = []
    make = lowering.make_tile_builder

    def recorded(pairs):
        tile = make(pairs)
        return lambda rows, columns: tiles.append(len(rows)) or tile(rows, columns)

    monkeypatch.setattr(lowering, "make_tile_builder", recorded)
    A = attention(query, key, mask=mask)
    allowed = torch.tensor(mask.to_dense(*A.shape))
    torch.testing.assert_close(
        A @ value, F.scaled_dot_product_attention(query, key, value, attn_mask=allowed), atol=2e-6, rtol=1e-5
    )
    assert words in A.kernel
    assert max(tiles, default=0) <= tile_sizes().mask_tile_rows < 1100


def test_one_query_against_a_cache_needs_no_mask():
    query, *_ = draw(1, 2, 1, 8)
    key, value = draw(1, 2, 50, 8, seed=1, count=2)
    A = attention(query, key, mask=causal(align="lower_right"))
    assert torch.equal(A @ value, F.scaled_dot_product_attention(query, key, value))
    assert A.kernel.endswith("no mask")


@pytest.mark.parametrize("value_dim", [1, 5, 24])
def test_another_value_dim_is_padded_and_stays_fused(value_dim):
    query, key, _ = draw(2, 3, 40, 8)
    (value,) = draw(2, 3, 40, value_dim, seed=1, count=1)
    A = attention(query, key)
    torch.testing.assert_close(A @ value, F.scaled_dot_product_attention(query, key, value))
    assert "flash" in A.kernel


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_any_number_of_leading_axes(lead):
    query, key, value = draw(*lead, 20, 8)
    A = attention(query, key, mask=causal())
    expected = attention(query.numpy(), key.numpy(), mask=causal()) @ value.numpy()
    np.testing.assert_allclose(A @ value, expected, atol=1e-6)
    assert "flash" in A.kernel and A.lse.shape == (*lead, 20)


def test_a_last_axis_that_is_not_contiguous_changes_nothing():
    # The operator reads such an axis wrongly, so it must never get one.
    query, key, value = draw(1, 2, 16, 40)
    transposed = [x.mT for x in (query, key, value)]
    for mask in (None, causal(), causal() & sliding_window(7)):
        expected = (
            attention(*(x.contiguous() for x in transposed[:2]), mask=mask) @ transposed[2].contiguous()
        )
        assert torch.equal(attention(*transposed[:2], mask=mask) @ transposed[2], expected)


@pytest.mark.parametrize("mask", [causal(), causal() & sliding_window(7)], ids=repr)
@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30])
def test_13_any_finite_scale(scale, mask):
    query, key, value = draw(2, 3, 20, 8, dtype=torch.float64)
    query = 400 * query  # scores so large that the maximum must be taken after scaling
    A = attention(query, key, mask=mask, scale=scale)
    expected = attention(query.numpy(), key.numpy(), mask=mask, scale=scale) @ value.numpy()
    np.testing.assert_allclose(A @ value, expected, atol=1e-14)
    assert "flash" in A.kernel


def test_16_the_kernel_name_gives_the_reason_for_the_block_loop():
    query, key, value = draw(1, 2, 20, 8)
    A = attention(query, key, score_mod=softcap(5.0))
    A @ value
    assert A.kernel == "torch: block loop (no fused kernel takes softcap(5.0))"
    assert attention(query[:, :, :0], key).kernel == "torch: block loop (an axis is empty)"


def test_additive_biases_and_sinks_stay_fused():
    query, key, value = draw(2, 3, 50, 8, dtype=torch.float64)
    extra = torch.randn(50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sink = torch.tensor([0.5, -math.inf, 3.0], dtype=torch.float64)
    arguments = {"mask": causal(), "score_mod": [alibi(), bias(extra)], "sink": sink}
    A = attention(query, key, **arguments)
    same = attention(
        query.numpy(), key.numpy(), mask=causal(), score_mod=[alibi(), bias(extra.numpy())], sink=sink.numpy()
    )
    np.testing.assert_allclose(A @ value, same @ value.numpy(), atol=1e-13)
    np.testing.assert_allclose(A.lse, same.lse, atol=1e-13)
    assert "flash" in A.kernel


# -- Guarantees that the kernel alone does not give -----------------------------------------------------------

MASKS = {
    "causal": causal(),
    "window": causal() & sliding_window(4),
    "documents": document(np.repeat([0, 1, 2], [5, 9, 6])),
    "padding": padding([13, 20]),
    "dense": dense(torch.rand(20, 20, generator=torch.Generator().manual_seed(3)) < 0.4),
}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", MASKS)
def test_04_masked_input_cannot_matter(name, poison, small):
    query, key, value = draw(2, 3, 20, 8)
    mask = MASKS[name] & ~dense(torch.arange(20)[None, :] == 11)
    clean = attention(query, key, mask=mask)
    poisoned_key, poisoned_value = key.clone(), value.clone()
    poisoned_key[:, :, 11], poisoned_value[:, :, 11] = poison, poison
    poisoned = attention(query, poisoned_key, mask=mask)
    torch.testing.assert_close(poisoned @ poisoned_value, clean @ value, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(poisoned.lse, clean.lse, atol=1e-6, rtol=1e-5)
    assert (poisoned @ poisoned_value).isfinite().all()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_04_the_last_token_of_a_causal_matrix_reaches_its_own_row_only(poison):
    query, key, value = draw(1, 2, 70, 8)
    clean = attention(query, key, mask=causal()) @ value
    value[:, :, 69] = poison
    poisoned = attention(query, key, mask=causal()) @ value
    torch.testing.assert_close(poisoned[:, :, :69], clean[:, :, :69], atol=1e-6, rtol=1e-5)
    assert not poisoned[:, :, 69].isfinite().any()


def test_03_a_live_nan_shows_in_the_rows_that_depend_on_it():
    for kv_len in (1, 20, 130):
        query, *_ = draw(1, 2, kv_len, 8)
        key, value = draw(1, 2, kv_len, 8, seed=1, count=2)
        query[0, 1, kv_len // 2] = math.nan
        key[0, 0, kv_len // 3] = math.nan
        for mask in (None, causal()):
            found = (attention(query, key, mask=mask) @ value).isnan().all(-1)
            expected = torch.zeros(1, 2, kv_len, dtype=torch.bool)
            expected[0, 1, kv_len // 2] = True
            expected[0, 0, 0 if mask is None else kv_len // 3 :] = True
            assert torch.equal(found, expected)


def test_01_05_a_row_without_live_keys_is_zeros_and_so_is_its_gradient(small):
    query, key, value = (x.requires_grad_() for x in draw(2, 3, 20, 8, dtype=torch.float64))
    mask = sliding_window(4) & ~first(3) & ~dense(torch.arange(20)[:, None] == 9)
    A = attention(query, key, mask=mask)
    output = A @ value
    empty = [0, 1, 2, 9]
    assert (output[:, :, empty] == 0).all() and (A.lse[:, :, empty] == -math.inf).all()
    (output.square().sum() + A.entropy().sum()).backward()
    for tensor in (query, key, value):
        assert tensor.grad.isfinite().all()
    assert (query.grad[:, :, empty] == 0).all()
    assert (query.grad[:, :, 5] != 0).any()


def test_25_lse_is_natural_and_comes_with_the_product():
    query, key, value = draw(2, 3, 33, 8, dtype=torch.float64)
    A = attention(query, key, mask=causal())
    A @ value
    scores = query @ key.mT / math.sqrt(8)
    masked = torch.ones(33, 33, dtype=torch.bool).triu(1)
    torch.testing.assert_close(A.lse, scores.masked_fill(masked, -math.inf).logsumexp(-1))


def test_without_a_kernel_the_block_loop_gives_the_same(no_kernel):
    query, key, value = draw(2, 3, 300, 16)
    A = attention(query, key, mask=causal())
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(A @ value, expected, atol=1e-5, rtol=1e-5)
    assert "block loop" in A.kernel


def test_weights_of_large_scores_are_divided_by_their_own_sum():
    query, key, value = draw(1, 2, 200, 64)
    A = attention(100 * query, 100 * key)
    A @ value
    assert A.lse.abs().max() > 1e4
    for rows in (A.sum(-1), A.to_dense().sum(-1), A.lazy[0, :, 3:9].sum(-1)):
        torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_12_half_precision_is_upcast_before_and_after_a_product_and_under_autocast(dtype):
    query, key, value = draw(1, 2, 130, 16, dtype=dtype)
    exact = attention(query.double(), key.double(), mask=causal())
    before, after = attention(query, key, mask=causal()), attention(query, key, mask=causal())
    after @ value
    with torch.autocast("cpu", torch.bfloat16):
        cast = attention(query.float(), key.float(), mask=causal())
        found = [cast.lse, cast.entropy(), cast.to_dense()]
    for A in (before, after):
        torch.testing.assert_close(A.lse.double(), exact.lse, atol=2e-6, rtol=0)
        torch.testing.assert_close(A.entropy(), exact.entropy(), atol=5e-6, rtol=0)
    for mine, right in zip(found, [exact.lse, exact.entropy(), exact.to_dense()], strict=True):
        torch.testing.assert_close(mine.double(), right, atol=5e-6, rtol=0)


# -- Slices and measures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measure",
    [
        Entropy(),
        Received(),
        TopK(5),
        Distance(),
        Spread(),
        Mass(first(2)),
        Coarse(7, "mean"),
        Coarse(7, "max"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_measures_equal_those_of_numpy(measure, small):
    query, key, value = draw(2, 3, 40, 8, dtype=torch.float64)
    mask = causal() & padding([40, 31]) & (sliding_window(9) | first(2))
    A, same = attention(query, key, mask=mask), attention(query.numpy(), key.numpy(), mask=mask)
    A @ value
    found, expected = A.measure(measure)[0], same.measure(measure)[0]
    for mine, theirs in (
        zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    ):
        assert isinstance(mine, torch.Tensor)
        np.testing.assert_allclose(mine, theirs, atol=1e-12)


def test_ties_go_to_the_lowest_index(small):
    query, key = torch.zeros(1, 9, 2), torch.zeros(1, 11, 2)
    key[0, [3, 7, 8], 0] = 1.0
    query[0, :, 0] = 2.0
    A = attention(query, key)
    assert A.topk(5).indices.tolist() == [[[3, 7, 8, 0, 1]] * 9]
    assert A.argmax(-1).tolist() == [[3] * 9] and A.argmax(-2).tolist() == [[0] * 11]


def test_a_nan_stays_in_its_own_cells(small):
    query, key, _ = draw(1, 12, 4)
    query[0, 5] = math.nan
    cells = attention(query, key).coarsen(4, "mean")
    expected = torch.zeros(1, 4, 4, dtype=torch.bool)
    expected[0, 1] = True
    assert torch.equal(cells.isnan(), expected)


def test_entries_equal_those_of_numpy(small):
    query, key, _ = draw(2, 3, 40, 8, dtype=torch.float64)
    A = attention(query, key, mask=causal())
    same = attention(query.numpy(), key.numpy(), mask=causal())
    assert A[torch.tensor([1])].shape == (1, 3, 40, 40) and A[0, 0, torch.tensor(3), 2].ndim == 0
    for index in [
        (0, 1, 5),
        (..., 3, 2),
        (1, slice(None), [4, 7, 4]),
        (0, 2, slice(3, 30, 5), slice(1, 9, 3)),
    ]:
        torch.testing.assert_close(A[index], A.to_dense()[index])
        torch.testing.assert_close(A.scores[index], A.scores[...][index])
    np.testing.assert_allclose(A[0, 1], same[0, 1], atol=1e-14)
    np.testing.assert_allclose(A.scores[0, 1], same.scores[0, 1], atol=1e-14)
    np.testing.assert_allclose(
        A[0, 2, 30:3:-5], same[0, 2, 30:3:-5], atol=1e-14
    )  # torch has no negative steps
    np.testing.assert_allclose(A.argmax(-2), same.argmax(-2))
    np.testing.assert_allclose(A.mT @ query, same.mT @ query.numpy(), atol=1e-13)
    np.testing.assert_allclose(np.asarray(A), same.to_dense(), atol=1e-14)
    assert str(A.lazy[0, 1].explain(7)) == str(same.lazy[0, 1].explain(7))


def test_wrong_dtypes_are_refused():
    query, key, _ = draw(2, 3, 5, 8)
    with pytest.raises(regard.ArgumentTypeError, match="real numbers"):
        attention(query > 0, key)
    with pytest.raises(regard.ArgumentTypeError, match="True = attend"):
        attention(query, key, mask=dense(torch.ones(5, 5)))
    assert (attention(torch.ones(5, 8, dtype=torch.int64), key[0, 0]) @ key[0, 0]).dtype == torch.float32


# -- Gradients ------------------------------------------------------------------------------------------------

GRADIENTS = {
    "nothing": {},
    "causal": {"mask": causal()},
    "window": {"mask": causal() & sliding_window(3)},
    "empty rows": {
        "mask": dense(torch.rand(7, 7, generator=torch.Generator().manual_seed(5)) > 0.6) & ~first(2)
    },
    "documents": {"mask": document([0, 0, 0, 1, 1, 2, 2]) & causal()},
    "prefix": {"mask": prefix(3)},
    "padding": {"mask": padding(4, side="left") & causal()},
    "cap": {"mask": causal(), "score_mod": softcap(2.0)},
    "alibi": {"mask": causal(), "score_mod": alibi()},
    "sink": {"mask": causal(), "sink": torch.tensor([0.5, -1.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("what", ["product", "entropy", "mass", "received"])
def test_gradients_are_right(name, what, small, gradcheck):
    arguments = GRADIENTS[name]
    query, key, value = (x.requires_grad_() for x in draw(1, 2, 7, 3, dtype=torch.float64))

    def compute(query, key, value):
        A = attention(query, key, **arguments)
        if what == "product":
            return A @ value
        return A.entropy() if what == "entropy" else A.mass(first(3)) if what == "mass" else A.sum(axis=-2)

    inputs = (query, key, value) if what == "product" else (query, key, value.detach())
    assert gradcheck(compute, inputs)


@pytest.mark.parametrize("mask", [None, causal(), causal() & sliding_window(3)], ids=repr)
def test_sinks_and_biases_have_gradients(mask, small, gradcheck):
    query, key, value = (x.requires_grad_() for x in draw(1, 2, 7, 3, dtype=torch.float64))
    (extra,) = draw(7, 7, dtype=torch.float64, count=1)
    (sink,) = draw(2, dtype=torch.float64, count=1)
    learned = extra.requires_grad_(), sink.requires_grad_()

    def with_sink(query, key, value, sink):
        return attention(query, key, mask=mask, sink=sink) @ value

    def with_bias(query, key, value, extra):
        return attention(query, key, mask=mask, score_mod=bias(extra)) @ value

    assert gradcheck(with_sink, (query, key, value, learned[1]))
    assert gradcheck(with_bias, (query, key, value, learned[0]))


@pytest.mark.parametrize("what", ["window", "cap", "entropy"])
def test_the_gradient_saves_nothing_of_size_n_by_n(what):
    n = 1500
    query, key, value = (x.requires_grad_() for x in draw(1, 1, n, 8))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        A = attention(
            query, key, mask=causal() & sliding_window(300), score_mod=softcap(9.0) if what == "cap" else None
        )
        result = A.entropy().sum() if what == "entropy" else (A @ value).sum()
    assert sum(saved) < 60 * n < n * n / 20
    result.backward()
    assert query.grad.isfinite().all() and (query.grad != 0).any()


@pytest.mark.parametrize("name", ["causal", "empty rows", "sink", "cap"])
def test_lse_and_entries_have_gradients(name, small, gradcheck):
    query, key, _ = (x.requires_grad_() for x in draw(1, 2, 7, 3, dtype=torch.float64))
    arguments = GRADIENTS[name]

    def finite_lse(query, key):
        lse = attention(query, key, **arguments).lse
        return torch.where(lse == -math.inf, 0.0, lse)

    assert gradcheck(finite_lse, (query, key))
    assert gradcheck(lambda q, k: attention(q, k, **arguments)[0, 1, 2:5, 1:3], (query, key))


@pytest.mark.parametrize("score", [-math.inf, -200.0, 0.0, 60.0, 95.0, 103.0, 1e4])
@pytest.mark.parametrize("learned", ["sink", "all"])
def test_the_gradient_of_the_lse_with_any_sink(score, learned):
    query, key, _ = draw(2, 3, 7, 4)
    sink = torch.tensor([score, 0.0, 1.0]).requires_grad_()
    arrays = [*(x.requires_grad_(learned == "all") for x in (query, key)), sink]
    chosen = [array for array in arrays if array.requires_grad]
    lse = attention(query, key, mask=causal() & padding(5) & ~first(1), sink=sink).lse
    found = torch.autograd.grad(torch.where(lse == -math.inf, 0.0, lse).sum(), chosen)
    wide = [array.detach().double().requires_grad_() for array in arrays]
    scores = wide[0] @ wide[1].mT / 2
    at = torch.arange(7)
    scores = scores.masked_fill((at[:, None] < at) | (at >= 5) | (at < 1), -math.inf)
    scores = torch.cat([scores, wide[2][None, :, None, None].expand(2, 3, 7, 1)], -1)
    live = (scores > -math.inf).any(-1)  # row 0 has no key
    exact = scores.masked_fill(~live[..., None], 0.0).logsumexp(-1)
    expected = torch.autograd.grad(exact[live].sum(), wide[-len(chosen) :])
    torch.testing.assert_close(lse[live].double(), exact[live], atol=1e-6, rtol=1e-6)
    assert (lse[~live] == -math.inf).all()
    for mine, right in zip(found, expected, strict=True):
        head_axis = right.ndim - 3 if right.ndim > 1 else 0
        for own, exact_head in zip(mine.double().unbind(head_axis), right.unbind(head_axis), strict=True):
            # A head whose sink takes nearly everything has gradients of 1e-26, and must have digits of them.
            atol = 1e-37 + 1e-6 * float(exact_head.abs().max())
            torch.testing.assert_close(own, exact_head, atol=atol, rtol=0)


def test_shards_merge_with_their_gradients(small, gradcheck):
    query, key, value = (x.requires_grad_() for x in draw(2, 9, 3, dtype=torch.float64))

    def merged(query, key, value):
        shards = [(attention(query, key[:, s]), value[:, s]) for s in (slice(0, 4), slice(4, 9))]
        return regard.merge_states([(A @ v, A.lse) for A, v in shards])[0]

    torch.testing.assert_close(merged(query, key, value), attention(query, key) @ value)
    assert gradcheck(merged, (query, key, value))


@pytest.mark.parametrize("change", [None, softcap(4.0)], ids=["plain", "cap"])
def test_04_a_masked_nan_reaches_no_gradient(change, small):
    query, key, value = draw(2, 2, 20, 4, dtype=torch.float64)
    mask = padding([17, 20]) & causal()
    clean, poisoned = ([x.clone() for x in (query, key, value)] for _ in range(2))
    for x in poisoned[1:]:
        x[0, :, 17:] = math.nan
    for tensors in (clean, poisoned):
        for x in tensors:
            x.requires_grad_()
        A = attention(*tensors[:2], mask=mask, score_mod=change)
        ((A @ tensors[2]).square().sum() + A.entropy().sum()).backward()
    for mine, theirs in zip(poisoned, clean, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


HIDDEN = torch.where(torch.arange(20) < 17, 0.0, -math.inf)[
    None
].double()  # as a bias that hides the last keys
GRADIENT_RESULTS = {
    "product": lambda A, value: A @ value, "transposed": lambda A, _: A.mT @ torch.ones(20).double(),
    "entropy": lambda A, _: A.entropy(), "lse": lambda A, _: A.lse, "dense": lambda A, _: A.to_dense(),
    "entries": lambda A, _: A[0, :, 2:19:3, [0, 3, 18]], "topk": lambda A, _: A.topk(3).values,
    "scores": lambda A, _: A.scores[0, :, 2:19:3, [2, 0, 18]], "lazy": lambda A, _: A.lazy[0, :, [9, 4]].entropy(),
}  # fmt: skip


@pytest.mark.parametrize("result", GRADIENT_RESULTS)
@pytest.mark.parametrize(
    "options",
    [
        {"mask": padding(17)}, {"mask": padding(17) & causal(), "score_mod": softcap(4.0)},
        {"score_mod": bias(HIDDEN)}, {"mask": causal(), "score_mod": [softcap(4.0), bias(HIDDEN)]},
    ],
    ids=["mask", "mask and cap", "bias", "causal, cap and bias"],
)  # fmt: skip
def test_keys_that_a_mask_or_a_bias_hides_reach_no_gradient(options, result, small):
    query, key, value = draw(1, 2, 20, 4, dtype=torch.float64)
    gradients = []
    for hidden in (0.5, math.nan, math.inf):
        tensors = [x.clone() for x in (query, key, value)]
        for x in tensors[1:]:
            x[:, :, 17:] = hidden
        for x in tensors:
            x.requires_grad_()
        computed = GRADIENT_RESULTS[result](attention(*tensors[:2], **options), tensors[2])
        loss = torch.where(computed.isfinite(), computed, 0.0).square().sum()
        gradients.append(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))
    assert gradients[0][0].abs().max() > 0
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


def test_scores_have_the_gradient_of_their_products(small):
    query, key, _ = draw(1, 2, 20, 4, dtype=torch.float64)
    query.requires_grad_(), key.requires_grad_()
    index = (0, slice(None), [7, 19, 2], slice(0, 15, 2))
    allowed = torch.ones(20, 20).tril().bool()
    expected = torch.where(allowed, query @ key.mT / 2, -math.inf)[index]
    found = attention(query, key, mask=causal()).scores[index]
    torch.testing.assert_close(found, expected)
    factors = torch.arange(expected.numel(), dtype=torch.float64).reshape(expected.shape)
    losses = [(torch.where(x == -math.inf, 0.0, x) * factors).sum() for x in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, [query, key]) for loss in losses))


@pytest.mark.parametrize("k", [1, 3, 6, 13, 15, 19, 20])  # from 13 on, all columns are searched at once
def test_topk_has_a_gradient_where_weights_are_tied(k):
    query, key, _ = draw(1, 2, 20, 4, dtype=torch.float64)
    key[:, :, 1::2] = key[:, :, ::2]  # every weight twice
    query.requires_grad_()
    top = attention(query, key).topk(k)
    dense = torch.softmax(query @ key.mT / 2, -1)
    expected = torch.sort(dense, dim=-1, descending=True, stable=True).values[..., :k]
    torch.testing.assert_close(top.values, expected)
    losses = [(x * torch.arange(k)).square().sum() for x in (top.values, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, query)[0] for loss in losses))


def test_03_a_live_nan_stays_in_its_rows_with_gradients_too(small):
    query, key, _ = draw(1, 2, 20, 4)
    query[0, 1, 3] = math.nan
    plain = attention(query, key, mask=causal()).to_dense().isnan()
    with_grad = attention(query.requires_grad_(), key, mask=causal()).to_dense().isnan()
    assert torch.equal(plain, with_grad) and int(plain.sum()) == 4


def test_spread_has_a_gradient_if_a_row_has_one_key():
    query, key, _ = (x.requires_grad_() for x in draw(1, 12, 4, dtype=torch.float64))
    attention(query, key, mask=causal()).measure(Spread()).spread.sum().backward()
    assert query.grad.isfinite().all() and (query.grad[:, 5] != 0).any()


def test_a_matrix_that_requires_grad_converts_and_explains():
    query, key, value = (x.requires_grad_() for x in draw(5, 4))
    A = attention(query, key)
    assert np.asarray(A).shape == (5, 5)
    assert "output" in str(A.explain(1, value=value))


PARTS = {
    "whole": lambda A: A, "head": lambda A: A[1], "rows": lambda A: A.lazy[:, 1:], "some": lambda A: A.lazy[:, [3, 1]],
    "chained": lambda A: A.lazy[[1, 0]].lazy[0].lazy[2:], "iterated": lambda A: list(A)[1],
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_matrix_used_without_gradients_still_has_them(context, part):
    query, key = draw(2, 5, 4, dtype=torch.float64)[:2]
    inputs = [query.requires_grad_(), key.requires_grad_()]
    value = key.detach()[0]
    with context():
        used = PARTS[part](attention(query, key))
        for result in (used.entropy(), used.lse, used[..., 0], used @ value):
            assert not result.requires_grad
    fresh = PARTS[part](attention(query, key))
    for compute in (
        lambda A: A.entropy(), lambda A: A.lse, lambda A: A[..., 0], lambda A: A.scores[..., 0], lambda A: A @ value,
        lambda A: A.topk(2).values, lambda A: A.to_dense()[..., 1:],
    ):  # fmt: skip
        found, expected = (
            torch.autograd.grad(compute(A).square().sum(), inputs, retain_graph=True) for A in (used, fresh)
        )
        assert all(gradient.abs().max() > 0 for gradient in expected)
        torch.testing.assert_close(found, expected)


def compute_exactly(query, key, value, *, learned, cap, sink, allowed):
    """Compute the output of grouped heads with a softcap, then a bias and a sink, from dense float64 weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = (scores if cap is None else cap * torch.tanh(scores / cap)) + learned
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights[..., : key.shape[2]] @ value


@pytest.mark.parametrize("shape", [(4, 7, 9), (7, 9), (1, 1, 9), (7, 1), (2, 1, 1, 9)])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("kept", ["all", "causal", "none"])
def test_the_gradient_of_a_learned_bias_equals_that_of_dense_weights(shape, cap, kept):
    generator = torch.Generator().manual_seed(len(shape))
    sizes = [(2, 4, 7, 3), (2, 2, 9, 3), (2, 2, 9, 5), shape, (4,)]
    arrays = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    arrays[3].view(-1)[0] = -torch.inf  # masks
    masks = {"all": None, "causal": regard.causal("upper_left"), "none": regard.masks.first(0)}
    allowed = {"all": None, "causal": torch.ones(7, 9).tril().bool(), "none": torch.zeros(7, 9).bool()}[kept]
    for has_sink in (False, True):
        own, exact = ([x.clone().requires_grad_() for x in arrays] for _ in range(2))
        mods = [bias(own[3])]
        mods = mods if cap is None else [regard.softcap(cap), *mods]
        A = regard.attention(
            *own[:2], mask=masks[kept], score_mod=mods, sink=own[4] if has_sink else None, enable_gqa=True
        )
        output, sink = A @ own[2], exact[4] if has_sink else None
        expected = compute_exactly(*exact[:3], learned=exact[3], cap=cap, sink=sink, allowed=allowed)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        output.sin().sum().backward()
        expected.sin().sum().backward()
        for x, y in zip(own[: 4 + has_sink], exact, strict=False):
            torch.testing.assert_close(x.grad, y.grad.nan_to_num(0.0), rtol=1e-10, atol=1e-11)


def test_the_gradient_of_a_learned_bias_takes_no_checkpoint_and_has_a_gradient(monkeypatch):
    x = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    learned = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def multiply(x, learned):
        return regard.attention(x, x, mask=regard.causal(), score_mod=bias(learned)) @ x

    assert torch.autograd.gradgradcheck(multiply, (x, learned))
    monkeypatch.setattr("regard.engines.torch_gradients.checkpoint", None)
    assert torch.autograd.gradcheck(multiply, (x, learned))


def test_rows_without_keys_keep_the_gradient_of_a_learned_bias_in_one_pass(monkeypatch):
    x, learned = torch.randn(1, 4, 2, requires_grad=True), torch.zeros(4, 4, requires_grad=True)
    monkeypatch.setattr("regard.engines.torch_gradients.checkpoint", None)  # which other ways use
    output = regard.attention(x, x, mask=regard.masks.between([0, 2]), score_mod=bias(learned)) @ x
    output.sum().backward()
    assert learned.grad.abs().sum(-1)[[1, 3]].tolist() == [0, 0] and learned.grad.abs().sum() > 0


class Table(regard.ScoreMod):
    """Scores that are learned and read neither query nor key."""

    def __init__(self, scores):
        self.scores = scores

    def apply(self, scores, frame, q_idx, kv_idx, xp):
        return self.scores[q_idx][:, kv_idx].expand(scores.shape)


def test_scores_that_read_no_query_give_it_no_gradient():
    query, key, value = torch.randn(3, 1, 4, 2, dtype=torch.float64, requires_grad=True).unbind()
    learned = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def multiply(query, key, value, learned):
        return regard.attention(query, key, mask=regard.causal(), score_mod=Table(learned)) @ value

    inputs = [array.detach().requires_grad_() for array in (query, key, value, learned)]
    assert torch.autograd.gradcheck(multiply, inputs)
    assert torch.autograd.gradgradcheck(multiply, inputs)
    grads = torch.autograd.grad(multiply(*inputs).sum(), inputs)
    assert not grads[0].any() and not grads[1].any() and grads[3].any()


def test_a_product_whose_bias_is_nan_keeps_it_in_its_rows():
    x, learned = torch.randn(1, 4, 2, requires_grad=True), torch.zeros(4, 4)
    learned[2, 1] = torch.nan
    output = regard.attention(x, x, score_mod=bias(learned.requires_grad_())) @ x
    assert output.isnan().any(-1).tolist() == [[False, False, True, False]]


def test_a_step_of_decoding_reads_its_keys_once_in_wide_tiles(monkeypatch):
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 8192, 8)
    A = regard.attention(query, key)
    assert "block loop, tiles of 512 × 262144" in A.plan(regard.TopK(8))
    monkeypatch.setattr(torch_fused, "run_fused_product", None)
    values, indices = A.topk(8)
    expected = (query @ key.mT / 8**0.5).softmax(-1).topk(8)
    torch.testing.assert_close(values.float(), expected.values)
    assert torch.equal(indices, expected.indices)


@pytest.mark.skipif(not list_instruction_sets(), reason="the compiled library is not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_output_with_measures_takes_one_pass_and_no_fused_product(monkeypatch, dtype):
    query, key, value = torch.randn(3, 1, 2, 100, 8).to(dtype).unbind()
    monkeypatch.setattr(torch_fused, "run_fused_product", None)
    found = regard.attention(query, key).measure(regard.Output(value), regard.Entropy(), regard.Received())
    wide = [x.double() for x in (query, key, value)]
    weights = (wide[0] @ wide[1].mT / 8**0.5).softmax(-1)
    assert found.output.dtype == dtype
    torch.testing.assert_close(found.output, (weights @ wide[2]).to(dtype))
    torch.testing.assert_close(found.received, weights.sum(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.entropy, torch.special.entr(weights).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [">f8", ">f4", "g", ">i4"])
def test_an_array_that_torch_refuses_keeps_its_values(dtype):
    array = (np.arange(12).reshape(4, 3) ** 2 / (1 if dtype == ">i4" else 7)).astype(dtype)
    query = torch.ones(1, 3, dtype=torch.float64)
    found = regard.attention(query, array, scale=0.01).scores[0]
    expected = array.astype(np.float64).sum(-1) * 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-15 if dtype != ">f4" else 1e-7)
