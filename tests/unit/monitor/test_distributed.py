"""Several processes: the numbers are those of one process, however data, heads and layers are split between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.monitor import Monitor
from tests.helpers.nightly import keep_in_ci
from tests.helpers.training import Decoder, compute_loss, draw_batch

ROOT = Path(__file__).parents[3]
STEPS = 4

PRELUDE = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from regard.monitor import Monitor
from tests.helpers.training import Decoder, compute_loss, draw_batch

rank, size, port, way, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
torch.manual_seed(1)

def finish(**results):
    with open(path, "w") as file:
        json.dump(results, file)
    dist.barrier()
    os._exit(0)  # a busy machine takes long to tear down the process group
"""

REPLICAS = """
model = Decoder().double()
if way == "fsdp":
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
finish(history=list(monitor.history), reduced=reduced, logged=logged)
"""


def run_processes(size: int, script: str, way: str, folder: Path) -> list[dict[str, Any]]:
    """Run a script in several processes, and return the results that each passed to `finish`."""
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch.distributed with gloo is not available")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    paths = [folder / f"{rank}.json" for rank in range(size)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, str(rank), str(size), str(port), way, str(path)],
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


def run_one_process() -> list[dict[str, Any]]:
    torch.manual_seed(1)
    model = Decoder().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with Monitor(model, every=2, alarms=()) as monitor:
        for step in range(STEPS):
            compute_loss(model, draw_batch(step, batch=6)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(monitor.history)


@pytest.mark.slow
@pytest.mark.parametrize("size, way", keep_in_ci([(2, "ddp"), (3, "ddp"), (2, "fsdp")]))
def test_numbers_equal_those_of_one_process_on_the_joined_batch(size: int, way: str, tmp_path: Path) -> None:
    results = run_processes(size, REPLICAS, way, tmp_path)
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


FAILING_LOGGER = """
import warnings
trained = torch.nn.parallel.DistributedDataParallel(Decoder())
optimizer = torch.optim.SGD(trained.parameters(), 0.5)
calls = []

def log(numbers, step):
    calls.append(step)
    raise ConnectionError("the server is down")

with Monitor(trained, every=1, alarms=(), to=log) as monitor, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step in range(3):
        compute_loss(trained, draw_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
caught = [str(item.message) for item in caught if "target of `to` failed" in str(item.message)]
finish(calls=calls, failed=monitor.num_failed_logs, steps=list(monitor.history.column("step")), warnings=len(caught))
"""


@pytest.mark.slow
def test_a_logger_that_fails_ends_no_process(tmp_path: Path) -> None:
    first, second = run_processes(2, FAILING_LOGGER, "ddp", tmp_path)
    assert first["calls"] == [0, 1, 2] and (first["failed"], first["warnings"]) == (3, 1)
    assert second["calls"] == [] and (second["failed"], second["warnings"]) == (0, 0)
    assert first["steps"] == second["steps"] and sorted(set(first["steps"])) == [0, 1, 2]


ATTENTION = """
import math
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self, own_softmax, kv_heads=4):
        super().__init__()
        self.head_dim, self.num_heads, self.own_softmax, self.kv_heads = 8, 8, own_softmax, kv_heads
        self.q_proj, self.out = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(32, 8 * kv_heads, bias=False) for _ in range(2))

    def forward(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if self.own_softmax:
            n = x.shape[1]
            scores = query @ key.mT / math.sqrt(self.head_dim)
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
            if self.own_softmax == "merged":
                output = (scores.flatten(0, 1).softmax(-1) @ value.flatten(0, 1)).unflatten(0, query.shape[:2])
            else:
                output = scores.softmax(-1) @ value
        else:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(output.transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self, layers=2, own_softmax=False):
        super().__init__()
        self.layers = nn.ModuleList(Attention(own_softmax) for _ in range(layers))
        with torch.no_grad():
            self.layers[-1].q_proj.weight[48:56] *= 300  # head 6 of the last layer

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def compute_expected(model, x):
    \"\"\"Compute the largest score of each head of each layer in float64, with plain tensors.\"\"\"
    expected = []
    with torch.no_grad():
        for layer in model.layers:
            parts = (layer.q_proj, layer.k_proj)
            query, key = (part(x).double().unflatten(-1, (-1, 8)).transpose(1, 2) for part in parts)
            scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
            scores = scores.masked_fill(~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), -math.inf)
            expected.append(scores.amax((0, 2, 3)).tolist())
            x = layer(x)
    return expected
"""

TENSOR_PARALLEL = (
    ATTENTION
    + """
from regard import ArgumentError
from regard.capture.watchers import find_obstacle
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = Model(own_softmax=way if way in ("own softmax", "merged") else False)
x = torch.randn(4, 11, 32)
expected = compute_expected(model, x)
replicas = 2 if way in ("data parallel", "fsdp") else 1
mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("data", "heads"))
is_gathered = way in ("gathered", "gathered twice")
column = lambda: ColwiseParallel(output_layouts=Replicate()) if is_gathered else ColwiseParallel()
plan = {name: column() for name in ("q_proj", "k_proj", "v_proj")}
if way != "gathered":
    plan["out"] = RowwiseParallel(input_layouts=Replicate()) if is_gathered else RowwiseParallel()
for layer in model.layers:
    parallelize_module(layer, mesh["heads"], plan)
if way == "fsdp":
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
own = x.chunk(replicas)[mesh.get_coordinate()[0]]
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
group = mesh["data"].get_group() if way == "own group" else None
error = ""
with Monitor(model, every=1, process_group=group, on_alarm=lambda _: None) as monitor:
    try:
        model(own).sum().backward()
        optimizer.step()
    except ArgumentError as raised:
        error = str(raised)
alarms = [(alarm.module, alarm.head, alarm.kind) for alarm in monitor.raised]
obstacle = find_obstacle(model.layers[0].q_proj.weight)
finish(history=list(monitor.history), expected=expected, alarms=alarms, error=error, obstacle=obstacle)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, way",
    keep_in_ci(
        [
            (2, "sdpa"),
            (2, "own softmax"),
            (4, "data parallel"),
            (4, "fsdp"),
            (2, "gathered"),
            (2, "gathered twice"),
            (2, "own group"),
        ],
        (2, "sdpa"),
    ),
)
def test_heads_that_tensor_parallelism_splits_have_one_row_each(size: int, way: str, tmp_path: Path) -> None:
    results = run_processes(size, TENSOR_PARALLEL, way, tmp_path)
    for rank, result in enumerate(results):
        assert not result["error"]
        heads = range(4 * rank, 4 * rank + 4) if way == "own group" else range(8)
        rows = result["history"]
        assert [(row["layer"], row["head"]) for row in rows] == [
            (layer, head) for layer in range(2) for head in heads
        ]
        for row in rows:
            assert row["max_score"] == pytest.approx(result["expected"][row["layer"]][row["head"]], rel=1e-4)
            assert row["rows"] == 4 * 11 * (2 if "gathered" in way else 1)
        exploded = [["layers.1", 6, "score growth"]] if 6 in heads else []
        assert [alarm for alarm in result["alarms"] if alarm[2] == "score growth"] == exploded


@pytest.mark.slow
@pytest.mark.nightly
def test_heads_that_a_process_has_merged_with_the_batch_are_refused(tmp_path: Path) -> None:
    for result in run_processes(2, TENSOR_PARALLEL, "merged", tmp_path):
        assert "do not tell which heads" in result["error"] and "ColwiseParallel" in result["error"]
        assert not result["history"]
        assert "DTensor" in result["obstacle"][0]  # of a layer that passes one to an attention function


PIPELINE = (
    ATTENTION
    + """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from regard import ArgumentError
model = Model(4)
x = torch.randn(4, 11, 32)
expected = compute_expected(model, x)

class Stage(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        names = [str(i) if way == "same names" else str(number) for i, number in enumerate(numbers)]
        self.layers = nn.ModuleDict({name: model.layers[number] for name, number in zip(names, numbers)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x

numbers = [[rank], [rank + 2]] if way == "interleaved" else [[2 * rank, 2 * rank + 1]]
stages = [Stage(own) for own in numbers]
part = torch.empty(2, 11, 32, requires_grad=True)
example = {"input_args": part, "output_args": part}  # without them, a pass of its own would find the shapes
cpu, count = torch.device("cpu"), 2 * len(stages)
built = [PipelineStage(stage, rank + 2 * i, count, cpu, **example) for i, stage in enumerate(stages)]
loss_fn = lambda output, target: (output - target).square().mean()
if way == "interleaved":
    schedule = ScheduleInterleaved1F1B(built, 2, loss_fn=loss_fn)
    watched = nn.Module()
    watched.layers = nn.ModuleDict({name: layer for stage in stages for name, layer in stage.layers.items()})
else:
    schedule, (watched,) = Schedule1F1B(built[0], 2, loss_fn=loss_fn), stages
optimizer = torch.optim.SGD(watched.parameters(), 1e-3)
error = ""
with Monitor(watched, every=1, alarms=()) as monitor:
    schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == size - 1 else {}))
    try:
        optimizer.step()
    except ArgumentError as raised:
        error = str(raised)
finish(history=list(monitor.history), expected=expected, error=error)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("way", keep_in_ci(["stages", "interleaved", "same names"]))
def test_layers_of_pipeline_stages_have_their_own_rows(way: str, tmp_path: Path) -> None:
    for result in run_processes(2, PIPELINE, way, tmp_path):
        rows = result["history"]
        if way == "same names":
            assert not rows and "'layers.0' in processes that hold different layers" in result["error"]
            continue
        places = [(f"layers.{layer}", layer, head) for layer in range(4) for head in range(8)]
        assert [(row["module"], row["layer"], row["head"]) for row in rows] == places and not result["error"]
        for row in rows:
            assert row["max_score"] == pytest.approx(result["expected"][row["layer"]][row["head"]], rel=1e-4)
            assert row["rows"] == 4 * 11
