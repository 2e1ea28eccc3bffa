"""The code explorer: the tracer on functions of every kind, and the page in a real browser."""

from __future__ import annotations

import functools
import json
import linecache
import re
import sys
from collections import namedtuple

import numpy as np
import pytest

import regard
from regard import explore
from regard.explore import tracer
from regard.explore.tracer import take_snapshot, trace_call
from regard.learn import CheckedAttention, attention_by_loops, cat, tiny_head
from regard.render.text import escape_unprintable, format_number
from tests.helpers.pages import HOSTILE

slow = pytest.mark.slow  # starts a browser


def trace(function, *args, **kwargs):
    return trace_call("test", function, args, kwargs)


def story(run) -> list[str]:
    """Format each step: kind, text of the line, changed values, result."""
    found = []
    for step in run.steps:
        listing = run.sources[step.source]
        changed = ", ".join(
            f"{name}={'gone' if value is None else run.values[value].get('text', '…')}"
            for name, value in step.changed.items()
        )
        result = "" if step.result is None else f" -> {run.values[step.result].get('text', '…')}"
        text = listing.lines[step.line].split("#")[0].strip()
        found.append(
            f"{step.kind} {text} [{changed}]{result}{f' ! {step.exception}' if step.exception else ''}"
        )
    return found


# -- What is recorded -------------------------------------------------------------------------------------


def add_up(numbers):
    total = 0
    for x in numbers:
        total += x
    return total


def test_a_line_has_the_values_it_produced():
    assert story(trace(add_up, [3, 4])) == [
        "enter def add_up(numbers): [numbers=…]",
        "line total = 0 [total=0]",
        "line for x in numbers: [x=3]",
        "line total += x [total=3]",
        "line for x in numbers: [x=4]",
        "line total += x [total=7]",
        "line for x in numbers: []",
        "return return total [] -> 7",
    ]


def test_loop_iterations_are_counted():
    def board(n):
        cells = 0
        for i in range(n):
            for j in range(i):
                cells += i * j
            while cells % 2:
                cells += 1
        return cells

    run = trace(board, 4)
    for step in run.steps:
        times = [time for _, time in step.iterations]
        names = [run.loops[number][0] for number, _ in step.iterations]
        values = {name: run.values[step.changed[name]]["text"] for name in ("i", "j") if name in step.changed}
        if "i" in values:
            assert (names, times) == ([("i",)], [values["i"] + 1])
        if "j" in values:
            assert (names, times[1]) == ([("i",), ("j",)], values["j"] + 1)
    assert [total for names, total in run.loops if names == ("i",)] == [4]
    assert [total for names, total in run.loops if names == ("j",)] == [1, 2, 3]
    assert run.steps[-1].iterations == () and run.steps[-2].iterations == ()  # the loop is over


def test_leaving_a_loop_ends_its_iterations():
    def find(row, wanted):
        for x in row:
            if x == wanted:
                break
        else:
            return None
        for x in row:
            return x

    run = trace(find, [1, 2, 3], 2)
    by_line = {run.sources[0].lines[step.line].strip(): step for step in run.steps}
    assert by_line["break"].iterations == ((0, 2),)
    assert run.steps[-1].iterations == ((1, 1),)
    run = trace(find, [1], 2)
    assert story(run)[-1] == "return return None [] -> None" and run.steps[-1].iterations == ()


def test_later_mutation_does_not_change_earlier_values():
    def fill(n):
        row = np.zeros(n)
        listed = [0] * n
        row[1] = 5.0
        listed[0] = 7
        return row

    run = trace(fill, 2)
    rows = [run.values[s.changed["row"]]["cells"] for s in run.steps if "row" in s.changed]
    assert rows == [[[0.0, 0.0]], [[0.0, 5.0]]]
    lists = [run.values[s.changed["listed"]]["cells"] for s in run.steps if "listed" in s.changed]
    assert lists == [[[0, 0]], [[7, 0]]]


class Doubling:
    """Twice a number."""

    def __init__(self, factor=2):
        self.factor = factor

    def __call__(self, x):
        return self.times(x)

    def times(self, x):
        """The number, so many times."""
        return helper(x) * self.factor


def helper(x):
    return float(x)


def test_calls_of_the_same_module_are_followed():
    run = trace(Doubling(3).times, 4)
    assert story(run) == [
        "enter def times(self, x): [self=…, x=4]",
        "call return helper(x) * self.factor []",
        "enter def helper(x): [x=4]",
        "return return float(x) [] -> 4.0",
        "return return helper(x) * self.factor [] -> 12.0",
    ]
    assert [step.depth for step in run.steps] == [0, 0, 1, 1, 0]
    assert run.values[run.steps[0].changed["self"]]["parts"] == [["factor", {"type": "int", "text": 3}]]


@pytest.mark.parametrize(
    ("function", "args", "first"),
    [
        (Doubling(), (1,), "def __call__(self, x):"),
        (Doubling, (), "def __init__(self, factor=2):"),
        (functools.partial(add_up, [1]), (), "def add_up(numbers):"),
        (functools.lru_cache(add_up), ((1, 2),), "def add_up(numbers):"),
        (lambda x: x + 1, (1,), "(lambda x: x + 1, (1,)"),
    ],
)
def test_callables_of_every_kind(function, args, first):
    run = trace(function, *args)
    assert run.sources[0].lines[run.sources[0].line].strip().startswith(first)
    assert run.steps[-1].kind == "return"


def test_recursive_calls_have_separate_values():
    def factorial(n):
        if n == 0:
            return 1
        return n * factorial(n - 1)

    run = trace(factorial, 3)
    assert len({step.frame for step in run.steps}) == 4
    assert max(step.depth for step in run.steps) == 3
    assert [run.values[s.result]["text"] for s in run.steps if s.kind == "return"] == [1, 1, 2, 6]
    assert len(run.sources) == 1


def test_a_function_inside_another_is_shown_once():
    def outer(n):
        def inner(k):
            """Never shown."""
            # One more.
            return k + n

        return inner(1)

    run = trace(outer, 2)
    assert [listing.name.split(".")[-1] for listing in run.sources] == ["outer", "inner"]
    assert run.name.endswith("outer")
    page = explore.code(outer, 2).html
    assert page.count("return k + n") == 1 and "One more." in page


def test_generators():
    def pairs(n):
        for i in range(n):
            got = yield i * i
            del got

    def consumer():
        return sum(x for x in pairs(2))

    assert story(trace(pairs, 2)) == [
        "enter def pairs(n): [n=2]",
        "line for i in range(n): [i=0]",
        "yield got = yield i * i [] -> 0",
        "line got = yield i * i [got=None]",
        "line del got [got=gone]",
        "line for i in range(n): [i=1]",
        "yield got = yield i * i [] -> 1",
        "line got = yield i * i [got=None]",
        "line del got [got=gone]",
        "return for i in range(n): [] -> None",
    ]
    run = trace(consumer)
    assert [s.kind for s in run.steps].count("yield") == 2
    assert run.values[run.steps[-1].result]["text"] == 1


def test_an_endless_generator_is_stopped(monkeypatch):
    monkeypatch.setattr(tracer, "MAX_STEPS", 50)

    def forever():
        while True:
            yield 1

    run = trace(forever)
    assert len(run.steps) == 50
    assert run.truncated == "The trace ends here, after 50 steps; the call continued."


def test_a_long_call_is_truncated_and_completes(monkeypatch):
    monkeypatch.setattr(tracer, "MAX_STEPS", 20)
    done = []

    def long(n):
        for i in range(n):
            done.append(i)

    run = trace(long, 500)
    assert len(run.steps) == 20 and len(done) == 500
    monkeypatch.setattr(tracer, "MAX_STEPS", 2000)
    monkeypatch.setattr(tracer, "MAX_TRACE_CHARACTERS", 100)
    assert len(trace(long, 500).steps) < 20
    assert "The trace ends here" in explore.code(long, 500).html


def test_an_exception_ends_the_trace_at_its_line():
    def careless(x):
        y = 1 / x
        return y

    def caller(x):
        return careless(x)

    run = trace(caller, 0)
    assert story(run)[-1] == "raise y = 1 / x [] ! ZeroDivisionError: division by zero"
    assert [step.kind for step in run.steps].count("raise") == 1


def deeper(n):
    return deeper(n + 1)


def test_endless_recursion_is_reported():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(500)  # other libraries may have raised it
    try:
        run = trace(deeper, 0)
    finally:
        sys.setrecursionlimit(before)
    assert "RecursionError" in (run.truncated or story(run)[-1])


def test_the_trace_continues_after_a_caught_exception():
    def careful(row):
        try:
            first = row[0]
        except IndexError as error:
            first = str(error)
        return first

    lines = story(trace(careful, []))
    assert lines[2] == "raise first = row[0] [] ! IndexError: list index out of range"
    assert lines[-1] == "return return first [] -> 'list index out of range'"


def test_the_end_of_an_iterator_is_not_an_exception():
    class Two:
        def __init__(self):
            self.left = 2

        def __iter__(self):
            return self

        def __next__(self):
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return self.left

    def through(two):
        for x in two:
            x + 1

    run = trace(through, Two())
    assert run.steps[-1].kind == "return" and run.steps[-1].frame == 0
    assert run.steps[-1].iterations == ()  # the loop is over


def test_a_statement_is_one_step_however_many_lines():
    # fmt: off
    def spread(a, b):
        c = max(
            a,
            b,
        )
        for x in (c, a): c += x  # noqa: E701
        with np.errstate(
            over="ignore"
        ):
            return c
    # fmt: on

    run = trace(spread, 1, 2)
    assert story(run) == [
        "enter def spread(a, b): [a=1, b=2]",
        "line c = max( [c=2]",
        "line for x in (c, a): c += x [c=5, x=1]",
        "line with np.errstate( []",
        "return return c [] -> 5",
    ]
    ends = run.sources[0].ends
    assert [ends[step.line] - step.line for step in run.steps] == [0, 3, 0, 2, 0]


def test_comprehensions_are_one_step_and_their_calls_are_followed():
    def squares(n):
        return [helper(i) for i in range(n)]

    run = trace(squares, 2)
    assert [step.kind for step in run.steps] == [
        "enter",
        "call",
        "enter",
        "return",
        "call",
        "enter",
        "return",
        "return",
    ]


def test_the_previous_trace_function_is_restored():
    seen = []

    def tracer(frame, event, arg):
        seen.append(event)

    def stop():
        raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        trace(add_up, [1])
        assert sys.gettrace() is tracer
        trace(lambda: 1 / 0)
        assert sys.gettrace() is tracer
        with pytest.raises(KeyboardInterrupt):
            trace(stop)
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert seen


def test_a_cell_of_a_notebook():
    lines = ["def cell(x):\n", "    y = x + 1  # one more\n", "    return y\n"]
    linecache.cache["<cell 1>"] = (len("".join(lines)), None, lines, "<cell 1>")
    names: dict = {}
    exec(compile("".join(lines), "<cell 1>", "exec"), names)
    run = trace(names["cell"], 1)
    assert story(run)[1] == "line y = x + 1 [y=2]"
    assert run.sources[0].notes[2] == "one more"
    # A cell with a line that is not Python still has its lines.
    linecache.cache["<cell 1>"] = (1, None, [*lines, "%matplotlib inline\n"], "<cell 1>")
    run = trace(names["cell"], 1)
    assert list(run.sources[0].lines.values()) == [line.rstrip() for line in lines]
    assert story(run)[-1] == "return return y [] -> 2"
    del linecache.cache["<cell 1>"]


# -- Values -----------------------------------------------------------------------------------------------


class Unwilling:
    """Raises whenever it is inspected."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __repr__(self):
        raise RuntimeError

    __eq__ = __hash__ = __bool__ = __len__ = __repr__  # type: ignore[assignment]


def test_any_value_has_a_snapshot():
    class Slots:
        __slots__ = ("x",)

    cyclic: list = []
    cyclic.append(cyclic)
    point = namedtuple("point", "x y")(1, 2.5)
    for value, want in [
        (Unwilling(), {"type": "Unwilling", "text": "cannot be shown"}),
        ({"a": Unwilling()}, None),
        (cyclic, None),
        (Slots(), {"type": "Slots", "text": "…"}),
        (10**5000, {"type": "int", "text": "an int of 16610 bits"}),
        (10**6, {"type": "int", "text": "1000000"}),
        (True, {"type": "bool", "text": "True"}),
        ("x" * 500, None),
        ("\u202eab\0", {"type": "str", "text": "'\\u202eab\\x00'"}),
        (range(3), {"type": "range", "text": "range(0, 3)"}),
        (np.int64(4), {"type": "int64", "text": 4}),
        (np.array([True]), {"type": "bool", "shape": [1], "cells": [["True"]]}),
        (np.zeros((0, 3)), {"type": "float64", "shape": [0, 3], "cells": []}),
        (np.array([{}, "a"], dtype=object), {"type": "object", "shape": [2], "cells": [["dict", "'a'"]]}),
        ([[1, 2], [3, 4.5]], {"type": "list", "shape": [2, 2], "cells": [[1, 2], [3, 4.5]]}),
        ([[1, 2], [3]], None),
        ([], None),
        ((), None),
        (point, None),
        (np, {"type": "module", "text": "numpy"}),
        (helper, {"type": "function", "text": "helper"}),
        (Doubling, {"type": "type", "text": "Doubling"}),
    ]:
        record = take_snapshot(value)
        assert want is None or record == want
        assert len(str(record)) < 2000
    assert [name for name, _ in take_snapshot(point)["parts"]] == ["x", "y"]


def test_long_values_are_truncated_and_counted():
    matrix = take_snapshot(np.arange(10_000).reshape(100, 100))
    assert matrix["shape"] == [100, 100] and len(matrix["cells"]) == 8
    assert matrix["cells"][0] == [0, 1, 2, 3, 4, 5, "…", 99]
    assert matrix["cells"][6] == ["…"] * 8 and matrix["cells"][7][-1] == 9999
    assert take_snapshot(np.arange(24.0).reshape(2, 3, 4))["cells"] == np.arange(12.0).reshape(3, 4).tolist()
    many = take_snapshot(list(range(100_000)))
    assert len(many["parts"]) == 16 and many["left_out"] == 100_000 - 16


def test_tensors_have_snapshots():
    torch = pytest.importorskip("torch")
    value = torch.tensor([[0.5, 1.5]], dtype=torch.bfloat16, requires_grad=True)
    assert take_snapshot(value) == {"type": "torch.bfloat16", "shape": [1, 2], "cells": [[0.5, 1.5]]}
    assert take_snapshot(torch.tensor(3)) == {"type": "torch.int64", "text": 3}


# -- Notes on lines --------------------------------------------------------------------------------------


def commented(n):
    """What it is for,
    in a sentence.

    And more.
    """
    # Start low,
    # and count.
    total = 0
    # Round and round.
    for i in range(n):
        total += i
        total += 1  # one extra
    total -= 1  # pragma: no cover
    return Doubling().times(total)


def notes_of(page) -> dict[str, str]:
    data = json.loads(re.search(r'id="record">(.*?)<', page.html, re.DOTALL)[1])["tabs"][0]["runs"][0]
    lines = {(i, n): text.strip() for i, (_, every) in enumerate(data["listings"]) for n, text, _ in every}
    functions = [(data["functions"][i], line) for _, i, line, *_ in data["steps"]]
    return {lines[each["place"], line]: each["notes"].get(str(line)) for each, line in functions}


def test_comments_and_docstrings_explain():
    notes = notes_of(explore.code(commented, 1))
    assert notes["def commented(n):"] == "What it is for, in a sentence."
    assert notes["total = 0"] == "Start low, and count."
    assert notes["for i in range(n):"] == notes["total += i"] == "Round and round."
    assert notes["total += 1  # one extra"] == "one extra"
    assert notes["total -= 1  # pragma: no cover"] is None
    assert notes["return Doubling().times(total)"] == "The number, so many times."  # what it calls


def test_notes_are_added():
    first = commented.__code__.co_firstlineno
    notes = notes_of(explore.code(commented, 1, notes={"total +=": "grows", first: "begins"}))
    assert notes["total += i"] == notes["total += 1  # one extra"] == "grows"
    assert notes["def commented(n):"] == "begins"
    for where in ("never written", 1, "What it is for"):
        with pytest.raises(regard.ArgumentError, match=r"a note on .*docstrings are not shown"):
            explore.code(commented, 1, notes={where: "?"})


# -- Refused arguments ------------------------------------------------------------------------------------


async def later():
    return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (max, "the function max; expected a synchronous function written in Python"),
        (later, "the function later"),
        (3, "int 3"),
        (
            eval("lambda x: x"),
            "whose source is not available; expected a function from a file or a notebook",
        ),
    ],
)
def test_unsupported_functions_raise(function, words):
    with pytest.raises(regard.ArgumentError, match=re.escape(words)):
        explore.code(function, 1)


def test_wrong_arguments_raise_the_error_of_the_call():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        explore.code(add_up)
    with pytest.raises(regard.ArgumentError, match="arguments without a function"):
        explore.code(None, 1)
    cached = functools.lru_cache(add_up)
    cached((1,))
    with pytest.raises(regard.ArgumentError, match="whose body did not run"):
        explore.code(cached, (1,))


# -- The page ---------------------------------------------------------------------------------------------


# Steps through the whole trace in the page itself, one call instead of hundreds.
HARVEST = """() => {
  const text = (node) => node.textContent;
  const valueText = (node) => node.querySelector(".matrix")
    ? [...node.querySelectorAll(".matrix")].map((m) => [...m.rows].map((r) => [...r.cells].map(text)))
    : [...node.querySelectorAll(".text")].map(text);
  const found = [];
  for (;;) {
    found.push({
      line: Number(document.querySelector("[aria-current] .no").textContent),
      where: document.querySelector("#where").textContent,
      fresh: Object.fromEntries(
        [...document.querySelectorAll(".fresh")].map((v) => [text(v.querySelector("strong")), valueText(v)])),
      other: [...document.querySelectorAll(".others strong")].map(text),
    });
    if (document.querySelector("#next").disabled) return found;
    document.querySelector("#next").click();
  }
}"""


def cells(array) -> list:
    return [[[format_number(x) for x in row] for row in np.atleast_2d(array)]]


@slow
def test_the_steps_of_the_class_show_every_number(show):
    attention = CheckedAttention(4)
    tab = show(explore.code(attention.forward, cat.Q, cat.K, cat.V))
    seen = tab.evaluate(HARVEST)
    scores = attention.compute_scores(cat.Q, cat.K)
    output, weights = attention(cat.Q, cat.K, cat.V)
    own = [step for step in seen if step["where"] == "forward"]
    produced = {name: value for step in own[1:] for name, value in step["fresh"].items()}
    assert seen[0]["fresh"]["Q"] == cells(cat.Q)
    assert produced["scores"] == cells(scores)
    assert produced["scaled"] == cells(scores / 2)
    assert produced["weights"] == cells(weights)
    assert produced["returns"] == [*cells(output), *cells(weights)]
    inner = {
        name: v for s in seen if s["where"] == "forward › compute_weights" for name, v in s["fresh"].items()
    }
    exponentials = np.exp(scores / 2 - (scores / 2).max(axis=1, keepdims=True))
    assert inner["parts"] == cells(exponentials)
    names = ["mask", "Q", "K", "V", "scores", "scaled", "weights", "self"]
    assert seen[-1]["other"] == names


@slow
def test_the_loops_iteration_by_iteration(show):
    tab = show(explore.code(attention_by_loops, tiny_head.Q, tiny_head.K, tiny_head.V))
    seen = tab.evaluate(HARVEST)
    scores = tiny_head.Q @ tiny_head.K.T
    dots = {}
    for step in seen:
        found = re.search(r"i = (\d) \d of 2 › j = (\d) (\d) of 3(?! ›)", step["where"])
        if found and "scores" in step["fresh"]:
            i, j = int(found[1]), int(found[2])
            assert int(found[3]) == j + 1
            dots[i, j] = step["fresh"]["scores"][0][i][j]
    assert dots == {(i, j): format_number(scores[i, j] / np.sqrt(2)) for i in range(2) for j in range(3)}


@slow
def test_moving_by_button_slider_and_keyboard(show):
    tab = show(explore.code(attention_by_loops, tiny_head.Q, tiny_head.K, tiny_head.V))
    count, where = tab.locator("#count"), tab.locator("#where")
    total = int(count.text_content().split()[-1])
    assert tab.locator("#back").is_disabled()
    tab.keyboard.press("ArrowRight")
    assert count.text_content() == f"step 2 of {total}"
    assert "calls _read_head" in tab.locator("#event").text_content()
    assert "calls _read_head" in tab.get_by_role("status").text_content()
    tab.keyboard.press("ArrowRight")
    assert where.text_content() == "attention_by_loops › _read_head"
    tab.keyboard.press("ArrowLeft")
    tab.locator("#step-over").click()
    assert where.text_content() == "attention_by_loops"
    assert tab.locator(".fresh strong").all_text_contents() == ["Q", "K", "V", "attend"]
    slider = tab.get_by_role("slider", name="Step")
    slider.focus()
    tab.keyboard.press("End")
    assert count.text_content() == f"step {total} of {total}"
    assert slider.get_attribute("aria-valuetext").startswith(f"step {total} of {total}, line ")
    assert tab.locator("#step-over").is_disabled() and tab.locator("#next").is_disabled()
    tab.keyboard.press("Home")
    assert tab.locator("#next-iteration").is_disabled()
    while not tab.locator("#next-iteration").is_enabled():
        tab.locator("#step-over").click()
    assert where.text_content() == "attention_by_loops › i = 0 1 of 2"
    tab.locator("#next-iteration").click()
    assert where.text_content() == "attention_by_loops › i = 1 2 of 2"
    tab.locator("#next-iteration").click()
    assert where.text_content() == "attention_by_loops"
    assert "continues at line" in tab.locator("#event").text_content()  # the loop is over
    line = tab.locator(".line", has_text="for i in range(n_q):").first
    line.click()
    assert tab.locator("#visits").text_content().startswith("Time 1 of 3 on this line")
    line.click()
    assert where.text_content() == "attention_by_loops › i = 1 2 of 2"
    tab.keyboard.press("End")
    marked = tab.locator("[aria-current]").bounding_box()
    box = tab.locator("#listing").bounding_box()
    assert box["y"] <= marked["y"] <= box["y"] + box["height"] - marked["height"]


@slow
def test_entries_that_changed_are_marked(show):
    def fill(n):
        row = np.zeros((2, n))
        row[1, 2] = 5.0
        return row

    tab = show(explore.code(fill, 3))
    for want in (0, 0, 1):
        assert tab.locator(".entry.new").count() == want
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#result .matrix").count() == 1


def hostile_source():
    # </script><script>alert(1)</script> <img src=x onerror=alert(1)>
    text = "<!--<script>${alert(1)}"  # '"`&lt;b&gt;
    return {text: HOSTILE, "</script>": text}


@slow
def test_hostile_source_and_values_are_text(show):
    def meet(tokens, **named):
        for token in tokens:
            held = {token: token}
        raise ValueError(held, "<img src=x onerror=alert(1)>")

    tab = show(explore.code(hostile_source, notes={"return": HOSTILE[0]}))
    assert HOSTILE[0] in tab.locator("#listing").text_content()
    tab.evaluate(HARVEST)
    assert tab.locator("#note").text_content() == HOSTILE[0]
    tab = show(explore.code(meet, HOSTILE, **{token: token for token in HOSTILE}))
    seen = tab.evaluate(HARVEST)
    shown = [step["fresh"]["token"] for step in seen if "token" in step["fresh"]]
    assert shown == [[escape_unprintable(repr(token))] for token in HOSTILE]
    assert "raises ValueError" in tab.locator("#event").text_content()
    assert "<img src=x" in tab.locator("#event").text_content()
    assert tab.locator("script").count() == 2 and tab.locator("img").count() == 0


@slow
def test_nonfinite_values_and_truncation_are_shown(show, monkeypatch):
    monkeypatch.setattr(tracer, "MAX_STEPS", 4)

    def endless():
        row = np.array([np.inf, -np.inf, np.nan])
        x = -np.inf
        for _ in range(9):
            x = x + 1
        return row

    tab = show(explore.code(endless))
    seen = tab.evaluate(HARVEST)
    assert seen[1]["fresh"]["row"] == [[["inf", "-inf", "nan"]]]
    assert seen[2]["fresh"]["x"] == ["-inf"]
    assert (
        tab.locator("#truncated").text_content() == "The trace ends here, after 4 steps; the call continued."
    )
