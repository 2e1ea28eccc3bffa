"""Guarantees of every page: tokens stay text, nothing is loaded, and JavaScript formats numbers as Python does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import explore
from regard.learn import cat
from regard.pages import html
from regard.pages.html import bundle
from regard.render.text import format_number
from tests.helpers.browsers import start_chromium
from tests.helpers.pages import (
    ASSETS,
    EXPLORERS,
    HOSTILE,
    assert_policy_said,
    faults,
    import_modules,
    misfits,
    rows_of_scores,
    run_in_node,
    wait_for_frames,
    wait_until,
)

APPS = sorted(path.stem for path in (ASSETS / "apps").glob("*.js"))


# -- The shell --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EXPLORERS)
def test_a_page_is_small_and_has_a_policy(make, tmp_path):
    page = make()
    page.save(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page.html
    assert len(text.encode()) <= 300_000
    (script,) = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src {html.csp_hash(script)};" in policy
    assert "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=", text)


def test_modules_use_no_markup_from_text():
    files = [path for path in ASSETS.rglob("*.*") if path.suffix in (".js", ".css")]
    assert len(files) >= 50
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|</|url\(|@import", text
        )


MODULES = sorted(path.relative_to(ASSETS).with_suffix("").as_posix() for path in ASSETS.rglob("*.js"))


@pytest.mark.parametrize("app", APPS)
def test_a_bundle_is_one_script_without_imports(app):
    script, _ = bundle(f"apps/{app}")
    assert script.startswith('"use strict";\n')
    assert not re.search(r"^(?:import|export) ", script, re.MULTILINE) and "source(" not in script


CLASHING_MODULES = {
    "apps/main.js": """import { total as sum, unit } from "../parts/first.js";
import { total } from "../parts/second.js";

const helper = await Promise.resolve("main");
console.log(JSON.stringify([sum(), total(), unit, helper, source("../parts/second.js").includes("second")]));
""",
    "parts/first.js": """import { total as other } from "./second.js";

export const unit = "kg";
const helper = () => "first";
export function total() {
  return `${helper()} and ${other()}`;
}
""",
    "parts/second.js": """const helper = () => "second";
export async function unused() {}
export function total() {
  return helper();
}
""",
}


def test_modules_of_a_bundle_do_not_share_a_scope(monkeypatch):
    monkeypatch.setattr("regard.pages.html._read", CLASHING_MODULES.get)
    script, style = bundle.__wrapped__("apps/main")  # without the cache
    assert (
        json.loads(run_in_node(script)) == ["first and second", "second", "kg", "main", True] and style == ""
    )


def test_an_unknown_module_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"no page module apps/gone\.js"):
        bundle("apps/gone")


@pytest.mark.parametrize("module", MODULES)
def test_every_import_is_exported_and_used(module):
    text = (ASSETS / f"{module}.js").read_text(encoding="utf-8")
    imports = re.findall(r'^import \{ ([^}]*) \} from "([^"]*)\.js";$', text, re.MULTILINE)
    assert len(imports) == len(re.findall(r"^import ", text, re.MULTILINE))
    body = re.sub(r"^import .*$|//.*$", "", text, flags=re.MULTILINE)
    for names, path in imports:
        source = (ASSETS / module).parent.joinpath(f"{path}.js").read_text(encoding="utf-8")
        for name in names.split(", "):
            assert re.search(rf"^export (?:async )?(?:function|const|class) {name}\b", source, re.MULTILINE)
            assert re.search(rf"\b{name}\b", body), f"{module}.js does not use {name}"


@pytest.mark.parametrize("token", HOSTILE)
def test_nothing_breaks_out_of_the_record(token):
    text = html.encode_record({"token": token, token: 1})
    assert text.isascii() and not set("<>&\0\u2028\u2029") & set(text)
    assert json.loads(text) == {"token": token, token: 1}


@pytest.mark.slow
def test_a_notebook_shows_the_page_in_a_sandbox(browser):
    context = browser.new_context()
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.set_content(f"<!DOCTYPE html><title>notebook</title>{explore.pipeline()._repr_html_()}")
    frame = tab.frame_locator("iframe")
    frame.get_by_role("button", name="Next").click()
    assert frame.locator("#formula").text_content().endswith(" = 2")
    assert tab.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert said == []
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [736, 390])
def test_a_notebook_gives_each_frame_the_height_of_its_page(browser, width):
    pages = [explore.pipeline(), explore.weights(), regard.attention(cat.Q, cat.K).page(cat.tokens)]
    tab = browser.new_page(viewport={"width": width, "height": 900})
    tab.set_content(f"<!DOCTYPE html><body style='margin: 0'>{''.join(page._repr_html_() for page in pages)}")
    for frame in tab.locator("iframe").all():
        frame.scroll_into_view_if_needed()  # a frame that is off screen is not laid out
        tab.wait_for_timeout(300)
    wait_for_frames(tab)
    assert len(set(tab.locator("iframe").evaluate_all("frames => frames.map(it => it.clientHeight)"))) == 3
    tab.close()


def test_a_large_page_is_a_file_beside_the_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small, *large = (html.Page("All <b>heads</b>", text * (5 << 20)) for text in ("a", "bc", "de"))
    assert "srcdoc" in small._repr_html_() and list(tmp_path.iterdir()) == []
    for page in large:
        link = page._repr_html_()
        assert len(link) < 500 and "<b>" not in link and "srcdoc" not in link
        assert (tmp_path / re.search(r'href="([\w.-]+)"', link)[1]).read_text(encoding="utf-8") == page.html
    assert len(list(tmp_path.iterdir())) == 2  # pages of the same title are files of their own

    def refuse(self, path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(html.Page, "save", refuse)
    assert "Permission denied" in large[0]._repr_html_() and "href" not in large[0]._repr_html_()


SITE_SCRIPT = (Path(__file__).parents[2] / "docs/_static/site.js").read_text(encoding="utf-8")


@pytest.fixture
def browser_with_scrollbars(browser):
    if browser.browser_type.name == "firefox":
        yield browser
        return
    own = start_chromium(browser.browser_type, scrollbars=True)
    yield own
    own.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [736, 390])
def test_a_frame_gets_the_height_of_its_page(browser_with_scrollbars, width):
    pages = [make() for make in EXPLORERS] + [regard.attention(cat.Q, cat.K).page(cat.tokens)]
    frames = "".join(
        page._repr_html_().partition("<script>")[0] for page in pages
    )  # the site fits them itself
    context = browser_with_scrollbars.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.set_content(f"<!DOCTYPE html><title>chapter</title><body style='margin: 0'>{frames}")
    assert len(misfits(tab)) >= len(pages) - 1  # each still has the height of 760
    # The script comes after the frames reported their heights, as on a slow connection.
    tab.add_script_tag(content="const DOCUMENTATION_OPTIONS = {};" + SITE_SCRIPT)
    wait_for_frames(tab)

    def heights() -> dict[str, int]:
        script = "frames => Object.fromEntries(frames.map((it) => [it.title, it.clientHeight]))"
        return tab.locator("iframe").evaluate_all(script)

    fitted = heights()
    assert 400 < min(fitted.values()) and max(fitted.values()) < 2600
    listing = tab.frame_locator("iframe[title='Attention, line by line']")
    listing.locator(".line", has_text="import math").click()  # less to show: the frame stays
    tab.wait_for_timeout(100)
    assert heights() == fitted
    name = "Attention as matrices"
    tab.frame_locator(f"iframe[title='{name}']").get_by_text("Every number of this step").click()
    wait_until(tab, lambda: heights()[name] > fitted[name])  # more to show: it grows
    tab.set_viewport_size({"width": width + 100, "height": 900})  # another width: each is fitted again
    tab.wait_for_timeout(250)
    wait_for_frames(tab)
    assert said == []
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize(("posted", "height"), [(5713, 5713), (1e9, 20000), (0, 150)])
def test_a_frame_gets_the_posted_height_up_to_a_limit(browser, posted, height):
    tab = browser.new_page()
    reply = f"onmessage = () => parent.postMessage({{ regardHeight: {posted}, regardMayShrink: true }}, '*')"
    tab.set_content(f'<!DOCTYPE html><iframe height="150" srcdoc="<script>{reply}</script>"></iframe>')
    tab.evaluate("addEventListener('message', () => { window.isAnswered = true; })")
    tab.add_script_tag(content="const DOCUMENTATION_OPTIONS = {};" + SITE_SCRIPT)
    tab.wait_for_function("window.isAnswered")
    wait_until(
        tab, lambda: tab.locator("iframe").evaluate("frame => frame.clientHeight") == height, tries=200
    )
    tab.close()


@pytest.mark.slow
def test_the_policy_stops_a_script_that_got_in(browser):
    context = browser.new_context()
    tab = context.new_page()
    opened, said = [], []
    tab.on("dialog", lambda d: (opened.append(d.message), d.dismiss()))
    tab.on("console", lambda message: said.append(message.text))
    broken = explore.pipeline().html.replace(
        "</main>", "</main><script>alert(1)</script><img src=x onerror=alert(2)>"
    )
    tab.set_content(broken)
    tab.get_by_role("button", name="Next").click()
    assert opened == []
    assert_policy_said(browser, said)
    context.close()


# -- The shared softmax and the numbers, in Node and in the browser ---------------------------------------


def shown_numbers() -> list[float]:
    rng = np.random.default_rng(7)
    ties = [
        0.03125,
        0.09375,
        -0.15625,
        1234500.0,
        1233500.0,
        0.5,
        2.0,
        100.0,
        1e6,
        999999.99999,
        1e-3,
        9.9999e-4,
    ]
    plain = [
        0.0,
        -0.0,
        1e-9,
        1e-300,
        1e300,
        float("inf"),
        float("-inf"),
        float("nan"),
        0.29756,
        120.0,
        5e-324,
    ]
    drawn = rng.normal(size=300) * 10.0 ** rng.integers(-8, 9, size=300)
    eighths = rng.integers(-(2**20), 2**20, size=100) / 2.0 ** rng.integers(1, 12, size=100)
    return [float(x) for x in (*ties, *plain, *drawn, *eighths)]


SHARED = ("matrix/softmax", "components/format")
SCRIPT = """
const read = parseNumbers, input = JSON.parse(INPUT);
const answer = JSON.stringify({
  softmax: read(input.rows).map(softmax)
    .map((s) => [s.shift, s.total, ...s.exponentials, ...s.weights].map(String)),
  shown: read(input.shown).map(formatNumber),
});
"""


def in_javascript() -> str:
    data = html.encode_record({"rows": rows_of_scores(), "shown": shown_numbers()})
    return SCRIPT.replace("INPUT", json.dumps(data))


def check_javascript(answer: str) -> None:
    got = json.loads(answer)
    assert got["shown"] == [format_number(x) for x in shown_numbers()]
    for row, numbers in zip(rows_of_scores(), got["softmax"], strict=True):
        # A query of 1 against keys that are the scores, −inf by a mask: the library's own softmax of the row.
        key = np.array([[0.0 if x == -np.inf else x] for x in row])
        mask = regard.masks.dense(np.array([[x != -np.inf for x in row]]))
        steps = regard.attention([[1.0]], key, mask=mask, scale=1.0).explain(0)
        want = [steps.shift, steps.total, *steps.exponentials, *steps.weights]
        np.testing.assert_allclose([float(x) for x in numbers], want, rtol=1e-13, atol=0)


def test_softmax_and_numbers_in_node():
    check_javascript(run_in_node(in_javascript() + "console.log(answer);", *SHARED))


@pytest.mark.slow
def test_softmax_and_numbers_in_the_browser(browser):
    context = browser.new_context()
    script = import_modules(*SHARED) + in_javascript()
    check_javascript(context.new_page().evaluate(f"() => {{ {script} return answer; }}"))
    context.close()


# -- Accessibility ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_axe_sees_a_fault(show):
    tab = show(explore.pipeline())
    tab.evaluate("document.querySelector('.lead').style.color = '#eeeeee'")
    assert [fault.split(":")[0] for fault in faults(tab)] == ["color-contrast"]
