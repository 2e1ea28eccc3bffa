"""The printed mechanisms: description, formula, listing, table, and errors for wrong arguments."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.errors import ArgumentError, ArgumentTypeError
from regard.learn import ScaledDotProductAttention, cat, family
from regard.learn.family.catalog import make_anchor
from regard.render.text import format_vector

every_mechanism = pytest.mark.parametrize("mechanism", family.MECHANISMS, ids=lambda m: m.name)

NAMED = {mechanism.name: mechanism for mechanism in family.MECHANISMS}


def close(actual: Any, expected: Any) -> None:
    assert np.shape(actual) == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


@every_mechanism
def test_descriptions_are_complete_and_sources_dated(mechanism):
    for words in (mechanism.problem, mechanism.setting):
        assert words.endswith(".")
        assert len(words) > 40
    assert mechanism.formula
    assert mechanism.latex.count("{") == mechanism.latex.count("}")
    assert mechanism.uses
    for use in mechanism.uses:
        assert re.search(r"\b20(1[7-9]|2\d)\b", use.source)
        assert "arXiv" not in use.source or re.search(r"arXiv \d{4}\.\d{5}$", use.source)


@every_mechanism
def test_a_page_is_complete(mechanism):
    page = family.show(mechanism.name)
    text, markdown = str(page), page._repr_markdown_()
    assert repr(page) == text
    assert text.startswith(f"{family.MECHANISMS.index(mechanism) + 1}. {mechanism.title}\n")
    words = " ".join(text.split())
    for part in (mechanism.problem, mechanism.setting, mechanism.call, *map(str, mechanism.uses)):
        assert " ".join(part.split()) in words
    for line in mechanism.formula.split("\n"):
        assert f"    {line}" in text
    for steps in page.worked_rows:
        assert str(steps) in text
        assert str(steps) in markdown
    assert f"$$\n{mechanism.latex}\n$$" in markdown
    assert f"```python\n{mechanism.code}\n```" in markdown
    numbers = [f"{x:.4f}" for x in np.ravel(page.weights)]
    for listing in (text, markdown):
        assert all(x in listing for x in numbers)
        # No headings: the chapter decides about them.
        assert not re.search(r"^#+ ", re.sub(r"```.*?```", "", listing, flags=re.DOTALL), re.MULTILINE)
    assert max(map(len, text.split("\n"))) <= 125


def test_show_works_out_a_chosen_row():
    (steps,) = family.show("causal", query=2).worked_rows
    assert steps.title == 'Query 2 "sat" by hand'
    assert steps._repr_markdown_() == f"```text\n{steps}\n```\n"
    assert repr(steps) == str(steps)


def test_the_table_has_all_fifteen():
    table = family.table()
    lines = str(table).split("\n")
    assert repr(table) == str(table)
    assert len(lines) == 16
    for line, mechanism in zip(lines[1:], family.MECHANISMS, strict=True):
        output, weights = mechanism.run()
        assert mechanism.title in line
        assert line.endswith(format_vector(output[0]))
        assert "×".join(map(str, weights.shape)) in line
    rows = table._repr_markdown_().strip().split("\n")
    assert len(rows) == 17
    assert {row.count("|") for row in rows} == {6}


@every_mechanism
def test_the_listed_code_gives_the_numbers(mechanism):
    assert len(mechanism.code.split("\n")) <= 75
    for unwanted in ("ArrayLike", "Floats", "raise", "require", ">>>"):
        assert unwanted not in mechanism.code or mechanism.name == "scaled_dot_product"
    names = dict(vars(__import__(mechanism.attention_class.__module__, fromlist=["_"])))
    exec(mechanism.code, names)
    shown_class = names[mechanism.attention_class.__name__]
    assert shown_class is not mechanism.attention_class
    output, weights = mechanism.run_example(shown_class(**mechanism.options), mechanism.example)
    close(output, mechanism.run()[0])
    close(weights, mechanism.run()[1])


@every_mechanism
def test_the_formula_converts_to_mathml(mechanism):
    # The site converts it to MathML with docutils, which supports fewer commands than TeX.
    latex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml")
    assert "<math" in latex2mathml.tex2mathml(mechanism.latex, as_block=True)


@every_mechanism
def test_a_class_has_the_methods_of_the_base_class(mechanism):
    assert issubclass(mechanism.attention_class, ScaledDotProductAttention)
    for step in ("compute_scores", "scale_scores", "compute_weights", "compute_output", "forward"):
        assert callable(getattr(mechanism.attention_class, step))
    close(mechanism.explain(0).output, mechanism.run()[0][0])


def test_public_names_are_sorted_and_exist():
    assert family.__all__ == sorted(family.__all__)
    assert all(hasattr(family, name) for name in family.__all__)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: family.show("rotational"), "name='rotational'"),
        (lambda: family.show("cross", query=2), "query from 0 to 1"),
        (
            lambda: family.MultiHead(d_k=2, num_heads=3)(cat.Q, cat.K, cat.V),
            "since d_k is 2, times 3 heads",
        ),
        (lambda: family.MultiHead(d_k=1, num_heads=2)(cat.Q, cat.K, cat.V), "since d_k is 1"),
        (lambda: family.BlockSparse(d_k=1, block_size=2, global_tokens=[-1]), "global_tokens"),
        (lambda: family.Rotary(d_k=3), "an even d_k"),
        (lambda: family.RelativeBias(d_k=1, table=np.zeros(6), max_distance=9), "4, 8, 12, … buckets"),
        (
            lambda: family.RelativeBias(d_k=1, table=np.zeros(8), max_distance=2),
            "above a quarter of their number",
        ),
        (lambda: family.Causal(d_k=4)(cat.Q, cat.K, cat.V, mask=np.ones((5, 4), bool)), "broadcasts"),
        (lambda: family.Causal(d_k=4).explain(cat.Q, cat.K, cat.V, "ab", 0), "a token for each key"),
        (lambda: family.Causal(d_k=4).explain(cat.Q, cat.K, cat.V, cat.tokens, 5), "query_idx from 0 to 4"),
    ],
)
def test_error_messages(call, says):
    with pytest.raises(ArgumentError, match=re.escape(says)):
        call()


def test_a_mask_of_numbers_raises():
    with pytest.raises(ArgumentTypeError, match="a boolean mask, True = attend"):
        family.Causal(d_k=4)(cat.Q, cat.K, cat.V, mask=np.ones((5, 5)))


def test_the_chapter_has_a_section_for_each_mechanism():
    chapter = (Path(__file__).parents[3] / "docs/book/11-family.md").read_text("utf-8")
    headings = re.findall(r"^## \d+\. (.+)$", chapter, re.MULTILINE)
    assert headings == [mechanism.title for mechanism in family.MECHANISMS]
    assert re.findall(r'^family\.show\("(\w+)"\)$', chapter, re.MULTILINE) == list(NAMED)


def test_the_gallery_has_a_heatmap_for_each_mechanism():
    markup = family.gallery()._repr_html_()
    root = ElementTree.fromstring(markup)
    chapter = (Path(__file__).parents[3] / "docs/book/11-family.md").read_text("utf-8")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}svg"))) == len(family.MECHANISMS) == 15
    assert [link.text for link in root.iter("a")] == re.findall(r"^## (\d+\. .+)$", chapter, re.MULTILINE)
    cells = [
        len(list(svg.iter("{http://www.w3.org/2000/svg}rect")))
        for svg in root.iter("{http://www.w3.org/2000/svg}svg")
    ]
    assert cells == [mechanism.run()[1].size for mechanism in family.MECHANISMS]


def test_the_chapter_has_a_line_for_each_named_variant():
    chapter = (Path(__file__).parents[3] / "docs/book/11-family.md").read_text("utf-8")
    anchors = {
        mechanism.name: f"(#{n}-{make_anchor(mechanism.title)})"
        for n, mechanism in enumerate(family.MECHANISMS, 1)
    }
    for variant in family.NAMED_VARIANTS.values():
        (line,) = (
            line for line in chapter.splitlines() if line.startswith(f"| {variant.name}, {variant.year} |")
        )
        assert anchors[variant.mechanism] in line
        assert variant.source.replace("arXiv ", "arXiv:").rpartition(", ")[2] in line


def test_named_variants_keep_the_properties_of_their_mechanism():
    plain, causal = (family.show(name).weights for name in ("scaled_dot_product", "causal"))
    weights = {name: variant.compute_weights() for name, variant in family.NAMED_VARIANTS.items()}
    for matrix in weights.values():
        close(matrix.sum(axis=-1), np.ones(5))
    close(weights["FlashAttention"], plain)
    close(weights["Ring Attention"], plain)
    close(weights["PagedAttention"], causal)
    assert 0 < np.abs(weights["Performer"] - plain).sum(axis=-1).mean() / 2 < 0.05
    assert weights["BigBird"].astype(bool).sum() > weights["Longformer"].astype(bool).sum()
    assert np.all(weights["Longformer"][0] > 0) and np.all(weights["Longformer"][:, 0] > 0)
    # In graph attention every query puts its neighbours in the same order.
    neighbours = weights["Graph attention"] > 0
    assert np.array_equal(neighbours, neighbours.T) and neighbours.diagonal().all() and neighbours[1, 4]
    order = np.argsort(np.where(neighbours, weights["Graph attention"], np.nan), axis=-1)
    place = order.argsort(axis=-1)
    for i, j in np.ndindex(5, 5):
        both = np.flatnonzero(neighbours[i] & neighbours[j])
        assert place[i, both].argsort().tolist() == place[j, both].argsort().tolist()
    # The landmarks are the means of the first two and the last three tokens; eager softmax in three small tables.
    Q, K = (np.stack([x[:2].mean(axis=0), x[2:].mean(axis=0)]) for x in (cat.Q, cat.K))
    small = [np.exp(q @ k.T / 2) for q, k in ((cat.Q, K), (Q, K), (Q, cat.K))]
    first, among, last = (x / x.sum(axis=-1, keepdims=True) for x in small)
    close(weights["Nyströmformer"], first @ np.linalg.inv(among) @ last)
    assert weights["StreamingLLM"][4].round(2).tolist() == [0.3, 0, 0, 0.3, 0.39]
