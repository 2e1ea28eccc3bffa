"""The fifteen mechanisms as data, the records that show them, and published variants by name, each run on the example.

The texts are in `mechanisms.toml`. A mechanism is an entry of it, with the class and the inputs that it names.
"""

from __future__ import annotations

import ast
import html
import inspect
import itertools
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from regard.core.attention import attention, linear_attention
from regard.core.products import merge_states
from regard.feature_maps import random_features
from regard.learn.attention import ScaledDotProductAttention
from regard.learn.by_hand import WorkedRow, explain
from regard.learn.canvas import Canvas
from regard.learn.examples import Example, cat
from regard.learn.family import variants
from regard.learn.softmax_alternatives import softmax
from regard.learn.validation import Floats
from regard.masks import Mask, between, causal, dense, document, first, sliding_window
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
        number: The number of the mechanism in the book, counted from 1.
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

    number: int
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

    def explain(self, query: int = 0) -> WorkedRow:
        """Work out one row of the example by hand.

        Args:
            query: The query to work out, counted from 0.

        Returns:
            The steps, the output and the weights of that row.
        """
        example = self.example
        return explain(self.build(), example.Q, example.K, example.V, example.tokens, query)

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
        mechanism: The mechanism.
        worked_rows: The rows worked by hand.
        output: The output (q_len, d_v).
        weights: The weights (…, q_len, kv_len).

    >>> from regard.learn import family
    >>> family.show("causal").weights.shape
    (5, 5)
    """

    mechanism: Mechanism
    worked_rows: tuple[WorkedRow, ...]
    output: Floats
    weights: Floats

    def __str__(self) -> str:
        m = self.mechanism
        uses = [line for use in m.uses for line in _wrap(str(use), "  ", "    ")]
        return "\n".join(
            [
                f"{m.number}. {m.title}",
                "",
                *_wrap(m.problem),
                "",
                *(f"    {line}" for line in m.formula.split("\n")),
                "",
                *_wrap(f"Here: {m.call}. {m.setting}"),
                *(f"\n{row}" for row in self.worked_rows),
                "",
                _format_numbers(m, self.weights, self.output),
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
        numbers = _format_numbers(m, self.weights, self.output)
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
    """All mechanisms in a table; `rows` hold a mechanism each, its output (q_len, d_v) and its weights.

    >>> from regard.learn import family
    >>> len(family.table().rows)
    15
    """

    rows: tuple[tuple[Mechanism, Floats, Floats], ...]

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
            [f"{m.number}", m.title, m.changes, "×".join(map(str, weights.shape)), format_vector(output[0])]
            for m, output, weights in self.rows
        ]


def _format_numbers(m: Mechanism, weights: Floats, output: Floats) -> str:
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
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith("require("):
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
        tiles: A mechanism each, its output (q_len, d_v) and its weights (…, q_len, kv_len).

    >>> from regard.learn import family
    >>> family.gallery()
    <15 heatmaps, scaled_dot_product to sink_softcap>
    """

    tiles: tuple[tuple[Mechanism, Floats, Floats], ...]

    def __repr__(self) -> str:
        return f"<{len(self.tiles)} heatmaps, {self.tiles[0][0].name} to {self.tiles[-1][0].name}>"

    def _repr_html_(self) -> str:
        items = []
        for m, _, weights in self.tiles:
            link = f'<a href="#{make_anchor(m.title)}">{m.number}. {html.escape(m.title)}</a>'
            items.append(
                f'<li style="margin: 0">{draw_heatmap(m, weights)}<div><b>{link}</b></div>'
                f'<div style="font-size: 0.85em">{html.escape(m.changes)}</div></li>'
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


def run_token_by_token(attention: variants.Cached, example: Example) -> OutputAndWeights:
    """Run one call per token; rows of weights are padded with zeros for the keys that are not cached yet."""
    weights, outputs = np.zeros((len(example.Q), len(example.K))), []
    for i in range(len(example.Q)):
        output, row = attention(example.Q[i : i + 1], example.K[i : i + 1], example.V[i : i + 1])
        weights[i, : i + 1] = row[0]
        outputs.append(output[0])
    return np.stack(outputs), weights


def share_kv_heads(num_heads: int, num_kv_heads: int) -> Example:
    """Build the example with fewer heads of keys and values: each group is replaced by its mean."""
    K, V = (
        variants.mean_pool_heads(cat.K, num_heads, num_kv_heads),
        variants.mean_pool_heads(cat.V, num_heads, num_kv_heads),
    )
    return Example(cat.tokens, cat.Q, K, V)


# Examples that are not the whole of `cat`, by the name of the mechanism.
EXAMPLES = {
    "cross": Example(cat.tokens[:3], cat.Q[3:], cat.K[:3], cat.V[:3]),
    "multi_query": share_kv_heads(num_heads=2, num_kv_heads=1),
    "grouped_query": share_kv_heads(num_heads=4, num_kv_heads=2),
}


def _read_mechanism(number: int, entry: dict[str, Any]) -> Mechanism:
    """Build a mechanism from an entry of the file: look up its class, its base classes and its example."""
    name = entry["name"]
    classes = [getattr(variants, base) for base in entry.pop("bases", ())]
    example = EXAMPLES.get(name, cat)
    return Mechanism(
        number=number,
        attention_class=getattr(variants, entry.pop("class"), ScaledDotProductAttention),
        base_classes=tuple(classes),
        worked_rows=tuple(entry.pop("worked_rows", (0,))),
        example=example,
        query_tokens=cat.tokens[-len(example.Q) :],
        run_example=run_token_by_token if name == "kv_cache" else run_in_one_call,
        **entry,
    )


CATALOG = tomllib.loads(
    resources.files("regard.learn.family").joinpath("mechanisms.toml").read_text(encoding="utf-8")
)
# The fifteen mechanisms in the order of the chapter; `family.show` and `family.table` print them.
MECHANISMS = tuple(map(_read_mechanism, itertools.count(1), CATALOG["mechanism"]))


@dataclass(frozen=True, eq=False)
class NamedVariant:
    """A published variant of attention.

    Attributes:
        name: The name it is known by.
        year: The year of the first version of the paper.
        source: The authors and the paper.
        mechanism: The name of the mechanism in `MECHANISMS` that it belongs to.
        compute_weights: A function that returns its weights on the example, over the five tokens.

    >>> from regard.learn import family
    >>> longformer = family.NAMED_VARIANTS["Longformer"]
    >>> longformer.mechanism, longformer.compute_weights().shape
    ('block_sparse', (5, 5))
    """

    name: str
    year: int
    source: str
    mechanism: str
    compute_weights: Callable[[], Floats]


def _masked(mask: Mask) -> Callable[[], Floats]:
    return lambda: np.asarray(attention(cat.Q, cat.K, mask=mask).to_dense())


def _run(name: str) -> Callable[[], Floats]:
    """Return a function that runs a mechanism and averages the weights over its heads."""
    (mechanism,) = (it for it in MECHANISMS if it.name == name)
    return lambda: np.atleast_3d(mechanism.run()[1].T).mean(axis=-1).T


_POOL = np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]) / np.array(
    [[2], [3]]
)  # the means of two and of three tokens
# The sentence as a graph: each token is joined to itself, to its neighbours, and "cat" to "mat".
GRAPH = np.abs(np.subtract.outer(np.arange(5), np.arange(5))) <= 1
GRAPH[[1, 4], [4, 1]] = True


def _linformer() -> Floats:
    """Attend to two pooled keys instead of five; spread each weight over the tokens that were pooled."""
    return np.asarray(attention(cat.Q, _POOL @ cat.K).to_dense() @ _POOL)


def _performer() -> Floats:
    return np.asarray(linear_attention(cat.Q, cat.K, feature_map=random_features(4096)).to_dense())


def _reformer() -> Floats:
    """Attend within buckets of tokens that a random direction hashes alike."""
    bucket = (cat.K @ np.random.default_rng(0).normal(size=4) > 0).astype(int)
    return np.asarray(attention(cat.Q, cat.K, mask=document(bucket)).to_dense())


def _graph() -> Floats:
    """Attend to the neighbours in a graph, by a · [query, key] through a leaky ReLU instead of a dot product."""
    a_query, a_key = np.array([1.0, 0.5, 0.0, -0.5]), np.array([-0.5, 0.3, 1.0, 0.1])  # a model learns them
    scores = (cat.Q @ a_query)[:, None] + cat.K @ a_key
    leaky = np.where(scores > 0, scores, 0.2 * scores)
    return softmax(leaky, GRAPH)


def _nystroem() -> Floats:
    """Attend to two landmarks, and from the landmarks to all keys; the inverse of their own weights joins the two."""
    landmarks = _POOL @ cat.Q, _POOL @ cat.K
    to_landmarks, among, from_landmarks = (
        np.asarray(attention(query, key).to_dense())
        for query, key in ((cat.Q, landmarks[1]), landmarks, (landmarks[0], cat.K))
    )
    weights: Floats = to_landmarks @ np.linalg.pinv(among) @ from_landmarks
    return weights


def _ring() -> Floats:
    """Attend to the keys shard by shard, and merge by the lse; one-hot rows as values make the output the weights."""
    shards = [attention(cat.Q, cat.K[part]) for part in (slice(0, 3), slice(3, 5))]
    values = [np.eye(5)[:3], np.eye(5)[3:]]
    parts = [(A @ value, A.lse) for A, value in zip(shards, values, strict=True)]
    return np.asarray(merge_states(parts)[0])


_NEIGHBOURS = sliding_window(left=1, right=1)
_NEIGHBOURS_AND_FIRST = _NEIGHBOURS | first(1) | between(queries=[0])
_RANDOM_PAIRS = dense(np.random.default_rng(59).random((5, 5)) < 0.15)
_STRIDED = causal() & (document([0, 0, 1, 1, 2]) | between(keys=[1, 3]))
_WEIGHTS: dict[str, Callable[[], Floats]] = {
    "neighbours": _masked(_NEIGHBOURS),
    "strided": _masked(_STRIDED),
    "hashed": _reformer,
    "neighbours_and_first": _masked(_NEIGHBOURS_AND_FIRST),
    "pooled": _linformer,
    "graph": _graph,
    "landmarks": _nystroem,
    "neighbours_first_and_random": _masked(_NEIGHBOURS_AND_FIRST | _RANDOM_PAIRS),
    "random_features": _performer,
    "last_and_first": _masked(sliding_window(2) | (first(1) & causal())),
    "shards": _ring,
}
# The variants by name, in the order of their papers.
NAMED_VARIANTS: dict[str, NamedVariant] = {
    entry["name"]: NamedVariant(
        entry["name"],
        entry["year"],
        entry["source"],
        entry["mechanism"],
        _WEIGHTS[entry["weights"]] if "weights" in entry else _run(entry["mechanism"]),
    )
    for entry in CATALOG["variant"]
}


@dataclass(frozen=True, eq=False, repr=False)
class NamedTable:
    """The named variants with the section of each, how much weight it moves, and the row of "mat"; prints as a table.

    The column "moved" is the share of the weight, in the mean of the rows, that is on another token than in plain
    attention.

    >>> from regard.learn import family
    >>> len(family.tabulate_named_variants().rows)
    17
    """

    rows: tuple[tuple[NamedVariant, Floats], ...]

    def __str__(self) -> str:
        plain = attention(cat.Q, cat.K).to_dense()
        numbers = {mechanism.name: mechanism.number for mechanism in MECHANISMS}
        cells = [
            [
                variant.name,
                f"{variant.year}",
                f"{numbers[variant.mechanism]}",
                f"{np.abs(weights - plain).sum() / 2 / len(plain):.2f}",
                *(f"{weight:.2f}" for weight in weights[-1]),
            ]
            for variant, weights in self.rows
        ]
        align = ["left", "right", "right", "right"] + ["right"] * len(cat.tokens)
        headings = ["name", "year", "section", "moved", *cat.tokens]
        return format_table(cells, headings, align=align)  # type: ignore[arg-type]

    __repr__ = __str__


def tabulate_named_variants() -> NamedTable:
    """Run the named variants on the example, and tabulate the weights that "mat" gives to each token.

    Returns:
        The table; `print` it to read it.

    >>> print(str(tabulate_named_variants()).splitlines()[11])
    Performer  ...
    """
    return NamedTable(tuple((variant, variant.compute_weights()) for variant in NAMED_VARIANTS.values()))
