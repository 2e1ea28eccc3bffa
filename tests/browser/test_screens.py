"""Every page at three widths, light and dark, by keyboard and touch: what an action changes is on screen after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore import Page
from regard.learn import cat
from regard.lens.span_mass import LayerSpans, SpanMass
from regard.policy import FULL, CachePolicy, Verification
from tests.helpers.nightly import keep_in_ci
from tests.helpers.pages import misfits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.chromium_only("Playwright sets no dark colours and no touch in Firefox"),
]

SITE_SCRIPT = (Path(__file__).parents[2] / "docs/_static/site.js").read_text(encoding="utf-8")
HEIGHT = 844  # of a phone, and less than most windows have
COLUMN = 736  # width of the text of the book


@dataclass(frozen=True)
class Action:
    """Something a reader does, and the parts that must be on screen after it.

    Attributes:
        control: selector of the control.
        shows: selectors; of each, the first element must be visible as a whole.
        key: the key that is pressed on the control; None if it is for the pointer alone.
        tap: the part of the control's width and height at which it is tapped; None if it is for the keyboard alone.
        focus: selector of what gets the focus, if it is not the control.
    """

    control: str
    shows: tuple[str, ...]
    key: str | None = "Enter"
    tap: tuple[float, float] | None = (0.5, 0.5)
    focus: str | None = None


def slide(control: str, *shows: str) -> Action:
    return Action(control, shows, "ArrowRight", (0.8, 0.5))


def check(control: str, *shows: str) -> Action:
    return Action(control, shows, "Space")


def press(control: str, *shows: str) -> Action:
    return Action(control, shows)


STEP = "nav li:nth-child({}) button"
WORK = (".at-work", "#panel", "#next")

ACTIONS: dict[str, list[Action]] = {
    "pipeline": [
        press("#next", *WORK, "#grid-scores"),
        press(STEP.format(4), *WORK, "#grid-output", "#grid-weights"),
        press("#next", *WORK, "#grid-output"),
        press(STEP.format(3), *WORK, "#grid-weights"),
        press(STEP.format(2), *WORK, "#grid-scores"),
        check("label:nth-of-type(4) > input[name=query]", *WORK),
        check("#scaled", *WORK),
        check("#causal", *WORK),
        press("#grid-V tbody tr:nth-child(3) td:nth-of-type(2)", ".selected", "#dial"),
        slide("#dial", ".touched", "#change", "#dial"),
        press("#grid-output tbody tr:nth-child(5) td:nth-of-type(4)", *WORK),
        press("#grid-Q tbody tr:nth-child(1) td:nth-of-type(2)", ".selected", "#dial"),
        slide("#dial", ".touched", "#change", "#dial"),
        press("#reset", ".at-work", "#panel"),
        press("#play", ".at-work", "#play"),
        press("#play", ".at-work", "#play"),
        press("#show-all", *WORK),
    ],
    "weights": [
        Action("#picture", ("#cell", "#picture"), "ArrowDown", (0.7, 0.9)),
        Action("#output", ("#cell", "#output"), "ArrowRight", (0.7, 0.9)),
        check("#causal", "#picture", "#causal"),
        check("#by-row", "#picture", "#top"),
        check("label:nth-of-type(2) > input[name=kind]", "#picture", "#map-name"),
        press("#rows li:nth-child(5) button", "#cell"),
    ],
    "scaling": [
        slide("#size", "#row table", "#size"),
        slide("#sigma", "#row table", "#sigma"),
        slide("#temperature", "#row table", "#temperature"),
        check("#scaled", "#row table", "#scaled"),
        check("label:nth-of-type(2) > input[name=measure]", "#curves", ".keys"),
    ],
    "geometry": [
        Action(".handle", ("#compare", "#query"), "ArrowUp", None),
        check("#scaled", "#description", ".snug", "#scaled"),
        check("#normalised", "#description", ".snug", "#normalised"),
        Action("#reset", ("#compare", "#query"), tap=None),  # no arrow was moved by a tap
    ],
    "cost": [
        press("#step", "#sum", "#words", "#product", "#step"),
        press(STEP.format(2), ".at-work", "#sum", "#words", "#step"),
        press("#step", ".at-work", "#sum", "#step"),
        press(STEP.format(3), "#product", "#words", "#step"),
        slide("#steps", "#sum", "#words", "#steps"),
        check("label:nth-of-type(2) > input[name=mode]", "#sum", "#step"),
        press("#cell", ".at-work", "#sum", "#cell"),
        slide("#length", "#board-caption", "#growth-formula", "#length"),
    ],
    "code": [
        press("#next", ".fresh, #event", "#source"),
        press("#next", ".fresh, #event", "#source"),
        slide("#step", ".fresh, #event", "#source"),
        Action(".line.now", (".fresh, #event", "#source"), "ArrowDown", focus="ol.lines"),
        check("#run", ".fresh, #event", "#source"),
        press("[role=tab]:nth-child(2)", "#details h2"),
    ],
    "model": [
        press("#step", "#text", "#step"),
        press("#back", "#text", "#back"),
        slide("#temperature", "#guesses", "#temperature"),
        press(".head-button[data-pair='5']", "#head-title", "#heads canvas[tabindex]"),
        Action("#heads canvas[tabindex]", ("#cell", "#heads canvas[tabindex]"), "ArrowDown", None),
        # A cell below the diagonal, which is not masked.
        Action("#heads canvas[tabindex]", ("#weight-steps .at-work", ".steps-panel"), tap=(0.4, 0.8)),
        press("#steps-next", "#weight-steps .at-work", ".steps-panel"),
        press("#weight-steps nav li:nth-child(3) button", "#weight-steps .at-work", ".steps-panel"),
        check("#heads input[data-pair='29']", "#off-note"),
    ],
    "map": [
        Action("canvas", (".cell-card .weight",), "ArrowRight", None),
        press("canvas", "#weight-steps .at-work", ".steps-panel"),
        press("#steps-next", "#weight-steps .at-work", ".steps-panel"),
        press("#weight-steps nav li:nth-child(3) button", "#weight-steps .at-work", ".steps-panel"),
    ],
    "effects": [press(".cell[data-head='1.2']", "#selected"), press(".cell[data-head='2.3']", "#selected")],
    "policy": [press(".cell[data-head='1.2']", "#selected")],
    "history": [
        press(".cell[data-head='1.2']", "#head"),
        slide("#time", "#time", ".cell[data-head='2.3']"),
        press("#alarms button", "#head"),
    ],
    "answer": [
        press(".answer .word:nth-of-type(5)", "#token h2", "#token .shares"),
        press(".layer-row:nth-child(2)", "#token h2", "#token .shares"),
        check("label:nth-of-type(3) > input[name=color]", ".answer .word"),
    ],
}


HEADS = [(layer, head) for layer in range(3) for head in range(4)]


def build_map_page() -> Page:
    """Return the page of one head."""
    return regard.attention(cat.Q, cat.K).page(cat.tokens)


def build_effects_page() -> Page:
    """Return the page of an effect sweep."""
    from regard.interventions import EffectTable

    rows = [
        {"module": f"layers.{i}", "layer": i, "head": j, "metric": 2.0 - j, "effect": 0.5 + i - j}
        for i, j in HEADS
    ]
    table = EffectTable(rows)
    table.metric, table.edit, table.clean = "logit(answer)", "its output was set to 0", 1.5
    return table.page(title="Effects")


def build_history_of_training() -> Page:
    """Return the page of a monitored run."""
    from regard.monitor.alarms import Alarm
    from regard.monitor.history import History, Snapshot
    from regard.monitor.history_page import build_history_page

    history, places = History(0), [(f"layers.{i}", i, j) for i, j in HEADS]
    for step in range(0, 250, 50):
        values = np.array([[1.0 + step * j, 64.0] for _, _, j in places])
        history.add(Snapshot(step, ("module", "layer", "head"), places, ("max_score", "rows"), values))
    alarm = Alarm("score growth", 150, "layers.0", 0, 3, 16.2, 16.0, "It grows.", "Lower it.")
    return build_history_page(history, [alarm], "Run")


def build_answer_page() -> Page:
    """Return the page of an answer, and the parts of the prompt that it attends to."""
    rng, count = np.random.default_rng(0), 30
    layers = [
        LayerSpans(
            f"layers.{i}",
            i,
            rng.dirichlet(np.ones(3), size=(1, 4, count)).astype(np.float32),
            rng.random((1, 4, count)).astype(np.float32),
            "",
        )
        for i in range(3)
    ]
    labels = np.repeat([0, 1], [8, 12])[None]
    mass = SpanMass(("question", "document", "generated"), np.arange(20, 20 + count), 20, layers, labels)
    return mass.page([f"Ġword{i}" for i in range(20 + count)])


def build_policy_page() -> Page:
    """Return the page of a verified cache policy."""
    policy = CachePolicy([[1, 2, 4, FULL]] * 2, np.zeros((2, 4), int), ["layers.0", "layers.1"])
    document = {
        "document": "a",
        "name": "a",
        "tokens": 64,
        "kl": 0.5,
        "agreement": 1,
        "loss": 2,
        "policy_loss": 3,
    }
    settings = {"model": {"name": "tiny"}, "max_tokens": 64, "tests": []}
    sums = {"lost": np.zeros(8), "effect": np.arange(8.0)}
    return Verification(policy, 0.01, settings, [document], sums, np.ones((2, 4)), []).page("Policy")


BUILDERS: dict[str, Callable[[], Page]] = {
    **{name: getattr(explore, name) for name in explore.__all__ if name != "Page"},
    "map": build_map_page,
    "effects": build_effects_page,
    "history": build_history_of_training,
    "answer": build_answer_page,
    "policy": build_policy_page,
}


@cache
def build(name: str) -> Page:
    """Return a page, built once."""
    if name in ("effects", "history"):
        pytest.importorskip("torch")
    return BUILDERS[name]()


# Why the first element of a selector is not on screen, for those that are not. A frame is at (x, y) of the window.
HIDDEN = """([selectors, x, y, width, height]) => selectors.flatMap((selector) => {
  const node = [...document.querySelectorAll(selector)].find((it) => it.getClientRects().length);
  if (!node) return [`${selector} is not on the page`];
  const box = node.getBoundingClientRect(), [left, top] = [x + box.left, y + box.top];
  if (top < -1 || left < -1 || top + box.height > height + 1 || left + box.width > width + 1) {
    const place = [left, top, left + box.width, top + box.height].map(Math.round);
    return [`${selector} is at ${place}, scrolled by ${scrollY}`];
  }
  const isCovered = [0.5, 0.05, 0.95].some((part) => {
    const above = document.elementFromPoint(box.left + part * box.width, box.top + part * box.height);
    return !above || !(node.contains(above) || above.contains(node));
  });
  return isCovered ? [`${selector} is covered`] : [];
})"""

# A locator would read the whole text of the frame each time.
PLACE = "document.querySelector('iframe').getBoundingClientRect().toJSON()"


class Screen:
    """A page in a window, or in the column of a chapter."""

    def __init__(self, tab: Any, page: Any, in_chapter: bool, path: Path) -> None:
        self.tab, self.in_chapter = tab, in_chapter
        tab.set_default_timeout(60_000)  # a busy machine may take its time
        if in_chapter:
            width = f"min({COLUMN}px, 100%)"
            text = "<p style='height: 500px'>text</p>"
            tab.set_content(
                f"<!DOCTYPE html><title>chapter</title><body style='margin: 0'>"
                f"<main style='width: {width}; margin: auto'>{text}{page._repr_html_()}{text}{text}</main>"
            )
            tab.add_script_tag(content="const DOCUMENTATION_OPTIONS = {};" + SITE_SCRIPT)
            self.frame = tab.frames[1]
            self.wait_for(lambda: not misfits(tab))
        else:
            page.save(path)
            tab.goto(path.as_uri())
            self.frame = tab.main_frame
        self.wait_for(lambda: self.frame.evaluate("document.querySelector('#app').ariaBusy !== 'true'"))

    def wait_for(self, met: Callable[[], Any]) -> bool:
        """Wait up to twenty seconds for a condition, and return whether it was met."""
        for _ in range(1000):
            if met():
                return True
            self.tab.wait_for_timeout(20)
        return False

    def hidden(self, selectors: tuple[str, ...]) -> list[str]:
        """Say why the element of a selector is not on screen as a whole, for those that are not."""
        box = self.tab.evaluate(PLACE) if self.in_chapter else {"x": 0, "y": 0}
        size = self.tab.viewport_size
        return self.frame.evaluate(HIDDEN, [selectors, box["x"], box["y"], size["width"], size["height"]])

    def is_cut(self) -> bool:
        """Return whether the page is wider than its window, or higher than its frame."""
        wide = self.frame.evaluate("document.documentElement.scrollWidth > innerWidth + 1")
        high = self.in_chapter and self.frame.evaluate("document.body.offsetHeight > innerHeight + 1")
        return wide or high

    def do(self, action: Action, by_touch: bool) -> bool:
        """Do an action as a reader would, who looks at the control; return False if it is not for this reader."""
        control = self.frame.locator(action.focus or action.control).first
        if by_touch:
            if action.tap is None:
                return False
            control = self.frame.locator(action.control).first
            control.scroll_into_view_if_needed()
            box = control.bounding_box()
            control.tap(position={"x": action.tap[0] * box["width"], "y": action.tap[1] * box["height"]})
        else:
            control.scroll_into_view_if_needed()
            control.focus()
            self.tab.keyboard.press(action.key)
        return True


# In CI every page is in a dark chapter, by keyboard, and on a phone, by touch; the nightly run has all combinations.
VIEWS = [
    (width, in_chapter, scheme, way)
    for (width, in_chapter), scheme, way in product(
        [(1280, False), (1280, True), (736, False), (390, False), (390, True)],
        ["light", "dark"],
        ["keyboard", "touch"],
    )
]
IN_CI = [(1280, True, "dark", "keyboard"), (390, False, "light", "touch")]


@pytest.mark.parametrize(("width", "in_chapter", "scheme", "way"), keep_in_ci(VIEWS, *IN_CI))
@pytest.mark.parametrize("name", ACTIONS)
def test_what_an_action_changes_is_on_screen(browser, tmp_path, name, width, in_chapter, scheme, way):
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme=scheme,
        has_touch=way == "touch",
        reduced_motion="reduce",
    )
    screen = Screen(context.new_page(), build(name), in_chapter, tmp_path / "page.html")
    found = []
    for place, action in enumerate(ACTIONS[name]):
        if not screen.do(action, way == "touch"):
            continue
        screen.wait_for(lambda action=action: not screen.hidden(action.shows) and not screen.is_cut())
        found += [f"{place} {action.control}: {part}" for part in screen.hidden(action.shows)]
        found += [f"{place} {action.control}: the page is cut"] * screen.is_cut()
    context.close()
    assert found == []


# Answers that the page does not await, such as the largest weights of a row, are delayed by six seconds.
LATE_LISTS = """(() => {
  const Real = Worker;
  window.Worker = class {
    constructor(url) {
      const worker = new Real(url);
      let delay = 0;
      worker.onmessage = (event) => setTimeout(() => this.onmessage(event), delay);
      this.postMessage = (message) => {
        delay = message.method === "topKeys" ? 6000 : 0;
        worker.postMessage(message);
      };
    }
  };
})()"""


def test_a_late_list_moves_nothing_off_the_screen(browser, tmp_path):
    context = browser.new_context(
        viewport={"width": 390, "height": HEIGHT}, has_touch=True, reduced_motion="reduce"
    )
    context.add_init_script(LATE_LISTS)
    screen = Screen(context.new_page(), build("map"), False, tmp_path / "page.html")
    shows = ACTIONS["map"][1].shows
    screen.do(ACTIONS["map"][1], by_touch=True)
    assert screen.wait_for(lambda: not screen.hidden(shows))
    assert screen.tab.locator(".top-keys li").count() == 0
    screen.tab.locator(".top-keys li").first.wait_for()
    assert screen.wait_for(lambda: not screen.hidden(shows))
    context.close()
