"""`check_device`: cases in three settings, the conventions of operators, and what it says of a device that is wrong."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

from regard.engines import torch_cuda, torch_kernels  # noqa: E402
from regard.testing import check_device, check_installation, device_check  # noqa: E402
from regard.testing.device_check import describe_conventions, estimate_ratios  # noqa: E402
from tests.helpers import cuda_double, pretend_device  # noqa: E402


def test_the_cpu_passes():
    report = check_device("cpu", 12, lengths=(64,))
    assert report["problems"] == [] and json.loads(json.dumps(report)) == report
    runs = {(run["engine"], run["setting"]): run for run in report["cases"]}
    assert len(runs) == 6 and {run["count"] for run in runs.values()} == {12}
    assert all(0 < run["largest_share"] <= 1 for run in runs.values())
    assert [entry["what"] for entry in report["speed"]] == ["A @ value", "measures, block loop"]
    assert all(entry["ratio"] > 0 and entry["estimated_ratio"] > 1 for entry in report["speed"])
    assert report["conventions"][0]["causal_corner"] == "upper_left"


@pytest.mark.parametrize("has_float64", [True, False])
def test_a_pretend_device_passes(has_float64):
    with pretend_device.use_device(has_float64=has_float64):
        report = check_device("gpu", 2, lengths=() if has_float64 else (64,))
    assert report["problems"] == [] and report["device"] == {"type": "gpu", "has_float64": has_float64}
    assert {run["count"] for run in report["cases"]} == {2}
    assert [entry.get("error") for entry in report["speed"]] == [None, None] * (not has_float64)


def test_a_device_that_is_missing_is_a_problem():
    report = check_installation(1, device="cuda:7" if not torch.cuda.is_available() else "nowhere")
    assert not report.ok and report.device == {}
    assert report.problems[0].startswith("the device ") and " cannot be used: " in report.problems[0]


def test_cases_stop_when_the_time_is_over():
    runs = check_device("cpu", 1000, lengths=(), max_seconds=0.3)["cases"]
    assert 0 < runs[0]["count"] < 300 and len({run["count"] for run in runs}) == 1


def test_a_setting_that_reaches_a_result_is_noticed(monkeypatch):
    """The block loop without its own precision: autocast rounds its scores to 8 bits."""
    from contextlib import nullcontext

    from regard.engines import torch as engine

    monkeypatch.setattr(engine, "use_full_precision", lambda device_type: nullcontext())
    report = check_device("cpu", 10, lengths=())
    wrong = [problem for problem in report["problems"] if "block loop, autocast" in problem]
    assert wrong and any(run["failures"] for run in report["cases"])


# -- Conventions of CUDA's operators, by their doubles ---------------------------------------------------------


def test_the_conventions_of_the_doubles(monkeypatch):
    monkeypatch.setattr(torch_cuda, "aten", cuda_double.OPERATORS)
    monkeypatch.setattr(torch.Tensor, "to", keep_on_cpu(torch.Tensor.to))
    efficient, flash, cudnn = describe_conventions("cuda")
    assert efficient == {
        "operator": "_scaled_dot_product_efficient_attention", "dtype": "float32", "lse": "natural logarithm, float32",
        "causal_corner": "upper_left", "empty_row": "output 0, lse 0", "grouped_heads": "refused", "float64": "refused",
        "head_dim_3": "refused", "problems": [],
    }  # fmt: skip
    assert (
        flash["causal_corner"] == "lower_right"
        and flash["grouped_heads"] == "taken"
        and not flash["problems"]
    )
    assert cudnn["causal_corner"] == "refused" and not cudnn["problems"]


def keep_on_cpu(to):
    return lambda tensor, *args, **options: tensor if args == ("cuda",) else to(tensor, *args, **options)


def test_another_corner_and_another_lse_are_problems(monkeypatch):
    def efficient(q, k, v, bias, compute_lse, dropout_p, is_causal, *, scale):
        output, lse, *rest = cuda_double.efficient(q, k, v, bias, compute_lse, dropout_p, False, scale=scale)
        return output, lse * 1.4427, *rest

    operators = {**vars(cuda_double.OPERATORS), "_scaled_dot_product_efficient_attention": efficient}
    monkeypatch.setattr(torch_cuda, "aten", SimpleNamespace(**operators))
    monkeypatch.setattr(torch.Tensor, "to", keep_on_cpu(torch.Tensor.to))
    found = describe_conventions("cuda")[0]
    assert found["lse"] == "another quantity" and found["causal_corner"] == "neither"
    assert found["problems"][:2] == [
        "output or lse of a plain call is wrong", "a causal mask starts from neither, not from upper_left",
    ]  # fmt: skip


# -- Compiled kernels and estimates ----------------------------------------------------------------------------


def test_compiled_kernels_are_listed_and_their_faults_are_problems(monkeypatch):
    rows = [
        {"name": "measures, head_dim 64", "device": "cuda", "passed": True, "cause": "", "registers": 168},
        {"name": "flash, head_dim 64", "device": "cuda", "passed": False, "cause": "two runs differ"},
    ]
    module = ModuleType("regard.engines.triton_check")
    module.check_kernels = lambda device: rows
    monkeypatch.setitem(sys.modules, "regard.engines.triton_check", module)
    monkeypatch.setattr(device_check.importlib.util, "find_spec", lambda name: name)
    assert device_check._check_compiled_kernels("cuda:0") == rows
    assert device_check._check_compiled_kernels("cpu") == []


def test_the_estimate_follows_its_arithmetic():
    long = estimate_ratios(32768)
    assert long["A @ value"] == pytest.approx(1.0, abs=0.01)
    weights = 32 * 32768**2 / 2
    bare = 4 * weights * 64 / (312e12 * 0.6)
    loop = 2 * weights * 64 / (19.5e12 * 0.7) + 26 * 4 * weights / (2e12 * 0.75)
    assert long["measures, block loop"] == pytest.approx((bare + loop) / bare)
    # With the tiles of the CPU the launches alone would take longer than that.
    assert (
        estimate_ratios(32768, 512, 512, 1 << 19)["measures, block loop"] > 2 * long["measures, block loop"]
    )


def test_every_kernel_of_a_device_is_checked():
    names = [kernel["name"] for kernel in device_check.check_kernels("cpu")]
    assert names == [kernel.name for kernel in torch_kernels.KERNELS["cpu"]]
    with cuda_double.use_cuda_kernels():
        found = list(device_check.check_kernels("cpu"))
    assert [kernel["name"] for kernel in found] == ["efficient on CUDA", "flash on CUDA", "cuDNN on CUDA"]
    assert all(kernel["passed"] for kernel in found)
