"""Where one token looks at another, and how attention flows through all layers (rollout)."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.lens.analysis.token_rows import Place, fitting, listed, misfit
from regard.lens.call import Call
from regard.lens.table import Table
from regard.types import Array

Layer = tuple[int, str, int, Call]
Tensor = Any  # the types of torch are not followed

# What tokenizers put before a token that begins a word.
_BEGINS = ("Ġ", "▁", " ")


def find(layers: Sequence[Layer], query: Any, key: Any, tokens: Any, key_tokens: Any, batch: int) -> Table:
    """The rows of `Recording.find`."""
    rows = Table()
    lengths: set[int] = set()
    outside: IndexOutOfRangeError | None = None
    own = None if tokens is None else listed(tokens, "recording.find")
    other = own if key_tokens is None else listed(key_tokens, "recording.find")
    for number, name, which, call in layers:
        check_kept(call, "recording.find")
        place = Place.of(call)
        *lead, q_len, kv_len = call.shape
        across = place.first is None
        if across != (key_tokens is not None) and own is not None:
            continue  # the tokens of one sequence say nothing of attention to another
        size = math.prod(lead[:-1])
        lengths.add(kv_len)
        of_query = _of(own, size, q_len if across else kv_len, batch)
        of_key = _of(other, size, kv_len, batch)
        if (own is not None and of_query is None) or (other is not None and of_key is None):
            continue
        shift = 0 if across or place.first is None else place.first
        try:
            at = _positions(query, of_query, shift + q_len, "query") - shift
            to = _positions(key, of_key, kv_len, "key")
        except IndexOutOfRangeError as error:
            outside = outside or error  # a longer sequence may have it
            continue
        if (at < 0).all():
            continue
        at = at[at >= 0]
        matrix = one_entry(call, batch, "recording.find").lazy[..., at, :]
        weights = as_numpy(matrix[..., to]).reshape(-1, len(at), len(to))
        for head, each in enumerate(weights):
            row, column = np.unravel_index(np.nanargmax(np.nan_to_num(each, nan=-1.0)), each.shape)
            rows.append(
                {
                    "module": name,
                    "layer": number,
                    "call": which,
                    "head": head,
                    "query": int(at[row]) + shift,
                    "key": int(to[column]),
                    "weight": float(each[row, column]),
                }
            )
    if not rows and layers:
        raise outside or (misfit("recording.find", own, lengths) if own and lengths else _nothing())
    return rows.sort("weight")


def _nothing() -> ArgumentError:
    return ArgumentError(
        "recording.find",
        received="tokens that belong to none of the layers seen",
        expected="tokens of the sequence a layer reads",
        hint="For cross-attention give both: tokens= of the decoder, key_tokens= of the encoder.",
    )


def _of(tokens: list[list[Any]] | None, size: int, length: int, batch: int) -> list[Any] | None:
    """The tokens of one batch entry, where they fit."""
    fit = None if tokens is None else fitting(tokens, size, length)
    return None if fit is None else fit[batch]


def _positions(
    asked: Any, tokens: list[Any] | None, length: int, role: str, operation: str = "recording.find"
) -> Any:
    """Where a token is: everywhere its text occurs, in other capitals where it does not, or at the position given."""
    if hasattr(asked, "__index__") and not isinstance(asked, bool):
        index = int(asked)
        if not -length <= index < length:
            raise IndexOutOfRangeError(
                operation,
                received=f"{role}={index}",
                expected=f"a position from 0 to {length - 1}, or from −{length} to −1 from the end",
                hint="Positions count tokens, special tokens and padding too.",
            )
        return np.array([index % length])
    if not isinstance(asked, str):
        raise ArgumentTypeError(
            operation,
            received=f"{role} as {describe_argument(asked)}",
            expected="the text of a token, or its position",
            hint='For instance query="it", or query=8.',
        )
    if tokens is None:
        raise ArgumentError(
            operation,
            received=f"{role}={asked!r} and no tokens",
            expected="the tokens in which to look for it",
            hint="Add tokens=tokenizer.convert_ids_to_tokens(input_ids[0]), or give positions.",
        )
    texts = [_word(token) for token in tokens]
    wanted = _word(asked)
    where = [i for i, text in enumerate(texts) if text == wanted]
    # A model without capitals has them in its text: what is asked for as it stands there is found all the same.
    where = where or [i for i, text in enumerate(texts) if text.lower() == wanted.lower()]
    if not where:
        near = difflib.get_close_matches(asked, [text for text in texts if text], n=3, cutoff=0.5)
        raise ArgumentError(
            operation,
            received=f"{role}={asked!r}",
            expected="one of the tokens" + (f", such as {', '.join(map(repr, near))}" if near else ""),
            hint="A word may be several tokens, and word pieces (##…) count. Or give its position.",
        )
    return np.array(where)


def _word(token: Any) -> str:
    """The text of a token without the mark that it begins a word; a mark alone stays."""
    text = str(token)
    bare = text.lstrip("".join(_BEGINS))
    return bare or text


def check_kept(call: Call, operation: str) -> None:
    if call.query is None:
        raise ArgumentError(
            operation,
            received=f'{call.name!r}, watched with keep="measures"',
            expected='keep="qk"',
            hint='Single weights cannot be had from measures: watch again with keep="qk".',
        )


def one_entry(call: Call, batch: int, operation: str) -> Any:
    """The matrix of one batch entry, (heads, q_len, kv_len)."""
    matrix, lead = call.matrix, call.shape[:-2]
    size = math.prod(lead[:-1])
    if not -size <= batch < size:
        raise IndexOutOfRangeError(
            operation,
            received=f"batch={batch}",
            expected=f"one of {size} batch entries" if size > 1 else "batch=0: there is one batch entry",
            hint="The first is batch=0.",
        )
    return matrix.lazy[(*map(int, np.unravel_index(batch % size, lead[:-1])),)] if len(lead) > 1 else matrix


def named(layers: Sequence[Layer], chosen: str | Sequence[str] | None, operation: str) -> list[Layer]:
    """The layers that are asked for, by name or pattern, all by default; their weights must have been kept."""
    patterns = ["*"] if chosen is None else [chosen] if isinstance(chosen, str) else list(chosen)
    found = [each for each in layers if any(fnmatch.fnmatchcase(each[1], pattern) for pattern in patterns)]
    for _, _, _, call in found:
        check_kept(call, operation)
    return found


def as_numpy(array: Any) -> Any:
    """A tensor as NumPy, in float64."""
    return array.detach().double().cpu().numpy()


# Rollout


def rollout(
    layers: Sequence[Layer], token: Any, tokens: Any, batch: int, chosen: str | Sequence[str] | None
) -> Array:
    """What `Recording.rollout` returns."""
    calls = _stack(layers, chosen)
    length = calls[0].shape[-1]
    own = None
    if tokens is not None:
        lists = listed(tokens, "recording.rollout")
        own = _of(lists, math.prod(calls[0].shape[:-3]), length, batch)
        if own is None:
            raise misfit("recording.rollout", lists, {length})
    where = _positions(token, own, length, "token", "recording.rollout")
    if len(where) > 1:
        raise ArgumentError(
            "recording.rollout",
            received=f"token={token!r}, which is at {', '.join(map(str, where))}",
            expected="one token",
            hint=f"Give its position: recording.rollout({where[-1]}).",
        )
    share = np.zeros(length)
    share[where] = 1.0
    for call in reversed(calls):
        rows = np.flatnonzero(share)
        # The rows that nothing flows from have no part in the product; under a causal mask they are most of them.
        part = one_entry(call, batch, "recording.rollout").lazy[..., rows[0] : rows[-1] + 1, :]
        vector = torch.as_tensor(share[rows[0] : rows[-1] + 1], dtype=part.dtype, device=call.key.device)
        flow = as_numpy(part.mT @ vector)
        share = 0.5 * share + 0.5 * flow.reshape(-1, length).mean(0)
    return share


def _stack(layers: Sequence[Layer], chosen: str | Sequence[str] | None) -> list[Call]:
    """The calls through which a token's attention flows, first to last: self-attention of one sequence."""
    calls = [call for _, _, _, call in named(layers, chosen, "recording.rollout")]
    calls = [call for call in calls if Place.of(call).first == 0]
    stacks = {(_stem(call.name), call.shape[-1]) for call in calls}
    if len({length for _, length in stacks}) == 1 and len(stacks) == 1:
        return calls
    received = ", ".join(f"{stem or 'layers'} of {length} tokens" for stem, length in sorted(stacks))
    raise ArgumentError(
        "recording.rollout",
        received=received
        or f"no self-attention among {len(layers)} layers" + (f" named {chosen!r}" if chosen else ""),
        expected="the layers of one stack, over one sequence, whole",
        hint='Say which: recording.rollout(token, layers="encoder.*"); list(recording) has the names.',
    )


def _stem(name: str) -> str:
    """A layer's name up to the first number in it: layers of one stack share it."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else ""
