"""Arguments in any memory layout, byte order and width: a copy in C order gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regard
from regard import alibi, attention, relative_bias, sliding_window
from regard.masks import dense, document, first
from regard.measures import Contribution
from regard.score_mods import bias

torch = pytest.importorskip("torch")

N, HEADS, WIDTH = 7, 2, 3
RNG = np.random.default_rng(5)
QUERY = RNG.normal(size=(1, HEADS, N, WIDTH)).astype(np.float32)
MASK = RNG.random((N, N)) < 0.7
BIAS, NORMS = RNG.normal(size=(N, N)).astype(np.float32), RNG.random((HEADS, N)).astype(np.float32)
TABLE, SLOPES = RNG.normal(size=(4, HEADS)).astype(np.float32), np.array([0.5, 0.25], np.float32)
IDS, SIZES = np.array([0, 0, 1, 1, 1, 2, 0]), np.array([3, 2])


def make_read_only(array: Any) -> Any:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "negative strides": lambda a: np.ascontiguousarray(np.flip(a))[(slice(None, None, -1),) * a.ndim],
    "swapped bytes": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "read-only": make_read_only,
    "extended precision": lambda a: a.astype(np.longdouble) if a.dtype.kind == "f" else a,
}

# Each use takes the matrix's query, and a function that lays an array out.
USES: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "key": lambda query, lay: attention(query, lay(QUERY)).to_dense(),
    "value": lambda query, lay: attention(query, query) @ lay(QUERY),
    "vector": lambda query, lay: attention(query, query) @ lay(BIAS[0]),
    "x of the transpose": lambda query, lay: attention(query, query).mT @ lay(QUERY),
    "x from the left": lambda query, lay: lay(QUERY.swapaxes(-1, -2).copy()) @ attention(query, query),
    "sink": lambda query, lay: attention(query, query, sink=lay(SLOPES)).to_dense(),
    "bias": lambda query, lay: attention(query, query, score_mod=bias(lay(BIAS))).to_dense(),
    "bias of a product": lambda query, lay: attention(query, query, score_mod=bias(lay(BIAS))) @ query,
    "slopes": lambda query, lay: attention(query, query, score_mod=alibi(lay(SLOPES))).to_dense(),
    "table": lambda query, lay: attention(
        query, query, score_mod=relative_bias(lay(TABLE), bidirectional=True)
    ).to_dense(),
    "dense": lambda query, lay: attention(query, query, mask=dense(lay(MASK))) @ query,
    "document": lambda query, lay: attention(query, query, mask=document(lay(IDS))) @ query,
    "first": lambda query, lay: attention(query, query, mask=first(lay(SIZES[:1]))).to_dense(),
    "window": lambda query, lay: attention(query, query, mask=sliding_window(lay(SIZES))).to_dense(),
    "norms": lambda query, lay: (
        attention(query, query).measure(Contribution(2, lay(NORMS))).contribution.values
    ),
    "index": lambda query, lay: attention(query, query)[0, 1, lay(SIZES)],
    "value of explain": lambda query, lay: attention(query, query)[0, 1].explain(2, lay(QUERY[0, 1])).output,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_layout_of_an_argument_does_not_matter(library: str, layout: str, use: str) -> None:
    query = torch.from_numpy(QUERY) if library == "torch" else QUERY
    expected = np.asarray(USES[use](query, lambda array: array))
    found = np.asarray(USES[use](query, LAYOUTS[layout]))
    assert found.shape == expected.shape and found.dtype.isnative
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "index", [np.s_[..., ::-7, :], np.s_[0, 1, 3:2:-1], np.s_[0, 1, ::-1], np.s_[..., ::-6]]
)
@pytest.mark.parametrize("masked", [False, True])
def test_slices_with_a_negative_step(index: Any, masked: bool) -> None:
    query = torch.from_numpy(QUERY)
    A = attention(query, query, mask=regard.causal() if masked else None)
    expected = A.to_dense().numpy()[index]
    found = A[index]
    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [object, "U1", np.complex128, bool, "datetime64[D]"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_value_that_holds_no_real_numbers_is_refused(library: str, dtype: Any) -> None:
    query = torch.from_numpy(QUERY) if library == "torch" else QUERY
    with pytest.raises(regard.ArgumentTypeError, match=r"real numbers. Convert it first: value\.astype"):
        attention(query, query) @ np.zeros((N, 2), np.int64).astype(dtype)


# Tensors that require a gradient


@pytest.mark.parametrize("name", ["value", "sink", "bias", "slopes", "table", "norms"])
def test_a_numpy_matrix_refuses_tensors_that_require_a_gradient(name: str) -> None:
    def lay(array: Any) -> Any:
        return torch.from_numpy(array.copy()).requires_grad_()

    with pytest.raises(regard.ArgumentTypeError, match=r"a tensor that requires a gradient.*detach\(\)"):
        USES[name](QUERY, lay)


def test_slopes_get_their_gradient() -> None:
    query = torch.from_numpy(QUERY).double()
    value = torch.from_numpy(RNG.normal(size=(1, HEADS, N, WIDTH)))
    slopes = torch.from_numpy(SLOPES).double().requires_grad_()
    positions = torch.arange(N)
    distance = (positions[:, None] - positions).abs()
    weights = (query @ query.mT / WIDTH**0.5 - slopes[:, None, None] * distance).softmax(-1)
    A = attention(query, query, score_mod=alibi(slopes))
    for found, expected in (
        (A @ value, weights @ value),
        (A.entropy(), torch.special.entr(weights).sum(-1)),
    ):
        torch.testing.assert_close(found, expected)
        cotangent = torch.randn_like(found)
        gradients = [
            torch.autograd.grad(x, slopes, cotangent, retain_graph=True)[0] for x in (found, expected)
        ]
        torch.testing.assert_close(*gradients)
    assert repr(alibi(slopes)) == "alibi(slopes=[0.5, 0.25])"
