"""`plot.overlay`: the map is the weights, other tokens are apart, wrong arguments are refused."""

from __future__ import annotations

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
    assert drawn.get_alpha() == 0.4 and drawn.get_clim() == (0, weights[5:].max())
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
