"""Tile sizes: changed for a block of code and a thread, and the same on the way back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import regard
from regard.tiling import TileSizes, tile_sizes, use_tile_sizes


def test_changes_end_with_the_block():
    before = tile_sizes()
    with use_tile_sizes(rows=3):
        with use_tile_sizes(columns=5):
            assert (tile_sizes().rows, tile_sizes().columns) == (3, 5)
        assert tile_sizes() == TileSizes(rows=3)
    assert tile_sizes() is before == TileSizes()


@use_tile_sizes(rows=3)
def fail() -> None:
    raise KeyError(tile_sizes().rows)


def test_changes_end_if_the_block_raises():
    with pytest.raises(KeyError, match="3"):
        fail()
    assert tile_sizes() == TileSizes()


def test_changes_are_seen_by_one_thread_only():
    with ThreadPoolExecutor(1) as pool, use_tile_sizes(rows=3):
        assert pool.submit(lambda: tile_sizes().rows).result() == 512


def test_an_unknown_size_is_refused():
    with pytest.raises(TypeError, match="width"), use_tile_sizes(width=3):
        pass


def test_a_gradient_meets_the_tiles_of_its_forward_pass():
    torch = pytest.importorskip("torch")
    query = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    with use_tile_sizes(rows=3, columns=4):
        loss = regard.attention(query, query).entropy().sum()
    loss.backward()
    (expected,) = torch.autograd.grad(regard.attention(query, query).entropy().sum(), query)
    torch.testing.assert_close(query.grad, expected)
