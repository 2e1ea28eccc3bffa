"""The kit on tensors: broken gradients, and the real functions."""

from __future__ import annotations

import pytest
import torch

from regard.testing import check_conformance
from regard.testing.conformance.known_faults import FAULTS

pytestmark = pytest.mark.slow


# -- on tensors: gradients, and half precision --------------------------------------------------------------


class Attention(torch.autograd.Function):
    """A right function with a gradient written by hand; a fault is a flag."""

    @staticmethod
    def forward(ctx, query, key, value, mask, faults):
        dtype = value.dtype
        if dtype.itemsize < 4:
            query, key, value = (x.float() for x in (query, key, value))
        seen = torch.ones_like(query[..., :1] @ key[..., :1].mT, dtype=torch.bool) & mask
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1).masked_fill(~seen, 0)
        anyone = seen.any(-2)[..., None]
        ctx.save_for_backward(query, key, torch.where(anyone, value, 0), weights, seen)
        ctx.faults = faults
        clean = torch.where(anyone | value.isfinite(), value, 0)
        output = weights @ torch.where(clean.isfinite(), clean, 0)
        nan = (seen[..., None] & ~clean.isfinite()[..., None, :, :]).any(-2)
        return torch.where(nan, torch.nan, output).to(dtype)

    @staticmethod
    def backward(ctx, slope):
        query, key, value, weights, seen = ctx.saved_tensors
        faults = ctx.faults
        if "gradient of masked NaN" not in faults:
            key = torch.where(seen.any(-2)[..., None], key, 0)
        of_weights = slope @ value.mT
        if "gradient not centred" not in faults:
            of_weights = of_weights - (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * of_weights
        if "gradient NaN of empty rows" in faults:
            of_scores = of_scores.masked_fill(~seen.any(-1, keepdim=True), torch.nan)
        if "gradient stopped" in faults:
            of_scores = torch.zeros_like(of_scores)
        if "gradient without scale" not in faults:
            of_scores = of_scores * query.shape[-1] ** -0.5
        return of_scores @ key, of_scores.mT @ query, weights.mT @ slope, None, None


def by_hand(*faults):
    def broken(query, key, value, mask=None):
        mask = torch.ones((), dtype=torch.bool) if mask is None else mask
        return Attention.apply(query, key, value, mask, faults)

    return broken


def in_half(query, key, value, mask=None):
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (exponentials / exponentials.sum(-1, keepdim=True)) @ value


NO_NAN = ("empty rows", "masked NaN or inf in value", "no query, key or batch")
NO_GRADIENTS = ("gradients", "gradients, causal", "gradients, empty rows", "gradients, masked NaN")
ODD_VALUES = ("live inf", "masked NaN or inf in value")
BROKEN_ON_TENSORS = {
    **{
        name: (by_hand(name), {"unsupported": ODD_VALUES})
        for name in (
            "gradient without scale", "gradient not centred", "gradient stopped", "gradient NaN of empty rows",
            "gradient of masked NaN",
        )
    },
    "half precision": (in_half, {"unsupported": (*NO_NAN, *NO_GRADIENTS)}),
}  # fmt: skip


def test_every_known_fault_of_gradients_has_a_broken_function():
    assert {fault.name for fault in FAULTS if fault.name.startswith("gradient")} < BROKEN_ON_TENSORS.keys()


@pytest.mark.parametrize("name", BROKEN_ON_TENSORS)
def test_a_fault_on_tensors_is_named_and_alone(name):
    fn, described = BROKEN_ON_TENSORS[name]
    report = check_conformance(fn, library="torch", **described)
    assert [finding.name for finding in report.findings] == [name], str(report)


def test_the_right_gradients_have_no_findings():
    report = check_conformance(by_hand(), library="torch", unsupported=ODD_VALUES)
    assert report.ok, str(report)
    assert report["gradients"].verdict == report["gradients, masked NaN"].verdict == "yes"
