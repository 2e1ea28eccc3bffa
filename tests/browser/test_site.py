"""The built site: every chapter runs, every link resolves, every page opens in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import regard
from regard.learn import cat
from regard.render.text import format_vector
from tests.helpers.notebooks import CHAPTERS, NOTEBOOKS
from tests.helpers.pages import faults, wait_for_frames

pytest.importorskip("myst_nb")
pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # builds the whole site

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site; warnings fail the build."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "scripts/docs", "site", out]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return out / "html"


class Links(HTMLParser):
    """The ids of a page, its links, and the resources that a browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.hrefs: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src", "data") and value is not None:
                (self.hrefs if tag == "a" else self.loads).append(value)


def broken(page: Path, links: dict[Path, Links]) -> list[str]:
    """The broken references of a page, and the resources it would load from other hosts."""
    found = []
    for target in links[page].hrefs + links[page].loads:
        parts = urlsplit(target)
        if parts.scheme in ("http", "https") or target.startswith("//"):
            found += [target] * (target in links[page].loads)
        elif parts.scheme != "data":
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            known = not anchor or path.suffix != ".html" or (path in links and anchor in links[path].ids)
            found += [target] * (not path.is_file() or not known)
    return found


def test_no_link_is_broken_and_nothing_is_loaded_from_other_hosts(site):
    links = {page: Links(page.read_text()) for page in site.rglob("*.html")}
    assert len(links) > len(NOTEBOOKS)
    assert {page.name: bad for page in links if (bad := broken(page, links))} == {}


def test_a_broken_link_is_reported(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<p id="here"><a href="#here"><a href="#there"><a href="gone.html"><a href="https://a.example">'
        '<script src="https://b.example/x.js"></script><img src="data:,">'
    )
    links = {page: Links(page.read_text())}
    assert broken(page, links) == ["#there", "gone.html", "https://b.example/x.js"]


def cells(site: Path, source: Path) -> list[dict]:
    """The cells of the notebook that a page offers for download."""
    return json.loads((site / source.parent.name / f"{source.stem}.ipynb").read_text())["cells"]


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_is_a_notebook_that_ran(site, source):
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(site / source.parent.name / f"{source.stem}.ipynb", as_version=4))
    code = [cell for cell in cells(site, source) if cell["cell_type"] == "code"]
    install, *ran = code
    assert "".join(install["source"]).startswith("%pip install") and ran
    assert all(cell["execution_count"] for cell in ran)
    assert f'href="{source.stem}.ipynb"' in (site / source.parent.name / f"{source.stem}.html").read_text()


@pytest.mark.parametrize("source", CHAPTERS, ids=lambda path: path.stem)
def test_a_chapter_has_an_explorer_in_place(site, source):
    assert any(
        "<iframe" in "".join(out.get("data", {}).get("text/html", ""))
        for cell in cells(site, source)
        for out in cell.get("outputs", [])
    )


def test_pages_log_nothing_and_fit_a_phone(site, browser):
    events: list[str] = []
    for width in (1300, 390):
        context = browser.new_context(viewport={"width": width, "height": 900})
        tab = context.new_page()
        tab.on("console", lambda message: events.append(f"console {message.text}"))
        tab.on("pageerror", lambda error: events.append(f"error {error}"))
        tab.on(
            "request",
            lambda r: r.url.startswith(("file:", "data:", "about:", "blob:")) or events.append(r.url),
        )
        for page in sorted(site.rglob("*.html")):
            tab.goto(page.as_uri())
            if tab.evaluate("document.documentElement.scrollWidth > innerWidth"):
                events.append(f"{page.name} is wider than {width}")
            if tab.locator("iframe").count():
                wait_for_frames(tab)
        context.close()
    assert events == []


@pytest.mark.parametrize("width", [1300, 390])
def test_frames_fit_at_each_of_twenty_loads(site, browser, width):
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    checked = 0
    for _ in range(20):
        for source in CHAPTERS:
            tab.goto((site / f"book/{source.stem}.html").as_uri())
            wait_for_frames(tab)
            checked += len(tab.frames) - 1
    assert checked >= 20 * len(CHAPTERS)
    context.close()


def test_axe_finds_no_serious_fault(site, browser):
    for width, scheme in ((1300, "light"), (390, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        tab = context.new_page()
        names = (
            "index", "measures", "book/08-many-heads", "exercises/03-keys-equal-queries",
            "guides/index", "glossary", "supported-models", "reference/lens", "reference/architecture",
            "guides/10-teach-a-class",
        )  # fmt: skip
        for name in names:
            tab.goto((site / f"{name}.html").as_uri())
            assert faults(tab) == []
        context.close()


def test_the_navigation_has_seven_entries_that_unfold(site, quiet):
    quiet.goto((site / "guides/03-debug-a-mask.html").as_uri())
    top = quiet.locator(".sidebar-tree > ul > li")
    assert [title.strip() for title in top.locator("> a").all_text_contents()] == [
        "Get started", "Guides", "Learn", "Command line", "API reference", "Supported models", "About",
    ]  # fmt: skip
    listed = quiet.locator(".sidebar-tree a")
    assert listed.filter(visible=True).count() < 40  # the entry of this page is unfolded, the others are not
    assert listed.get_by_text("What the course covers").count() == 0
    groups = quiet.locator(".sidebar-tree .group").filter(visible=True)
    assert groups.all_text_contents() == [
        "Look into models", "Debug", "Train", "Long context and scale", "Extend",
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_first_screen_of_home_says_what_to_do_next(site, browser, width, height):
    context = browser.new_context(viewport={"width": width, "height": height})
    tab = context.new_page()
    tab.goto((site / "index.html").as_uri())
    doors = tab.locator(".doors a")
    assert [door.get_attribute("href") for door in doors.all()] == [
        "get-started.html", "guides/03-debug-a-mask.html", "learn.html",
    ]  # fmt: skip
    assert all(door.bounding_box()["y"] < height for door in doors.all())
    tab.locator("iframe").scroll_into_view_if_needed()
    wait_for_frames(tab)
    context.close()
    assert (site / "_live/index.html").stat().st_size < 1_500_000


def test_the_filter_finds_models(site, quiet):
    quiet.goto((site / "supported-models.html").as_uri())
    assert quiet.evaluate("document.documentElement.scrollHeight") < 4 * 1000
    rows = quiet.locator("details.models tbody tr").filter(visible=True)
    assert rows.count() == 0  # folded
    quiet.get_by_label("Filter").fill("llama")
    names = rows.locator("th").all_text_contents()
    assert "LlamaModel" in names and all("llama" in name.lower() for name in names)
    assert quiet.get_by_role("status").text_content() == f"{len(names)} models"
    quiet.get_by_label("Filter").fill("")
    assert rows.count() == 0


def test_code_wraps_at_spaces_and_wide_tables_scroll(site, browser):
    for width in (390, 1280):
        context = browser.new_context(viewport={"width": width, "height": 900})
        tab = context.new_page()
        for name in (
            "guides/index",
            "supported-models",
            "comparison",
            "promises",
            "claims",
            "reference/lens",
        ):
            tab.goto((site / f"{name}.html").as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach((it) => (it.open = true))")
            broken = tab.evaluate(
                "[...document.querySelectorAll('article code .pre')].filter((it) => it.getClientRects().length > 1"
                " || it.offsetHeight > 40).map((it) => it.textContent)"
            )
            cut = tab.evaluate(
                "[...document.querySelectorAll('article table')].filter((it) => it.scrollWidth >"
                " it.parentElement.clientWidth && getComputedStyle(it.parentElement).overflowX !== 'auto').length"
            )
            assert (broken, cut) == ([], 0), (name, width)
        context.close()


@pytest.fixture
def quiet(browser):
    """A tab that fails the test if the page logs or raises."""
    events: list[str] = []
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    tab = context.new_page()
    tab.set_default_timeout(60_000)  # a busy machine may take its time
    tab.on("console", lambda message: events.append(f"console {message.text}"))
    tab.on("pageerror", lambda error: events.append(f"error {error}"))
    yield tab
    context.close()
    assert events == []


def test_the_search_finds_a_name_without_a_server(site, quiet):
    quiet.goto((site / "index.html").as_uri())
    quiet.get_by_placeholder("Search").fill("entropy")
    quiet.keyboard.press("Enter")
    quiet.locator("#search-results").get_by_role("link", name="regard.Entropy", exact=True).click()
    assert quiet.url.split("/")[-1] == "measures.html#regard.Entropy"


def test_a_block_is_copied_without_its_prompts(site, quiet):
    quiet.goto((site / "guides/index.html").as_uri())
    quiet.locator("div.highlight").first.hover()
    quiet.locator("button.copybtn").first.click()
    search = quiet.get_by_placeholder("Search")
    search.focus()
    quiet.keyboard.press("Control+V")
    assert search.input_value().startswith("import regard")
    assert ">>>" not in search.input_value()


def test_the_address_of_an_error_is_its_section(site, quiet):
    wrong = {
        "attention": lambda: regard.attention([[1.0, 2.0]], [[1.0]]),
        "A[index]": lambda: regard.attention(cat.Q, cat.K)[7],
        "exercises.show": lambda: regard.learn.exercises.show(99),
        "explain": lambda: regard.attention(cat.Q, cat.K).explain(99),
    }
    for operation, call in wrong.items():
        with pytest.raises(regard.RegardError) as caught:
            call()
        page, at = caught.value.page.split("#")
        quiet.goto(f"{(site / page).as_uri()}#{at}")
        place = quiet.locator(f"[id='{at}']")
        place.wait_for()
        assert operation in place.locator("h3").first.text_content()
        words = caught.value.expected if operation == "attention" else caught.value.hint.split()[0]
        assert words in place.text_content()


def test_every_public_name_can_be_linked_to(site):
    ids = {anchor for page in (site / "reference").glob("*.html") for anchor in Links(page.read_text()).ids}
    exported = {
        name
        for name in dir(regard)
        if name[0] != "_" and not isinstance(getattr(regard, name), types.ModuleType)
    }
    assert {f"regard.{name}" for name in exported} <= ids
    assert {"regard.AttentionMatrix.entropy", "regard.lens.Recording.find", "regard.learn.family.show"} <= ids


def test_an_explorer_in_a_chapter_works(site, browser):
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    tab = context.new_page()
    tab.goto((site / "book/04-four-steps.html").as_uri())
    frame = tab.frame_locator("iframe").first
    frame.get_by_role("radio", name="sat").check()
    # By keyboard: the chapter may still scroll to what changed, and a click would miss.
    frame.get_by_role("button", name="Aggregate").press("Enter")
    frame.get_by_text("Every number").press("Enter")
    output = regard.attention(cat.Q, cat.K)[2] @ cat.V
    assert frame.locator("#row-formula").text_content() == f"output = {format_vector(output)}"
    context.close()


def test_a_folded_solution_opens(site, browser):
    tab = browser.new_page()
    tab.goto((site / "exercises/01-four-steps.html").as_uri())
    fold = tab.locator("details").first
    assert not fold.evaluate("it => it.open")
    fold.locator("summary").focus()
    tab.keyboard.press("Enter")
    assert fold.evaluate("it => it.open")
    tab.close()
