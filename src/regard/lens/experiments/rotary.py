"""Measure how rotary positions turn queries and keys: the same token everywhere, so that only positions differ.

If all tokens are equal and the model has no other positions, every layer's hidden state is the same at each position:
a mean of equal values is that value. Queries and keys then differ by their turn alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from regard.engines.torch_precision import widen
from regard.findings import Finding
from regard.lens.experiments.call_log import LoggedCall
from regard.lens.experiments.projections import compare_with_projection

Tensor = Any  # the types of torch are not followed

# Tokens of the run: bfloat16 rounds the positions from 257 on.
NUM_TOKENS = 264
# Relative change of a vector, by the bytes of a number, that is rounding; and of the length of a pair. Cos and sin may
# be rounded to bfloat16, and wrong pairs change by more.
TOLERANCES = {8: 1e-5, 4: 1e-4, 2: 1e-2}
LENGTH_TOLERANCE = 2e-2
# A turn from one position to the next that differs from the mean by more radians is not even.
UNEVEN = 0.1
# Turns of less than this number of radians are not compared with a configuration.
SMALL_TURN = 1e-3


@dataclass(frozen=True)
class Turn:
    """How a query or key turns from one position to the next.

    Args:
        kind: "even", "uneven" (by other angles at some positions), "none", or "unknown" if it does more than turn.
        layout: "interleaved", pairs (2i, 2i+1), or "half", pairs (i, i+d/2).
        start: First number that turns.
        angles: Radians of each pair, float64.
        unevenness: Largest difference of a turn from the mean, in radians.
    """

    kind: Literal["even", "uneven", "none", "unknown"]
    layout: str = ""
    start: int = 0
    angles: Tensor = None
    unevenness: float = 0.0

    @property
    def is_turn(self) -> bool:
        """Whether it turns."""
        return self.kind in ("even", "uneven")


def measure_turn(vectors: Tensor) -> Turn:
    """Measure the turn of vectors from one position to the next.

    Args:
        vectors: (heads, n, head_dim), of equal tokens.

    Returns:
        The turn that all heads share.
    """
    tolerance = TOLERANCES[vectors.element_size()]
    vectors = widen(vectors)
    size = vectors.norm(dim=-1).amax(-1)[:, None, None].clamp(min=1e-30)
    vectors = vectors / size
    if not bool(vectors.isfinite().all()):
        return Turn("unknown")
    if float((vectors - vectors[:, :1]).abs().amax()) < tolerance:
        return Turn("none")
    fits = []
    for layout, start, pairs in _find_pairs(vectors):
        lengths = pairs.abs()
        rest = torch.cat([vectors[..., :start], vectors[..., start + 2 * pairs.shape[-1] :]], -1)
        rest_turns = rest.numel() and float((rest - rest[:, :1]).abs().amax()) >= tolerance
        change = float((lengths - lengths[:, :1]).abs().amax())
        if not rest_turns and change < LENGTH_TOLERANCE:
            fits.append((change, _compare_turns(layout, start, pairs)))
    # Pairs that are short fit any layout, so the lengths that change least decide; then the fewest pairs that turn.
    least = min((change for change, _ in fits), default=0.0)
    best = [
        turn
        for change, turn in fits
        if change <= 2 * least + 1e-5 and float(turn.angles.abs().amax()) > SMALL_TURN
    ]
    return min(best, key=lambda turn: (turn.kind, len(turn.angles)), default=Turn("unknown"))


def _find_pairs(vectors: Tensor) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the ways to pair numbers: layout, first number, and the pairs as complex numbers."""
    dim = vectors.shape[-1]
    for size in _list_sizes(dim):
        for start in dict.fromkeys((0, dim - size)):
            part = vectors[..., start : start + size]
            yield (
                "interleaved",
                start,
                torch.complex(part[..., ::2].contiguous(), part[..., 1::2].contiguous()),
            )
            yield (
                "half",
                start,
                torch.complex(part[..., : size // 2].contiguous(), part[..., size // 2 :].contiguous()),
            )


def _list_sizes(dim: int) -> list[int]:
    """List how many numbers of a head may turn."""
    sizes = dict.fromkeys((dim, dim // 2, dim // 4, 3 * dim // 4, dim // 3, 2 * dim // 3))
    return [size for size in sizes if size > 1 and size % 2 == 0]


def _compare_turns(layout: str, start: int, pairs: Tensor) -> Turn:
    """Compute the turn of each pair, weighted by the lengths of the heads' pairs."""
    weight = pairs[:, 1:].abs() * pairs[:, :-1].abs()
    steps = pairs[:, 1:] * pairs[:, :-1].conj()
    mean = steps.sum((0, 1))
    angles = mean.angle()
    # The turn of each position, over the heads; pairs that are all 0 do not count.
    each = steps.sum(0)
    counted = weight.sum(0) > 1e-6
    deviation = (each * (mean / mean.abs().clamp(min=1e-30)).conj()).angle()
    unevenness = float(torch.where(counted, deviation, 0.0).abs().amax())
    return Turn("uneven" if unevenness > UNEVEN else "even", layout, start, angles, unevenness)


def check_rotary(calls: Sequence[LoggedCall], config: Any = None) -> list[Finding]:
    """Check the turns of all layers of a run on equal tokens.

    Args:
        calls: One call of each layer, of self-attention.
        config: Configuration of the model, or None.

    Returns:
        The findings.
    """
    turns = [
        (logged, measure_turn(logged.call.query[0]), measure_turn(logged.call.key[0])) for logged in calls
    ]
    findings = []
    for logged, query, key in turns:
        for check in (_check_axis, _check_equal, _check_even, _check_twice):
            finding = check(logged, query, key)
            if finding is not None:
                findings.append(finding)
                break
        else:
            findings += _check_configuration(logged, query, config)
    return findings + _check_missing(turns)


def _check_axis(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check for positions on the axis of the heads: nothing turns with the tokens, and each head by another angle."""
    if query.kind != "none" or key.kind != "none":
        return None
    angles = compare_with_projection(logged)
    if angles is None:
        return None
    return _build(
        logged,
        "rotary: wrong axis",
        "Queries turn with the number of the head, and not with the position of the token.",
        {
            "turn of each head (rad)": ", ".join(f"{angle:.3g}" for angle in angles.tolist()),
            "turn per token": 0.0,
        },
        "Apply rotary positions to (batch, heads, n, head_dim), or broadcast cos and sin over the right axis.",
    )


def _check_equal(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check that queries and keys turn by the same angles."""
    message = ""
    if query.is_turn and key.kind == "none":
        message = "Queries turn with their position, and keys do not."
    elif key.is_turn and query.kind == "none":
        message = "Keys turn with their position, and queries do not."
    elif query.is_turn and key.is_turn:
        have_many_pairs = min(len(query.angles), len(key.angles)) > 1
        if query.start != key.start or (query.layout != key.layout and have_many_pairs):
            message = "Queries and keys turn different pairs of numbers."
        elif not _have_equal_angles(query.angles, key.angles):
            message = "Queries and keys turn by different angles."
    if not message:
        return None
    evidence = {"query": _describe(query), "key": _describe(key)}
    hint = "Apply rotary positions once to both, with the same positions, sign and layout; not to cached keys again."
    return _build(logged, "rotary: query and key differ", message, evidence, hint)


def _have_equal_angles(a: Tensor, b: Tensor) -> bool:
    """Compare angles; pairs at the end that hardly turn may be missing from one of them."""
    size = max(len(a), len(b))
    a, b = (torch.nn.functional.pad(angles, (0, size - len(angles))) for angles in (a, b))
    return bool(torch.allclose(a, b, atol=UNEVEN / 2))


def _check_even(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check that each position turns by the same angle."""
    if query.kind != "uneven" and key.kind != "uneven":
        return None
    worst = max(query.unevenness, key.unevenness)
    return _build(
        logged,
        "rotary: positions rounded",
        "The turn from one position to the next is not always the same: positions or angles were rounded.",
        {
            "largest deviation (rad)": worst,
            "query": _describe(query),
            "positions": logged.call.query.shape[-2],
        },
        "Compute positions, frequencies and angles in float32, and convert cos and sin at the end.",
    )


def _check_twice(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check for positions that were applied twice: the first pair turns by 2 radians instead of 1."""
    if query.kind != "even" or not math.isclose(float(query.angles[0].abs()), 2.0, rel_tol=1e-2):
        return None
    return _build(
        logged,
        "rotary: applied twice",
        "The fastest pair turns by 2 radians per token, where rotary positions turn it by 1.",
        {"query": _describe(query), "key": _describe(key)},
        "Apply rotary positions once: in the projection or before the call, and not to keys from a cache.",
    )


def _check_configuration(logged: LoggedCall, query: Turn, config: Any) -> list[Finding]:
    """Check that the angles are those of the configuration, if it has ordinary rotary positions."""
    bases = list(_find_bases(config))
    if query.kind != "even" or not bases:
        return []
    angles = query.angles.abs()
    sizes = [size for size in _list_sizes(logged.call.query.shape[-1]) if size >= 2 * len(angles)]
    for base in bases:
        for size in sizes:
            expected = _compute_angles(base, size)[: len(angles)]
            counted = expected > SMALL_TURN
            if torch.allclose(angles[counted], expected[counted], rtol=2e-2, atol=SMALL_TURN / 10):
                return []
    expected = _compute_angles(bases[0], 2 * len(angles))
    evidence = {
        "turns (rad)": ", ".join(f"{angle:.3g}" for angle in angles[:4].tolist()),
        "configured": ", ".join(f"{angle:.3g}" for angle in expected[:4].tolist()),
        "rope_theta": bases[0],
    }
    hint = "Compute inv_freq from the configuration; a cast, a copied buffer or another base changes it."
    message = "The pairs do not turn by the angles of the configuration."
    return [_build(logged, "rotary: not as configured", message, evidence, hint)]


def _compute_angles(base: float, size: int) -> Tensor:
    return base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def _find_bases(config: Any) -> Iterator[float]:
    """Yield the bases of ordinary rotary positions in a configuration; none if any are of another type."""
    config = getattr(config, "text_config", None) or config
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict):
        return
    sets = (
        [parameters]
        if "rope_theta" in parameters
        else [p for p in parameters.values() if isinstance(p, dict)]
    )
    if all(entry.get("rope_type", "default") == "default" for entry in sets):
        yield from (float(entry["rope_theta"]) for entry in sets if entry.get("rope_theta"))


def _check_missing(turns: Sequence[tuple[LoggedCall, Turn, Turn]]) -> list[Finding]:
    """Report layers whose queries and keys do not turn, if those of most layers do."""
    without = [logged for logged, query, key in turns if query.kind == key.kind == "none"]
    turning = sum(query.is_turn and key.is_turn for _, query, key in turns)
    if not without or turning <= len(without):
        return []
    message = "Queries and keys do not turn with their position in this layer, and do in most others."
    hint = "Apply rotary positions in every layer, unless the architecture has layers without positions."
    evidence = {"layers that turn": turning, "layers that do not": len(without)}
    return [
        _build(logged, "rotary: missing in some layers", message, evidence, hint, "warning")
        for logged in without
    ]


def _describe(turn: Turn) -> str:
    if not turn.is_turn:
        return {"none": "no turn", "unknown": "not a turn"}[turn.kind]
    angles = ", ".join(f"{angle:.3g}" for angle in turn.angles[:3].tolist())
    return f"{turn.layout} pairs, {angles}{', …' if len(turn.angles) > 3 else ''} rad per token"


def _build(
    logged: LoggedCall, kind: str, message: str, evidence: dict[str, Any], hint: str, severity: Any = "error"
) -> Finding:
    return Finding(kind, severity, message, logged.module, logged.layer, evidence=evidence, hint=hint)
