"""The conformance kit on faults it has no name for: one finding, no other cause, and where it shows."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from regard import reference  # noqa: E402
from regard.testing import check_conformance, generate_tests  # noqa: E402
from tests.helpers.nightly import keep_in_ci  # noqa: E402
from tests.helpers.torch_capabilities import NAN_CAPABILITIES, list_rejected  # noqa: E402

pytestmark = pytest.mark.slow  # no engine is tested here

LOWER = {"causal": "lower_right"}


def attend(query, key, value, mask=None, scale=None, causal=False, allow=None):
    """A correct function; `allow(q_idx, kv_idx)` masks more keys."""
    q_len, kv_len = query.shape[-2], key.shape[-2]
    allowed = np.ones((q_len, kv_len), bool) if mask is None else mask
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)
    if causal:
        allowed = allowed & (j <= i + kv_len - q_len)
    if allow is not None:
        allowed = allowed & allow(i, j)
    if key.shape[1] != query.shape[1]:
        key, value = (np.repeat(x, query.shape[1] // x.shape[1], axis=1) for x in (key, value))
    return reference.attention(query, key, value, mask=allowed, scale=scale).output


def with_scale(choose):
    return lambda query, key, value, mask=None: attend(query, key, value, mask, choose(query.shape[-1]))


def soft_cap(query, key, value, mask=None):
    weights = np.tanh(query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]) / 5) * 5
    weights = np.exp(weights) * (True if mask is None else mask)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ value


def flip_mask(query, key, value, mask=None):
    return attend(query, key, value, None if mask is None else mask[..., ::-1])


def add_epsilon(query, key, value, mask=None):
    return attend(query, key, value, mask) / (1 + 1e-6)


def three_ahead(query, key, value, mask=None, causal=False):
    kv_len, q_len = key.shape[-2], query.shape[-2]
    return attend(query, key, value, mask, allow=lambda i, j: (not causal) | (j <= i + kv_len - q_len + 3))


def window(query, key, value, mask=None, causal=False):
    kv_len, q_len = key.shape[-2], query.shape[-2]
    return attend(
        query, key, value, mask, causal=causal,
        allow=lambda i, j: (not causal) | (j > i + kv_len - q_len - 40),
    )  # fmt: skip


def other_corner_if_masked(query, key, value, mask=None, causal=False):
    if mask is None:
        return attend(query, key, value, causal=causal)
    return attend(query, key, value, mask, allow=lambda i, j: (not causal) | (j <= i))


def groups_without_causal(query, key, value, mask=None, causal=False):
    return attend(query, key, value, mask, causal=causal and query.shape[1] == key.shape[1])


def groups_with_other_mask(query, key, value, mask=None):
    if mask is not None and mask.ndim == 4 and mask.shape[1] > key.shape[1]:
        mask = np.repeat(mask[:, : key.shape[1]], query.shape[1] // key.shape[1], axis=1)
    return attend(query, key, value, mask)


# name: (function, fields of its convention, where it differs)
UNKNOWN = {
    "scale 1/√(head_dim + 1)": (with_scale(lambda n: (n + 1) ** -0.5), {}, " calls, by up to"),
    "scale 1/⁴√head_dim": (with_scale(lambda n: n**-0.25), {}, " calls, by up to"),
    "scale 1/8": (with_scale(lambda n: 0.125), {}, " calls, by up to"),
    "soft cap": (soft_cap, {}, " calls, by up to"),
    "values of the next key": (
        lambda q, k, v, mask=None: attend(q, k, np.roll(v, 1, -2), mask), {}, " calls, by up to"
    ),
    "epsilon": (add_epsilon, {}, " calls, by up to"),
    "float32": (
        lambda q, k, v, mask=None: attend(q, k, v, mask).astype(np.float32), {}, " calls, by up to"
    ),
    "NaN": (lambda q, k, v, mask=None: attend(q, k, v, mask) * np.nan, {}, "in every call"),
    "mask flipped": (flip_mask, {}, "calls with a mask"),
    "batch reversed": (lambda q, k, v, mask=None: attend(q, k, v, mask)[::-1], {}, "calls with a batch"),
    "causal three ahead": (three_ahead, LOWER, "causal masking"),
    "causal window of 40 keys": (window, LOWER, "for more than 32 keys and causal masking"),
    "other corner if masked": (
        other_corner_if_masked, LOWER, "for q_len ≠ kv_len and a mask and causal masking"
    ),
    "groups without causal": (
        groups_without_causal, {**LOWER, "grouped": True}, "for grouped heads and causal masking"
    ),
    "groups with another mask": (groups_with_other_mask, {"grouped": True}, "calls with grouped heads"),
}  # fmt: skip


SAMPLE = ("float32", "causal window of 40 keys", "groups without causal")


@pytest.mark.parametrize("name", keep_in_ci(UNKNOWN, *SAMPLE))
def test_a_fault_without_a_name_is_one_finding_and_no_other_fault_is_blamed(name):
    fn, described, where = UNKNOWN[name]
    report = check_conformance(fn, **described)
    assert [finding.kind for finding in report.findings] == ["unknown"], str(report)
    assert where in report.findings[0].message
    is_small = "The error is small" in report.findings[0].hint
    assert is_small == (name in ("epsilon", "float32"))


class WrongGradient(torch.autograd.Function):
    """Return the argument, and double its gradient."""

    @staticmethod
    def forward(ctx, array):
        return array.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(
    ("where", "is_wrong"),
    [
        ("grouped heads", lambda query, key, value, scale: query.shape[1] != key.shape[1]),
        ("value_dim ≠ head_dim", lambda query, key, value, scale: query.shape[-1] != value.shape[-1]),
        ("a scale", lambda query, key, value, scale: scale is not None),
        ("q_len ≠ kv_len", lambda query, key, value, scale: query.shape[-2] != key.shape[-2]),
        ("more than 64 keys", lambda query, key, value, scale: key.shape[-2] > 64),
        ("more than 64 queries", lambda query, key, value, scale: query.shape[-2] > 64),
        ("several heads", lambda query, key, value, scale: query.shape[1] > 1),
    ],
)
def test_a_gradient_that_is_wrong_in_some_calls_is_one_finding(where, is_wrong):
    def sdpa(query, key, value, mask=None, scale=None):
        if is_wrong(query, key, value, scale):
            key = WrongGradient.apply(key)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)

    report = check_conformance(
        sdpa, library="torch", grouped=True, unsupported=(*NAN_CAPABILITIES, *list_rejected())
    )
    (finding,) = report.findings
    assert f"for {where} and gradients, by up to" in finding.message


# -- Return values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [complex, object, int, bool])
def test_an_output_that_is_not_floating_point_is_one_finding(dtype):
    report = check_conformance(lambda q, k, v, mask=None: attend(q, k, v, mask).astype(dtype))
    (finding,) = report.findings
    message = f"For every call: returns an array of {np.dtype(dtype)}, expected floating-point numbers"
    assert finding.message == message


def test_a_pair_with_an_lse_passes():
    def with_lse(query, key, value, mask=None):
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
        scores = np.where(True if mask is None else mask, scores, -np.inf)
        return attend(query, key, value, mask), np.logaddexp.reduce(scores, axis=-1, keepdims=True)

    report = check_conformance(with_lse)
    assert report.ok, str(report)


def test_a_function_that_writes_each_output_into_the_same_memory_passes():
    buffers = {}

    def buffered(query, key, value, mask=None):
        output = attend(query, key, value, mask)
        buffer = buffers.setdefault(output.shape, np.empty_like(output))
        buffer[...] = output
        return buffer

    report = check_conformance(buffered)
    assert report.ok, str(report)


def test_options_of_a_module_are_read_from_its_forward():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, attention_mask=None, is_causal=False):
            mask = None if attention_mask is None else ~attention_mask
            return F.scaled_dot_product_attention(query, key, value, mask)

    report = check_conformance(Layer(), unsupported=(*NAN_CAPABILITIES, *list_rejected(), "causal and mask"))
    assert (report.convention.mask_argument, report.convention.causal_argument) == (
        "attention_mask",
        "is_causal",
    )
    assert {finding.kind for finding in report.findings} == {"mask inverted", "causal ignored"}


@pytest.mark.parametrize(
    ("capability", "is_unsupported"),
    [
        ("value_dim ≠ head_dim", lambda query, key, value, causal: query.shape[-1] != value.shape[-1]),
        ("q_len ≠ kv_len", lambda query, key, value, causal: query.shape[-2] != key.shape[-2]),
        (
            "causal, q_len ≠ kv_len",
            lambda query, key, value, causal: causal and query.shape[-2] != key.shape[-2],
        ),
        ("grouped heads", lambda query, key, value, causal: query.shape[1] != key.shape[1]),
        ("gradients", lambda query, key, value, causal: query.requires_grad),
    ],
)
def test_what_is_declared_unsupported_is_not_needed_by_other_rows(capability, is_unsupported):
    def sdpa(query, key, value, mask=None, is_causal=False):
        if is_unsupported(query, key, value, is_causal):
            raise NotImplementedError
        if is_causal:
            triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            mask = triangle if mask is None else triangle & mask
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=grouped)

    unsupported = (capability, *NAN_CAPABILITIES, *list_rejected(), "masked NaN or inf in key, causal")
    described = {"library": "torch", "grouped": True, "causal": "upper_left"}
    report = check_conformance(sdpa, unsupported=unsupported, **described)
    assert report.ok, str(report)
    assert report[capability].verdict == "raises"
    for test in generate_tests(unsupported=unsupported, causal_argument="is_causal", **described):
        test.check(sdpa)
