"""nnsight: its traces run inside `regard.watch` and `regard.intervene`, at the speed and with the bits of the model."""

from __future__ import annotations

import pytest
import torch
from nnsight import NNsight

import regard
from regard.interventions import ablate
from tests.tools.models import FAMILIES, build, draw_tokens

TOKENS = draw_tokens(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_traces_are_watched_with_equal_outputs_and_lazy_patterns(family):
    model = build(family)
    with torch.no_grad(), regard.watch(model) as plain:
        expected = model(TOKENS).logits
    traced = NNsight(model)
    with torch.no_grad(), regard.watch(traced) as recording, traced.trace(TOKENS):
        output = traced.output.logits.save()
    assert torch.equal(output, expected)
    assert list(recording) == list(plain)
    for name in recording:
        (call,) = recording.calls(name)
        assert (call.weights, call.kernel) == (None, "torch: flash on CPU")
        assert torch.equal(call.query, plain.calls(name)[0].query)
        assert torch.equal(recording[name].to_dense(), plain[name].to_dense())


def test_edits_of_a_trace_show_in_the_recording():
    model = build("llama")
    traced = NNsight(model)
    with torch.no_grad(), regard.watch(traced) as recording, traced.trace(TOKENS):
        traced.model.layers[0].output[:] = 0
        logits = traced.output.logits.save()
    row = recording["model.layers.1.self_attn"][0, 0, 5, :6]
    torch.testing.assert_close(row, torch.full((6,), 1 / 6))
    with torch.no_grad():
        assert not torch.allclose(logits, model(TOKENS).logits)


def test_interventions_apply_inside_a_trace():
    model = build("llama")
    traced = NNsight(model)
    with torch.no_grad(), regard.intervene(model, ablate(1, heads=2)):
        expected = model(TOKENS).logits
    with torch.no_grad(), regard.intervene(traced, ablate(1, heads=2)), traced.trace(TOKENS):
        output = traced.output.logits.save()
    assert torch.equal(output, expected)
