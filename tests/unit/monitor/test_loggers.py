"""Where the numbers go: each target receives them, and what it wrote is read back with its own library."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.monitor import Monitor, loggers
from regard.monitor.history import Snapshot
from regard.monitor.loggers import PIXELS, draw_heads
from tests.helpers.rank_processes import CONTEXT
from tests.helpers.training import Decoder, compute_loss, draw_batch, train


def run(to: object, steps: int = 3) -> Monitor:
    torch.manual_seed(0)
    model = Decoder()
    with Monitor(model, every=2, to=to, alarms=()) as monitor:
        train(model, torch.optim.SGD(model.parameters(), 0.1), steps)
    assert len(monitor.history) == len(range(0, steps, 2)) * 2 * 4  # steps, layers, heads
    return monitor


def test_functions_get_numbers_by_name_and_the_step() -> None:
    received = []
    monitor = run([lambda numbers, step: received.append((numbers, step)), lambda numbers, step: None])
    assert [step for _, step in received] == [0, 2]
    numbers, last = received[1][0], monitor.history.filter(step=2)
    assert monitor.last_rows == last
    assert monitor.last_numbers == {name: numbers[name] for name in monitor.last_numbers}
    for layer, rows in (("", last), ("layer0/", last.filter(layer=0)), ("layer1/", last.filter(layer=1))):
        assert numbers[f"attention/{layer}max_score"] == max(rows.column("max_score"))
        assert numbers[f"attention/{layer}entropy_min"] == min(rows.column("entropy_min"))
        assert numbers[f"attention/{layer}first"] == pytest.approx(np.median(rows.column("first")), rel=1e-14)
        assert numbers[f"attention/{layer}nonfinite"] == sum(rows.column("nonfinite")) == 0
    assert numbers["attention/rows"] == sum(last.column("rows"))
    assert len(numbers) == 9 + 2 * 6


def test_paths_get_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    monitor = run(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(monitor.history)


def test_tensorboard_has_scalars_and_an_image_of_layers_and_heads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        monitor = run(writer)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    scalars = events.Scalars("attention/layer1/max_score")
    assert [event.step for event in scalars] == [0, 2]
    assert scalars[1].value == np.float32(max(monitor.last_rows.filter(layer=1).column("max_score")))
    tags = events.Tags()
    assert tags["images"] and not set(tags["images"]) & set(
        tags["scalars"]
    )  # the server shows one kind for a tag
    images = events.Images("attention/heads/max_score")
    assert [event.step for event in images] == [0, 2]
    assert (images[0].height, images[0].width) == (2 * PIXELS, 4 * PIXELS)
    from PIL import Image  # tensorboard's images need it, too

    decoded = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)))
    np.testing.assert_array_equal(decoded, draw_heads(monitor.history.last, "max_score"))


def test_images_order_numbers_by_lightness() -> None:
    places = [("a", 0, head) for head in range(4)] + [("b", 1, 0)]
    values = np.array([[0.0], [1.0], [2.0], [3.0], [math.nan]])
    image = draw_heads(Snapshot(0, ("module", "layer", "head"), places, ("entropy",), values), "entropy")
    cells = image[PIXELS // 2 :: PIXELS, PIXELS // 2 :: PIXELS].astype(int)
    assert cells.shape == (2, 4, 3)
    assert (np.diff(cells[0].sum(-1)) > 0).all()
    assert (cells[1] == 128).all()  # NaN, and heads that the layer does not have


def test_wandb_logs_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="regard") as run_offline:
        monitor = run(run_offline)
    wandb.teardown()  # its process may write the file after the run
    (path,) = tmp_path.rglob("*.wandb")  # a binary file, with names and numbers as text
    content = path.read_bytes()
    for name, value in monitor.last_numbers.items():
        assert name.encode() in content and (value == int(value) or json.dumps(value).encode() in content)
    assert len(list(tmp_path.rglob("media/images/**/*.png"))) == 2 * 3


def test_mlflow_logs_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    try:
        with mlflow.start_run() as started:
            monitor = run(mlflow)
        metrics = mlflow.MlflowClient().get_metric_history(started.info.run_id, "attention/max_score")
    finally:
        mlflow.set_tracking_uri(None)
    assert [metric.step for metric in metrics] == [0, 2]
    assert metrics[1].value == monitor.last_numbers["attention/max_score"]


def test_other_targets_are_refused() -> None:
    with pytest.raises(regard.ArgumentTypeError, match="a function"):
        Monitor(Decoder(), to=[3.5])


def test_a_logger_that_fails_stops_neither_training_nor_the_other_loggers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    losses = train(plain, torch.optim.SGD(plain.parameters(), 0.1), 4)
    torch.manual_seed(0)
    model, calls, received = Decoder(), [], []

    def fail(numbers: dict[str, float], step: int) -> None:
        calls.append(step)
        if step != 2:
            raise ConnectionError("the server is down")

    path = tmp_path / "attention.jsonl"
    targets = [fail, path, tmp_path / "no folder" / "x.jsonl", lambda _, step: received.append(step)]
    with (
        pytest.warns(UserWarning, match="target of `to` failed in step 0") as caught,
        Monitor(model, every=1, to=targets, alarms=()) as monitor,
    ):
        assert train(model, torch.optim.SGD(model.parameters(), 0.1), 4) == losses
    reasons = [str(item.message) for item in caught]
    assert len(reasons) == 2 and "the server is down" in reasons[0] and "FileNotFoundError" in reasons[1]
    assert calls == received == [0, 1, 2, 3] and monitor.num_failed_logs == 3 + 4
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(monitor.history)
    assert len(monitor.history) == 4 * 2 * 4


def test_a_target_that_hangs_delays_neither_training_nor_other_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loggers, "FLUSH_SECONDS", 0.2)
    received, release = [], threading.Event()
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    targets = [lambda numbers, step: release.wait(), lambda numbers, step: received.append(step)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Monitor(model, every=1, to=targets, alarms=()) as monitor:
            train(model, optimizer, loggers.QUEUE_STEPS + 5)
            monitor.state_dict()  # waits for the target that hangs
            monkeypatch.setattr(loggers, "FLUSH_SECONDS", 3600.0)
            monitor.state_dict()  # does not wait for it again, nor does the end
    release.set()
    assert received == list(range(loggers.QUEUE_STEPS + 5)) and monitor.num_failed_logs == 0
    assert monitor.num_dropped_logs == 4  # one is in the target, and the queue is full
    texts = [str(item.message) for item in caught]
    assert any("steps are dropped" in text for text in texts)
    assert any("have not logged 17 steps" in text for text in texts)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sizes = tmp_path / "rows.jsonl", []
    write = io.FileIO.write

    class Disk(io.FileIO):
        def write(self, content: bytes) -> int:
            sizes.append(len(content))
            return write(self, content[:100] if len(sizes) == 2 else content)  # the second write does not fit

    monkeypatch.setattr(Path, "open", lambda self, mode, buffering=-1: Disk(self, mode.replace("b", "")))
    with pytest.warns(UserWarning, match="the disk may be full"):
        monitor = run(path, steps=5)
    monkeypatch.undo()
    assert monitor.num_failed_logs == 1
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0] * 8 + [4] * 8
    with pytest.warns(UserWarning, match="No space left"):
        assert run("/dev/full").num_failed_logs == 2


def train_with_bad_targets(folder: Path, max_file_bytes: int | None, pipe: Any) -> None:
    """Train with targets that raise, hang and fill the disk, and send the losses, the counts and the warnings."""
    import resource

    torch.set_num_threads(1)
    loggers.FLUSH_SECONDS = 1.0
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    def fail(numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("the server is down")

    targets = [fail, lambda numbers, step: threading.Event().wait(), folder / "rows.jsonl"]
    if importlib.util.find_spec("pyarrow"):
        targets.append(folder / "rows.parquet")
    torch.manual_seed(0)
    model = Decoder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Monitor(model, every=1, to=targets, alarms=()) as monitor:
            losses = train(model, torch.optim.SGD(model.parameters(), 0.1), 30)
    while sum(thread.num_waiting for thread in monitor._logs) > 1 + loggers.QUEUE_STEPS:
        time.sleep(0.05)  # the targets that do not hang end
    texts = [str(item.message) for item in caught]
    counts = len(targets), monitor.num_failed_logs, monitor.num_dropped_logs
    pipe.send((losses, counts, texts, list(monitor.history)))


@pytest.fixture(params=["largest file", "file system"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, int | None]]:
    """A folder that takes 32 kB, and the largest size of a file if the process has to be limited instead."""
    pytest.importorskip("resource")
    if request.param == "largest file":
        yield tmp_path, 2**15
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "regard", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mount needs root")
    yield tmp_path, None
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_logger_that_raises_one_that_hangs_and_a_full_disk_leave_the_losses(
    full_disk: tuple[Path, int | None],
) -> None:
    torch.manual_seed(0)
    plain = Decoder()
    expected = train(plain, torch.optim.SGD(plain.parameters(), 0.1), 30)
    folder, max_file_bytes = full_disk
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=train_with_bad_targets, args=(folder, max_file_bytes, theirs))
    process.start()
    theirs.close()
    losses, (num_targets, num_failed, num_dropped), texts, history = ours.recv()
    process.join()
    assert process.exitcode == 0 and losses == expected
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows[::8]]
    assert rows == [row for row in history if row["step"] in steps] and 0 < len(steps) < 30
    num_written = len(steps)
    if num_targets == 4:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(folder / "rows.parquet").sort_by("step").to_pylist()
        steps = {row["step"] for row in table}
        assert table == [row for row in history if row["step"] in steps] and steps
        num_written += len(steps)
    # One step is in the target that hangs, and its queue is full.
    assert num_written + num_failed + num_dropped + 1 + loggers.QUEUE_STEPS == num_targets * 30
    assert num_dropped >= 30 - 1 - loggers.QUEUE_STEPS and num_failed > 0
    for expected_text in ("the server is down", "steps are dropped", "have not logged 17 steps"):
        assert any(expected_text in text for text in texts)
    full = ("No space left", "disk may be full", "File too large")
    assert any(reason in text for reason in full for text in texts)


def test_parquet_has_a_file_for_each_step(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monitor = run(tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").sort_by("step").to_pylist() == list(monitor.history)
    assert [path.name for path in sorted((tmp_path / "rows.parquet").iterdir())] == [
        "step-0000000000.parquet",
        "step-0000000002.parquet",
    ]


def test_accelerate_logs_the_numbers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, logged = Decoder(), {}

    class Tracker(accelerate.tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None

        def __init__(self) -> None:
            super().__init__()

        def store_init_configuration(self, values: dict[str, object]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None) -> None:
            logged[step] = values

    accelerator = accelerate.Accelerator(cpu=True, log_with=Tracker(), gradient_accumulation_steps=2)
    accelerator.init_trackers("run")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    monitor = Monitor(model, every=2, to=accelerator.log, alarms=())
    with monitor:
        for batch in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(model, draw_batch(batch)))
                optimizer.step()
                optimizer.zero_grad()
    assert list(logged) == monitor.history.steps == [0, 2]
    assert set(monitor.history.column("rows")) == {2 * 3 * 23}  # two batches in a step
    assert monitor.last_numbers.items() <= logged[2].items()
