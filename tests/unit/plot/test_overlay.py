"""`plot.overlay`: the map is the weights, other tokens are apart, wrong arguments are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from regard import plot
from regard.errors import ArgumentError, ArgumentTypeError
from regard.images import PatchGrid
from regard.plot.figures import ORANGE
from tests.helpers.images import draw_image

GRID = PatchGrid(4, 6, before=5, names=("class", "register 1"))
IMAGE = draw_image()


@pytest.fixture
def weights() -> np.ndarray:
    numbers = np.random.default_rng(0).random(GRID.length)
    return numbers / numbers.sum()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_the_map_over_the_image_is_the_weights(weights):
    ax = plot.overlay(IMAGE, weights, GRID, query=(1, 4), alpha=0.4)
    picture, drawn = ax.images
    np.testing.assert_array_equal(drawn.get_array(), weights[GRID.positions])
    assert np.ptp(picture.get_array(), axis=-1).max() == 0  # grey
    np.testing.assert_array_equal(plot.overlay(IMAGE, weights, GRID, grey=False).images[0].get_array(), IMAGE)
    assert drawn.get_extent() == picture.get_extent() == [0, 48, 32, 0]
    assert drawn.get_cmap()(1.0)[3] == 0.4 and drawn.get_clim() == (0, weights[5:].max())
    assert [box.get_bbox().bounds for box in ax.patches] == [(32, 8, 8, 8)] * 2
    assert (
        "register 1" in ax.get_xlabel() and f"patches {weights[5:].sum():.4f}".rstrip("0") in ax.get_xlabel()
    )
    ax.figure.canvas.draw()


def test_weights_of_a_model_and_many_other_tokens(weights):
    torch = pytest.importorskip("torch")
    grid = PatchGrid(2, 3, before=12, after=11)
    row = torch.tensor(weights, requires_grad=True)
    ax = plot.overlay(IMAGE, row, grid, tokens=["$x$"] * 29, colorbar=False, vmax=1)
    np.testing.assert_array_equal(ax.images[-1].get_array(), grid.to_map(weights))
    assert ax.images[-1].get_clim() == (0, 1)
    assert f"23 other tokens {weights[grid.others].sum():.4f}".rstrip("0") in ax.get_xlabel()
    ax = plot.overlay(IMAGE, weights, GRID, tokens=["$x$"] * 29, norm="log", ax=ax)
    assert "$x$ 0" in ax.get_xlabel()
    ax.figure.canvas.draw()


def draw_colours(light: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return blue minus red of the drawn patches, (rows, columns): how much colour each has."""
    figure = plt.figure(figsize=(6, 4), dpi=80)
    ax = figure.add_axes((0, 0, 1, 1))
    plot.overlay(np.repeat(light[..., None], 3, -1), weights, GRID, ax=ax, colorbar=False)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba()).astype(float)
    return (pixels[..., 2] - pixels[..., 0])[40::80, 40::80]


def test_colour_is_weight_whatever_the_light_of_the_image(weights):
    noise = np.random.default_rng(1).integers(0, 256, (4, 6), np.uint8)
    pictures = [np.zeros((4, 6), np.uint8), np.full((4, 6), 255, np.uint8), noise]
    expected = 0.85 * 255 * weights[GRID.positions] / weights[5:].max()
    # One of 256 levels of opacity, its rounding to a byte, and Agg's fixed-point blending of two channels.
    atol = 0.85 + 0.5 + 2
    for picture in pictures:
        light = np.kron(picture, np.ones((8, 8), np.uint8))
        np.testing.assert_allclose(draw_colours(light, weights), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("patches", "says"),
    [
        (np.arange(24) / 552, "largest patch 2.00 × the mean"),
        (0.01 + np.arange(24) / 24000, "largest patch 1.05 × the mean: practically uniform"),
        (np.zeros(24), "no weight on a patch"),
        (np.full(24, np.nan), "no weight on a patch"),
    ],
)
def test_a_map_that_is_practically_uniform_is_called_so(weights, patches, says):
    weights[5:] = patches
    assert plot.overlay(IMAGE, weights, GRID).get_xlabel().split("\n")[-1] == says


def test_nan_is_orange(weights):
    weights[GRID.positions[0, 0]] = np.nan
    drawn = plot.overlay(IMAGE, weights, GRID).images[-1]
    np.testing.assert_allclose(drawn.to_rgba(drawn.get_array())[0, 0, :3], to_rgb(ORANGE))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weights": np.ones(28)},
            ArgumentError,
            "28 weights for a grid of 29 tokens: 4 × 6 patches, 5 tokens before",
        ),
        ({"weights": np.ones((2, 29))}, ArgumentError, r"one row of weights, \(29,\)"),
        ({"grid": (4, 6)}, ArgumentTypeError, "grid as a tuple"),
        ({"query": (4, 0)}, ArgumentError, r"query=\(4, 0\)"),
        ({"alpha": 2}, ArgumentError, "alpha=2"),
        ({"tokens": ["a"]}, ArgumentError, "1 tokens"),
        ({"image": "gone.png"}, ArgumentError, "'gone.png', which cannot be read"),
        ({"ax": 3}, ArgumentTypeError, "ax, int 3"),
    ],
)
def test_wrong_arguments_are_refused(weights, change, error, message):
    arguments = {"image": IMAGE, "weights": weights, "grid": GRID} | change
    with pytest.raises(error, match=message):
        plot.overlay(arguments.pop("image"), arguments.pop("weights"), arguments.pop("grid"), **arguments)


def test_the_lines_below_narrow_maps_stay_apart(weights):
    figure, axes = plt.subplots(1, 3, figsize=(8, 3), layout="constrained")
    for ax in axes:
        plot.overlay(IMAGE, weights, GRID, ax=ax, colorbar=False)
    figure.canvas.draw()
    boxes = [ax.xaxis.label.get_window_extent() for ax in axes]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert boxes[0].x0 >= 0 and boxes[0].y0 >= 0
    alone = plot.overlay(IMAGE, weights[5:], PatchGrid(4, 6))
    assert alone.get_xlabel().startswith("largest patch")  # no list without other tokens
