"""Attention of the query heads of one `HeadStore`, over the keys that the store keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from regard.core.attention import attention
from regard.masks import dense
from regard.policy.head_store import HeadStore
from regard.score_mods import bias, softcap

Tensor = Any  # the types of torch are not followed

# Queries that share a mask: at least and at most so many.
MIN_TILE, MAX_TILE = 128, 1024


@dataclass(frozen=True)
class ScoreOptions:
    """How a layer computes its weights.

    Args:
        scale: Factor of the scores; None for 1/√head_dim.
        dropout: Dropout probability of the weights.
        softcap: Limit of the scores; None for none.
        sink: Score that belongs to no key, (kv_heads, heads per kv head); None for none.
    """

    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sink: Tensor | None = None

    def select(self, heads: slice | list[int]) -> ScoreOptions:
        """Return the options of some kv heads."""
        return self if self.sink is None else replace(self, sink=self.sink[heads])


def attend(
    store: HeadStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    starts: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Store new tokens and return the attention of their queries.

    Args:
        store: The kv heads.
        query: (batch, kv_heads, heads per kv head, tokens, head_dim).
        key: (batch, kv_heads, tokens, head_dim).
        value: (batch, kv_heads, tokens, value_dim).
        mask: Mask of the model by position, True = attend, or added to the scores; it broadcasts to
            (batch, kv_heads, heads per kv head, tokens, positions). None if nothing is masked but later positions.
        starts: First position of each batch entry, (batch,), or None if all begin at 0.
        options: How weights are computed.

    Returns:
        (batch, kv_heads, heads per kv head, tokens, value_dim).
    """
    count, first = key.shape[2], store.length
    if count == 1:
        store.append(key, value, starts)
        if mask is None:
            return _multiply(query, *store.slots, None, options)
        positions = store.slot_positions(starts)
        visible = _find_visible(store, positions, first, 1, starts, query.device)
        return _multiply(query, *store.slots, _combine(visible, mask, positions), options)
    if store.window is None:
        store.append(key, value, starts)
        if mask is None and first == 0 and options.softcap is None and options.sink is None:
            return _multiply_causal(query, key, value, options)
        return _attend_all(store, query, mask, first, options)
    return _attend_window(store, query, key, value, mask, starts, options)


def _attend_all(
    store: HeadStore, query: Tensor, mask: Tensor | None, first: int, options: ScoreOptions
) -> Tensor:
    """Attend to every stored token, some queries at a time."""
    outputs = []
    key, value = store.slots
    for begin in range(0, query.shape[3], MAX_TILE):
        tile = query[:, :, :, begin : begin + MAX_TILE]
        end = first + begin + tile.shape[3]
        positions = torch.arange(end, device=query.device)[None]
        visible = _find_visible(store, positions, first + begin, tile.shape[3], None, query.device)
        allowed = _combine(visible, _select_queries(mask, begin, tile.shape[3]), slice(0, end))
        outputs.append(_multiply(tile, key[:, :, :end], value[:, :, :end], allowed, options))
    return torch.cat(outputs, 3)


def _attend_window(
    store: HeadStore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    starts: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Attend to sinks and window, some queries at a time: the work grows with tokens times window."""
    assert store.window is not None
    first, origin, count = store.length, store.length, key.shape[2]
    recent_key, recent_value = key, value
    if first:
        old_key, old_value, origin = store.recent()
        recent_key, recent_value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
    store.append(key, value, starts)
    sink_key, sink_value = store.read_sinks()
    sinks = sink_key.shape[2]
    sink_positions = store.slot_positions(starts)[:, :sinks]
    outputs = []
    size = min(max(store.window, MIN_TILE), MAX_TILE)
    for begin in range(0, count, size):
        tile = query[:, :, :, begin : begin + size]
        end = first + begin + tile.shape[3]
        low = min(max(first + begin - store.window + 1, origin, store.sinks), end)
        positions = torch.arange(low, end, device=query.device)[None].expand(sink_positions.shape[0], -1)
        positions = torch.cat([sink_positions, positions], 1)
        visible = _find_visible(store, positions, first + begin, tile.shape[3], starts, query.device)
        part = slice(low - origin, end - origin)
        keys, values = recent_key[:, :, part], recent_value[:, :, part]
        if sinks:
            keys, values = torch.cat([sink_key, keys], 2), torch.cat([sink_value, values], 2)
        allowed = _combine(visible, _select_queries(mask, begin, tile.shape[3]), positions)
        outputs.append(_multiply(tile, keys, values, allowed, options))
    return torch.cat(outputs, 3)


def _find_visible(
    store: HeadStore, positions: Tensor, first: int, count: int, starts: Tensor | None, device: torch.device
) -> Tensor:
    """Return which keys the policy lets each query attend to.

    Args:
        store: The kv heads; its sinks come first among the keys.
        positions: Positions of the keys, (batch or 1, keys).
        first: Position of the first query.
        count: Number of queries.
        starts: First position of each batch entry, (batch,), or None if all begin at 0.
        device: Device of the result.

    Returns:
        (batch or 1, queries, keys).
    """
    queries = torch.arange(first, first + count, device=device)[None, :, None]
    keys = positions[:, None, :]
    visible = keys <= queries
    if store.window is None:
        return visible
    is_sink = torch.arange(positions.shape[1], device=device) < store.sinks
    in_window = keys > queries - store.window
    if starts is not None:
        # What a batch entry has as a sink, or as padding, is in the window for the other entries only.
        in_window = in_window & (keys >= starts[:, None, None] + store.sinks)
    return visible & (is_sink | in_window)


def _select_queries(mask: Tensor | None, begin: int, count: int) -> Tensor | None:
    return mask if mask is None or mask.shape[3] == 1 else mask[:, :, :, begin : begin + count]


def _combine(visible: Tensor, mask: Tensor | None, positions: Tensor | slice) -> Tensor:
    """Join what the policy and the model allow: (batch, kv_heads, heads per kv head, queries, keys), or broadcasting.

    Args:
        visible: (batch or 1, queries, keys).
        mask: Mask of the model by position, or None.
        positions: Positions of the keys, (batch or 1, keys), or a slice.
    """
    allowed = visible[:, None, None]
    if mask is None:
        return allowed
    if isinstance(positions, slice):
        chosen = mask[..., positions]
    elif positions.shape[0] == 1:
        chosen = mask.index_select(-1, positions[0])
    else:
        # A sink that a batch entry does not have yet has no column.
        index = positions.clamp(max=mask.shape[-1] - 1)[:, None, None, None]
        mask = mask.expand(positions.shape[0], -1, -1, -1, -1)
        chosen = mask.gather(-1, index.expand(*mask.shape[:-1], -1))
    if chosen.dtype == torch.bool:
        return allowed & chosen
    return torch.where(allowed, chosen, float("-inf"))


def _multiply_causal(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """Compute the attention of a first chunk, where nothing but later tokens is masked."""
    output = F.scaled_dot_product_attention(
        query.flatten(1, 2),
        key,
        value,
        is_causal=True,
        scale=options.scale,
        dropout_p=options.dropout,
        enable_gqa=query.shape[2] > 1,
    )
    return output.unflatten(1, query.shape[1:3])


def _multiply(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute the attention to some keys.

    Args:
        query: (batch, kv_heads, heads per kv head, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).
        value: (batch, kv_heads, keys, value_dim).
        mask: Broadcasts to (batch, kv_heads, heads per kv head, queries, keys): booleans, or added to the scores.
        options: How weights are computed.
    """
    groups, count = query.shape[2:4]
    if options.softcap is not None or options.sink is not None:
        return _multiply_modified(query, key, value, mask, options)
    # Query heads of one kv head are rows of one product, so that no key is repeated.
    if mask is not None:
        mask = mask.expand(-1, -1, groups, count, -1).flatten(2, 3)
    output = F.scaled_dot_product_attention(
        query.flatten(2, 3), key, value, attn_mask=mask, scale=options.scale, dropout_p=options.dropout
    )
    return output.unflatten(2, (groups, count))


def _multiply_modified(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: ScoreOptions
) -> Tensor:
    """Compute what `F.scaled_dot_product_attention` cannot: a soft cap, or a score that belongs to no key."""
    groups = query.shape[1:3]
    mods, allowed = [], None
    if options.softcap is not None:
        mods.append(softcap(options.softcap))
    if mask is not None:
        mask = mask.expand(-1, *groups, -1, -1).flatten(1, 2)
        allowed = dense(mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min)
        if mask.dtype != torch.bool:
            mods.append(bias(mask.nan_to_num(neginf=0.0)))
    sink = None if options.sink is None else options.sink.reshape(-1)
    matrix = attention(
        query.flatten(1, 2),
        key,
        mask=allowed,
        score_mod=mods,
        scale=options.scale,
        sink=sink,
        enable_gqa=groups[1] > 1,
    )
    return (matrix @ value).unflatten(1, groups)
