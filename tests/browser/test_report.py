"""The report of a survey in a real browser, compared with pandas over the same rows; and both commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.pages import HOSTILE, SCREENS, faults

pytest.importorskip("pyarrow")
pytest.importorskip("pandas")

from regard.pages.html import shorten
from regard.render.text import escape_unprintable
from regard.survey.dataset import build_report
from regard.survey.report import SHARES, get_bin_edges
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
    report = build_report(survey)
    assert [window["window"] for window in report.summary["windows"]] == [64, 128, 256, 512]
    answer = tab.locator("#answer").inner_text()
    counts = count_inside(rows, "within", 128, 0.99)
    assert counts == (1, 5) and report.answer().startswith(
        "1 of 5 heads have 99 % of their weight within 128 tokens"
    )
    assert re.sub(r"\s+", " ", answer).startswith("1 of 5 heads have at least")
    longer = rows[rows["tokens"] > 128]["document"].nunique()
    assert f"{longer} documents with more than 128" in tab.locator("#more").inner_text()
    assert f"measured on {longer} longer documents" in report.answer()
    found = set()
    for summary in report.summary["windows"]:
        tab.get_by_label("Window", exact=True).select_option(str(summary["window"]))
        for level in SHARES:
            tab.get_by_label("Share of the weight").select_option(f"{100 * level:g} %")
            expected = count_inside(rows, "within", summary["window"], level)
            kept = count_inside(rows, "kept", summary["window"], level)[0]
            assert tab.locator("#fitting").inner_text() == str(expected[0])
            assert tab.locator("#more").inner_text().startswith(f"{kept} head{'' if kept == 1 else 's'} do")
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
        place for behaviour in build_report(survey).summary["behaviours"] for place in behaviour["heads"]
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
    tab.get_by_text("1 document quarantined: 1 error").click()
    assert tab.locator("#quarantine td").all_text_contents() == [HOSTILE[1], "error", HOSTILE[0]]
    assert "<i>2</i>" in tab.locator("#head").inner_text()  # the module of the last head that was opened


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
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


# -- Contents of the page ---------------------------------------------------------------------------------


def test_the_size_of_a_page_does_not_depend_on_the_documents(tmp_path):
    few = write_survey(tmp_path / "few", [f"{n:05}" for n in range(60)])
    many = write_survey(tmp_path / "many", [f"{n:05}" for n in range(600)])
    pages = [survey.page(title="a").html for survey in (few, many)]
    # Counts and ids have more digits, and heads share fewer extreme documents.
    assert len(pages[1]) - len(pages[0]) < 20_000
    named = json.loads(re.search(r'id="record">(.*?)</script>', pages[1])[1])["documents"]
    assert 60 < len(named) <= 2 * 5 * len(PLACES) * 15 and len(shorten("x" * 10_000)) == 160


def test_missing_measures_are_left_out(show, tmp_path):
    short = write_survey(tmp_path / "short", ["a", "b"], lengths=(20, 64))
    assert short.page().title == "where/a model <b> over 2 documents"
    assert build_report(short).answer().startswith("No document has more than 64 tokens")
    assert [behaviour.name for behaviour in build_report(short).behaviours][-2:] == ["wide", "undetermined"]
    tab = show(short.page())
    assert tab.locator("#answer").inner_text().startswith("No document has more than 64 tokens")
    only = write_survey(tmp_path / "only", ["a", "b", "c"], measures=("entropy",), shards=1)
    tab = show(only.page())
    tab.locator("#app[data-ready]").wait_for()
    assert tab.locator("#measure option").all_text_contents() == ["entropy"]
    assert tab.locator(".behaviour").count() == 2 and len(read_cells(tab)) == 6
