"""Where the numbers go: each target receives them, and what it wrote is read back with its own library."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.monitor import Monitor
from regard.monitor.loggers import PIXELS, draw_heads, flatten
from tests.helpers.training import Decoder, train


def run(to: object, steps: int = 3) -> Monitor:
    torch.manual_seed(0)
    model = Decoder()
    with Monitor(model, every=2, to=to, alarms=()) as monitor:
        train(model, torch.optim.SGD(model.parameters(), 0.1), steps)
    assert len(monitor.history) == 2 * 2 * 4  # steps, layers, heads
    return monitor


def test_functions_get_numbers_by_name_and_the_step() -> None:
    received = []
    monitor = run([lambda numbers, step: received.append((numbers, step)), lambda numbers, step: None])
    assert [step for _, step in received] == [0, 2]
    row = monitor.history.filter(step=2, layer=1, head=3)[0]
    numbers = received[1][0]
    assert numbers["attention/layer1.head3/entropy"] == row["entropy"]
    last = monitor.history.filter(step=2)
    assert monitor.last_rows == last
    assert numbers["attention/max_score"] == max(last.column("max_score"))
    assert numbers["attention/entropy_min"] == min(last.column("entropy_min"))
    assert numbers["attention/first"] == pytest.approx(np.mean(last.column("first")))
    assert numbers["attention/rows"] == sum(last.column("rows"))


def test_paths_get_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    monitor = run(path)
    assert [json.loads(line) for line in path.read_text().splitlines()] == monitor.history


def test_tensorboard_has_scalars_and_an_image_of_layers_and_heads(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        monitor = run(writer)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    scalars = events.Scalars("attention/layer1.head2/entropy")
    assert [event.step for event in scalars] == [0, 2]
    row = monitor.history.filter(step=2, layer=1, head=2)[0]
    assert scalars[1].value == np.float32(row["entropy"])
    tags = events.Tags()
    assert tags["images"] and not set(tags["images"]) & set(
        tags["scalars"]
    )  # the server shows one kind for a tag
    images = events.Images("attention/heads/max_score")
    assert [event.step for event in images] == [0, 2]
    assert (images[0].height, images[0].width) == (2 * PIXELS, 4 * PIXELS)
    from PIL import Image  # tensorboard's images need it, too

    decoded = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)))
    np.testing.assert_array_equal(decoded, draw_heads(monitor.last_rows, "max_score"))


def test_images_order_numbers_by_lightness() -> None:
    rows = [{"layer": 0, "head": head, "entropy": float(head)} for head in range(4)]
    rows += [{"layer": 1, "head": 0, "entropy": math.nan}]
    image = draw_heads(rows, "entropy")
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
    for step in (0, 2):
        rows = monitor.history.filter(step=step)
        for name, value in list(flatten(rows).items())[:3]:
            assert name.encode() in path.read_bytes()
            assert json.dumps(value).encode() in path.read_bytes()


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
    assert metrics[1].value == flatten(monitor.last_rows)["attention/max_score"]


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
        Monitor(model, every=1, to=targets, alarms=()) as monitor,
        pytest.warns(UserWarning, match="target of `to` failed in step 0") as caught,
    ):
        assert train(model, torch.optim.SGD(model.parameters(), 0.1), 4) == losses
    reasons = [str(item.message) for item in caught]
    assert len(reasons) == 2 and "the server is down" in reasons[0] and "FileNotFoundError" in reasons[1]
    assert calls == received == [0, 1, 2, 3] and monitor.num_failed_logs == 3 + 4
    assert [json.loads(line) for line in path.read_text().splitlines()] == monitor.history
    assert len(monitor.history) == 4 * 2 * 4
