"""`regard.doctor`: each planted bug is found and named without a reference, and its clean twin has no errors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from regard import doctor  # noqa: E402
from tests.helpers.planted_bugs import PLANTED_BUGS  # noqa: E402
from tests.helpers.tiny_models import needs_t5_attention  # noqa: E402

FINDABLE = [bug for bug in PLANTED_BUGS.values() if not bug.needs_reference]
# As good as any other model, so only a comparison with the original can tell.
NEED_REFERENCE = {"rope base of another model", "rope pairs of another layout", "values projected like keys"}


def examine(bug, model, inputs):
    """Run doctor as a user would: models with a cache come with their decoding loop."""
    cached = model.decode if getattr(model, "is_decoder", False) else None
    return doctor(model, inputs, causal=bug.causal, cached=cached)


def test_all_but_three_of_the_planted_bugs_are_findable_without_a_reference():
    assert {bug.name for bug in PLANTED_BUGS.values() if bug.needs_reference} == NEED_REFERENCE
    assert len(PLANTED_BUGS) == 58 and len(FINDABLE) == 55


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=bug.name, marks=needs_t5_attention if " T5 " in bug.name else ())
        for bug in FINDABLE
    ],
)
def test_doctor_names_a_planted_bug(bug):
    findings = examine(bug, bug.build(), bug.inputs())
    named = [finding for finding in findings if finding.kind in bug.kinds]
    assert named, findings
    assert all(finding.evidence and finding.hint for finding in named)
    whole_model = named[0].layer == -1
    assert whole_model or min(finding.layer for finding in named) == bug.doctor_layer, findings
    # No other error distracts from the cause.
    others = {finding.kind for finding in findings.by_severity("error")} - {*bug.kinds, *bug.consequences}
    assert not others, findings


def list_clean_twins():
    """List one bug for each clean model and its inputs."""
    twins = {}
    for bug in PLANTED_BUGS.values():
        mask = bug.inputs().get("attention_mask")
        twins.setdefault((bug.clean_key or bug.name, None if mask is None else str(mask)), bug)
    return list(twins.values())


@pytest.mark.parametrize("bug", list_clean_twins(), ids=lambda bug: bug.name)
def test_the_clean_twin_has_no_errors(bug):
    findings = examine(bug, bug.build_clean(), (bug.clean_inputs or bug.inputs)())
    assert findings.by_severity("error") == [], findings
