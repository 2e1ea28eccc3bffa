"""A run that is killed and resumed has the rows and the alarms of a run that is not."""

from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.monitor import Monitor, ScoreGrowth
from tests.helpers.nightly import keep_in_ci
from tests.helpers.rank_processes import CONTEXT
from tests.helpers.training import Decoder, compute_loss, draw_batch, train

ALARMS = [ScoreGrowth(value=1.0, floor=0.2, factor=1.3)]


class Run:
    """A training run whose learning rate rises until scores grow, with checkpoints in memory."""

    def __init__(self, folder: Path, *targets: str) -> None:
        torch.manual_seed(3)
        self.model = Decoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.monitor = Monitor(
            self.model,
            every=2,
            to=[folder / target for target in targets],
            alarms=ALARMS,
            on_alarm=lambda alarm: None,
        )

    def save(self) -> bytes:
        file = io.BytesIO()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), self.monitor.state_dict())
        torch.save(parts, file)
        return file.getvalue()

    def load(self, checkpoint: bytes) -> None:
        model, optimizer, monitor = torch.load(io.BytesIO(checkpoint))
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.monitor.load_state_dict(monitor)

    def train(self, first: int, last: int, after_step: Callable[[], object] | None = None) -> None:
        with self.monitor:
            train(self.model, self.optimizer, last - first, first_step=first, after_step=after_step)


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).sort_by("step").to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("target", ["rows.jsonl", "rows.parquet"])
def test_interrupted_runs_have_the_rows_and_alarms_of_one_that_was_not(target: str, tmp_path: Path) -> None:
    if target.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / "whole").mkdir()
    whole = Run(tmp_path / "whole", target)
    whole.train(0, 24)
    assert len(whole.monitor.raised) > 3
    draw = random.Random(0)
    for number in range(5):
        folder = tmp_path / f"parts{number}"
        folder.mkdir()
        step, checkpoint = 0, None
        while step < 24:
            run = Run(folder, target)
            if checkpoint is not None:
                run.load(checkpoint)
            end = min(step + draw.randint(1, 9), 24)
            run.train(step, end)
            checkpoint, step = run.save(), end
            if step < 24:  # a few steps after the checkpoint, which are lost
                run.train(step, min(step + draw.randint(0, 5), 24))
                if target.endswith(".jsonl") and draw.random() < 0.5:
                    with (folder / target).open("a") as file:
                        file.write('{"step": 99, "modu')  # killed while it wrote
        assert run.monitor.raised == whole.monitor.raised
        assert list(run.monitor.history) == list(whole.monitor.history)
        assert str(run.monitor.layer_history[:]) == str(whole.monitor.layer_history[:])  # has NaN
        assert read_rows(folder / target) == read_rows(tmp_path / "whole" / target)


TARGETS = ["rows.jsonl", "rows.parquet"]
STEPS = 40


def run_parts(folder: Path, seed: int, pipe: Any) -> None:
    """Run processes that are killed until one reaches the end, and send their exit codes."""
    import pyarrow.parquet  # noqa: F401 - imported once, before the forks

    torch.set_num_threads(1)
    codes: list[int] = []
    while not codes or codes[-1] != 0:
        child = os.fork()
        if not child:
            train_until_killed(folder, random.Random(100 * seed + len(codes)))
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    pipe.send(codes)


def train_until_killed(folder: Path, draw: random.Random) -> None:
    """Continue a run from its last checkpoint; SIGKILL ends the process at a random moment of a random step."""
    run, path = Run(folder, *TARGETS), folder / "checkpoint.pt"
    if path.exists():
        run.load(path.read_bytes())
    first = run.monitor.num_steps
    last = max(first + draw.randint(1, 15), 4)  # before the first checkpoint, a new run appends

    def after_step() -> None:
        step = run.monitor.num_steps
        if step % 4 == 0:
            part = path.with_suffix(".part")
            part.write_bytes(run.save())
            part.replace(path)
        if step == last:
            delay = draw.choice([0.0, 0.01 * draw.random()])
            if not delay:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    run.train(first, STEPS, after_step)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("seed", keep_in_ci(range(20), 0))
def test_killed_processes_have_the_rows_and_alarms_of_a_run_that_was_not(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = Run(tmp_path / "whole", *TARGETS)
    whole.train(0, STEPS)
    assert len(whole.monitor.raised) > 3
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=run_parts, args=(tmp_path / "parts", seed, theirs))
    process.start()
    theirs.close()
    codes = ours.recv()
    process.join()
    assert len(codes) > 2 and set(codes[:-1]) == {-signal.SIGKILL}
    resumed = Run(tmp_path / "parts")
    resumed.load((tmp_path / "parts/checkpoint.pt").read_bytes())
    assert resumed.monitor.raised == whole.monitor.raised
    assert list(resumed.monitor.history) == list(whole.monitor.history)
    assert str(resumed.monitor.layer_history[:]) == str(whole.monitor.layer_history[:])  # has NaN
    for own, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)
    for target in TARGETS:
        assert read_rows(tmp_path / "parts" / target) == list(whole.monitor.history)
        assert read_rows(tmp_path / "whole" / target) == list(whole.monitor.history)


def test_a_new_run_appends_to_the_file_of_another(tmp_path: Path) -> None:
    for run in range(2):
        first = Run(tmp_path, "rows.jsonl")
        first.train(0, 3)
        assert [row["step"] for row in read_rows(tmp_path / "rows.jsonl")] == ([0] * 8 + [2] * 8) * (run + 1)


def test_a_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, "rows.jsonl")
    run.train(0, 3)
    state = run.monitor.state_dict()
    other = Run(tmp_path, "other.jsonl").monitor
    with pytest.raises(regard.ArgumentError, match=r"result of monitor\.state_dict"):
        other.load_state_dict({"step": 3})
    other.load_state_dict(state)
    with pytest.raises(regard.ArgumentError, match="loaded state"):
        other.attach(step=5)
    other.attach(step=3)
    with pytest.raises(regard.ArgumentError, match="attached"):
        other.load_state_dict(state)
    other.detach()


def run_with_losses(losses: list[float], before_step: bool) -> tuple[list[int], list[tuple[int, str]]]:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Monitor(model, every=1000, alarms=()) as monitor:
        for step, loss in enumerate(losses):
            compute_loss(model, draw_batch(step)).backward()
            if before_step:
                monitor.observe_loss(torch.tensor(loss))
            optimizer.step()
            optimizer.zero_grad()
            if not before_step:
                monitor.observe_loss(loss)
    return monitor.history.steps, [(incident.step, incident.reason) for incident in monitor.incidents]


@pytest.mark.parametrize("before_step", [True, False])
def test_a_loss_that_rises_or_is_nan_monitors_the_next_step(before_step: bool) -> None:
    usual = [2.0 + 0.01 * math.sin(step) for step in range(30)]
    losses = usual.copy()
    losses[20], losses[25] = 4.0, math.nan
    assert run_with_losses(losses, before_step) == (
        [0, 21, 26],
        [(21, "the loss rose from 2.001 to 4"), (26, "the loss is nan")],
    )
    assert run_with_losses(usual, before_step) == ([0], [])
    falling = [5.0 * 0.9**step for step in range(30)]
    assert run_with_losses(falling, before_step) == ([0], [])


def test_a_requested_step_is_monitored_with_its_worst_heads() -> None:
    torch.manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        model.blocks[1].query.weight[4:8] *= 40  # head 1
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with Monitor(model, every=100, alarms=()) as monitor:
        train(model, optimizer, 5)
        monitor.request("the gradient is large")
        train(model, optimizer, 3)
        assert monitor.history.steps == [0, 5]
    ((step, reason, rows),) = monitor.incidents
    assert (step, reason) == (5, "the gradient is large")
    assert (rows[0]["module"], rows[0]["head"]) == ("blocks.1", 1)
    assert rows[0] in monitor.history.filter(step=5)


@pytest.mark.parametrize("observe", ["request", "observe_loss"])
def test_a_request_while_nothing_runs_waits_for_a_forward_pass(observe: str) -> None:
    model = Decoder()
    call: Callable[[Monitor], object] = (
        (lambda monitor: monitor.request())
        if observe == "request"
        else lambda monitor: monitor.observe_loss(math.inf)
    )
    with Monitor(model, every=100, alarms=(), optimizer=None) as monitor:
        model(draw_batch(0))
        monitor.step()
        call(monitor)
        monitor.step()  # a step without a forward pass, such as one that a loss scaler skips
        model(draw_batch(0))
        monitor.step()
        model(draw_batch(0))
        monitor.step()
    assert monitor.history.steps == [0, 2] and [incident.step for incident in monitor.incidents] == [2]
