"""Hostile tokens, accessibility faults and timings shared by the tests of pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from regard import explore
from regard.pages import html
from regard.pages.html import bundle, exports_object
from regard.render.text import format_number
from tests.helpers.nightly import keep_in_ci

ASSETS = Path(html.__file__).parent / "assets"
EXPORT_NAMES = re.compile(r"^export (?:async )?(?:function|const|class) (\w+)", re.MULTILINE)

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "a\u2028b",
    "\"'`",
    "\u200fx\u202e",
    "nul\0",
    "\ud800",
    "&lt;b&gt;",
    "${alert(1)}",
]


# Colour scheme and width. CI has the one that fails most often, the nightly run all.
SCREENS = keep_in_ci([("light", 1280), ("dark", 390), ("light", 390), ("dark", 1280)], ("dark", 390))

# The page of `explore.model` carries a whole model, and `explore.training` has no example; both have their own tests.
EXPLORERS = [getattr(explore, name) for name in explore.__all__ if name not in ("Page", "model", "training")]


def rows_of_scores() -> list[list[float]]:
    rng = np.random.default_rng(5)
    inf, nan = np.inf, np.nan
    rows = [
        [0.0],
        [-inf],
        [-inf, -inf, -inf],
        [1e4, 1e4 - 1, -1e4],
        [1.0, -inf, 2.0],
        [nan, 1.0, -inf],
        [inf, 1.0],
    ]
    rows += [list(rng.normal(size=n) * scale) for n in (2, 5, 31, 257) for scale in (0.1, 3, 300)]
    for row in rows[-6:]:
        row[1] = -inf
    return [[float(x) for x in row] for row in rows]


def faults(tab) -> list[str]:
    """Return the serious and critical violations that axe-core finds once what moves has come to rest."""
    tab.evaluate("""() => Promise.all(document.getAnimations()
      .filter((it) => it.effect.getComputedTiming().endTime < Infinity)
      .map((it) => it.finished.catch(() => null)))""")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = axe.run(tab).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")]


# Reads the pixels of a copy: a browser gives advice on the console if a canvas itself is read often.
PIXELS = """const { width, height, clientWidth } = canvas, copy = new OffscreenCanvas(width, height);
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);"""


def find_color(canvas, color: tuple[int, int, int]) -> tuple[list[list[int]], int, int, int]:
    """Return the pixels (row, column) of a colour, width and height of the canvas, and its width on the page."""
    script = f"""(canvas, [r, g, b]) => {{ {PIXELS}
      const found = [];
      for (let at = 0, n = 0; at < data.length; at += 4, n++) {{
        if (data[at] === r && data[at + 1] === g && data[at + 2] === b) found.push([Math.floor(n / width), n % width]);
      }}
      return [found, width, height, clientWidth]; }}"""
    return tuple(canvas.evaluate(script, color))


def darkest_pixel(canvas, below: float = 0.0, left: int = 0) -> list[int]:
    """Return the darkest opaque pixel (row, column) below a part of the height and right of a column."""
    script = f"""(canvas, [below, left]) => {{ {PIXELS}
      let best = null, least = Infinity;
      for (let n = Math.floor(below * height) * width; n < width * height; n++) {{
        const light = data[4 * n] + data[4 * n + 1] + data[4 * n + 2];
        if (n % width >= left && data[4 * n + 3] === 255 && light < least) [best, least] = [n, light];
      }}
      return [Math.floor(best / width), best % width]; }}"""
    return canvas.evaluate(script, [below, left])


def wait_until(tab, met, tries: int = 3000) -> None:
    """Wait for a condition; the content policy of a page forbids Playwright's own wait."""
    for _ in range(tries):
        if met():
            return
        tab.wait_for_timeout(20)
    raise AssertionError("the condition was never met")


def assert_policy_said(browser, said: list[str]) -> None:
    """Check that a browser said on its console what a policy stopped; the driver of Firefox does not pass that on."""
    if browser.browser_type.name == "chromium":
        assert any("Content Security Policy" in text for text in said)


def misfits(tab) -> list[str]:
    """Return the frames of a page whose height is not that of the page in them."""
    found = []
    for element in tab.locator("iframe").element_handles():
        frame = element.content_frame()
        own = element.evaluate("frame => frame.clientHeight")
        inner = frame.evaluate("document.body.offsetHeight")
        if inner < 50 or abs(own - inner) > 1:
            found.append(f"{frame.evaluate('document.title')}: frame {own}, page {inner}")
    return found


def wait_for_frames(tab) -> None:
    """Wait until every frame has the height of its page; the error names those that have not."""
    for _ in range(1000):
        if not (found := misfits(tab)):
            return
        tab.wait_for_timeout(20)
    raise AssertionError("; ".join(found))


LOADED = "performance.timing.domComplete - performance.timing.responseEnd"


def pace(tab) -> float:
    """Return the milliseconds that this browser takes for five million exponentials, as a unit for other times."""
    return tab.evaluate(
        "() => { const t = performance.now(); let x = 0; for (let i = 0; i < 5e6; i++) x += Math.exp(-i % 7);"
        " return Math.max(performance.now() - t, 1 + x * 0); }"
    )


def table(tab) -> list[list[str]]:
    """Return the rows of the table on screen, without headers."""
    return tab.locator("tbody tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.textContent))")


def common_format(numbers) -> Callable[[float], str]:
    """Return a format with as many decimals as the number that needs most, up to four; exponents stay."""
    plain = [text for text in map(format_number, numbers) if not re.search("[a-z]", text)]
    decimals = max((len(text.partition(".")[2]) for text in plain), default=0)

    def write(x: float) -> str:
        return text if re.search("[a-z]", text := format_number(x)) else f"{x:.{decimals}f}"

    return write


def format_column(numbers) -> list[str]:
    """Format the numbers of a column, all with as many decimals."""
    return [*map(common_format(numbers), numbers)]


def format_matrix(matrix) -> list[list[str]]:
    """Format the numbers of a matrix, all with as many decimals."""
    matrix = np.asarray(matrix)
    return np.reshape(format_column(matrix.ravel()), matrix.shape).tolist()


def format_vectors(matrix) -> list[str]:
    """Format the rows of a matrix as vectors of up to eight entries, all with as many decimals."""
    return [f"[{', '.join(row)}]" for row in format_matrix(matrix)]


def import_modules(*modules: str) -> str:
    """Return a script that declares all exports of some page modules, each from its own bundle."""
    lines = []
    for module in modules:
        names = EXPORT_NAMES.findall((ASSETS / f"{module}.js").read_text(encoding="utf-8"))
        call = f"(() => {{ {bundle(module)[0]}; return {exports_object(module)}; }})()"
        lines.append(f"const {{ {', '.join(names)} }} = {call};\n")
    return "".join(lines)


def run_in_node(script: str, *modules: str) -> str:
    """Run a script in Node with the exports of some page modules in scope, and return what it prints."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here; the browser runs the same")
    run = [node, "--input-type=module", "-"]
    text = import_modules(*modules) + script
    return subprocess.run(run, check=True, capture_output=True, text=True, input=text).stdout
