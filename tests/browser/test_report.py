"""The report of a survey in a real browser, compared with pandas over the same rows; and both commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.pages import HOSTILE, faults

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

import regard
from regard.render.text import escape_unprintable
from regard.survey import schema
from regard.survey.aggregate import TopDocuments, aggregate_rows, get_bin_edges
from regard.survey.report import SHARES, SurveyReport, shorten
from tests.helpers.survey_files import HEADS, write_survey

ROOT = Path(__file__).parents[2]
NAMES = [*HOSTILE[:7], *HOSTILE[8:], *(f"pages/{number:02}.txt" for number in range(31))]  # no lone surrogate
PLACES = [f"{layer}.{head}" for layer, heads in enumerate(HEADS) for head in range(heads)]


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    quarantined = ({"document": HOSTILE[1], "kind": "error", "reason": HOSTILE[0]},)
    return write_survey(
        tmp_path_factory.mktemp("survey") / "out", NAMES, quarantined=quarantined, module="<i>{}</i>"
    )


@pytest.fixture(scope="module")
def rows(survey):
    frame = survey.to_pandas()
    frame["place"] = frame["layer"].astype(str) + "." + frame["head"].astype(str)
    return frame


@pytest.fixture(scope="module")
def page(survey):
    return survey.page()


@pytest.fixture
def tab(show, page):
    tab = show(page)
    tab.locator("#app[data-ready]").wait_for()
    return tab


def read_cells(tab) -> dict[str, float]:
    """The numbers on screen by head, in their order."""
    cells = tab.locator(".cell").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.head, Number(n.dataset.value)])"
    )
    return dict(cells)


def choose(tab, measure: str) -> None:
    tab.get_by_label("Measure", exact=True).select_option(measure)


# -- The page against pandas ------------------------------------------------------------------------------


def test_the_grid_shows_the_means_in_any_order(tab, rows):
    for measure in ("entropy", "induction", "within_128", "heavy"):
        choose(tab, measure)
        means = rows.groupby("place")[measure].mean()
        for order, expected in {
            "by layer": PLACES,
            "largest first": list(means.sort_values(ascending=False, kind="stable").index),
            "smallest first": list(means.sort_values(kind="stable").index),
        }.items():
            tab.get_by_label("Order", exact=True).select_option(order)
            shown = read_cells(tab)
            assert list(shown) == expected
            np.testing.assert_allclose([shown[place] for place in PLACES], means[PLACES], rtol=1e-6)
    strength = tab.locator(".cell").evaluate_all(
        "nodes => nodes.map(n => Number(n.style.getPropertyValue('--strength')))"
    )
    assert strength[0] == 0 and strength[-1] == 1 and strength == sorted(strength)
    assert (
        tab.locator(".cell")
        .first.get_attribute("aria-label")
        .endswith(f"heavy {float(f'{means.min():.3g}'):g}")
    )


def count_inside(rows, kind: str, window: int, level: float) -> tuple[int, int]:
    """Number of heads with this share in a window, over longer documents; and number of heads with a mean."""
    means = rows[rows["tokens"] > window].groupby("place")[f"{kind}_{window}"].mean().dropna()
    return int((means >= level).sum()), len(means)


def test_the_answer_counts_heads_over_documents_that_are_longer(tab, survey, rows):
    report = SurveyReport(survey)
    assert [window["window"] for window in report.summary["windows"]] == [64, 128, 256, 512]
    answer = tab.locator("#answer").inner_text()
    counts = count_inside(rows, "within", 128, 0.99)
    assert counts == (1, 5) and report.answer().startswith(
        "1 of 5 heads have 99 % of their weight within 128 tokens"
    )
    assert re.sub(r"\s+", " ", answer).startswith("1 of 5 heads have at least")
    longer = rows[rows["tokens"] > 128]["document"].nunique()
    assert f"{longer} documents with more than 128" in tab.locator("#more").inner_text()
    assert f"over {longer} documents" in report.answer()
    found = set()
    for summary in report.summary["windows"]:
        tab.get_by_label("Window", exact=True).select_option(str(summary["window"]))
        for level in SHARES:
            tab.get_by_label("Share of the weight").select_option(f"{100 * level:g} %")
            expected = count_inside(rows, "within", summary["window"], level)
            kept = count_inside(rows, "kept", summary["window"], level)[0]
            assert tab.locator("#fitting").inner_text() == str(expected[0])
            assert tab.locator("#more").inner_text().startswith(f"{kept} do")
            assert (summary["within"][f"{level:g}"], summary["heads"], summary["kept"][f"{level:g}"]) == (
                *expected,
                kept,
            )
            found.add((*expected, kept))
    assert len(found) > 5  # the choices matter


def test_every_head_at_every_window(tab, rows):
    tab.get_by_text("Every head at every window").click()
    means = rows[rows["tokens"] > 256].groupby("place")["within_256"].mean()
    for place in PLACES:
        cell = tab.locator(f"#masses tr[data-head='{place}'] td").nth(2).inner_text()
        assert cell == "–" if np.isnan(means[place]) else float(cell) == pytest.approx(means[place], abs=6e-4)


def test_heads_are_named_by_the_rules_on_the_page(tab, survey, rows):
    means = rows.groupby("place")[["previous", "induction", "first"]].mean()
    named = {}
    for place in PLACES:
        if means["previous"][place] > 0.5:
            named[place] = "previous-token"
        elif means["induction"][place] > 0.3:
            named[place] = "induction"
        elif means["first"][place] > 0.3:
            named[place] = "first-token sink"
        else:
            own = rows[rows["place"] == place]
            within = {w: own[own["tokens"] > w][f"within_{w}"].mean() for w in (64, 128, 256, 512)}
            fits = [f"local within {w}" for w, mass in within.items() if mass >= 0.99]
            named[place] = "undetermined" if np.isnan(within[64]) else fits[0] if fits else "wide"
    assert list(named.values()) == [
        "previous-token",
        "first-token sink",
        "induction",
        "local within 256",
        "wide",
        "undetermined",
    ]
    shown = tab.locator(".behaviour").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.name, [...n.querySelectorAll('button')].map(b => b.dataset.head)])"
    )
    assert {place: name for name, places in shown for place in places} == named
    assert [
        place for behaviour in SurveyReport(survey).summary["behaviours"] for place in behaviour["heads"]
    ] == [[int(n) for n in place.split(".")] for _, places in shown for place in places]
    rules = tab.locator("#behaviours").inner_text()
    assert "first > 0.3" in rules and "2410.10781" in rules and "previous > 0.5" in rules
    tab.locator(".behaviour button[data-head='1.0']").click()
    assert tab.locator("#head h3").inner_text() == "Layer 1, head 0"


@pytest.mark.parametrize("measure", ["distance", "induction", "kept_64"])
def test_the_documents_behind_a_head(tab, rows, measure):
    choose(tab, measure)
    tab.locator(".cell[data-head='0.2']").click()
    own = rows[rows["place"] == "0.2"].dropna(subset=[measure])
    counts = tab.locator(".column").evaluate_all("nodes => nodes.map(n => Number(n.dataset.count))")
    edges = get_bin_edges(measure)
    wanted = np.histogram(rows[measure].dropna(), edges)[0].nonzero()[0]
    expected = np.histogram(own[measure].astype(float), edges)[0][wanted[0] : wanted[-1] + 1]
    assert counts == expected.tolist() and sum(counts) == len(own)
    lists = tab.locator("ol.documents")
    for number, ascending in enumerate((False, True)):
        best = own.sort_values(measure, ascending=ascending, kind="stable").head(5)
        items = lists.nth(number).locator("li")
        assert items.locator("bdi").first.inner_text() != ""
        shown = items.evaluate_all(
            "nodes => nodes.map(n => [Number(n.dataset.value), n.querySelector('bdi').textContent])"
        )
        assert [name for _, name in shown] == [escape_unprintable(document) for document in best["document"]]
        np.testing.assert_array_equal([value for value, _ in shown], best[measure].astype(float))


# -- Hostile names and accessibility ----------------------------------------------------------------------


def test_hostile_names_are_shown_as_text(show, tmp_path):
    survey = write_survey(
        tmp_path / "out",
        NAMES[:9],
        lengths=(300,),
        quarantined=({"document": HOSTILE[1], "kind": "error", "reason": HOSTILE[0]},),
        module="<i>{}</i>",
    )
    tab = show(survey.page(title=HOSTILE[0]))
    tab.locator("#app[data-ready]").wait_for()
    assert tab.locator("h1").inner_text() == HOSTILE[0] and tab.locator("main i, main img").count() == 0
    shown = set()
    for measure in ("entropy", "distance", "heavy"):
        choose(tab, measure)
        for place in PLACES:
            tab.locator(f".cell[data-head='{place}']").click()
            shown |= set(tab.locator("ol.documents bdi").all_text_contents())
    assert shown >= {escape_unprintable(name) for name in NAMES[:9]}
    tab.get_by_text("1 document set aside: 1 error").click()
    assert tab.locator("#quarantine td").all_text_contents() == [HOSTILE[1], "error", HOSTILE[0]]
    assert "<i>2</i>" in tab.locator("#head").inner_text()  # the module of the last head that was opened


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_finds_no_serious_fault(show, page, scheme, width):
    tab = show(page, viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab.locator("#app[data-ready]").wait_for()
    choose(tab, "first")
    for summary in tab.locator("summary").all():
        summary.click()
    assert faults(tab) == []
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_keyboard_and_the_address_lead_to_a_head(tab):
    choose(tab, "induction")
    tab.locator(".cell[data-head='0.0']").focus()
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        tab.keyboard.press(key)
    assert tab.locator("#head h3").inner_text() == "Layer 1, head 1"
    tab.wait_for_url(re.compile("measure=induction&layer=1&head=1"))  # kept a moment later
    tab.reload()
    tab.locator("#app[data-ready]").wait_for()
    assert tab.locator("#head h3").inner_text() == "Layer 1, head 1"
    assert tab.locator("#head .name").inner_text() == "induction"
    tab.evaluate("location.hash = 'measure=%3Cb%3E&layer=99&window=x&order=1'")
    tab.locator("#head h3", has_text="Layer 0, head 0").wait_for()


# -- Aggregation ------------------------------------------------------------------------------------------


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


def test_the_size_of_a_page_does_not_depend_on_the_documents(tmp_path):
    few = write_survey(tmp_path / "few", [f"{n:05}" for n in range(60)])
    many = write_survey(tmp_path / "many", [f"{n:05}" for n in range(600)])
    pages = [survey.page(title="a").html for survey in (few, many)]
    # Counts and ids have more digits, and heads share fewer extreme documents.
    assert len(pages[1]) - len(pages[0]) < 20_000
    named = json.loads(re.search(r'id="record">(.*?)</script>', pages[1])[1])["documents"]
    assert 60 < len(named) <= 2 * 5 * len(PLACES) * 15 and len(shorten("x" * 10_000)) == 160


def test_aggregates_do_not_depend_on_batches(survey, monkeypatch):
    whole = aggregate_rows(survey)
    monkeypatch.setattr("regard.survey.aggregate.BATCH_ROWS", 7)
    small = [batch.slice(start, 5) for batch in survey.iter_batches() for start in range(0, len(batch), 5)]
    monkeypatch.setattr(
        type(survey), "iter_batches", lambda _, columns: (batch.select(columns) for batch in small)
    )
    parts = aggregate_rows(survey)
    assert repr(whole.extremes["first"][0].documents) == repr(parts.extremes["first"][0].documents)
    for name, counts in whole.counts.items():
        np.testing.assert_array_equal(counts, parts.counts[name])
    np.testing.assert_allclose(whole.within, parts.within, rtol=1e-12)
    np.testing.assert_array_equal(whole.longer, parts.longer)


def test_missing_measures_are_left_out(show, tmp_path):
    short = write_survey(tmp_path / "short", ["a", "b"], lengths=(20, 64))
    assert short.page().title == "where/a model <b> over 2 documents"
    assert SurveyReport(short).answer().startswith("No document has more than 64 tokens")
    assert [behaviour.name for behaviour in SurveyReport(short).behaviours][-2:] == ["wide", "undetermined"]
    tab = show(short.page())
    assert tab.locator("#answer").inner_text().startswith("No document has more than 64 tokens")
    only = write_survey(tmp_path / "only", ["a", "b", "c"], measures=("entropy",), shards=1)
    tab = show(only.page())
    tab.locator("#app[data-ready]").wait_for()
    assert tab.locator("#measure option").all_text_contents() == ["entropy"]
    assert tab.locator(".behaviour").count() == 2 and len(read_cells(tab)) == 6


def test_a_survey_without_documents_raises(tmp_path):
    empty = write_survey(tmp_path / "empty", [])
    with pytest.raises(regard.ArgumentError, match="no document is measured yet"):
        empty.page()


# -- The commands -----------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys):
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from regard.cli import main

    def run(*arguments, code=0):
        assert main([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def stub(monkeypatch):
    """The command runs a stand-in instead of its model."""
    from tests.helpers.survey_stub import Stub

    real = regard.survey.run
    monkeypatch.setattr("regard.survey.run", lambda _, *args, **kwargs: real(Stub(), *args, **kwargs))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"page {number} " * (20 * number + 1))
    (folder / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    return folder


def test_report_prints_the_answer_and_writes_the_page(run, survey, tmp_path, page):
    path = tmp_path / "page.html"
    captured = run("report", survey.path, "-o", path)
    assert captured.err == "" and captured.out.splitlines()[0] == SurveyReport(survey).answer()
    assert "  induction: 1\n" in captured.out and captured.out.splitlines()[-1].startswith(
        f"{page.title}: {path}, "
    )
    assert path.read_text() == page.html
    captured = run("report", survey.path, "-o", path, "--json")
    record = json.loads(captured.out)
    assert captured.err == "" and record["page"] == str(path) and record["bytes"] == path.stat().st_size
    assert {name: record[name] for name in SurveyReport(survey).summary} == json.loads(
        json.dumps(SurveyReport(survey).summary)
    )


def test_survey_resumes_and_prints_quarantined_documents(run, stub, texts, tmp_path):
    out = tmp_path / "out"
    captured = run("survey", "a-model", texts, "--output", out, "--shard-size", 3)
    first, quarantined, hint = captured.out.splitlines()
    assert first.startswith("stub: 6 documents, ") and first.endswith(f", written to {out}")
    assert (
        quarantined.startswith("quarantined: bad.txt (not text: ")
        and hint == f"To write the report: regard report {out}"
    )
    assert captured.err == ""
    before = {path: path.stat().st_mtime_ns for path in out.glob("shard-*")}
    next(iter(before)).write_bytes(b"broken")
    captured = run("survey", "a-model", texts, "--output", out, "--shard-size", 3, "--json")
    record = json.loads(captured.out)
    assert (record["documents"], record["quarantined"], record["heads"]) == (6, 1, 6)
    assert (
        len(record["notes"]) == 1 and captured.err == f"warning: {record['notes'][0]}\n"
    )  # once: logging does not repeat it
    assert "is damaged" in captured.err and regard.survey.open(out).find_damaged() == []


def test_survey_shows_its_progress(run, stub, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    captured = run("survey", "a-model", texts, "-o", tmp_path / "out", "--shard-size", 2)
    assert "6 documents" in captured.err and "/s)" in captured.err and "1 quarantined" in captured.err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--measures", "entropy,colour"], 2, "received measures with 'colour'"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--executor", "spark"], 2, "--executor"),
    ],
)
def test_a_usage_error_of_survey_is_one_line(run, stub, texts, tmp_path, options, code, words):
    captured = run("survey", "a-model", texts, "--output", tmp_path / "out", *options, code=code)
    assert captured.out == "" and captured.err.startswith("regard survey: ") and words in captured.err
    assert captured.err.count("\n") == 1


def test_a_missing_survey_or_extra_is_one_line(run, stub, texts, tmp_path, monkeypatch):
    captured = run("report", tmp_path, code=2)
    assert captured.err.startswith("regard report: received ") and "no settings.json" in captured.err
    captured = run("survey", "a-model", texts, code=2)
    assert "'--output'" in captured.err and captured.err.count("\n") == 1
    for command in (["report", tmp_path], ["survey", "a-model", texts, "--output", tmp_path / "out"]):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        captured = run(*command, code=3)
        assert (
            captured.err == f"regard {command[0]}: pyarrow is not installed. pip install 'regard[survey]'\n"
        )
    monkeypatch.undo()


def test_a_survey_that_cannot_continue_exits_with_4_and_an_interrupt_with_130(run, monkeypatch, tmp_path):
    from regard.survey import SurveyError

    def stop(error):
        def survey(*_, **__):
            raise error

        monkeypatch.setattr("regard.survey.run", survey)

    stop(SurveyError("survey.run", received="a full disk", expected="free space", hint="Free some."))
    captured = run("survey", "a", "b", "--output", tmp_path, code=4)
    assert captured.err == "regard survey: received a full disk; expected free space. Free some.\n"
    stop(KeyboardInterrupt())
    captured = run("survey", "a", "b", "--output", tmp_path, code=130)
    assert captured.err.startswith("warning: Interrupted. Run the same command again to resume; ")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_survey_and_report_of_a_model(run, texts, tmp_path):
    pytest.importorskip("torch")
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "regard",
        "survey",
        "tests.helpers.survey_models:tiny",
        texts,
        "--output",
        out,
        "--json",
    ]
    command += ["--max-tokens", 96]
    done = subprocess.run(
        [*map(str, command)], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    record = json.loads(done.stdout)
    assert (record["documents"], record["quarantined"], record["heads"]) == (6, 1, 4) and done.stderr == ""
    answer = run("report", out, "-o", tmp_path / "page.html").out
    assert re.match(r"\d of 4 heads have 99 % of their weight within 64 tokens, over \d documents", answer)
    assert (tmp_path / "page.html").stat().st_size < 200_000


# -- The docs ---------------------------------------------------------------------------------------------

DOCS = (ROOT / "docs/survey.md").read_text()


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
    assert sorted(names) == sorted(schema.build_schema(schema.list_columns()).names)


def test_the_sql_of_the_docs_runs(survey, rows):
    duckdb = pytest.importorskip("duckdb")
    (query,) = re.findall(r"^```sql\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    found = duckdb.sql(query.replace("results/", f"{survey.path}/")).fetchall()
    longer = rows[rows["tokens"] > 128].groupby(["layer", "head"])
    expected = []
    for (layer, head), own in longer:
        if own["within_128"].mean() >= 0.9:
            least = own.loc[own["within_128"].idxmin()]
            expected.append(((layer, head), least["within_128"], least["document"]))
    expected.sort(key=lambda row: row[1])
    assert len(expected) >= 2
    assert [((layer, head), least, at) for layer, head, _, least, at in found] == expected
