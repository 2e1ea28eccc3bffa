"""Draw every head of a recording into one figure: `regard look -o heads.png`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from regard.errors import ArgumentError, NotCapturedError
from regard.plot import heatmap, overlay
from regard.plot.figures import LITERAL, SOFT
from regard.types import Array

if TYPE_CHECKING:
    from regard.capture.call import Call
    from regard.images.patch_grid import PatchGrid
    from regard.lens.recording import Recording

MAX_HEADS = 400
INCHES = 1.7  # edge of a map
MAX_LABEL = 36  # characters beside a map
MAX_LINE = 24  # of them on one line
CELLS = 128  # of a map along an edge; longer sequences show the maximum of each cell


def draw_heads(
    recording: Recording, title: str, *, image: Array | None = None, has_text: bool = False
) -> Figure:
    """Draw a map of each head, one row for each call of a layer.

    With an image, the weights of one query lie over it: of the last token of a text, of the class token, or the mean of
    all queries if the model has none. Layers that do not read the image are left out.

    Args:
        recording: The recording of one batch entry.
        title: Title of the figure.
        image: (height, width, 3), the image that the model saw.
        has_text: Whether the last token of a text is the query.

    Returns:
        The figure.

    Raises:
        ArgumentError: If there are too many heads, or no layer reads the image.
    """
    rows = [(name, call) for name in recording for call in recording.calls(name)]
    grids: dict[str, PatchGrid] = {}
    if image is not None:
        for name in recording:
            try:
                grids[name] = recording.grids(name)[0]
            except NotCapturedError:
                continue  # a layer that reads the text alone
        rows = [(name, call) for name, call in rows if name in grids]
    num_heads = sum(call.shape[-3] for _, call in rows)
    if not 1 <= num_heads <= MAX_HEADS:
        raise ArgumentError(
            "look",
            received=f"a picture of {num_heads:,} heads",
            expected=f"from 1 to {MAX_HEADS}",
            hint="Choose layers, e.g. --layers '*.0.*', or write a page: -o look.html.",
        )
    columns = max(call.shape[-3] for _, call in rows)
    figure = Figure(figsize=(INCHES * columns + 1, INCHES * len(rows) + 0.6), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, **LITERAL)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for (name, call), line in zip(rows, axes, strict=True):
        for head, ax in enumerate(line):
            if head >= call.shape[-3]:
                ax.set_axis_off()
                continue
            _draw_head(ax, call, head, image, grids.get(name), has_text)
            ax.set(xticks=[], yticks=[], xlabel="", ylabel="")
            ax.set_title(f"head {head}", fontsize=7, color=SOFT, pad=2)
        line[0].set_ylabel(_format_label(name), fontsize=7, **LITERAL)
    return figure


def _draw_head(
    ax: Any, call: Call, head: int, image: Array | None, grid: PatchGrid | None, has_text: bool
) -> None:
    matrix = call.matrix.lazy[(0,) * (len(call.shape) - 3) + (head,)]
    if grid is None:
        heatmap(matrix, ax=ax, cells=CELLS, numbers=False, colorbar=False, aspect="auto")
        return
    num_queries = matrix.shape[-2]
    if has_text and grid.length > len(grid.names) + grid.rows * grid.columns:
        weights = matrix[num_queries - 1]
    elif "class" in grid.names:
        weights = matrix[grid.names.index("class")]
    else:
        weights = matrix.sum(axis=-2) / num_queries
    overlay(image, weights, grid, ax=ax, colorbar=False)


def _format_label(name: str) -> str:
    r"""Return the last parts of a module's name, on two lines if they do not fit beside a map on one.

    >>> _format_label("layers.0.self_attn"), _format_label("model.language_model.layers.10.self_attn")
    ('layers.0.self_attn', 'language_model.layers.10\nself_attn')
    """
    while len(name) > MAX_LABEL and "." in name:
        name = name.partition(".")[2]
    name = name[-MAX_LABEL:]
    return "\n".join(name.rsplit(".", 1)) if len(name) > MAX_LINE else name
