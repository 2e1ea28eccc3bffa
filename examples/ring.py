"""Spread one sequence over several processes, compute its attention, and compare it with one process.

torchrun --nproc-per-node 3 examples/ring.py [tokens]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import regard
from regard import Entropy, Received, TopK, causal
from regard.distributed import attention, gather, shard

LAYOUT = "zigzag"  # the same work for all ranks under a causal mask
HEADS, DIM = 4, 64


def main(tokens: int = 4096) -> None:
    """Compute output and measures on all ranks; rank 0 compares them with one process, and prints."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # A model makes the tokens of each rank there. Here all ranks draw the whole, so that it can be compared.
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, tokens, DIM, generator=generator).unbind()
    query[..., -1, :] = 3 * key[..., tokens // 3, :]  # the last token attends to one far back
    own_query, own_key, own_value = (shard(x, layout=LAYOUT) for x in (query, key, value))

    A = attention(own_query, own_key, mask=causal(), layout=LAYOUT)
    output = A @ own_value  # the rows of this rank
    found = A.measure(Entropy(), Received(), top=TopK(1))  # of its queries, its keys, its queries

    # To compare them; the next layer of a model needs its own rows only.
    whole_output = gather(output, layout=LAYOUT)
    received = gather(found.received, layout=LAYOUT, axis=-1)
    top = gather(found.top.indices, layout=LAYOUT)
    if rank == 0:
        one = regard.attention(query, key, mask=causal())
        expected = one @ value
        print(f"{size} ranks; rank 0 has {len(A.positions):,} of {tokens:,} queries: {A.shape}")
        print(A.kernel)
        print(f"output differs from one process by {(whole_output - expected).abs().max():.0e} at most")
        print(
            f"attention received differs by {(received - one.measure(Received()).received).abs().max():.0e} at most"
        )
        print(f"the last token attends to token {top[0, 0, -1, 0]}, which is on another rank: {tokens // 3}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
