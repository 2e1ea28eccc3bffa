"""Doctor and compare on the planted faults: which they name, no wrong cause, and the page that lists them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from regard import doctor  # noqa: E402
from tests.helpers.planted_bugs import PLANTED_BUGS  # noqa: E402
from tests.helpers.planted_score import find_wrong_kinds, measure, run_doctor  # noqa: E402
from tests.helpers.port_bugs import DISTINCT_PORT_BUGS, PORT_BUGS  # noqa: E402
from tests.helpers.tiny_models import needs_t5_attention  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "planted-faults.md"
BUGS = PLANTED_BUGS | PORT_BUGS


@cache
def measured(name):
    """Run doctor and compare on a planted fault, once for all tests."""
    if BUGS[name].requires:
        pytest.importorskip(BUGS[name].requires)
    return measure(BUGS[name])


def mark(name):
    return pytest.param(name, marks=needs_t5_attention if re.search(r"\bT5\b", name) else ())


@pytest.mark.parametrize("name", [mark(name) for name in PORT_BUGS])
def test_doctor_names_a_fault_of_a_port_without_being_told_anything(name):
    score = measured(name)
    if score.bug.needs_reference or score.bug.harmless:
        assert score.wrong == (), score.texts[0]
    else:
        assert score.is_named and score.is_named_untold and not score.wrong, score.texts[0]


@pytest.mark.parametrize("name", [mark(name) for name in PORT_BUGS])
def test_compare_names_a_fault_of_a_port(name):
    score = measured(name)
    assert score.is_compared, score.texts[1]


@pytest.mark.slow
@pytest.mark.nightly  # test_doctor.py runs them with causal= and cached=
@pytest.mark.parametrize("name", [mark(name) for name in PLANTED_BUGS])
def test_no_planted_bug_gets_a_wrong_cause_if_doctor_is_told_nothing(name):
    findings = run_doctor(BUGS[name], is_told=False)
    assert not find_wrong_kinds(BUGS[name], findings), findings


@pytest.mark.parametrize(
    "name",
    [
        "QK norm forgotten",
        "attention factor of YaRN forgotten",
        "GPT-NeoX with queries, keys and values in blocks",
    ],
)
def test_the_clean_twin_of_a_port_has_no_errors(name):
    findings = run_doctor(BUGS[name], clean=True)
    assert findings.by_severity("error") == [], findings


@pytest.mark.parametrize("name", ["QK norm forgotten", *list(PORT_BUGS)[:3]])
def test_doctor_names_a_fault_of_a_port_in_float64(name):
    findings = doctor(BUGS[name].build().double(), BUGS[name].inputs())
    assert {finding.kind for finding in findings} & set(BUGS[name].kinds), findings
    assert not find_wrong_kinds(BUGS[name], findings), findings


def test_doctor_names_half_of_the_faults_that_it_was_not_written_for():
    names = [bug.name for bug in DISTINCT_PORT_BUGS if not bug.requires]
    assert sum(measured(name).is_named_untold for name in names) >= 16


def test_the_page_lists_every_fault_and_what_names_it():
    rows = re.findall(r"^\| (?:also: )?([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    listed = {name: (doctor, compare) for name, doctor, compare in rows if name not in ("fault", "---")}
    assert list(listed) == [name for name, bug in BUGS.items() if not bug.harmless], (
        "run scripts/docs planted-faults --write"
    )
    for name in PORT_BUGS.keys() & listed.keys():
        if BUGS[name].requires:
            continue
        score, (doctor, compare) = measured(name), listed[name]
        assert (doctor.split(" (")[0].split(", ")[0] in score.told) == score.is_named
        assert compare.startswith(score.difference) == score.is_compared
