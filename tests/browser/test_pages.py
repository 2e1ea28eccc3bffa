"""What every page keeps to: nothing breaks out, nothing is asked of anyone, JavaScript's numbers are Python's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import explore
from regard.pages import html
from regard.render.text import format_number
from tests.helpers.pages import EXPLORERS, HOSTILE, faults, rows_of_scores

ASSETS = Path(html.__file__).parent / "assets"


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
    assert f"script-src {html.digest(script)};" in policy
    assert "unsafe" not in policy
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")
    assert not re.search(r"https?:|//[a-z]+\.|src=|href=", text)


def test_modules_use_no_markup_from_text():
    files = [path for path in ASSETS.iterdir() if path.suffix in (".js", ".css")]
    assert len(files) >= 4
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|</|url\(|@import", text
        )
        assert len(text.splitlines()) < 400


@pytest.mark.parametrize("token", HOSTILE)
def test_nothing_breaks_out_of_the_record(token):
    text = html.embedded({"token": token, token: 1})
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
    assert frame.locator("h2").text_content() == "2. Scale"
    assert tab.locator("iframe").get_attribute("sandbox") == "allow-scripts"
    assert said == []
    context.close()


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
    assert any("Content Security Policy" in text for text in said)
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


SCRIPT = """
const read = numbers, input = JSON.parse(INPUT);
const answer = JSON.stringify({
  softmax: read(input.rows).map(softmax)
    .map((s) => [s.shift, s.total, ...s.exponentials, ...s.weights].map(String)),
  shown: read(input.shown).map(number),
});
"""


def in_javascript() -> str:
    modules = html.bundle("softmax.js")[0] + html.bundle("numbers.js")[0]
    data = html.embedded({"rows": rows_of_scores(), "shown": shown_numbers()})
    return modules + SCRIPT.replace("INPUT", json.dumps(data))


def check_javascript(answer: str) -> None:
    told = json.loads(answer)
    assert told["shown"] == [format_number(x) for x in shown_numbers()]
    for row, got in zip(rows_of_scores(), told["softmax"], strict=True):
        # A query of 1 against keys that are the scores, −inf by a mask: the library's own softmax of the row.
        key = np.array([[0.0 if x == -np.inf else x] for x in row])
        mask = regard.dense(np.array([[x != -np.inf for x in row]]))
        steps = regard.attention([[1.0]], key, mask=mask, scale=1.0).explain(0)
        want = [steps.shift, steps.total, *steps.exponentials, *steps.weights]
        np.testing.assert_allclose([float(x) for x in got], want, rtol=1e-13, atol=0)


def test_softmax_and_numbers_in_node():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here; the browser runs the same")
    run = [node, "--input-type=module", "-e", in_javascript() + "console.log(answer);"]
    check_javascript(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_softmax_and_numbers_in_the_browser(browser):
    context = browser.new_context()
    check_javascript(context.new_page().evaluate(f"() => {{ {in_javascript()} return answer; }}"))
    context.close()


# -- Accessibility ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 360)])
def test_axe_finds_no_serious_fault(show, scheme, width):
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    tab = show(explore.pipeline(mask=regard.first(3)), **options)
    for _ in range(2):
        assert faults(tab) == []
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("ArrowRight")
    tab = show(explore.heatmap(), **options)
    tab.get_by_text("As a table").click()
    assert faults(tab) == []


@pytest.mark.slow
def test_axe_sees_a_fault(show):
    tab = show(explore.pipeline())
    tab.evaluate("document.querySelector('.lead').style.color = '#eeeeee'")
    assert [fault.split(":")[0] for fault in faults(tab)] == ["color-contrast"]
