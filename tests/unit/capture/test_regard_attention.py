"""Layers that call `regard.attention`, however it was imported, are recorded as they computed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import regard  # noqa: E402
from regard import attention  # noqa: E402
from regard.capture.compact_mask import recognise_tiles  # noqa: E402
from tests.helpers import imported_attention  # noqa: E402

HEADS, LENGTH, DIM = 2, 7, 4


class Layer(nn.Module):
    """Self-attention of `heads` heads by one of the names of `regard.attention`; without heads, (length, dim)."""

    def __init__(self, by="attribute", heads=HEADS, **options):
        super().__init__()
        self.heads, self.options, self.by = heads, options, by
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def split(self, x):
        return x if self.heads is None else x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def forward(self, x):
        q, v = self.split(self.q(x)), self.split(self.v(x))
        calls = {
            "attribute": lambda: regard.attention(q, q, **self.options),
            "name": lambda: attention(q, q, **self.options),
            "keywords": lambda: regard.attention(query=q, key=q, **self.options),
            "other file": lambda: imported_attention.attend_with_regard(q, q, **self.options),
        }
        return calls[self.by]() @ v


def compute_weights(layer, x, mask=None, cap=None, sink=None):
    """Compute the weights of a layer from their definition, in float64."""
    q = layer.split(layer.q(x)).detach().double()
    scores = q @ q.mT / q.shape[-1] ** 0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~torch.from_numpy(mask.to_dense(*scores.shape)), -torch.inf)
    sinks = torch.zeros(*scores.shape[:-1], 0)
    if sink is not None:
        sinks = torch.as_tensor(sink).double()[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., : scores.shape[-1]].nan_to_num(0.0)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, LENGTH, 8)


def watched(layer, x, **options):
    with torch.no_grad(), regard.watch(layer, **options) as recording:
        output = layer(x)
    return recording, output


@pytest.mark.parametrize("by", ["attribute", "name", "keywords", "other file"])
def test_the_function_is_found_under_each_of_its_names(x, by):
    layer = Layer(by, mask=regard.causal())
    recording, output = watched(layer, x)
    assert torch.equal(output, layer(x))
    assert len(recording.calls("")) == 1
    torch.testing.assert_close(
        recording[""].to_dense().double(), compute_weights(layer, x, regard.causal()), atol=1e-6, rtol=1e-5
    )


class EveryOtherHead(regard.Mask):
    """Causal in odd heads, and everything in even ones; it checks nothing."""

    def allows(self, frame, q_idx, kv_idx, xp):
        heads = xp.asarray(frame.selected % frame.leading_shape[-1])
        return (heads[:, None, None] % 2 == 0) | (
            xp.asarray(kv_idx)[None, None, :] <= xp.asarray(q_idx)[None, :, None]
        )


MASKS = {
    "window": regard.sliding_window(3),
    "padding": regard.causal() & regard.padding([7, 4, 1]),
    "left padding": regard.causal() & regard.padding([7, 4, 1], side="left"),
    "documents": regard.masks.document([0, 0, 1, 1, 1, 2, 2]),
    "sink and window": regard.causal() & (regard.sliding_window(2) | regard.masks.first(1)),
    "windows of the heads": regard.sliding_window(np.array([1, 4])),
    "array": regard.masks.dense(np.random.default_rng(0).random((3, 1, LENGTH, LENGTH)) < 0.5),
    "array of the heads": regard.masks.dense(np.random.default_rng(0).random((HEADS, LENGTH, LENGTH)) < 0.5),
    "keys": regard.masks.dense(np.arange(LENGTH)[None] % 3 > 0),
    "nothing": ~regard.masks.first(LENGTH),
    "by head": EveryOtherHead(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recorded_as_they_are(x, name):
    layer = Layer(mask=MASKS[name])
    recording, _ = watched(layer, x)
    expected = compute_weights(layer, x, MASKS[name])
    torch.testing.assert_close(recording[""].to_dense().double(), expected, atol=1e-6, rtol=1e-5)
    assert len(recording.heads()) == HEADS


@pytest.mark.parametrize("tile", [1, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_intervals_do_not_depend_on_the_tiles(monkeypatch, name, tile):
    shape = (3, HEADS, LENGTH, LENGTH)
    monkeypatch.setattr("regard.capture.compact_mask.TILE", tile)
    compact = recognise_tiles(MASKS[name], shape[:-2], LENGTH, LENGTH)
    mask, expected = compact.mask(LENGTH, LENGTH), MASKS[name].to_dense(*shape)
    np.testing.assert_array_equal(np.ones(shape, bool) if mask is None else mask.to_dense(*shape), expected)
    hull = np.where(expected, np.arange(1, LENGTH + 1), 0).max(-1)
    np.testing.assert_array_equal(np.broadcast_to(compact.stop, shape[:-1]), hull)


@pytest.mark.parametrize("score_mod", [regard.softcap(0.5), [regard.softcap(0.5)]], ids=["one", "list"])
@pytest.mark.parametrize(
    "sink",
    [
        None, 1.0, [0.5, 2.0], torch.tensor([0.5, 2.0]), [[0.5, 2.0]], [[0.5, 2.0], [-1.0, 0.0], [3.0, 1.0]],
        [[0.5], [2.0], [-1.0]],
    ],
)  # fmt: skip
def test_score_modifications_and_sinks_in_every_form(x, score_mod, sink):
    layer = Layer(score_mod=score_mod, sink=sink)
    recording, _ = watched(layer, x)
    expected = compute_weights(layer, x, cap=0.5, sink=sink)
    torch.testing.assert_close(recording[""].to_dense().double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.sliding_window(2), MASKS["sink and window"]])
def test_a_matrix_without_heads(x, mask):
    layer = Layer(heads=None, mask=mask)
    recording, _ = watched(layer, x[0])
    expected = compute_weights(layer, x[0], mask)
    torch.testing.assert_close(recording[""].to_dense().double(), expected, atol=1e-6, rtol=1e-5)
    assert len(recording.heads()) == 1


def test_masks_take_no_memory_of_the_size_of_the_matrix():
    length = 8192
    for mask in (
        regard.sliding_window(64),
        regard.causal() & (regard.sliding_window(64) | regard.masks.first(4)),
    ):
        layer, x = Layer(mask=mask).eval(), torch.randn(1, length, 8)
        tracemalloc.start()
        recording, _ = watched(layer, x)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < length**2 / 4  # bytes; the mask alone would take length²
        assert recording[""].mask == mask and recording.nbytes < 100 * length


def test_layers_of_regard_nn_are_recorded_once(x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.layer = Layer(), regard.nn.MultiheadAttention(8, HEADS)

        def forward(self, x):
            return self.layer(self.own(x).transpose(1, 2).flatten(2), mask=regard.causal())

    recording, _ = watched(Both(), x)
    assert {name: len(recording.calls(name)) for name in recording} == {"own": 1, "layer": 1}


def test_numpy_arrays_in_a_forward_pass_are_left_alone(x):
    class Analysed(nn.Module):
        def forward(self, x):
            self.entropy = regard.attention(x[0].numpy(), x[0].numpy()).entropy()
            return F.scaled_dot_product_attention(x, x, x)

    recording, _ = watched(Analysed(), x)
    assert len(recording.calls("")) == 1


def test_functions_of_calls_may_compute_attention(x):
    """What they compute is not recorded as a call of the layer that is running."""

    def measure(call):
        product = F.scaled_dot_product_attention(call.query, call.key, call.key)
        return {
            "entropy": regard.attention(call.query, call.key).entropy(),
            "output": product,
            "softmax": (call.query @ call.key.mT).softmax(-1) @ call.key,
        }

    layer = Layer()
    recording, _ = watched(layer, x, measures=measure)
    (call,) = recording.calls("")
    weights = compute_weights(layer, x)
    expected = -(weights * weights.log()).sum(-1)
    torch.testing.assert_close(call.measures["entropy"].double(), expected, atol=1e-5, rtol=1e-5)


def test_the_value_is_not_known(x):
    """The layer multiplies the matrix itself, so its key must not count as its value."""
    recording, _ = watched(Layer(), x, values=True)
    assert recording.calls("")[0].value is None
    with pytest.raises(regard.ArgumentError, match="its value was not recorded"):
        recording.value_norms("")


def test_the_matrix_is_edited_and_the_output_cannot_be(x):
    layer = Layer(mask=regard.causal())
    edit = regard.interventions.knockout(heads=1, queries=[5], keys=[0, 2])
    with torch.no_grad(), regard.intervene(layer, edit) as run:
        edited = layer(x)
    flags = np.ones((HEADS, LENGTH, LENGTH), bool)
    flags[1, 5, [0, 2]] = False
    weights = compute_weights(layer, x, regard.causal() & regard.masks.dense(flags))
    expected = weights @ layer.split(layer.v(x)).detach().double()
    torch.testing.assert_close(edited.double(), expected, atol=1e-6, rtol=1e-5)
    assert run.applied[0]["path"] == "matrix replaced"
    for refused in (
        regard.interventions.ablate(heads=0),
        regard.interventions.ablate(heads=0, baseline="mean"),
    ):
        with (
            pytest.raises(regard.NotCapturedError, match="multiplies the matrix"),
            torch.no_grad(),
            regard.intervene(layer, refused),
        ):
            layer(x)
