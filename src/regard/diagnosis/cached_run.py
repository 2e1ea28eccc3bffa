"""Compare a run in pieces, with a cache, with a run of the whole sequence: which keys, values or masks differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from regard.diagnosis.call_log import LoggedCall
from regard.engines.torch_precision import widen
from regard.findings import Finding
from regard.lens.token_rows import TokenRows

Tensor = Any  # the types of torch are not followed


# Tokens after the prefill, at most.
MAX_STEPS = 8


def choose_sizes(num_tokens: int) -> list[tuple[int, ...]]:
    """Return sizes of the pieces of two runs: a prefill and single steps, and a prefill and chunks of three tokens."""
    prefill = max(1, num_tokens // 2, num_tokens - MAX_STEPS)
    rest = num_tokens - prefill
    steps = (prefill, *(1,) * rest)
    chunks = (prefill, *(3,) * (rest // 3), *([rest % 3] if rest % 3 else []))
    return [steps, chunks]


def check_cached_calls(
    whole: Sequence[LoggedCall], cached: Sequence[LoggedCall], sizes: Sequence[int]
) -> list[Finding]:
    """Find out how the calls of a cached run differ from those of the whole sequence.

    Args:
        whole: The calls of one pass over the sequence.
        cached: The calls of the pieces, in order; those of the last are missing if the run failed.
        sizes: Number of tokens of each piece.

    Returns:
        One finding, about the first layer and piece that differ; none if they agree, or if layers cannot be matched.
    """
    for first, pieces in _match_layers(whole, cached, sizes):
        shared = _check_shared(cached, first)
        if shared is not None:
            return [shared]
        start = 0
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=False)):
            finding = _check_piece(first, piece, start, size, number)
            if finding is not None:
                return [_weaken(finding, sizes)]
            start += size
    return []


def _weaken(finding: Finding, sizes: Sequence[int]) -> Finding:
    """Make an unexplained difference of chunks a warning: some layers with a state support single steps only."""
    is_explained = finding.kind != "cached steps differ"
    return finding if is_explained or max(sizes[1:]) == 1 else replace(finding, severity="warning")


def _match_layers(
    whole: Sequence[LoggedCall], cached: Sequence[LoggedCall], sizes: Sequence[int]
) -> Iterator[tuple[LoggedCall, list[LoggedCall]]]:
    """Yield each self-attention call of the whole sequence with its calls of the pieces."""
    for first in whole:
        pieces = [logged for logged in cached if logged.module == first.module]
        same = [logged for logged in whole if logged.module == first.module]
        is_self = TokenRows.from_call(first.call).query_offset is not None and first.key.shape[-2] == sum(
            sizes
        )
        if len(same) == 1 and len(pieces) <= len(sizes) and is_self:
            yield first, pieces


def _check_shared(cached: Sequence[LoggedCall], first: LoggedCall) -> Finding | None:
    """Check for a call whose keys begin with the keys of the previous layer in the same piece."""
    for before, after in pairwise(cached):
        n = before.key.shape[-2]
        if (
            before.module != after.module
            and before.key.shape[:-2] == after.key.shape[:-2]
            and after.key.shape[-2] > n
            and torch.equal(after.key[..., :n, :], before.key)
        ):
            return Finding(
                "cache: shared by layers",
                "error",
                "The keys of a layer begin with those of the layer before: both append to the same cache.",
                after.module,
                after.layer,
                evidence={"keys of the layer before": n, "keys of this layer": after.key.shape[-2]},
                hint="Create one cache for each layer: [Cache() for _ in layers], not [Cache()] * len(layers).",
            )
    return None


def _check_piece(whole: LoggedCall, piece: LoggedCall, start: int, size: int, number: int) -> Finding | None:
    """Compare one call of a cached run with the rows and keys of the whole sequence."""
    stop = start + size
    first_key, last_key = _find_visible_range(whole, start, stop)
    tolerance = 1e-3 if whole.key.element_size() >= 4 else 5e-2
    expected, expected_value = (_as_one(x)[..., first_key:last_key, :] for x in (whole.key, whole.value))
    keys, values = _as_one(piece.key), _as_one(piece.value)
    evidence: dict[str, Any] = {"piece": number, "tokens": f"{start}–{stop - 1}", "keys": keys.shape[-2]}
    if keys.shape[:-2] != expected.shape[:-2]:
        return None
    found = _find_keys(keys, expected, tolerance)
    if found is None and number == 0:
        message = "Keys of the prefill differ from those of the whole sequence: they depend on later tokens, or on its "
        message += "length."
        hint = "Look for what mixes tokens outside the attention, and positions that depend on the length."
        return _build(piece, "cached steps differ", message, evidence, hint)
    if found is None:
        turned = _count_turned(keys, expected, tolerance)
        if turned is not None:
            message = (
                "Keys of the cached run are those of the whole sequence, turned: their positions differ."
            )
            hint = "Pass positions that continue: cache length + arange(new tokens), and do not turn cached keys again."
            return _build(piece, "positions", message, evidence | {"keys turned": turned}, hint)
        own = expected.shape[-2] - size
        if keys.shape[-2] >= expected.shape[-2] and own >= 0 and piece.layer == 0:
            differs = _rows_differ(keys[..., keys.shape[-2] - expected.shape[-2] :, :], expected, tolerance)
            if not differs[:own].any():
                message = (
                    "New tokens of a cached step have other keys than in the whole sequence, already in the "
                )
                message += "first layer: their position embeddings differ."
                hint = "Look up positions that continue: cache length + arange(new tokens)."
                return _build(
                    piece, "positions", message, evidence | {"keys that differ": int(differs.sum())}, hint
                )
        lost = _count_lost(keys, expected, tolerance)
        message = (
            "The keys of a cached step do not grow: keys that its tokens attend to are lost or replaced."
        )
        evidence |= {"keys needed": expected.shape[-2], "not in the cache": lost}
        hint = "Append each key once, and evict only what is outside every window."
        if lost and keys.shape[-2] < expected.shape[-2]:
            return _build(piece, "cache: keys do not grow", message, evidence, hint)
        message = "Keys of the cached run differ from those of the whole sequence: what lies before this layer does."
        hint = "Check the layers before: those with a state of their own need it in the cache, too."
        return _build(piece, "cached steps differ", message, evidence, hint)
    if values.shape[-2] == keys.shape[-2]:
        differs = _rows_differ(values[..., found : found + expected.shape[-2], :], expected_value, tolerance)
        if differs.any():
            message = (
                "Values in the cache are not those of their tokens: the step's own values were not appended."
            )
            evidence |= {"values that differ": int(differs.sum())}
            hint = "Append the new values as the new keys are appended."
            return _build(piece, "cache: values missing", message, evidence, hint)
    return _check_mask(whole, piece, start, stop, first_key - found, evidence)


def _check_mask(
    whole: LoggedCall, piece: LoggedCall, start: int, stop: int, shift: int, evidence: dict[str, Any]
) -> Finding | None:
    """Compare the number of keys that each row attends to; `shift` is the position of the piece's key 0."""
    if whole.call.compact_mask.stored_arrays or piece.call.compact_mask.stored_arrays:
        return None
    expected, actual = _intervals(whole), _intervals(piece)
    expected = tuple(edge[..., start:stop] for edge in expected)
    actual = tuple(edge + shift for edge in actual)
    for row in range(stop - start):
        counts = [int((edges[1][..., row] - edges[0][..., row]).max()) for edges in (expected, actual)]
        same = all((a[..., row] == b[..., row]).all() for a, b in zip(expected, actual, strict=True))
        if not same:
            message = "A row of a cached step attends to other keys than in the whole sequence."
            evidence |= {
                "token": start + row,
                "keys it attends to": counts[1],
                "in the whole sequence": counts[0],
            }
            hint = "Build the mask of a step from the positions of its tokens, aligned to the last key; count the "
            hint += "token itself in a window."
            return _build(piece, "cache: mask", message, evidence, hint)
    return None


def _intervals(logged: LoggedCall) -> tuple[Any, ...]:
    mask = logged.call.compact_mask
    return tuple(np.broadcast_arrays(mask.start, mask.stop))


def _find_visible_range(whole: LoggedCall, start: int, stop: int) -> tuple[int, int]:
    """Return the first key and the end of the keys that some rows of the whole sequence attend to."""
    if whole.call.compact_mask.stored_arrays:
        return 0, stop
    first, end = (edge[..., start:stop] for edge in _intervals(whole))
    return int(first.min(initial=0 if not first.size else first.max())), int(min(end.max(initial=0), stop))


def _as_one(x: Tensor) -> Tensor:
    return widen(x.detach())


def _rows_differ(a: Tensor, b: Tensor, tolerance: float) -> Any:
    """Return the tokens whose vectors differ, (n,)."""
    size = float(b.abs().amax()) or 1.0
    return ((a - b).abs().amax(-1).flatten(0, -2).amax(0) > tolerance * size).cpu().numpy()


def _find_keys(keys: Tensor, expected: Tensor, tolerance: float) -> int | None:
    """Return where the expected keys begin among the keys; None if they are not there in one piece."""
    needed = expected.shape[-2]
    for offset in range(keys.shape[-2] - needed, -1, -1):
        if not _rows_differ(keys[..., offset : offset + needed, :], expected, tolerance).any():
            return offset
    return None


def _count_turned(keys: Tensor, expected: Tensor, tolerance: float) -> int | None:
    """Return how many keys have the right length and another direction; None if any has another length."""
    needed = expected.shape[-2]
    if keys.shape[-2] < needed:
        return None
    keys = keys[..., keys.shape[-2] - needed :, :]
    lengths = [x.norm(dim=-1, keepdim=True) for x in (keys, expected)]
    if _rows_differ(lengths[0], lengths[1], tolerance).any():
        return None
    return int(_rows_differ(keys, expected, tolerance).sum())


def _count_lost(keys: Tensor, expected: Tensor, tolerance: float) -> int:
    """Count the expected keys that are not among the keys."""
    size = float(expected.abs().amax()) or 1.0
    difference = (expected[..., :, None, :] - keys[..., None, :, :]).abs().amax(-1)
    return int((difference.flatten(0, -3).amax(0) > tolerance * size).all(-1).sum())


def _build(piece: LoggedCall, kind: str, message: str, evidence: dict[str, Any], hint: str) -> Finding:
    return Finding(kind, "error", message, piece.module, piece.layer, evidence=evidence, hint=hint)
