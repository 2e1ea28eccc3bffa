"""Every way to split a model between processes gives the numbers of one process, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from regard.errors import ArgumentError
from regard.monitor.head_layout import HeadSizes, find_layer_part
from tests.helpers.parallel_training import Way, train_in_one_process, train_part

WAYS = [
    Way(data=2),
    Way(data=2, options="ddp"),
    Way(data=2, options="fsdp"),
    Way(data=2, options="fsdp every linear"),
    Way(data=4, options="fsdp hybrid"),
    Way(heads=2),
    Way(heads=2, options="sequence"),
    Way(heads=2, options="own softmax"),
    Way(heads=2, options="whole keys"),
    Way(heads=4, options="whole keys"),
    Way(heads=4, options="one key"),
    Way(heads=4, options="seven heads"),
    Way(layers=2),
    Way(tokens=2),
    Way(tokens=4, options="uneven"),
    Way(tokens=2, options="zigzag uneven"),
    Way(tokens=2, options="documents"),
    Way(tokens=2, options="documents zigzag"),
    Way(tokens=2, options="torch contiguous"),
    Way(tokens=2, options="torch zigzag"),
    Way(tokens=4, options="torch zigzag"),
    Way(tokens=2, options="fsdp"),
    Way(data=2, heads=2),
    Way(data=2, heads=2, options="fsdp"),
    Way(data=2, heads=2, options="fsdp sequence"),
    Way(data=2, layers=2),
    Way(data=2, tokens=2),
    Way(data=2, tokens=2, options="documents"),
    Way(data=2, tokens=2, options="fsdp torch zigzag"),
    Way(layers=2, heads=2),
    Way(tokens=2, heads=2),
    Way(tokens=2, heads=2, options="torch zigzag"),
]
IN_CI = [
    Way(data=2, options="ddp"),
    Way(heads=2),
    Way(layers=2),
    Way(tokens=2, options="documents zigzag"),
    Way(tokens=2, options="torch zigzag"),
]


def describe(way: Way) -> str:
    sizes = (f"{name} {size}" for name, size in zip(way._fields, way[:4], strict=False) if size > 1)
    return ", ".join((*sizes, *([way.options] if way.options else [])))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [way if way in IN_CI else pytest.param(way, marks=pytest.mark.nightly) for way in WAYS],
    ids=describe,
)
def test_numbers_equal_those_of_one_process(ranks: Any, way: Way) -> None:
    expected, results = train_in_one_process(way), ranks.run(train_part, way)
    assert sum(result is not None for result in results) == way.size
    assert len(expected) == way.num_steps * 2 * (7 if "seven" in way.options else 4)
    for result in results[: way.size]:
        assert not result["error"]
        for row, other in zip(result["rows"], expected, strict=True):
            assert list(row) == list(other)
            for name, value in other.items():
                # The weights are in double precision: gradients are added up in another order.
                assert row[name] == (
                    value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=1e-9)
                ), (name, row["step"], row["layer"], row["head"])
        kinds = (f"RedOpType.{kind} of {way.size}" for kind in ("SUM", "MAX"))
        assert result["calls"] == dict.fromkeys(kinds, way.num_steps)


@pytest.mark.slow
def test_heads_that_are_exchanged_for_tokens_are_refused(ranks: Any) -> None:
    for result in ranks.run(train_part, Way(tokens=2, options="exchange heads"))[:2]:
        assert "'layers.0.attention' with 2 of its 4 heads" in result["error"] and not result["rows"]


# -- Which heads a process has -------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of which this process takes the place of rank 2 of 4."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def build(mesh: Any, num_heads: int | None, **rows: tuple[int, bool]) -> nn.Module:
    """Build a module whose projections have a number of rows, split or not."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    module = nn.Module()
    module.num_heads = num_heads
    for name, (size, is_split) in rows.items():
        linear = nn.Linear(40, size, bias=False)
        placements = [Shard(0) if is_split else Replicate()]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight, mesh, placements, src_data_rank=None))
        setattr(module, name, linear)
    return module


@pytest.mark.parametrize(
    "rows, sizes, expected",
    [
        ({"q_proj": (64, True), "k_proj": (32, True)}, (2, 1), (2, 4, 4)),
        ({"q_proj": (64, True), "k_proj": (16, False)}, (2, 2), (2, 4, 4)),  # keys as wide as its queries
        ({"query_of_mine": (64, True), "key_of_mine": (64, True)}, (2, 2), (2, 4, 4)),
        ({"q_proj": (64, True), "k_proj": (32, True)}, (8, 4), (0, 1, 0)),  # gathered
        ({"c_attn": (128, True)}, (2, 1), (2, 4, 4)),
        ({"c_attn": (128, True)}, (8, 4), (0, 1, 0)),
        ({"c_attn": (128, True)}, (4, 6), (0, 1, 0)),  # gathered, of which a quarter is as wide as four heads
        ({"q_proj": (64, False), "up": (128, True)}, (8, 4), (0, 1, 0)),
        ({"q_proj": (64, False)}, (8, 4), (0, 1, 0)),
    ],
)  # fmt: skip
def test_parts_of_the_heads_are_found_by_the_sizes_of_projections(
    mesh: Any, rows: dict[str, tuple[int, bool]], sizes: tuple[int, int], expected: tuple[int, int, int]
) -> None:
    module = build(mesh, None, **rows)
    part = find_layer_part(module, "", HeadSizes(*sizes, frozenset({8})))
    assert part[:4] == (sizes[0], *expected)


@pytest.mark.parametrize(
    "rows, num_heads, reason",
    [
        ({"query_of_mine": (64, True), "key_of_mine": (16, False)}, None, "do not tell which heads"),
        ({"q_proj": (72, True)}, None, "do not tell which heads"),
        ({"q_proj": (64, False)}, 8, "2 of its 8 heads"),
    ],
)
def test_parts_that_cannot_be_known_are_refused(
    mesh: Any, rows: dict[str, tuple[int, bool]], num_heads: int | None, reason: str
) -> None:
    with pytest.raises(ArgumentError, match=reason):
        find_layer_part(build(mesh, num_heads, **rows), "", HeadSizes(2, 2, frozenset({8})))
