"""Where one call stands: which rows and keys are tokens rather than padding, and how rows and keys are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.lens.call import Call
from regard.lens.capture.mask_recognition import Rules
from regard.types import IntArray

# Names of layers whose keys are another sequence's; where lengths are equal nothing else tells them.
_ACROSS = (
    "crossattention",
    "cross_attn",
    "cross_attention",
    "encoder_attn",
    "encdecattention",
    "multihead_attn",
)


@dataclass(frozen=True)
class Place:
    """Rows and keys of a call: `keys` (…, 1, kv_len) are those that some row sees, `rows` (…, 1, q_len) those that see.

    A row of padding is no row: in self-attention, one whose own key nobody sees. `first` is the key of row 0, None in
    cross-attention, where rows and keys are counted apart.
    """

    lead: tuple[int, ...]
    first: int | None
    keys: Any
    rows: Any

    @property
    def own(self) -> IntArray:
        """The key of each row; of self-attention only."""
        assert self.first is not None
        return np.arange(self.rows.shape[-1]) + self.first

    @classmethod
    def of(cls, call: Call) -> Place:
        """That of a call."""
        *lead, q_len, kv_len = call.shape
        shape = (*lead[:-1], 1)
        if call.query is None:  # measured as it ran: nothing is known of its mask
            rows, keys = np.ones((*shape, q_len), bool), np.ones((*shape, kv_len), bool)
        else:
            rows, keys = (_over_heads(each, tuple(lead)) for each in visible(call.rules, q_len, kv_len))
        first = None if _is_across(call, keys) else call.first
        if first is not None:
            rows = rows & keys[..., first : first + q_len]
        return cls(tuple(lead), first, keys, rows)


def _is_across(call: Call, keys: Any) -> bool:
    """Whether the keys are another sequence's: by the layer's name, or since they do not end with the last row's own.

    So do the keys of a chunk that follows others, but its first row does not see past its own.
    """
    *_, q_len, kv_len = call.shape
    if any(word in call.name.lower() for word in _ACROSS):
        return True
    live = np.flatnonzero(keys.any(tuple(range(keys.ndim - 1))))
    stop = call.first + q_len
    if stop != kv_len and (not len(live) or stop != live[-1] + 1):
        return True
    ahead = int(call.rules.high[..., 0].max(initial=0)) > call.first + 1
    return bool(call.first and q_len > 1 and ahead)


def visible(rules: Rules, q_len: int, kv_len: int) -> tuple[Any, Any]:
    """Rows (…, q_len) that see a key by the rules, and keys (…, kv_len) that some row sees."""
    if not q_len or not kv_len:
        return np.zeros(q_len, bool), np.zeros(kv_len, bool)
    array = rules.kept if rules.kept is not None else getattr(rules.added, "array", None)
    if array is not None:
        lowest = None if rules.kept is not None else _lowest(array)
        seen = array if lowest is None else array > lowest
        rows, keys = seen.any(-1).cpu().numpy(), seen.any(-2).cpu().numpy()
        return (np.broadcast_to(each, (*each.shape[:-1], n)) for each, n in ((rows, q_len), (keys, kv_len)))  # type: ignore[return-value]
    low, high = np.broadcast_arrays(rules.low, rules.high)
    rows = low < high if rules.flat is None else (low < high) & (rules.flat == 0)
    low, high, live = (np.broadcast_to(each, rows.shape).reshape(-1, q_len) for each in (low, high, rows))
    edges = np.zeros((len(live), kv_len + 1), np.int64)
    for ends, own, seen in zip(edges, zip(low, high, strict=True), live, strict=True):
        np.add.at(ends, own[0][seen], 1)
        np.add.at(ends, own[1][seen], -1)
    keys = (np.cumsum(edges, -1)[:, :-1] > 0).reshape((*rows.shape[:-1], kv_len))
    return rows, keys if rules.keys is None else keys & rules.keys


def _lowest(array: Any) -> float:
    import torch

    return float(torch.finfo(array.dtype).min)


def _over_heads(array: Any, lead: tuple[int, ...]) -> Any:
    """(…, 1, n): what holds for some head, for each batch entry."""
    array = array.reshape((1,) * max(0, max(1 + len(lead), 2) - array.ndim) + array.shape)
    array = np.broadcast_to(array, (*lead[:-1], *array.shape[-2:]))
    return array.any(-2, keepdims=True)


def listed(tokens: Any, operation: str) -> list[list[Any]]:
    """Tokens as one list for each batch entry, of text or of ids; one list alone is for every entry."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not len(tokens):
        raise ArgumentTypeError(
            operation,
            received=f"tokens as {describe_argument(tokens)}",
            expected="a list of tokens, or one list for each batch entry",
            hint="With a tokenizer: tokenizer.convert_ids_to_tokens(input_ids[0]).",
        )
    several = not isinstance(tokens[0], str) and (
        isinstance(tokens[0], Sequence) or hasattr(tokens[0], "tolist")
    )
    rows = list(tokens) if several else [tokens]
    return [list(row.tolist() if hasattr(row, "tolist") else row) for row in rows]


def fitting(tokens: list[list[Any]], batch: int, length: int) -> list[list[Any]] | None:
    """The tokens of each batch entry, cut to a length; None where they are not that many.

    One more than there are keys will do: what `generate()` made last was never read.
    """
    if len(tokens) not in (1, batch) or any(len(row) not in (length, length + 1) for row in tokens):
        return None
    rows = tokens * batch if len(tokens) == 1 else tokens
    return [row[:length] for row in rows]


def misfit(operation: str, tokens: list[list[Any]], lengths: set[int]) -> ArgumentError:
    """The error where tokens fit no layer."""
    counts = sorted({len(row) for row in tokens})
    return ArgumentError(
        operation,
        received=f"{' or '.join(map(str, counts))} tokens for {len(tokens)} batch entries",
        expected=f"as many as a layer has keys: {' or '.join(map(str, sorted(lengths)))}",
        hint="Give every token the model read, special tokens and padding too.",
    )
