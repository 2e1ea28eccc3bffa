"""Plans of measures: extra value columns of a fused product, the block loop, and that both agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from regard import (  # noqa: E402
    Coarse,
    Distance,
    Entropy,
    Mass,
    Measure,
    Output,
    Position,
    Received,
    TopK,
    alibi,
    attention,
    causal,
    padding,
    sliding_window,
    softcap,
)
from regard.core.planner import MAX_EXTRA_COLUMNS, make_plan  # noqa: E402
from regard.core.products import Product  # noqa: E402
from regard.engines import torch_kernels as _torch_kernels  # noqa: E402
from regard.engines.native import find_instruction_set, use_instruction_set  # noqa: E402
from regard.masks import dense, document, first  # noqa: E402
from regard.measures import MaxWeight, Sum  # noqa: E402
from regard.tiling import use_tile_sizes  # noqa: E402

MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "window": sliding_window(7),
    "ragged": causal() & padding([11, 40]),
    "documents": document(np.arange(40) // 9),
    "empty rows": padding([0, 40]),
}


def tensors(dtype: Any = torch.float64, kv_heads: int = 4) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, 4, 40, 16, dtype=torch.float64, generator=generator)
    key = torch.randn(2, kv_heads, 40, 16, dtype=torch.float64, generator=generator)
    value = torch.randn(2, kv_heads, 40, 5, dtype=torch.float64, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the shapes of the values that the fused kernel was called with."""
    found: list[Any] = []
    kernel = _torch_kernels.get_kernel("cpu")
    assert kernel is not None
    forward = kernel.forward

    def counted(q: Any, k: Any, v: Any, *more: Any) -> Any:
        found.append(tuple(v.shape))
        return forward(q, k, v, *more)

    object.__setattr__(kernel, "forward", counted)
    yield found
    object.__setattr__(kernel, "forward", forward)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_measures_from_extra_value_columns_equal_the_dense_matrix(mask: str, kv_heads: int) -> None:
    query, key, value = tensors(kv_heads=kv_heads)
    A = attention(query, key, mask=MASKS[mask], enable_gqa=True)
    chosen = {
        "output": Output(value), "sink": Mass(first(1)), "at": Position(), "total": Sum(),
        "middle": Mass(first(20) & ~first(10)), "real": Mass(padding([3, 17])), "not_first": Mass(~first(2)),
    }  # fmt: skip
    assert "one product: output, lse; " in A.plan(**chosen) and "block loop" not in A.plan(**chosen)
    found = A.measure(**chosen)
    weights = attention(query, key, mask=MASKS[mask], enable_gqa=True).to_dense()
    real = torch.arange(40) < torch.tensor([3, 17])[:, None, None, None]
    expected = {
        "output": weights @ value.repeat_interleave(4 // kv_heads, 1), "sink": weights[..., 0],
        "at": weights @ torch.arange(40.0, dtype=torch.float64), "total": weights.sum(-1),
        "middle": weights[..., 10:20].sum(-1), "real": (weights * real).sum(-1), "not_first": weights[..., 2:].sum(-1),
    }  # fmt: skip
    for name, right in expected.items():
        torch.testing.assert_close(getattr(found, name), right, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(A.lse, attention(query, key, mask=MASKS[mask], enable_gqa=True).lse)


SINK = np.array([-1.0, 0.0, 2.0, 0.5])
FROM_LSE: dict[str, dict[str, Any]] = {
    **{name: {"mask": mask} for name, mask in MASKS.items()},
    "a band and keys": {"mask": sliding_window(7) & ~first(4)},
    "a mask that does not slide": {
        "mask": causal() & ~dense(np.eye(40, k=-3, dtype=bool) & (np.arange(40) > 20))
    },
    "added scores": {"mask": causal(), "score_mod": alibi()},
    "a sink": {"mask": causal(), "sink": SINK},
    "a sink that takes all": {"mask": sliding_window(7) & ~first(2), "sink": SINK + 1000},
}


@pytest.mark.parametrize("case", FROM_LSE)
@use_tile_sizes(rows=6, columns=6, entries=108, topk_columns=20)
def test_tiles_from_the_lse_of_a_kernel_equal_those_of_numpy(case: str) -> None:
    query, key, value = tensors()
    A = attention(query, key, scale=0.4, **FROM_LSE[case])
    _ = A @ value
    same = attention(query.numpy(), key.numpy(), scale=0.4, **FROM_LSE[case])
    measures = (
        Entropy(), Received(), Distance(), Position(), Sum(), MaxWeight(), TopK(5), Coarse((3, 5), "mean"),
        Coarse(5, "max"), Mass(causal() & first(9)),
    )  # fmt: skip
    named = dict(zip("abcdefghij", measures, strict=True), again=Entropy())
    rows = [30, 4, 17, 5, 39, 20, 24, 38, 1, 36, 8, 2]
    for ours, theirs in ((A, same), (A.lazy[..., rows, :], same.lazy[..., rows, :])):
        assert "one pass with the cached lse" in ours.plan(**named)
        for found, expected in zip(ours.measure(**named), theirs.measure(**named), strict=True):
            for x, y in (
                zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            ):
                np.testing.assert_allclose(x.numpy(), y, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", FROM_LSE)
@pytest.mark.parametrize("measure", [Entropy(), Mass(causal()), Mass(causal() & first(9)), Sum()], ids=repr)
def test_entries_are_right_before_anything_is_cached(case: str, measure: Any) -> None:
    query, key, _ = tensors()
    (found,) = attention(query, key, scale=0.4, **FROM_LSE[case]).measure(measure)
    (expected,) = attention(query.numpy(), key.numpy(), scale=0.4, **FROM_LSE[case]).measure(measure)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-11, atol=1e-12)


@use_tile_sizes(whole=0)
def test_04_a_masked_score_that_would_overflow_has_weight_zero() -> None:
    query = torch.full((1, 4, 1), 7.75)
    key = torch.full((1, 80, 1), -7.75)
    key[:, 70:] = 7.75  # scores of ±60: e¹²⁰ overflows float32
    A = attention(query, key, mask=first(70), scale=1.0)
    _ = A @ key
    assert A.plan(Received()).endswith("one pass with the cached lse: received")
    # An lse of 60 in float32 has an ulp of 4e-6.
    torch.testing.assert_close(A.sum(-1), torch.ones(1, 4, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(A.sum(-2)[0, 70:], torch.zeros(10, dtype=torch.float64), atol=0, rtol=0)


def test_values_with_different_leading_axes_are_concatenated() -> None:
    query, key, value = (x[:, :2] for x in tensors())
    by_entry, by_head = value[:, :1], value[:1] + 1  # two pairs each, used by different pairs of the matrix
    found = attention(query, key).measure(Position(), Output(by_entry), head=Output(by_head), total=Sum())
    W = attention(query, key).to_dense()
    torch.testing.assert_close(found.output, W @ by_entry, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.head, W @ by_head, rtol=1e-12, atol=1e-12)
    for measure in (Position(), Mass(first(40))):  # one column for all pairs
        output = attention(query, key).measure(measure, Output(value)).output
        torch.testing.assert_close(output, W @ value, rtol=1e-12, atol=1e-12)


class MaxScorePerRow(Measure):
    """The largest score of each row: a measure that reads scores."""

    def init(self, shape: Any, xp: Any) -> Any:
        return xp.full(shape[:2], -xp.inf)

    def step(self, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        state[:, q_idx] = xp.maximum(state[:, q_idx], xp.astype(xp.max(scores, axis=-1), state.dtype))
        return state


def test_a_measure_that_reads_scores_gets_them_with_a_known_lse() -> None:
    query, key, value = tensors()
    A = attention(query, key, mask=causal())
    _ = A @ value
    found = A.measure(MaxScorePerRow(), Entropy())
    torch.testing.assert_close(found.max_score_per_row, A.scores[...].amax(-1))
    torch.testing.assert_close(found.entropy, attention(query, key, mask=causal()).entropy())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_every_plan_gives_the_same_measures(mask: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = tensors(dtype)
    measures = (Entropy(), Received(), Distance(), Coarse(7, "mean"), Position(), Mass(first(3)))

    def made() -> list[Any]:
        alone, together, after = (attention(query, key, mask=MASKS[mask]) for _ in range(3))
        _ = after @ value
        return [
            *alone.measure(Entropy()), *together.measure(Output(value), *measures), *after.measure(*measures),
        ]  # fmt: skip

    fused = made()
    monkeypatch.setattr(_torch_kernels, "get_kernel", lambda device_type: None)
    room = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3}[dtype]
    for ours, streamed in zip(fused, made(), strict=True):
        # Only the output has half precision: measures are computed from scores in float32 either way.
        assert ours.dtype == streamed.dtype or torch.float64 in (ours.dtype, streamed.dtype)
        limit = room if ours.dtype == dtype else min(room, 2e-5)
        torch.testing.assert_close(ours.double(), streamed.double(), rtol=limit, atol=limit)


@use_tile_sizes(whole=0)
@use_instruction_set(None)
@pytest.mark.parametrize("has_output", [False, True])
def test_a_product_takes_a_limited_number_of_extra_columns(has_output: bool) -> None:
    problem = attention(torch.randn(8, 4), torch.randn(30, 4)).problem
    outputs: dict[str, Measure] = (
        {"output": Product(torch.randn(1, 30, 4), np.zeros(1, int))} if has_output else {}
    )
    limit = MAX_EXTRA_COLUMNS + (0 if has_output else 4)  # 4 is the width of the key
    masses = {f"mass_{i}": Mass(first(i)) for i in range(1, limit + 2)}
    plan = make_plan(problem, outputs | masses, known=False)
    assert plan.from_product == outputs and plan.from_loop == masses
    masses.popitem()
    plan = make_plan(problem, outputs | masses, known=False)
    assert plan.from_product == outputs | masses and plan.from_loop == {}


@use_instruction_set(None)
def test_measure_runs_what_the_plan_says(calls: list[Any]) -> None:
    query, key, value = tensors()
    A = attention(query, key, mask=causal())
    assert A.plan(Entropy()) == "torch: flash on CPU, one product: lse; entropy from extra value columns"
    A.entropy()
    assert calls == [(1, 8, 40, 16)], "value = key, and no block loop"
    assert A.plan(Entropy()) == "torch: block loop, tiles of 512 × 512, one pass with the cached lse: entropy"
    A.measure(Entropy(), Received())
    assert len(calls) == 1, "the lse is cached"
    A.measure(Output(value), Position())
    assert calls[1:] == [(1, 8, 40, 16)], "five value columns and an extra one, padded"
    B = attention(query, key, mask=causal())
    assert B.plan(Output(value), Received()).count("\n") == 1
    B.measure(Output(value), Received())
    assert len(calls) == 3
    capped = attention(query, key, score_mod=softcap(5.0))
    assert "two passes" in capped.plan(Entropy(), Output(value)) and "product" not in capped.plan(Entropy())
    assert attention(query, key).plan() == "torch: flash on CPU, one product: lse"


class Own(Measure):
    """The sum of each row: a measure without a description for a compiled pass."""

    def init(self, shape: Any, xp: Any) -> Any:
        return xp.zeros(shape[:2])

    def step(self, state: Any, weights: Any, scores: Any, q_idx: Any, kv_idx: Any, xp: Any) -> Any:
        state[:, q_idx] += xp.sum(weights, axis=-1)
        return state


@pytest.mark.skipif(find_instruction_set() is None, reason="the compiled library is not built")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_plan_names_the_compiled_pass_and_what_it_cannot_do(library: str) -> None:
    name = f"{library}: compiled pass ({find_instruction_set()})"
    query, key, value = (x if library == "torch" else x.numpy() for x in tensors())
    A = attention(20 * query, key)  # scores too large for the lse of a fused kernel
    kernel = f"{library}: block loop"
    if library == "torch":
        kernel += " (scores too large for the lse of a fused kernel)"
    two_passes = "two passes (lse, then weights)"
    assert A.plan(Entropy(), Own(), Received()).splitlines() == [
        f"{name}, {two_passes}: entropy, received",
        f"{kernel}, tiles of 512 × 512, {two_passes}: own",
    ]
    found = A.measure(Entropy(), Own(), Received())
    assert A.plan(Entropy()) == f"{name}, one pass with the cached lse: entropy"
    assert A.plan(Own()).endswith(f"{two_passes}: own"), "the compiled pass rounds scores differently"
    with use_instruction_set(None):
        expected = attention(20 * query, key).measure(Entropy(), Own(), Received())
        assert "compiled" not in A.plan(Entropy(), Own())
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    capped = attention(query, key, score_mod=softcap(5.0))
    assert "compiled" not in capped.plan(Entropy()), "a score modification runs in the block loop"
    B = attention(query, key, mask=causal())
    _ = B @ value
    assert B.plan(Entropy(), Received()).startswith(name)


VALUES: dict[str, Any] = {
    "float64": lambda value: value,
    "float32": lambda value: value.float(),
    "float16": lambda value: value.half(),
    "whole numbers": lambda value: (10 * value).long(),
    "a vector": lambda value: value[0, 0, :, 0],
    "of NumPy": lambda value: value.float().numpy(),
    "a list": lambda value: value[0, 0].tolist(),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("change", [None, softcap(5.0)], ids=["fused", "passed"])
def test_output_equals_the_product_in_shape_and_dtype(kind: str, dtype: Any, change: Any) -> None:
    query, key, value = tensors()
    given = VALUES[kind](value)
    A, B = (attention(query.to(dtype), key.to(dtype), score_mod=change) for _ in range(2))
    found, expected = A.measure(Output(given), Position()).output, B @ given
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_output_on_numpy_equals_the_product_in_shape_and_dtype() -> None:
    query, key, value = (x.numpy() for x in tensors(torch.float32))
    A = attention(query, key)
    for given in (
        value,
        value.astype(np.float16),
        value.astype(float),
        value[0, 0, :, 0],
        value[0, 0].tolist(),
    ):
        found, expected = A.measure(Output(given), Position()).output, A @ given
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_entropy_from_extra_columns_is_never_negative(dtype: Any) -> None:
    query, key, _ = tensors(dtype)
    A = attention(2 * query, 2 * key, mask=sliding_window(1))
    assert "entropy from extra value columns" in A.plan(Entropy())
    entropy = A.entropy()
    assert (entropy >= 0).all() and (entropy < 100 * torch.finfo(dtype).eps).all()


def test_an_output_at_half_precision_is_a_separate_product() -> None:
    query, key, value = tensors(torch.bfloat16)
    A = attention(query, key, mask=causal())
    plan = A.plan(Output(value), Position())
    assert plan.splitlines()[0] == "torch: flash on CPU, one product: output"
    found = A.measure(Output(value), Position())
    assert torch.equal(found.output, attention(query, key, mask=causal()) @ value)
    assert found.position.dtype == torch.float64


def test_an_output_keeps_its_gradient_beside_measures() -> None:
    query, key, value = tensors()
    value.requires_grad_()
    A = attention(query, key, mask=causal())
    found = A.measure(Output(value), Entropy())
    found.output.sum().backward()
    torch.testing.assert_close(value.grad.sum((-1, -2)), torch.full((2, 4), 200.0, dtype=torch.float64))


@use_instruction_set(None)
def test_numpy_computes_output_and_measures_together() -> None:
    query, key, value = (x.numpy() for x in tensors())
    A = attention(query, key, mask=causal())
    assert A.plan(Output(value), Entropy()).startswith("numpy: block loop, tiles of 512 × 512, two passes")
    found = A.measure(Output(value), Entropy())
    np.testing.assert_allclose(found.output, A @ value, rtol=1e-12)
    np.testing.assert_allclose(found.entropy, A.entropy(), rtol=1e-12)


def test_a_nan_falls_back_to_the_block_loop() -> None:
    query, key, value = tensors()
    key[0, 1, 30] = torch.nan
    found = attention(query, key, mask=causal()).measure(Output(value), Position())
    assert found.output[0, 1, 30:].isnan().all() and found.position[0, 1, 30:].isnan().all()
    assert found.output[0, 1, :30].isfinite().all() and found.position[:, [0, 2, 3]].isfinite().all()


def test_the_kernel_name_says_why_the_fused_kernel_was_not_used() -> None:
    query, key, value = tensors()
    A = attention(query, key, mask=causal())
    _ = A @ torch.where(torch.arange(40)[:, None] == 20, torch.nan, value)
    assert A.kernel.startswith("torch: block loop (")
    _ = A @ value
    assert A.kernel == "torch: flash on CPU, causal"
    A.measure(Output(torch.where(torch.arange(40)[:, None] == 20, torch.nan, value)), Position())
    assert A.kernel.startswith("torch: block loop (")
    A.measure(Output(value), Position())
    assert A.kernel == "torch: flash on CPU, causal"
