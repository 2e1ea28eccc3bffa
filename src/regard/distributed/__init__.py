"""One sequence over many ranks: the attention matrix of tokens that are spread over a process group.

Entry point: `attention(query, key, group=…)`, which every rank calls with its own tokens. The result has the methods of
`regard.AttentionMatrix`. The package imports `regard.core` and below, and torch.

Design notes:
- `regard.distributed` finds the axes of a measure's state by calling `init` with three shapes. A state with rows
  stays, one with keys travels to their rank, any other is combined on all ranks. Measures of users then work without
  a declaration that could be wrong.
- Ranks compare their arguments through the store before each operation. What follows cannot differ between ranks, so
  no rank waits for a message that is never sent; a mismatch names the rank and leaves the group usable.
- Waiting happens in a worker thread, and a heartbeat in the store names the rank that stopped. Neither a transfer of
  gloo nor a request to a store can be interrupted, and a neighbour that does not answer may itself wait for another
  rank.
- One mechanism serves products, gradients, lse and measures: the keys of a rank travel as a block, each rank that needs
  them computes with them, and the results of blocks merge. What belongs to the keys (their gradient, the weight they
  received) is added up on the way behind them and ends at their rank, so that no rank holds it for all keys.
- A block is an ordinary problem of `regard.core` with the keys of a part of the sequence, so masks, kernels and
  measures do not depend on ranks.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401 - required by every module of the package
except ImportError as error:
    raise ImportError("regard.distributed: torch is not installed. pip install 'regard[torch]'") from error

from regard._public import set_public_module
from regard.distributed.constructor import attention, gather, shard
from regard.distributed.matrix import DistributedMatrix
from regard.distributed.peer_group import RankError

__all__ = ["DistributedMatrix", "RankError", "attention", "gather", "shard"]

set_public_module(globals())
