"""Devices other than the CPU, pretended: no tensor of the CPU is mixed in, float64 may be missing, no loop waits."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
F = torch.nn.functional

import regard  # noqa: E402
from regard import (  # noqa: E402
    Coarse,
    Distance,
    Entropy,
    Mass,
    MaxScore,
    MaxWeight,
    Output,
    Position,
    Received,
    Spread,
    TopK,
    alibi,
    attention,
    causal,
    linear_attention,
    padding,
    relative_bias,
    rope,
    sliding_window,
    softcap,
)  # fmt: skip
from regard.engines.compensated import CompensatedSum, resolve_sums  # noqa: E402
from regard.masks import dense, document, first, prefix  # noqa: E402
from regard.score_mods import bias  # noqa: E402
from regard.tiling import tile_sizes, use_tile_sizes  # noqa: E402
from tests.helpers import cuda_double, device_cases, pretend_device  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402
from tests.helpers.tensors import draw  # noqa: E402

BOTH = pytest.mark.parametrize("has_float64", [True, False], ids=["float64", "no float64"])


def list_failures(count: int, seed: int, *, has_float64: bool) -> list[str]:
    return device_cases.run_in_fresh_process(device_cases.list_failures_on_device, count, seed, has_float64)


@pytest.mark.parametrize("has_float64", keep_in_ci([True, False], True), ids=["float64", "no float64"])
def test_cases_agree_with_the_definition(has_float64):
    failures = list_failures(6, seed=30, has_float64=has_float64)
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:5]])


@pytest.mark.nightly
@BOTH
def test_every_case_agrees_with_the_definition(has_float64):
    failures = list_failures(1000, seed=31, has_float64=has_float64)
    assert not failures, "\n".join([f"{len(failures)} failures", *failures[:5]])


# -- Every call ------------------------------------------------------------------------------------------------

N = 70


def make_calls(move):
    """Calls of the matrix by name; arguments that may be tensors are moved."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (move(x) for x in draw(2, 4, N, 16))
    ids, lengths = move(torch.arange(N) // 9), move(torch.tensor([60, 70]))
    allowed = move(torch.rand(N, N, generator=generator) < 0.5)
    numbers = move(torch.rand(4, N, N, generator=generator))
    table, sizes = move(torch.rand(32, 4, generator=generator)), move(torch.tensor([3, 4, 5, 60]))
    slopes, tokens = move(torch.tensor([0.5, 0.1, 0.2, 0.3])), [str(i) for i in range(N)]
    A = attention(q, k, mask=causal())
    halves = [(k[:, :, :30], v[:, :, :30]), (k[:, :, 30:], v[:, :, 30:])]
    return {
        "product": lambda: A @ v, "vector": lambda: A @ v[0, 0, :, 0], "transpose": lambda: A.mT @ v,
        "from the left": lambda: v.mT @ A, "numpy value": lambda: A @ np.ones((2, 4, N, 3), np.float32),
        "lse": lambda: A.lse, "dense": lambda: A.to_dense(), "row": lambda: A[0, 1, 5], "entry": lambda: A[0, 1, 5, 3],
        "columns": lambda: A[0, 1, 5:9, [3, 1]], "scores": lambda: A.scores[0, 1, 5], "sum": lambda: A.sum(),
        "mean": lambda: A.mean(-2), "max": lambda: A.max(-1), "argmax": lambda: A.argmax(-2),
        "argmax of all": lambda: A.argmax(), "topk": lambda: A.topk(5), "topk of all": lambda: A.topk(N).values,
        "coarsen": lambda: A.coarsen(8, "mean"), "uneven cells": lambda: A.coarsen(33, "mean"),
        "largest of cells": lambda: A.coarsen((7, 33), "max"), "distance": lambda: A.distance(),
        "mass": lambda: A.mass(first(3)), "mass of a dense mask": lambda: A.mass(dense(allowed)),
        "measures": lambda: A.measure(Spread(), Position(), MaxScore(), MaxWeight(-2), Output(v), TopK(3)),
        "heads": lambda: A.lazy[0, :, 3:9].entropy(), "rows": lambda: A.lazy[..., [5, 2], :] @ v,
        "merge": lambda: regard.merge_states([(attention(q, x) @ y, attention(q, x).lse) for x, y in halves]),
        "explain": lambda: str(A[0, 1].explain(5, v[0, 1])), "repr": lambda: repr(attention(q[0, 0, :4], k[0, 0, :4])),
        "html": lambda: A._repr_html_(), "page": lambda: A[0, 1].page(tokens).html,
        "page with a bias": lambda: attention(q[0, 0], k[0, 0], score_mod=bias(numbers[0])).page().html,
        "page with a dense mask": lambda: attention(q[0, 0], k[0, 0], mask=dense(allowed)).page().html,
        "numpy": lambda: np.asarray(A[0, 0]), "plan": lambda: A.plan(Entropy(), TopK(3)),
        "padding": lambda: attention(q, k, mask=padding(lengths)) @ v,
        "window of each head": lambda: attention(q, k, mask=sliding_window(sizes)).entropy(),
        "documents": lambda: attention(q, k, mask=document(ids) & causal()) @ v,
        "prefix": lambda: attention(q, k, mask=prefix(lengths)).topk(3),
        "dense mask": lambda: attention(q, k, mask=causal() & ~dense(allowed)).coarsen(9, "mean"),
        "dense mask of the CPU": lambda: attention(q, k, mask=dense(allowed.cpu())) @ v,
        "equal masks": lambda: torch.tensor(dense(allowed) == dense(allowed.cpu())),
        "mask to NumPy": lambda: dense(allowed).to_dense(N, N),
        "alibi": lambda: attention(q, k, score_mod=[alibi(slopes), softcap(5.0)]).entropy(),
        "bias": lambda: attention(q, k, score_mod=bias(numbers)).topk(2),
        "bias of the CPU": lambda: attention(q, k, score_mod=bias(numbers.cpu().double())) @ v,
        "relative bias": lambda: attention(q, k, score_mod=relative_bias(table, bidirectional=True)).lse,
        "sink": lambda: attention(q, k, sink=slopes).entropy(),
        "sink of NumPy": lambda: attention(q, k, sink=np.arange(4.0)) @ v,
        "sinks of a list": lambda: attention(q, k, sink=[0.1, 0.2, 0.3, 0.4]).lse,
        "linear attention": lambda: linear_attention(q, k, mask=causal()) @ v,
        "measures of linear attention": lambda: linear_attention(q, k).measure(Entropy(), Received(), TopK(3)),
        "rope": lambda: rope(q, move(torch.arange(N)), layout="half"),
        "half": lambda: attention(q.half(), k.half()).measure(Entropy(), Received()),
    }  # fmt: skip


def flatten(result):
    if isinstance(result, tuple):
        return [array for part in result for array in flatten(part)]
    if isinstance(result, str):
        return []  # a page carries float16; texts may differ in the last digit
    return [torch.as_tensor(result).detach().cpu().double()]


@BOTH
@pytest.mark.parametrize("kernel", ["block loop", "CUDA's"])
def test_every_call_gives_the_results_of_the_cpu(has_float64, kernel):
    expected = {name: flatten(call()) for name, call in make_calls(lambda x: x).items()}
    with pretend_device.use_device(has_float64=has_float64):
        if kernel == "CUDA's" and has_float64:
            found = run_on_doubles()
        else:
            found = {name: flatten(call()) for name, call in make_calls(lambda x: x.to("gpu")).items()}
    for name, arrays in expected.items():
        for own, right in zip(found[name], arrays, strict=True):
            torch.testing.assert_close(
                own, right, atol=3e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


def run_on_doubles():
    """Run the calls on the pretend device with the doubles of CUDA's operators."""
    from regard.engines import torch_cuda, torch_kernels

    def on_device(operator):
        def run(*arguments, **options):
            arguments = [x.stored if isinstance(x, pretend_device.PretendTensor) else x for x in arguments]
            results = operator(*arguments, **options)
            wrap = pretend_device.PretendTensor
            return tuple(wrap(x) if isinstance(x, torch.Tensor) else x for x in results)

        return run

    operators = {name: on_device(function) for name, function in vars(cuda_double.OPERATORS).items()}
    with cuda_double.use_cuda_kernels() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_cuda, "aten", cuda_double.SimpleNamespace(**operators))
        patch.setitem(torch_kernels.KERNELS, "gpu", (torch_kernels.CUDA_FUSED,))
        found = {name: flatten(call()) for name, call in make_calls(lambda x: x.to("gpu")).items()}
        query, key, value = (x.to("gpu") for x in draw(1, 2, 80, 16))
        A = attention(query, key, mask=causal())
        _ = A @ value
        assert A.kernel == "torch: efficient on CUDA, causal" and calls["efficient"] > 50
    return found


@pytest.mark.nightly
def test_gradients_are_those_of_the_cpu():
    expected = device_cases.differentiate_measures("cpu")
    for found in device_cases.run_in_fresh_process(device_cases.differentiate_on_device).values():
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, atol=2e-5, rtol=1e-4, err_msg=name)


def test_a_value_of_the_cpu_is_refused():
    with pretend_device.use_device():
        q = draw(1, 2, 5, 4)[0].to("gpu")
        with pytest.raises(
            regard.errors.ArgumentTypeError, match=r"value on cpu; expected gpu:0, .*value.to\('gpu:0'\)"
        ):
            attention(q, q) @ torch.ones(1, 2, 5, 4)


# -- Layers and the lens ---------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 96)
        self.layer, self.out = regard.nn.MultiheadAttention(32, 4, rope="half"), torch.nn.Linear(32, 50)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(x + self.layer(x, mask=causal()))


@BOTH
def test_the_lens_and_layers_work_on_a_device(has_float64, tmp_path):
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(0, 50, (1, 24))
    labels = [str(int(token)) for token in tokens[0]]

    def use(device):
        moved = model.to(device)
        with regard.watch(moved) as recording:
            moved(tokens.to(device))
        assert len(list(recording)) == 2
        path = tmp_path / f"{device}.safetensors"
        recording.save(path)
        assert len(list(regard.load_recording(path))) == 2
        assert "<html" in recording.page(tokens=labels).html
        findings = [str(finding) for finding in recording.diagnose()]
        return str(recording.heads()), findings, np.asarray(recording.rollout(3))

    expected = use("cpu")
    with pretend_device.use_device(has_float64=has_float64):
        found = use("gpu")
        model.to("cpu")
    assert found[:2] == expected[:2]
    np.testing.assert_allclose(found[2], expected[2], atol=1e-6)


@BOTH
def test_generation_with_a_cache_works_on_a_device(has_float64):
    torch.manual_seed(0)
    layer, x = regard.nn.MultiheadAttention(32, 4, rope="half"), torch.randn(2, 12, 32)

    def generate(device):
        moved, cache = layer.to(device), regard.nn.KVCache(window=8)
        return torch.cat([moved(y, cache=cache).cpu() for y in x.to(device).split(3, 1)], 1)

    expected = generate("cpu").detach()
    with pretend_device.use_device(has_float64=has_float64):
        found = generate("gpu").detach()
        layer.to("cpu")
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


# -- No waiting ------------------------------------------------------------------------------------------------

MEASURES = {
    "entropy": Entropy(), "received": Received(), "distance": Distance(), "cells": Coarse(40, "mean"),
    "largest": Coarse(8, "max"),
    "top": TopK(5), "near": Mass(sliding_window(5)), "first": Mass(first(3)), "position": Position(),
    "max_weight": MaxWeight(), "max_received": MaxWeight(-2), "spread": Spread(), "max_score": MaxScore(),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("mask", [None, causal(), sliding_window(50)], ids=str)
def test_no_tile_waits_for_the_device(mask, has_float64):
    counts_of = []
    with pretend_device.use_device(has_float64=has_float64) as counts, use_tile_sizes(
        rows=32, columns=32, topk_columns=64
    ):  # fmt: skip
        for length in (64, 64, 128):
            query, key = (
                draw(1, 4, length, 8, count=1)[0].to("gpu"),
                draw(1, 2, length, 8, count=1)[0].to("gpu"),
            )
            A = attention(query, key, mask=mask, enable_gqa=True)
            counts.clear()
            A.measure(**MEASURES)
            counts_of.append(dict(counts))
    _, few, many = counts_of  # the first builds what later calls reuse
    assert many["launches"] > 1.8 * few["launches"]  # two or four times the tiles
    assert many.get("waits", 0) == few.get("waits", 0) <= 6  # after the loop, and whether scores are small
    assert many.get("copies", 0) == few.get("copies", 0) <= 2


def test_tiles_are_larger_on_a_device_unless_they_are_set():
    assert tile_sizes(on_device=True).entries > tile_sizes().entries
    with use_tile_sizes(rows=7):
        assert tile_sizes().rows == tile_sizes(on_device=True).rows == 7
        assert tile_sizes(on_device=True).columns != tile_sizes().columns
    with pretend_device.use_device():
        query = draw(1, 2, 8, 4, count=1)[0].to("gpu")
        assert "tiles of 1024 × 2048" in attention(query, query).plan(TopK(2))


# -- Sums without float64 --------------------------------------------------------------------------------------


def test_compensated_sums_are_as_exact_as_float64():
    """The rule: 2 eps of the sum of absolute terms, whatever their number. Plain float32 sums err far more."""
    eps, terms = (
        np.finfo(np.float32).eps,
        np.random.default_rng(0).uniform(0.5, 1.5, (1 << 14, 8)).astype(np.float32),
    )
    sums, plain = CompensatedSum(*np.zeros((2, 8), np.float32), np), np.zeros(8, np.float32)
    for row in terms:
        sums[:4] += row[:4]
        sums[[4, 5, 6, 7]] -= row[4:]
        plain += row
    exact = terms.astype(np.float64).sum(0)
    found = resolve_sums(sums).astype(np.float64) * ([1.0] * 4 + [-1.0] * 4)
    assert np.abs(found - exact).max() <= 2 * eps * exact.max()
    assert np.abs(plain - exact).max() > 20 * eps * exact.max()


def test_compensated_sums_keep_infinity_and_act_as_arrays():
    with pretend_device.use_device(has_float64=False):
        xp = regard.engines.find_engine("test", x=torch.zeros(1).to("gpu")).xp
        sums = xp.zeros((3,))
        sums[0] += torch.tensor(float("inf")).to("gpu")
        sums[1] = 2.0
        assert xp.float64 is torch.float32 and xp.zeros((2,), dtype=xp.float64).dtype == torch.float32
        assert torch.maximum(sums, torch.ones(3).to("gpu")).tolist() == [float("inf"), 2.0, 1.0]
        assert (sums / 2).tolist() == [float("inf"), 1.0, 0.0] and sums.sum().item() == float("inf")
        assert len(sums) == 3 and resolve_sums([(-sums)[1:] * 3.0])[0].tolist() == [-6.0, 0.0]


def test_compensated_sums_are_added_with_their_errors():
    small = np.float32(2.0**-25)  # lost beside 1 in float32
    one, other = (CompensatedSum(np.ones(2, np.float32), np.zeros(2, np.float32), np) for _ in range(2))
    one += small
    other += 3 * small
    total = one + other
    one += other
    for sums in (total, one):
        assert sums.high.tolist() == [2.0, 2.0] and sums.low.tolist() == [4 * small] * 2
    with np.errstate(invalid="ignore"):
        one[:] += np.array([np.inf, 1.0], np.float32)
    assert one.resolve().tolist() == [np.inf, 3.0] and one.low[0] == 4 * small  # no error of an infinite sum


def test_functions_of_torch_read_compensated_sums_in_any_argument():
    sums = CompensatedSum(torch.tensor([3.0, 5.0]), torch.tensor([1.0, -1.0]), torch)
    assert torch.sum(sums, dim=0, keepdim=True).tolist() == [8.0]
    assert torch.maximum(torch.tensor([4.5, 1.0]), other=sums).tolist() == [4.5, 4.0]


def test_long_sums_keep_the_error_rule_without_float64():
    """Sums over 78 small tiles, as near to float64 as with a float64 accumulator."""
    query, key = draw(1, 1, 1200, 4, count=2)
    exact = attention(query.double(), key.double(), mask=causal()).measure(
        Entropy(), Received(), Coarse(2, "mean")
    )
    errors = {}
    for has_float64 in (True, False):
        with pretend_device.use_device(has_float64=has_float64), use_tile_sizes(rows=100, columns=100):
            found = attention(query.to("gpu"), key.to("gpu"), mask=causal()).measure(
                Entropy(), Received(), Coarse(2, "mean")
            )
            pairs = zip((x.cpu().double() for x in found), exact, strict=True)
            errors[has_float64] = [float((own - right).abs().max()) for own, right in pairs]
    for narrow, wide, right in zip(errors[False], errors[True], exact, strict=True):
        assert narrow <= wide + 2 * 2.0**-23 * float(right.abs().max())
