"""Calls that people know from NumPy, torch and other attention functions: they work, or the error names what works."""

from __future__ import annotations

import re

import numpy as np
import pytest

import regard
from regard import RegardError

rng = np.random.default_rng(3)
QUERY, KEY, VALUE = (
    rng.normal(size=(2, 3, 7, 4)),
    rng.normal(size=(2, 3, 11, 4)),
    rng.normal(size=(2, 3, 11, 5)),
)
MASKS = [None, regard.causal(align="lower_right"), regard.padding([11, 6])]


# -- They work --------------------------------------------------------------------------------------------


def dense_diagonal(weights, offset):
    return weights.diagonal(offset, axis1=-2, axis2=-1)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("offset", [-12, -7, -6, -1, 0, 1, 4, 10, 11, 20])
def test_diagonal(mask, offset):
    A = regard.attention(QUERY, KEY, mask=mask)
    np.testing.assert_allclose(
        A.diagonal(offset), dense_diagonal(A.to_dense(), offset), rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("axis", [-1, -2, None, (0, 1, 2, 3)])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "argmax"])
def test_reductions_keep_axes(name, axis, mask):
    if name == "argmax" and isinstance(axis, tuple):
        axis = None
    A = regard.attention(QUERY, KEY, mask=mask)
    for keyword in ({}, {"keepdims": True}, {"keepdims": False}):
        expected = getattr(A.to_dense(), name)(axis, **keyword)
        found = getattr(A, name)(axis, **keyword)
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert np.shape(getattr(A, name)(dim=-1, keepdim=True)) == (2, 3, 7, 1)


@pytest.mark.parametrize("length", [3000])
def test_the_minimum_sees_the_blocks_that_are_skipped(length):
    x = np.random.default_rng(0).normal(size=(length, 4))
    A = regard.attention(x, x, mask=regard.causal())
    smallest = A.min(-1)
    assert smallest[-1] == pytest.approx(A[-1].min(), rel=1e-9) and smallest[-1] > 0
    assert (smallest[:-1] == 0).all() and (A.min(-2)[1:] == 0).all() and A.min(-2)[0] > 0


@pytest.mark.parametrize(
    "index",
    [0, (1, 2), (0, 1, 3), (..., 4), (0, slice(None), 3, 2), (1, 2, [5, 0, -1]), (0, 1, slice(8, 2, -2), slice(1, 6)),
     (slice(None), 1, [3], slice(None)), np.s_[:, :, None, 2], (..., slice(0), 3)],
    ids=str,
)  # fmt: skip
def test_the_transpose_is_indexed_like_an_array(index):
    A = regard.attention(QUERY, KEY, mask=regard.causal(align="lower_right"))
    found = A.mT[index]
    found = found.to_dense() if hasattr(found, "to_dense") else found
    np.testing.assert_allclose(found, A.to_dense().swapaxes(-1, -2)[index], rtol=1e-12, atol=1e-15)


def test_a_matrix_of_one_head_has_a_t():
    A = regard.attention(QUERY[0, 0], KEY[0, 0])
    np.testing.assert_allclose(A.T @ QUERY[0, 0], A.to_dense().T @ QUERY[0, 0], rtol=1e-12)


def test_numpy_arrays():
    A = regard.attention(QUERY, KEY)
    np.testing.assert_array_equal(A.numpy(), A.to_dense())
    np.testing.assert_array_equal(A.received(), A.sum(-2))
    assert A.device == "cpu" and not A.requires_grad and A.cpu() is A
    np.testing.assert_array_equal(A.detach()[0, 1, 2], A[0, 1, 2])


def test_a_linear_operator_never_stores_the_matrix():
    sparse = pytest.importorskip("scipy.sparse.linalg")
    query, key = np.random.default_rng(5).normal(size=(2, 300, 8))
    A = regard.attention(query, key, mask=regard.causal())
    operator = A.as_linear_operator()
    dense = A.to_dense()
    assert operator.shape == (300, 300) and operator.dtype == np.float64
    for x in (query[:, 0], query[:, :1], query[:, :3]):
        np.testing.assert_allclose(operator @ x, dense @ x, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(operator.T @ x, dense.T @ x, rtol=1e-10, atol=1e-12)
    values = sparse.svds(operator, k=4, return_singular_vectors=False)
    np.testing.assert_allclose(np.sort(values)[::-1], np.linalg.svd(dense)[1][:4], rtol=1e-8)
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in (query, key)]
    part = regard.attention(*(x[None, None] for x in tensors))[0].as_linear_operator()
    assert part.dtype == np.float32
    expected = regard.attention(query, key) @ query[:, 0]
    np.testing.assert_allclose(part @ query[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_tensors():
    torch = pytest.importorskip("torch")
    query, key, value = (torch.tensor(x, dtype=torch.float32) for x in (QUERY, KEY, VALUE))
    query.requires_grad_()
    mods = [regard.score_mods.bias(torch.randn(7, 11, requires_grad=True)), regard.softcap(20)]
    ids = torch.arange(11) // 4
    mask = regard.mask(lambda b, h, q_idx, kv_idx: ids[kv_idx] <= q_idx)
    A = regard.attention(query, key, mask=mask, score_mod=mods)
    assert A.device == query.device and A.requires_grad
    assert torch.equal(torch.matmul(A, value), A @ value)
    left = torch.randn(7)
    assert torch.equal(torch.matmul(left, A[0, 1]), left @ A[0, 1])
    alone = A.detach()
    assert not alone.requires_grad
    torch.testing.assert_close(alone.to_dense(), A.to_dense().detach())
    torch.testing.assert_close(
        alone[0, 1].detach().entropy(), A[0, 1].entropy().detach(), rtol=1e-6, atol=1e-6
    )
    wide = A.to(torch.float64)
    assert wide.dtype == torch.float64 and wide.to_dense().dtype == torch.float64
    torch.testing.assert_close(wide.to_dense().float(), A.to_dense())
    wide.to_dense()[..., 0].sum().backward()
    assert query.grad is not None and query.grad.abs().sum() > 0
    assert torch.equal(A.cpu().to_dense(), A.to_dense())
    assert isinstance(alone.numpy(), np.ndarray)
    documents = regard.attention(key, key, mask=regard.masks.document(ids))
    torch.testing.assert_close(documents.to(torch.float64).to_dense().float(), documents.to_dense())


def test_plot_draws_a_heat_map():
    pytest.importorskip("matplotlib").use("agg")
    A = regard.attention(QUERY[0, 0], KEY[0, 0])
    axes = A.plot(query_tokens=list("abcdefg"), tokens=[str(n) for n in range(11)])
    np.testing.assert_allclose(axes.images[0].get_array(), A.to_dense())


# -- They are answered ------------------------------------------------------------------------------------

q, k, v = QUERY[0, 0], KEY[0, 0], VALUE[0, 0]
A, B = regard.attention(q, k), regard.attention(QUERY, KEY)
NAMES = {
    "regard": regard, "np": np, "q": q, "k": k, "v": v, "A": A, "B": B, "QUERY": QUERY, "KEY": KEY,
    "keep": np.ones((7, 11), bool), "numbers": np.zeros((7, 11)), "lengths": [11, 6], "slopes": np.ones(3),
    "real": np.ones((2, 11), int),
}  # fmt: skip

F = "regard.mask(lambda b, h, i, j: i >= j)"
# A wrong call, and the right one. The error of the first names the functions and keywords of the second.
ANSWERED = [
    ("regard.attention(k, k, is_causal=True)", "regard.attention(k, k, mask=regard.causal())"),
    ("regard.attention(k, k, causal=True)", "regard.attention(k, k, mask=regard.causal())"),
    ("regard.attention(q, k, v)", "regard.attention(q, k) @ v"),
    ("regard.attention(q, k, value=v)", "regard.attention(q, k) @ v"),
    ("regard.attention(q, k, attn_mask=keep)", "regard.attention(q, k, mask=regard.masks.dense(keep))"),
    ("regard.attention(q, k, attn_mask=numbers)", "regard.attention(q, k, score_mod=regard.score_mods.bias(numbers))"),
    (
        "regard.attention(QUERY, KEY, attention_mask=real)",
        "regard.attention(QUERY, KEY, mask=regard.masks.dense(real[:, None, None] > 0))",
    ),
    (
        "regard.attention(QUERY, KEY, key_padding_mask=keep)",
        "regard.attention(QUERY, KEY, mask=regard.padding(lengths))",
    ),
    ("regard.attention(q, k, block_mask=1)", f"regard.attention(q, k, mask={F})"),
    ("regard.attention(q, k, mask_mod=1)", f"regard.attention(q, k, mask={F})"),
    ("regard.attention(q, k, bias=numbers)", "regard.attention(q, k, score_mod=regard.score_mods.bias(numbers))"),
    ("regard.attention(k, k, window_size=4)", "regard.attention(k, k, mask=regard.sliding_window(4))"),
    (
        "regard.attention(QUERY, QUERY, alibi_slopes=slopes)",
        "regard.attention(QUERY, QUERY, score_mod=regard.alibi(slopes))",
    ),
    ("regard.attention(q, k, softcap=5)", "regard.attention(q, k, score_mod=regard.softcap(5))"),
    ("regard.attention(q, k, softmax_scale=1.0)", "regard.attention(q, k, scale=1.0)"),
    ("regard.attention(q, k, scaling=1.0)", "regard.attention(q, k, scale=1.0)"),
    ("regard.attention(k, k, mask='causal')", "regard.attention(k, k, mask=regard.causal())"),
    ("regard.attention(k, k, mask=regard.causal)", "regard.attention(k, k, mask=regard.causal())"),
    ("regard.attention(q, k, mask=keep)", "regard.attention(q, k, mask=regard.masks.dense(keep))"),
    ("regard.attention(q, k, mask=numbers)", "regard.attention(q, k, score_mod=regard.score_mods.bias(numbers))"),
    ("regard.attention(q, k, mask=lambda b, h, i, j: i >= j)", f"regard.attention(q, k, mask={F})"),
    ("regard.masks.dense(numbers)", "regard.masks.dense(numbers != 0)"),
    ("regard.mask(keep)", "regard.masks.dense(keep)"),
    ("regard.mask(lambda i, j: i >= j)", "regard.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)"),
    ("regard.causal() and regard.padding(4)", "regard.causal() & regard.padding(4)"),
    ("regard.causal() & keep", "regard.causal() & regard.masks.dense(keep)"),
    ("regard.causal(3)", "regard.causal(align='lower_right')"),
    ("bool(A)", "A.max() > 0.5"),
    ("A != 0", "A.to_dense() != 0"),
    ("A == 0", "A.to_dense() == 0"),
    ("0.5 in A", "0.5 in A.to_dense()"),
    ("B.T", "B.mT"),
    ("A + 1", "A.to_dense() + 1"),
    ("A * 2", "A.to_dense() * 2"),
    ("A > 0.5", "A.to_dense() > 0.5"),
    ("1 - A", "1 - A.to_dense()"),
    ("np.ones(11) * A", "np.ones(11) * A.to_dense()"),
    ("B.explain(0)", "B[0, 0].explain(0)"),
    ("B.page()", "B[0, 0].page()"),
    ("B.plot()", "B[0, 0].plot()"),
    ("A.flatten()", "A.to_dense().flatten()"),
    ("A.transpose()", "A.to_dense().transpose()"),
    ("B[keep]", "B[..., np.flatnonzero(keep[:, 0]), :]"),
]  # fmt: skip


# What tells two calls apart: functions, keywords, heads and operators.
PARTS = re.compile(r"regard(?:\.\w+)+(?:\(\))?|\[0, 0\]|(?<=\.)[a-zA-Z]\w*|\b\w+(?==[^=])|[&@]|!= 0|kv_idx")


@pytest.mark.parametrize(("wrong", "right"), ANSWERED, ids=[wrong for wrong, _ in ANSWERED])
def test_a_wrong_call_is_answered_with_the_right_one(wrong, right):
    if "plot" in right:
        pytest.importorskip("matplotlib")
    eval(right, dict(NAMES))
    with pytest.raises((RegardError, AttributeError)) as raised:
        eval(wrong, dict(NAMES))
    new = set(PARTS.findall(right)) - set(PARTS.findall(wrong))
    message = str(raised.value)
    assert new and all(part in message for part in new), (new, message)


def test_there_are_enough_of_them():
    assert len(ANSWERED) >= 40


def test_functions_of_torch_are_answered():
    torch = pytest.importorskip("torch")
    A = regard.attention(*(torch.tensor(x) for x in (q, k)))
    for call in (lambda: torch.softmax(A, -1), lambda: A + torch.ones(11), lambda: torch.ones(11) + A):
        with pytest.raises((RegardError, TypeError), match=r"to_dense"):
            call()
    with pytest.raises(RegardError, match=r"A\.sum"):
        torch.sum(A, -1)


def test_a_watch_that_was_not_entered_names_the_block():
    torch = pytest.importorskip("torch")
    watching = regard.watch(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True))
    for name in ("heads", "page", "layers"):
        with pytest.raises(AttributeError) as raised:
            getattr(watching, name)
        assert name != "heads" or "with regard.watch(model) as recording" in str(raised.value)
    assert not hasattr(watching, "nonsense")


# -- Parts, changes in place, and operands ----------------------------------------------------------------

ROWS = [slice(3, 6), [4, 1, 2], [2], [0, 0, 1], slice(None, None, -1)]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("offset", [-2, 0, 1, 3])
def test_the_diagonal_of_some_rows(rows, offset):
    for A in (regard.attention(QUERY[0, 0], KEY[0, 0]), regard.linear_attention(QUERY[0, 0], KEY[0, 0])):
        part = A.lazy[rows]
        np.testing.assert_allclose(part.diagonal(offset), part.to_dense().diagonal(offset), rtol=1e-12)


@pytest.mark.parametrize("offset", [1.5, "a", None, True])
def test_an_offset_is_a_whole_number(offset):
    with pytest.raises(regard.ArgumentTypeError):
        A.diagonal(offset)
    assert A.diagonal(10**30).shape == A.diagonal(-(10**30)).shape == (0,)


@pytest.mark.parametrize("mask", [None, regard.causal(align="lower_right")], ids=str)
def test_gradients_of_a_diagonal_and_of_a_matrix_as_operand(mask):
    torch = pytest.importorskip("torch")
    query, key = (torch.tensor(x[0, 0, :7], requires_grad=True) for x in (QUERY, KEY))
    allowed = torch.tensor(np.ones((7, 7), bool) if mask is None else mask.to_dense(7, 7))
    eager = (query @ key.T / 2).masked_fill(~allowed, -torch.inf).softmax(-1)
    G = regard.attention(query, key, mask=mask)
    for lazy, stored in (
        (G.diagonal(-1), eager.diagonal(-1)),
        (G @ G, eager @ eager),
        (G @ G.mT, eager @ eager.T),
        (G.mT @ G, eager.T @ eager),
        (torch.matmul(G, G), eager @ eager),
        (query.mT @ G.mT.mT, query.mT @ eager),
        (query.mT @ G.mT, query.mT @ eager.T),
    ):
        expected = torch.autograd.grad(stored.square().sum(), (query, key), retain_graph=True)
        found = torch.autograd.grad(lazy.square().sum(), (query, key), retain_graph=True)
        torch.testing.assert_close(lazy, stored)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("convert", ["detach", "cpu", "to"])
@pytest.mark.parametrize("part", [False, True])
def test_what_shares_its_arrays_notices_changes_in_place(convert, part):
    torch = pytest.importorskip("torch")
    query, key = torch.tensor(QUERY), torch.tensor(KEY)
    A = regard.attention(query, key)
    A = A[0, 1] if part else A
    before = A.lse.clone()
    B = getattr(A, convert)(*(["cpu"] if convert == "to" else []))
    torch.testing.assert_close(B.lse, before)
    query.mul_(3)
    expected = (query @ key.mT / 2).logsumexp(-1)
    torch.testing.assert_close(B.lse, expected[0, 1] if part else expected)
    C = getattr(A, convert)(*(["cpu"] if convert == "to" else []))  # no result was read before the change
    query.mul_(2)
    torch.testing.assert_close(C.entropy(), regard.attention(query, key)[(0, 1) if part else ...].entropy())


def test_dtypes_of_parts_and_dtypes_that_are_refused():
    torch = pytest.importorskip("torch")
    A = regard.attention(*(torch.tensor(x, dtype=torch.float32) for x in (QUERY, KEY)))
    for matrix in (A, A[0, 1], A[0, 1].copy(), A.lazy[0, :, 2:4]):
        wide = matrix.to(torch.float64)
        assert wide.dtype == wide.to_dense().dtype == torch.float64
        torch.testing.assert_close(wide.to_dense().float(), matrix.to_dense())
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(regard.ArgumentTypeError, match="floating-point"):
            A.to(dtype)
    leaf = torch.tensor(QUERY, requires_grad=True)
    with torch.no_grad():
        assert regard.attention(leaf, torch.tensor(KEY)).requires_grad


def test_a_mask_function_may_change_its_indices():
    def change(b, h, q_idx, kv_idx):
        q_idx += 1
        kv_idx *= 2
        return q_idx >= kv_idx

    A = regard.attention(QUERY, KEY, mask=regard.mask(change))
    expected = np.arange(7)[:, None] + 1 >= 2 * np.arange(11)
    for _ in range(2):
        np.testing.assert_array_equal(A.to_dense()[0, 0] > 0, expected)
        np.testing.assert_array_equal(A.received() > 0, np.broadcast_to(expected.any(0), (2, 3, 11)))


def test_the_transpose_is_no_array_either():
    A = regard.attention(q, k)
    np.testing.assert_allclose(np.asarray(A.T), A.to_dense().T)
    np.testing.assert_allclose(np.matmul(A, v), A @ v)
    np.testing.assert_allclose(np.matmul(np.ones(11), A.T), A @ np.ones(11))
    np.testing.assert_allclose(A @ A.T, A.to_dense() @ A.to_dense().T)
    assert A.T.T is A and A.T.ndim == 2 and A.T.dtype == A.dtype and len(A.T) == 11
    for call in (
        lambda: bool(A.T),
        lambda: A.T == 0,
        lambda: np.exp(A),
        lambda: 0.5 in A.T,
        lambda: -A,
        lambda: abs(A.T),
    ):
        with pytest.raises(regard.ArgumentTypeError, match=r"to_dense|A\.max"):
            call()
    with pytest.raises(regard.ArgumentTypeError, match=r"other - A\.to_dense\(\)"):
        np.ones((7, 11)).tolist() - A


def test_complex_operands_of_a_linear_operator():
    pytest.importorskip("scipy")
    operator = A.as_linear_operator()
    x = v[:, 0] + 1j * v[:, 1]
    np.testing.assert_allclose(operator @ x, A.to_dense() @ x)
