"""Where the numbers of a monitored step go: functions, files and the loggers of other libraries.

Each target has a thread and a queue of its own, so a slow, hanging or failing target stops neither training nor the
other targets. If a queue is full, the step is dropped and counted.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentTypeError, describe_argument
from regard.monitor.history import COUNTS, Snapshot

# Columns that are shares, which lie between 0 and 1.
SHARES = ("first", "first_max", "saturated")
# Columns that are logged for the model only, and not for each layer.
ONLY_MODEL = ("max_score_mean", "first_max", "rows")
# Columns that are drawn as an image of layers × heads.
IMAGES = ("max_score", "entropy", "first")
# Edge of a cell of an image, and of an image with many cells, in pixels.
PIXELS, IMAGE_PIXELS = 16, 320
# Monitored steps that may wait for a target.
QUEUE_STEPS = 16
# How long the end of a run waits for all targets, in seconds.
FLUSH_SECONDS = 10.0


class StepRecord(NamedTuple):
    """The numbers of a monitored step.

    Args:
        heads: Of every head.
        layers: Of every layer: quantiles over its heads.
        model: Of the whole model: quantiles over all heads.
    """

    heads: Snapshot
    layers: Snapshot
    model: Snapshot

    @property
    def step(self) -> int:
        """The step."""
        return self.heads.step

    def numbers(self, *, with_layers: bool = True) -> dict[str, float]:
        """Return the numbers of the model, and of each layer, by name, such as "attention/layer3/entropy".

        Each is the largest over the heads if the column is a largest number, the smallest if it is a smallest one, the
        sum if it counts, and the median otherwise.
        """
        own = {
            name: name if name in COUNTS else f"{name}.{_find_quantile(name)}" for name in self.heads.columns
        }
        numbers = {f"attention/{name}": float(self.model[column][0]) for name, column in own.items()}
        if not with_layers:
            return numbers
        for name, column in own.items():
            if name in ONLY_MODEL:
                continue
            for place, value in zip(self.layers.places, self.layers[column].tolist(), strict=True):
                numbers[f"attention/layer{place[1]}/{name}"] = value
        return numbers


def _find_quantile(column: str) -> str:
    if column == "max_score" or column.endswith("_max"):
        return "max"
    return "min" if column.endswith("_min") else "median"


class Target:
    """Where numbers go. Its methods run in the thread of the target, except `prepare`."""

    def prepare(self) -> None:
        """Look up what only the thread of the training loop knows; called before each step is queued."""

    def resume(self, step: int) -> None:
        """Remove what an interrupted run logged at this step and later."""

    def log(self, record: StepRecord) -> None:
        """Log a step."""
        raise NotImplementedError


class Function(Target):
    """A function of the numbers by name and the step."""

    def __init__(self, function: Callable[[dict[str, float], int], object]) -> None:
        self._function = function

    def log(self, record: StepRecord) -> None:
        """Call the function."""
        self._function(record.numbers(), record.step)


class JsonLines(Target):
    """A file to which the row of every head is appended as a line of JSON; NaN and inf are null."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def resume(self, step: int) -> None:
        """Cut the file before the first line of the step, and remove an incomplete last line."""
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            for offset, line in _read_lines_backwards(file):
                if line.endswith(b"\n") and json.loads(line)["step"] < step:
                    break
                end = offset
            file.truncate(end)

    def log(self, record: StepRecord) -> None:
        """Append the rows; if they cannot be written whole, none is."""
        is_finite: list[bool] = np.isfinite(record.heads.values).all(axis=1).tolist()  # type: ignore[assignment]
        rows = (
            row if finite else {name: _replace_nonfinite(value) for name, value in row.items()}
            for row, finite in zip(record.heads.rows(), is_finite, strict=True)
        )
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self._path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(content) != len(content):
                    raise OSError("the rows could not be written whole; the disk may be full")
            except OSError:
                with suppress(OSError):  # of a device, which has no size
                    file.truncate(size)
                raise


def _replace_nonfinite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_lines_backwards(file: Any, block: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a binary file with their offsets, the last one first."""
    start, rest = file.seek(0, os.SEEK_END), b""
    while start:
        size = min(block, start)
        start = file.seek(start - size)
        lines = (file.read(size) + rest).splitlines(keepends=True)
        at = start + sum(map(len, lines))
        rest = b"" if not start else lines.pop(0)
        for line in reversed(lines):
            at -= len(line)
            yield at, line


class ParquetFolder(Target):
    """A folder with one Parquet file for each monitored step, which has the row of every head."""

    def __init__(self, folder: Path) -> None:
        import pyarrow.parquet

        self._folder, self._parquet, self._pyarrow = folder, pyarrow.parquet, pyarrow
        pyarrow.table({"step": [0]})  # imports pandas, which must not take the time of a training step

    def resume(self, step: int) -> None:
        """Delete the files of the step and of later ones."""
        for path in self._folder.glob("step-*.parquet"):
            if int(path.stem.removeprefix("step-")) >= step:
                path.unlink()

    def log(self, record: StepRecord) -> None:
        """Write the file of a step."""
        heads = record.heads
        keys = zip(*heads.places, strict=True)
        columns: dict[str, Any] = dict(zip(heads.keys, map(list, keys), strict=True))
        for name in heads.columns:
            columns[name] = heads[name].astype(np.int64) if name in COUNTS else heads[name]
        table = self._pyarrow.table({"step": np.full(len(heads), record.step), **columns})
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{record.step:010d}.parquet"
        part = self._folder / f".{path.name}"  # readers of the folder skip it
        try:
            self._parquet.write_table(table, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)  # of a full disk


class TensorBoard(Target):
    """A `SummaryWriter`: scalars of the model and of each layer, and images of layers × heads."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, record: StepRecord) -> None:
        """Write the scalars and the images."""
        for name, value in record.numbers().items():
            self._writer.add_scalar(name, value, record.step)
        for column in IMAGES:
            # TensorBoard shows one kind of data for a tag, so images have tags that scalars have not.
            image = draw_heads(record.heads, column)
            self._writer.add_image(f"attention/heads/{column}", image, record.step, dataformats="HWC")


class WeightsAndBiases(Target):
    """A run of wandb, or its module: numbers of the model and of each layer, and images of layers × heads.

    The step is a metric of its own, `attention/step`: wandb drops what is logged for an earlier step than its own.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._is_defined = False

    def log(self, record: StepRecord) -> None:
        """Log the numbers and the images."""
        wandb = sys.modules["wandb"]
        if not self._is_defined:
            self._is_defined = True
            self._run.define_metric("attention/*", step_metric="attention/step")
        images = {
            f"attention/heads/{column}": wandb.Image(draw_heads(record.heads, column)) for column in IMAGES
        }
        self._run.log({**record.numbers(), **images, "attention/step": record.step})


class MLflow(Target):
    """The module mlflow: numbers of the model and of each layer that are finite."""

    def __init__(self, mlflow: Any) -> None:
        self._mlflow, self._run_id = mlflow, None

    def prepare(self) -> None:
        """Find the active run, which mlflow knows for each thread only."""
        run = self._mlflow.active_run() or self._mlflow.start_run()
        self._run_id = run.info.run_id

    def log(self, record: StepRecord) -> None:
        """Log the numbers."""
        finite = {name: value for name, value in record.numbers().items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=record.step, run_id=self._run_id)


def make_target(target: Any) -> Target:
    """Return where the numbers of `Monitor(to=…)` go; no library is imported to recognise its objects."""
    library = (getattr(target, "__name__", None) or type(target).__module__).split(".")[0]
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        return ParquetFolder(path) if path.suffix == ".parquet" else JsonLines(path)
    if callable(getattr(target, "add_scalar", None)) and callable(getattr(target, "add_image", None)):
        return TensorBoard(target)
    if library == "wandb" and callable(getattr(target, "log", None)):
        return WeightsAndBiases(target)
    if library == "mlflow" and callable(getattr(target, "log_metrics", None)):
        return MLflow(target)
    if callable(target):
        return Function(target)
    raise ArgumentTypeError(
        "Monitor",
        received=f"to={describe_argument(target)}",
        expected="a function (numbers, step), a path, a SummaryWriter, a wandb run, or the module mlflow",
        hint="For any other logger, pass a function: to=lambda numbers, step: logger.log(numbers, step).",
    )


class LogThread:
    """The thread and the queue of a target.

    Args:
        target: Where the numbers go.

    Attributes:
        num_failed: Number of steps for which the target raised an exception.
        num_dropped: Number of steps that were dropped since the queue was full.
        error: The first exception, with its step.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_failed = self.num_dropped = 0
        self.error: tuple[int, Exception] | None = None
        self._queue: queue.Queue[StepRecord | int | None] = queue.Queue(QUEUE_STEPS)
        self._thread: threading.Thread | None = None
        self._num_done = 0
        self._num_done_at_timeout: int | None = None

    @property
    def num_waiting(self) -> int:
        """Number of steps that are not logged yet."""
        return self._queue.unfinished_tasks

    def put(self, item: StepRecord | int) -> None:
        """Queue a step; a number removes this step and later ones, which the resumed run logs again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regard.monitor", daemon=True)
            self._thread.start()
            _running.add(self)
        try:
            if not isinstance(item, int):
                self.target.prepare()
            self._queue.put_nowait(item)
        except queue.Full:
            self.num_dropped += 1
        except Exception as error:
            self._fail(item, error)

    def stop(self) -> None:
        """End the thread after the steps that wait; a target that hangs keeps it."""
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, int):
                    self.target.resume(item)
                else:
                    self.target.log(item)
            except Exception as error:
                self._fail(item, error)
            finally:
                self._num_done += 1
                self._queue.task_done()

    def _fail(self, item: StepRecord | int, error: Exception) -> None:
        self.num_failed += 1
        if self.error is None:
            self.error = (item if isinstance(item, int) else item.step), error

    def wait(self, deadline: float) -> None:
        """Wait until every step is logged, or until a time of `time.monotonic`; not twice for a target that hangs."""
        if self._num_done == self._num_done_at_timeout:
            return
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks and (left := deadline - time.monotonic()) > 0:
                self._queue.all_tasks_done.wait(left)
        self._num_done_at_timeout = self._num_done if self.num_waiting else None


# Threads are daemons, so that a target that hangs does not keep the process alive; its end waits for the others.
_running: weakref.WeakSet[LogThread] = weakref.WeakSet()


def wait_for_all(threads: Iterable[LogThread]) -> None:
    """Wait until every step is logged, for at most `FLUSH_SECONDS`."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for thread in threads:
        thread.wait(deadline)


@atexit.register
def _wait_at_exit() -> None:
    wait_for_all(list(_running))


def draw_heads(heads: Snapshot, column: str) -> Any:
    """Draw one number of each head, a row of cells for each layer: (height, width, 3), uint8, dark is low.

    Shares are drawn from 0 to 1; others from 0 to the largest of the step. Heads that a layer does not have, and NaN,
    are grey.
    """
    layer, head = np.array([place[1:] for place in heads.places]).T
    cells = np.full((1 + layer.max(), 1 + head.max()), np.nan)
    cells[layer, head] = heads[column]
    known = cells[np.isfinite(cells)]
    top = 1.0 if column in SHARES else max(known.max(initial=0.0), np.finfo(float).tiny)
    level = np.clip(cells / top, 0.0, 1.0)[..., None]
    # From dark blue over teal to light yellow, of rising lightness.
    stops = np.array([[24, 24, 84], [38, 130, 142], [253, 231, 37]], float)
    position = np.nan_to_num(level * (len(stops) - 1))
    low = np.minimum(position.astype(int), len(stops) - 2)[..., 0]
    colours = stops[low] + (position - low[..., None]) * (stops[low + 1] - stops[low])
    colours = np.where(np.isnan(level), 128.0, colours)
    pixels = min(PIXELS, max(IMAGE_PIXELS // max(cells.shape), 1))
    image = colours.round().astype(np.uint8).repeat(pixels, 0).repeat(pixels, 1)
    if pixels > 3:  # lines between cells
        image[pixels - 1 :: pixels] = image[:, pixels - 1 :: pixels] = 255
    return image
