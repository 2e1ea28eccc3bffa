"""Compare attention calls with the linear layers around them: how heads were split, repeated, scaled and merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from regard.capture.module_hints import read_setting
from regard.capture.module_trace import ModuleEvent
from regard.diagnosis.subject import LoggedCall
from regard.engines.torch_precision import widen
from regard.families import UNSCALED_LAYERS
from regard.findings import Finding

Tensor = Any  # the types of torch are not followed


class HeadRows(NamedTuple):
    """The rows of a linear layer that compute the queries, keys or values of each head.

    Args:
        name: Name of the linear layer.
        starts: First row of each head.
        factor: What the vectors of the heads are multiplied with after the layer.
        is_rotated: Whether only the lengths of the vectors agree, as with rotary positions.
        event: The call of the linear layer.
    """

    name: str
    starts: list[int]
    factor: float
    is_rotated: bool
    event: ModuleEvent


def find_head_rows(
    logged: LoggedCall, heads_first: Tensor, tolerance: float, *, may_rotate: bool
) -> HeadRows | None:
    """Find the linear layer, and its rows, that compute the query, key or value of a call, in any order of heads.

    Args:
        heads_first: The query, key or value, (batch, heads, n, head_dim), of 4 or more tokens.
        tolerance: Relative difference that is rounding.
        may_rotate: Accept vectors of which only the lengths agree.

    Returns:
        The rows; None if the vectors are not those of one linear layer times a constant.
    """
    batch, heads, n, dim = heads_first.shape
    vectors = heads_first.transpose(1, 2).to("cpu", torch.float64)  # (batch, n, heads, dim)
    for is_rotated in (False, True)[: 1 + may_rotate]:
        for event in logged.before:
            output = event.output
            if output.ndim == 2 and len(output) == batch * n:
                output = output.unflatten(0, (batch, n))
            if output.shape[:-1] != (batch, n) or output.shape[-1] % dim:
                continue
            chunks = output.to("cpu", torch.float64).unflatten(-1, (-1, dim))
            pair = [x.norm(dim=-1, keepdim=True) if is_rotated else x for x in (vectors, chunks)]
            own, theirs = (x.transpose(0, 2).flatten(1) for x in pair)  # (heads or chunks, numbers)
            products, lengths = own @ theirs.T, theirs.square().sum(-1)
            # Squared distance of each head to the nearest multiple of each chunk, relative to the head.
            distances = 1 - products.square() / (lengths * own.square().sum(-1)[:, None])
            nearest, places = distances.nan_to_num(torch.inf).min(1)
            factors = (products / lengths)[torch.arange(heads), places]
            is_same = (factors - factors[0]).abs().amax() <= tolerance * factors[0].abs()
            if bool(is_same) and float(nearest.amax()) <= tolerance**2 and float(factors[0]) > 0:
                starts = [int(place) * dim for place in places]
                return HeadRows(event.name, starts, float(factors.mean()), is_rotated, event)
    return None


def check_projections(calls: Sequence[LoggedCall], num_tokens: int, width: int | None) -> list[Finding]:
    """Check the calls of one forward pass."""
    findings = []
    for logged in calls:
        found = _check_swapped_axes(logged, num_tokens)
        if found is None:
            found = _check_split(logged)
        if found is not None:
            findings.append(found)
            continue
        num_calls = sum(other.module == logged.module for other in calls)
        unused = _check_used_heads(logged) if num_calls == 1 else None
        order = unused if unused is not None else _check_head_order(logged)
        checks = (_check_merge(logged), order, _check_scale(logged, width))
        findings += [finding for finding in checks if finding is not None]
    return findings


def find_factor(logged: LoggedCall, heads_first: Tensor, part: slice = slice(None)) -> float | None:
    """Return what a query or key was multiplied with since its projection or norm, besides turning.

    Args:
        heads_first: Its query or key, (batch, heads, n, head_dim).
    """
    factor = _match_lengths(heads_first, _find_projections(logged, heads_first), part)
    return factor or _match_lengths(heads_first, _find_norm_outputs(logged, heads_first), part)


def _match_lengths(vectors: Tensor, sources: Iterator[Tensor], part: slice = slice(None)) -> float | None:
    """Return the number that the lengths of some source must be multiplied with to be those of vectors, or None."""
    lengths = widen(vectors[..., part]).norm(dim=-1)
    factors = (_find_ratio(lengths, widen(source[..., part]).norm(dim=-1)) for source in sources)
    return next((factor for factor in factors if factor is not None), None)


def compare_with_projection(logged: LoggedCall) -> Tensor | None:
    """Return the angle of the first pair of each query head to its projection, if it differs between heads.

    Returns:
        (heads,), radians; None if the query is its projection, or if that is unknown.
    """
    query = logged.call.query
    for projected in _find_projections(logged, query):
        lengths = [widen(x).norm(dim=-1) for x in (query, projected)]
        if not torch.allclose(lengths[0], lengths[1], rtol=1e-3, atol=1e-6):
            continue
        if torch.allclose(query, projected, atol=1e-5):
            return None
        for first, second in ((0, 1), (0, query.shape[-1] // 2)):
            pairs = [
                torch.complex(x[..., first], x[..., second])[0, :, 0]
                for x in (widen(query), widen(projected))
            ]
            if torch.allclose(pairs[0].abs(), pairs[1].abs(), rtol=1e-3):
                return (pairs[0] * pairs[1].conj()).angle()
    return None


def _find_projections(logged: LoggedCall, heads_first: Tensor) -> Iterator[Tensor]:
    """Yield outputs of linear layers as (batch, heads, n, head_dim), those that have the right numbers."""
    batch, heads, n, dim = heads_first.shape
    for event in logged.before:
        for part in _split_output(event, heads * dim):
            if part.shape[:2] == (batch, n):
                yield part.reshape(batch, n, heads, dim).transpose(1, 2)


def _find_norm_outputs(logged: LoggedCall, heads_first: Tensor) -> Iterator[Tensor]:
    """Yield outputs of norms as (batch, heads, n, head_dim), those that have the right numbers."""
    batch, heads, n, dim = heads_first.shape
    for event in logged.norms:
        output = event.output
        if output.shape == heads_first.shape:
            yield output
        if output.shape in ((batch, n, heads, dim), (batch, n, heads * dim)):
            yield output.reshape(batch, n, heads, dim).transpose(1, 2)


def _split_output(event: Any, width: int) -> Iterator[Tensor]:
    """Yield the parts of a linear layer's output that have a width: all of it, or the first, middle or last part."""
    output = event.output
    if output.ndim != 3 or output.shape[-1] < width:
        return
    total = output.shape[-1]
    starts = [0] if total == width else dict.fromkeys((0, width, total - width, total - 2 * width))
    for start in starts:
        if 0 <= start <= total - width:
            yield output[..., start : start + width]


def _check_swapped_axes(logged: LoggedCall, num_tokens: int) -> Finding | None:
    """Check for tokens on the axis of the heads."""
    query = logged.call.query
    if query.ndim != 4 or query.shape[-3] != num_tokens or query.shape[-2] == num_tokens or not logged.before:
        return None
    if not any(event.output.shape[-1] == query.shape[-2] * query.shape[-1] for event in logged.before):
        return None
    return logged.build_finding(
        "heads and tokens swapped",
        "The axis of the heads has one entry for each token, so each token attends only to its own heads.",
        {"query": str(tuple(query.shape)), "tokens": num_tokens},
        "Transpose before the call: F.scaled_dot_product_attention takes (batch, heads, n, head_dim).",
    )


def _check_split(logged: LoggedCall) -> Finding | None:
    """Check for heads that were split by `view(batch, heads, n, head_dim)` without a transpose."""
    query = logged.call.query
    if query.ndim != 4 or query.shape[1] == 1 or query.shape[2] == 1:
        return None
    batch, heads, n, dim = query.shape
    lengths = widen(query).norm(dim=-1)
    for projected in _find_projections(logged, query):
        flat = projected.transpose(1, 2).reshape(batch, n, heads * dim)
        viewed = widen(flat.reshape(batch, heads, n, dim)).norm(dim=-1)
        ratio = _find_ratio(lengths, viewed)
        if ratio is not None and _find_ratio(lengths, widen(projected).norm(dim=-1)) is None:
            return logged.build_finding(
                "heads split by view",
                "The projection was viewed as (batch, heads, n, head_dim), which mixes tokens and heads.",
                {"query": str(tuple(query.shape)), "tokens": n, "heads": heads},
                "Use .view(batch, n, heads, head_dim).transpose(1, 2).",
            )
    return None


def _find_ratio(a: Tensor, b: Tensor) -> float | None:
    """Return the number r with a = r · b, up to rounding; None if there is none."""
    if a.shape != b.shape or not float(b.square().sum()) > 0:
        return None
    ratio = float((a * b).sum() / b.square().sum())
    tolerance = 1e-3 * float(a.abs().amax())
    return ratio if ratio > 0 and bool(((a - ratio * b).abs() <= tolerance).all()) else None


def _check_merge(logged: LoggedCall) -> Finding | None:
    """Check for an output that was merged without a transpose, or channel by channel."""
    output = logged.call.output
    if output is None or output.ndim != 4 or 1 in output.shape[1:3]:
        return None
    batch, _, n, _ = output.shape
    merged, viewed = output.transpose(1, 2).reshape(batch, n, -1), output.reshape(batch, n, -1)
    by_channel = output.permute(0, 2, 3, 1).reshape(batch, n, -1)
    evidence = {"output": str(tuple(output.shape))}
    hint = "Use .transpose(1, 2).reshape(batch, n, heads * head_dim)."
    for event in logged.after:
        if event.input is None:
            continue
        if event.input.shape == merged.shape and torch.equal(event.input, merged):
            return None
        if event.input.shape == viewed.shape and torch.equal(event.input, viewed):
            return logged.build_finding(
                "heads merged by view",
                "The output was reshaped from (batch, heads, n, head_dim) to (batch, n, width) without a transpose, "
                "which mixes tokens and heads.",
                evidence | {"input of the next layer": event.name},
                hint,
            )
        if event.input.shape == by_channel.shape and torch.equal(event.input, by_channel):
            return logged.build_finding(
                "heads merged channel by channel",
                "The input of the output projection has channel 0 of every head first, then channel 1, where heads are "
                "merged one after another.",
                evidence | {"input of the next layer": event.name},
                f"{hint} Ignore this if the model was trained with this order.",
                "warning",
            )
    return None


def _check_used_heads(logged: LoggedCall) -> Finding | None:
    """Check that every head of the key and value projections is attended to by some query head."""
    query = logged.call.query
    if query.ndim != 4:
        return None
    for name, tensor in (("value", logged.value), ("key", logged.key)):
        batch, _, n, dim = tensor.shape
        lengths = widen(tensor).norm(dim=-1)
        for event in logged.before:
            width = event.output.shape[-1]
            # The key's projection is as wide as the value's. A wider one may be of query, key and value together.
            widths = [other.output.shape[-1] for other in logged.before]
            is_own = widths.count(width) > 1 and len(widths) > 2 and width // dim <= query.shape[1]
            if event.output.shape != (batch, n, width) or width % dim or not is_own or "kv" in event.name:
                continue
            projected = widen(event.output).unflatten(-1, (-1, dim)).norm(dim=-1).transpose(1, 2)
            used = [_find_head(head, projected) for head in lengths.unbind(1)]
            if None in used or len(set(used)) == projected.shape[1]:
                continue
            evidence = {
                "heads of the projection": projected.shape[1],
                "heads used": ", ".join(map(str, sorted({head for head in used if head is not None}))),
                "projection": event.name,
            }
            message = f"No query head uses some {name} heads of the projection."
            hint = "Assign one to each group of query heads: repeat_interleave(groups, dim=1), or enable_gqa=True."
            return logged.build_finding("key heads not used", message, evidence, hint)
    return None


def _find_head(lengths: Tensor, projected: Tensor) -> int | None:
    """Return the head of a projection whose vectors have the lengths (batch, n), up to a factor.

    None if there is none, or several, as for a single token.
    """
    heads = enumerate(projected.unbind(1))
    found = [number for number, head in heads if _find_ratio(lengths, head) is not None]
    return found[0] if len(found) == 1 else None


def _check_head_order(logged: LoggedCall) -> Finding | None:
    """Check the order in which key and value heads were repeated."""
    heads = logged.call.query.shape[-3] if logged.call.query.ndim == 4 else 1
    orders = [_find_order(x, heads) for x in (logged.key, logged.value)]
    key, value = orders
    if key is None or value is None or len(set(key)) != len(set(value)) or len(set(key)) in (1, heads):
        return None
    evidence: dict[str, Any] = {
        "key heads": ", ".join(map(str, key)),
        "value heads": ", ".join(map(str, value)),
    }
    if key != value:
        message = (
            "Keys and values were repeated in different orders, so heads read the values of other heads."
        )
        hint = "Repeat both with repeat_interleave(groups, dim=1), or pass enable_gqa=True."
        return logged.build_finding("key and value heads differ", message, evidence, hint)
    if key != [head % len(set(key)) for head in range(heads)]:
        return None
    message = "Key heads were tiled (0, 1, 0, 1); grouped attention repeats each one (0, 0, 1, 1)."
    hint = "Use repeat_interleave(groups, dim=1) or expand, not repeat; or pass enable_gqa=True. If the model was "
    hint += "trained with tiled heads, this is not a fault."
    return logged.build_finding("key heads tiled", message, evidence, hint, "warning")


def _find_order(x: Tensor, heads: int) -> list[int] | None:
    """Return the number of the distinct head that each head is; None unless there is one for each query head."""
    if x.ndim != 4 or x.shape[1] != heads:
        return None
    distinct: list[Tensor] = []
    order = []
    for head in x.unbind(1):
        number = next((i for i, other in enumerate(distinct) if torch.equal(head, other)), len(distinct))
        if number == len(distinct):
            distinct.append(head)
        order.append(number)
    return order


def _check_scale(logged: LoggedCall, width: int | None) -> Finding | None:
    """Check the scale together with what the layer multiplied the query with before the call."""
    call = logged.call
    if call.query.ndim != 4 or UNSCALED_LAYERS.fullmatch(call.layer_class):
        return None
    factor = _match_lengths(call.query, _find_projections(logged, call.query))
    has_norm = factor is None
    if factor is None:
        factor = _match_lengths(call.query, _find_norm_outputs(logged, call.query))
    if factor is None:
        return None
    dim, kv_heads = call.query.shape[-1], call.key.shape[-3]
    scale, default = factor * call.scale, 1 / math.sqrt(dim)
    configured = _find_configured_scale(logged)
    named: list[tuple[float, str]] = []
    if configured is not None:
        default = configured
        named += (
            []
            if math.isclose(call.scale, configured, rel_tol=1e-2)
            else [(scale, "a different scale was used")]
        )
    elif not (has_norm and logged.is_configured):
        named += [(1 / dim, "the factor is 1/head_dim, as if scaled twice")]
    if configured is None and not logged.is_configured:
        named += [] if has_norm else [(1.0, "the scale is missing")]
        named += [((2 * dim) ** -0.5, "the factor is 1/√(2 · head_dim)")]
        named += [((kv_heads * dim) ** -0.5, "the factor is 1/√(kv_heads · head_dim)")]
        named += (
            [] if width is None else [(width**-0.5, "the factor is 1/√width of the model, not of a head")]
        )
    mistakes = [name for value, name in named if math.isclose(scale, value, rel_tol=1e-2)]
    if not mistakes or math.isclose(scale, default, rel_tol=1e-2):
        return None
    default_name = "1/√head_dim" if configured is None else "the scale of the configuration"
    evidence = {
        "factor of the query": factor,
        "scale of the call": call.scale,
        "together": scale,
        default_name: default,
    }
    message = f"The scores are not scaled by {default_name}: {', and '.join(mistakes)}."
    hint = f"Scale once, by {default:.4g}: omit scale, and do not multiply the query. Ignore this if it is intentional."
    return logged.build_finding("scale", message, evidence, hint, "warning")


def _find_configured_scale(logged: LoggedCall) -> float | None:
    """Return the scale that the configuration of a layer states; None if it states none."""
    config = getattr(logged.owner, "config", None)
    scalar, multiplier = (
        read_setting(config, name) for name in ("query_pre_attn_scalar", "attention_multiplier")
    )
    if isinstance(scalar, int | float) and scalar > 0:
        return float(scalar**-0.5)
    return float(multiplier) if isinstance(multiplier, int | float) and multiplier > 0 else None


def check_encoder_states(calls: Sequence[LoggedCall], encoded: Tensor) -> list[Finding]:
    """Check that cross-attention reads the output of the encoder.

    Args:
        encoded: Output of the encoder, (batch, n, width).
    """
    findings = []
    for logged in calls:
        known = [event for event in logged.before if event.input is not None]
        events = [event for event in known if event.input.shape == encoded.shape]
        if not events or any(torch.equal(event.input, encoded) for event in events):
            continue
        for event in events:
            change = _describe_permutation(event.input, encoded)
            if change is not None:
                findings.append(
                    logged.build_finding(
                        "cross-attention keys",
                        f"The keys are computed from a reordered encoder output: {change}.",
                        {"layer": event.name, "encoder output": str(tuple(encoded.shape))},
                        "Pass encoder_outputs of the same batch in the same order. With beam search, reorder both.",
                    )
                )
                break
    return findings


def _describe_permutation(states: Tensor, encoded: Tensor) -> str | None:
    """Describe how states are the encoder's in another order; None if they are something else."""
    batch, n = encoded.shape[:2]
    flat, original = states.flatten(0, 1), encoded.flatten(0, 1)
    distance = torch.cdist(widen(flat), widen(original))
    nearest, sources = distance.min(1)
    if float(nearest.max()) > 1e-5 * float(original.norm(dim=-1).amax()):
        return None
    entries = (sources // n).reshape(batch, n)
    if bool((entries != torch.arange(batch, device=entries.device)[:, None]).any()):
        order = ", ".join(str(int(entry)) for entry in entries.mode(1).values)
        return f"its batch entries are in the order {order}"
    order = ", ".join(str(int(token)) for token in (sources % n)[: min(n, 6)])
    return f"its tokens are in the order {order}, …"
