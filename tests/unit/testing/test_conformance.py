"""The conformance kit: calling conventions, layouts, findings and reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

import regard  # noqa: E402
from regard import reference  # noqa: E402
from regard.testing import CallingConvention, check_conformance, generate_tests  # noqa: E402
from regard.testing.cases import disable_fused_kernel  # noqa: E402
from regard.testing.conformance.attention_steps import DEFINITION, run_steps  # noqa: E402
from regard.testing.conformance.presets import PRESETS  # noqa: E402
from regard.testing.conformance.probes import build_output_gradient, compute_expected, generate_probes  # noqa: E402
from tests.helpers.torch_capabilities import NAN_CAPABILITIES, list_rejected  # noqa: E402

NAN = (*NAN_CAPABILITIES, *list_rejected())  # what torch's function is known not to do


def right(query, key, value, mask=None):
    """Return output and weights by the definition, (…, n, d)."""
    found = reference.attention(query, key, value, mask=True if mask is None else mask)
    return found.output, found.weights


# -- Definition and probes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ["upper_left", "lower_right"])
def test_the_default_steps_equal_the_reference(align):
    for probe in generate_probes("float64", align):
        call = probe.call
        by_steps = run_steps(call, DEFINITION)
        exact = reference.attention(
            call.query, call.key, call.value, mask=call.build_mask(), scale=call.scale
        )
        np.testing.assert_allclose(by_steps.output, exact.output, rtol=1e-12, atol=1e-14, err_msg=str(probe))
        np.testing.assert_allclose(
            by_steps.weights, exact.weights, rtol=1e-12, atol=1e-14, err_msg=str(probe)
        )


def test_gradients_equal_finite_differences():
    probes = [
        probe
        for probe in generate_probes("float64", "lower_right")
        if probe.gradients and np.isfinite(probe.call.key).all()
    ]
    probes = [probe for probe in probes if np.isfinite(probe.call.value).all()]
    assert len(probes) >= 4
    for probe in probes:
        call, slope = probe.call, build_output_gradient(probe)
        names = ("query", "key", "value")
        for name, found in zip(names, compute_expected(probe, DEFINITION).exact.gradients, strict=True):
            array = getattr(call, name)
            for index in list(np.ndindex(array.shape))[::7]:
                sides = []
                for step in (1e-5, -1e-5):
                    moved = array.copy()
                    moved[index] += step
                    arrays = {**{x: getattr(call, x) for x in names}, name: moved}
                    moved_call = reference.attention(**arrays, mask=call.build_mask(), scale=call.scale)
                    sides.append((moved_call.output * slope).sum())
                np.testing.assert_allclose(found[index], (sides[0] - sides[1]) / 2e-5, atol=1e-8)


def test_probes_have_the_properties_that_their_names_claim():
    calls = {str(probe): probe.call for probe in generate_probes("float32", "lower_right")}
    assert len(calls) == len(list(generate_probes("float32", "lower_right")))

    def scores(name):
        call = calls[name]
        return call.query @ call.key.swapaxes(-1, -2), call.query.shape[-1] ** -0.5

    unscaled, scale = scores("float16, scores above 65504: before the scale")
    assert unscaled.max() > 65504 > (unscaled * scale).max()
    unscaled, scale = scores("large scores: 3 × 33, every score below −90")
    assert (unscaled * scale).max() < -90
    unscaled, scale = scores("large scores: 1e4")
    assert np.abs(unscaled * scale).max() > 5e3
    masks = [call.mask for name, call in calls.items() if name.startswith(("boolean mask", "mask per head"))]
    assert all(mask.any(-1).all() and not mask.all() for mask in masks)
    assert not any(
        call.build_mask().any(-1).all() for name, call in calls.items() if name.startswith("empty rows")
    )


def test_probes_are_deterministic():
    first, again = (list(generate_probes("float32", "upper_left")) for _ in range(2))
    assert [str(probe) for probe in first] == [str(probe) for probe in again]
    assert all(
        np.array_equal(a.call.query, b.call.query, equal_nan=True) for a, b in zip(first, again, strict=True)
    )


# -- Layouts and conventions --------------------------------------------------------------------------------


def sequence_first(query, key, value, mask=None):
    moved = (x.transpose(1, 2, 0, 3) for x in (query, key, value))
    return right(*moved, mask)[0].transpose(2, 0, 1, 3)


def packed(query, key, value, num_heads, mask=None):
    def split(x):
        return x.reshape(*x.shape[:2], num_heads, x.shape[2] // num_heads).swapaxes(1, 2)

    output = right(split(query), split(key), split(value), mask)[0].swapaxes(1, 2)
    return output.reshape(*output.shape[:2], output.shape[2] * output.shape[3])


def columns_first(query, key, value, mask=None):
    return right(query.T, key.T, value.T, mask)[0].T


def dropping(query, key, value, attn_mask=None):
    return right(query, key, value, None if attn_mask is None else ~attn_mask)[0]


def adding(query, key, value, mask=None):
    return reference.attention(query, key, value, biases=() if mask is None else (mask,)).output


def flat(query, key, value, mask=None):
    return right(query, key, value, mask)[0]


STRANGE = {
    "sequence first": (sequence_first, {"layout": "n b h d"}, 44),
    "packed heads": (packed, {"layout": "b n (h d)"}, 44),
    "one head, columns first": (columns_first, {"layout": "d n"}, 28),
    "one head": (flat, {"layout": "n d"}, 28),
    "no batch": (flat, {"layout": "h n d"}, 30),
    "True drops": (dropping, {"mask": "drop"}, 44),
    "additive": (adding, {"mask": "additive"}, 44),
    "weights too": (right, {}, 44),
    "weights first": (lambda q, k, v, mask=None: right(q, k, v, mask)[::-1], {"returns": "weights, output"}, 44),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_a_correct_function_in_any_layout_passes(name):
    fn, described, least = STRANGE[name]
    report = check_conformance(fn, **described)
    assert report.ok, str(report)
    assert sum(row.num_calls for row in report.capabilities) >= least
    if "layout" in described:
        assert report.convention.layout == described["layout"]


def test_a_wrong_description_is_a_finding():
    assert [f.message for f in check_conformance(dropping).findings] == [
        "The mask is inverted: True drops a key."
    ]
    (finding,) = check_conformance(
        F.scaled_dot_product_attention, causal="lower_right", unsupported=NAN
    ).findings
    assert finding.message == "Causal is aligned upper left, expected lower right."
    if_intended = finding.evidence["if intended"]
    assert 'causal="upper_left"' in if_intended
    text = " ".join(str(finding).split())
    assert finding.hint in text and if_intended in text


def test_the_layout_is_found_by_default():
    def plain(Q, K, V):
        weights = np.exp(Q @ K.T / np.sqrt(Q.shape[-1]))
        return weights / weights.sum(axis=-1, keepdims=True) @ V

    report = check_conformance(plain, unsupported=("large scores",))
    assert (report.convention.layout, report.convention.mask_argument) == ("n d", None)
    assert report.ok, str(report)
    assert report["boolean mask"].reason == "no mask argument"


def test_options_are_read_from_the_signature():
    def mine(q, k, v, attn_mask=None, softmax_scale=None, causal=False, n_heads=1):
        return torch.zeros_like(q)

    convention = check_conformance(mine, layout="b n (h d)").convention
    assert convention == CallingConvention(
        "b n (h d)", library="torch", mask_argument="attn_mask", scale_argument="softmax_scale",
        causal_argument="causal", heads_argument="n_heads",
    )  # fmt: skip


def test_the_description_of_flash_attn_fits_its_signature():
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        mask = regard.causal("lower_right") if causal else None
        matrix = regard.attention(q, k, mask=mask, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1])
        return (matrix @ v).transpose(1, 2).to(torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float16)

    # The preset of flash-attn on the CPU; flash-attn itself is not run.
    report = check_conformance(flash_attn_func, "flash_attn", device="cpu", dtypes=("float16",))
    assert report.ok, str(report)
    assert {row.name for row in report.capabilities if row.verdict == "yes"} >= {
        "grouped heads", "causal, q_len ≠ kv_len", "scale 0 or negative", "float16",
    }  # fmt: skip


# -- Real functions -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_on_scaled_dot_product_attention():
    report = check_conformance(F.scaled_dot_product_attention, unsupported=list_rejected())
    assert [f.kind for f in report.findings] == ["masked value leaks", "masked key leaks", "live NaN lost"]
    assert {row.name for row in report.capabilities if row.verdict != "yes"} == set(NAN)


@pytest.mark.slow
def test_report_on_multihead_attention():
    report = check_conformance(torch.nn.MultiheadAttention)
    assert report.convention == PRESETS["multihead"]
    names = ["masked value leaks", "masked key leaks", "live NaN lost", "failed"]
    assert [f.kind for f in report.findings] == names
    assert report["value_dim ≠ head_dim"].verdict == "raises"
    assert report["boolean mask"].verdict == report["gradients, empty rows"].verdict == "yes"


# These two compile for each shape, so only some capabilities are tested; docs/capabilities.md has all.
KINDS = ("plain", "grouped heads", "causal, q_len ≠ kv_len", "mask per head or batch")


def first_tests(kinds, convention):
    first = {test.probe.capability: test for test in reversed(generate_tests(convention))}
    return [first[kind] for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("test", first_tests((*KINDS, "empty rows", "live NaN"), "flex"), ids=str)
def test_flex_attention_passes(test):
    test.check(flex_attention)


@pytest.mark.slow
@pytest.mark.parametrize("test", first_tests((*KINDS, "live NaN", "gradients"), "jax"), ids=str)
def test_jax_passes(test):
    jax = pytest.importorskip("jax")
    test.check(jax.nn.dot_product_attention)


@pytest.mark.parametrize("engine", ["numpy", "torch fused", "torch block loop"])
def test_the_engines_have_no_findings(engine):
    with disable_fused_kernel(engine):
        report = check_conformance(regard.attention, library=engine.split()[0])
    assert report.ok, str(report)
    supported = [row for row in report.capabilities if row.verdict == "yes"]
    # NumPy has no gradients, no half precision.
    assert len(supported) == len(report.capabilities) - (10 if engine == "numpy" else 0)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_full_size_includes_random_cases():
    report = check_conformance(regard.attention, size="full")
    assert report.ok, str(report)
    assert report["random cases"].num_calls > 20


# -- Findings -----------------------------------------------------------------------------------------------


def test_two_faults_are_two_findings():
    def broken(query, key, value, mask=None):
        scores = query @ key.swapaxes(-1, -2) / query.shape[-1]
        scores = np.where(True if mask is None else ~mask, scores, -np.inf)
        return soft(scores) @ value

    def soft(scores):
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1, total)

    found = check_conformance(broken, unsupported=("masked NaN or inf in value",)).findings
    assert {f.kind for f in found} == {"scale by head_dim", "mask inverted"}


def test_every_fault_of_a_first_attempt_is_named():
    def softmax(x):
        e = np.exp(x)
        return e / np.sum(e)

    def attn(Q, K, V, mask=None):
        scores = Q @ K.T / Q.shape[-1]
        if mask is not None:
            scores = np.where(mask, scores, -1e9)
        weights = softmax(scores)
        return weights, weights @ V

    found = check_conformance(attn).findings
    assert {f.kind for f in found} == {
        "scale by head_dim", "softmax over the matrix", "no shift", "pair swapped", "empty rows NaN",
        "masked value leaks",
    }  # fmt: skip


def test_a_fault_without_a_name_is_one_finding():
    (finding,) = check_conformance(
        lambda query, key, value: right(query, key, value)[0] + 1, layout="n d"
    ).findings
    assert finding.message.startswith("The result differs from the definition in every call")

    def long(query, key, value, mask=None):
        output, _ = right(query, key, value, mask)
        return output * 1.01 if key.shape[-2] > 64 else output

    (finding,) = check_conformance(long).findings
    assert "for more than 64 keys, by up to" in finding.message
    smallest = finding.evidence["smallest input"]
    assert (smallest["kv_len"], smallest["q_len"], smallest["head_dim"]) == (65, 1, 1)


def test_a_function_that_raises_is_one_finding():
    def refusing(query, key, value):
        raise ValueError("not today\nsecond line")

    (finding,) = check_conformance(refusing).findings
    assert finding.message == "For every call: raises ValueError: not today"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda q: 42, "For every call: returns a int, expected an array"),
        (lambda q: q[0], "returns (1, 2, 2), but layout 'b h n d' has 4 axes"),
    ],
)
def test_a_wrong_output_shape_is_one_finding(returned, message):
    report = check_conformance(lambda q, k, v: returned(q), layout="b h n d", unsupported=["empty inputs"])
    (finding,) = report.findings
    assert message in finding.message


def test_a_module_is_called_with_tensors():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, mask=None):
            return F.scaled_dot_product_attention(query, key, value, mask)

    report = check_conformance(Layer(), unsupported=NAN)
    assert report.ok, str(report)
    assert (report.function, report.convention.library) == ("Layer", "torch")


def test_a_large_masked_value_does_not_widen_the_tolerance():
    def trace(query, key, value, mask=None):
        output, _ = right(query, key, value, mask)
        if mask is None:
            return output
        return output + 1e-20 * ((~mask).astype(float) @ np.where(np.isfinite(value), value, 0))

    (finding,) = check_conformance(trace, unsupported=["empty rows"]).findings
    evidence = finding.evidence
    assert (evidence["capabilities"], evidence["calls"]) == (["masked NaN or inf in value"], 1)
    assert np.nanmax(evidence["value"]) == 1e30


def test_an_unsupported_capability_is_no_finding():
    def one_query(query, key, value, mask=None):
        if query.shape[-2] == 0 or key.shape[-2] == 0:
            raise ValueError("no")
        return right(query, key, value, mask)[0]

    (finding,) = check_conformance(one_query, layout="n d").findings
    assert finding.message == "For empty inputs: raises ValueError: no"
    report = check_conformance(one_query, layout="n d", unsupported=finding.evidence["capabilities"])
    assert report.ok
    assert report["empty inputs"].reason == "declared unsupported"


def test_the_smallest_input_is_small_and_shows_the_fault():
    (finding,) = check_conformance(dropping).findings
    arrays = [np.array(finding.evidence[name]) for name in ("query", "key", "value", "mask")]
    assert arrays[0].size == 1
    assert arrays[1].size <= 2
    np.testing.assert_array_equal(dropping(*arrays), finding.evidence["actual"])
    assert finding.evidence["actual"] != finding.evidence["expected"]


# -- The report ---------------------------------------------------------------------------------------------


def test_the_text_of_a_report():
    report = check_conformance(dropping)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "1. error: mask inverted. The mask is inverted: True drops a key." in text
    assert "smallest input  q_len 1, kv_len 1, head_dim 1, value_dim 1, dtype float64" in text
    with pytest.raises(AssertionError, match="The mask is inverted: True drops a key"):
        report.check()
    check_conformance(flat).check()


def test_the_json_of_a_report():
    record = json.loads(check_conformance(dropping).to_json())
    assert (record["ok"], record["function"], record["convention"]["layout"]) == (
        False,
        "dropping",
        "b h n d",
    )
    (finding,) = record["findings"]
    assert finding["name"] == "mask inverted"
    assert finding["input"]["mask"] in ([[False]], [[True]])
    assert (finding["input"]["kv_heads"], finding["severity"]) == (1, "error")
    assert 'mask="drop"' in finding["if_intended"]
    verdicts = {row["name"]: row["verdict"] for row in record["capabilities"]}
    assert verdicts["plain"] == "yes"
    assert verdicts["boolean mask"] == "no"


@pytest.mark.parametrize("detached", [0, 1, 2])
def test_the_json_of_a_report_has_all_the_evidence(detached):
    """If the outputs agree, the gradients are what differs."""

    def attend(*arrays):
        return F.scaled_dot_product_attention(
            *(x.detach() if i == detached else x for i, x in enumerate(arrays))
        )

    report = check_conformance(attend, "torch", mask=None)
    record = json.loads(report.to_json())["findings"][0]
    evidence = report.findings[0].evidence
    assert record["actual"] == evidence["actual"]
    name = f"gradient of {('query', 'key', 'value')[detached]}"
    assert record[f"actual_{name}".replace(" ", "_")] == evidence[f"actual {name}"]
    assert record[f"expected_{name}".replace(" ", "_")] == evidence[f"expected {name}"]
    assert not np.any(evidence[f"actual {name}"]) and np.any(evidence[f"expected {name}"])


def test_a_failed_test_of_the_full_size_names_its_cause():
    """Even if no call of the quick size fails."""
    quick, full = (generate_tests(mask=None, size=size) for size in ("quick", "full"))
    known = {test.probe.call.query.shape for test in quick}
    test = next(test for test in full if test.probe.call.query.shape not in known)

    def attend(query, key, value):
        output = regard.attention(query, key) @ value
        return output if query.shape in known else output + 1

    with pytest.raises(AssertionError, match="The result differs from the definition"):
        test.check(attend)


def test_a_function_that_is_wrong_once_is_nondeterministic():
    """If the second call of a probe is the wrong one, and the third agrees with the first."""
    calls, wrong = 0, 0

    def attend(query, key, value):
        nonlocal calls
        calls += 1
        return regard.attention(query, key) @ value + (calls == wrong)

    report = check_conformance(attend, mask=None)
    num_repeated = sum(report[name].num_calls for name in ("plain", "heads and batch", "q_len ≠ kv_len"))
    for call in (calls - num_repeated + 1, calls):
        calls, wrong = 0, call
        (finding,) = check_conformance(attend, mask=None).findings
        assert finding.kind == "nondeterministic" and finding.evidence["calls"] == 1


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"layout": "b x n d"}, "layout 'b x n d'; expected the axes b, h, n and d"),
        ({"layout": "b (h n"}, "layout 'b (h n'"),
        ({"layout": "b h"}, "n and d are required"),
        ({"mask": "true"}, "mask 'true'; expected mask as one of 'keep', 'drop', 'additive', None"),
        ({"causal": "left"}, "'upper_left', 'lower_right', None"),
        ({"lay": "b h n d"}, "received lay=; expected one of layout, mask"),
        ({"size": "huge"}, 'expected "quick" or "full"'),
        ({"convention": "tensorflow"}, "expected one of torch, multihead, flex"),
    ],
)
def test_an_invalid_description_is_rejected(described, message):
    with pytest.raises(regard.RegardError) as error:
        check_conformance(flat, **described)
    assert message in str(error.value)


def test_an_unknown_size_is_rejected_by_the_tests_too():
    with pytest.raises(regard.ArgumentError, match='expected "quick" or "full"'):
        generate_tests(size="ful")


def test_an_unknown_capability_is_rejected():
    with pytest.raises(
        regard.RegardError, match="received the capability 'masks'; expected one of plain; heads and"
    ):
        check_conformance(flat)["masks"]


def test_the_full_size_names_its_missing_dependency(monkeypatch):
    monkeypatch.setattr("regard.testing.conformance.probes.find_spec", lambda name: None)
    with pytest.raises(regard.RegardError, match="pip install ml_dtypes"):
        check_conformance(flat, size="full")


def test_a_non_callable_is_rejected():
    with pytest.raises(
        regard.RegardError, match=r"received an array of float64 .* expected an attention function"
    ):
        check_conformance(np.zeros((2, 2)))


# -- docs/capabilities.md -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_capabilities_page_matches_the_kit():
    page = (Path(__file__).parents[3] / "docs" / "capabilities.md").read_text()
    section = page.split("## Every capability")[1].split("## What was found")[0]
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line
    )
    column = header.index("torch scaled_dot_product_attention")
    report = check_conformance(F.scaled_dot_product_attention)
    verdicts = {row[0]: row[column].split()[0] for row in rows}
    assert verdicts == {row.name: row.verdict for row in report.capabilities}
