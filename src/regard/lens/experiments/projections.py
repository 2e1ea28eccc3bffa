"""Compare attention calls with the linear layers around them: how heads were split, repeated, scaled and merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from regard.engines.torch_precision import widen
from regard.findings import Finding
from regard.lens.analysis.head_checks import UNSCALED_LAYERS
from regard.lens.experiments.call_log import LinearEvent, LoggedCall

Tensor = Any  # the types of torch are not followed


def check_projections(calls: Sequence[LoggedCall], num_tokens: int, width: int | None) -> list[Finding]:
    """Check the calls of one forward pass.

    Args:
        calls: The calls.
        num_tokens: Number of tokens of the pass.
        width: Width of the hidden states, or None if unknown.

    Returns:
        The findings.
    """
    findings = []
    for logged in calls:
        found = _check_swapped_axes(logged, num_tokens)
        if found is None:
            found = _check_split(logged)
        if found is not None:
            findings.append(found)
            continue
        checks = (_check_merge(logged), _check_head_order(logged), _check_scale(logged, width))
        findings += [finding for finding in checks if finding is not None]
    return findings


def compare_with_projection(logged: LoggedCall) -> Tensor | None:
    """Return the angle of the first pair of each query head to its projection, if it differs between heads.

    Args:
        logged: A call whose query does not change with the position.

    Returns:
        (heads,), radians; None if the query is its projection, or if that is unknown.
    """
    query = logged.call.query
    for projected in _find_projections(logged, query):
        if not _have_equal_lengths(query, projected):
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


def _split_output(event: LinearEvent, width: int) -> Iterator[Tensor]:
    """Yield the parts of a linear layer's output that have a width: all of it, or the first, middle or last part."""
    output = event.output
    if output.ndim != 3 or output.shape[-1] < width:
        return
    total = output.shape[-1]
    starts = [0] if total == width else dict.fromkeys((0, width, total - width, total - 2 * width))
    for start in starts:
        if 0 <= start <= total - width:
            yield output[..., start : start + width]


def _have_equal_lengths(a: Tensor, b: Tensor) -> bool:
    a, b = widen(a).norm(dim=-1), widen(b).norm(dim=-1)
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-6))


def _check_swapped_axes(logged: LoggedCall, num_tokens: int) -> Finding | None:
    """Check for tokens on the axis of the heads."""
    query = logged.call.query
    if query.ndim != 4 or query.shape[-3] != num_tokens or query.shape[-2] == num_tokens or not logged.before:
        return None
    if not any(event.output.shape[-1] == query.shape[-2] * query.shape[-1] for event in logged.before):
        return None
    return _build(
        logged,
        "heads and tokens swapped",
        "The axis of the heads has one entry for each token: each token attends to its own heads only.",
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
            return _build(
                logged,
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
    """Check for an output that was viewed as (batch, n, width) without a transpose."""
    output = logged.call.output
    if output is None or output.ndim != 4 or 1 in output.shape[1:3]:
        return None
    batch, _, n, _ = output.shape
    merged, viewed = output.transpose(1, 2).reshape(batch, n, -1), output.reshape(batch, n, -1)
    for event in logged.after:
        if event.input.shape == merged.shape and torch.equal(event.input, merged):
            return None
        if event.input.shape == viewed.shape and torch.equal(event.input, viewed):
            return _build(
                logged,
                "heads merged by view",
                "The output was reshaped from (batch, heads, n, head_dim) to (batch, n, width) without a transpose, "
                "which mixes tokens and heads.",
                {"output": str(tuple(output.shape)), "input of the next layer": event.name},
                "Use .transpose(1, 2).reshape(batch, n, heads * head_dim).",
            )
    return None


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
        message = "Keys and values were repeated in different orders, so a head reads the values of another."
        hint = "Repeat both with repeat_interleave(groups, dim=1), or pass enable_gqa=True."
        return _build(logged, "key and value heads differ", message, evidence, hint)
    if key != [head % len(set(key)) for head in range(heads)]:
        return None
    message = "Key heads were tiled (0, 1, 0, 1), where grouped attention repeats each one (0, 0, 1, 1)."
    hint = "Use repeat_interleave(groups, dim=1) or expand, not repeat; or pass enable_gqa=True. If the model was "
    hint += "trained with tiled heads, this is no fault."
    return _build(logged, "key heads tiled", message, evidence, hint, "warning")


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
    lengths = widen(call.query).norm(dim=-1)
    factors = (
        _find_ratio(lengths, widen(projected).norm(dim=-1))
        for projected in _find_projections(logged, call.query)
    )
    factor = next((factor for factor in factors if factor is not None), None)
    if factor is None:
        return None
    dim = call.query.shape[-1]
    scale, default = factor * call.scale, 1 / math.sqrt(dim)
    named = {1 / dim: "the scores were scaled twice"}
    if not logged.is_configured:
        named[1.0] = "the scale is missing"
    if width is not None and width != dim and not logged.is_configured:
        named[width**-0.5] = "the scale is 1/√width of the model, not of a head"
    mistake = next((name for value, name in named.items() if math.isclose(scale, value, rel_tol=1e-2)), None)
    if mistake is None or math.isclose(scale, default, rel_tol=1e-2):
        return None
    evidence = {
        "factor of the query": factor,
        "scale of the call": call.scale,
        "together": scale,
        "1/√head_dim": default,
    }
    message = f"The scores are not scaled by 1/√head_dim: {mistake}."
    hint = f"Scale once, by {default:.4g}: omit scale, and do not multiply the query. Ignore this if it is intended."
    return _build(logged, "scale", message, evidence, hint, "warning")


def check_encoder_states(calls: Sequence[LoggedCall], encoded: Tensor) -> list[Finding]:
    """Check that cross-attention reads the output of the encoder.

    Args:
        calls: The calls of one forward pass.
        encoded: Output of the encoder, (batch, n, width).

    Returns:
        The findings.
    """
    findings = []
    for logged in calls:
        events = [event for event in logged.before if event.input.shape == encoded.shape]
        if not events or any(torch.equal(event.input, encoded) for event in events):
            continue
        for event in events:
            change = _describe_permutation(event.input, encoded)
            if change is not None:
                findings.append(
                    _build(
                        logged,
                        "cross-attention keys",
                        f"The keys are not computed from the encoder's output as it is: {change}.",
                        {"layer": event.name, "encoder output": str(tuple(encoded.shape))},
                        "Pass encoder_outputs of the same batch, in the same order; reorder both with the beams.",
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


def _build(
    logged: LoggedCall, kind: str, message: str, evidence: dict[str, Any], hint: str, severity: Any = "error"
) -> Finding:
    return Finding(kind, severity, message, logged.module, logged.layer, evidence=evidence, hint=hint)
