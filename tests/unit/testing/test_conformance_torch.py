"""The conformance kit on tensors: broken gradients and half precision."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from regard.testing import check_conformance  # noqa: E402
from regard.testing.conformance.known_faults import FAULTS  # noqa: E402

pytestmark = pytest.mark.slow


# -- Gradients and half precision --------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """A correct function with a handwritten gradient; a fault is a flag."""

    @staticmethod
    def forward(ctx, query, key, value, mask, faults):
        dtype = value.dtype
        if dtype.itemsize < 4:
            query, key, value = (x.float() for x in (query, key, value))
        visible = torch.ones_like(query[..., :1] @ key[..., :1].mT, dtype=torch.bool) & mask
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
        weights = torch.softmax(scores, -1).masked_fill(~visible, 0)
        anyone = visible.any(-2)[..., None]
        ctx.save_for_backward(query, key, torch.where(anyone, value, 0), weights, visible)
        ctx.faults = faults
        clean = torch.where(anyone | value.isfinite(), value, 0)
        output = weights @ torch.where(clean.isfinite(), clean, 0)
        nan = (visible[..., None] & ~clean.isfinite()[..., None, :, :]).any(-2)
        return torch.where(nan, torch.nan, output).to(dtype)

    @staticmethod
    def backward(ctx, slope):
        query, key, value, weights, visible = ctx.saved_tensors
        faults = ctx.faults
        if "gradient of masked NaN" not in faults:
            key = torch.where(visible.any(-2)[..., None], key, 0)
        of_weights = slope @ value.mT
        if "gradient not centred" not in faults:
            of_weights = of_weights - (of_weights * weights).sum(-1, keepdim=True)
        score_gradient = weights * of_weights
        if "gradient NaN of empty rows" in faults:
            score_gradient = score_gradient.masked_fill(~visible.any(-1, keepdim=True), torch.nan)
        if "gradient stopped" in faults:
            score_gradient = torch.zeros_like(score_gradient)
        if "gradient without scale" not in faults:
            score_gradient = score_gradient * query.shape[-1] ** -0.5
        return score_gradient @ key, score_gradient.mT @ query, weights.mT @ slope, None, None


def build_function(*faults):
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
        name: (build_function(name), {"unsupported": ODD_VALUES})
        for name in (
            "gradient without scale", "gradient not centred", "gradient stopped", "gradient NaN of empty rows",
            "gradient of masked NaN",
        )
    },
    "half precision": (in_half, {"unsupported": (*NO_NAN, *NO_GRADIENTS)}),
}  # fmt: skip


def test_every_gradient_fault_has_a_broken_function():
    assert {fault.name for fault in FAULTS if fault.name.startswith("gradient")} < BROKEN_ON_TENSORS.keys()


@pytest.mark.parametrize("name", BROKEN_ON_TENSORS)
def test_the_planted_fault_on_tensors_is_the_only_finding(name):
    fn, described = BROKEN_ON_TENSORS[name]
    report = check_conformance(fn, library="torch", **described)
    assert [finding.name for finding in report.findings] == [name], str(report)


def test_correct_gradients_have_no_findings():
    report = check_conformance(build_function(), library="torch", unsupported=ODD_VALUES)
    assert report.ok, str(report)
    assert report["gradients"].verdict == report["gradients, masked NaN"].verdict == "yes"
