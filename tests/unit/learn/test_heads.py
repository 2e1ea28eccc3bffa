"""Multi-head attention: single heads, padded batches, torch, and the split into heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from regard.learn import (
    NumpyMultiHeadAttention,
    create_causal_mask,
    create_padding_mask,
)
from tests.helpers.attention_ways import by_loops


def explicit_heads(
    layer: NumpyMultiHeadAttention, query: Any, key: Any, value: Any, mask: Any = None
) -> tuple[Any, Any]:
    """Compute one sequence head by head, each with its own columns of the projections."""
    outputs, weights = [], []
    for h in range(layer.num_heads):
        own = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
        o, w = by_loops(query @ layer.W_Q[:, own], key @ layer.W_K[:, own], value @ layer.W_V[:, own], mask)
        outputs.append(o)
        weights.append(w)
    return np.concatenate(outputs, axis=1) @ layer.W_O, np.stack(weights)


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(6, 1), (6, 2), (6, 3), (6, 6), (15, 5)])
def test_heads_equal_single_head_attention(embed_dim: int, num_heads: int) -> None:
    rng = np.random.default_rng(0)
    layer = NumpyMultiHeadAttention(embed_dim, num_heads, seed=3)
    x, y, z = (
        rng.normal(size=(5, embed_dim)),
        rng.normal(size=(7, embed_dim)),
        rng.normal(size=(7, embed_dim)),
    )
    causal = create_causal_mask(5)
    for got, want in [
        (layer(x), explicit_heads(layer, x, x, x)),
        (layer(x, mask=causal), explicit_heads(layer, x, x, x, causal)),
        (layer(x, y), explicit_heads(layer, x, y, y)),
        (layer.forward(x, y, z), explicit_heads(layer, x, y, z)),
    ]:
        np.testing.assert_allclose(got[0], want[0], atol=1e-13)
        np.testing.assert_allclose(got[1], want[1], atol=1e-14)


def test_heads_ignore_padding() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 5, 6))
    lengths = [2, 5, 3]
    layer = NumpyMultiHeadAttention(embed_dim=6, num_heads=2)
    output, weights = layer(x, mask=create_padding_mask(lengths, 5))
    assert output.shape == (3, 5, 6)
    assert weights.shape == (3, 2, 5, 5)
    for b, length in enumerate(lengths):
        alone, _ = layer(x[b, :length])
        np.testing.assert_allclose(output[b, :length], alone, atol=1e-14)
        x[b, length:] = math.inf
    poisoned, _ = layer(x, mask=create_padding_mask(lengths, 5))
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(poisoned[b, :length], output[b, :length], atol=1e-14)


def test_heads_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")

    layer = NumpyMultiHeadAttention(embed_dim=6, num_heads=3, seed=5)
    theirs = torch.nn.MultiheadAttention(6, 3, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        stacked = np.concatenate([layer.W_Q.T, layer.W_K.T, layer.W_V.T])
        theirs.in_proj_weight.copy_(torch.from_numpy(stacked))
        theirs.out_proj.weight.copy_(torch.from_numpy(layer.W_O.T.copy()))
        x = np.random.default_rng(0).normal(size=(2, 5, 6))
        drop = torch.from_numpy(~create_causal_mask(5))  # in torch True means masked
        tensor = torch.from_numpy(x)
        want, want_weights = theirs(tensor, tensor, tensor, attn_mask=drop, average_attn_weights=False)
    output, weights = layer(x, mask=create_causal_mask(5))
    np.testing.assert_allclose(output, want.numpy(), atol=1e-13)
    np.testing.assert_allclose(weights, want_weights.numpy(), atol=1e-14)


@pytest.mark.parametrize("lead", [(), (2,), (2, 4)])
def test_merge_is_the_inverse_of_split(lead: tuple[int, ...]) -> None:
    layer = NumpyMultiHeadAttention(embed_dim=15, num_heads=5)
    x = np.random.default_rng(0).normal(size=(*lead, 7, 15))
    split = layer.split_heads(x)
    assert split.shape == (*lead, 5, 7, 3)
    for h in range(5):
        np.testing.assert_array_equal(split[..., h, :, :], x[..., 3 * h : 3 * h + 3])
    np.testing.assert_array_equal(layer.merge_heads(split), x)
    np.testing.assert_array_equal(layer.split_heads(layer.merge_heads(split)), split)


def test_projections_depend_on_the_seed() -> None:
    first, again, other = (NumpyMultiHeadAttention(embed_dim=64, num_heads=4, seed=s) for s in (1, 1, 2))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        W = getattr(first, name)
        np.testing.assert_array_equal(W, getattr(again, name))
        assert (getattr(other, name) != W).any()
        assert W.std() == pytest.approx(1 / 8, rel=0.05)
    assert (first.W_Q != first.W_K).any()


X32, X34, X52 = np.ones((3, 2)), np.ones((3, 4)), np.ones((5, 2))


def test_parameters_by_name() -> None:
    heads = NumpyMultiHeadAttention(4, 2)
    assert {
        name: array is getattr(heads, name) for name, array in heads.parameters().items()
    } == dict.fromkeys(["W_Q", "W_K", "W_V", "W_O"], True)
