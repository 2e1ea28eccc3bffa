"""A function as it is written: its lines, which of them are one statement, its loops, and what its comments say."""

from __future__ import annotations

import ast
import io
import linecache
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

NO_WORDS = ("noqa", "type:", "pragma", "fmt:", "mypy:", "ruff:")


@dataclass(frozen=True)
class Loop:
    """A `for` or `while`: the line of its head, the first and the last of its body, the names it gives values to."""

    line: int
    body: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Listing:
    """The source of one function, by the line numbers of its file.

    `starts` leads from each line to the first of its statement, `ends` from there to the last, `assigns` to the names
    it gives values to; `withs` has the body of each `with`. `notes` has what the comments say, and for the line of the
    `def` what the docstring opens with. The docstring's lines are left out.
    """

    file: str
    name: str
    line: int
    lines: dict[int, str]
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    assigns: dict[int, list[str]] = field(default_factory=dict)
    withs: dict[int, range] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)


def listing(code: CodeType, module: dict[str, Any]) -> Listing | None:
    """The listing of a code object; None where its source is nowhere to be had."""
    every = tuple(linecache.getlines(code.co_filename, module))
    first = code.co_firstlineno
    if first > len(every):
        return None
    node = _node(every, code)
    if node is None:
        block = every[first - 1 : max(line or first for *_, line in code.co_lines())]
        return Listing(
            code.co_filename, code.co_qualname, first, dict(enumerate(map(str.rstrip, block), first))
        )
    last = node.end_lineno or first
    lines = {i: every[i - 1].rstrip() for i in range(first, last + 1)}
    doc = _docstring(node)
    if doc is not None:
        for i in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1):
            lines.pop(i, None)
    found = Listing(code.co_filename, code.co_qualname, node.lineno, lines, loops=tuple(_loops(node)))
    comments = _comments(every)
    statements = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
    for each in sorted(statements, key=lambda each: (each.lineno, -(each.end_lineno or 0))):
        end = _head_end(each)
        found.ends[each.lineno] = end
        found.starts.update(dict.fromkeys(range(each.lineno, end + 1), each.lineno))
        found.assigns[each.lineno] = [
            name.id
            for head in _heads(each)
            for name in ast.walk(head)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
        if isinstance(each, ast.With | ast.AsyncWith):
            found.withs[each.lineno] = range(end + 1, (each.end_lineno or end) + 1)
        note = _note(each.lineno, end, comments, every)
        if note and each is not node:  # what is said of a loop holds for the lines in it
            found.notes.update(dict.fromkeys(range(each.lineno, (each.end_lineno or end) + 1), note))
    said = ast.get_docstring(node) if doc is not None and not isinstance(node, ast.Lambda) else None
    found.notes.pop(node.lineno, None)
    if said:
        found.notes[node.lineno] = " ".join(said.split("\n\n")[0].split())
    return found


@lru_cache(maxsize=4)
def _tree(every: tuple[str, ...]) -> ast.Module:
    try:
        return ast.parse("".join(every))
    except (SyntaxError, ValueError):  # a cell with a line that is not Python
        return ast.Module([], [])


def _node(
    every: tuple[str, ...], code: CodeType
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None:
    for node in ast.walk(_tree(every)):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            return node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
        return body[0] if isinstance(getattr(body[0].value, "value", None), str) else None
    return None


def _heads(node: ast.stmt) -> list[ast.AST]:
    """The parts of a statement without the statements in it."""
    inner = ast.stmt | ast.excepthandler | ast.match_case
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]


def _head_end(node: ast.stmt) -> int:
    """The last line of a simple statement, or of the head of one with a body."""
    if not hasattr(node, "body"):
        return node.end_lineno or node.lineno
    inside = (each for head in _heads(node) for each in ast.walk(head))
    return max([node.lineno, *(getattr(each, "end_lineno", 0) for each in inside)])


def _loops(node: ast.AST) -> Iterator[Loop]:
    """The loops of a function, outer before inner, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For | ast.AsyncFor | ast.While):
            body, end = child.body[0].lineno, child.body[-1].end_lineno
            target = () if isinstance(child, ast.While) else ast.walk(child.target)
            names = tuple(each.id for each in target if isinstance(each, ast.Name))
            if body > child.lineno:  # a loop on one line is one step
                yield Loop(child.lineno, body, end or body, names)
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _loops(child)


@lru_cache(maxsize=4)
def _comments(every: tuple[str, ...]) -> dict[int, str]:
    found = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(every)).readline):
            text = token.string.lstrip("#").strip()
            if token.type == tokenize.COMMENT and text and not text.startswith(NO_WORDS):
                found[token.start[0]] = text
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


def _note(line: int, end: int, comments: dict[int, str], every: tuple[str, ...]) -> str | None:
    """The comment beside a statement, or else the lines of comment right above it."""
    beside = [comments[i] for i in range(line, end + 1) if i in comments]
    above: list[str] = []
    while not beside and (line := line - 1) in comments and every[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
    return " ".join(beside or above) or None
