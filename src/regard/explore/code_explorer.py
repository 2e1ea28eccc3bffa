"""Explorer of a function call, line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from regard.errors import ArgumentError
from regard.explore.source import FunctionSource
from regard.explore.tracer import Trace, trace_call
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import cat
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

OPERATION = "explore.code"


def code(
    function: Callable[..., Any] | None = None,
    *args: Any,
    notes: Mapping[int | str, str] | None = None,
    **kwargs: Any,
) -> Page:
    """Build a page that steps through a call of `function(*args, **kwargs)` line by line, with the values.

    The function is called once and traced: every line, every iteration of a loop, every call of a function of the same
    module, and every value returned, yielded or raised. An exception ends the trace and is not raised again. Each line
    is explained by the comment beside or above it, a `def` by its docstring. Of long arrays the page keeps both ends,
    of long calls the first 2000 steps.

    Args:
        function: Function to call, written in Python. Default: the book's attention class on the book's example.
        *args: Positional arguments of the call.
        notes: More explanations, by line number or by a part of the line.
        **kwargs: Keyword arguments of the call.

    Returns:
        The page.

    Raises:
        ArgumentError: If the function has no Python source, no line of it ran, or a note matches no line.

    >>> from regard.explore import code
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
    trace = trace_call(OPERATION, function, args, kwargs)
    listings, places = _arrange_listings(trace.sources)
    line_notes = _collect_notes(trace, notes or {})
    return build_page(
        "Line by line",
        "code",
        {
            "name": escape_unprintable(trace.name),
            "listings": [[escape_unprintable(source.name), _numbered_lines(source)] for source in listings],
            "functions": [
                {
                    "name": escape_unprintable(source.name),
                    "place": places[i],
                    "ends": source.ends,
                    "notes": line_notes[i],
                }
                for i, source in enumerate(trace.sources)
            ],
            "values": trace.values,
            "loops": trace.loops,
            "truncated": trace.truncated,
            "steps": [
                [step.kind, step.source, step.line, step.frame, step.depth]
                + [step.changed, step.produced, step.iterations, step.result, step.exception]
                for step in trace.steps
            ],
        },
    )


def _arrange_listings(sources: list[FunctionSource]) -> tuple[list[FunctionSource], list[int]]:
    """Return the sources to list, in file order, and for each source the index of the listing that contains it.

    A nested function is listed inside the outer one only.
    """

    def contains(outer: FunctionSource, inner: FunctionSource) -> bool:
        return outer.file == inner.file and outer.line < inner.line <= max(outer.lines)

    outermost = [source for source in sources if not any(contains(other, source) for other in sources)]
    root_file = outermost[0].file
    listings = sorted(outermost, key=lambda source: (root_file != source.file, source.file, source.line))
    return listings, [
        next(i for i, listing in enumerate(listings) if listing is source or contains(listing, source))
        for source in sources
    ]


def _numbered_lines(source: FunctionSource) -> list[list[Any]]:
    text = textwrap.dedent("\n".join(line.expandtabs() for line in source.lines.values()))
    return [
        [number, escape_unprintable(line)]
        for number, line in zip(source.lines, text.split("\n"), strict=True)
    ]


def _collect_notes(trace: Trace, notes: Mapping[int | str, str]) -> list[dict[int, str]]:
    """Return the notes on the lines of each source: the caller's, the comments, or the docstring of a callee."""
    collected = [
        {line: escape_unprintable(text) for line, text in source.notes.items()} for source in trace.sources
    ]
    for step, following in zip(trace.steps, trace.steps[1:], strict=False):
        callee = trace.sources[following.source]
        if step.kind == "call" and following.kind == "enter" and callee.line in callee.notes:
            collected[step.source].setdefault(step.line, collected[following.source][callee.line])
    for where, note in notes.items():
        matches = [
            (i, source.starts.get(number, number))
            for i, source in enumerate(trace.sources)
            for number, line in source.lines.items()
            if number == where or (isinstance(where, str) and where in line)
        ]
        if not matches:
            raise ArgumentError(
                OPERATION,
                received=f"a note on {where!r}",
                expected="the number of a line that is shown, or a part of one",
                hint="Line numbers are those of the file; docstrings are not shown.",
            )
        for i, number in matches:
            collected[i][number] = escape_unprintable(note)
    return collected
