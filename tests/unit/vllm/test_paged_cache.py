"""Keys are read from caches in the layouts of vLLM's backends, which are learned, and from no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from regard.vllm.paged_cache import PagedCache, UnreadableCacheError

BLOCKS, HEADS, SIZE, DIM = 11, 3, 8, 16  # blocks of 8 tokens

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def write_into(keys_of: Any, values_of: Any, size: int = SIZE) -> Write:
    """Return a function that writes into views (blocks, tokens, heads, dim), as `reshape_and_cache_flash` does."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, offsets = slots // size, slots % size
        keys_of[blocks, offsets], values_of[blocks, offsets] = keys, values

    return write


def split_last(cache: torch.Tensor, size: int = SIZE) -> Write:
    return write_into(*cache.transpose(1, 2).split(DIM, dim=-1), size)


def build(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, Write]:
    """Build a cache of noise, and the function that writes it.

    The order of "side by side" is that of FlashAttention, FlashInfer, Triton and FlexAttention of vLLM 0.28 to 0.32.
    """
    if layout == "side by side, heads first":
        cache = torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM).to(dtype)
        return cache, split_last(cache)
    if layout == "side by side, tokens first":
        cache = torch.randn(BLOCKS, SIZE, HEADS, 2 * DIM).to(dtype).transpose(1, 2)
        return cache, split_last(cache)
    if layout == "layers inside blocks":
        cache = torch.randn(BLOCKS, 4, HEADS, SIZE, 2 * DIM).to(dtype)[:, 2]
        return cache, split_last(cache)
    if layout == "padded heads":
        cache = torch.randn(BLOCKS, HEADS, SIZE, 2 * (DIM + 8)).to(dtype)
        keys, values = cache.transpose(1, 2).split(DIM + 8, dim=-1)
        return cache, write_into(keys[..., :DIM], values[..., :DIM])
    if layout == "smaller kernel blocks":
        cache = torch.randn(2 * BLOCKS, HEADS, SIZE // 2, 2 * DIM).to(dtype)
        return cache, split_last(cache, SIZE // 2)
    if layout == "FlashAttention before 0.28":
        cache = torch.randn(2, BLOCKS, SIZE, HEADS, DIM).to(dtype)
        return cache, write_into(cache[0], cache[1])
    if layout == "FlashInfer before 0.28":
        cache = torch.randn(BLOCKS, 2, HEADS, SIZE, DIM).to(dtype).transpose(2, 3)
        return cache, write_into(cache[:, 0], cache[:, 1])
    if layout == "ROCm paged attention":
        cache = torch.randn(2, BLOCKS, HEADS * SIZE * DIM).to(dtype)
        pack = 16 // cache.element_size()
        keys = cache[0].view(BLOCKS, HEADS, DIM // pack, SIZE, pack)

        def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
            for key, value, slot in zip(k, v, slots.tolist(), strict=True):
                block, offset = divmod(slot, SIZE)
                keys[block, :, :, offset] = key.view(HEADS, -1, pack)
                cache[1, block].view(HEADS, DIM, SIZE)[..., offset] = value

        return cache, write
    if layout in ("CPU vec", "CPU pairs"):
        cache = torch.randn(BLOCKS, HEADS, SIZE, 2 * DIM).to(dtype)
        flat = cache.view(BLOCKS, HEADS, 2, SIZE * DIM)
        pack = 1 if layout == "CPU vec" else 2  # as AMX reads bfloat16

        def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
            for key, value, slot in zip(k, v, slots.tolist(), strict=True):
                block, offset = divmod(slot, SIZE)
                own = flat[block, :, 0].view(HEADS, DIM // pack, SIZE, pack)
                own[:, :, offset] = key.view(HEADS, -1, pack)
                flat[block, :, 1].view(HEADS, SIZE, DIM)[:, offset] = value

        return cache, write
    raise ValueError(layout)


LAYOUTS = (
    "side by side, heads first", "side by side, tokens first", "layers inside blocks", "padded heads",
    "smaller kernel blocks", "FlashAttention before 0.28", "FlashInfer before 0.28", "ROCm paged attention",
    "CPU vec", "CPU pairs",
)  # fmt: skip


def open_cache(cache: torch.Tensor, write: Write) -> PagedCache:
    return PagedCache(
        cache, write, num_blocks=BLOCKS, block_size=SIZE, kv_heads=HEADS, head_dim=DIM, value_dim=DIM
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_read_from_every_layout_and_nothing_is_left_behind(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, write = build(layout, dtype)
    before = cache.clone()
    paged = open_cache(cache, write)
    assert torch.equal(cache, before)
    # A request of 29 tokens in blocks 9, 2, 5 and 7, beside noise.
    keys, blocks = torch.randn(29, HEADS, DIM).to(dtype), [9, 2, 5, 7]
    slots = torch.tensor([blocks[token // SIZE] * SIZE + token % SIZE for token in range(29)])
    write(keys, torch.randn(29, HEADS, DIM).to(dtype), slots)
    for start, stop in ((0, 29), (0, 1), (7, 9), (8, 16), (13, 29), (28, 29)):
        read = paged.read(blocks, start, stop)
        assert torch.equal(read, keys[start:stop].transpose(0, 1))


def test_common_layouts_are_read_without_a_gather() -> None:
    views = [open_cache(*build(layout, torch.float32))._view is not None for layout in LAYOUTS]
    assert [layout for layout, has_view in zip(LAYOUTS, views, strict=True) if not has_view] == [
        "ROCm paged attention",
        "CPU pairs",
    ]


def test_keys_with_another_width_than_values_are_read() -> None:
    cache = torch.randn(BLOCKS, HEADS, SIZE, DIM + 4)
    keys, values = cache.transpose(1, 2).split([DIM, 4], dim=-1)
    write = write_into(keys, values)
    paged = PagedCache(
        cache, write, num_blocks=BLOCKS, block_size=SIZE, kv_heads=HEADS, head_dim=DIM, value_dim=4
    )
    wanted = torch.randn(3, HEADS, DIM)
    write(wanted, torch.zeros(3, HEADS, 4), torch.arange(SIZE, SIZE + 3))
    assert torch.equal(paged.read([1], 0, 3), wanted.transpose(0, 1))


def scale_keys(write: Write, cache: torch.Tensor) -> Write:
    return lambda keys, values, slots: write(keys * 0.5, values, slots)


def quantise(write: Write, cache: torch.Tensor) -> Write:
    return lambda keys, values, slots: write((keys * 4).round() / 4, values, slots)


def forget(write: Write, cache: torch.Tensor) -> Write:
    return lambda keys, values, slots: None


def change_order_in_later_blocks(write: Write, cache: torch.Tensor) -> Write:
    def changed(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        write(keys if int(slots[0]) < 2 * SIZE else keys.flip(-1), values, slots)

    return changed


def leave_out_a_head(write: Write, cache: torch.Tensor) -> Write:
    return lambda keys, values, slots: write(
        torch.cat([keys[:, :-1], torch.zeros_like(keys[:, -1:])], 1), values, slots
    )


def swap_keys_and_values(write: Write, cache: torch.Tensor) -> Write:
    return lambda keys, values, slots: write(values, keys.repeat(1, 1, 1) * 0 - 1, slots)


@pytest.mark.parametrize(
    "fault",
    [scale_keys, quantise, forget, change_order_in_later_blocks, leave_out_a_head, swap_keys_and_values],
)
def test_a_cache_that_is_not_read_back_is_refused_and_left_as_it_was(fault: Any) -> None:
    cache, write = build("side by side, heads first", torch.float32)
    before = cache.clone()
    with pytest.raises(UnreadableCacheError):
        open_cache(cache, fault(write, cache))
    assert torch.equal(cache, before)


def test_a_cache_without_an_axis_of_blocks_is_refused() -> None:
    with pytest.raises(UnreadableCacheError, match="shape"):
        open_cache(torch.zeros(5, HEADS, SIZE, 2 * DIM), lambda *_: None)
