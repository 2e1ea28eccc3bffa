"""The transformer block and its parts: activations, layer norm, feed-forward, dropout and padded batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from regard import learn
from regard.learn import (
    FeedForward,
    LayerNorm,
    TransformerBlock,
    create_causal_mask,
    create_padding_mask,
    pad_batch,
    softmax,
)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def test_activations_from_their_definitions() -> None:
    x = draw(3, 5, 7) * 3
    np.testing.assert_array_equal(learn.relu(x), np.where(x > 0, x, 0))
    want = [z * (1 + math.erf(z / math.sqrt(2))) / 2 for z in x.flat]
    np.testing.assert_allclose(learn.gelu(x).ravel(), want, rtol=1e-14, atol=1e-15)
    assert -1e-12 < learn.gelu([-8.0])[0] < 0  # where 1 + erf rounds to 0


def test_layer_norm_gives_mean_0_and_variance_1() -> None:
    norm = LayerNorm(7, eps=0)
    y = norm(draw(2, 5, 7) * 9 + 4)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-13)
    norm.gain, norm.bias = np.arange(7.0), np.ones(7)
    np.testing.assert_allclose(norm(draw(5, 7)), LayerNorm(7, eps=0)(draw(5, 7)) * np.arange(7.0) + 1)
    np.testing.assert_array_equal(LayerNorm(3)([[2, 2, 2]]), 0)  # equal entries have variance 0


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_agrees_with_torch(norm: str, activation: str) -> None:
    torch = pytest.importorskip("torch")

    block = TransformerBlock(6, 3, hidden_dim=11, norm=norm, activation=activation, seed=5)
    rng = np.random.default_rng(1)
    for part in (block.attention_norm, block.feed_forward_norm):
        part.gain, part.bias = rng.normal(size=(2, 6))
    block.feed_forward.b_1, block.feed_forward.b_2 = rng.normal(size=11), rng.normal(size=6)
    theirs = torch.nn.TransformerEncoderLayer(
        6, 3, 11, 0.0, activation, batch_first=True, norm_first=norm == "pre", dtype=torch.float64
    )
    own, ours = theirs.self_attn, block.parameters()
    pairs = [
        (own.out_proj.weight, ours["attention.W_O"].T),
        (own.in_proj_weight, np.concatenate([ours[f"attention.W_{name}"].T for name in "QKV"])),
        (own.in_proj_bias, np.zeros(18)),
        (own.out_proj.bias, np.zeros(6)),
        (theirs.linear1.weight, ours["feed_forward.W_1"].T),
        (theirs.linear1.bias, ours["feed_forward.b_1"]),
        (theirs.linear2.weight, ours["feed_forward.W_2"].T),
        (theirs.linear2.bias, ours["feed_forward.b_2"]),
        (theirs.norm1.weight, ours["attention_norm.gain"]),
        (theirs.norm1.bias, ours["attention_norm.bias"]),
        (theirs.norm2.weight, ours["feed_forward_norm.gain"]),
        (theirs.norm2.bias, ours["feed_forward_norm.bias"]),
    ]
    x = draw(2, 5, 6)
    with torch.no_grad():
        for parameter, array in pairs:
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        drop = torch.from_numpy(~create_causal_mask(5))  # in torch True means masked
        want = theirs(torch.from_numpy(x), src_mask=drop)
    output, weights = block(x, mask=create_causal_mask(5))
    np.testing.assert_allclose(output, want.numpy(), atol=1e-12)
    assert weights.shape == (2, 3, 5, 5)
    assert (weights == np.tril(weights)).all()
    # Torch has biases in the attention too; the other parameters are the same.
    assert sum(p.numel() for p in theirs.parameters()) == block.parameter_count() + 18 + 6


@pytest.mark.parametrize(("embed_dim", "num_heads", "hidden_dim"), [(6, 2, 11), (15, 5, 7), (4, 1, None)])
def test_parameter_count(embed_dim: int, num_heads: int, hidden_dim: int | None) -> None:
    block = TransformerBlock(embed_dim, num_heads, hidden_dim=hidden_dim)
    wide = 4 * embed_dim if hidden_dim is None else hidden_dim
    attention, network = 4 * embed_dim**2, 2 * embed_dim * wide + wide + embed_dim
    assert block.parameter_count() == attention + network + 4 * embed_dim
    assert sum(array.size for array in block.attention.parameters().values()) == attention
    assert sum(array.size for array in block.feed_forward.parameters().values()) == network
    assert block.parameters()["attention.W_Q"] is block.attention.W_Q


def test_block_depends_on_its_seed() -> None:
    first, again, other = (TransformerBlock(8, 2, seed=s).parameters() for s in (0, 0, 1))
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
    assert (first["feed_forward.W_1"] != other["feed_forward.W_1"]).all()
    drawn = [a for parameters in (first, other) for name, a in parameters.items() if ".W_" in name]
    numbers = np.concatenate([array.ravel()[:8] / array.std() for array in drawn])
    assert len(np.unique(numbers.round(9))) == len(numbers)  # no two parts share a random stream


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_block_ignores_padding(norm: str) -> None:
    sequences = [draw(n, 6, seed=n) for n in (2, 5, 3)]
    block = TransformerBlock(6, 2, norm=norm)
    for fill in (0.0, math.nan, math.inf):
        padded, lengths = pad_batch(sequences, fill=fill)
        assert padded.shape == (3, 5, 6)
        output, _ = block(padded, mask=create_padding_mask(lengths, 5))
        for got, x in zip(output, sequences, strict=True):
            np.testing.assert_allclose(got[: len(x)], block(x)[0], atol=1e-13)


def test_zero_projections_leave_the_residual() -> None:
    x = draw(5, 6)
    pre, post = (TransformerBlock(6, 2, norm=norm) for norm in ("pre", "post"))
    for block in (pre, post):
        block.attention.W_O, block.feed_forward.W_2 = np.zeros((6, 6)), np.zeros((24, 6))
    np.testing.assert_array_equal(pre(x)[0], x)
    np.testing.assert_allclose(post(x)[0], LayerNorm(6)(LayerNorm(6)(x)), atol=1e-14)


def test_feed_forward_is_applied_per_token() -> None:
    network, x = FeedForward(6, 11, activation="gelu"), draw(2, 5, 6)
    for where in np.ndindex(2, 5):
        np.testing.assert_allclose(network(x)[where], network(x[where]), atol=1e-14)


def test_dropout_keeps_the_mean() -> None:
    weights = softmax(draw(50, 40))
    dropped = learn.dropout(weights, 0.25, seed=3)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-15)
    assert abs((~kept).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / weights.size)
    np.testing.assert_array_equal(dropped, learn.dropout(weights, 0.25, seed=3))
    np.testing.assert_array_equal(learn.dropout(weights, 0), weights)


def test_pad_batch_pads_at_the_end() -> None:
    sequences = [draw(n, 3, seed=n) for n in (2, 0, 5)]
    padded, lengths = pad_batch(sequences, fill=9)
    assert lengths.tolist() == [2, 0, 5]
    for row, one in zip(padded, sequences, strict=True):
        np.testing.assert_array_equal(row[: len(one)], one)
        assert (row[len(one) :] == 9).all()
    assert create_padding_mask(lengths, 5).sum() == 7
