"""Precision that settings of the process, large scores and wrong kernels must not take away."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard import Entropy, Received, TopK, attention, causal, reference  # noqa: E402
from regard.engines import torch_kernels as kernels  # noqa: E402
from regard.engines import torch_precision  # noqa: E402
from regard.testing import assert_matches  # noqa: E402
from regard.testing.cases import disable_fused_kernel, from_engine, to_engine  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402
from tests.helpers.tensors import draw  # noqa: E402

EPS = 2.0**-23
# torch 2.9 warns of its own setting once; later releases do not.
pytestmark = pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")


# -- The self-check of the kernel -----------------------------------------------------------------------------

FIRST_USES = {
    "autocast": """
with torch.autocast("cpu", dtype=torch.bfloat16):
    use()
""",
    "bfloat16 as default dtype": """
torch.set_default_dtype(torch.bfloat16)
use()
torch.set_default_dtype(torch.float32)
""",
    "fake tensors": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    kernels.get_kernel("cpu")
""",
    "meta as default device": """
with torch.device("meta"):
    kernels.get_kernel("cpu")
""",
    "medium precision": """
torch.set_float32_matmul_precision("medium")
use()
""",
}
PREAMBLE = """
import torch, regard
from regard.engines import torch_kernels as kernels
query, key, value = torch.ones(3, 1, 2, 128, 64)
def use():
    A = regard.attention(query, key)
    A @ value
    return A.kernel
"""


@pytest.mark.parametrize("name", keep_in_ci(FIRST_USES, "autocast"))
def test_27_the_kernel_is_used_after_any_first_use(name):
    code = f"{PREAMBLE}{FIRST_USES[name]}print(use())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy())
    assert run.stdout.strip() == "torch: flash on CPU, no mask", run.stderr


def test_27_the_kernel_passes_its_check_inside_autocast_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels.check_kernel(kernels.CPU_FLASH, "cpu") is not None
        assert torch.is_autocast_enabled("cpu")
    with FakeTensorMode():
        assert kernels.check_kernel(kernels.CPU_FLASH, "cpu") is not None


def test_27_a_failed_check_is_repeated_and_a_passed_one_is_not(monkeypatch):
    results, calls = [None] * 4 + [kernels.CPU_FLASH], []  # two kernels are tried each time

    def check(kernel, device_type):
        calls.append(device_type)
        return results[len(calls) - 1]

    monkeypatch.setattr(kernels, "_checked", {})
    monkeypatch.setattr(kernels, "check_kernel", check)
    query, key = draw(1, 2, 70, 16, count=2)
    names = [attention(query, key).kernel for _ in range(5)]
    assert ["flash" in name for name in names] == [False, False, True, True, True]
    assert len(calls) == 5


def read_own_heads(query, key, value, is_causal, tile, scale):
    """Run the kernel as if it did not know grouped heads: it takes each query head's own key head, past the end."""
    heads = query.shape[1]
    key, value = (x.as_strided((1, heads, *x.shape[2:]), x.stride()) for x in (key, value))
    return kernels._cpu_forward(query, key, value, is_causal, tile, scale)


def test_grouped_heads_are_repeated_for_a_kernel_that_reads_past_the_end(monkeypatch):
    monkeypatch.setattr(kernels, "_checked", {})
    monkeypatch.setitem(kernels.KERNELS, "cpu", (replace(kernels.CPU_FLASH, forward=read_own_heads),))
    kernel = kernels.get_kernel("cpu")
    assert kernel is not None and not kernel.takes_groups
    query = draw(1, 8, 70, 16, count=1)[0]
    key, value = (x[:, :2] for x in draw(1, 8, 70, 16, seed=1, count=2))
    for mask in (None, causal(), regard.sliding_window(9)):
        A = attention(query, key, mask=mask, enable_gqa=True)
        repeated = attention(query, key.repeat_interleave(4, 1), mask=mask)
        torch.testing.assert_close(A @ value, repeated @ value.repeat_interleave(4, 1))
        assert "flash" in A.kernel
    arguments = (query, key, value, None, 0.0, True, None, True)
    assert kernels.run_flash_with_lse(*arguments) is None


def test_the_kernel_takes_grouped_heads():
    kernel = kernels.get_kernel("cpu")
    assert kernel is not None and kernel.takes_groups


@pytest.mark.parametrize("ndim", [2, 3, 5])
def test_only_calls_with_four_axes_reach_the_operator(ndim, monkeypatch):
    query, key, value = draw(*(1, 1, 2, 7, 8)[-ndim:])
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: kernels._FLASH)
    assert kernels.run_flash_with_lse(query, key, value, None, 0.0, False, None, False) is None


def test_an_unchecked_kernel_is_not_used(monkeypatch):
    monkeypatch.setattr(kernels, "_checked", {})
    monkeypatch.setattr(kernels, "check_kernel", lambda kernel, device_type: None)
    monkeypatch.setattr(kernels, "_cpu_operator", lambda: pytest.fail("the operator was called"))
    query, key, value = draw(1, 2, 70, 16)
    A = attention(query, key, mask=causal())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(A @ value, expected)
    A.measure(Entropy(), Received())
    assert A.kernel == "torch: block loop (no fused kernel on cpu)"
    assert kernels.run_flash_with_lse(query, key, value, None, 0.0, True, None, False) is None


# -- Precision of float32 products ----------------------------------------------------------------------------


def set_precision(name):
    kind, precision = name.split()
    if kind == "matmul":
        torch.set_float32_matmul_precision(precision)
    elif kind == "mkldnn":
        torch.backends.mkldnn.matmul.fp32_precision = precision
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.backends.fp32_precision = precision


def get_precision():
    return torch.backends.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(
    params=[
        "matmul highest", "matmul high", "matmul medium", "mkldnn ieee", "mkldnn tf32", "mkldnn bf16",
        "inherited ieee", "inherited tf32", "inherited bf16",
    ]
)  # fmt: skip
def precision(request):
    set_precision(request.param)
    yield request.param
    torch.backends.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("multiplies_first", [False, True])
@pytest.mark.parametrize("engine", ["torch fused", "torch block loop"])
def test_28_the_error_rule_holds_under_every_precision_setting(precision, engine, multiplies_first):
    query, key, value = (2 * x for x in draw(1, 2, 300, 64))
    allowed = np.tri(300, dtype=bool)
    arrays = [x.numpy() for x in (query, key, value)]
    exact = reference.attention(*arrays, mask=allowed)
    naive = reference.attention(*arrays, mask=allowed, dtype=np.float32)
    largest = np.abs(np.where(allowed, exact.scores, 0)).max(-1)
    drift = 4 * EPS * (1 + largest)
    before = get_precision()
    with disable_fused_kernel(engine):
        A = attention(query, key, mask=causal())
        if multiplies_first:
            A @ value
        found = A.measure(Entropy(), Received(), top=TopK(1))
        lse, rows, entry, dense = A.lse, A[..., 70:90, :], A[0, 1, 200, 7], A.to_dense()
    assert get_precision() == before

    def entropy(weights):
        return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)

    def check(actual, right, rounded, error, magnitude, what):
        assert_matches(
            from_engine(actual), right, rounded, dtype="float32", score_error=error, magnitude=magnitude, what=what
        )  # fmt: skip

    w, n = exact.weights, naive.weights
    check(found.entropy, entropy(w), entropy(n), drift, 1 + entropy(w), "entropy")
    check(found.received, w.sum(-2), n.sum(-2), drift.max(), w.sum(-2), "received")
    check(found.top.values[..., 0], w.max(-1), n.max(-1), drift, w.max(-1), "top")
    check(lse, exact.lse, naive.lse, 0.0, 1 + np.abs(exact.lse), "lse")
    check(dense, w, n, drift[..., None], w, "dense")
    check(rows, w[..., 70:90, :], n[..., 70:90, :], drift[..., 70:90, None], w[..., 70:90, :], "rows")
    check(entry, w[0, 1, 200, 7], n[0, 1, 200, 7], drift[0, 1, 200], w[0, 1, 200, 7], "entry")


def test_28_an_inherited_precision_stays_inherited():
    try:
        set_precision("inherited bf16")
        attention(*draw(1, 2, 9, 8, count=2)).entropy()
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ["ieee", "none", "bf16"])
def test_28_a_block_restores_what_was_set(precision):
    setting = SimpleNamespace(fp32_precision=precision)
    block = torch_precision._IeeeProducts(setting)
    for _ in range(2):
        with block, block:
            assert setting.fp32_precision == ("none" if precision == "none" else "ieee")
        assert setting.fp32_precision == precision


def test_28_overlapping_blocks_of_threads_restore_the_setting():
    torch.set_float32_matmul_precision("medium")
    inside, leave, seen = threading.Event(), threading.Event(), []

    def hold():
        with torch_precision.use_full_precision("cpu"):
            inside.set()
            leave.wait(10)
            seen.append(torch_precision.has_ieee_products("cpu"))

    try:
        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait(10)
        with torch_precision.use_full_precision("cpu"):
            seen.append(torch_precision.has_ieee_products("cpu"))
        leave.set()
        thread.join()
        assert seen == [True, True]
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch_precision.has_ieee_products("cpu")
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("setting", ["matmul highest", "matmul medium"])
def test_28_a_watched_model_keeps_no_lse_of_reduced_precision(setting):
    query, key, value = draw(1, 2, 70, 16)
    try:
        set_precision(setting)
        output, lse = kernels.run_flash_with_lse(query, key, value, None, 0.0, True, None, False)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(output, expected)
    assert (lse is None) == (setting == "matmul medium")


# -- Saturated rows -------------------------------------------------------------------------------------------


def compute_naive(query, key, value, exact, **arguments):
    """Compute the definition plus the largest error of float32 over three orders of summation."""
    orders = [slice(None), slice(None, None, -1), np.random.default_rng(0).permutation(query.shape[-1])]
    results = [
        reference.attention(query[..., order], key[..., order], value, dtype=np.float32, **arguments).weights
        for order in orders
    ]
    return exact + np.max([np.abs(weights - exact) for weights in results], axis=0), results


def compute_entropy(weights):
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@pytest.mark.parametrize("multiplies_first", [False, True])
@pytest.mark.parametrize("engine", ["numpy", "torch fused", "torch block loop"])
@pytest.mark.parametrize("size", [1e3, 1e4, -1e4, "bias 1e4"])
def test_29_entries_rows_and_dense_obey_one_error_rule(size, engine, multiplies_first):
    rng = np.random.default_rng(0)
    q_len, kv_len, dim = 13, 71, 16
    query, key, value = (rng.normal(size=(1, 2, n, dim)).astype(np.float32) for n in (q_len, kv_len, kv_len))
    arguments, definition = {}, {}
    if isinstance(size, str):
        bias = (1e4 + rng.normal(size=(q_len, kv_len))).astype(np.float32)
        arguments, definition = (
            {"score_mod": regard.score_mods.bias(to_engine(bias, engine))},
            {"biases": [bias]},
        )
    else:
        query = (query * size / math.sqrt(dim)).astype(np.float32)
    exact = reference.attention(query, key, value, **definition).weights
    naive, roundings = compute_naive(query, key, value, exact, **definition)
    with disable_fused_kernel(engine):
        A = attention(*(to_engine(x, engine) for x in (query, key)), **arguments)
        if multiplies_first:
            A @ to_engine(value, engine)
        largest = exact.argsort(-1)[..., -2:]  # the other weights are nearly 0
        entries = exact.copy()
        for _, h, i in np.ndindex(exact.shape[:-1]):
            for j in largest[0, h, i]:
                entries[0, h, i, j] = float(A[0, h, i, int(j)])
        results = {
            "entries": entries,
            "rows": np.stack([[from_engine(A[0, h, i]) for i in range(q_len)] for h in range(2)])[None],
            "halves": np.concatenate([from_engine(A[..., :33]), from_engine(A[..., 33:])], -1),
            "reversed": from_engine(A[..., ::-2])[..., ::-1],
            "dense": from_engine(A.to_dense()),
        }
        entropy, top = from_engine(A.entropy()), from_engine(A.topk(1).values)
    assert top.max() <= 1
    for what, result in results.items():
        chosen = (..., slice(kv_len % 2 == 0, None, 2)) if what == "reversed" else ...
        assert result.max() <= 1, what
        assert_matches(result, exact[chosen], naive[chosen], dtype="float32", magnitude=1.0, what=what)
    right = compute_entropy(exact)
    worst = right + np.max([np.abs(compute_entropy(x) - right) for x in roundings], axis=0)
    assert_matches(entropy, right, worst, dtype="float32", magnitude=1 + right, what="entropy")


@pytest.mark.parametrize("engine", ["numpy", "torch fused", "torch block loop"])
def test_29_weights_of_saturated_rows_with_moderate_scores_are_at_most_one(engine):
    query, key, value = (to_engine(x.numpy(), engine) for x in draw(1, 4, 90, 16))
    with disable_fused_kernel(engine):
        A = attention(query * 6, key)  # nearly one-hot; some scores reach 50
        A @ value
        results = [A.max(-1), A.topk(2).values, A.to_dense(), A[..., 7], A[..., :50], A.coarsen(90, "max")]
    for result in results:
        assert from_engine(result).max() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_blocks_of_a_product_are_merged_inside_autocast(dtype):
    """torch.cat inside autocast refuses float16 if it converts to bfloat16."""
    query, key, value = draw(1, 2, 600, 8, dtype=dtype)
    A = attention(query, key, mask=regard.sliding_window(100))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = A @ value
    assert output.dtype == dtype
    assert torch.equal(output, attention(query, key, mask=regard.sliding_window(100)) @ value)
