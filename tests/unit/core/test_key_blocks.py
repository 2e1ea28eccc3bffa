"""A problem with a block of the keys of a longer sequence: products, statistics and states merge to the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import regard
from regard import alibi, causal, sliding_window
from regard.core.block_loop import SoftmaxStats, accumulate_states, compute_stats, init_online_softmax
from regard.engines import native
from regard.masks import first
from regard.measures import Distance, Entropy, Mass, Position, Received, TopK
from regard.tiling import use_tile_sizes

torch = pytest.importorskip("torch")

KEYS = 47
EDGES = (0, 13, 14, 40, KEYS)
MASKS = [None, causal("lower_right"), sliding_window(9, align="lower_right") | first(3)]


def split_keys(problem):
    """The problem as blocks of its keys."""
    return [
        replace(problem, key=problem.key[:, start:stop], first_key=start) for start, stop in pairwise(EDGES)
    ]


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [
        torch.tensor(rng.normal(size=shape)) for shape in ((2, 4, 31, 8), (2, 2, KEYS, 8), (2, 2, KEYS, 5))
    ]


@pytest.mark.parametrize("score_mod", [None, alibi(align="lower_right")], ids=["plain", "alibi"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_fused_products_of_blocks_merge_to_the_product(mask, score_mod, arrays) -> None:
    query, key, value = arrays
    A = regard.attention(query, key, mask=mask, score_mod=score_mod, enable_gqa=True)
    problem = A.problem
    flat = value.reshape(4, KEYS, 5)
    with use_tile_sizes(mask_rows=8, mask_tile_rows=8):
        parts = [
            block.product(flat[:, block.kv_range.start : block.kv_range.stop], problem.key_index)[:2]
            for block in split_keys(problem)
        ]
    output, lse = regard.merge_states(parts)
    torch.testing.assert_close(output.reshape(2, 4, 31, 5), A @ value)
    torch.testing.assert_close(lse.reshape(2, 4, 31), A.lse)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_states_of_blocks_merge_to_the_results(mask, compiled, arrays) -> None:
    query, key, _ = arrays
    measures = [Entropy(), Received(), Distance("lower_right"), Position(), Mass(first(15)), TopK(5)]
    instruction_sets = native.list_instruction_sets()
    if compiled and not instruction_sets:
        pytest.skip("the compiled pass is not built")
    with native.use_instruction_set(instruction_sets[-1] if compiled else None):
        A = regard.attention(query, key, mask=mask, enable_gqa=True)
        expected = A.measure(*measures)
        problem = A.problem
        blocks = split_keys(problem)
        stats = [compute_stats(block, compiled=compiled) for block in blocks]
        largest = torch.stack([part.max for part in stats]).amax(0)
        total = sum(part.sum * torch.exp(part.max - largest.clamp(min=-1e30)) for part in stats)
        known = SoftmaxStats(largest, total, is_compiled=compiled)
        states = [accumulate_states(block, measures, known) for block in blocks]
    for i, (name, whole) in enumerate(expected._asdict().items()):
        bound = measures[i].bind(problem)
        own = [part[i] for part in states]
        if name == "received":
            # Column sums of the compiled pass cover the keys of the block, those of the loop all keys.
            own = [torch.cat(own, -1)] if compiled else own
        state = own[0]
        for part in own[1:]:
            state = bound.merge(state, part)
        result = bound.finish(state)
        if name == "topk":
            assert torch.equal(result.indices.reshape(whole.indices.shape), whole.indices)
            result, whole = result.values, whole.values
        torch.testing.assert_close(result.reshape(whole.shape), whole)


def test_a_sink_of_another_dtype_leaves_the_tiles_in_theirs(arrays) -> None:
    query, key, _ = (array.float() for array in arrays)
    sink = torch.zeros(4, dtype=torch.float64)
    for convert in (np.asarray, torch.as_tensor):
        A = regard.attention(convert(query), convert(key), sink=convert(sink), enable_gqa=True)
        assert init_online_softmax(A.problem, 3).max.dtype == A.problem.query.dtype
