"""Parity with torch.nn.MultiheadAttention: its weights copied, every option, under the error rule."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import regard
from regard import causal
from regard.nn import MultiheadAttention, torch_masks
from regard.testing import assert_matches

HEADS, EMBED, BATCH, Q_LEN, KV_LEN = 4, 24, 3, 5, 7


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build_module(seed: int = 0, **options) -> nn.MultiheadAttention:
    """A module with random parameters: torch initialises biases with 0."""
    layer = nn.MultiheadAttention(EMBED, HEADS, **options)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=100 * seed + i) * EMBED**-0.5)
    return layer


def hold(actual, definition, naive, what):
    actual, definition, naive = (x.detach() for x in (actual, definition, naive))
    size = max(float(definition.abs().max()), 1.0)
    assert_matches(actual, definition, naive, dtype="float32", magnitude=size, what=what)


def compare(theirs, query, key, value, **masks):
    """Compare ours with theirs in float64: at most twice the error of theirs in float32."""
    ours = MultiheadAttention.from_torch(theirs)
    output, A = ours(query, key, value, need_matrix=True, **torch_masks(HEADS, **masks))
    flip = (lambda x: x) if theirs.batch_first or query.ndim == 2 else (lambda x: x.transpose(0, 1))

    def run(module, *tensors, **masks):
        found, weights = module(*map(flip, tensors), average_attn_weights=False, **masks)
        return flip(found), weights

    wide = {
        name: m.double() if torch.is_tensor(m) and m.is_floating_point() else m for name, m in masks.items()
    }
    right = run(copy.deepcopy(theirs).double(), query.double(), key.double(), value.double(), **wide)
    naive = run(theirs, query, key, value, **masks)
    hold(output, right[0], naive[0], "output")
    # A key of zeros is a sink here and a column in torch: the remaining share of the row.
    columns = A.shape[-1]
    assert right[1].shape[-1] == columns + bool(theirs.add_zero_attn)
    weights = A.to_dense()
    hold(weights, right[1][..., :columns], naive[1][..., :columns], "weights")
    if theirs.add_zero_attn:
        hold(1 - weights.sum(-1), right[1][..., -1], naive[1][..., -1], "share of the sink")
    averaged = theirs(*map(flip, (query, key, value)), **masks)[1]
    torch.testing.assert_close(weights.mean(-3), averaged[..., :columns])


OPTIONS = list(
    itertools.product([True, False], [False, True], [False, True], [{}, {"kdim": 7}, {"kdim": 7, "vdim": 10}])
)


@pytest.mark.parametrize(("bias", "bias_kv", "zero", "wide"), OPTIONS)
def test_every_constructor_option(bias, bias_kv, zero, wide):
    theirs = build_module(
        bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, batch_first=bias, dropout=0.3, **wide
    ).eval()
    query = draw(BATCH, Q_LEN, EMBED, seed=1)
    key, value = (
        draw(BATCH, KV_LEN, wide.get("kdim", EMBED), seed=2),
        draw(BATCH, KV_LEN, wide.get("vdim", EMBED), seed=3),
    )
    compare(theirs, query, key, value)
    compare(theirs, query[0], key[0], value[0])
    attn_mask = draw(Q_LEN, KV_LEN, seed=4) > 0.5
    attn_mask[:, 2] = False
    compare(theirs, query, key, value, attn_mask=attn_mask)


def booleans(*shape: int) -> torch.Tensor:
    """True = ignore; every row keeps a key."""
    layer = draw(*shape, seed=5) > 0.3
    layer[..., 1] = False
    return layer


MASKS = {
    "booleans": {"attn_mask": booleans(Q_LEN, KV_LEN)},
    "booleans by head": {"attn_mask": booleans(BATCH * HEADS, Q_LEN, KV_LEN)},
    "numbers": {"attn_mask": draw(Q_LEN, KV_LEN, seed=6)},
    "numbers by head": {"attn_mask": draw(BATCH * HEADS, Q_LEN, KV_LEN, seed=6)},
    "numbers that hide": {"attn_mask": torch.where(booleans(Q_LEN, KV_LEN), -torch.inf, 0.0)},
    "padding": {"key_padding_mask": booleans(BATCH, KV_LEN)},
    "padding in numbers": {"key_padding_mask": torch.where(booleans(BATCH, KV_LEN), -torch.inf, 0.0)},
    "both": {"attn_mask": booleans(Q_LEN, KV_LEN), "key_padding_mask": booleans(BATCH, KV_LEN)},
    "both, in numbers": {
        "attn_mask": draw(BATCH * HEADS, Q_LEN, KV_LEN, seed=6),
        "key_padding_mask": torch.where(booleans(BATCH, KV_LEN), -torch.inf, 0.0),
    },
}


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name, batch_first, extra):
    theirs = build_module(batch_first=batch_first, **extra).eval()
    query, key, value = draw(BATCH, Q_LEN, EMBED, seed=1), *draw(2, BATCH, KV_LEN, EMBED, seed=2)
    compare(theirs, query, key, value, **MASKS[name])


def test_masks_of_unbatched_input():
    theirs = build_module().eval()
    query, key, value = draw(Q_LEN, EMBED, seed=1), *draw(2, KV_LEN, EMBED, seed=2)
    compare(theirs, query, key, value, attn_mask=draw(HEADS, Q_LEN, KV_LEN))
    for attn_mask in (booleans(Q_LEN, KV_LEN), booleans(HEADS, Q_LEN, KV_LEN)):
        compare(theirs, query, key, value, attn_mask=attn_mask, key_padding_mask=booleans(KV_LEN))


def test_is_causal():
    theirs = build_module(batch_first=True).eval()
    ours, x = MultiheadAttention.from_torch(theirs), draw(BATCH, Q_LEN, EMBED)
    ignored = torch.ones(Q_LEN, Q_LEN, dtype=torch.bool).triu(1)
    right = copy.deepcopy(theirs).double()(
        *[x.double()] * 3, attn_mask=ignored, is_causal=True, need_weights=False
    )[0]
    naive = theirs(x, x, x, attn_mask=ignored, is_causal=True, need_weights=False)[0]
    output, A = ours(x, mask=causal(), need_matrix=True)
    hold(output, right, naive, "output")
    assert A.kernel == "torch: flash on CPU, causal"


def test_dropout_drops_the_same_weights():
    theirs = build_module(batch_first=True, dropout=0.4).train()
    ours, x = MultiheadAttention.from_torch(theirs), draw(BATCH, Q_LEN, EMBED)
    assert ours.training and ours.dropout == 0.4
    torch.manual_seed(7)
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    torch.manual_seed(7)
    output, A = ours(x, need_matrix=True)
    torch.testing.assert_close(output, expected)
    assert (weights == 0).any() and not (A.to_dense() == 0).any()  # torch returns the weights after dropout


def test_an_empty_row_is_zeros_here_and_nan_in_torch():
    theirs = build_module(batch_first=True).eval()
    x, ignored = draw(BATCH, Q_LEN, EMBED), torch.zeros(Q_LEN, Q_LEN, dtype=torch.bool)
    ignored[2] = True
    output, A = MultiheadAttention.from_torch(theirs)(
        x, need_matrix=True, **torch_masks(HEADS, attn_mask=ignored)
    )
    assert theirs(x, x, x, attn_mask=ignored)[0][:, 2].isnan().all()
    torch.testing.assert_close(output[:, 2], theirs.out_proj.bias.expand(BATCH, -1))
    assert (A[:, :, 2] == 0).all()


# -- Round trip -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bias", "bias_kv", "zero", "wide"), OPTIONS)
def test_round_trip(bias, bias_kv, zero, wide):
    theirs = build_module(bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, dropout=0.2, **wide)
    ours = MultiheadAttention.from_torch(theirs)
    back = ours.to_torch(batch_first=theirs.batch_first)
    state, again = theirs.state_dict(), back.state_dict()
    assert state.keys() == again.keys() and all(torch.equal(state[name], again[name]) for name in state)
    for name in ("dropout", "add_zero_attn", "batch_first", "kdim", "vdim", "num_heads", "training"):
        assert getattr(back, name) == getattr(theirs, name), name
    with torch.no_grad():
        ours.q_proj.weight.zero_()  # copies, not views
    assert theirs.state_dict()[next(iter(state))].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_training_mode_are_kept(dtype):
    ours = MultiheadAttention.from_torch(build_module(add_bias_kv=True).to(dtype).eval())
    assert {p.dtype for p in ours.parameters()} == {dtype} and not ours.training
    assert ours.to_torch().bias_k.dtype == dtype


UNSUPPORTED = {
    "grouped heads": {"num_kv_heads": 2},
    "a head_dim": {"head_dim": 8},
    "rope": {"rope": "half"},
    "norms of queries": {"qk_norm": nn.RMSNorm},
    "a custom scale": {"scale": 1.0},
    "a sink that is not fixed at 0": {"sink": "learned"},
    "a sink that is not fixed": {"sink": 1.0},
    "a bias for some": {"out_bias": False},
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_features_that_torch_lacks_are_rejected(feature):
    layer = MultiheadAttention(EMBED, HEADS, **UNSUPPORTED[feature])
    with pytest.raises(
        regard.ArgumentError, match=f"to_torch: received a layer with {feature}.*Keep the layer"
    ):
        layer.to_torch()


def test_other_modules_are_rejected():
    with pytest.raises(
        regard.ArgumentTypeError,
        match=r"from_torch: received a Linear; .*q_proj, k_proj, v_proj and out_proj",
    ):
        MultiheadAttention.from_torch(nn.Linear(3, 3))
