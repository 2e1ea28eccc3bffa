"""The table printer and the formatters of bytes and durations."""

from __future__ import annotations

import math

import pytest

from regard.render.table import format_bytes, format_cell, format_seconds, format_table
from regard.render.text import format_factor, format_vector


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [["a", 1.0, 1234], ["bcd", math.nan, 5]]
    assert format_table(rows, ["name", "weight", "n"], align=["left", "right", "right"]).split("\n") == [
        "name  weight      n",
        "a      1.000  1,234",
        "bcd        –      5",
    ]


def test_alignment_indent_and_rule():
    rows = [["a", "b"], ["ccc", "d"]]
    assert format_table(rows, align="left", indent="  ") == "  a    b\n  ccc  d"
    assert format_table(rows) == "  a  b\nccc  d"
    assert format_table(rows, ["x", "y"], rule=True) == "  x  y\n---  -\n  a  b\nccc  d"


def test_no_line_ends_in_a_space():
    text = format_table([["a", ""], ["b", "long"]], align="left")
    assert text.split("\n") == ["a", "b  long"]


def test_tables_without_rows():
    assert format_table([]) == ""
    assert format_table([], ["a", "b"]) == "a  b"


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        format_table([["a", "b"], ["c"]])
    with pytest.raises(ValueError, match="argument"):
        format_table([["a", "b"]], align=["left"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.25, "0.250"),
        (-0.0004, "-0.000"),
        (12345.0, "1.23e+04"),
        (math.inf, "inf"),
        (True, "True"),
        (10**6, "1,000,000"),
    ],
)
def test_values_in_cells(value, text):
    assert format_cell(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1024, "1.02 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3 TB"),
        (1.5e18, "1.5 EB"),
    ],
)
def test_bytes_are_in_decimal_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (1e-3, "1 ms"), (0.9999, "1 s"), (61.5, "61.5 s")]
)
def test_durations(seconds, text):
    assert format_seconds(seconds) == text


def test_a_negative_factor_is_in_parentheses():
    assert format_factor(-0.5) == "(-0.5)"
    assert format_factor(0.5) == "0.5"
    assert format_vector(range(9)) == "[0, 1, 2, 3, 4, 5, …, 8]"
