"""The numbers behind the report of a survey, and the schema in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

import regard
from regard.jobs.shards import build_schema
from regard.survey import schema
from regard.survey.report import TopDocuments, aggregate_rows
from tests.helpers.survey_files import write_survey

DOCS = (Path(__file__).parents[3] / "docs/survey.md").read_text()


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    names = [f"pages/{number:02}.txt" for number in range(38)]
    return write_survey(tmp_path_factory.mktemp("survey") / "out", names)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0, float("nan")])), max_size=40),
    st.data(),
)
def test_top_documents_equal_those_of_a_sort_for_any_batches(found, draw):
    top = TopDocuments(3, 2)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(found)), max_size=3)))
    for start, stop in zip([0, *cuts], [*cuts, len(found)], strict=True):
        part = found[start:stop]
        index, values = (np.array(column) for column in (zip(*part, strict=True) if part else ([], [])))
        top.update(index.astype(int), values.astype(float), lambda row, start=start: start + row)
    for head in range(3):
        own = [(-value, row) for row, (other, value) in enumerate(found) if other == head and value == value]
        expected = [row for _, row in sorted(own)[:2]]
        assert list(top.documents[head]) == expected + [None] * (2 - len(expected))


def test_aggregates_do_not_depend_on_batches(survey, monkeypatch):
    whole = aggregate_rows(survey.settings, survey.iter_batches)
    monkeypatch.setattr("regard.survey.report.BATCH_ROWS", 7)
    small = [batch.slice(start, 5) for batch in survey.iter_batches() for start in range(0, len(batch), 5)]
    monkeypatch.setattr(
        type(survey), "iter_batches", lambda _, columns: (batch.select(columns) for batch in small)
    )
    parts = aggregate_rows(survey.settings, survey.iter_batches)
    assert repr(whole.extremes["first"][0].documents) == repr(parts.extremes["first"][0].documents)
    for name, counts in whole.counts.items():
        np.testing.assert_array_equal(counts, parts.counts[name])
    np.testing.assert_allclose(whole.within, parts.within, rtol=1e-12)
    np.testing.assert_array_equal(whole.longer, parts.longer)


def test_a_survey_without_documents_raises(tmp_path):
    empty = write_survey(tmp_path / "empty", [])
    with pytest.raises(regard.ArgumentError) as refusal:
        empty.page()
    assert refusal.value.operation == "survey.page" and str(empty.path) in refusal.value.received


def test_the_docs_have_the_table_of_the_schema():
    table = [line for line in schema.__doc__.splitlines() if line.startswith("|")]
    assert len(table) > 15 and "\n".join(table) in DOCS
    names: list[str] = []
    for line in table[2:]:
        first = line.split("|")[1]
        own = re.findall(r"`(\w+)`", first)
        if "…" in first:
            own = [f"{own[0].rpartition('_')[0]}_{window}" for window in schema.WINDOWS]
        names += own
    assert sorted(names) == sorted(
        build_schema(schema.list_columns((*schema.MEASURES, *schema.PROMPT_MEASURES))).names
    )


def test_the_sql_of_the_docs_runs(survey):
    pytest.importorskip("pandas")
    duckdb = pytest.importorskip("duckdb")
    (query,) = re.findall(r"^```sql\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    found = duckdb.sql(query.replace("results/", f"{survey.path}/")).fetchall()
    rows = survey.to_pandas()
    longer = rows[rows["tokens"] > 128].groupby(["layer", "head"])
    expected = []
    for (layer, head), own in longer:
        if own["within_128"].mean() >= 0.9:
            least = own.loc[own["within_128"].idxmin()]
            expected.append(((layer, head), least["within_128"], least["document"]))
    expected.sort(key=lambda row: row[1])
    assert len(expected) >= 2
    assert [((layer, head), least, at) for layer, head, _, least, at in found] == expected
