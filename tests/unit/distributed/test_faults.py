"""A rank that dies, stops, fails, is late, or comes with other arguments is named by all others."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from regard import ArgumentError, Entropy, TopK, causal, distributed, sliding_window  # noqa: E402
from regard.distributed import RankError, peer_group  # noqa: E402
from tests.helpers.ring_drill import LIMIT, Drill, run_drill  # noqa: E402


def draw(length: int = 6, width: int = 4, dtype: Any = torch.float32) -> Any:
    return torch.ones(2, length, width, dtype=dtype)


def call_with(group: Any, kind: str) -> Any:
    """Call with other arguments on rank 1 than on the others, then with the same."""
    is_odd = dist.get_rank(group) == 1
    arguments: dict[str, Any] = {"mask": causal()}
    query = key = draw()
    if kind == "shape" and is_odd:
        query = key = draw(width=5)
    elif kind == "dtype" and is_odd:
        query = key = draw(dtype=torch.float64)
    elif kind == "mask":
        arguments["mask"] = sliding_window([3, 4]) if is_odd else sliding_window([3, 5])
    elif kind == "layout":
        arguments["layout"] = "zigzag" if is_odd else "contiguous"
    elif kind == "wrong arguments" and is_odd:
        key = draw(width=3)
    try:
        A = distributed.attention(query, key, group=group, **arguments)
        if kind == "value":
            A @ draw(width=5 if is_odd else 3)
        elif kind == "measure":
            A.measure(TopK(2) if is_odd else TopK(3))
        elif kind == "operation":
            _ = A.measure(Entropy()) if is_odd else A @ draw()
        raise AssertionError("no error")
    except (RankError, ArgumentError) as error:
        raised = error
    # The ranks are still at the same operation, so that the group can be used.
    A = distributed.attention(draw(), draw(), group=group)
    assert torch.isfinite(A @ draw()).all()
    return type(raised).__name__, getattr(raised, "ranks", None), str(raised)


SAID = {
    "shape": "query (2, own, 5) on rank 1; expected query (2, own, 4)",
    "dtype": "dtype torch.float64 and torch.float64 on rank 1",
    "mask": "mask sliding_window([3, 4])",
    "layout": "layout zigzag on rank 1; expected layout contiguous",
    "wrong arguments": "on rank 1: attention: received query (heads 2, q_len 6, head_dim 4)",
    "value": "value (2, own, 5) on rank 1; expected value (2, own, 3)",
    "measure": "measures TopK(k=2)",
    "operation": "the call A.measure(…) on rank 1; expected the call A @ value",
}


@pytest.mark.parametrize("kind", SAID)
def test_a_rank_with_other_arguments_is_named_by_all(ranks, kind) -> None:
    for rank, (name, named, message) in enumerate(ranks.run(call_with, kind)):
        if kind == "wrong arguments" and rank == 1:  # it raises what is wrong with its own call
            assert name == "ArgumentError"
            continue
        assert (name, named) == ("RankError", (1,))
        assert SAID[kind] in message


def fail_on_rank_1(group: Any) -> Any:
    """Run out of memory on rank 1, in the middle of a ring."""
    from regard.distributed import product

    def fail(*args: Any) -> Any:
        raise MemoryError("no memory for a block")

    rank = dist.get_rank(group)
    try:
        A = distributed.attention(draw(), draw(), group=group)
        if rank == 1:
            product._BlockKernel.multiply = fail
        return str(A @ draw())
    except RankError as error:
        try:
            distributed.attention(draw(), draw(), group=group)
        except RankError as later:
            return error.ranks, str(error), later.ranks
    except MemoryError as error:
        return str(error)


def come_late(group: Any) -> Any:
    """Come after the others have stopped waiting, on rank 0."""
    peer_group.ARRIVAL_TIMEOUT = 2.0
    try:
        if dist.get_rank(group) == 0:
            time.sleep(5)
        distributed.attention(draw(), draw(), group=group)
    except RankError as error:
        return error.ranks, str(error)


def test_a_rank_that_fails_or_comes_late_is_named_by_all() -> None:
    from tests.helpers.rank_processes import RankProcesses

    # A group cannot be used after a fault, so these have processes of their own.
    failing, late = RankProcesses(3), RankProcesses(2)
    try:
        late.start(come_late)
        results = failing.run(fail_on_rank_1)
        assert results[1] == "no memory for a block"
        for ranks, message, later in (results[0], results[2]):
            assert ranks == later == (1,)
            assert "rank 1 failed with MemoryError: no memory for a block" in message
        for outcome in late.collect():
            assert outcome is not None and outcome.error is None, outcome
            ranks, message = outcome.result
            assert ranks == (0,)
            assert "rank 0 did not call attention within 2 s" in message
    finally:
        failing.stop()
        late.stop()


def answer_late(group, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_late_answer_is_not_that_of_the_next_call() -> None:
    from tests.helpers.rank_processes import RankProcesses

    processes = RankProcesses(2)
    try:
        with pytest.raises(AssertionError, match="rank 1: no answer"):
            processes.run(answer_late, 5.0, timeout=0.5)
        assert processes.run(answer_late, 0.0) == [0.0, 0.0]
    finally:
        processes.stop()


@pytest.mark.slow
def test_a_rank_that_dies_or_is_stopped_is_named_within_35_seconds(request) -> None:
    seeds = request.config.getoption("--seeds")
    drills = [Drill.draw(seed) for seed in range(2 * seeds)]  # even ones kill, odd ones stop
    drills += [Drill(kind, 3, 0, 7, "rank 0") for kind in (signal.SIGSTOP, signal.SIGKILL)[:seeds]]
    with ThreadPoolExecutor(4) as pool:  # most of the time is waiting
        for drill, reports in zip(drills, pool.map(run_drill, drills), strict=True):
            assert len(reports) == drill.size - 1
            for report in reports:
                assert report.ranks == (drill.victim,), (drill, report)
                assert report.seconds < LIMIT, (drill, report)
                assert report.exitcode == 0, (drill, report)
