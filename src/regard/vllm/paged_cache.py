"""`PagedCache`: the keys of a layer in the paged cache of a running engine.

The order of the numbers in a block differs by backend, version and instruction set, and vLLM does not describe it. It
is learned: keys with known values are written by the backend's own function, and searched for in the block. The order
is then verified with random keys in two other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = ["PagedCache", "UnreadableCacheError"]

# Digits in which the number of a key's element is written: integers up to 256 are exact in bfloat16.
BASE = 128


class UnreadableCacheError(Exception):
    """The keys in a cache could not be found where the backend wrote them; the message says why."""


class PagedCache:
    """Reads the keys of one layer from its paged cache.

    Args:
        cache: The tensor that vLLM allocated for the layer, of any shape and strides.
        write: Writes keys (tokens, kv_heads, head_dim) and their values into the slots of an index (tokens,).
        num_blocks: Number of blocks of the cache manager.
        block_size: Tokens of one block of the cache manager.
        kv_heads: Heads of the keys.
        head_dim: Width of a key.
        value_dim: Width of a value.

    Raises:
        UnreadableCacheError: If the keys that `write` wrote are not found.
    """

    def __init__(
        self,
        cache: torch.Tensor,
        write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        *,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
    ) -> None:
        # A kernel may divide a block of the manager into several of its own.
        axes = [
            axis for axis, size in enumerate(cache.shape) if size >= num_blocks and size % num_blocks == 0
        ]
        if not axes or cache.dim() < 2 or num_blocks < 3:
            raise UnreadableCacheError(
                f"the cache has shape {tuple(cache.shape)}, and the manager {num_blocks} blocks"
            )
        self._cache, self._axis = cache, axes[0]
        self._ratio = cache.shape[self._axis] // num_blocks
        self._size = block_size // self._ratio
        self._shape = (kv_heads, self._size, head_dim)
        self._value_dim, self._write = value_dim, write
        # The first block is a placeholder of vLLM.
        order = self._learn(1)
        self._view, self._order = self._find_view(order), order
        for block in (2, cache.shape[self._axis] - 1):
            self._verify(block)

    def read(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return the keys of the tokens from `start` to `stop` of a request, (kv_heads, stop - start, head_dim).

        Args:
            blocks: The request's blocks, as the cache manager counts them.
            start: First token.
            stop: The token after the last.
        """
        first, last = start // self._size, -(-stop // self._size)
        kernel_blocks = [
            blocks[block // self._ratio] * self._ratio + block % self._ratio for block in range(first, last)
        ]
        index = torch.tensor(kernel_blocks, device=self._cache.device)
        kv_heads, size, head_dim = self._shape
        if self._view is not None:
            keys = self._view[index]
        else:
            flat = self._cache.index_select(self._axis, index).movedim(self._axis, 0).flatten(1)
            keys = flat[:, self._order].view(-1, kv_heads, size, head_dim)
        keys = keys.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        return keys[:, start - first * size : stop - first * size]

    def _write_block(self, block: int, keys: torch.Tensor) -> None:
        """Write the keys of a block, (kv_heads, tokens, head_dim), and zeros for its values."""
        kv_heads, size, _ = self._shape
        slots = torch.arange(block * size, (block + 1) * size, device=self._cache.device)
        values = keys.new_zeros(size, kv_heads, self._value_dim)
        self._write(keys.transpose(0, 1).contiguous(), values, slots)

    def _learn(self, block: int) -> torch.Tensor:
        """Return where each element of a block's keys is among the elements of the block."""
        part = self._cache.select(self._axis, block)
        saved, count = part.clone(), math.prod(self._shape)
        numbers = torch.arange(count, device=part.device).view(self._shape)
        try:
            found, scale = torch.zeros(part.numel(), dtype=torch.int64, device=part.device), 1
            while scale < count:
                part.zero_()
                self._write_block(block, (numbers // scale % BASE + 1).to(part.dtype))
                digits = part.flatten().double()
                if scale == 1:
                    is_key = digits > 0
                if not torch.equal(digits > 0, is_key) or int(is_key.sum()) != count:
                    raise UnreadableCacheError(
                        f"{count} numbers were written to a block, and others were found"
                    )
                found += (digits.round().long() - 1).clamp(min=0) * scale
                scale *= BASE
        finally:
            part.copy_(saved)
        places = is_key.nonzero()[:, 0]
        order = torch.full((count,), -1, device=part.device)
        inside = found[places] < count
        order[found[places][inside]] = places[inside]
        if (order < 0).any():
            raise UnreadableCacheError("the numbers written to a block were not found in it")
        return order

    def _find_view(self, order: torch.Tensor) -> torch.Tensor | None:
        """Return the keys of all blocks as a view, (blocks, kv_heads, tokens, head_dim); None if there is none."""
        part = self._cache.select(self._axis, 0)
        offsets = torch.zeros(part.shape, dtype=torch.int64)
        for axis, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
            offsets += (torch.arange(size) * stride).view(-1, *(1,) * (part.dim() - axis - 1))
        places = offsets.flatten()[order.cpu()].view(self._shape)
        origin = int(places[0, 0, 0])
        strides = [
            int(places.select(axis, 1).flatten()[0]) - origin if size > 1 else 0
            for axis, size in enumerate(self._shape)
        ]
        expected = torch.full((), origin)
        for axis, (size, stride) in enumerate(zip(self._shape, strides, strict=True)):
            expected = expected + (torch.arange(size) * stride).view(-1, *(1,) * (2 - axis))
        if min(strides) < 0 or not torch.equal(expected.expand(self._shape), places):
            return None
        return self._cache.as_strided(
            (self._cache.shape[self._axis], *self._shape),
            (self._cache.stride(self._axis), *strides),
            self._cache.storage_offset() + origin,
        )

    def _verify(self, block: int) -> None:
        """Write random keys to a block, and compare what is read."""
        part = self._cache.select(self._axis, block)
        saved = part.clone()
        generator = torch.Generator().manual_seed(block)  # the state of the default generator stays as it is
        keys = torch.randn(self._shape, generator=generator).to(part)
        try:
            self._write_block(block, keys)
            start = block * self._size
            read = self.read(range(block // self._ratio + 1), start, start + self._size)
        finally:
            part.copy_(saved)
        if not torch.equal(read, keys):
            raise UnreadableCacheError("random keys that were written to a block were not read from it")
