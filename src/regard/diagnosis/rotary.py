"""Measure how rotary positions turn queries and keys: the same token everywhere, so that only positions differ.

If all tokens are equal and the model has no other positions, every layer's hidden state is the same at each position:
a mean of equal values is that value. Queries and keys then differ by their turn alone.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from regard.capture.module_hints import read_setting
from regard.diagnosis.projections import compare_with_projection, find_factor
from regard.diagnosis.subject import LoggedCall
from regard.diagnosis.tensor_relation import as_complex
from regard.engines.torch_precision import widen
from regard.findings import Finding

Tensor = Any  # the types of torch are not followed


# Relative change of a vector, by the bytes of a number, that is rounding; and of the length of a pair. Cos and sin may
# be rounded to bfloat16, and wrong pairs change by more.
TOLERANCES = {8: 1e-5, 4: 1e-4, 2: 1e-2}
LENGTH_TOLERANCE = 2e-2
# A turn from one position to the next that differs from the mean by more radians is not even.
UNEVEN = 0.1
# A pair that turns by less than this number of radians may stand still.
SMALL_TURN = 1e-3
# Error of a measured angle in radians, by the bytes of a number; that of cos and sin is spread over all positions.
ANGLE_ERRORS = {8: 1e-6, 4: 5e-6, 2: 1e-4}
# Names of the attributes by which a layer states that it has no rotary positions, or is of another type.
_STATES_TYPE = re.compile("rope|rotary|nope|sliding|window|layer_type|attention_type|is_local")


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
            for layout in ("interleaved", "half"):
                yield layout, start, as_complex(vectors[..., start : start + size], layout)


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
    """Check the turns of all layers of a run on equal tokens."""
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
            findings += _check_norms(logged)
    return findings + _check_values(turns) + _check_missing(turns)


def _check_axis(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check for positions on the axis of the heads: nothing turns with the tokens, and each head by another angle."""
    if query.kind != "none" or key.kind != "none":
        return None
    angles = compare_with_projection(logged)
    if angles is None:
        return None
    return logged.build_finding(
        "rotary: wrong axis",
        "Queries are rotated by the head index instead of the position of the token.",
        {
            "rotation of each head (rad)": ", ".join(f"{angle:.3g}" for angle in angles.tolist()),
            "rotation per token": 0.0,
        },
        "Apply rotary positions to (batch, heads, n, head_dim), or broadcast cos and sin over the right axis.",
    )


def _check_equal(logged: LoggedCall, query: Turn, key: Turn) -> Finding | None:
    """Check that queries and keys turn by the same angles."""
    message = ""
    if query.is_turn and key.kind == "none":
        message = "Queries are rotated by position, but keys are not."
    elif key.is_turn and query.kind == "none":
        message = "Keys are rotated by position, but queries are not."
    elif query.is_turn and key.is_turn:
        have_many_pairs = min(len(query.angles), len(key.angles)) > 1
        if query.start != key.start or (query.layout != key.layout and have_many_pairs):
            message = "Queries and keys are rotated in different pairs of channels."
        elif not _have_equal_angles(query.angles, key.angles):
            message = "Queries and keys are rotated by different angles."
    if not message:
        return None
    evidence = {"query": _describe(query), "key": _describe(key)}
    hint = "Rotate both once, with the same positions, sign and layout. Do not rotate cached keys again."
    return logged.build_finding("rotary: query and key differ", message, evidence, hint)


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
    return logged.build_finding(
        "rotary: positions rounded",
        "The rotation from one position to the next is uneven: positions or angles were rounded.",
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
    return logged.build_finding(
        "rotary: applied twice",
        "The fastest pair is rotated by 2 radians per token instead of 1.",
        {"query": _describe(query), "key": _describe(key)},
        "Apply rotary positions once, in the projection or before the call. Do not rotate cached keys again.",
    )


def _check_configuration(logged: LoggedCall, query: Turn, config: Any) -> list[Finding]:
    """Check that the angles and the factor are those of the configuration."""
    n, dim = logged.call.query.shape[-2:]
    candidates = find_configured(config, logged.owner, n, dim)
    if query.kind != "even" or not candidates or not _has_equal_inputs(logged):
        return []
    within = ANGLE_ERRORS[logged.call.query.element_size()]
    angles = query.angles.abs().cpu().sort(descending=True).values
    for configured in candidates:
        if _have_configured_angles(angles, configured, logged, within):
            return _check_factor(logged, query, configured)
    configured = candidates[0]
    evidence = {
        "measured (rad)": _format_angles(angles, configured.angles),
        "configured": _format_angles(configured.angles, angles),
        "rope_type": configured.rope_type,
        "rope_theta": configured.theta,
    }
    hint = "Compute inv_freq from the configuration. A cast, a copied buffer or a different base changes it."
    message = "The rotation angles differ from the configuration"
    message += _explain_angles(angles, configured, dim, within)
    return [logged.build_finding("rotary: not as configured", message, evidence, hint)]


def _has_equal_inputs(logged: LoggedCall) -> bool:
    """Return whether the layer's input is the same at each position, so that angles can be measured to a percent.

    A hybrid's recurrent layers give equal tokens other states at each position.
    """
    inputs = [event.input for event in logged.before if event.input is not None and event.input.ndim == 3]
    return all(
        float((x - x[:, :1]).abs().amax()) <= TOLERANCES[x.element_size()] * float(x.abs().amax())
        for x in inputs
    )


def _have_configured_angles(
    angles: Tensor, configured: ConfiguredRotary, logged: LoggedCall, within: float
) -> bool:
    """Return whether angles are those of a configuration, as far as it states them."""
    if _are_close(angles, configured.angles, within):
        return True
    if configured.rope_type == "dynamic":  # a longer text before may have raised the base
        first = min(len(angles), len(configured.angles))
        return bool((angles[:first] <= configured.angles[:first] + within).all())
    if configured.is_size_stated or configured.rope_type != "default":
        return False
    sizes = _list_sizes(logged.call.query.shape[-1])
    return any(_are_close(angles, compute_angles(configured.theta, size), within) for size in sizes)


def _are_close(a: Tensor, b: Tensor, within: float) -> bool:
    """Compare angles in any order; pairs that hardly turn may be missing from one of them."""
    a, b = (angles.sort(descending=True).values for angles in (a, b))
    common = min(len(a), len(b))
    rest = torch.cat([a[common:], b[common:]])
    is_close = torch.allclose(a[:common], b[:common], rtol=1e-2, atol=within)
    return is_close and float(rest.sum()) < 10 * SMALL_TURN


def _explain_angles(angles: Tensor, configured: ConfiguredRotary, dim: int, within: float) -> str:
    """Say what differs between measured angles and those of a configuration, as the end of a sentence."""
    theta = configured.theta
    for size in dict.fromkeys((configured.size, *_list_sizes(dim))):
        if _are_close(angles, compute_angles(theta, size), within):
            if size == configured.size:
                return f": they are not scaled, although rope_type is {configured.rope_type!r}."
            if configured.rope_type == "default":
                return f": {size} channels of each head are rotated instead of {configured.size}."
    if math.isclose(float(angles[0]), 1.0, rel_tol=1e-2) and len(angles) > 1:
        found = float(angles[1]) ** -len(angles)
        if _are_close(angles, compute_angles(found, 2 * len(angles)), within):
            return f": rope_theta is {found:,.0f} instead of {theta:,.0f}."
    common = min(len(angles), len(configured.angles))
    ratio = float(angles[0] / configured.angles[0])
    if _are_close(angles[:common], configured.angles[:common] * ratio, within):
        return f": they are multiplied by {ratio:.3g}."
    return "."


def _format_angles(angles: Tensor, others: Tensor) -> str:
    """Format the first angles, and the first that differs from the others."""
    common = min(len(angles), len(others))
    differs = ~torch.isclose(angles[:common], others[:common], rtol=1e-2, atol=1e-6)
    first = int(differs.nonzero()[0]) if bool(differs.any()) else 0
    shown = ", ".join(f"{angle:.3g}" for angle in angles[:3].tolist())
    return shown if first < 3 else f"{shown}; pair {first}: {float(angles[first]):.3g}"


def _check_factor(logged: LoggedCall, query: Turn, configured: ConfiguredRotary) -> list[Finding]:
    """Check that queries and keys are multiplied by the factor of the configuration, as in YaRN."""
    call, factor = logged.call, configured.factor
    part = slice(query.start, query.start + 2 * len(query.angles))
    factors = [find_factor(logged, vectors, part) for vectors in (call.query, call.key)]
    is_plain = all(found is not None and math.isclose(found, 1.0, rel_tol=2e-3) for found in factors)
    is_default = math.isclose(call.scale, call.query.shape[-1] ** -0.5, rel_tol=2e-3)
    if math.isclose(factor, 1.0, rel_tol=1e-2) or not is_plain or not is_default:
        return []
    message = f"The attention factor of rope_type {configured.rope_type!r} was not applied."
    evidence = {"factor of query and key": 1.0, "configured": factor, "scale of the call": call.scale}
    hint = f"Multiply cos and sin by {factor:.4g} (attention_scaling in transformers)."
    return [logged.build_finding("rotary: not as configured", message, evidence, hint)]


def _check_values(turns: Sequence[tuple[LoggedCall, Turn, Turn]]) -> list[Finding]:
    """Check that the values of the first layer that turns its keys do not turn; later ones depend on it."""
    logged, _, key = next((entry for entry in turns if entry[2].is_turn), (None, None, None))
    if logged is None or key is None or logged.value.ndim != 4:
        return []
    is_shared = logged.value.shape == logged.key.shape and bool(torch.equal(logged.value, logged.key))
    if is_shared or read_setting(getattr(logged.owner, "config", None), "rotary_value"):
        return []  # some architectures turn them, and their outputs back
    turn = measure_turn(logged.value[0])
    if not turn.is_turn or not _have_equal_angles(turn.angles.abs(), key.angles.abs()):
        return []
    evidence = {"value": _describe(turn), "key": _describe(key)}
    message = "Values are rotated by position, as queries and keys are."
    hint = "Apply rotary positions to queries and keys only; the weights carry the positions."
    return [logged.build_finding("rotary: values rotated", message, evidence, hint)]


def _check_norms(logged: LoggedCall) -> list[Finding]:
    """Check for norms of queries and keys after their turn: their weights change the pairs, and so the angles."""
    if logged.is_configured:  # the order is that of the architecture
        return []
    for event in (event for event in logged.norms if event.input is not None):
        for name, vectors in (("query", logged.call.query), ("key", logged.call.key)):
            is_transposed = event.output.shape == vectors.transpose(1, 2).shape
            output, given = ((x.transpose(1, 2) if is_transposed else x) for x in (event.output, event.input))
            if (
                output.shape != vectors.shape
                or given.shape != vectors.shape
                or not torch.equal(output, vectors)
            ):
                continue
            turn = measure_turn(given[0])
            if turn.kind == "even" and measure_turn(output[0]).kind == "unknown":
                message = (
                    "The query or key is normalised after the rotation, so its weights distort the angles."
                )
                evidence = {"norm": event.name, "output": name, "input of the norm": _describe(turn)}
                hint = (
                    "Apply q_norm and k_norm before rotary positions, unless the model was trained otherwise."
                )
                return [logged.build_finding("norm after rotary", message, evidence, hint, "warning")]
    return []


def _check_missing(turns: Sequence[tuple[LoggedCall, Turn, Turn]]) -> list[Finding]:
    """Report layers whose queries and keys do not turn, if those of most layers do."""
    without = [logged for logged, query, key in turns if query.kind == key.kind == "none"]
    with_turn = [logged for logged, query, key in turns if query.is_turn and key.is_turn]
    turning = len(with_turn)
    if not without or turning <= len(without) or _state_types(without) & _state_types(with_turn) == set():
        return []
    message = "Queries and keys are not rotated in this layer, but are in most other layers."
    hint = "Apply rotary positions in every layer, unless the architecture has layers without positions."
    evidence = {"layers that rotate": turning, "layers that do not": len(without)}
    return [
        logged.build_finding("rotary: missing in some layers", message, evidence, hint, "warning")
        for logged in without
    ]


def _state_types(calls: Sequence[LoggedCall]) -> set[tuple[Any, ...]]:
    """Return what layers state about their type, such as use_rope of Llama 4; nothing counts as equal."""
    return {
        tuple(
            (name, str(value))
            for name, value in sorted(vars(logged.owner).items())
            if _STATES_TYPE.search(name) and isinstance(value, str | int | float | None)
        )
        for logged in calls
    }


def _describe(turn: Turn) -> str:
    if not turn.is_turn:
        return {"none": "not rotated", "unknown": "not a rotation"}[turn.kind]
    angles = ", ".join(f"{angle:.3g}" for angle in turn.angles[:3].tolist())
    return f"{turn.layout} pairs, {angles}{', …' if len(turn.angles) > 3 else ''} rad per token"


@dataclass(frozen=True)
class ConfiguredRotary:
    """Rotary positions of one layer.

    Args:
        rope_type: "default", "linear", "llama3", "yarn", … as transformers names them.
        theta: Base of the frequencies.
        angles: Radians per token of each pair, float64.
        size: How many numbers of a head turn.
        is_size_stated: Whether that is certain. A class of transformers may turn another share than a configuration
            that states none.
        factor: What queries and keys are multiplied with, each.
    """

    rope_type: str
    theta: float
    angles: Tensor
    size: int
    is_size_stated: bool
    factor: float = 1.0


def compute_angles(theta: float, size: int) -> Tensor:
    """Return the angles without scaling, (size / 2,), float64."""
    return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def find_configured(config: Any, owner: nn.Module, num_tokens: int, dim: int) -> list[ConfiguredRotary]:
    """Return the rotary positions that a layer may have by its configuration."""
    own = getattr(owner, "config", None)
    config = own if own is not None else getattr(config, "text_config", None) or config
    parameters = read_setting(config, "rope_parameters")
    if not isinstance(parameters, Mapping):
        return []
    by_type = {name: entry for name, entry in parameters.items() if isinstance(entry, Mapping)}
    is_plain = "rope_theta" in parameters or "rope_type" in parameters
    sets: dict[str, Any] = {"": parameters} if is_plain else by_type
    layer_type = find_layer_type(owner, config)
    if layer_type in sets:
        sets = {layer_type: sets[layer_type]}
    is_own_class = not type(owner).__module__.startswith("transformers.")
    try:
        return [
            configured
            for name, entry in sets.items()
            for configured in _build_configured(config, entry, name, num_tokens, dim, is_own_class)
        ]
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError, RuntimeError):
        return []  # parameters that differ between layers, or that this version of transformers does not know


def find_layer_type(owner: nn.Module, config: Any) -> str | None:
    """Return the type of a layer, such as "sliding_attention", by its configuration or itself; None if unknown."""
    types, index = read_setting(config, "layer_types"), getattr(owner, "layer_idx", None)
    if isinstance(types, list | tuple) and isinstance(index, int) and index < len(types):
        return str(types[index])
    named = getattr(owner, "layer_type", None) or getattr(owner, "attention_type", None)
    return named if isinstance(named, str) else None


def _build_configured(
    config: Any, parameters: Any, layer_type: str, num_tokens: int, dim: int, is_own_class: bool
) -> Iterator[ConfiguredRotary]:
    """Yield the rotary positions of one set of parameters; several if the size of the head or the length is unclear."""
    share = parameters.get("partial_rotary_factor")
    # With latent attention, a part of the head turns, which some configurations also call head_dim.
    stated = [getattr(config, name, None) for name in ("qk_rope_head_dim", "head_dim")]
    head_dims = [int(head_dim) for head_dim in stated if head_dim]
    for head_dim in dict.fromkeys(head_dims or [config.hidden_size // config.num_attention_heads]):
        size = int(head_dim * (share or 1.0))
        if not 1 < size <= dim:
            continue
        is_size_stated = is_own_class or share is not None
        for angles, factor in _compute(config, parameters, layer_type, num_tokens, head_dim, size):
            rope_type, theta = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
            yield ConfiguredRotary(rope_type, theta, angles, size, is_size_stated, factor)


def _compute(
    config: Any, parameters: Any, layer_type: str, num_tokens: int, head_dim: int, size: int
) -> Iterator[tuple[Tensor, float]]:
    """Yield angles and factor, by the functions of transformers if they are scaled; twice for LongRoPE."""
    rope_type = parameters.get("rope_type", "default")
    if rope_type == "default":
        yield compute_angles(float(parameters["rope_theta"]), size), 1.0
        return
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(config, transformers.PreTrainedConfig):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = copy.deepcopy(config)  # the functions complete its parameters in place
    config.head_dim = head_dim
    lengths = [num_tokens]
    if rope_type == "longrope":  # other factors for long texts, which some models keep for short ones
        limit = int(parameters["original_max_position_embeddings"])
        lengths.append(limit if num_tokens > limit else limit + 1)
    options = {"layer_type": layer_type} if layer_type else {}
    for length in lengths:
        angles, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=length, **options)
        yield angles.double(), float(factor)
