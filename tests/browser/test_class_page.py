"""The page with the results of a class in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.learn.exercises import (
    CheckedSubmission,
    ClassReport,
    SkippedFile,
    Student,
    Submission,
    SubmissionResult,
)
from regard.learn.exercises.catalog import EXERCISES
from tests.helpers.pages import HOSTILE, SCREENS, faults

NAMES = [name for name in HOSTILE if name != "\ud800"]
STATES = [("right", 4), ("not yet", 2), ("error", 0), ("time", 0)]


@pytest.fixture
def report():
    """Students with hostile names and hints, and every state of each exercise."""
    rows = []
    for i, name in enumerate(NAMES):
        for n, exercise in enumerate(EXERCISES, start=1):
            parts = tuple(part.name for part in exercise.parts)
            status, right = STATES[(i + n) % len(STATES)]
            hints = () if status == "right" else (f"{name}\nsecond line {n}", "another fault")
            result = SubmissionResult(status, hints, "", parts[:right], len(parts), 0.5)
            rows.append(CheckedSubmission(Submission(name, n, Path(f"{n}.py"), late=n == 2), result))
    roster = (*(Student(name) for name in NAMES[1:]), Student("Absent"))
    skipped = (SkippedFile("Absent two", Path(NAMES[0].replace("/", "")), "neither a script nor a notebook"),)
    return ClassReport(tuple(rows), roster, skipped)


@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_each_result_opens_its_hints_below_the_student(scheme, width, show, report):
    tab = show(report.page(), color_scheme=scheme, viewport={"width": width, "height": 844})
    tab.locator("#app[data-ready]").wait_for()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    rows = tab.locator("#results tbody tr")
    assert rows.count() == len(report.students)
    for i, name in ((0, report.students[0]), (len(NAMES), report.students[-1])):
        points = f"{report.count_points(name):g}"
        assert rows.nth(i).locator("td").last.inner_text() == points
    assert tab.locator(".cell.right").count() == sum(row.result.correct for row in report.rows)
    for cell in (tab.locator(".cell.error").first, tab.locator(".cell.time").last):
        cell.focus()
        tab.keyboard.press("Enter")
        box, below = cell.bounding_box(), tab.locator("#details").bounding_box()
        assert below["y"] > box["y"] and below["y"] + below["height"] <= 844 + 1
        assert below["x"] >= 0 and below["x"] + below["width"] <= width
        assert (
            tab.locator("#details li").count() == 2 and "second line" in tab.locator("#details").inner_text()
        )
        assert (
            cell.get_attribute("aria-expanded") == "true" and tab.locator("[aria-expanded=true]").count() == 1
        )
    assert not faults(tab)
    tab.keyboard.press("Enter")
    assert tab.locator("#details").count() == 0
    text = tab.locator("#app").inner_text()
    assert "No file\n" in text and "Not in the roster\n" in text and "Files that were not checked\n" in text
