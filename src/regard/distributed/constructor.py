"""The constructor of the distributed matrix, and helpers that split and collect sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.core.attention import as_score_mods, check_mask_and_score_mods
from regard.distributed.fingerprint import describe_argument_content
from regard.distributed.layouts import Layout, LayoutName, build_layout, split_evenly
from regard.distributed.matrix import DistributedMatrix, as_local
from regard.distributed.peer_group import PeerGroup, find_peers
from regard.distributed.ring_problem import RingProblem
from regard.engines import find_engine
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument
from regard.frame import Frame
from regard.masks import Mask
from regard.problem import Spec, leading_shape, resolve_scale
from regard.score_mods import ScoreMod

Tensor = Any  # torch's types are not checked


def attention(
    query: Tensor,
    key: Tensor,
    *,
    group: Any = None,
    mask: Mask | None = None,
    score_mod: ScoreMod | Sequence[ScoreMod] | None = None,
    scale: float | None = None,
    sink: Tensor | float | None = None,
    enable_gqa: bool = False,
    layout: LayoutName = "contiguous",
) -> DistributedMatrix:
    """Return the attention matrix of a sequence that is spread over the ranks of a process group.

    Every rank passes its own queries and keys, and calls the methods of the matrix in the same order as the others.
    `A @ value` passes keys and values around the ranks, and computes with one block while the next one travels.

    Args:
        query: Queries of this rank: (…, heads, own queries, head_dim). A `DTensor` stands for its local part.
        key: Keys of this rank: (…, kv_heads, own keys, head_dim). Ranks may have different numbers of tokens.
        group: Process group of `torch.distributed`. Default: all processes.
        mask: Which keys each query may attend to, in positions of the whole sequence. Default: all.
        score_mod: One or several score modifications.
        scale: Factor of the products of query and key. Default: 1/√head_dim.
        sink: A score, or one for each head (heads,), that takes its share of every row and belongs to no key.
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.
        layout: "contiguous": rank r holds the r-th part of the sequence. "zigzag": rank r of W holds chunks r and
            2W − 1 − r of 2W, so that a causal mask is the same work for all ranks; `shard` splits a sequence that way.

    Returns:
        The matrix: (…, heads, own queries, keys of all ranks). Nothing but the arguments has been compared yet.

    Raises:
        ArgumentError: If arguments do not fit together, or there is no process group.
        ArgumentTypeError: If an argument has another type.
        RankError: If a rank died, hangs, or called with another shape, dtype, mask or layout. All ranks name it.
    """
    if group is None and hasattr(query, "device_mesh"):
        group = query.device_mesh.get_group()
    peers = find_peers(group, "attention")
    spec, error = None, None
    try:
        spec = _build_spec(as_local(query), as_local(key), mask, score_mod, scale, sink, enable_gqa)
        build_layout(layout, [0] * peers.size)
    except RegardError as found:
        error = found
    return build_matrix(peers, spec, layout, error=error)


def build_matrix(
    peers: PeerGroup, spec: Spec | None, layout: str, *, error: RegardError | None = None,
    is_own_mask: bool = False,
) -> DistributedMatrix:  # fmt: skip
    """Compare the arguments of all ranks and build the matrix.

    Args:
        peers: The ranks.
        spec: The checked arguments of this rank; None if they are wrong.
        layout: Name of the layout.
        error: What is wrong with the arguments of this rank.
        is_own_mask: Whether each rank has a mask of its own, for its own rows.
    """
    same: dict[str, Any] = {"layout": layout}
    own: dict[str, Any] = {}
    if spec is not None:
        same |= _describe_spec(spec, is_own_mask)
        own = {"lengths": [spec.query.shape[-2], spec.key.shape[-2]]}
    with peers.operate("attention", same, own, error=error) as told:
        assert spec is not None
    queries, keys = (build_layout(layout, [other["lengths"][i] for other in told]) for i in (0, 1))
    frame = Frame(spec.leading_shape, queries.length, keys.length)
    for part in (spec.mask, *spec.score_mods):
        if part is not None:
            part.check(frame)
    if spec.sink is not None:
        frame.per_head(spec.sink, "attention: sink")
    spec = replace(spec, kv_len=keys.length)
    with spec.engine.enable_grad():
        problem = replace(spec.to_problem(), frame=frame, positions=queries.positions(peers.rank))
    return DistributedMatrix(spec, RingProblem(problem, peers, queries, keys, layout))


def _build_spec(
    query: Tensor,
    key: Tensor,
    mask: Mask | None,
    score_mod: Any,
    scale: float | None,
    sink: Any,
    enable_gqa: bool,
) -> Spec:
    """Check the arguments of this rank."""
    for name, array in (("query", query), ("key", key)):
        if not isinstance(array, torch.Tensor):
            raise ArgumentTypeError(
                "attention",
                received=f"{name} as {describe_argument(array)}",
                expected="tensors of torch",
                hint=f"Convert it: torch.as_tensor({name}).",
            )
    engine = find_engine("attention", query=query, key=key)
    query, key = engine.as_float(query, "attention", "query"), engine.as_float(key, "attention", "key")
    axes, groups = leading_shape(query, key, enable_gqa)
    score_mods = as_score_mods(score_mod)
    check_mask_and_score_mods(mask, score_mods)
    for mod in score_mods:
        if any(getattr(array, "requires_grad", False) for array in vars(mod).values()):
            raise ArgumentError(
                "attention",
                received=f"{mod!r} with an array that requires a gradient",
                expected="score modifications without gradients",
                hint="Over many ranks only query, key, value and sink have gradients.",
            )
    if sink is not None:
        sink = engine.as_float(sink, "attention", "sink")
    return Spec(
        engine, query, key, mask, score_mods, resolve_scale(scale, query.shape[-1]), sink, axes, groups
    )


def _describe_spec(spec: Spec, is_own_mask: bool) -> dict[str, str]:
    """Describe what must be equal on all ranks."""
    query, key = spec.query, spec.key
    return {
        "query": f"({', '.join(map(str, query.shape[:-2]))}, own, {query.shape[-1]})",
        "key": f"({', '.join(map(str, key.shape[:-2]))}, own, {key.shape[-1]})",
        "dtype": f"{query.dtype} and {key.dtype}",
        "device": query.device.type,
        "mask": "of each rank" if is_own_mask else describe_argument_content(spec.mask),
        "score_mod": "; ".join(map(describe_argument_content, spec.score_mods)) or "none",
        "scale": repr(spec.scale),
        "sink": describe_argument_content(spec.sink),
        "grouped heads": str(spec.groups),
    }


def shard(tensor: Tensor, *, group: Any = None, layout: LayoutName = "contiguous", axis: int = -2) -> Tensor:
    """Return the part of a sequence that this rank holds; nothing is communicated.

    Args:
        tensor: The whole sequence, on every rank.
        group: Process group. Default: all processes.
        layout: Layout, as in `attention`. The parts differ by one token at most.
        axis: Axis of the tokens.

    Returns:
        The tokens of this rank, in the order of the layout.

    Raises:
        ArgumentError: If there is no process group, or the layout is unknown.
    """
    peers = find_peers(group, "shard")
    own = build_layout(layout, split_evenly(tensor.shape[axis], peers.size), "shard")
    positions = torch.as_tensor(own.positions(peers.rank), device=tensor.device)
    return tensor.index_select(axis, positions)


def gather(tensor: Tensor, *, group: Any = None, layout: LayoutName = "contiguous", axis: int = -2) -> Tensor:
    """Collect the parts of a sequence from all ranks, in the order of the sequence.

    Args:
        tensor: The tokens of this rank.
        group: Process group. Default: all processes.
        layout: Layout of the parts, as in `attention`.
        axis: Axis of the tokens.

    Returns:
        The whole sequence, on every rank; without gradients.

    Raises:
        ArgumentError: If there is no process group, or the layout is unknown.
        RankError: If a rank died, hangs, or has a tensor of another shape or dtype.
    """
    peers = find_peers(group, "gather")
    own = as_local(tensor).detach().movedim(axis, 0).contiguous()
    same = {
        "tensor": f"(own, {', '.join(map(str, own.shape[1:]))})",
        "dtype": str(own.dtype),
        "layout": layout,
    }
    build_layout(layout, [0] * peers.size, "gather")
    with peers.operate("gather", same, {"length": len(own)}) as told:
        whole = build_layout(layout, [other["length"] for other in told], "gather")
        parts = [
            own if rank == peers.rank else own.new_empty((length, *own.shape[1:]))
            for rank, length in enumerate(whole.lengths)
        ]
        others = [rank for rank in range(peers.size) if rank != peers.rank]
        peers.finish(peers.start([(own, rank) for rank in others], [(parts[rank], rank) for rank in others]))
    return _join(parts, whole).movedim(0, axis)


def _join(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """Put the tokens of all ranks, (own, …), in the order of the sequence."""
    joined = torch.empty_like(torch.cat(list(parts)))
    for rank, part in enumerate(parts):
        joined[torch.as_tensor(layout.positions(rank), device=joined.device)] = part
    return joined
