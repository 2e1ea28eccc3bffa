"""CUDA's fused operators are called as their own checks demand, forward and backward, without a GPU to say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
F = torch.nn.functional

from regard import attention, causal, sliding_window  # noqa: E402
from regard.engines import find_engine, torch_cuda  # noqa: E402
from regard.engines import torch_fused as fused  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.masks import dense  # noqa: E402
from regard.measures import Entropy, Received  # noqa: E402
from regard.score_mods import bias  # noqa: E402
from regard.testing.device_check import list_operators  # noqa: E402
from tests.helpers import cuda_double, device_cases  # noqa: E402
from tests.helpers.tensors import draw  # noqa: E402

HALVES = [torch.float16, torch.bfloat16]


def count_failures(count: int, seed: int) -> list[str]:
    """Run cases forward and backward on the doubles: flash first, then cuDNN first."""
    failures = []
    for i, prefers_cudnn in enumerate((False, True)):
        with cuda_double.use_cuda_kernels(prefers_cudnn=prefers_cudnn):
            for case in device_cases.draw(count, seed)[i::2]:
                failures += filter(None, [device_cases.run_case(case, "torch fused")])
                failures += filter(None, [device_cases.run_backward(case)])
    return failures


def test_no_call_is_illegal():
    failures = count_failures(80, seed=20)
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:5]])


@pytest.mark.nightly
def test_no_call_of_three_thousand_cases_is_illegal():
    failures = count_failures(3000, seed=21)
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:5]])


def test_every_operator_is_called():
    total = cuda_double.Counter()
    for prefers_cudnn in (False, True):
        with cuda_double.use_cuda_kernels(prefers_cudnn=prefers_cudnn) as calls:
            for dtype in (torch.float32, *HALVES):
                query, key, value = (x.requires_grad_() for x in draw(1, 2, 40, 16, dtype=dtype))
                for mask in (None, causal(), sliding_window(9)):
                    (attention(query, key, mask=mask) @ value).sum().backward()
            total += calls
    assert set(total) == {"efficient", "efficient backward", "flash", "flash backward", "cudnn"}


# -- The doubles refuse what the operators refuse --------------------------------------------------------------


def illegal_calls():
    query, key, value = draw(1, 2, 40, 16)
    efficient, flash = cuda_double.efficient, cuda_double.flash
    half = [x.bfloat16() for x in (query, key, value)]
    tile = torch.zeros(1, 2, 40, 40)
    short = [x[:, :, :39] for x in (key, value)]
    packed, seed = query.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros((), dtype=torch.int64)
    lse = F.pad(torch.zeros(1, 2, 40), (0, 24), value=torch.inf)
    return {
        "float64": lambda: efficient(*(x.double() for x in (query, key, value)), None, True),
        "head_dim": lambda: efficient(*(x[..., :3].contiguous() for x in (query, key, value)), None, True),
        "stride": lambda: efficient(*(x[..., :8] for x in draw(1, 2, 40, 9)), None, True),
        "pointer": lambda: efficient(*(x[..., 1:9] for x in draw(1, 2, 40, 12)), None, True),
        "groups": lambda: efficient(query, key[:, :1], value[:, :1], None, True),
        "tile dtype": lambda: efficient(*half, tile, True),
        "tile shape": lambda: efficient(query, key, value, tile[:, :1], True),
        "tile stride": lambda: efficient(query, *short, torch.zeros(1, 2, 40, 39), True),
        "flash in float32": lambda: flash(query, key, value),
        "flash head_dim": lambda: flash(*(x[..., :12].contiguous() for x in half)),
        "lse": lambda: cuda_double.efficient_backward(
            query, query, key, value, None, packed, torch.zeros(1, 2, 40), seed, seed, 0.0,
            [True, True, True, False], scale=1.0,
        ),
        "seed": lambda: cuda_double.efficient_backward(
            query, query, key, value, None, packed, lse, seed.float(), seed, 0.0,
            [True, True, True, False], scale=1.0,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", illegal_calls())
def test_the_doubles_refuse_an_illegal_call(name):
    with pytest.raises(cuda_double.IllegalCallError):
        illegal_calls()[name]()


def test_the_first_version_of_the_calls_is_found_illegal(monkeypatch):
    """The operator called directly, with repeated heads and a converted tile, as before these checks were known."""

    def forward(q, k, v, is_causal, tile, scale):
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        tile = None if tile is None else tile.to(q.dtype).expand(1, q.shape[1], q.shape[2], k.shape[2])
        output, lse, *_ = cuda_double.efficient(q, k, v, tile, True, 0.0, is_causal, scale=scale)
        return output, lse[..., : q.shape[2]]

    first = replace(
        kernels.CUDA_FUSED, forward=forward, backward=None, dtypes=None, alternatives={}, takes_groups=True
    )
    monkeypatch.setattr(kernels, "get_kernel", lambda device_type: first)
    cases = device_cases.draw(60, seed=20)
    failures = [failure for case in cases if (failure := device_cases.run_case(case, "torch fused"))]
    illegal = [failure for failure in failures if "IllegalCallError" in failure]
    assert len(illegal) > 15
    # A legal call fails only where converting the tile to half precision rounds a score_mod.
    rounded = [failure for failure in failures if failure not in illegal]
    assert all("float16'" in failure and "above the error rule" in failure for failure in rounded)


# -- What runs -------------------------------------------------------------------------------------------------


def kernel_of(matrix, value):
    _ = matrix @ value
    return matrix.kernel


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_run_what_sdpa_would_run(dtype):
    query, key, value = draw(1, 2, 40, 16, dtype=dtype)
    for prefers_cudnn, name in ((False, "flash"), (True, "cuDNN")):
        with cuda_double.use_cuda_kernels(prefers_cudnn=prefers_cudnn):
            A = attention(query, key, mask=causal())
            assert kernel_of(A, value) == f"torch: {name} on CUDA, causal"
            # Flash counts a causal mask from the lower right corner: only squares go there.
            A = attention(query[:, :, :7], key, mask=causal(align="upper_left"))
            assert kernel_of(A, value) == "torch: efficient on CUDA, causal"
            A = attention(query, key, mask=causal() & dense(torch.rand(40, 40) < 0.9))
            assert kernel_of(A, value).startswith("torch: efficient on CUDA, ")


def test_float32_runs_the_efficient_kernel_and_float64_the_block_loop():
    with cuda_double.use_cuda_kernels() as calls:
        query, key, value = draw(1, 2, 40, 16)
        assert kernel_of(attention(query, key), value) == "torch: efficient on CUDA, no mask"
        wide = [x.double() for x in (query, key, value)]
        before = calls.total()
        assert (
            kernel_of(attention(*wide[:2]), wide[2])
            == "torch: block loop (no fused kernel for float64 on cpu)"
        )
        assert "block loop" in kernel_of(attention(query, key), wide[2])
        assert calls.total() == before


def test_grouped_heads_are_not_repeated():
    sizes = []

    def recorded(q, k, v, *args, **options):
        sizes.append((k.untyped_storage().nbytes(), k.stride(1)))
        return cuda_double.efficient(q, k, v, *args, **options)

    query, key, value = (
        draw(1, 8, 40, 16)[0],
        *(x[:, :2].clone() for x in draw(1, 8, 40, 16, seed=1, count=2)),
    )
    with cuda_double.use_cuda_kernels():
        assert kernels.get_kernel("cpu").takes_groups
        operators = cuda_double.OPERATORS.__dict__ | {"_scaled_dot_product_efficient_attention": recorded}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_cuda, "aten", cuda_double.SimpleNamespace(**operators))
            output = attention(query, key, enable_gqa=True, mask=sliding_window(9)) @ value
    repeated = [x.repeat_interleave(4, 1) for x in (key, value)]
    allowed = torch.tensor(sliding_window(9).to_dense(40, 40))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, *repeated, attn_mask=allowed))
    assert sizes and {stride for _, stride in sizes} == {0}
    assert max(size for size, _ in sizes) <= key.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", HALVES)
def test_the_float32_lse_of_a_half_kernel_is_kept(dtype):
    query, key, value = draw(1, 2, 70, 16, dtype=dtype)
    exact = attention(query.double(), key.double(), mask=causal())
    with cuda_double.use_cuda_kernels() as calls:
        A = attention(query, key, mask=causal())
        _ = A @ value
        assert A.lse.dtype == torch.float32
        torch.testing.assert_close(A.lse.double(), exact.lse, atol=1e-5, rtol=0)
        found = A.measure(Entropy(), Received())
        assert dict(calls)["flash"]
    torch.testing.assert_close(found.entropy, exact.entropy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_bias_is_not_rounded_to_half_precision(dtype):
    query, key, value = draw(1, 2, 40, 16, dtype=dtype)
    offsets = 100.3 + torch.rand(40, 40, generator=torch.Generator().manual_seed(3))
    exact = attention(*(x.double() for x in (query, key)), score_mod=bias(offsets)) @ value.double()
    with cuda_double.use_cuda_kernels():
        output = attention(query, key, score_mod=bias(offsets)) @ value
    torch.testing.assert_close(output.double(), exact, atol=2e-2, rtol=0)
    rounded = attention(*(x.double() for x in (query, key)), score_mod=bias(offsets.to(dtype).double()))
    if dtype == torch.bfloat16:  # a tile of bfloat16 would be visibly wrong
        assert (rounded @ value.double() - exact).abs().max() > 2e-2


def test_gradients_are_those_of_the_block_loop(monkeypatch):
    query, key, value = draw(1, 4, 50, 16)
    key, value = key[:, :2], value[:, :2]
    for mask in (None, causal(), causal() & sliding_window(11), dense(torch.rand(50, 50) < 0.5)):
        found = []
        for is_fused in (True, False):
            tensors = [x.detach().clone().requires_grad_() for x in (query, key, value)]
            with cuda_double.use_cuda_kernels() as calls, pytest.MonkeyPatch.context() as patch:
                if not is_fused:
                    patch.setattr(kernels, "get_kernel", lambda device_type: None)
                A = attention(tensors[0], tensors[1], mask=mask, enable_gqa=True)
                (A @ tensors[2]).square().sum().backward()
                assert bool(calls["efficient backward"]) == is_fused
            found.append([x.grad for x in tensors])
        for own, expected in zip(*found, strict=True):
            torch.testing.assert_close(own, expected, atol=2e-5, rtol=1e-4)


def test_the_choice_of_a_kernel_has_the_arguments_of_the_call(monkeypatch):
    query, key, value = draw(1, 4, 40, 16, dtype=torch.bfloat16)
    key, value = key[:, :2], value[:, :2]
    with cuda_double.use_cuda_kernels():
        A = attention(query, key, mask=causal(), enable_gqa=True)
        assert kernel_of(A, value) == "torch: flash on CUDA, causal"
    asked = []
    monkeypatch.setattr(kernels, "get_kernel", lambda device_type: kernels.CUDA_FUSED)
    monkeypatch.setattr(
        torch_cuda, "fused_sdp_choice", lambda *arguments, **options: asked.append((arguments, options)) or 1
    )
    torch_cuda.choose_backend(query, key, value, True, 0.3)
    assert fused.prepare_fast_product(query, query, None, 0.5, find_engine("test", query=query)) is not None
    options = [{"scale": 0.3, "enable_gqa": True}, {"scale": 0.5, "enable_gqa": False}]
    assert [(arguments[3:], own) for arguments, own in asked] == [
        ((None, 0.0, True), options[0]),
        ((None, 0.0, False), options[1]),
    ]


@pytest.mark.parametrize("run", [torch_cuda.run_flash, torch_cuda.run_cudnn])
def test_flash_and_cudnn_refuse_mask_tiles_and_oblong_causal_calls(run):
    query, key, value = draw(1, 2, 40, 16, dtype=torch.bfloat16)
    for rows, is_causal, tile in ((40, False, torch.zeros(1, 1, 40, 40)), (39, True, None)):
        with cuda_double.use_cuda_kernels(), pytest.raises(ValueError) as caught:
            run(query[:, :, :rows], key, value, is_causal, tile, 0.25)
        assert str(caught.value) == "this operator takes no mask tile and only square causal calls"


def test_only_tensors_that_are_not_aligned_are_copied():
    flat = torch.arange(1.0, 2 * 40 * 24 + 1, dtype=torch.float16)

    def view(shape, stride, offset=0):
        return flat.as_strided(shape, stride, offset)

    aligned = {
        "contiguous": view((1, 2, 40, 8), (640, 320, 8, 1)),
        "rows apart": view((1, 2, 40, 8), (1920, 960, 24, 1)),
        "offset of 16 bytes": view((1, 2, 30, 8), (640, 320, 8, 1), 8),
    }
    misaligned = {
        "last axis": view((1, 2, 8, 8), (640, 320, 1, 8)),
        "rows": view((1, 2, 40, 8), (720, 360, 9, 1)),
        "heads": view((1, 2, 30, 8), (640, 321, 8, 1)),
        "offset of 24 bytes": view((1, 2, 30, 8), (640, 320, 8, 1), 12),
    }
    for name, x in aligned.items():
        assert torch_cuda._align(x) is x, name
    for name, x in misaligned.items():
        copy = torch_cuda._align(x)
        assert torch.equal(copy, x) and copy.is_contiguous() and copy.storage_offset() == 0, name
    padded = torch_cuda._align(aligned["rows apart"][..., :5])
    assert padded.shape == (1, 2, 40, 8) and torch.equal(padded[..., :5], aligned["rows apart"][..., :5])
    assert not padded[..., 5:].any()


# -- Limits and faults -----------------------------------------------------------------------------------------


def test_more_pairs_than_a_grid_has_blocks_are_split(monkeypatch):
    monkeypatch.setattr(fused, "MAX_PAIRS", 5)
    monkeypatch.setattr(cuda_double, "MAX_GRID", 5)
    query, key, value = draw(3, 4, 20, 8)
    with cuda_double.use_cuda_kernels() as calls:
        calls.clear()
        output = attention(query, key, mask=causal()) @ value
        assert calls["efficient"] >= 3
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("fault", ["corner", "lse", "dtype"])
def test_a_faulty_operator_is_switched_off(fault):
    """Flash that counts from another corner, returns a base-2 lse, or an efficient operator without bfloat16."""

    def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        output, lse, *rest = cuda_double.flash(
            q, k, v, dropout_p, fault != "corner" and is_causal, scale=scale
        )
        return output, lse / 0.6931 if fault == "lse" else lse, *rest

    def efficient(q, *args, **options):
        cuda_double.check(
            fault != "dtype" or q.dtype != torch.bfloat16, "cutlassF: no kernel found to launch!"
        )
        return cuda_double.efficient(q, *args, **options)

    operators = cuda_double.OPERATORS.__dict__ | {
        "_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_efficient_attention": efficient,
    }  # fmt: skip
    query, key, value = draw(1, 2, 40, 16, dtype=torch.bfloat16)
    with cuda_double.use_cuda_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_cuda, "aten", cuda_double.SimpleNamespace(**operators))
        kernel = kernels.get_kernel("cpu")
        name = kernel_of(attention(query, key, mask=causal()), value)
    if fault == "dtype":
        assert kernel.dtypes == (torch.float32, torch.float16)
        assert name == "torch: block loop (no fused kernel for bfloat16 on cpu)"
    else:
        assert name == "torch: efficient on CUDA, causal" and kernels._FLASH not in kernel.alternatives


def test_the_operators_exist_with_these_arguments():
    """The schemas of this torch take the calls that `torch_cuda` makes: meta tensors run no kernel."""
    q = torch.empty(1, 2, 40, 16, dtype=torch.bfloat16, device="meta")
    for run in (torch_cuda.run_flash, torch_cuda.run_efficient, torch_cuda.run_cudnn):
        output, lse = run(q, q, q, True, None, 0.5)
        assert output.shape == q.shape and lse.shape == (1, 2, 40) and lse.dtype == torch.float32
    lse = torch.empty(1, 2, 40, device="meta")
    grads = torch_cuda.run_efficient_backward(q, q, q, q, q, lse, True, None, 0.5)
    assert [grad.shape for grad in grads] == [q.shape] * 3
    tile = torch.empty(1, 1, 40, 40, device="meta")
    assert torch_cuda.run_efficient(q, q, q, False, tile, 0.5)[0].dtype == torch.float32
    assert len(list_operators("cuda")) == 3
