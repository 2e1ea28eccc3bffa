"""`tests.helpers.planted_bugs`: every planted bug changes what the model computes, and nothing else differs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.planted_bugs import PLANTED_BUGS  # noqa: E402
from tests.helpers.port_bugs import DISTINCT_PORT_BUGS, PORT_BUGS  # noqa: E402

BUGS = PLANTED_BUGS | PORT_BUGS


def test_there_are_enough_planted_bugs():
    assert len(PLANTED_BUGS) == 58 and len(DISTINCT_PORT_BUGS) == 31
    assert len(BUGS) == len(PLANTED_BUGS) + len(PORT_BUGS)
    assert all(bug.kinds or bug.needs_reference or bug.harmless for bug in BUGS.values())
    assert all(bug.same_as in PORT_BUGS for bug in BUGS.values() if bug.same_as)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_changes_the_output_and_no_weight(bug):
    if bug.requires:
        pytest.importorskip(bug.requires)
    faulty, clean = bug.build(), bug.build_clean()
    if not bug.changes_weights:
        weights = clean.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in faulty.named_parameters())
    output, expected = bug.run(faulty).float(), bug.run(clean, clean=True).float()
    assert expected.isfinite().all()
    assert output.isfinite().all() or "NaN or inf" in (*bug.kinds, *bug.consequences)
    if bug.name in PORT_BUGS and "NaN or inf" in bug.kinds:
        assert not output.isfinite().all()
    is_token = bug.inputs().get("attention_mask")
    if is_token is not None and output.shape[:2] == is_token.shape:  # padding rows may differ
        output, expected = output[is_token == 1], expected[is_token == 1]
    assert torch.allclose(output, expected, atol=1e-3, rtol=0) == bug.harmless
