"""Where the numbers of a monitored step go: functions, files and the loggers of other libraries."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentTypeError, describe_argument

Row = dict[str, Any]

# Columns that identify a row; the others are logged.
KEYS = ("step", "module", "layer", "head")
# Columns that are shares, which lie between 0 and 1.
SHARES = ("first", "first_max", "saturated")
# Columns that are drawn as an image of layers × heads.
IMAGES = ("max_score", "entropy", "first")
PIXELS = 16  # of a cell along each edge


# Takes the rows of one monitored step, one for each layer and head, and the optimiser step.
Logger = Callable[[Sequence[Row], int], None]


def make_logger(target: Any) -> Logger:
    """Return the logger for a target of `Monitor(to=…)`; no library is imported to recognise its objects."""
    library = (getattr(target, "__name__", None) or type(target).__module__).split(".")[0]
    if isinstance(target, str | os.PathLike):
        return partial(_append_lines, Path(target))
    if callable(getattr(target, "add_scalar", None)) and callable(getattr(target, "add_image", None)):
        return partial(_write_tensorboard, target)
    if library == "wandb" and callable(getattr(target, "log", None)):
        return lambda rows, step: target.log(flatten(rows), step=step)
    if library == "mlflow" and callable(getattr(target, "log_metrics", None)):
        return partial(_log_metrics, target)
    if callable(target):
        return lambda rows, step: target(flatten(rows), step)
    raise ArgumentTypeError(
        "Monitor",
        received=f"to={describe_argument(target)}",
        expected="a function (numbers, step), a path, a SummaryWriter, a wandb run, or the module mlflow",
        hint="For any other logger, pass a function: to=lambda numbers, step: logger.log(numbers, step).",
    )


def flatten(rows: Sequence[Row]) -> dict[str, float]:
    """Return the numbers of a step by name: those of each head, and the extreme or mean of all heads.

    >>> flatten([{"step": 0, "module": "attn", "layer": 0, "head": 1, "max_score": 2.0}])
    {'attention/max_score': 2.0, 'attention/layer0.head1/max_score': 2.0}
    """
    numbers = summarise_heads(rows)
    for column in _list_columns(rows):
        for row in rows:
            numbers[f"attention/layer{row['layer']}.head{row['head']}/{column}"] = row[column]
    return numbers


def summarise_heads(rows: Sequence[Row]) -> dict[str, float]:
    """Return one number for each column over all heads: the extreme of extremes, the sum of counts, else the mean.

    >>> summarise_heads([{"head": 0, "max_score": 2.0, "first": 0.5}, {"head": 1, "max_score": 3.0, "first": 0.25}])
    {'attention/max_score': 3.0, 'attention/first': 0.375}
    """
    numbers = {}
    for column in _list_columns(rows):
        values = [row[column] for row in rows]
        finite = [value for value in values if not math.isnan(value)]
        if column in ("nonfinite", "rows"):
            number = float(sum(values))
        elif not finite:
            number = math.nan
        elif column == "max_score" or column.endswith("_max"):
            number = max(finite)
        else:
            number = min(finite) if column.endswith("_min") else sum(finite) / len(finite)
        numbers[f"attention/{column}"] = number
    return numbers


def _list_columns(rows: Sequence[Row]) -> list[str]:
    return [name for name in rows[0] if name not in KEYS]


def _log_metrics(mlflow: Any, rows: Sequence[Row], step: int) -> None:
    """Log the numbers that are finite to mlflow."""
    finite = {name: value for name, value in flatten(rows).items() if math.isfinite(value)}
    mlflow.log_metrics(finite, step=step)


def _append_lines(path: Path, rows: Sequence[Row], step: int) -> None:
    """Append each row to a file as one line of JSON; NaN is null."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            line = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
            file.write(json.dumps(line) + "\n")


def _write_tensorboard(writer: Any, rows: Sequence[Row], step: int) -> None:
    """Write scalars, and images of layers × heads, to a `SummaryWriter`."""
    for name, value in flatten(rows).items():
        writer.add_scalar(name, value, step)
    for column in IMAGES:
        # TensorBoard shows one kind of data for a tag, so images have tags that scalars have not.
        writer.add_image(f"attention/heads/{column}", draw_heads(rows, column), step, dataformats="HWC")


def draw_heads(rows: Sequence[Row], column: str) -> Any:
    """Draw one number of each head, a row of cells for each layer: (height, width, 3), uint8, dark is low.

    Shares are drawn from 0 to 1; others from 0 to the largest of the step. Heads that a layer does not have, and NaN,
    are grey.
    """
    cells = np.full((1 + max(row["layer"] for row in rows), 1 + max(row["head"] for row in rows)), np.nan)
    for row in rows:
        cells[row["layer"], row["head"]] = row[column]
    top = 1.0 if column in SHARES else max(np.nanmax(cells, initial=0.0), np.finfo(float).tiny)
    level = np.clip(cells / top, 0.0, 1.0)[..., None]
    # From dark blue over teal to light yellow, of rising lightness.
    stops = np.array([[24, 24, 84], [38, 130, 142], [253, 231, 37]], float)
    position = np.nan_to_num(level * (len(stops) - 1))
    low = np.minimum(position.astype(int), len(stops) - 2)[..., 0]
    colours = stops[low] + (position - low[..., None]) * (stops[low + 1] - stops[low])
    colours = np.where(np.isnan(level), 128.0, colours)
    image = colours.round().astype(np.uint8).repeat(PIXELS, 0).repeat(PIXELS, 1)
    image[PIXELS - 1 :: PIXELS] = image[:, PIXELS - 1 :: PIXELS] = 255  # lines between cells
    return image
