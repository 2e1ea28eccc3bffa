"""Arrays that are changed in place after a matrix was built: results describe the values that a tensor has now."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import regard
from regard import Entropy, Received, causal, sliding_window
from regard.masks import first

torch = pytest.importorskip("torch")

HEADS, N = 3, 70


def draw(*shape: int, seed: int = 1) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_tensor() -> Any:
    x = draw(2, HEADS, N, 8)
    return x, lambda: regard.attention(x, x, mask=causal())


def query_without_contiguous_heads() -> Any:
    x, key = draw(2, N, HEADS, 8), draw(2, HEADS, N, 8, seed=2)
    return x, lambda: regard.attention(x.transpose(1, 2), key)  # the canonical form is a copy


def shared_key() -> Any:
    x, query = draw(1, 1, N, 8), draw(2, HEADS, N, 8, seed=2)
    return x, lambda: regard.attention(query, x.expand(2, 1, N, 8), enable_gqa=True)


def sink() -> Any:
    x, query = torch.nn.Parameter(draw(HEADS), requires_grad=False), draw(2, HEADS, N, 8)
    return x, lambda: regard.attention(query, query, mask=causal(), sink=x)


def dense_mask() -> Any:
    x, query = draw(N, N), draw(2, HEADS, N, 8)
    allowed = x > 0

    def build() -> regard.AttentionMatrix:
        return regard.attention(
            query, query, mask=first(1) | ~(~regard.masks.dense(allowed) | sliding_window(2))
        )

    return allowed, build


def bias() -> Any:
    x, query = draw(HEADS, N, N), draw(2, HEADS, N, 8)
    return x, lambda: regard.attention(
        query, query, score_mod=[regard.softcap(20.0), regard.score_mods.bias(x)]
    )


def slopes() -> Any:
    x, query = draw(HEADS).abs(), draw(2, HEADS, N, 8)
    return x, lambda: regard.attention(query, query, mask=causal(), score_mod=regard.alibi(x))


def large_scores() -> Any:
    x = 0.01 * draw(2, HEADS, N, 8)  # the change makes them too large for the lse of a fused kernel
    return x, lambda: regard.attention(x, x, scale=3.0)


CASES = [
    same_tensor,
    query_without_contiguous_heads,
    shared_key,
    sink,
    dense_mask,
    bias,
    slopes,
    large_scores,
]


def everything(A: regard.AttentionMatrix) -> dict[str, Any]:
    value = draw(A.shape[-1], 5, seed=3)
    found = {
        "product": A @ value, "lse": A.lse, "entry": A[0, 1, 3, 2], "row": A[1, 2, -1], "columns": A[..., :3],
        "rows": A.sum(-1), "received": A.measure(Received()).received, "top": A.topk(3).values,
        "entropy": A.measure(Entropy()).entropy, "dense": A.to_dense(), "part": A[0].entropy(),
        "scores": A.scores[1, 1, 3],
    }  # fmt: skip
    found["lazy rows"] = A.lazy[..., [5, 60, 2], :].to_dense()
    return found


def change(x: Any) -> None:
    with torch.no_grad():
        x.logical_not_() if x.dtype == torch.bool else x.mul_(40.0).add_(0.5)


@pytest.mark.parametrize("before", ["nothing", "product", "entropy", "lse", "everything"])
@pytest.mark.parametrize("case", CASES)
def test_results_describe_the_current_values(case: Any, before: str) -> None:
    x, build = case()
    A = build()
    ask = {
        "nothing": lambda: None, "product": lambda: A @ draw(*A._spec.key.shape), "entropy": A.entropy,
        "lse": lambda: A.lse, "everything": lambda: everything(A),
    }  # fmt: skip
    ask[before]()
    parts = {"heads": A[:, 1], "rows": A.lazy[1, :, [3, 50, 7]], "rows of heads": A[0].lazy[..., 60:, :]}
    if before == "everything":
        assert all(part.entropy().isfinite().all() for part in parts.values())
    for _ in range(2):
        change(x)
        if x.dtype != torch.bool:
            x.mul_(0.1)
        expected = build()
        dense, results = expected.to_dense(), everything(expected)
        for name, result in everything(A).items():
            torch.testing.assert_close(result, results[name], msg=name, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(A.sum(-1).float(), dense.sum(-1), rtol=0, atol=1e-5)
        for name, own in (
            ("heads", dense[:, 1]),
            ("rows", dense[1][:, [3, 50, 7]]),
            ("rows of heads", dense[0, :, 60:]),
        ):
            torch.testing.assert_close(parts[name].to_dense(), own, msg=name, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(parts[name].sum(-1).float(), own.sum(-1), msg=name, rtol=0, atol=1e-5)


def test_given_weights_that_are_changed() -> None:
    from regard.core.attention import attention_from_weights

    weights = torch.rand(2, 5, 7) / 7
    A = attention_from_weights(weights, weights.new_zeros(2, 5, 0), weights.new_zeros(2, 7, 0))
    part, _ = A[1], (A.lse, A.entropy())
    weights[:, 3] = 0.0
    for matrix, own in ((A, weights), (part, weights[1])):
        torch.testing.assert_close(matrix.to_dense(), own)
        torch.testing.assert_close(matrix.sum(-1), own.double().sum(-1))
        assert (matrix.lse[..., 3] == -np.inf).all() and (matrix.lse[..., :3] == 0).all()


def test_an_optimizer_step_between_two_uses() -> None:
    x = draw(1, 2, N, 8).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=5.0)
    A = regard.attention(x, x, mask=causal())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = A.entropy().mean()
        expected = regard.attention(x.detach().clone(), x.detach().clone(), mask=causal()).entropy().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_tensors_of_inference_mode_have_no_version() -> None:
    with torch.inference_mode():
        x = draw(1, 2, N, 8).double()
        A = regard.attention(x, x, mask=causal() & (regard.masks.dense(draw(N, N) > -1) | first(1)))
        torch.testing.assert_close(A.entropy(), A.entropy(), rtol=0, atol=1e-5)
        assert (A @ x).isfinite().all() and A[0].lse.isfinite().all()
    torch.testing.assert_close(A.sum(-1), torch.ones(1, 2, N).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    "copied", [lambda A: A.copy(), copy.deepcopy, lambda A: pickle.loads(pickle.dumps(A))]
)
def test_a_copy_keeps_the_values(copied: Any, library: str) -> None:
    x, allowed = draw(2, N, 8).numpy(), (draw(N, N) > -1).numpy()
    if library == "torch":
        x, allowed = torch.tensor(x), torch.tensor(allowed)
    A = regard.attention(x, x, mask=causal() & (regard.masks.dense(allowed) | first(1)))
    exact = np.asarray(A.to_dense())
    copies = [copied(A), copied(A[1]), copied(A.lazy[..., 5:9, :])]
    assert A.entropy() is not None
    copies += [copied(A)]
    x *= 9.0
    allowed[...] = True
    for matrix, own in zip(copies, (exact, exact[1], exact[:, 5:9], exact), strict=True):
        np.testing.assert_allclose(matrix.to_dense(), own, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(matrix[..., 0], own[..., 0], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(matrix.sum(-1), 1, rtol=1e-5)
