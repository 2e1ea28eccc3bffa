"""Read the source of a function: its lines, statements, loops and comments."""

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

TOOL_COMMENTS = ("noqa", "type:", "pragma", "fmt:", "mypy:", "ruff:")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class LoopLines:
    """A `for` or `while` loop: the line of its head, the first and last line of its body, and its target names."""

    line: int
    body: int
    end: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class FunctionSource:
    """The source of a function by the line numbers of its file, without the docstring.

    Attributes:
        file: Path of the file.
        name: Qualified name of the function.
        line: Line of the `def`.
        lines: Text by line number.
        starts: First line of the statement that each line belongs to.
        ends: Last line of the statement that starts at a line.
        assigns: Names that the statement starting at a line assigns.
        withs: Lines of the body of the `with` that starts at a line.
        loops: Loops, outer before inner.
        notes: Comments by line, and the docstring's first paragraph at the line of the `def`.
    """

    file: str
    name: str
    line: int
    lines: dict[int, str]
    starts: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    assigns: dict[int, list[str]] = field(default_factory=dict)
    withs: dict[int, range] = field(default_factory=dict)
    loops: tuple[LoopLines, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)


def read_source(code: CodeType, module: dict[str, Any]) -> FunctionSource | None:
    """Return the source of a code object, or None if it is not available."""
    file_lines = tuple(linecache.getlines(code.co_filename, module))
    first = code.co_firstlineno
    if first > len(file_lines):
        return None
    node = _find_node(file_lines, code)
    if node is None:
        block = file_lines[first - 1 : max(line or first for *_, line in code.co_lines())]
        lines = dict(enumerate(map(str.rstrip, block), first))
        return FunctionSource(code.co_filename, code.co_qualname, first, lines)
    last = node.end_lineno or first
    lines = {i: file_lines[i - 1].rstrip() for i in range(first, last + 1)}
    docstring = _find_docstring(node)
    if docstring is not None:
        for i in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1):
            lines.pop(i, None)
    loops = tuple(_find_loops(node))
    source = FunctionSource(code.co_filename, code.co_qualname, node.lineno, lines, loops=loops)
    comments = _find_comments(file_lines)
    statements = [statement for statement in ast.walk(node) if isinstance(statement, ast.stmt)]
    for statement in sorted(statements, key=lambda it: (it.lineno, -(it.end_lineno or 0))):
        line, end = statement.lineno, _head_end(statement)
        last_line = statement.end_lineno or end
        source.ends[line] = end
        source.starts.update(dict.fromkeys(range(line, end + 1), line))
        source.assigns[line] = [
            name.id
            for head in _head_nodes(statement)
            for name in ast.walk(head)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
        if isinstance(statement, ast.With | ast.AsyncWith):
            source.withs[line] = range(end + 1, last_line + 1)
        comment = _comment_of(line, end, comments, file_lines)
        if comment and statement is not node:  # the comment of a loop also applies to the lines in it
            source.notes.update(dict.fromkeys(range(line, last_line + 1), comment))
    text = ast.get_docstring(node) if docstring is not None and not isinstance(node, ast.Lambda) else None
    source.notes.pop(node.lineno, None)
    if text:
        source.notes[node.lineno] = " ".join(text.split("\n\n")[0].split())
    return source


@lru_cache(maxsize=4)
def _parse(file_lines: tuple[str, ...]) -> ast.Module:
    try:
        return ast.parse("".join(file_lines))
    except (SyntaxError, ValueError):  # a notebook cell with a magic command
        return ast.Module([], [])


def _find_node(file_lines: tuple[str, ...], code: CodeType) -> FunctionNode | None:
    """Return the node of the function that a code object was compiled from."""
    for node in ast.walk(_parse(file_lines)):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            return node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _find_docstring(node: ast.AST) -> ast.stmt | None:
    body = getattr(node, "body", None)
    if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
        return body[0] if isinstance(getattr(body[0].value, "value", None), str) else None
    return None


def _head_nodes(node: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement without the statements in it."""
    inner = ast.stmt | ast.excepthandler | ast.match_case
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, inner)]


def _head_end(node: ast.stmt) -> int:
    """Return the last line of a simple statement, or of the head of a compound one."""
    if not hasattr(node, "body"):
        return node.end_lineno or node.lineno
    parts = (part for head in _head_nodes(node) for part in ast.walk(head))
    return max([node.lineno, *(getattr(part, "end_lineno", 0) for part in parts)])


def _find_loops(node: ast.AST) -> Iterator[LoopLines]:
    """Yield the loops of a function, outer before inner, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For | ast.AsyncFor | ast.While):
            body, end = child.body[0].lineno, child.body[-1].end_lineno
            target = () if isinstance(child, ast.While) else ast.walk(child.target)
            names = tuple(name.id for name in target if isinstance(name, ast.Name))
            if body > child.lineno:  # a loop on one line is one step
                yield LoopLines(child.lineno, body, end or body, names)
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _find_loops(child)


@lru_cache(maxsize=4)
def _find_comments(file_lines: tuple[str, ...]) -> dict[int, str]:
    comments = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(file_lines)).readline):
            text = token.string.lstrip("#").strip()
            if token.type == tokenize.COMMENT and text and not text.startswith(TOOL_COMMENTS):
                comments[token.start[0]] = text
    except (tokenize.TokenError, SyntaxError):
        pass
    return comments


def _comment_of(line: int, end: int, comments: dict[int, str], file_lines: tuple[str, ...]) -> str | None:
    """Return the comment beside a statement, or else the comment lines directly above it."""
    beside = [comments[i] for i in range(line, end + 1) if i in comments]
    above: list[str] = []
    while not beside and (line := line - 1) in comments and file_lines[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
    return " ".join(beside or above) or None
