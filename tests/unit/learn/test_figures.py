"""The figures of the book: valid SVG, colours of the page, contrast, and the numbers that the library computes."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.learn import cat, figures, projection, tiny_head, variance_experiment
from regard.learn.canvas import MAX_OPACITY, SMALLEST_TEXT

ROOT = Path(__file__).parents[3]
CHAPTERS = "\n".join(path.read_text() for path in sorted((ROOT / "docs/book").glob("[01]*.md")))


draw = functools.cache(figures.draw)


def texts(figure: figures.Figure) -> list[str]:
    """The texts of a drawing, in order."""
    return [
        element.text or ""
        for element in ElementTree.fromstring(figure.svg).iter()
        if element.tag.endswith("text")
    ]


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_is_svg_with_a_text_for_those_who_cannot_see_it(name, tmp_path):
    figure = draw(name)
    root = ElementTree.fromstring(figure.svg)
    assert root.get("role") == "img" and root.get("aria-label") == figure.alt
    assert len(figure.alt) > 100 and re.search(r"\d", figure.alt) and figure.caption.endswith(".")
    assert f'figures.draw("{name}")' in CHAPTERS
    assert all(int(size) >= SMALLEST_TEXT for size in re.findall(r'font-size="(\d+)"', figure.svg))
    figure.save(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text("utf-8") == figure.svg + "\n"
    assert figure.svg in figure._repr_html_()


@pytest.mark.parametrize("name", figures.NAMES)
def test_a_figure_has_no_fixed_colour(name):
    colours = set(re.findall(r'(?:fill|stroke)="([^"]*)"', draw(name).svg))
    assert {colour.split("(")[0] for colour in colours} <= {"currentColor", "none", "var"}


def luminance(colour: np.ndarray) -> float:
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def read_colour(text: str) -> np.ndarray:
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255


@pytest.mark.parametrize("scheme", ["light_css_variables", "dark_css_variables"])
def test_text_on_the_darkest_shade_keeps_its_contrast(scheme):
    block = (ROOT / "docs/conf.py").read_text().split(f'"{scheme}": {{')[1].split("}")[0]
    colours = dict(re.findall(r'"([\w-]+)": "(#\w{6})"', block))
    ground, text = (read_colour(colours[f"color-{name}-primary"]) for name in ("background", "foreground"))
    for accent in ("color-brand-primary", "figure-second"):
        shade = MAX_OPACITY * read_colour(colours[accent]) + (1 - MAX_OPACITY) * ground
        low, high = sorted([luminance(shade), luminance(text)])
        assert (high + 0.05) / (low + 0.05) > 4.5


def test_the_four_steps_show_the_numbers_of_sat():
    shown = texts(draw("four-steps"))
    A = regard.attention(cat.Q, cat.K)
    assert all(f"{weight:.3f}" in shown for weight in A[2])
    assert all(f"{x:.3f}".rstrip("0") in shown for x in (A @ cat.V)[2])


def test_projections_show_the_products():
    shown = texts(draw("projections"))
    products = [
        X for W in (projection.W_Q, projection.W_K, projection.W_V) for X in (projection.X @ W).ravel()
    ]
    rounded = [f"{x:.1f}".replace("-", "−").replace(".0", "") for x in products]
    assert all(number in shown for number in rounded if number not in ("−0", "0"))


def test_curves_and_planes_describe_what_is_computed():
    rows = variance_experiment(d_k=(1, 1024), keys=8, samples=400).rows
    assert f"{rows[0].unscaled.largest_weight:.3f}" in draw("scaling").alt
    outputs = regard.attention(tiny_head.Q, tiny_head.K) @ tiny_head.V
    assert all(f"({x:.4f}, {y:.4f})" in draw("hull").alt for x, y in outputs)
    assert "causal leaves 15 of 25 pairs" in draw("masks").alt
    assert "4,608" in draw("crossing").alt


def test_an_unknown_figure_is_named():
    with pytest.raises(regard.ArgumentError, match="four-steps"):
        figures.draw("four steps")
