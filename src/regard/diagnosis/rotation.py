"""How rotary positions (RoPE) turned the vectors of one run relative to those of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Tensor = Any  # the types of torch are not followed

# Bases (theta) in use, tried where the turn depends on the base.
BASES = (1e4, 5e5, 1e6, 1e5, 5e4, 1.5e5, 1e7, 8e6, 1e3, 25e4)
MAX_SHIFT = 4096


def describe_turn(a: Tensor, b: Tensor, rows: Tensor, entries: Tensor, within: float) -> str | None:
    """Describe how the vectors of B are turned relative to A, if pairs of channels are rotated.

    Args:
        a: (rows, heads, width), of run A.
        b: Same shape, of run B.
        rows: (rows,), the position of each row.
        entries: (rows,), the batch entry of each row.
        within: Largest relative difference of a row that counts as equal.

    Returns:
        The description, continuing "The query of B …"; None if no rotation explains the difference.
    """
    for pairs_a, pairs_b in _pair_channels(a, b, within):
        lengths = pairs_a.abs(), pairs_b.abs()
        if largest_difference(*lengths) > within:
            continue
        products = pairs_b * pairs_a.conj()
        turn = products.sum(1)  # (rows, pairs): all heads turn alike
        if largest_difference(pairs_a * _unit(turn)[:, None], pairs_b) <= max(within, 1e-4):
            return _describe_common_turn(turn, rows, entries, max(0.01, 4 * within))
        detail = _describe_by_head(a, b, rows, within)
        return detail or "is turned, each head by other angles"
    return _describe_factors(a, b, within) or _describe_mixed_layouts(a, b, rows, within)


def _describe_factors(a: Tensor, b: Tensor, within: float) -> str | None:
    """Describe pairs that are multiplied by the same complex number in all heads, which RoPE alone does."""
    if a.shape[1] < 2:
        return None
    for pairs_a, pairs_b in _pair_channels(a, b, within):
        norms = pairs_a.abs().square().sum(1, keepdim=True)
        factors = (pairs_b * pairs_a.conj()).sum(1, keepdim=True) / norms.clamp(
            min=torch.finfo(norms.dtype).tiny
        )
        if largest_difference(pairs_a * factors, pairs_b) <= within:
            return "is turned by other sines and cosines: they are rounded, or scaled"
    return None


def _pair_channels(a: Tensor, b: Tensor, within: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs of channels of both as complex numbers, for each layout: half, interleaved, a part of either."""
    width = a.shape[-1]
    for count in dict.fromkeys((width, width // 2, width // 4, 3 * width // 4)):
        if count < 2 or count % 2:
            continue
        for part in dict.fromkeys(((0, count), (width - count, width))):
            rotated = slice(*part)
            rest_a, rest_b = (torch.cat([t[..., : part[0]], t[..., part[1] :]], -1) for t in (a, b))
            if rest_a.numel() and largest_difference(rest_a, rest_b) > max(within, 1e-3):
                continue
            for layout in ("half", "interleaved"):
                yield tuple(_as_complex(t[..., rotated], layout) for t in (a, b))


def _as_complex(t: Tensor, layout: str) -> Tensor:
    if layout == "half":
        first, second = t.chunk(2, -1)
    else:
        first, second = t[..., ::2], t[..., 1::2]
    return torch.complex(first.contiguous(), second.contiguous())


def _describe_common_turn(turn: Tensor, rows: Tensor, entries: Tensor, tolerance: float) -> str:
    """Describe a turn of (rows, pairs) that all heads share: by its change per position, or by a shift."""
    follows = (rows[1:] == rows[:-1] + 1) & (entries[1:] == entries[:-1])
    if int(follows.sum()) > 1:
        steps = (turn[1:] * turn[:-1].conj())[follows]
        mean = steps.sum(0)
        steady = mean.abs() >= (1 - tolerance) * steps.abs().sum(0)
        if bool(steady.all()):
            angles = mean.angle()
            if float(angles.abs().max()) > tolerance:
                return _describe_rate(angles, tolerance)
    shifts = _find_shifts(turn, tolerance)
    if shifts is None:
        return "is turned as by other positions"
    if len(set(shifts)) == 1:
        return f"is turned as if its positions were shifted by {shifts[0]:+d}"
    by_entry = {int(e): s for e, s in zip(entries, shifts, strict=True)}
    if all(by_entry[int(e)] == s for e, s in zip(entries, shifts, strict=True)):
        texts = [f"{s:+d} in batch entry {e}" for e, s in by_entry.items()]
        return f"is turned as if its positions were shifted by {', '.join(texts[:4])}"
    places = [int(row) + shift for row, shift in zip(rows, shifts, strict=True)]
    if len(set(places)) == 1:
        return f"is turned as if every position were {places[0]}"
    shown = ", ".join(map(str, places[:8])) + (", …" if len(places) > 8 else "")
    return f"is turned as if its positions were {shown}"


def _describe_rate(angles: Tensor, tolerance: float) -> str:
    """Describe a turn that grows with the position, by its angle per position for each pair."""
    first = float(angles[0])
    if abs(first - 1) <= tolerance:
        return "is turned once more than that of A: RoPE is applied twice, or missing in A"
    if abs(first + 1) <= tolerance:
        return "is turned once less than that of A: RoPE is missing, or every position is 0"
    if abs(first + 2) <= tolerance:
        return "is turned the other way: the sign of the sine is wrong"
    if abs(first) > tolerance:
        return f"is turned as if its positions were multiplied by {1 + first:.3g}"
    for base in BASES:
        frequencies = _frequencies(base, len(angles), angles) + angles  # those of B, if A has this base
        if not bool((frequencies[1:] > 0).all()):
            continue
        other = float(frequencies[1]) ** -len(angles)
        if bool(((_frequencies(other, len(angles), angles) - frequencies).abs() <= tolerance / 4).all()):
            return f"is turned with the base {other:,.0f} instead of {base:,.0f}"
    return "is turned with another base (theta), or other frequencies"


def _find_shifts(turn: Tensor, tolerance: float) -> list[int] | None:
    """Find the whole number of positions by which each row of (rows, pairs) is turned; None if there is none."""
    shifts = torch.arange(-MAX_SHIFT, MAX_SHIFT + 1, device=turn.device, dtype=turn.real.dtype)
    shifts = shifts[shifts.abs().argsort(stable=True)]  # the smallest that fits
    for base in BASES:
        angles = shifts[:, None] * _frequencies(base, turn.shape[-1], shifts)
        expected = torch.polar(torch.ones_like(angles), angles)  # (shifts, pairs)
        found = []
        for row in _unit(turn):
            errors = (row - expected).abs().amax(-1)
            fits = errors <= 2 * tolerance
            if not bool(fits.any()):
                break
            found.append(int(shifts[fits.int().argmax()]))
        else:
            return found
    return None


def _describe_by_head(a: Tensor, b: Tensor, rows: Tensor, within: float) -> str | None:
    """Describe a turn that differs from head to head: the number of the head was taken for the position."""
    heads = torch.arange(a.shape[1], device=a.device)
    for base in BASES:
        for layout in ("half", "interleaved"):
            back_a = _rotate(a, -rows[:, None], base, layout)
            back_b = _rotate(b, -heads[None], base, layout)
            if largest_difference(back_a, back_b) <= max(within, 1e-3):
                return "is turned by the number of the head instead of the position"
    return None


def _describe_mixed_layouts(a: Tensor, b: Tensor, rows: Tensor, within: float) -> str | None:
    """Describe vectors that are rotated in pairs (i, i + width/2) in one run and (2i, 2i + 1) in the other."""
    if a.shape[-1] % 2:
        return None
    for base in BASES:
        for layouts in (("half", "interleaved"), ("interleaved", "half")):
            back_a, back_b = (
                _rotate(t, -rows[:, None], base, layout) for t, layout in zip((a, b), layouts, strict=True)
            )
            if largest_difference(back_a, back_b) <= max(within, 1e-3):
                return f"is turned in the {layouts[1]} layout instead of the {layouts[0]} layout"
    return None


def _rotate(t: Tensor, positions: Tensor, base: float, layout: str) -> Tensor:
    """Rotate (rows, heads, width) by positions that broadcast to (rows, heads)."""
    pairs = _as_complex(t, layout)
    angles = positions[..., None] * _frequencies(base, pairs.shape[-1], t)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    if layout == "half":
        return torch.cat([pairs.real, pairs.imag], -1)
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)


def _frequencies(base: float, pairs: int, like: Tensor) -> Tensor:
    exponents = torch.arange(pairs, device=like.device, dtype=like.dtype) / pairs
    return base**-exponents


def _unit(turn: Tensor) -> Tensor:
    return turn / turn.abs().clamp(min=torch.finfo(turn.real.dtype).tiny)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of a row of (rows, …), relative to the root mean square of the rows' norms."""
    errors, norms = (x.abs().square().flatten(1).sum(1) for x in (a - b, b))
    return float((errors.max() / norms.mean().clamp(min=torch.finfo(norms.dtype).tiny)).sqrt())
