"""`tests.helpers.planted_bugs`: every planted bug changes what the model computes, and nothing else differs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers.planted_bugs import PLANTED_BUGS  # noqa: E402

# These faults are in a weight.
CHANGED_WEIGHTS = {"half precision overflows", "Llama with a NaN in a feed-forward weight"}


def test_there_are_enough_planted_bugs():
    assert len(PLANTED_BUGS) >= 30
    assert all(bug.kinds or bug.needs_reference for bug in PLANTED_BUGS.values())


@pytest.mark.parametrize("bug", PLANTED_BUGS.values(), ids=PLANTED_BUGS)
def test_a_planted_bug_changes_the_output_and_no_weight(bug):
    faulty, clean = bug.build(), bug.build_clean()
    if bug.name not in CHANGED_WEIGHTS:
        weights = clean.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in faulty.named_parameters())
    output, expected = bug.run(faulty).float(), bug.run(clean, clean=True).float()
    assert expected.isfinite().all()
    is_token = bug.inputs().get("attention_mask")
    if is_token is not None and output.shape[:2] == is_token.shape:  # padding rows may differ
        output, expected = output[is_token == 1], expected[is_token == 1]
    assert not torch.allclose(output, expected, atol=1e-3, rtol=0)
