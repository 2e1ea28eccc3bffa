"""Context parallelism of torch: recognise a call of attention whose tokens are on the ranks of a process group.

`context_parallel` replaces `F.scaled_dot_product_attention` by a function that shards the arguments, and
`_ContextParallel` passes tensors that are sharded by token. Both then exchange keys inside the kernel, so the arguments
of a call are only the tokens of the own rank.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.call import CapturedArgs
from regard.capture.patching import Function
from regard.capture.watchers import notify_matrix, report_uncaptured
from regard.masks import causal

# Functions of torch that compute with the keys of all ranks; the end of the path differs between versions of torch.
_MODULES = "torch.distributed.tensor.experimental"
_TOKEN_AXIS = 2


class TokenShards(NamedTuple):
    """Where the tokens of a call are.

    Args:
        group: The ranks; None if this version of torch does not tell.
        layout: Which tokens each rank holds, as in `regard.distributed.attention`.
    """

    group: Any
    layout: str


def find_token_shards(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TokenShards | None:
    """Return where the tokens of a call are, if torch's context parallelism computes it; else None."""
    if is_context_parallel(function):
        return _describe(function, inspect.getclosurevars(function).nonlocals.get("device_mesh"))
    tensors = sys.modules.get("torch.distributed.tensor")  # no argument is a DTensor before it is imported
    query = args[0] if args else kwargs.get("query")
    if tensors is None or not isinstance(query, tensors.DTensor):
        return None
    if not any(placement.is_shard(_TOKEN_AXIS) for placement in query.placements):
        return None
    handlers = getattr(tensors.DTensor._op_dispatcher, "_custom_op_handlers", {})
    handler = handlers.get(torch.ops.aten._scaled_dot_product_flash_attention.default)
    if handler is None or not is_context_parallel(handler):
        return None
    return _describe(handler, query.device_mesh)


def is_context_parallel(function: Any) -> bool:
    """Return whether a function is one of torch's that exchange keys with other ranks."""
    return str(getattr(function, "__module__", None)).startswith(_MODULES)


def _describe(function: Any, mesh: Any) -> TokenShards:
    options = function.__globals__.get("_cp_options")
    if mesh is None or mesh.ndim != 1 or not hasattr(options, "enable_load_balance"):
        return TokenShards(None, "")
    # With load balancing, each rank holds a chunk of the first half and one of the second, as in "zigzag".
    return TokenShards(mesh.get_group(), "zigzag" if options.enable_load_balance else "contiguous")


def notify_shards(module: nn.Module, shards: TokenShards, args: CapturedArgs) -> None:
    """Pass the matrix of a call over the tokens of all ranks to the watchers of a module; every rank must call it."""
    if shards.group is None or args.attn_mask is not None:
        reason = "its tokens are on several ranks (context parallelism), " + (
            "and this version of torch does not tell which" if args.attn_mask is None else "and it has a mask"
        )
        report_uncaptured(module, reason, "Use is_causal=True, or regard.distributed.attention.")
        return
    from regard.distributed import constructor
    from regard.distributed.matrix import as_local

    query, key = (as_local(tensor).detach() for tensor in (args.query, args.key))
    matrix = constructor.attention(
        query,
        key,
        group=shards.group,
        mask=causal() if args.is_causal else None,
        scale=args.scale,
        enable_gqa=args.enable_gqa,
        layout=shards.layout,  # type: ignore[arg-type]
    )
    notify_matrix(module, matrix)
