"""The parts of a rank's work with a block of keys cover what the mask allows, once, in calls without mask tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import regard  # noqa: E402
from regard.distributed.layouts import build_layout  # noqa: E402
from regard.distributed.ring import split_parts, take_block_part  # noqa: E402
from regard.engines.torch_lowering import lower_mask  # noqa: E402

LENGTHS = {"even": [8, 8, 8], "two ranks": [12, 12], "uneven": [5, 0, 11], "odd": [7, 9, 3, 4]}
MASKS = {
    "none": lambda length: None,
    "causal": lambda length: regard.causal(),
    "window": lambda length: regard.sliding_window(5),
    "prefix": lambda length: regard.masks.prefix(6),
    "documents": lambda length: regard.causal() & regard.masks.document(np.arange(length) // 10),
}


def build_problem(mask, length: int, positions: np.ndarray):
    A = regard.attention(torch.zeros(1, length, 2), torch.zeros(1, length, 2), mask=mask)
    problem = A.problem
    return replace(problem, query=problem.query[:, : len(positions)], positions=positions)


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("lengths_name", LENGTHS)
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_parts_cover_what_the_mask_allows_once(mask_name, lengths_name, name) -> None:
    lengths = LENGTHS[lengths_name]
    layout, length = build_layout(name, lengths), sum(lengths)
    mask = MASKS[mask_name](length)
    allowed = np.ones((length, length), bool) if mask is None else mask.to_dense(length, length)
    for rank, owner in np.ndindex(len(lengths), len(lengths)):
        rows, keys = layout.positions(rank), layout.positions(owner)
        counts = np.zeros((len(rows), len(keys)), int)
        own_allowed = allowed[np.ix_(rows, keys)]
        for part in split_parts(build_problem(mask, length, rows), layout.chunks[owner]):
            counts[part.rows, part.keys] += 1
            found = own_allowed[part.rows, part.keys]
            assert found.all() if part.is_full else found.any()
        assert (counts <= 1).all() and (counts[own_allowed] == 1).all()


@pytest.mark.parametrize("lengths_name", LENGTHS)
@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_a_causal_mask_needs_no_mask_tile(lengths_name, name) -> None:
    lengths = LENGTHS[lengths_name]
    layout = build_layout(name, lengths)
    for rank, owner in np.ndindex(len(lengths), len(lengths)):
        problem = build_problem(regard.causal(), sum(lengths), layout.positions(rank))
        key = torch.zeros(1, layout.lengths[owner], 2)
        for part in split_parts(problem, layout.chunks[owner]):
            own = take_block_part(problem, key, part)
            q_range = range(int(own.positions[0]), int(own.positions[-1]) + 1)
            for band in lower_mask(own.frame, own.mask, q_range, own.kv_range, False):
                assert band.blocks and not any(block.has_tile for block in band.blocks)
