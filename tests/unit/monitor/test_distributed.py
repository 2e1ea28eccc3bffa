"""Several processes: one SUM and one MAX all-reduce, and the numbers of one process on the joined batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.monitor import Monitor
from tests.helpers.nightly import keep_in_ci
from tests.helpers.training import Decoder, compute_loss, draw_batch

ROOT = Path(__file__).parents[3]
STEPS = 4

WORKER = """
import json, os, sys
import torch
import torch.distributed as dist
from regard.monitor import Monitor
from tests.helpers.training import Decoder, compute_loss, draw_batch

rank, size, port, way, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
torch.manual_seed(1)
model = Decoder().double()
if way == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    watched = trained = model
else:
    trained = torch.nn.parallel.DistributedDataParallel(model)
    watched = trained if rank else model
optimizer = torch.optim.SGD(trained.parameters(), 0.5)
reduced, all_reduce, logged = [], dist.all_reduce, []

def count(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    reduced.append((str(op), tensor.numel()))
    return all_reduce(tensor, op=op, group=group, async_op=async_op)

dist.all_reduce = count
with Monitor(watched, every=2, alarms=(), to=lambda numbers, step: logged.append(step)) as monitor:
    for step in range(4):
        compute_loss(trained, draw_batch(step, batch=6)[rank::size]).backward()
        optimizer.step()
        optimizer.zero_grad()
with open(path, "w") as file:
    json.dump({"history": monitor.history, "reduced": reduced, "logged": logged}, file)
dist.barrier()
os._exit(0)  # a busy machine takes long to tear down the process group
"""


def run_processes(size: int, way: str, folder: Path) -> list[dict]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = [folder / f"{rank}.json" for rank in range(size)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(size), str(port), way, str(path)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=240)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    return [json.loads(path.read_text()) for path in paths]


def run_one_process() -> list[dict]:
    torch.manual_seed(1)
    model = Decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Monitor(model, every=2, alarms=()) as monitor:
        for step in range(STEPS):
            compute_loss(model, draw_batch(step, batch=6)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor.history


@pytest.mark.slow
@pytest.mark.parametrize("size, way", keep_in_ci([(2, "ddp"), (3, "ddp"), (2, "fsdp")], (2, "ddp")))
def test_numbers_equal_those_of_one_process_on_the_joined_batch(size: int, way: str, tmp_path: Path) -> None:
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch.distributed with gloo is not available")
    results = run_processes(size, way, tmp_path)
    expected = run_one_process()
    for result in results:
        assert len(result["history"]) == len(expected) == 2 * 2 * 4
        for row, other in zip(result["history"], expected, strict=True):
            assert list(row) == list(other)
            for name, value in other.items():
                # The gradients are averaged in another order, so later steps differ by rounding.
                assert row[name] == (
                    value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-12)
                )
        sums, maxima = (
            2 * [[f"RedOpType.{kind}", 8 * columns]] for kind, columns in (("SUM", 6), ("MAX", 3))
        )
        assert sorted(entry for entry in result["reduced"]) == sorted(sums + maxima)
    assert [result["logged"] for result in results] == [[0, 2]] + [[]] * (size - 1)
