"""diffusers as pipelines run it: guidance batches, masks of words, images that are not square, other processors."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.errors import NotCapturedError
from regard.interventions import ablate
from tests.third_party.checks import ATOL, SoftmaxOutputs, take_equal
from tests.third_party.models import MODELS, noise, use_attn_processor
from tests.third_party.packages import load

GUIDED = {
    "sample": noise(2, 4, 8, 24),
    "timestep": torch.tensor([1]),
    "encoder_hidden_states": noise(2, 7, 32),
}
MASK = {"encoder_attention_mask": torch.tensor([[1] * 5 + [0] * 2, [1] * 7])}


def build_unet():
    torch.manual_seed(0)
    return MODELS["diffusers.UNet2DConditionModel"].build()[0].eval()


def read_dense(model, inputs):
    with torch.no_grad(), use_attn_processor(model), SoftmaxOutputs() as softmaxes:
        model(**inputs)
    return softmaxes.weights


@pytest.mark.parametrize("inputs", [GUIDED, GUIDED | MASK], ids=["guidance", "masked words"])
@pytest.mark.parametrize("processor", ["fused", "AttnProcessor", "fused projections"])
def test_a_guidance_batch_has_the_weights_of_the_dense_processor(processor, inputs):
    model = build_unet()
    dense = read_dense(model, inputs)
    if processor == "AttnProcessor":
        model.set_attn_processor(load("diffusers.models.attention_processor").AttnProcessor())
    if processor == "fused projections":
        model.fuse_qkv_projections()
    with torch.no_grad():
        plain = model(**inputs).sample
        with regard.watch(model) as recording:
            assert torch.equal(model(**inputs).sample, plain)
    assert {recording[name].shape[:3] for name in recording} == {(2, 8, 48)}
    assert len(dense) == len(recording) == 8
    assert all(take_equal(recording[name].to_dense(), dense) for name in recording)
    if "encoder_attention_mask" in inputs:
        words = recording[next(name for name in recording if name.endswith("attn2"))].to_dense()
        assert words[0, ..., 5:].max() < ATOL < words[1, ..., 5:].min()


def test_slices_of_heads_are_read_one_by_one_and_refuse_edits_of_a_head():
    model = build_unet()
    with torch.no_grad(), regard.watch(model) as whole:
        model(**GUIDED)
    model.set_attention_slice(2)
    with torch.no_grad(), regard.watch(model) as recording:
        model(**GUIDED)
    for name in recording:
        slices = torch.cat([call.matrix.to_dense().flatten(0, 1) for call in recording.calls(name)])
        torch.testing.assert_close(slices, whole[name].to_dense().flatten(0, 1), rtol=0, atol=ATOL)
    with pytest.raises(NotCapturedError, match="in slices"), regard.intervene(model, ablate(1, heads=0)):
        model(**GUIDED)
