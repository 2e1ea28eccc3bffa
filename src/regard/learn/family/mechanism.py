"""A mechanism as data, and the records that print: one of them with its numbers, or all in a table."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.examples import Example, cat
from regard.learn.family.by_hand import ByHand, explain
from regard.learn.family.variant import Variant
from regard.learn.validation import Floats
from regard.render.table import format_table
from regard.render.text import format_vector

WIDTH = 100
Run = tuple[Floats, Floats]


@dataclass(frozen=True)
class Use:
    """A published model or system, what it does there, and where that is written.

    >>> from regard.learn import family
    >>> print(family.show("alibi").mechanism.used[0])
    Proposed (Press et al. 2021, arXiv 2108.12409)
    """

    where: str
    source: str

    def __str__(self) -> str:
        return f"{self.where} ({self.source})"


def at_once(attention: ScaledDotProductAttention, given: Example) -> Run:
    """All queries in one call."""
    return attention(given.Q, given.K, given.V)


@dataclass(frozen=True, eq=False)
class Mechanism:
    """One member of the family: the words, the formula, the class and the example it is run on.

    `kind(**options)` is the class as it is run; `given` has the inputs, `looking` a token for each query. `rows` are
    those worked out by hand: row 0, and one more where row 0 has little to tell; `also` are helpers to be listed.

    >>> from regard.learn import family
    >>> output, weights = family.MECHANISMS[2].run()
    >>> weights[1].round(4)
    array([0.8176, 0.1824, 0.    , 0.    , 0.    ])
    """

    name: str
    title: str
    problem: str
    changes: str
    formula: str
    latex: str
    setting: str
    used: tuple[Use, ...]
    kind: type[ScaledDotProductAttention]
    options: Mapping[str, Any]
    given: Example = cat
    looking: tuple[str, ...] = cat.tokens
    rows: tuple[int, ...] = (0,)
    also: tuple[type[Variant], ...] = ()
    attend: Callable[[Any, Example], Run] = field(default=at_once, repr=False)

    def make(self) -> ScaledDotProductAttention:
        """The class, made as the example needs it."""
        return self.kind(**self.options)

    def run(self) -> Run:
        """Return the output (q_len, d_v) and the weights (…, q_len, kv_len) on the example."""
        return self.attend(self.make(), self.given)

    def by_hand(self, row: int = 0) -> ByHand:
        """One row with every number."""
        given = self.given
        return explain(self.make(), given.Q, given.K, given.V, given.tokens, row)

    @property
    def call(self) -> str:
        """How it is made, as text: Causal(d_k=4)."""
        return f"{self.kind.__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    @property
    def code(self) -> str:
        """The class as it is written, without types and refusals, and the helper it is made of, if there is one."""
        return "\n\n\n".join(map(_source, (*self.also, self.kind)))


@dataclass(frozen=True, eq=False, repr=False)
class Page:
    """A mechanism with its numbers: rows `by_hand`, all `weights` and the whole `output`; `print` it to read it.

    >>> from regard.learn import family
    >>> family.show("causal").weights.shape
    (5, 5)
    """

    number: int
    mechanism: Mechanism
    by_hand: tuple[ByHand, ...]
    weights: Floats
    output: Floats

    def __str__(self) -> str:
        m = self.mechanism
        used = [line for use in m.used for line in _wrapped(str(use), "  ", "    ")]
        return "\n".join(
            [
                f"{self.number}. {m.title}",
                "",
                *_wrapped(m.problem),
                "",
                *(f"    {line}" for line in m.formula.split("\n")),
                "",
                *_wrapped(f"Here: {m.call}. {m.setting}"),
                *(f"\n{steps}" for steps in self.by_hand),
                "",
                *(f"{name}\n{_grid(m, matrix)}\n" for name, matrix in self._weights()),
                f"Output\n{_output_grid(m, self.output)}",
                "",
                "Used in",
                *used,
                "",
                textwrap.indent(m.code, "    "),
            ]
        )

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        m = self.mechanism
        by_hand = "\n\n".join(str(steps) for steps in self.by_hand)
        grids = "\n\n".join(f"{name}\n{_grid(m, matrix)}" for name, matrix in self._weights())
        used = "\n".join(f"- {use}" for use in m.used)
        return (
            f"{m.problem}\n\n$$\n{m.latex}\n$$\n\n"
            f"Here: `{m.call}`. {m.setting}\n\n"
            f"```text\n{by_hand}\n```\n\n"
            f"```text\n{grids}\n\nOutput\n{_output_grid(m, self.output)}\n```\n\n"
            f"Used in\n\n{used}\n\n"
            f"```python\n{m.code}\n```\n"
        )

    def _weights(self) -> list[tuple[str, Floats]]:
        if self.weights.ndim == 2:
            return [("Weights", self.weights)]
        return [(f"Weights of head {h}", head) for h, head in enumerate(self.weights)]


@dataclass(frozen=True, eq=False, repr=False)
class FamilyTable:
    """All mechanisms side by side: `rows` of number, name, what changes, shape of the weights, output of row 0.

    >>> from regard.learn import family
    >>> len(family.table().rows)
    15
    """

    rows: tuple[tuple[int, Mechanism, tuple[int, ...], Floats], ...]

    def __str__(self) -> str:
        headings, *body = self._cells()
        return format_table(body, headings, align="left")

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        headings, *body = (f"| {' | '.join(row)} |" for row in self._cells())
        return "\n".join([headings, "| --- " * 5 + "|", *body]) + "\n"

    def _cells(self) -> list[list[str]]:
        headings = ["", "mechanism", "what changes", "weights", "output of row 0"]
        return [headings] + [
            [f"{n}", m.title, m.changes, "×".join(map(str, shape)), format_vector(output)]
            for n, m, shape, output in self.rows
        ]


def _grid(m: Mechanism, matrix: Floats) -> str:
    rows = [[name, *(f"{x:.4f}" for x in row)] for name, row in zip(m.looking, matrix, strict=True)]
    return format_table(rows, ["", *m.given.tokens])


def _output_grid(m: Mechanism, output: Floats) -> str:
    rows = [[name, *(f"{x:.4f}" for x in row)] for name, row in zip(m.looking, output, strict=True)]
    return format_table(rows, ["", *map(str, range(output.shape[-1]))])


def _wrapped(text: str, first: str = "", rest: str | None = None) -> Sequence[str]:
    rest = first if rest is None else rest
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def _source(kind: type) -> str:
    """The text of a class as a learner would write it: no types, no refusals, one sentence of docstring."""
    text = inspect.getsource(kind)
    lines = text.split("\n")
    (tree,) = ast.parse(text).body
    # From the end, so that the numbers of the lines before stay true.
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0), reverse=True):
        if isinstance(node, ast.AnnAssign):
            line = lines[node.lineno - 1].encode()  # ast counts bytes
            start, end = node.target.end_col_offset, node.annotation.end_col_offset
            lines[node.lineno - 1] = (line[:start] + line[end:]).decode()
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            del lines[node.lineno - 1 : node.end_lineno]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            told, first = ast.get_docstring(node), node.body[0]
            if told is not None:
                sentence = told.split("\n\n")[0]
                lines[first.lineno - 1 : first.end_lineno] = [f'    """{sentence}"""'] if node is tree else []
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                end = node.returns.end_lineno
                lines[node.lineno - 1 : end] = [_header(node)]
    return "\n".join(lines).rstrip()


def _header(function: ast.FunctionDef) -> str:
    """The line that begins a method, without types."""
    for arg in function.args.args:
        arg.annotation = None
    function.returns, function.body = None, [ast.Pass()]
    return textwrap.indent(ast.unparse(function).split("\n")[0], "    ")
