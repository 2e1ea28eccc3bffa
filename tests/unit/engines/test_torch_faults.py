"""The torch engine: guarantees whose violation other tests would not notice."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard import alibi, attention, causal, padding, sliding_window, softcap  # noqa: E402
from regard.engines import find_engine  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.engines import torch_lowering as lowering  # noqa: E402
from regard.masks import dense, first  # noqa: E402
from regard.score_mods import bias  # noqa: E402
from regard.testing import Case, build_inputs, check_case, draw_cases  # noqa: E402
from regard.tiling import tile_sizes, use_tile_sizes  # noqa: E402
from tests.helpers import tensors  # noqa: E402

draw = partial(tensors.draw, dtype=torch.float64)


@pytest.fixture
def small(small: None) -> Iterator[None]:
    """Small tiles, and small blocks that are not joined."""
    with use_tile_sizes(joined_columns=1):
        yield


# -- Kernel calls ---------------------------------------------------------------------------------------------


def test_some_rows_of_a_causal_matrix_equal_those_of_the_whole():
    query, key, value = draw(2, 3, 30, 8)
    A = attention(query, key, mask=causal())
    part = A.lazy[..., 7:25, :]
    torch.testing.assert_close(part @ value, (A @ value)[..., 7:25, :])
    assert part.kernel == "torch: flash on CPU, masked"


def test_some_rows_of_a_causal_matrix_have_gradients(small):
    query, key, value = (x.requires_grad_() for x in draw(1, 2, 9, 3))

    def rows(query, key, value):
        return attention(query, key, mask=causal()).lazy[..., 2:8, :] @ value

    assert torch.autograd.gradcheck(rows, (query, key, value))


def test_a_mask_tile_has_few_rows_even_if_the_mask_has_no_split_points(monkeypatch):
    query, key, value = draw(1, 1, 1200, 4)
    rows = []
    make = lowering.make_tile_builder

    def recorded(pairs):
        tile = make(pairs)
        return lambda band, columns: rows.append(len(band)) or tile(band, columns)

    monkeypatch.setattr(lowering, "make_tile_builder", recorded)
    # Only the future: no kernel takes it as a causal block, so every block has a tile.
    attention(query, key, mask=~causal()) @ value
    attention(query, key, score_mod=alibi()) @ value
    assert sum(rows) == 1200 + 1200 and max(rows) <= tile_sizes().mask_tile_rows


def test_rows_from_the_middle_of_a_causal_matrix_need_no_mask_tile(monkeypatch):
    query, key, value = draw(1, 2, 1200, 4)
    A = attention(query, key, mask=causal())
    expected = (A @ value)[:, :, 500:1100]
    monkeypatch.setattr(lowering, "make_tile_builder", lambda pairs: None)  # building a tile would fail
    part = A.lazy[..., 500:1100, :]
    torch.testing.assert_close(part @ value, expected)
    assert part.kernel == "torch: flash on CPU, 2 blocks"
    chunk = attention(query[:, :, 600:], key, mask=causal(align="lower_right"))
    torch.testing.assert_close(chunk @ value, (A @ value)[:, :, 600:])
    torch.testing.assert_close(chunk.lazy[..., 20:560, :] @ value, (A @ value)[:, :, 620:1160])


@pytest.mark.parametrize(
    "heads", [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5], [0, 1, 2, 3, 5, 6], [4, 5, 0, 1]], ids=str
)
def test_16_chosen_heads_keep_their_own_key_heads(heads):
    query, *_ = draw(1, 12, 20, 8)
    key, value = draw(1, 3, 20, 8, seed=1, count=2)
    A = attention(query, key, mask=sliding_window(7), enable_gqa=True)
    every = attention(query, key.repeat_interleave(4, 1), mask=sliding_window(7))
    torch.testing.assert_close(A @ value, every @ value.repeat_interleave(4, 1))
    part = A.lazy[:, heads]
    torch.testing.assert_close(part @ value[0, 0], (every @ value[0, 0])[:, heads])
    assert part.kernel == "torch: flash on CPU, masked"


def test_16_heads_that_share_a_key_keep_their_own_values():
    query, value, _ = draw(2, 6, 20, 8)
    (key,) = draw(20, 8, seed=1, count=1)
    A = attention(query, key, mask=sliding_window(7))
    same = attention(query.numpy(), key.numpy(), mask=sliding_window(7)) @ value.numpy()
    np.testing.assert_allclose(A @ value, same, atol=1e-14)
    assert "blocks" in A.kernel or "masked" in A.kernel


def test_one_batch_entry_of_keys_broadcasts():
    query, *_ = draw(3, 2, 20, 8)
    # Slices of larger tensors: the operator must not read beyond them.
    key, value = (x[:1] for x in draw(3, 2, 20, 8, seed=1, count=2))
    for mask in (None, causal()):
        expected = attention(query, key.expand(3, 2, 20, 8), mask=mask) @ value.expand(3, 2, 20, 8)
        torch.testing.assert_close(attention(query, key, mask=mask) @ value, expected)


@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
@pytest.mark.parametrize("q_len, kv_len", [(5, 9), (9, 5), (8, 9), (9, 8), (2, 9), (1, 9), (9, 1)])
def test_09_either_corner_at_any_lengths(q_len, kv_len, align):
    query, *_ = draw(1, 2, q_len, 8)
    key, value = draw(1, 2, kv_len, 8, seed=1, count=2)
    mask = causal(align=align)
    same = attention(query.numpy(), key.numpy(), mask=mask)
    A = attention(query, key, mask=mask)
    np.testing.assert_allclose(A @ value, same @ value.numpy(), atol=1e-14)
    np.testing.assert_allclose(A.lse, same.lse, atol=1e-14)


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_13_a_causal_call_takes_any_scale(scale):
    # The operator masks before it scales: −inf · −1 would be the largest score, −inf · 0 NaN.
    query, key, value = draw(1, 2, 20, 8)
    A = attention(query, key, mask=causal(), scale=scale)
    expected = attention(query.numpy(), key.numpy(), mask=causal(), scale=scale) @ value.numpy()
    np.testing.assert_allclose(A @ value, expected, atol=1e-14)
    assert A.kernel == "torch: flash on CPU, causal"


@pytest.mark.parametrize("mask", [sliding_window(7), sliding_window(left=7, right=5)], ids=repr)
def test_each_edge_of_a_window_has_its_own_mask_tiles(mask, small):
    query, key, value = draw(1, 2, 40, 8)
    (extra,) = draw(40, 40, seed=2, count=1)
    for changes, same_changes in (((), ()), ([bias(extra)], [bias(extra.numpy())])):
        A = attention(query, key, mask=mask, score_mod=changes)
        same = attention(query.numpy(), key.numpy(), mask=mask, score_mod=same_changes)
        np.testing.assert_allclose(A @ value, same @ value.numpy(), atol=1e-14)
        assert "with a mask tile" in A.kernel if changes else A.kernel.endswith(", masked")


def test_a_value_of_a_wider_dtype_keeps_its_precision():
    query, key, _ = draw(1, 2, 20, 8, dtype=torch.float32)
    (value,) = draw(1, 2, 20, 8, count=1)
    value = 1 + 1e-9 * value
    for mask in (None, causal(), sliding_window(7)):
        output = attention(query, key, mask=mask) @ value
        exact = attention(query.double(), key.double(), mask=mask) @ value
        torch.testing.assert_close(output, exact, atol=1e-15, rtol=0)


def test_the_block_loop_keeps_the_precision_of_a_wider_value():
    query, key, _ = draw(1, 2, 20, 8, dtype=torch.float32)
    (value,) = draw(1, 2, 20, 3, count=1)
    A, W = attention(query, key), attention(query, key).to_dense().double()
    capped = attention(query, key, score_mod=softcap(5.0))
    rows = [5, 2, 11]
    for found, expected in (
        (A.mT @ value, W.mT @ value),
        (A.lazy[..., rows, :] @ value, W[..., rows, :] @ value),
        (capped @ value, capped.to_dense().double() @ value),
        (
            attention(query.requires_grad_(), key, score_mod=softcap(5.0)) @ value,
            capped.to_dense().double() @ value,
        ),
    ):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.detach(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_value_keeps_its_dtype_and_does_not_lower_the_scores(dtype):
    query, key, _ = draw(1, 2, 20, 8, dtype=torch.float32)
    (value,) = draw(1, 2, 20, 8, dtype=dtype, count=1)
    output = attention(query, key, mask=sliding_window(7)) @ value
    exact = attention(query.double(), key.double(), mask=sliding_window(7)) @ value.double()
    assert output.dtype == dtype
    torch.testing.assert_close(output, exact.to(dtype), atol=0, rtol=torch.finfo(dtype).eps)


def test_half_precision_values_whose_sum_overflows_stay_fused():
    query, key, value = draw(1, 2, 70, 16, dtype=torch.float16)
    value = value + 900  # 2,240 of them sum to more than 65,504
    for mask, words in ((None, "no mask"), (sliding_window(7), "masked")):
        A = attention(query, key, mask=mask)
        assert (A @ value).isfinite().all()
        assert A.kernel == f"torch: flash on CPU, {words}"


@pytest.mark.parametrize("kv_len", [1, 15, 16, 31, 33, 63, 64, 65, 129])
def test_03_a_query_of_nan_shows_however_many_keys_it_has(kv_len):
    query, *_ = draw(1, 2, 5, 8, dtype=torch.float32)
    key, value = draw(1, 2, kv_len, 8, seed=1, count=2, dtype=torch.float32)
    query[0, 1, 2] = math.nan
    expected = torch.zeros(1, 2, 5, dtype=torch.bool)
    expected[0, 1, 2] = True
    wide = torch.cat([value, value], -1)  # takes the other path to the kernel
    for array in (value, wide):
        assert torch.equal((attention(query, key) @ array).isnan().all(-1), expected)


WRONG_KERNELS = {
    "lse in base 2": lambda output, lse: (output, lse / math.log(2)),
    "another output": lambda output, lse: (output.flip(-1), lse),
    "one result": lambda output, lse: (output,),
}


@pytest.mark.parametrize("name", WRONG_KERNELS)
def test_an_operator_with_wrong_results_is_not_used(name, monkeypatch):
    def forward(*arguments):
        return WRONG_KERNELS[name](*kernels._cpu_forward(*arguments))

    assert kernels.check_kernel(kernels.CPU_FLASH, "cpu") is not None
    monkeypatch.setattr(kernels, "_checked", {})
    wrong = replace(kernels.CPU_FLASH, forward=forward)
    monkeypatch.setitem(kernels.KERNELS, "cpu", (wrong, *kernels.KERNELS["cpu"][1:]))
    fault = kernels.find_fault(wrong, "cpu", groups=1)
    assert fault.startswith(
        {"lse in base 2": "lse off by", "another output": "output off by"}.get(name, "ValueError")
    )
    assert kernels.get_kernel("cpu").is_public
    query, key, value = draw(1, 2, 70, 16, dtype=torch.float32)
    A = attention(query, key, mask=causal())
    torch.testing.assert_close(A @ value, A.to_dense() @ value)
    assert A.kernel == "torch: scaled_dot_product_attention, lse streamed, causal"
    assert kernels.run_flash_with_lse(query, key, value, None, 0.0, True, None, False) is None
    monkeypatch.undo()
    assert kernels.get_kernel("cpu").name == "flash on CPU"


@pytest.mark.parametrize("seed", [3, 4])
def test_the_public_function_passes_the_generated_cases_in_place_of_the_operator(seed, monkeypatch):
    monkeypatch.setattr(kernels, "get_kernel", lambda device_type: replace(kernels.PUBLIC, takes_groups=True))
    monkeypatch.setattr(kernels, "_cpu_operator", lambda: pytest.fail("the operator was called"))
    kernels_used = set()
    for case, is_possible in draw_cases(60, seed, 16):
        inputs = build_inputs(case, 16) if is_possible else None
        if inputs is not None:
            assert check_case(case, inputs, ["torch fused"]) == []
    query, key, value = draw(2, 3, 70, 16, dtype=torch.float32)
    for mask in (None, causal(), sliding_window(9)):
        A = attention(query, key, mask=mask)
        A @ value
        kernels_used.add(A.kernel.split(",")[0])
    assert kernels_used == {"torch: scaled_dot_product_attention"}


def test_the_public_function_has_gradients(gradcheck):
    query, key, value = (x.requires_grad_() for x in draw(1, 2, 9, 4))

    def product(query, key, value):
        return kernels.PUBLIC.forward(query, key, value, True, None, 0.5)[0]

    assert gradcheck(product, (query, key, value))


def test_an_old_torch_is_refused_with_a_hint():
    # A process of its own: the capability is looked for when the engine is imported.
    code = (
        "import torch, regard\ntorch.backends.mkldnn.matmul = object()\n"
        "try:\n    regard.attention(torch.ones(2, 4), torch.ones(2, 4))\n"
        "except regard.ArgumentTypeError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy())
    assert f"tensors of torch {torch.__version__}, which has no" in run.stdout, run.stderr
    assert "fp32_precision" in run.stdout and "pip install --upgrade 'regard[torch]'" in run.stdout


def test_tensors_of_another_device_are_refused():
    query, key, value = draw(5, 8)
    with pytest.raises(regard.ArgumentTypeError, match="cpu, where the query is"):
        attention(query, key.to("meta"))
    with pytest.raises(regard.ArgumentTypeError, match="cpu, where the query is"):
        attention(query, key) @ value.to("meta")


def test_25_lse_is_rounded_once_for_any_number_of_blocks():
    case = Case(
        dtype="float32", mask="window & padding", q_len=33, kv_len=257, head_dim=8, value_dim="head_dim",
        heads="three", layout="reversed", values="denormal", change="scale 0", seed=504502169,
    )  # fmt: skip
    inputs = build_inputs(case, 16)
    with use_tile_sizes(mask_rows=16, mask_tile_rows=24, joined_columns=48):
        assert inputs is not None and check_case(case, inputs, ["torch fused"]) == []


# -- Weights after the kernel ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_weights_of_large_and_close_scores_keep_their_digits(scale):
    # All scores are about ±10⁴ and differ by little: an lse of float32 has no digits left for their sum.
    query, key, value = draw(1, 2, 40, 16, dtype=torch.float32)
    query, key = 25 + query / 100, 25 + key / 100
    A = attention(query, key, scale=scale)
    A @ value
    assert A.lse.abs().min() > 9e3
    for sums in (A.sum(-1), A[..., :20].sum(-1) + A[..., 20:].sum(-1), A.lazy[..., 3:9, :].sum(-1)):
        torch.testing.assert_close(sums.double(), torch.ones_like(sums.double()), atol=2e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 3, 20])
def test_of_equal_weights_the_first_are_returned(k):
    for kv_len in (40, 300, 1100):
        query, key = torch.zeros(1, 6, 2), torch.zeros(1, kv_len, 2)
        A = attention(query, key)
        assert A.topk(k).indices.tolist() == [[list(range(k))] * 6]
        key[0, [kv_len - 1, kv_len // 2], 0], query[..., 0] = 1.0, 2.0
        top = [kv_len // 2, kv_len - 1, *range(k)][:k]
        assert attention(query, key).topk(k).indices.tolist() == [[top] * 6]


def test_of_nan_weights_the_first_are_returned():
    query, key, _ = draw(1, 6, 4, dtype=torch.float32)
    key = torch.cat([key] * 20, 1)
    query[0, 3] = math.nan
    top = attention(query, key).topk(5)
    assert top.indices[0, 3].tolist() == [0, 1, 2, 3, 4] and top.values[0, 3].isnan().all()
    assert top.values[0, [0, 1, 2, 4, 5]].isfinite().all()


@pytest.mark.parametrize("length", [37, 64, 100, 333])
@pytest.mark.parametrize("k", [1, 5, 8, 32])
def test_topk_with_many_ties_equals_numpy(length, k):
    rng = np.random.default_rng(length)
    few = rng.integers(0, 4, (40, length)) / 4 * (rng.random((40, length)) < 4 / length)
    for weights in (rng.integers(0, 40, (40, length)) / 40, few, np.zeros((2, length))):
        values, columns = find_engine("test", x=torch.zeros(1)).topk(torch.tensor(weights), k)
        expected, first_ones = find_engine("test", x=weights).topk(weights, k)
        assert ((columns >= 0) & (columns < length)).all()
        np.testing.assert_array_equal(np.sort(values.numpy()), np.sort(expected))
        for mine, theirs, row in zip(columns.numpy(), first_ones, weights, strict=True):
            assert set(mine[row[mine] > 0]) == set(theirs[row[theirs] > 0])


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("sizes", [(1, 3, 2, 6), (4, 4, 4), (2, 1) * 20, (5,) * 30], ids=len)
def test_segments_of_any_sizes_equal_numpy(sizes, axis, reduce):
    numbers = np.random.default_rng(len(sizes)).random((2, sum(sizes), 7))
    array = numbers if axis == -2 else numbers.swapaxes(-1, -2)
    segments = np.split(array, np.cumsum(sizes)[:-1], axis)
    expected = np.stack([getattr(segment, reduce)(axis) for segment in segments], axis)
    for x in (array, torch.tensor(array)):
        found = find_engine("test", x=x).segment_reduce(x, sizes, axis, reduce)
        np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_03_a_nan_stays_in_its_own_cells_within_a_tile(reduce):
    query, key, _ = draw(1, 12, 4)
    query[0, 5] = math.nan
    key[0, 7] = math.nan
    cells = attention(query, key, mask=causal()).coarsen(4, reduce)
    expected = torch.zeros(1, 4, 4, dtype=torch.bool)
    expected[0, 1, :2] = True  # row 5 and its keys
    expected[0, 2:] = True  # rows that attend to key 7, in their live cells only
    expected[0, 2, 3] = False
    assert torch.equal(cells.isnan(), expected)


# -- Gradients ------------------------------------------------------------------------------------------------

RESULTS = {
    "entropy": lambda A, value: A.entropy(),
    "mass": lambda A, value: A.mass(first(3)),
    "received": lambda A, value: A.sum(axis=-2),
    "spread": lambda A, value: A.measure(regard.Spread()).spread,
    "weights": lambda A, value: A.to_dense(),
    "entries": lambda A, value: A[..., 2:5, 1:3],
    "lse": lambda A, value: A.lse,
    "product": lambda A, value: A @ value,
    "transposed": lambda A, value: A.mT @ value,
}
SINK = torch.tensor([0.5, -1.0], dtype=torch.float64)
ARGUMENTS = {
    "sink": {"sink": SINK},
    "overwhelming sink": {"sink": SINK + 1000},
    "sink that is none": {"mask": causal(), "sink": torch.full((2,), -math.inf, dtype=torch.float64)},
    "window and sink": {"mask": causal() & sliding_window(3), "sink": SINK},
    "empty rows": {"mask": sliding_window(3) & ~first(2), "score_mod": softcap(2.0)},
    "empty rows and sink": {"mask": sliding_window(3) & ~first(2), "score_mod": softcap(2.0), "sink": SINK},
    "alibi": {"mask": causal(), "score_mod": alibi()},
    "large scores": {"mask": causal(), "scale": 1000.0},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("what", RESULTS)
def test_a_result_is_the_same_with_and_without_gradients(what, name, small):
    # gradcheck compares a function with itself, not with the code path without gradients.
    query, key, value = draw(1, 2, 9, 4)
    arguments = dict(ARGUMENTS[name])
    plain = RESULTS[what](attention(query, key, **arguments), value)
    learned = [x.clone().requires_grad_() for x in (query, key, value)]
    if "sink" in arguments:
        arguments["sink"] = arguments["sink"].clone().requires_grad_()
        learned.append(arguments["sink"])
    result = RESULTS[what](attention(*learned[:2], **arguments), learned[2])
    torch.testing.assert_close(result.detach(), plain, atol=1e-12, rtol=1e-12)
    result[result.isfinite()].sum().backward()
    assert all(x.grad.isfinite().all() for x in learned if x.grad is not None)
    assert learned[0].grad is not None


@pytest.mark.parametrize("what", ["entropy", "mass", "lse"])
def test_a_measure_has_gradients_of_a_sink_or_a_bias_alone(what, small):
    query, key, value = draw(1, 2, 7, 3)
    (extra,) = draw(7, 7, seed=2, count=1)
    compute = RESULTS[what]
    sink = SINK.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda sink: compute(attention(query, key, mask=causal(), sink=sink), value), (sink,)
    )
    assert torch.autograd.gradcheck(
        lambda extra: compute(attention(query, key, mask=causal(), score_mod=bias(extra)), value),
        (extra.requires_grad_(),),
    )


@pytest.mark.parametrize("what", RESULTS)
def test_05_no_gradient_passes_through_nan_on_its_way_to_an_empty_row(what, small):
    # Anomaly detection would stop at a NaN even if a later step masks it.
    query, key, value = (x.requires_grad_() for x in draw(1, 2, 9, 4))
    with torch.autograd.set_detect_anomaly(True):
        result = RESULTS[what](attention(query, key, **ARGUMENTS["empty rows"]), value)
        result[result.isfinite()].sum().backward()
    assert (query.grad[:, :, :2] == 0).all() and (query.grad[:, :, 4] != 0).any()


@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("heads", [2, 4], ids=["own", "grouped"])
def test_03_a_live_nan_shows_with_and_without_gradients(which, heads, small):
    query, *_ = draw(1, heads, 20, 4)
    arrays = [query, *draw(1, 2, 20, 4, seed=1, count=2)]
    arrays[which][0, 1, 6] = math.nan  # live for queries 6, 7 and 8 only, and not in the last of four heads
    arrays[which][0, 0, 18:] = math.nan  # masked for every query
    allowed = torch.ones(heads, 20, 20, dtype=torch.bool)
    allowed[3:, :, 6] = False
    mask = sliding_window(3) & padding(18) & dense(allowed)
    arguments = {"mask": mask, "score_mod": softcap(4.0), "enable_gqa": heads == 4}

    def rows(query, key, value):
        return (attention(query, key, **arguments) @ value).isnan().all(-1)

    expected = torch.zeros(1, heads, 20, dtype=torch.bool)
    expected[0, heads // 2, 6:9] = True
    assert torch.equal(rows(*arrays), expected)
    assert torch.equal(rows(*(x.requires_grad_() for x in arrays)), expected)


def test_a_learned_bias_is_fused_under_no_grad():
    query, key, value = draw(1, 2, 20, 8)
    (extra,) = (x.requires_grad_() for x in draw(20, 20, seed=2, count=1))
    with torch.no_grad():
        A = attention(query, key, score_mod=bias(extra))
        output = A @ value
    assert A.kernel == "torch: flash on CPU, masked" and not output.requires_grad


@pytest.mark.parametrize("what", ["entropy", "weighted"])
def test_only_the_result_of_a_band_is_saved(what):
    n = 1000
    query, key, value = (x.requires_grad_() for x in draw(1, 1, n, 8, dtype=torch.float32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        A = attention(query, key, score_mod=softcap(9.0))
        result = A.entropy() if what == "entropy" else A @ value
    assert sum(saved) < 60 * n < n * n / 10
    result.sum().backward()
    assert key.grad.isfinite().all() and (key.grad != 0).any()


def test_dense_masks_of_numpy_and_torch_are_equal():
    query, key, value = draw(1, 2, 20, 8)
    allowed = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.5
    same = attention(query, key, mask=dense(allowed.numpy())) @ value
    assert torch.equal(attention(query, key, mask=dense(allowed)) @ value, same)


# -- Gradients of measures that change their state in place ----------------------------------------------


class LargestProduct(regard.Measure):
    """A measure of one's own that reads and writes its state in one line: the largest weight · score of each row."""

    def init(self, shape, xp):
        return xp.full(shape[:2], -xp.inf)

    def step(self, state, weights, scores, q_idx, kv_idx, xp):
        state[:, q_idx] = xp.maximum(state[:, q_idx], xp.max(weights * scores, axis=-1))
        return state

    def merge(self, a, b):
        return torch.maximum(a, b)


class LargestInParts(regard.Measure):
    """The same with a state of two parts, read by keyword and written through a view and by out=."""

    def init(self, shape, xp):
        return [xp.full(shape[:2], -xp.inf), {"scores": xp.full(shape[:2], -xp.inf)}]

    def step(self, state, weights, scores, q_idx, kv_idx, xp):
        rows = state[0][:, q_idx[0] : q_idx[-1] + 1]
        rows[...] = torch.maximum(input=rows, other=(weights * scores).amax(-1))
        torch.maximum(state[1]["scores"], state[0].detach(), out=state[1]["scores"])
        return state

    def merge(self, a, b):
        return [torch.maximum(a[0], b[0]), {"scores": torch.maximum(a[1]["scores"], b[1]["scores"])}]

    def finish(self, state):
        assert torch.equal(*(x.detach() for x in (state[0], state[1]["scores"])))
        return state[0]


def compute_spread(scores):
    weights, at = scores.softmax(-1), torch.arange(scores.shape[-1], dtype=scores.dtype)
    mean = (weights * at).sum(-1, keepdim=True)
    return (weights * (at - mean) ** 2).sum(-1).sqrt()


IN_PLACE = {
    "max_score": (regard.MaxScore(), lambda scores: scores.amax(-1)),
    "received": (regard.Received(), lambda scores: scores.softmax(-1).sum(-2)),
    "spread": (regard.Spread(align="lower_right"), compute_spread),
    "coarse": (regard.Coarse((2, 2), "max"), lambda scores: scores.softmax(-1)[:, :10, :14].amax((1, 2))),
    "entropy": (regard.Entropy(), lambda scores: torch.special.entr(scores.softmax(-1)).sum(-1)),
    "own": (LargestProduct(), lambda scores: (scores * scores.softmax(-1)).amax(-1)),
    "parts": (LargestInParts(), lambda scores: (scores * scores.softmax(-1)).amax(-1)),
}


@use_tile_sizes(rows=6, columns=8)
@pytest.mark.parametrize("others", ["alone", "before others", "after others"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_of_measures_that_change_their_state_in_place(name, others):
    rng = torch.Generator().manual_seed(3)
    query, key = (torch.randn(2, n, 4, dtype=torch.float64, generator=rng) for n in (20, 28))
    query.requires_grad_()
    names = [other for other in IN_PLACE if other != name]
    names = {"alone": [name], "before others": [name, *names], "after others": [*names, name]}[others]
    results = regard.attention(query, key).measure(**{each: IN_PLACE[each][0] for each in names})
    found = getattr(results, name)
    found = found[..., 0, 0] if name == "coarse" else found
    expected = IN_PLACE[name][1](query @ key.mT / 2)
    torch.testing.assert_close(found, expected)
    (ours,), (theirs,) = (torch.autograd.grad(x.sum(), query) for x in (found, expected))
    torch.testing.assert_close(ours, theirs)
