"""Which rows and keys of a call are tokens rather than padding, and which tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.capture.call import Call
from regard.capture.compact_mask import CompactMask
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.masks import causal
from regard.tiling import tile_sizes
from regard.types import IntArray

if TYPE_CHECKING:
    from regard.distributed.matrix import DistributedMatrix

# Names of cross-attention layers. If queries and keys have the same length, nothing else identifies them.
_CROSS_ATTENTION_NAMES = (
    "crossattention",
    "cross_attn",
    "cross_attention",
    "encoder_attn",
    "encdecattention",
    "multihead_attn",
)


@dataclass(frozen=True)
class TokenRows:
    """The rows and keys of a call that are not padding.

    Args:
        lead: Leading axes of the matrix, (…, heads).
        query_offset: Position of row 0 among the keys; None for cross-attention, whose rows and keys are counted
            separately.
        keys: (…, 1, kv_len), True for keys that some row attends to.
        rows: (…, 1, q_len), True for rows that attend to some key. In self-attention, the own key of the row must be
            one of `keys`, too: otherwise the row is padding.
    """

    lead: tuple[int, ...]
    query_offset: int | None
    keys: Any
    rows: Any

    @property
    def own_keys(self) -> IntArray:
        """The position of each row among the keys, (q_len,), for self-attention."""
        assert self.query_offset is not None
        return np.arange(self.rows.shape[-1]) + self.query_offset

    @property
    def first_key(self) -> IntArray:
        """The first token's key for each row that counts, (…, 1, q_len); −1 for padding."""
        return np.where(self.rows, self.keys.argmax(-1)[..., None], -1)

    @classmethod
    def from_shards(cls, matrix: DistributedMatrix) -> TokenRows:
        """Find the tokens among the rows of this rank and the keys of all ranks; every rank must call it."""
        lead, frame = tuple(matrix.shape[:-2]), matrix.problem.frame
        rows, keys = (_any_head(flags, lead) for flags in _find_visible_shards(matrix))
        if frame.q_len == frame.kv_len:
            rows = rows & keys[..., matrix.positions]
        return cls(lead, None, keys, rows)

    @classmethod
    def from_call(cls, call: Call) -> TokenRows:
        """Find the tokens of a call."""
        *lead, q_len, kv_len = call.shape
        shape = (*lead[:-1], 1)
        if call.query is None:  # recorded with measures: its mask is unknown
            rows, keys = np.ones((*shape, q_len), bool), np.ones((*shape, kv_len), bool)
        else:
            rows, keys = (
                _any_head(flags, tuple(lead)) for flags in find_visible(call.compact_mask, q_len, kv_len)
            )
        query_offset = None if _is_cross_attention(call, keys) else call.query_offset
        if query_offset is not None:
            rows = rows & keys[..., query_offset : query_offset + q_len]
        return cls(tuple(lead), query_offset, keys, rows)


def is_cross_attention_name(name: str) -> bool:
    """Return whether a layer says by its name that its keys belong to another sequence."""
    return any(word in name.lower() for word in _CROSS_ATTENTION_NAMES)


def _is_cross_attention(call: Call, keys: Any) -> bool:
    """Return whether the keys belong to another sequence.

    By the layer's name, or because the keys do not end with the last row's own key. The keys of a chunk in the middle
    do not either, but its first row does not attend past its own key.
    """
    *_, q_len, kv_len = call.shape
    if is_cross_attention_name(call.name):
        return True
    live = np.flatnonzero(keys.any(tuple(range(keys.ndim - 1))))
    stop = call.query_offset + q_len
    if stop != kv_len and (not len(live) or stop != live[-1] + 1):
        return True
    attends_ahead = int(call.compact_mask.stop[..., 0].max(initial=0)) > call.query_offset + 1
    return bool(call.query_offset and q_len > 1 and attends_ahead)


def find_visible(mask: CompactMask, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Find the rows that attend to some key, (…, q_len), and the keys that some row attends to, (…, kv_len)."""
    if not q_len or not kv_len:
        return np.zeros(q_len, bool), np.zeros(kv_len, bool)
    if (visible := mask.stored_visible) is not None:
        rows, keys = visible.any(-1).cpu().numpy(), visible.any(-2).cpu().numpy()
        return np.broadcast_to(rows, (*rows.shape[:-1], q_len)), np.broadcast_to(
            keys, (*keys.shape[:-1], kv_len)
        )
    start, stop = np.broadcast_arrays(mask.start, mask.stop)
    rows = start < stop if mask.uniform_keys is None else (start < stop) & (mask.uniform_keys == 0)
    start, stop, live = (
        np.broadcast_to(array, rows.shape).reshape(-1, q_len) for array in (start, stop, rows)
    )
    # Count the intervals that cover each key: +1 where one starts, −1 where it stops.
    changes = np.zeros((len(live), kv_len + 1), np.int64)
    for change, begins, ends, is_live in zip(changes, start, stop, live, strict=True):
        np.add.at(change, begins[is_live], 1)
        np.add.at(change, ends[is_live], -1)
    keys = (np.cumsum(changes, -1)[:, :-1] > 0).reshape((*rows.shape[:-1], kv_len))
    return rows, keys if mask.visible_keys is None else keys & mask.visible_keys


def _find_visible_shards(matrix: DistributedMatrix) -> tuple[Any, Any]:
    """Find the rows of this rank that attend to some key, and the keys that some row of any rank attends to."""
    problem = matrix.problem
    lead, (num_pairs, num_rows, num_keys) = tuple(matrix.shape[:-2]), problem.shape
    if problem.mask is None or problem.mask == causal():
        return np.ones((1, num_rows), bool), np.ones((1, num_keys), bool)
    whole = replace(problem, key=problem.key.new_empty((1, 1, 1)).expand(1, num_keys, 1))
    rows, keys = np.zeros((num_pairs, num_rows), bool), np.zeros((num_pairs, num_keys), bool)
    sizes = tile_sizes(on_device=problem.engine.is_asynchronous)
    for pairs in sizes.split_pairs(problem.shape):
        frame = whole.frame.select(pairs)
        for band in sizes.split_rows(num_rows):
            for columns, is_full in whole.live_blocks(band, sizes.columns):
                allowed: Any = np.ones((1, 1, 1), bool)
                if not is_full:
                    q_idx = whole.positions[band]
                    allowed = problem.mask.allows(frame, q_idx, columns, problem.engine.xp)
                    allowed = allowed.cpu().numpy() if hasattr(allowed, "cpu") else allowed
                rows[np.ix_(pairs, band)] |= allowed.any(2)
                keys[np.ix_(pairs, columns)] |= allowed.any(1)
    own = problem.query.new_tensor(keys)
    keys = np.any([part.cpu().numpy() > 0 for part in matrix._exchange("find tokens", own)], 0)
    return rows.reshape(*lead, num_rows), keys.reshape(*lead, num_keys)


def _any_head(flags: Any, lead: tuple[int, ...]) -> Any:
    """Reduce (…, heads or 1, n) to (…, 1, n): what holds for some head of each batch entry."""
    flags = flags.reshape((1,) * max(0, max(1 + len(lead), 2) - flags.ndim) + flags.shape)
    flags = np.broadcast_to(flags, (*lead[:-1], *flags.shape[-2:]))
    return flags.any(-2, keepdims=True)


def as_token_lists(tokens: Any, operation: str) -> list[list[Any]]:
    """Return tokens as one list for each batch entry; a single list is for all entries.

    Args:
        tokens: Texts or ids, (n,) or (batch, n): lists, arrays or tensors.
        operation: Name of the calling function, for error messages.
    """
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not len(tokens):
        raise ArgumentTypeError(
            operation,
            received=f"tokens as {describe_argument(tokens)}",
            expected="a list of tokens, or one list for each batch entry",
            hint="With a tokenizer: tokenizer.convert_ids_to_tokens(input_ids[0]).",
        )
    is_nested = not isinstance(tokens[0], str) and (
        isinstance(tokens[0], Sequence) or hasattr(tokens[0], "tolist")
    )
    rows = list(tokens) if is_nested else [tokens]
    return [list(row.tolist() if hasattr(row, "tolist") else row) for row in rows]


def fit_tokens(tokens: list[list[Any]], batch: int, length: int) -> list[list[Any]] | None:
    """Return one list of `length` tokens for each batch entry, or None if the numbers do not fit.

    There may be one token more than keys: `generate()` does not feed back its last token.
    """
    if len(tokens) not in (1, batch) or any(len(row) not in (length, length + 1) for row in tokens):
        return None
    rows = tokens * batch if len(tokens) == 1 else tokens
    return [row[:length] for row in rows]


def order_sequences(name: str, tokens: Any, query_tokens: Any) -> tuple[Any, Any]:
    """Return the tokens that a layer of self-attention reads first, then those of the other sequence.

    Of two sequences, an encoder reads the one that cross-attention takes its keys from.
    """
    is_encoder = "encoder" in name and "decoder" not in name
    return (tokens, query_tokens) if is_encoder or query_tokens is None else (query_tokens, tokens)


def token_count_error(
    operation: str, tokens: list[list[Any]], lengths: set[int], role: str = "key"
) -> ArgumentError:
    """Build the error for tokens that fit no layer, as tokens of its keys or queries."""
    counts = sorted({len(row) for row in tokens})
    entries = "1 batch entry" if len(tokens) == 1 else f"{len(tokens)} batch entries"
    return ArgumentError(
        operation,
        received=f"{' or '.join(map(str, counts))} tokens for {entries}",
        expected=f"one token for each {role} of a layer: {' or '.join(map(str, sorted(lengths)))}",
        hint="Pass every token the model read, including special tokens and padding.",
    )
