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
        gradients = {
            "query": score_gradient @ key,
            "key": score_gradient.mT @ query,
            "value": weights.mT @ slope,
        }
        reached = (x * (f"gradient of {name} stopped" not in faults) for name, x in gradients.items())
        return *reached, None, None


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


NO_NAN = ("empty rows", "masked NaN or inf in value", "empty inputs")
NO_GRADIENTS = ("gradients", "gradients, causal", "gradients, empty rows", "gradients, masked NaN")
ODD_VALUES = ("live inf", "masked NaN or inf in value")
BROKEN_ON_TENSORS = {
    **{
        name: (build_function(name), {"unsupported": ODD_VALUES})
        for name in (
            "gradient without scale", "gradient not centred", "gradient stopped", "gradient NaN of empty rows",
            "gradient of masked NaN", "gradient of query stopped", "gradient of key stopped",
            "gradient of value stopped",
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
    assert [finding.kind for finding in report.findings] == [name], str(report)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_argument_that_is_detached_is_the_only_finding(name):
    def attend(query, key, value, mask=None):
        arrays = {"query": query, "key": key, "value": value}
        arrays[name] = arrays[name].detach()
        mask = torch.ones((), dtype=torch.bool) if mask is None else mask
        return Attention.apply(*arrays.values(), mask, ())

    report = check_conformance(attend, library="torch", unsupported=ODD_VALUES)
    assert [finding.message for finding in report.findings] == [f"No gradient reaches {name}."], str(report)


@pytest.mark.parametrize("changed", ["query", "value", "mask"])
def test_an_argument_that_is_overwritten_is_a_finding(changed):
    def attend(query, key, value, mask=None):
        output = build_function()(query, key, value, mask)
        argument = {"query": query, "value": value, "mask": mask}[changed]
        if argument is not None and not argument.requires_grad:
            argument[...] = True
        return output

    report = check_conformance(attend, library="torch", unsupported=ODD_VALUES)
    assert [finding.kind for finding in report.findings] == ["arguments changed"], str(report)


@pytest.mark.parametrize(
    "feature, is_large",
    [
        ("more than 256 keys", lambda query, key: key.shape[-2] >= 300),
        ("more than 256 queries", lambda query, key: query.shape[-2] >= 300),
        ("a head_dim above 64", lambda query, key: query.shape[-1] >= 128),
    ],
    ids=["300 keys", "300 queries", "head_dim 128"],
)
def test_the_quick_size_finds_what_breaks_at_ordinary_sizes(feature, is_large):
    def attend(query, key, value, mask=None):
        output = build_function()(query, key, value, mask)
        return output * 1.01 if is_large(query, key) else output

    report = check_conformance(attend, library="torch", unsupported=ODD_VALUES)
    (finding,) = report.findings
    assert f"differs from the definition for {feature}" in finding.message, str(report)


def test_correct_gradients_have_no_findings():
    report = check_conformance(build_function(), library="torch", unsupported=ODD_VALUES)
    assert report.ok, str(report)
    assert report["gradients"].verdict == report["gradients, masked NaN"].verdict == "yes"
