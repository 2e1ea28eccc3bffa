"""Recognise masks and biases of q_len × kv_len by name; store as arrays those that intervals cannot express."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import causal, padding, relative_bias, sliding_window  # noqa: E402
from regard.capture import compact_mask  # noqa: E402
from regard.capture.compact_mask import recognise_mask  # noqa: E402
from regard.engines.torch import TorchNamespace  # noqa: E402
from regard.lens.recording import count_mask_bytes  # noqa: E402
from regard.masks import document, first, prefix  # noqa: E402


@pytest.fixture(params=[1 << 22, 20], ids=["whole", "in chunks"], autouse=True)
def chunk(request, monkeypatch):
    monkeypatch.setattr(compact_mask, "CHUNK", request.param)


NAMED = [
    (causal(), (7, 7)),
    (causal(align="lower_right"), (3, 7)),
    (causal(align="upper_left"), (3, 7)),
    (causal(align="upper_left"), (7, 3)),
    (sliding_window(3), (11, 11)),
    (sliding_window(left=2, right=1), (11, 11)),
    (sliding_window(right=2), (7, 7)),
    (sliding_window(left=2), (7, 7)),
    (sliding_window(3, align="lower_right"), (5, 11)),
    (padding([2, 5, 3]), (3, 1, 7, 5)),
    (padding([2, 5, 3], side="left"), (3, 1, 7, 5)),
    (padding([2, 5]) & padding([4, 3], side="left"), (2, 1, 7, 5)),
    (causal() & padding([2, 7]), (2, 1, 7, 7)),
    (causal() & padding([2, 7], side="left"), (2, 1, 7, 7)),
    (sliding_window(3) & padding([5, 11], side="left"), (2, 1, 11, 11)),
    (sliding_window(3) & padding([5, 11]), (2, 1, 11, 11)),
]


def recognise(mask: torch.Tensor, **options):
    return recognise_mask(
        mask, is_causal=False, q_len=mask.shape[-2], kv_len=mask.shape[-1], lead=(2, 4), **options
    )


@pytest.mark.parametrize(("mask", "shape"), NAMED, ids=repr)
@pytest.mark.parametrize("masked", [None, -torch.inf, torch.finfo(torch.float32).min])
def test_named_masks_are_recognised(mask, shape, masked):
    allowed = torch.tensor(mask.to_dense(*shape))
    given = allowed if masked is None else torch.where(allowed, 0.0, masked)
    compact = recognise(given)
    found = compact.mask(*shape[-2:])
    assert compact.nbytes == 0
    live = allowed.any(-1)
    if masked in (None, -torch.inf) or live.all():
        assert np.array_equal(found.to_dense(*shape), allowed)
        assert found == mask
    else:  # a row that consists of the lowest number has equal weights
        assert np.array_equal(found.to_dense(*shape), allowed | ~live[..., None])


@pytest.mark.parametrize(
    "mask",
    [document([0, 0, 1, 1, 1, 2]) & causal(), prefix(3), document([0, 0, 1, 1, 1, 2]), first(2)],
    ids=repr,
)
def test_other_intervals_are_stored_as_intervals(mask):
    allowed = torch.tensor(mask.to_dense(6, 6))
    compact = recognise(allowed)
    found = compact.mask(6, 6)
    assert compact.nbytes == 0 and np.array_equal(found.to_dense(6, 6), allowed)
    for rows in (range(0, 2), range(2, 6)):
        for columns in (range(0, 3), range(3, 6)):
            block = allowed[rows.start : rows.stop, columns.start : columns.stop]
            kind = found.classify(rows, columns, shape=(6, 6))
            assert kind in ("partial", "full" if block.all() else "empty" if not block.any() else "partial")


def test_padding_with_holes_is_stored_as_keys():
    real = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
    allowed = torch.tensor(causal().to_dense(6, 6)) & real[:, None, None, :]
    compact = recognise(allowed)
    assert compact.nbytes == 0 and compact.visible_keys is not None
    assert np.array_equal(compact.mask(6, 6).to_dense(2, 1, 6, 6), allowed)


def test_a_window_for_each_head_is_stored_as_intervals():
    allowed = torch.tensor(sliding_window(np.array([2, 4])).to_dense(2, 9, 9))
    compact = recognise_mask(allowed, is_causal=False, q_len=9, kv_len=9, lead=(2,))
    assert compact.nbytes == 0 and np.array_equal(compact.mask(9, 9).to_dense(2, 9, 9), allowed)


def test_other_masks_and_biases_are_stored_and_counted():
    allowed = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)) > 0.4
    compact = recognise(allowed)
    assert compact.nbytes == 36 and torch.equal(compact.dense_mask, allowed)
    added = torch.randn(4, 6, 6)
    assert recognise(added).nbytes == added.nbytes
    assert recognise(added).bias.array.data_ptr() == added.data_ptr()


def test_a_relative_bias_is_recognised_by_its_table():
    table = torch.randn(8, 4)
    bias = relative_bias(table, bidirectional=False, max_distance=12, align="lower_right")
    frame = regard.frame.Frame((4,), 7, 7)
    added = bias.additive_bias(
        frame, np.arange(7), np.arange(7), TorchNamespace(torch.device("cpu")), torch.float32
    )
    lowest = torch.finfo(torch.float32).min
    masked = torch.where(torch.tensor(causal().to_dense(7, 7)), added, lowest)[None]
    other = relative_bias(table * 2, bidirectional=False, max_distance=12, align="lower_right")
    compact = recognise(masked, biases=[other, bias])
    assert compact.bias is bias and compact.mask(7, 7) == causal() and compact.nbytes == 0
    assert recognise(masked, biases=[other]).nbytes == masked.nbytes


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x, mask):
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("kind", ["dense", "bias", "holes", "empty rows", "lowest rows", "learnt"])
def test_weights_are_those_of_the_mask_that_was_passed(kind):
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(2, 6, 16)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    if kind in ("bias", "learnt"):
        mask = torch.randn(1, 4, 6, 6, requires_grad=kind == "learnt")
    if kind == "holes":
        mask = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1]]).bool()[:, None, None, :]
    if kind in ("empty rows", "lowest rows"):
        mask = torch.tensor((causal() & padding([3, 6], side="left")).to_dense(2, 1, 6, 6))
    if kind == "lowest rows":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    plain = model(x, mask)
    with regard.watch(model) as recording:
        assert torch.equal(model(x, mask), plain)
    query, key, value = (
        part.unflatten(-1, (4, -1)).transpose(1, 2) for part in model.project(x).chunk(3, -1)
    )
    added = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask
    weights = (query @ key.mT / 2 + added).softmax(-1).nan_to_num()
    A = recording[""]
    torch.testing.assert_close(A.to_dense(), weights.detach())
    torch.testing.assert_close(A @ value.detach(), plain.detach())
    lowest = kind == "lowest rows"  # its lse counts from 0 in a fully masked row, not from the lowest number
    scores = torch.where(added > -1e38, query @ key.mT / 2 + added, 0.0 if lowest else -torch.inf)
    dead = ~(added > -1e38).any(-1, keepdim=True)
    scores = torch.where((added > -1e38) | (dead & lowest), scores, -torch.inf)
    torch.testing.assert_close(A.lse, scores.logsumexp(-1).detach())
    torch.testing.assert_close(A.entropy().float(), torch.special.entr(weights).sum(-1).detach())
    (call,) = recording.calls("")
    held = [tensor.nbytes for tensor in (call.query, call.key, call.lse) if tensor is not None]
    assert recording.nbytes == sum(held) + count_mask_bytes(recording._joined_calls)
    assert (count_mask_bytes(recording._joined_calls) > 0) is (kind in ("dense", "bias", "learnt"))


def test_a_mask_that_layers_share_is_recognised_and_counted_once(monkeypatch):
    times = []
    monkeypatch.setattr(
        "regard.capture.record.recognise_mask",
        lambda *args, **kwargs: (times.append(1), recognise_mask(*args, **kwargs))[1],
    )
    layers = nn.ModuleList([Masked() for _ in range(3)])
    mask = torch.rand(2, 1, 6, 6) > 0.3
    with regard.watch(layers) as recording:
        for layer in layers:
            layer(torch.randn(2, 6, 16), mask)
    assert len(times) == 1 and len(recording) == 3
    assert count_mask_bytes(recording._joined_calls) == mask.nbytes


def test_repeated_keys_are_stored_once():
    class Grouped(Masked):
        def forward(self, x, mask):
            query, key, value = (
                part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
            )
            key, value = (part[:, :2].repeat_interleave(2, 1) for part in (key, value))
            return F.scaled_dot_product_attention(query, key, value)

    model, x = Grouped(), torch.randn(2, 6, 16)
    with torch.no_grad(), regard.watch(model) as recording:
        model(x, None)
    assert recording.calls("")[0].key.shape == (2, 2, 6, 4) and recording[""].shape == (2, 4, 6, 6)


def test_heads_that_are_equal_at_the_ends_only_are_all_stored():
    class Nearly(Masked):
        def forward(self, x, mask):
            query, key, value = (
                part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
            )
            key = key.clone()
            key[:, :, [0, -1]] = key[:, :1, [0, -1]]
            return F.scaled_dot_product_attention(query, key.clone(), value)

    model, x = Nearly(), torch.randn(2, 6, 16)
    with torch.no_grad(), regard.watch(model) as recording:
        model(x, None)
    assert recording.calls("")[0].key.shape == (2, 4, 6, 4)


def test_steps_with_a_stored_mask_are_not_joined():
    class Attention(nn.Module):
        def forward(self, query, key, mask):
            return F.scaled_dot_product_attention(query, key, key, attn_mask=mask)

    layer, tokens = Attention(), torch.randn(1, 2, 7, 8)
    irregular = torch.tensor([[1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]] * 3).bool()
    with regard.watch(layer) as recording:
        layer(tokens[:, :, :6], tokens[:, :, :6], irregular)
        layer(tokens[:, :, 6:], tokens, torch.ones(1, 7, dtype=torch.bool))
    with pytest.raises(regard.ArgumentError, match="2 calls whose masks are not intervals"):
        recording[""]
    assert [call.shape[-2:] for call in recording.calls("")] == [(6, 6), (1, 7)]


def test_an_overwritten_mask_is_recognised_again():
    layers = nn.ModuleList([Masked(), Masked()])
    mask = torch.tensor(causal().to_dense(6, 6))
    with torch.no_grad(), regard.watch(layers) as recording:
        layers[0](torch.randn(2, 6, 16), mask)
        mask[:, :2] = True
        layers[1](torch.randn(2, 6, 16), mask)
    assert recording["0"].mask == causal()
    assert np.array_equal(recording["1"].mask.to_dense(6, 6), prefix(2).to_dense(6, 6))
