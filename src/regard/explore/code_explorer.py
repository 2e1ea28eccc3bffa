"""Explorer of a function call, line by line, and of three listings of attention."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError
from regard.explore.tracer import FunctionSource, Trace, trace_call
from regard.learn.examples import cat
from regard.learn.masks import create_causal_mask
from regard.pages.html import Page, build_page
from regard.render.text import escape_unprintable

OPERATION = "explore.code"


class ListingTab(NamedTuple):
    """A tab of the page: its name, its listing, the package the listing needs, a sentence, and where it starts."""

    name: str
    listing: str
    package: str
    about: str
    first_line: str


LISTING_TABS = (
    ListingTab(
        "NumPy",
        "numpy",
        "numpy",
        "Every step written out, with tables of numbers and nothing else.",
        "scores =",
    ),
    ListingTab(
        "PyTorch",
        "torch",
        "torch",
        "The same class as a part of a model. It also takes batches and many heads.",
        "scores =",
    ),
    ListingTab(
        "Built-in call",
        "builtin",
        "torch",
        "What real models call, and one more line for the weights.",
        "output =",
    ),
)


NOTE = "#:"


@dataclass(frozen=True)
class AnnotatedListing:
    """The code of a file in `listings/`, and the explanation of each line that has one, by line number from 1.

    In the file, lines that start with `#:` explain the line after them.
    """

    name: str
    code: str
    notes: dict[int, str]

    @property
    def lines(self) -> list[str]:
        """The lines of the code."""
        return self.code.splitlines()


@cache
def read_listing(name: str) -> AnnotatedListing:
    """Read a listing and its notes.

    >>> listing = read_listing("numpy")
    >>> listing.lines[0], listing.notes[1]
    ('import math', "Python's own mathematics. The only thing needed from it is the square root.")
    """
    file = resources.files("regard.explore").joinpath("listings", f"{name}.txt")
    lines: list[str] = []
    notes: dict[int, str] = {}
    pending: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith(NOTE):
            pending.append(line.strip().removeprefix(NOTE).strip())
            continue
        lines.append(line)
        if pending:
            notes[len(lines)] = " ".join(pending)
            pending = []
    return AnnotatedListing(name, "\n".join(lines) + "\n", notes)


def load_listing(listing: AnnotatedListing) -> Any:
    """Run the code of a listing, and return its function `attend(Q, K, V, mask=None)`: output and weights."""
    filename = f"<{listing.name} listing>"
    lines = listing.code.splitlines(keepends=True)
    # The tracer reads the source there.
    linecache.cache[filename] = (len(listing.code), None, lines, filename)
    module: dict[str, Any] = {"__name__": f"{listing.name}_listing"}
    exec(compile(listing.code, filename, "exec"), module)
    return module["attend"]


def code(
    function: Callable[..., Any] | None = None,
    *args: Any,
    notes: Mapping[int | str, str] | None = None,
    **kwargs: Any,
) -> Page:
    """Build a page that shows a call of `function(*args, **kwargs)` line by line, with the values.

    Without a function, the page shows attention written in NumPy, in PyTorch and as a built-in call, all three run on
    the example of the book. A click on a line explains it in plain words and shows the numbers that it produced.

    A function that is passed is called once and traced: every line, every iteration of a loop, every call of a function
    of the same module, and every value returned, yielded or raised. An exception ends the trace and is not raised
    again. Each line is explained by the comment beside or above it, a `def` by its docstring. The page keeps both ends
    of long arrays, and the first 2000 steps of long calls.

    Args:
        function: Function to call, written in Python. Default: the three listings.
        *args: Positional arguments of the call.
        notes: More explanations, by line number or by a part of the line.
        **kwargs: Keyword arguments of the call.

    Returns:
        The page.

    Raises:
        ArgumentError: If the function has no Python source, its body did not run, or a note matches no line.

    >>> from regard.explore import code
    >>> code()
    <page "Attention, line by line", ... kB: save(path) writes it>
    >>> from regard.learn import attention_by_loops, tiny_head
    >>> code(attention_by_loops, tiny_head.Q, tiny_head.K, tiny_head.V, notes={"dot = 0.0": "Start from nothing."})
    <page "Line by line", ... kB: save(path) writes it>
    """
    if function is None:
        if args or kwargs or notes:
            raise ArgumentError(
                OPERATION,
                received="arguments without a function",
                expected="a function and its arguments, or nothing for the example",
                hint="Pass the function first: code(function, *args).",
            )
        return _listings_page()
    trace = trace_call(OPERATION, function, args, kwargs)
    listings, places = _arrange_listings(trace.sources)
    line_notes = _collect_notes(trace, notes or {})
    run = {
        "name": "",
        "listings": [[escape_unprintable(source.name), _numbered_lines(source)] for source in listings],
        **_trace_payload(trace, places, line_notes),
    }
    tab = {"name": escape_unprintable(trace.name), "about": "", "start": None, "runs": [run]}
    return build_page("Line by line", "code", {"tabs": [tab], "tokens": None, "agreement": None})


def _listings_page() -> Page:
    """Build the page of the listings: a tab for each, with a run without a mask and one with a causal mask."""
    masks = {"no mask": None, "causal mask": create_causal_mask(len(cat.tokens))}
    tabs, results = [], []
    for tab in LISTING_TABS:
        listing = read_listing(tab.listing)
        about, runs = tab.about, []
        for run_name, mask in masks.items() if find_spec(tab.package) else ():
            arrays = [array for array in (cat.Q, cat.K, cat.V, mask) if array is not None]
            if tab.package == "torch":
                import torch

                arrays = [torch.tensor(np.array(array)) for array in arrays]
            attend = load_listing(listing)
            trace = trace_call(OPERATION, attend, arrays, {})
            runs.append({"name": run_name, **_listing_payload(listing, trace)})
            results.append([np.asarray(array) for array in attend(*arrays)])
        if not runs:
            about += f" {tab.package} is not installed here, so its lines have explanations but no numbers."
            runs = [{"name": "", **_listing_payload(listing, Trace(listing.name))}]
        start = next(i for i, line in enumerate(listing.lines, start=1) if tab.first_line in line)
        tabs.append({"name": tab.name, "about": about, "start": start, "runs": runs})
    record = {"tabs": tabs, "tokens": cat.tokens, "agreement": _describe_agreement(results)}
    return build_page("Attention, line by line", "code", record)


def _describe_agreement(results: list[list[Any]]) -> str | None:
    """Describe the largest difference between the results of the listings; each has two, without and with the mask."""
    if len(results) < 2 * len(LISTING_TABS):
        return None
    difference = max(
        float(np.abs(ours - theirs).max())
        for i in range(2)
        for other in results[2 + i :: 2]
        for ours, theirs in zip(results[i], other, strict=True)
    )
    exactly = "exactly" if difference == 0 else f"to within {difference:.1e}"
    return f"All three were run on these numbers when the page was made. They agree {exactly}."


def _listing_payload(listing: AnnotatedListing, trace: Trace) -> dict[str, Any]:
    """Return the whole listing with the notes on its lines, and the trace."""
    lines = [[i, line, listing.notes.get(i, "")] for i, line in enumerate(listing.lines, start=1)]
    notes = [listing.notes for _ in trace.sources]
    return {"listings": [["", lines]], **_trace_payload(trace, [0] * len(notes), notes)}


def _trace_payload(trace: Trace, places: list[int], line_notes: list[dict[int, str]]) -> dict[str, Any]:
    """Return what the page needs of a trace: for each function its listing and notes, the values and the steps."""
    return {
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
    }


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
        [number, escape_unprintable(line), ""]
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
                expected="the number of a displayed line, or part of its text",
                hint="Lines are numbered as in the file; docstrings are not shown.",
            )
        for i, number in matches:
            collected[i][number] = escape_unprintable(note)
    return collected
