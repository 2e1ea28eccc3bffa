"""The calls of torch's fused kernels: their self-check, their blocks of keys, and the public function's."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from regard import attention, causal, padding, sliding_window  # noqa: E402
from regard.engines import (  # noqa: E402
    find_engine,
    torch_precision,
    triton_pass,
)
from regard.engines import torch_bands as bands  # noqa: E402
from regard.engines import torch_fused as fused  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.engines import torch_lowering as lowering  # noqa: E402
from regard.engines.torch import TorchNamespace  # noqa: E402
from regard.engines.torch_lowering import LoweredBand  # noqa: E402
from regard.frame import Frame  # noqa: E402
from regard.masks import dense  # noqa: E402
from regard.score_mods import bias  # noqa: E402
from regard.tiling import tile_sizes  # noqa: E402
from tests.helpers.tensors import draw  # noqa: E402

# -- The self-check -------------------------------------------------------------------------------------------

FAULTS = {
    "lse off by 1.0e+00 with no mask, 5 tokens, 1 query heads per key head": lambda q, k, causal, tile: True,
    "lse off by 1.0e+00 with causal, 70 tokens, 1 query heads per key head": lambda q, k, causal, tile: (
        causal and q.shape[2] == 70
    ),
    "lse off by 1.0e+00 with mask tile, 9 queries, 5 keys, 1 query heads per key head": lambda q, k, causal, tile: (
        tile is not None and q.shape[2] > k.shape[2]
    ),
    "lse off by 1.0e+00 with no mask, 5 tokens of bfloat16, 1 query heads per key head": lambda q, k, causal, tile: (
        q.dtype == torch.bfloat16
    ),
    "lse off by 1.0e+00 with causal, 5 queries, 9 keys of float16, 2 query heads per key head": (
        lambda q, k, causal, tile: (
            causal and q.dtype == torch.float16 and q.shape[2] < k.shape[2] and q.shape[1] > k.shape[1]
        )
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_call_that_is_wrong(fault):
    def forward(q, k, v, is_causal, tile, scale):
        wide_tile = None if tile is None else tile.to(torch.float32)
        output, lse = kernels._public_forward(*(x.float() for x in (q, k, v)), is_causal, wide_tile, scale)
        return output, lse + 1.0 if FAULTS[fault](q, k, is_causal, tile) else lse

    kernel = replace(kernels.PUBLIC, forward=forward, dtypes=(torch.float32, torch.float16, torch.bfloat16))
    groups = int(fault.split()[-6])
    assert kernels.find_fault(kernel, "cpu", groups) == fault
    assert not kernels.find_fault(kernel, "cpu", 1) or groups == 1


def test_the_name_of_the_kernel_says_why_the_triton_pass_is_off(monkeypatch):
    monkeypatch.setitem(triton_pass._FAULTS, torch.device("cpu"), "measure d16: columns are wrong")
    query, key = draw(1, 2, 5, 16, count=2)
    fault = "Triton pass off: measure d16: columns are wrong"
    assert attention(query, key).kernel == f"torch: flash on CPU; {fault}"
    assert attention(query[:, :, :0], key).kernel == f"torch: block loop (an axis is empty); {fault}"


# -- The public function --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_the_lse_is_streamed_a_few_rows_at_a_time(rows_at_once, is_causal, monkeypatch):
    query, key = draw(2, 3, 7, 4, count=2, dtype=torch.float64)
    key = torch.cat([key, key.flip(2)], 2)
    (tile,) = draw(1, 3, 7, 14, count=1, dtype=torch.float64)
    monkeypatch.setattr(kernels, "_STREAMED_SCORES", 2 * 3 * 14 * rows_at_once)
    scores = 0.5 * query @ key.mT + tile
    if is_causal:
        scores = scores.masked_fill(~torch.ones(7, 14, dtype=torch.bool).tril(), -math.inf)
    found = kernels._stream_lse(query, key, is_causal, tile, 0.5)
    torch.testing.assert_close(found, scores.logsumexp(-1), atol=1e-14, rtol=1e-14)


def test_rows_without_live_keys_are_zeros_whatever_the_public_function_returns(monkeypatch):
    query, key, value = draw(1, 2, 5, 4)
    tile = torch.zeros(1, 1, 5, 5)
    tile[..., 2, :] = -math.inf
    expected = kernels.SDPA(query, key, value, tile, 0.0, False, scale=0.5)
    expected[:, :, 2] = 0.0
    for filler in (math.nan, 7.0):

        def sdpa(*arguments, filler=filler, **options):
            output = F.scaled_dot_product_attention(*arguments, **options)
            output[:, :, 2] = filler
            return output

        monkeypatch.setattr(kernels, "SDPA", sdpa)
        output, lse = kernels.PUBLIC.forward(query, key, value, False, tile, 0.5)
        assert torch.equal(output, expected)
        assert (lse == -math.inf).tolist() == [[[False, False, True, False, False]] * 2]


MASKS = {
    "no mask": None,
    "boolean": torch.rand(1, 1, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.8,
    "additive": torch.rand(1, 2, 70, 70, generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_call_with_its_lse_is_the_public_call(name, dtype):
    query, key, value = draw(1, 2, 70, 16, dtype=dtype)
    mask = MASKS[name]
    mask = mask.to(dtype) if name == "additive" else mask
    output, lse = kernels.run_flash_with_lse(query, key, value, mask, 0.0, False, 0.3, False)
    assert torch.equal(output, F.scaled_dot_product_attention(query, key, value, mask, scale=0.3))
    scores = 0.3 * query @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_backend_is_the_one_that_torch_names():
    query, key, value = draw(1, 4, 70, 16)
    mask = torch.ones(70, 70, dtype=torch.bool)
    call = (query, key, value, None, 0.0, False, None, False)
    assert kernels.find_sdpa_backend(*call) == "flash"
    assert kernels.find_sdpa_backend(query, key, value, mask, 0.0, False, 0.3, False) == "flash"
    assert kernels.find_sdpa_backend(query, key, value, None, 0.5, False, None, False) == "math"  # a dropout
    assert kernels.find_sdpa_backend(query, key[:, :2], value[:, :2], None, 0.0, True, None, True) == "flash"
    assert kernels.find_sdpa_backend(query, None, value, *call[3:]) == "scaled_dot_product_attention"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [256, 257], ids=["small", "large"])
def test_the_compiled_scan_reads_small_outputs_of_the_dtypes_that_it_has(dtype, rows, monkeypatch):
    query, key, value = draw(1, 2, 260, 64, dtype=dtype)
    scanned, is_finite = [], [1]

    def scan(is_double, address, count, lse_address, num_rows):
        scanned.append((is_double, count, num_rows))
        return is_finite[0]

    monkeypatch.setattr(fused, "load_library", lambda: SimpleNamespace(regard_is_sound=scan))
    run = fused.prepare_fast_product(query[:, :, :rows], key, None, 0.125, find_engine("test", query=query))
    assert run(value, False) is not None
    used = dtype != torch.bfloat16 and rows * 2 * 64 <= fused.MAX_SCANNED
    assert scanned == [(dtype == torch.float64, rows * 2 * 64, rows * 2)] * used
    is_finite[0] = 0
    assert run(value, False) is not None  # an operator of torch finds nothing
    value[0, 1, 7] = math.nan
    assert run(value, False) is None


# -- Bands and blocks of keys ---------------------------------------------------------------------------------


def test_rows_without_blocks_are_on_the_device_of_the_query():
    for dtype, lse_dtype in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        q = torch.empty(1, 2, 3, 4, dtype=dtype, device="meta")
        call = bands.KernelCall(kernels.CPU_FLASH, [LoweredBand(range(5, 8), ())], 5, 0, None, 1.0, set())
        output, lse = bands.run_bands(q, q, q[..., :2], None, call)
        assert (output.shape, output.dtype, output.device.type) == ((1, 2, 3, 2), dtype, "meta")
        assert (lse.shape, lse.dtype, lse.device.type) == ((1, 2, 3), lse_dtype, "meta")


@pytest.mark.parametrize("mask", [None, causal(), sliding_window(5), padding([9, 17])], ids=repr)
def test_gradients_over_blocks_of_keys_add_up_to_the_whole(mask, small):
    query, key, value = (
        x.requires_grad_() for n, x in zip((4, 2, 2), draw(2, 4, 19, 8, dtype=torch.float64), strict=True)
        for x in [x[:, :n].clone()]
    )  # fmt: skip
    value = value[..., :5].detach().requires_grad_()
    A = attention(query, key, mask=mask, enable_gqa=True)
    output = A @ value
    (grad,) = draw(*output.shape, seed=3, dtype=torch.float64, count=1)
    expected = torch.autograd.grad(output, (query, key, value), grad)

    def flatten(x):
        return x.detach().flatten(0, 1)

    found = [[], [], []]
    for start, stop in ((0, 8), (8, 11), (11, 19)):
        block = replace(A.problem, key=flatten(key)[:, start:stop], first_key=start)
        grads = fused.run_fused_backward(
            block, flatten(value)[:, start:stop], A.problem.key_index, flatten(grad), flatten(output), flatten(A.lse)
        )  # fmt: skip
        for own, part in zip(found, grads, strict=True):
            own.append(part)
    totals = (sum(found[0]), torch.cat(found[1], 1), torch.cat(found[2], 1))
    for own, right in zip(totals, expected, strict=True):
        torch.testing.assert_close(own, flatten(right), atol=1e-13, rtol=1e-12)


def test_adjoining_blocks_of_one_kind_are_one_call():
    frame, rows, starts = Frame((1,), 12, 12), range(12), np.array([0, 4, 8])
    for has_bias in (False, True):
        band = lowering._lower_band(frame, None, rows, starts, 12, has_bias, tile_sizes())
        assert band == (rows, (lowering.KernelBlock(range(12), False, has_bias),))


@pytest.mark.parametrize(("head_dim", "value_dim", "width"), [(8, 8, 8), (8, 5, 16), (5, 8, 16), (20, 3, 32)])
def test_a_call_is_padded_only_if_the_widths_differ(head_dim, value_dim, width):
    query, key = draw(1, 2, 5, head_dim, count=2)
    (value,) = draw(2, 5, value_dim, count=1)
    problem = attention(query, key).problem
    *tensors, sink, call = fused._prepare_call(problem, value, problem.key_index, kernels.CPU_FLASH, set())
    assert [tuple(x.shape) for x in tensors] == [(1, 2, 5, width)] * 3
    for own, x in zip(tensors, (query[0], key[0], value), strict=True):
        assert torch.equal(own[0, ..., : x.shape[-1]], x) and not own[..., x.shape[-1] :].any()
    assert sink is None and call.scale == problem.scale


def test_chosen_heads_are_taken_on_their_own_device():
    (array,) = draw(4, 3, 8, count=1)
    with torch.device("meta"):  # the default device must not matter
        taken = fused._to_heads(array, np.array([2, 0, 2]), 8, torch.float64)
    assert torch.equal(taken, array[[2, 0, 2]].double()[None])


@pytest.mark.parametrize("earlier", [math.inf, math.nan, 3.0])
def test_a_bias_of_minus_infinity_masks_what_an_earlier_one_added(earlier):
    query, key, value = draw(1, 2, 5, 8, dtype=torch.float64)
    one, other = torch.zeros(2, 5, 5, dtype=torch.float64)
    one[1, 2], other[1, 2] = earlier, -math.inf
    A = attention(query, key, score_mod=[bias(one), bias(other)])
    allowed = torch.ones(5, 5, dtype=torch.bool)
    allowed[1, 2] = False
    torch.testing.assert_close(A @ value, attention(query, key, mask=dense(allowed)) @ value)
    assert A.kernel == "torch: flash on CPU, masked"


@pytest.mark.parametrize(("precision", "is_kept"), [("highest", True), ("medium", False)])
def test_an_lse_of_reduced_precision_is_not_kept(precision, is_kept):
    query, key, value = draw(1, 2, 70, 16)
    run = fused.prepare_fast_product(query, key, None, 0.25, find_engine("test", query=query))
    try:
        torch.set_float32_matmul_precision(precision)
        assert (run(value, True)[1] is not None) == is_kept
        problem = attention(query, key).problem
        lse = fused.run_fused_product(problem, value[0], problem.key_index)[1]
        assert (lse is not None) == is_kept
    finally:
        torch.set_float32_matmul_precision("highest")


# -- The largest weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, k", [(4096, 4), (1024, 1), (5000, 3)])
def test_topk_sorts_few_weights_of_a_long_row_on_its_own_device(length, k, monkeypatch):
    (weights,) = draw(2, 3, length, count=1)
    weights = weights.abs()
    expected = weights.sort(-1, descending=True)
    topk, lengths = torch.topk, []
    monkeypatch.setattr(torch, "topk", lambda x, *k, **dim: lengths.append(x.shape[-1]) or topk(x, *k, **dim))
    engine = find_engine("test", x=weights)
    with torch.device("meta"):  # the default device must not matter
        values, columns = engine.topk(weights, k)
    assert torch.equal(values, expected.values[..., :k]) and torch.equal(columns, expected.indices[..., :k])
    assert len(lengths) == 2 and sum(lengths) <= 2.2 * math.sqrt(length * k)


# -- Devices without a kernel ---------------------------------------------------------------------------------


def test_meta_tensors_have_float64():
    device = torch.device("meta")
    assert torch_precision.has_float64(device)
    zeros = TorchNamespace(device).zeros((2, 3))
    assert (zeros.dtype, zeros.device.type, tuple(zeros.shape)) == (torch.float64, "meta", (2, 3))
