"""How the query, key or value of one call is related to that of another: equal, scaled, turned, permuted, or other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from regard.diagnosis.rotation import describe_turn, largest_difference
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

    Args:
        dtypes: Names of the dtypes of both runs.
        previous: The largest difference of the layers or modules before.
    """
    tolerance = max((ORDINARY_TOLERANCE.get(dtype, 1e-5) for dtype in dtypes), default=1e-5)
    return min(2 * tolerance + 2 * previous, MAX_GROWTH * tolerance, MAX_ROUNDING)


def relate(
    a: Tensor, b: Tensor, limit: float, tokens: Tensor | None = None, *, explain: bool = True
) -> Relation:
    """Find out how tensor B is related to tensor A.

    Args:
        a: (batch, heads, n, width), of run A.
        b: The same of run B; another shape gives the relation "shape" or "layout".
        limit: Largest relative difference of a row that counts as rounding.
        tokens: (batch, n), True for the rows to compare. Default: all.
        explain: Find out what kind of difference it is, which takes longer; else the kind is "other".

    Returns:
        The relation.
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
        detail = "has NaN or inf" + (" in other places than A" if not finite_a.all() else "")
        if finite_b.all():
            detail = "is finite, and that of A is not"
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
        return Relation("scaled", size, f"is {ratio:.3g} × that of A", ratio=ratio, **where)
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
        detail = "has the tokens of A in another order"
        if len(set(places)) < len(places):
            detail = "repeats tokens of A"
        return Relation("tokens", size, detail, order=places, **where)
    positions = differs.nonzero()
    ends = _take_ends(len(positions), some_a.device)
    turn = describe_turn(some_a[ends], some_b[ends], positions[ends, 1], positions[ends, 0], within)
    if turn is not None:
        return Relation("turned", size, turn, **where)
    channels = _match(some_a.movedim(-1, 0), some_b.movedim(-1, 0), within)
    if channels is not None:
        return Relation("channels", size, "has its channels in another order", order=channels, **where)
    if _norms_agree(some_a, some_b, within):
        return Relation("turned", size, "has vectors of the same length in other directions", **where)
    layout = _find_layout(a, b, limit, size)
    if layout:
        return Relation("layout", size, layout, **where)
    return Relation("other", size, f"differs by {size:.2g}", **where)


def row_differences(a: Tensor, b: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Return the difference of each row, relative to the root mean square of the rows' norms.

    Args:
        a: (batch, heads, n, width).
        b: Same shape.
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


def _take_ends(count: int, device: Any) -> Tensor:
    """Return the indices of the first and the last rows, which are consecutive tokens as a rule."""
    indices = torch.arange(count, device=device)
    if count <= 2 * TURNED_ROWS:
        return indices
    return torch.cat([indices[:TURNED_ROWS], indices[-TURNED_ROWS:]])


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
        for first, second, name in ((a, b, ""), (b, a, "is right, and that of A ")):
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
            return "has the numbers of A in other places"
    return ""


def _by_row(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(0, 1)
