"""The matrix of a layer whose ranks computed their own rows, as `regard.watch` recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.distributed.constructor import build_matrix
from regard.distributed.errors import RankError
from regard.distributed.layouts import Layout, build_layout
from regard.distributed.matrix import DistributedMatrix
from regard.distributed.peer_group import find_peers
from regard.distributed.rank_masks import RankMask, RankNumbering, RankScoreMod
from regard.engines import find_engine
from regard.masks import Mask
from regard.problem import Spec, leading_shape
from regard.score_mods import ScoreMod
from regard.types import IntArray

Tensor = Any  # torch's types are not checked


def join_rows(
    query: Tensor,
    key: Tensor,
    *,
    group: Any,
    layout: str,
    mask: Mask | None,
    score_mods: Sequence[ScoreMod],
    scale: float,
    sink: Tensor | None,
    enable_gqa: bool,
) -> DistributedMatrix:
    """Return the matrix of all ranks from what each of them computed its own rows with.

    Args:
        query: Queries of this rank: (…, heads, own queries, head_dim).
        key: The keys that its rows were computed with: those of all ranks, one rank after the other, or its own.
        group: Process group.
        layout: Layout of the sequence.
        mask: Mask in the rows of `query` and the columns of `key`.
        score_mods: Score modifications in these rows and columns.
        scale: Factor of the products of query and key.
        sink: Extra score of each head.
        enable_gqa: Whether heads / kv_heads consecutive query heads share a key head.

    Returns:
        The matrix, which holds a copy of this rank's own keys.

    Raises:
        RankError: If the ranks computed with other keys than their own or all, or their calls differ.
    """
    peers = find_peers(group, "watch")
    with peers.operate("watch", {"layout": layout}, {"lengths": [query.shape[-2], key.shape[-2]]}) as told:
        q_lens, kv_lens = ([other["lengths"][i] for other in told] for i in (0, 1))
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
    columns = _number_columns(tokens, None if has_all_keys else peers.rank)
    numbering = RankNumbering(tokens.positions(peers.rank), columns, key.shape[-2])
    is_plain = mask is None and has_all_keys
    axes, groups = leading_shape(query, own_key, enable_gqa)
    engine = find_engine("watch", query=query, key=own_key)
    rank_mods = tuple(RankScoreMod(mod, numbering) for mod in score_mods)
    rank_mask = None if is_plain else RankMask(mask, numbering)
    spec = Spec(engine, query, own_key, rank_mask, rank_mods, scale, sink, axes, groups)
    return build_matrix(peers, spec, layout, is_own_mask=True)


def _number_columns(tokens: Layout, rank: int | None) -> IntArray:
    """Return the column of each position: of all ranks, one after the other, or of the tokens of one rank alone."""
    columns = np.full(tokens.length, -1)
    start = 0
    for owner, length in enumerate(tokens.lengths):
        if rank is None or owner == rank:
            columns[tokens.positions(owner)] = start + np.arange(length)
            start += length
    return columns
