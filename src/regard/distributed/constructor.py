"""The constructors of the distributed matrix, and helpers that split and collect sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from regard.core.attention import build_spec, check_fits, check_mask_and_score_mods
from regard.distributed.layouts import LayoutName, build_layout, split_evenly
from regard.distributed.matrix import DistributedMatrix, as_local
from regard.distributed.peer_group import PeerGroup, RankError, describe_argument_content, find_peers
from regard.distributed.ring import RingProblem
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument
from regard.frame import Frame
from regard.masks import Mask
from regard.masks.base import BlockKinds
from regard.problem import Spec, find_arrays
from regard.score_mods import ScoreMod
from regard.types import Array, IntArray, Namespace

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
        scale: Factor that multiplies the products of query and key. Default: 1/√head_dim.
        sink: An extra score without a key in the softmax of every row: a number, or one for each head, (heads,).
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.
        layout: "contiguous": rank r holds the r-th part of the sequence. "zigzag": rank r of W holds chunks r and
            2W − 1 − r of 2W, so that a causal mask is the same work for all ranks; `shard` splits a sequence that way.

    Returns:
        The matrix: (…, heads, own queries, keys of all ranks). Nothing but the arguments has been compared yet.

    Raises:
        ArgumentError: If arguments are incompatible, or there is no process group.
        ArgumentTypeError: If an argument has the wrong type.
        RankError: If a rank died, hangs, or called with another shape, dtype, mask or layout. All ranks name it.
    """
    if group is None and hasattr(query, "device_mesh"):
        group = query.device_mesh.get_group()
    peers = find_peers(group, "attention")
    spec, error = None, None
    try:
        query, key = as_local(query), as_local(key)
        for name, array in (("query", query), ("key", key)):
            if not isinstance(array, torch.Tensor):
                raise ArgumentTypeError(
                    "attention",
                    received=f"{name} as {describe_argument(array)}",
                    expected="tensors of torch",
                    hint=f"Convert it: torch.as_tensor({name}).",
                )
        spec = build_spec(query, key, mask, score_mod, scale, sink, enable_gqa)
        check_mask_and_score_mods(mask, spec.score_mods)
        for mod in spec.score_mods:
            if any(getattr(array, "requires_grad", False) for array in find_arrays(mod)):
                raise ArgumentError(
                    "attention",
                    received=f"{mod!r} with an array that requires a gradient",
                    expected="score modifications without gradients",
                    hint="With several ranks, only query, key, value and sink support gradients.",
                )
        build_layout(layout, [0] * peers.size)
    except RegardError as found:
        error = found
    return build_matrix(peers, spec, layout, error=error)


def build_matrix(
    peers: PeerGroup, spec: Spec | None, layout: str, *, error: RegardError | None = None,
    is_own_mask: bool = False,
) -> DistributedMatrix:  # fmt: skip
    """Compare the arguments of all ranks, or what is wrong with them, and build the matrix."""
    same: dict[str, Any] = {"layout": layout}
    own: dict[str, Any] = {}
    if spec is not None:
        same |= _describe_spec(spec, is_own_mask)
        own = {"lengths": [spec.query.shape[-2], spec.key.shape[-2]]}
    with peers.operate("attention", same, own, error=error) as replies:
        assert spec is not None
    queries, keys = (build_layout(layout, [reply["lengths"][i] for reply in replies]) for i in (0, 1))
    frame = Frame(spec.leading_shape, queries.length, keys.length)
    check_fits(spec, frame)
    spec = replace(spec, kv_len=keys.length)
    with spec.engine.enable_grad():
        problem = replace(spec.to_problem(), frame=frame, positions=queries.positions(peers.rank))
    return DistributedMatrix(spec, RingProblem(problem, peers, queries, keys, layout))


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
    with peers.operate("gather", same, {"length": len(own)}) as replies:
        whole = build_layout(layout, [reply["length"] for reply in replies], "gather")
        parts = [part for (part,) in peers.exchange_all([own], whole.lengths)]
    joined = torch.empty_like(torch.cat(parts))
    for rank, part in enumerate(parts):
        joined[torch.as_tensor(whole.positions(rank), device=joined.device)] = part
    return joined.movedim(0, axis)


@dataclass(frozen=True, eq=False)
class RankNumbering:
    """How a rank numbers the tokens that its layer computed with.

    Attributes:
        rows: Position in the whole sequence of each of its rows, ascending: (rows,).
        columns: Its column for each position of the whole sequence, −1 if it has none: (kv_len,). Positions that
            adjoin within the tokens of one rank have columns that adjoin.
        num_columns: Number of its columns.
    """

    rows: IntArray
    columns: IntArray
    num_columns: int

    def view(self, frame: Frame) -> Frame:
        """Return the frame of the rank's own rows and columns."""
        return Frame(frame.leading_shape, len(self.rows), self.num_columns, frame.selection)

    def find_rows(self, q_idx: IntArray) -> IntArray:
        """Return the rows of positions that the rank holds."""
        return np.searchsorted(self.rows, q_idx)


@dataclass(frozen=True, eq=False)
class RankMask(Mask):
    """The mask of one rank's rows; it must not be evaluated for the rows of another rank.

    Attributes:
        mask: Mask in the rank's rows and columns; None allows all columns.
        numbering: Rows and columns of the rank.
    """

    mask: Mask | None
    numbering: RankNumbering

    def allows(self, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        columns = self.numbering.columns[kv_idx]
        known = xp.asarray(columns >= 0)[None, None, :]
        if self.mask is None:
            return xp.broadcast_to(known, (1, len(q_idx), len(kv_idx)))
        rows = self.numbering.find_rows(q_idx)
        allowed = self.mask.allows(self.numbering.view(frame), rows, np.maximum(columns, 0), xp)
        return allowed & known

    def classify_blocks(
        self, frame: Frame, q_lo: int, q_hi: int, kv_lo: IntArray, kv_hi: IntArray
    ) -> BlockKinds:
        columns = self.numbering.columns
        first, last = columns[kv_lo], columns[kv_hi - 1]
        # Blocks of the tokens of one rank; others are called partial.
        adjoins = (first >= 0) & (last - first == kv_hi - 1 - kv_lo)
        missing = (first < 0) & (last < 0) & (kv_hi - kv_lo == 1)
        if not adjoins.all():
            absent = np.array([(columns[a:b] < 0).all() for a, b in zip(kv_lo, kv_hi, strict=True)])
            return BlockKinds(~(missing | absent), np.zeros(len(kv_lo), bool))
        if self.mask is None:
            return BlockKinds(np.ones(len(kv_lo), bool), np.ones(len(kv_lo), bool))
        rows = self.numbering.find_rows(np.array([q_lo, q_hi]))
        return self.mask.classify_blocks(
            self.numbering.view(frame), int(rows[0]), int(rows[1]), first, last + 1
        )

    @property
    def varies_by_batch(self) -> bool:
        return self.mask is not None and self.mask.varies_by_batch

    def check(self, frame: Frame) -> None:
        if self.mask is not None:
            self.mask.check(self.numbering.view(frame))

    def __repr__(self) -> str:
        return f"{self.mask} of {len(self.numbering.rows)} rows"


@dataclass(frozen=True, eq=False)
class RankScoreMod(ScoreMod):
    """A score modification of one rank's rows.

    Attributes:
        mod: Modification in the rank's rows and columns.
        numbering: Rows and columns of the rank.
    """

    mod: ScoreMod
    numbering: RankNumbering

    def apply(self, scores: Array, frame: Frame, q_idx: IntArray, kv_idx: IntArray, xp: Namespace) -> Array:
        rows, columns = self.numbering.find_rows(q_idx), np.maximum(self.numbering.columns[kv_idx], 0)
        return self.mod.apply(scores, self.numbering.view(frame), rows, columns, xp)

    def check(self, frame: Frame) -> None:
        self.mod.check(self.numbering.view(frame))

    def __repr__(self) -> str:
        return repr(self.mod)


def join_rows(spec: Spec, group: Any, layout: str) -> DistributedMatrix:
    """Return the matrix of all ranks from what `regard.watch` recorded on each; it copies this rank's own keys."""
    query, key = spec.query, spec.key
    peers = find_peers(group, "watch")
    with peers.operate("watch", {"layout": layout}, {"lengths": [query.shape[-2], key.shape[-2]]}) as replies:
        q_lens, kv_lens = ([reply["lengths"][i] for reply in replies] for i in (0, 1))
    tokens = build_layout(layout, q_lens, "watch")
    has_all_keys = all(length == tokens.length for length in kv_lens)
    if not has_all_keys and kv_lens != q_lens:
        wrong = tuple(r for r, n in enumerate(kv_lens) if n not in (tokens.length, q_lens[r]))
        raise RankError(
            "watch",
            received=f"{kv_lens} keys of {q_lens} queries on the ranks",
            expected=f"the keys of all ranks, {tokens.length}, or as many as the rank has queries",
            hint="The lens joins layers that collect the keys of all ranks before they call the attention function.",
            ranks=wrong or tuple(range(peers.size)),
        )
    first = sum(q_lens[: peers.rank]) if has_all_keys else 0
    own_key = key[..., first : first + query.shape[-2], :].clone()
    columns, start = np.full(tokens.length, -1), 0
    for owner, length in enumerate(tokens.lengths):
        if has_all_keys or owner == peers.rank:
            columns[tokens.positions(owner)] = start + np.arange(length)
            start += length
    numbering = RankNumbering(tokens.positions(peers.rank), columns, key.shape[-2])
    is_plain = spec.mask is None and has_all_keys
    own = replace(
        spec,
        key=own_key,
        mask=None if is_plain else RankMask(spec.mask, numbering),
        score_mods=tuple(RankScoreMod(mod, numbering) for mod in spec.score_mods),
    )
    return build_matrix(peers, own, layout, is_own_mask=True)
