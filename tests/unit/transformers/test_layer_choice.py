"""`choose_layers`: other layers cost nothing, and `attentions[l]` stays layer l."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

from regard import ArgumentError, NotCapturedError  # noqa: E402
from regard.transformers import AttentionWeights, UnrecordedWeights, choose_layers, recorded_call  # noqa: E402
from tests.helpers.tiny_models import TINY  # noqa: E402


@pytest.fixture
def model():
    return TINY["Llama"].build("regard")


def list_kinds(model: object, **inputs: object) -> list[type]:
    with torch.no_grad():
        output = model(**(inputs or TINY["Llama"].inputs("none")), output_attentions=True)
    return [type(weights) for weights in output.attentions]


def test_layers_keep_their_numbers(model):
    with torch.no_grad():
        every = model(**TINY["Llama"].inputs("none"), output_attentions=True).attentions
    for layers in (1, -1, [1], "model.layers.1", "model.layers.1.self_attn", "*.1.*"):
        assert "model.layers.1.self_attn" in choose_layers(model, layers)
        with torch.no_grad():
            chosen = model(**TINY["Llama"].inputs("none"), output_attentions=True).attentions
        assert [type(weights) for weights in chosen] == [UnrecordedWeights, AttentionWeights]
        assert torch.equal(chosen[1].to_dense(), every[1].to_dense())
    assert list_kinds(model) == [UnrecordedWeights, AttentionWeights]
    choose_layers(model)
    assert list_kinds(model) == [AttentionWeights] * 2


def test_a_layer_that_was_not_chosen_computes_and_holds_nothing(model, monkeypatch):
    calls = []
    original = recorded_call.KeyStore.__init__
    monkeypatch.setattr(
        recorded_call.KeyStore,
        "__init__",
        lambda self, *args, **kwargs: (calls.append(1), original(self, *args, **kwargs))[1],
    )
    choose_layers(model, [])
    assert list_kinds(model) == [UnrecordedWeights] * 2
    assert calls == []
    choose_layers(model, 0)
    list_kinds(model)
    assert calls == [1]


@pytest.mark.parametrize(
    "read",
    [
        lambda a: a[0],
        lambda a: a.shape,
        lambda a: a.sum(-1),
        lambda a: torch.mean(a, dim=1),
        lambda a: torch.stack([a]),
        lambda a: np.asarray(a),
        lambda a: list(a),
        lambda a: a * 2,
        lambda a: len(a),
    ],
)
def test_reading_a_layer_that_was_not_chosen_raises(read):
    with pytest.raises(NotCapturedError, match=r"was not chosen.*choose_layers"):
        read(UnrecordedWeights())


def test_moving_a_layer_that_was_not_chosen_does_nothing():
    weights = UnrecordedWeights()
    assert weights.detach().cpu().to("cpu", non_blocking=True).float() is weights
    assert repr(weights) == "UnrecordedWeights()" and not hasattr(weights, "something")


def test_encoder_and_decoder_are_counted_apart():
    names = choose_layers(TINY["BART"].build("regard"), -1)
    assert {name.rsplit(".", 1)[0] for name in names if name.endswith("self_attn")} == {
        "model.encoder.layers.1",
        "model.decoder.layers.1",
    }
    assert "model.decoder.layers.1.encoder_attn" in names


@pytest.mark.parametrize("layers", [2, -3, "model.layer.*", [0, "nothing"]])
def test_layers_that_do_not_exist_are_refused(model, layers):
    with pytest.raises(ArgumentError, match=r"layer numbers, module names.*'model.layers.0"):
        choose_layers(model, layers)
