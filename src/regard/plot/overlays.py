"""A map of weights over an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import load_pixels
from regard.plot.axes import INK, LITERAL, ORANGE, SOFT, check_axes, ensure_axes, format_label, format_labels
from regard.render.text import format_number
from regard.validation import as_array

COLORMAP_NAME = "inferno"  # its dark end dims the image, its light end shows on any
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])  # of red, green and blue
MAX_OTHERS = 10  # tokens beside the patches that are drawn one by one


def overlay(
    image: Any,
    weights: Any,
    grid: PatchGrid,
    *,
    query: tuple[int, int] | None = None,
    tokens: Sequence[str] | None = None,
    ax: Any = None,
    alpha: float = 0.6,
    grey: bool = True,
    colorbar: bool = True,
    **imshow: Any,
) -> Any:
    """Draw the weights of the patches over their image, and those of the other tokens beside it.

    Colours run from 0 to the largest weight of a patch. Other tokens (class token, registers, text) are listed below
    the image with their weights: each if there are at most ten, otherwise their sum. NaN is orange.

    Args:
        image: Path, Pillow image or array, as the model saw it; see `regard.images.load_pixels`. It is stretched over
            the grid. If the processor crops, pass `regard.images.undo_normalisation(pixel_values[0], processor)`.
        weights: One row of a matrix, (tokens,): `recording[name][0, head, query]`, or a mean of several.
        grid: Where the patches are: `recording.grids(name)[0]`, or `regard.images.read_grids(config, inputs)[0][0]`.
        query: Row and column of the patch that attends, which is outlined.
        tokens: Names of all tokens, of which those that are no patches are written. Default: those of the grid.
        ax: Axes to draw on. Default: a new figure.
        alpha: Opacity of the map, from 0 to 1.
        grey: Draw the image in grey, so that colours mean weights only.
        colorbar: Whether to draw a colour bar.
        **imshow: Arguments of `Axes.imshow` for the map, such as `vmax=1`, `norm="log"` or `cmap=`.

    Returns:
        The Axes; `ax.images[-1]` is the map.

    Raises:
        ArgumentError: If there is not one weight for each token of the grid, `query` is no patch, `alpha` is out of
            range, or the image cannot be read.
        ArgumentTypeError: If an argument has the wrong type.

    >>> import numpy as np
    >>> from regard.images import PatchGrid
    >>> grid = PatchGrid(2, 2, before=1, names=("class",))
    >>> ax = overlay(np.zeros((8, 8, 3), np.uint8), [0.5, 0.1, 0.2, 0.0, 0.2], grid)
    >>> ax.images[-1].get_array().data
    array([[0.1, 0.2],
           [0. , 0.2]])
    >>> ax.get_xlabel()
    'patches 0.5; class 0.5'
    """
    check_axes(ax, "plot.overlay")
    if not isinstance(grid, PatchGrid):
        raise ArgumentTypeError(
            "plot.overlay",
            received=f"grid as {describe_argument(grid)}",
            expected="a regard.images.PatchGrid",
            hint="recording.grids(name)[0] is the grid of a recorded layer.",
        )
    row = as_array(weights.detach() if hasattr(weights, "detach") else weights, "plot.overlay", "weights")
    if row.ndim != 1:
        raise ArgumentError(
            "plot.overlay",
            received=f"weights as {describe_argument(row)}",
            expected=f"one row of weights, ({grid.length},)",
            hint="Select batch entry, head and query: recording[name][0, head, query].",
        )
    grid.check_length(len(row), "plot.overlay")
    _check_options(query, alpha, grid)
    names = format_labels(tokens, grid.length, "plot.overlay", "tokens")
    pixels = load_pixels(image, "plot.overlay")

    ax = ensure_axes(ax, 6.4, 6.4 * min(2.0, max(0.4, pixels.shape[0] / pixels.shape[1])))
    height, width = pixels.shape[:2]
    extent = (0, width, height, 0)
    if grey:
        pixels = np.repeat((pixels @ LUMINANCE).round().astype(np.uint8)[..., None], 3, -1)
    ax.imshow(pixels, extent=extent, interpolation="antialiased")
    drawn = np.ma.masked_invalid(grid.to_map(row.astype(np.float64)))
    style: dict[str, Any] = {"cmap": COLORMAP_NAME, "vmin": 0, "alpha": alpha, "interpolation": "nearest"}
    if "norm" in imshow:
        del style["vmin"]  # a norm has its own limits
    shown = ax.imshow(drawn, **style | {"extent": extent} | imshow)
    shown.set_cmap(shown.get_cmap().with_extremes(bad=ORANGE))
    if colorbar:
        ax.figure.colorbar(shown, ax=ax, label="weight", fraction=0.046, pad=0.03)
    if query is not None:
        _outline(ax, query, width / grid.columns, height / grid.rows)
    ax.set(xticks=[], yticks=[])
    ax.set_xlabel(_describe_weights(row, grid, names), color=SOFT, wrap=True, **LITERAL)
    return ax


def _check_options(query: Any, alpha: Any, grid: PatchGrid) -> None:
    inside = query is None or (len(query) == 2 and 0 <= query[0] < grid.rows and 0 <= query[1] < grid.columns)
    if not inside or not 0 <= alpha <= 1:
        received = f"query={query!r}" if not inside else f"alpha={alpha!r}"
        raise ArgumentError(
            "plot.overlay",
            received=received,
            expected=f"query as (row, column) in a grid of {grid}; alpha from 0 to 1",
            hint="Rows are counted from the top and columns from the left, both from 0.",
        )


def _outline(ax: Any, patch: tuple[int, int], width: float, height: float) -> None:
    from matplotlib.patches import Rectangle

    corner = (patch[1] * width, patch[0] * height)
    for color, line in ((INK, 4), ("white", 2)):  # visible on any image
        ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=line))


def _describe_weights(row: Any, grid: PatchGrid, names: list[str] | None) -> str:
    """Return the sum over the patches, and the weights of the other tokens, in one line."""
    parts = [f"patches {format_number(float(row[grid.positions].sum()))}"]
    others = grid.others
    if len(others) > MAX_OTHERS:
        parts.append(f"{len(others)} other tokens {format_number(float(row[others].sum()))}")
    else:
        for position in others:
            own = grid.names[position] if position < len(grid.names) else f"token {position}"
            label = own if names is None else names[position]
            parts.append(f"{format_label(label)} {format_number(float(row[position]))}")
    return "; ".join(parts)
