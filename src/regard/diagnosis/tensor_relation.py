"""How the query, key or value of one call is related to that of another: equal, scaled, rotated, permuted, or other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from regard.types import ORDINARY_TOLERANCE

Tensor = Any  # the types of torch are not followed


RelationKind = Literal[
    "equal", "rounding", "scaled", "heads", "batch", "tokens", "turned", "layout", "channels", "other", "shape",
    "not finite",
]  # fmt: skip

# Rounding may double from layer to layer, up to this many times the tolerance of the dtype, and this much in all.
MAX_GROWTH, MAX_ROUNDING = 1000, 0.5
# An explanation must remove this share of a difference at least; a small one is not explained by any tolerance.
UNEXPLAINED = 0.1
# Channels, heads and batch entries are matched by at most this many numbers of each.
MAX_MATCHED = 1 << 14
# Tokens are matched up to this many, by this many numbers of each.
MAX_TOKENS, MAX_MATCHED_PER_TOKEN = 2048, 64
# Rotations are found from this many rows at either end of those that differ.
TURNED_ROWS = 64


@dataclass(frozen=True)
class Relation:
    """How tensor B is related to tensor A.

    Args:
        kind: The relation.
        size: The largest difference of a row, relative to the root mean square of the rows' norms; NaN if the shapes
            differ.
        detail: The relation in words, continuing "The query of B …".
        ratio: Factor from A to B if the relation is "scaled".
        order: The heads, batch entries, tokens or channels of A that those of B equal, if they are in another order.
        rows: The rows that differ; empty for all.
        batch: The batch entries that differ; empty for all.
    """

    kind: RelationKind
    size: float
    detail: str = ""
    ratio: float = 1.0
    order: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether the tensors are equal up to rounding."""
        return self.kind in ("equal", "rounding")


def limit_rounding(dtypes: set[str], previous: float) -> float:
    """Return the largest relative difference of a row that counts as rounding.

    It is twice the tolerance of the error rule for the least precise dtype, since both runs round, plus twice the
    difference of what came before: each layer starts from what the last one rounded.
    """
    tolerance = max((ORDINARY_TOLERANCE.get(dtype, 1e-5) for dtype in dtypes), default=1e-5)
    return min(2 * tolerance + 2 * previous, MAX_GROWTH * tolerance, MAX_ROUNDING)


def relate(
    a: Tensor, b: Tensor, limit: float, tokens: Tensor | None = None, *, explain: bool = True
) -> Relation:
    """Find out how tensor B is related to tensor A.

    Args:
        a: (batch, heads, n, width), of run A.
        tokens: (batch, n), True for the rows to compare. Default: all.
    """
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    a, b = a.detach().to(wide), b.detach().to(a.device, wide)
    if a.shape != b.shape:
        detail = _find_layout(a, b, limit, 1.0)
        if detail:
            return Relation("layout", float("nan"), detail)
        return Relation("shape", float("nan"), f"has the shape {tuple(b.shape)} instead of {tuple(a.shape)}")
    if not a.numel():
        return Relation("equal", 0.0)
    finite_a, finite_b = a.isfinite(), b.isfinite()
    differences = row_differences(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0), tokens)
    broken = (finite_a != finite_b).any(-1).any(1)
    if tokens is not None:
        broken &= tokens
    if broken.any():
        rows, batch = list_rows(broken)
        detail = "has NaN or inf" + (", in other entries than A" if not finite_a.all() else "")
        if finite_b.all():
            detail = "is finite, unlike A's"
        return Relation("not finite", float("inf"), detail, rows=rows, batch=batch)
    size = float(differences.max())
    if size <= limit:
        return Relation("equal" if size == 0 else "rounding", size)
    differs = differences > limit
    rows, batch = list_rows(differs)
    where: dict[str, Any] = {"rows": rows, "batch": batch}
    if not explain:
        return Relation("other", size, f"differs by {size:.2g}", **where)
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    within = min(limit * 2, size * UNEXPLAINED)
    # (rows, heads, width) of the rows that differ
    some_a, some_b = a.transpose(1, 2)[differs], b.transpose(1, 2)[differs]
    ratio = float((some_a * some_b).sum() / (some_a * some_a).sum().clamp(min=torch.finfo(wide).tiny))
    if ratio and largest_difference(some_a * ratio, some_b) <= within:
        return Relation("scaled", size, f"is {ratio:.3g} × A's", ratio=ratio, **where)
    if not some_b.any():
        return Relation("scaled", size, "is 0", ratio=0.0, **where)
    heads = _match(some_a.transpose(0, 1), some_b.transpose(0, 1), within, allows_one=True)
    if heads is not None:
        return Relation("heads", size, f"has the heads {heads} of A", order=heads, **where)
    entries = _match(a, b, within)
    if entries is not None:
        return Relation("batch", size, f"has the batch entries {entries} of A", order=entries, **where)
    places = None
    if a.shape[2] <= MAX_TOKENS:
        places = _match(a.movedim(2, 0), b.movedim(2, 0), within, MAX_MATCHED_PER_TOKEN)
    if places is not None:
        detail = "has the tokens of A in a different order"
        if len(set(places)) < len(places):
            detail = "repeats tokens of A"
        return Relation("tokens", size, detail, order=places, **where)
    positions = differs.nonzero()
    ends = torch.arange(len(positions), device=some_a.device)
    if len(ends) > 2 * TURNED_ROWS:  # which are consecutive tokens as a rule
        ends = torch.cat([ends[:TURNED_ROWS], ends[-TURNED_ROWS:]])
    turn = describe_turn(some_a[ends], some_b[ends], positions[ends, 1], positions[ends, 0], within)
    if turn is not None:
        return Relation("turned", size, turn, **where)
    channels = _match(some_a.movedim(-1, 0), some_b.movedim(-1, 0), within)
    if channels is not None:
        return Relation("channels", size, "has its channels in a different order", order=channels, **where)
    if _norms_agree(some_a, some_b, within):
        return Relation("turned", size, "has vectors of the same length in different directions", **where)
    layout = _find_layout(a, b, limit, size)
    if layout:
        return Relation("layout", size, layout, **where)
    return Relation("other", size, f"differs by {size:.2g}", **where)


def row_differences(a: Tensor, b: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the difference of each row, relative to the root mean square of the rows' norms.

    Args:
        a: (batch, heads, n, width).
        tokens: (batch, n), True for the rows that count; the others are 0.

    Returns:
        (batch, n).
    """
    errors = (a - b).square().sum((1, 3))
    norms = torch.maximum(a.square().sum((1, 3)), b.square().sum((1, 3)))
    if tokens is not None:
        errors = errors * tokens
        mean = (norms * tokens).sum() / tokens.sum().clamp(min=1)
    else:
        mean = norms.mean()
    return (errors / mean.clamp(min=torch.finfo(norms.dtype).tiny)).sqrt()


def list_rows(flags: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """List the rows and batch entries that are True in (batch, n); an empty tuple stands for all of them."""
    rows, batch = (
        tuple(flags.any(axis).nonzero()[:, 0].tolist()) if not bool(flags.any(axis).all()) else ()
        for axis in (0, 1)
    )
    return rows, batch


def _match(
    a: Tensor, b: Tensor, within: float, max_numbers: int = MAX_MATCHED, *, allows_one: bool = False
) -> tuple[int, ...] | None:
    """Find for each entry along axis 0 of B the entry of A that equals it; None if some has none, or all are in place.

    An entry of A that occurs several times is found by its first. That all are one entry counts if `allows_one`.
    """
    a, b = a.flatten(1), b.flatten(1)
    if len(a) < 2:
        return None
    step = max(1, a.shape[1] // max_numbers)
    distances = torch.cdist(b[:, ::step], a[:, ::step], compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.argmin(1)
    # In place if the nearest is as near as the entry itself: repeated entries are equal.
    own = distances.diagonal() <= distances.amin(1) + within * b[:, ::step].norm(dim=1)
    nearest = torch.where(own, torch.arange(len(a), device=a.device), nearest)
    if bool(own.all()) or (len(nearest.unique()) == 1 and not allows_one):
        return None
    return tuple(nearest.tolist()) if largest_difference(a[nearest], b) <= within else None


def _norms_agree(a: Tensor, b: Tensor, within: float) -> bool:
    """Return whether the vectors of (rows, heads, width) have the same norms, and different ones among themselves."""
    norms_a, norms_b = a.norm(dim=-1), b.norm(dim=-1)
    varied = float(norms_a.std() / norms_a.mean()) > 8 * within if norms_a.numel() > 1 else False
    return varied and largest_difference(norms_a, norms_b) <= within


# Views and transposes that produce wrong heads, as the function that takes B back to A.
LAYOUTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "has the axes of heads and tokens swapped": lambda t, heads, n: t.transpose(1, 2),
    "has the axes of batch and tokens swapped": lambda t, heads, n: t.transpose(0, 2),
    "was viewed as (batch, heads, n, width) without a transpose": lambda t, heads, n: t.reshape(
        -1, n, heads, t.shape[-1]
    ).transpose(1, 2),
    "was split as (width, heads) instead of (heads, width)": lambda t, heads, n: (
        t.permute(0, 2, 3, 1).reshape(-1, n, heads, t.shape[-1]).transpose(1, 2)
    ),
}


def _find_layout(a: Tensor, b: Tensor, limit: float, size: float) -> str:
    """Find the view or transpose that explains the difference; "" if there is none.

    Positions may have turned the vectors since, so their norms are compared as well: views keep vectors whole.
    """
    within = min(limit * 2, size * UNEXPLAINED)
    if a.numel() != b.numel() or a.shape[-1] != b.shape[-1]:
        return ""
    norms_a, norms_b = a.norm(dim=-1, keepdim=True), b.norm(dim=-1, keepdim=True)
    varied = float(norms_a.std() / norms_a.mean()) > 8 * within if norms_a.numel() > 1 else False
    heads, n = a.shape[1:3]
    for text, undo in LAYOUTS.items():
        for first, second, name in ((a, b, ""), (b, a, "is right, but A's ")):
            restored = undo(second, first.shape[1], first.shape[2])
            if (
                restored.shape == first.shape
                and largest_difference(_by_row(restored), _by_row(first)) <= within
            ):
                return name + text
        if "width, heads" in text or not varied:
            continue
        restored = undo(norms_b, heads, n)
        if (
            restored.shape == norms_a.shape
            and largest_difference(_by_row(restored), _by_row(norms_a)) <= within
        ):
            return text
    if a.shape == b.shape and limit < 1e-3:
        ordered_a, ordered_b = (x.flatten(1).sort(-1).values for x in (a, b))
        if float((ordered_a - ordered_b).abs().max()) <= within * float(a.square().mean().sqrt()):
            return "has the numbers of A in different places"
    return ""


def _by_row(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(0, 1)


# Bases (theta) in use, tried where the turn depends on the base.
BASES = (1e4, 5e5, 1e6, 1e5, 5e4, 1.5e5, 1e7, 8e6, 1e3, 25e4)
MAX_SHIFT = 4096


def describe_turn(a: Tensor, b: Tensor, rows: Tensor, entries: Tensor, within: float) -> str | None:
    """Describe how the vectors of B are rotated relative to A, if pairs of channels are rotated.

    Args:
        a: (rows, heads, width), of run A.
        rows: (rows,), the position of each row.
        entries: (rows,), the batch entry of each row.
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
        return detail or "is rotated by different angles in each head"
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
            return "is rotated with different sines and cosines: they are rounded or scaled"
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
                yield tuple(as_complex(t[..., rotated], layout) for t in (a, b))


def as_complex(t: Tensor, layout: str) -> Tensor:
    """Return the pairs of channels in a layout, "half" or "interleaved", as complex numbers."""
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
        return "is rotated as if it had different positions"
    if len(set(shifts)) == 1:
        return f"is rotated as if its positions were shifted by {shifts[0]:+d}"
    by_entry = {int(e): s for e, s in zip(entries, shifts, strict=True)}
    if all(by_entry[int(e)] == s for e, s in zip(entries, shifts, strict=True)):
        texts = [f"{s:+d} in batch entry {e}" for e, s in by_entry.items()]
        return f"is rotated as if its positions were shifted by {', '.join(texts[:4])}"
    places = [int(row) + shift for row, shift in zip(rows, shifts, strict=True)]
    if len(set(places)) == 1:
        return f"is rotated as if every position were {places[0]}"
    shown = ", ".join(map(str, places[:8])) + (", …" if len(places) > 8 else "")
    return f"is rotated as if its positions were {shown}"


def _describe_rate(angles: Tensor, tolerance: float) -> str:
    """Describe a turn that grows with the position, by its angle per position for each pair."""
    first = float(angles[0])
    if abs(first - 1) <= tolerance:
        return "is rotated once more than A's: RoPE is applied twice in B, or not at all in A"
    if abs(first + 1) <= tolerance:
        return "is rotated once less than A's: RoPE is missing in B, or every position is 0"
    if abs(first + 2) <= tolerance:
        return "is rotated in the opposite direction: the sign of the sine is wrong"
    if abs(first) > tolerance:
        return f"is rotated as if its positions were multiplied by {1 + first:.3g}"
    for base in BASES:
        frequencies = _frequencies(base, len(angles), angles) + angles  # those of B, if A has this base
        if not bool((frequencies[1:] > 0).all()):
            continue
        other = float(frequencies[1]) ** -len(angles)
        if bool(((_frequencies(other, len(angles), angles) - frequencies).abs() <= tolerance / 4).all()):
            return f"is rotated with base {other:,.0f} instead of {base:,.0f}"
    return "is rotated with a different base (theta) or different frequencies"


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
    """Describe a turn that differs from head to head: the head index was taken for the position."""
    heads = torch.arange(a.shape[1], device=a.device)
    for base in BASES:
        for layout in ("half", "interleaved"):
            back_a = _rotate(a, -rows[:, None], base, layout)
            back_b = _rotate(b, -heads[None], base, layout)
            if largest_difference(back_a, back_b) <= max(within, 1e-3):
                return "is rotated by the head index instead of the position"
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
                return f"is rotated in the {layouts[1]} layout instead of the {layouts[0]} layout"
    return None


def _rotate(t: Tensor, positions: Tensor, base: float, layout: str) -> Tensor:
    """Rotate (rows, heads, width) by positions that broadcast to (rows, heads)."""
    pairs = as_complex(t, layout)
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
