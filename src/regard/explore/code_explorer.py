"""A run of the reader's own function, line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from regard.errors import ArgumentError
from regard.explore.source import Listing
from regard.explore.tracer import Run, record
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import cat
from regard.pages.html import Page, page
from regard.render.text import escape_unprintable

OPERATION = "explore.code"


def code(
    function: Callable[..., Any] | None = None,
    *args: Any,
    notes: Mapping[int | str, str] | None = None,
    **kwargs: Any,
) -> Page:
    """A page that goes through a run of `function(*args, **kwargs)` line by line, with the values each line produced.

    The function is really called, once, and what happened is written down: every line, every time round a loop, every
    call of a function of the same module, what is returned, yielded or raised. An exception ends the walk and is not
    passed on. Without a function, the book's class on the book's example. Each line is explained by the comment
    beside or above it, a `def` by its docstring; `notes` says more, by line number or by a piece of the line.
    Of long arrays the ends are kept, of long runs the first 2000 steps.

    >>> code()
    <page "Line by line", ... kB: save(path) writes it>
    >>> from regard.learn import attention_by_loops, tiny_head
    >>> code(attention_by_loops, tiny_head.Q, tiny_head.K, tiny_head.V, notes={"dot = 0.0": "Start from nothing."})
    <page "Line by line", ... kB: save(path) writes it>
    """
    if function is None:
        if args or kwargs:
            raise ArgumentError(
                OPERATION,
                received="arguments without a function",
                expected="a function and its arguments, or nothing for the example",
                hint="Pass the function first: code(function, *args).",
            )
        function, args = ScaledDotProductAttention(d_k=4).forward, (cat.Q, cat.K, cat.V)
    run = record(OPERATION, function, args, kwargs)
    shown, place = _shown(run.listings)
    said = _said(run, notes or {})
    return page(
        "Line by line",
        "code.js",
        {
            "name": escape_unprintable(run.name),
            "listings": [[escape_unprintable(each.name), _lines(each)] for each in shown],
            "functions": [
                {
                    "name": escape_unprintable(each.name),
                    "place": place[i],
                    "ends": each.ends,
                    "notes": said[i],
                }
                for i, each in enumerate(run.listings)
            ],
            "values": run.values,
            "loops": run.loops,
            "cut": run.cut,
            "steps": [
                [step.kind, step.listing, step.line, step.frame, step.depth]
                + [step.changed, step.produced, step.rounds, step.result, step.says]
                for step in run.steps
            ],
        },
    )


def _shown(listings: list[Listing]) -> tuple[list[Listing], list[int]]:
    """The listings to show, in the order of their file, and for each listing in which of them it stands.

    A function inside another is shown there, and not once more.
    """

    def holds(outer: Listing, inner: Listing) -> bool:
        return outer.file == inner.file and outer.line < inner.line <= max(outer.lines)

    tops = [each for each in listings if not any(holds(other, each) for other in listings)]
    shown = sorted(tops, key=lambda each: (tops[0].file != each.file, each.file, each.line))
    return shown, [
        next(i for i, top in enumerate(shown) if top is each or holds(top, each)) for each in listings
    ]


def _lines(listing: Listing) -> list[list[Any]]:
    text = textwrap.dedent("\n".join(line.expandtabs() for line in listing.lines.values()))
    return [
        [number, escape_unprintable(line)]
        for number, line in zip(listing.lines, text.split("\n"), strict=True)
    ]


def _said(run: Run, notes: Mapping[int | str, str]) -> list[dict[int, str]]:
    """What is said of each line of each listing: the reader's notes, its comments, or what it calls."""
    said = [{line: escape_unprintable(text) for line, text in each.notes.items()} for each in run.listings]
    for step, following in zip(run.steps, run.steps[1:], strict=False):
        called = run.listings[following.listing]
        if step.kind == "call" and following.kind == "enter" and called.line in called.notes:
            said[step.listing].setdefault(step.line, said[following.listing][called.line])
    for where, text in notes.items():
        found = [
            (i, each.starts.get(line, line))
            for i, each in enumerate(run.listings)
            for line, written in each.lines.items()
            if line == where or (isinstance(where, str) and where in written)
        ]
        if not found:
            raise ArgumentError(
                OPERATION,
                received=f"a note on {where!r}",
                expected="the number of a line that is shown, or a piece of one",
                hint="Lines have the numbers of their file; docstrings are not shown.",
            )
        for i, line in found:
            said[i][line] = escape_unprintable(text)
    return said
