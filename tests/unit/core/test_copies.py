"""Copies, files and conversions of a matrix: the numbers stay the same, and nothing of the original is shared."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard import alibi, attention, causal, linear_attention, relative_bias, softcap
from regard.core.attention import attention_from_weights
from regard.engines import ArrayEngine, register
from regard.engines.registry import _REGISTERED
from regard.masks import dense, document
from regard.score_mods import bias

torch = pytest.importorskip("torch")

N, HEADS, WIDTH = 7, 2, 3
RNG = np.random.default_rng(2)
QUERY, KEY, VALUE = (RNG.normal(size=(1, HEADS, N, WIDTH)).astype(np.float32) for _ in range(3))
BIAS, TABLE = RNG.normal(size=(N, N)), RNG.normal(size=(4, HEADS))
WEIGHTS = RNG.dirichlet(np.ones(N), size=(1, HEADS, N)).astype(np.float32)

MATRICES: dict[str, Callable[[Any], regard.AttentionMatrix]] = {
    "plain": lambda get: attention(get(QUERY), get(KEY)),
    "causal and documents": lambda get: attention(
        get(QUERY), get(KEY), mask=causal() & document([0] * 3 + [1] * 4)
    ),
    "dense": lambda get: attention(
        get(QUERY), get(KEY), mask=dense(torch.tril(torch.ones(N, N, dtype=torch.bool)))
    ),
    "bias": lambda get: attention(get(QUERY), get(KEY), score_mod=[bias(get(BIAS)), softcap(4.0)]),
    "slopes": lambda get: attention(get(QUERY), get(KEY), score_mod=alibi(get(np.array([0.5, 0.1])))),
    "table": lambda get: attention(
        get(QUERY), get(KEY), score_mod=relative_bias(get(TABLE), bidirectional=True)
    ),
    "sink": lambda get: attention(get(QUERY), get(KEY), sink=get(np.array([0.5, -1.0]))),
    "shared key": lambda get: attention(get(QUERY), get(KEY[:, :1]), enable_gqa=True),
    "head": lambda get: attention(get(QUERY), get(KEY), mask=causal())[0, 1],
    "rows": lambda get: attention(get(QUERY), get(KEY), mask=causal()).lazy[..., [5, 2], :],
    "linear": lambda get: linear_attention(get(QUERY), get(KEY), mask=causal()),
    "given": lambda get: attention_from_weights(get(WEIGHTS), get(QUERY[..., :0]), get(KEY[..., :0])),
}


def save_and_load(A: Any) -> Any:
    file = io.BytesIO()
    torch.save(A, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda A: pickle.loads(pickle.dumps(A)),
    "torch.save": save_and_load,
    "copy": copy.copy,
}


def read(A: regard.AttentionMatrix) -> list[Any]:
    """Read the matrix in the ways that use its caches, and those that do not."""
    value = A.problem.engine.xp.asarray(VALUE[0, 0])
    results = [A.lse, A.entropy(), A.to_dense(), A[..., 1, 2:4], A @ value, *A.topk(2), A.sum(-2)]
    return [A.problem.engine.to_numpy(result) for result in results]


@pytest.mark.parametrize("before", ["nothing", "product", "measures"])
@pytest.mark.parametrize("library", ["numpy", "torch", "leaf", "graph"])
@pytest.mark.parametrize("name", MATRICES)
def test_a_copy_has_the_same_numbers(name: str, library: str, before: str) -> None:
    def get(array: Any) -> Any:
        tensor = torch.from_numpy(array.copy())
        leaf = tensor.requires_grad_() if library in ("leaf", "graph") else tensor
        return array if library == "numpy" else leaf * 1.0 if library == "graph" else leaf

    A = MATRICES[name](get)
    if before == "product":
        _ = A @ A.problem.engine.xp.asarray(VALUE[0, 0])
    elif before == "measures":
        _ = A.entropy(), A.lse
    copies = {kind: make(A) for kind, make in COPIES.items()}
    expected = read(A)
    for kind, copied in copies.items():
        assert (copied.shape, copied.dtype, repr(copied)) == (A.shape, A.dtype, repr(A)), kind
        for found, wanted in zip(read(copied), expected, strict=True):
            if library in ("numpy", "torch"):
                np.testing.assert_array_equal(found, wanted, err_msg=kind)
            else:  # with a gradient, results are computed in another order
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=kind)
    if library in ("leaf", "graph"):
        assert A.entropy().requires_grad and copies["copy"].entropy().requires_grad
        assert not any(copies[kind].entropy().requires_grad for kind in ("deepcopy", "pickle", "torch.save"))


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_copy_does_not_follow_the_original(kind: str, library: str) -> None:
    query = torch.from_numpy(QUERY.copy()) if library == "torch" else QUERY.copy()
    A = attention(query, query)
    expected = read(attention(QUERY if library == "numpy" else torch.from_numpy(QUERY), QUERY))[2]
    copied = COPIES[kind](A)
    query *= 0
    np.testing.assert_array_equal(copied.problem.engine.to_numpy(copied.to_dense()), expected)


def test_a_copy_of_another_librarys_matrix() -> None:
    class Mine(np.ndarray):
        pass

    class MyEngine(ArrayEngine):
        name, xp = "mine", np

        def owns(self, array: object) -> bool:
            return isinstance(array, Mine)

        def to_numpy(self, array: Any) -> Any:
            return np.asarray(array)

    register(MyEngine())
    try:
        A = attention(QUERY.view(Mine), KEY.view(Mine))
        assert copy.deepcopy(A).kernel == "mine: block loop"
        np.testing.assert_array_equal(copy.deepcopy(A).to_dense(), A.to_dense())
    finally:
        del _REGISTERED["mine"]


# Conversions


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "asarray": torch.asarray,
    "from_dlpack": torch.from_dlpack,
    "float64": lambda A: torch.as_tensor(A, dtype=torch.float64),
    "numpy": lambda A: torch.from_numpy(np.asarray(A)),
    "numpy from_dlpack": lambda A: torch.from_numpy(np.from_dlpack(A).copy()),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_conversion_to_a_tensor(library: str, lead: tuple[int, ...], conversion: str) -> None:
    query = RNG.normal(size=(*lead, N, WIDTH)).astype(np.float32)
    exact = query @ query.swapaxes(-1, -2) / WIDTH**0.5
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    A = attention(torch.from_numpy(query) if library == "torch" else query, query)
    converted = CONVERSIONS[conversion](A)
    assert converted.dtype == (torch.float64 if conversion == "float64" else torch.float32)
    np.testing.assert_allclose(converted.numpy(), exact / exact.sum(-1, keepdims=True), rtol=1e-5)


def test_conversion_refuses_gradients_and_large_matrices() -> None:
    query = torch.from_numpy(QUERY.copy()).requires_grad_()
    A = attention(query, query)
    with pytest.raises(regard.ArgumentError, match=r"requires a gradient.*A\.to_dense\(\) to keep"):
        torch.as_tensor(A)
    with torch.no_grad():
        torch.testing.assert_close(torch.as_tensor(A), A.to_dense())
    large = torch.zeros(9_000, 1)
    with pytest.raises(regard.TooLargeError, match=r"torch\.as_tensor\(A\): received a matrix of shape"):
        torch.as_tensor(attention(large, large))


def test_a_dtype_leaves_a_mask_of_booleans_as_it_is():
    allowed = torch.rand(4, 4) < 0.7
    query = torch.randn(4, 3)
    moved = attention(query, query, mask=dense(allowed)).to(torch.float64)
    assert moved.mask == dense(allowed) and moved.mask.array.dtype == torch.bool
    torch.testing.assert_close(moved.to_dense() > 0, allowed)


def test_a_copied_part_keeps_the_dtype_of_its_query_when_it_is_moved():
    query, key = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 5, 3)
    moved = copy.deepcopy(attention(query, key).lazy[0]).to("cpu")
    expected = torch.softmax(query[0] @ key[0].double().mT * 3**-0.5, -1)
    torch.testing.assert_close(moved.to_dense(), expected, rtol=1e-12, atol=1e-12)
