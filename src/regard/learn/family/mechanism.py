"""A mechanism as data, and the records that show it: one with its numbers, all in a table, all as heatmaps."""

from __future__ import annotations

import ast
import html
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.learn.attention import ScaledDotProductAttention
from regard.learn.by_hand import WorkedRow, explain
from regard.learn.canvas import Canvas
from regard.learn.examples import Example, cat
from regard.learn.validation import Floats
from regard.render.table import format_table
from regard.render.text import format_vector

WIDTH = 100
OutputAndWeights = tuple[Floats, Floats]


@dataclass(frozen=True)
class PublishedUse:
    """A published model or system that uses a mechanism, and the source that says so.

    >>> from regard.learn import family
    >>> print(family.show("alibi").mechanism.uses[0])
    Proposed (Press et al. 2021, arXiv 2108.12409)
    """

    description: str
    source: str

    def __str__(self) -> str:
        return f"{self.description} ({self.source})"


def run_in_one_call(attention: ScaledDotProductAttention, example: Example) -> OutputAndWeights:
    """Run all queries of an example in one call."""
    return attention.forward(example.Q, example.K, example.V)


@dataclass(frozen=True, eq=False)
class Mechanism:
    """One kind of attention as data: its description, its formula, its class and the example it runs on.

    Attributes:
        name: The name that `family.show` takes.
        title: The name in headings and tables.
        problem: The problem it solves.
        changes: What it changes, in a few words.
        formula: The formula as text.
        latex: The formula in LaTeX.
        setting: How the example is set up.
        sources: Published models that use it, each with the source that says so; `uses` has them as records.
        attention_class: The class.
        options: The arguments of the class in the example.
        example: The inputs.
        query_tokens: A token for each query.
        worked_rows: Rows to work out by hand: row 0, and another one if row 0 shows too little.
        base_classes: Base classes to list with the class.
        run_example: A function that runs an instance of the class on the example.

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
    sources: Mapping[str, str]
    attention_class: type[ScaledDotProductAttention]
    options: Mapping[str, Any]
    example: Example = cat
    query_tokens: tuple[str, ...] = cat.tokens
    worked_rows: tuple[int, ...] = (0,)
    base_classes: tuple[type[ScaledDotProductAttention], ...] = ()
    run_example: Callable[[Any, Example], OutputAndWeights] = field(default=run_in_one_call, repr=False)

    @property
    def uses(self) -> tuple[PublishedUse, ...]:
        """Published models that use it."""
        return tuple(PublishedUse(description, source) for description, source in self.sources.items())

    def build(self) -> ScaledDotProductAttention:
        """Build an instance of the class with the options of the example."""
        return self.attention_class(**self.options)

    def run(self) -> OutputAndWeights:
        """Run the mechanism on its example.

        Returns:
            The output (q_len, d_v) and the weights (…, q_len, kv_len).
        """
        return self.run_example(self.build(), self.example)

    def explain(self, row: int = 0) -> WorkedRow:
        """Work out one row of the example by hand.

        Args:
            row: The query to work out, counted from 0.

        Returns:
            The steps, the output and the weights of that row.
        """
        example = self.example
        return explain(self.build(), example.Q, example.K, example.V, example.tokens, row)

    @property
    def call(self) -> str:
        """The constructor call of the example as text, such as Causal(d_k=4)."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.attention_class.__name__}({arguments})"

    @property
    def code(self) -> str:
        """The source of the class and of its base classes, without types and validation."""
        return "\n\n\n".join(map(format_source, (*self.base_classes, self.attention_class)))


@dataclass(frozen=True, eq=False, repr=False)
class MechanismPage:
    """A mechanism with its numbers: rows worked by hand, the whole output and all weights; `print` it to read it.

    Attributes:
        number: The number of the mechanism in the book, counted from 1.
        mechanism: The mechanism.
        worked_rows: The rows worked by hand.
        output: The output (q_len, d_v).
        weights: The weights (…, q_len, kv_len).

    >>> from regard.learn import family
    >>> family.show("causal").weights.shape
    (5, 5)
    """

    number: int
    mechanism: Mechanism
    worked_rows: tuple[WorkedRow, ...]
    output: Floats
    weights: Floats

    def __str__(self) -> str:
        m = self.mechanism
        uses = [line for use in m.uses for line in _wrap(str(use), "  ", "    ")]
        matrices = [("Weights", self.weights)]
        if self.weights.ndim > 2:
            matrices = [(f"Weights of head {h}", head) for h, head in enumerate(self.weights)]
        return "\n".join(
            [
                f"{self.number}. {m.title}",
                "",
                *_wrap(m.problem),
                "",
                *(f"    {line}" for line in m.formula.split("\n")),
                "",
                *_wrap(f"Here: {m.call}. {m.setting}"),
                *(f"\n{row}" for row in self.worked_rows),
                "",
                *(f"{name}\n{_format_matrix(m, matrix, m.example.tokens)}\n" for name, matrix in matrices),
                f"Output\n{_format_matrix(m, self.output, range(self.output.shape[-1]))}",
                "",
                "Used in",
                *uses,
                "",
                textwrap.indent(m.code, "    "),
            ]
        )

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        """Return the problem, the formula and the numbers; the steps by hand and the class are folded."""
        m = self.mechanism
        worked_rows = "\n\n".join(str(row) for row in self.worked_rows)
        numbers = _format_beside(m, self.weights, self.output)
        titles = " and ".join(row.title.partition(" by hand")[0] for row in self.worked_rows)
        uses = "; ".join(str(use) for use in m.uses)
        return (
            f"{m.problem}\n\n$$\n{m.latex}\n$$\n\n"
            f"Here: `{m.call}`. {m.setting}\n\n"
            f"```text\n{numbers}\n```\n\n"
            f"<details>\n<summary>{titles} by hand</summary>\n\n```text\n{worked_rows}\n```\n\n</details>\n\n"
            f"<details>\n<summary>The class</summary>\n\n```python\n{m.code}\n```\n\n</details>\n\n"
            f"Used in: {uses}.\n"
        )


@dataclass(frozen=True, eq=False, repr=False)
class FamilyTable:
    """All mechanisms in a table; `rows` hold the number, the mechanism, the shape of its weights and output row 0.

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
            [
                f"{number}",
                mechanism.title,
                mechanism.changes,
                "×".join(map(str, shape)),
                format_vector(output),
            ]
            for number, mechanism, shape, output in self.rows
        ]


def _format_beside(m: Mechanism, weights: Floats, output: Floats) -> str:
    """Format the weights of each head beside its columns of the output, so that a row can be read across."""
    heads = weights if weights.ndim == 3 else weights[None]
    width = output.shape[-1] // len(heads)
    blocks = []
    for h, head in enumerate(heads):
        columns = range(h * width, (h + 1) * width)
        rows = [
            [name, *(f"{x:.4f}" for x in row), "→", *(f"{mixed[c]:.4f}" for c in columns)]
            for name, row, mixed in zip(m.query_tokens, head, output, strict=True)
        ]
        title = f"Head {h}: weights" if len(heads) > 1 else "Weights"
        blocks.append(
            f"{title} → output\n{format_table(rows, ['', *m.example.tokens, '', *map(str, columns)])}"
        )
    return "\n\n".join(blocks)


def _format_matrix(m: Mechanism, matrix: Floats, headings: Iterable[object]) -> str:
    rows = [[name, *(f"{x:.4f}" for x in row)] for name, row in zip(m.query_tokens, matrix, strict=True)]
    return format_table(rows, ["", *map(str, headings)])


def _wrap(text: str, first: str = "", rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def format_source(attention_class: type, *methods: str) -> str:
    """Format a class as a learner would write it: no types, no checks, one sentence of docstring.

    Args:
        attention_class: The class.
        *methods: Names of the methods to show; all of them by default.

    Returns:
        The source.

    >>> from regard.learn import family
    >>> print(family.format_source(family.Causal, "create_mask").splitlines()[-1])
            return relative_positions(q_len, kv_len) <= 0
    """
    text = inspect.getsource(attention_class)
    lines = text.split("\n")
    (tree,) = ast.parse(text).body
    hidden = {
        method.lineno: method.end_lineno or method.lineno
        for method in ast.iter_child_nodes(tree)
        if isinstance(method, ast.FunctionDef) and methods and method.name not in methods
    }
    # Edit from the end, so that the line numbers before the edit stay valid.
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0), reverse=True):
        number = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef) and number in hidden:
            del lines[number - 1 : hidden[number] + 1]  # with the blank line after it
        elif any(first <= number <= last for first, last in hidden.items()):
            continue  # inside a hidden method
        elif isinstance(node, ast.AnnAssign):
            line = lines[node.lineno - 1].encode()  # ast counts bytes
            start, end = node.target.end_col_offset, node.annotation.end_col_offset
            lines[node.lineno - 1] = (line[:start] + line[end:]).decode()
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            del lines[node.lineno - 1 : node.end_lineno]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            docstring, first = ast.get_docstring(node), node.body[0]
            if docstring is not None:
                sentence = docstring.split("\n\n")[0]
                lines[first.lineno - 1 : first.end_lineno] = [f'    """{sentence}"""'] if node is tree else []
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                end = node.returns.end_lineno
                lines[node.lineno - 1 : end] = [_format_signature(node)]
    return "\n".join(lines).rstrip()


def _format_signature(function: ast.FunctionDef) -> str:
    """Format the first line of a method, without types; a decorator stays on the line above."""
    function.decorator_list = []
    for arg in function.args.args:
        arg.annotation = None
    function.returns, function.body = None, [ast.Pass()]
    return textwrap.indent(ast.unparse(function).split("\n")[0], "    ")


TILE = 150  # width of a heatmap in units
LABELS = 32  # width of the query tokens
DARKEST = 0.6  # weights from here on have the full colour
GRID = (
    "display: grid; grid-template-columns: repeat(auto-fill, minmax(9.2rem, 1fr)); gap: 1.25rem 1rem; padding: 0; "
    "list-style: none; margin: 1.5rem 0"
)


@dataclass(frozen=True, eq=False, repr=False)
class Gallery:
    """The weights of all mechanisms as heatmaps; a notebook shows them side by side.

    Attributes:
        tiles: The number, the mechanism and the weights (…, q_len, kv_len) of each.

    >>> from regard.learn import family
    >>> family.gallery()
    <15 heatmaps, scaled_dot_product to sink_softcap>
    """

    tiles: tuple[tuple[int, Mechanism, Floats], ...]

    def __repr__(self) -> str:
        return f"<{len(self.tiles)} heatmaps, {self.tiles[0][1].name} to {self.tiles[-1][1].name}>"

    def _repr_html_(self) -> str:
        items = []
        for number, mechanism, weights in self.tiles:
            link = f'<a href="#{make_anchor(mechanism.title)}">{number}. {html.escape(mechanism.title)}</a>'
            items.append(
                f'<li style="margin: 0">{draw_heatmap(mechanism, weights)}<div><b>{link}</b></div>'
                f'<div style="font-size: 0.85em">{html.escape(mechanism.changes)}</div></li>'
            )
        return f'<ul class="regard-gallery" style="{GRID}">{"".join(items)}</ul>'


def make_anchor(title: str) -> str:
    """Return the anchor of the section with this title in the book.

    >>> make_anchor("Relative position bias (T5)")
    'relative-position-bias-t5'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def draw_heatmap(mechanism: Mechanism, weights: Floats) -> str:
    """Draw the weights of a mechanism as SVG; several heads stand side by side."""
    heads = weights if weights.ndim == 3 else weights[None]
    q_len, kv_len = heads.shape[1:]
    per_row = 1 if len(heads) == 1 else 2
    room = (TILE - LABELS) / per_row
    side = min(room / kv_len, 22) - (0.8 if per_row > 1 else 0)
    canvas = Canvas(TILE)
    for h, head in enumerate(heads):
        x, y = LABELS + (h % per_row) * room, (h // per_row) * (side * q_len + 5) + 1
        canvas.matrix(x, y, head, cell=(side, side), largest=DARKEST)
    if per_row == 1:
        for i, token in enumerate(mechanism.query_tokens):
            canvas.text(LABELS - 4, (i + 0.5) * side + 5, token, anchor="end", size=12)
    canvas.height = max(canvas.height, 5 * 22 + 1)
    rows = "; ".join(
        f"{token} {format_vector(row)}" for token, row in zip(mechanism.query_tokens, heads[0], strict=True)
    )
    more = f"{len(heads)} heads, the first: " if len(heads) > 1 else ""
    return canvas.figure(mechanism.name, "", f"Weights of {mechanism.title}: {more}{rows}.").svg
