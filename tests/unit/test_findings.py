"""The printer of findings: short evidence shares a line, arrays and sentences have a line each."""

from __future__ import annotations

import math

from regard.findings import Finding


def print_evidence(**evidence):
    first, *lines = str(Finding("kind", "note", "A message.", "module", evidence=evidence)).splitlines()
    assert first == "note: kind. A message."
    return dict(line.split(maxsplit=1) for line in lines)


def test_short_evidence_shares_a_line_and_long_evidence_does_not():
    sentence = "It is longer than the other entries, so it has a line."
    lines = print_evidence(ratio=0.12345, rows=3, word="a word", sentence=sentence, sizes={"keys": 2})
    assert lines == {
        "where": "module",
        "evidence": "ratio 0.123, rows 3, word a word",
        "sentence": sentence,
        "sizes": "keys 2",
    }


def test_small_arrays_are_printed_with_four_digits_and_without_leading_axes_of_one():
    lines = print_evidence(
        query=[[[[1.0, -0.0], [1 / 3, math.nan]]]],
        mask=[[True, False]],
        empty=[[]],
        names=["one", "two, three"],
    )
    assert lines == {
        "where": "module",
        "query": "[[1, 0], [0.3333, nan]]",
        "mask": "[[True, False]]",
        "empty": "[[]]",
        "names": "one; two, three",
    }


def test_large_arrays_are_printed_by_their_shape():
    assert print_evidence(key=[[[0.5] * 25] * 3])["key"] == "an array of shape (1, 3, 25)"


def test_lines_are_aligned_below_the_longest_name():
    text = str(Finding("kind", "error", "A message.", evidence={"smallest input": [1.0]}, hint="Fix it."))
    assert text.splitlines()[1:] == [
        "  where           the whole model",
        "  hint            Fix it.",
        "  smallest input  [1]",
    ]
