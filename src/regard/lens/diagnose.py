"""Run all checks on a recording: `Recording.diagnose`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from regard.capture.cache_store import CACHE_FAULTS, CacheFault, CallRows, JoinedCalls
from regard.capture.call import LayerCall
from regard.capture.module_hints import ModuleHints
from regard.capture.module_names import find_place
from regard.capture.own_softmax import OVER_QUERIES
from regard.capture.record import Uncaptured
from regard.errors import ArgumentError, describe_argument
from regard.findings import Check, CheckRun, Finding, Findings, format_numbers, run_check
from regard.lens.layer_checks import (
    CheckedLayer,
    check_bias_direction,
    check_causal_alignment,
    check_documents,
    check_dropout,
    check_empty_rows,
    check_future,
    check_heads,
    check_inverted_mask,
    check_kernel,
    check_own_key,
    check_padded_positions,
    check_padding,
    check_padding_axis,
    check_padding_order,
    check_settings,
    check_zero_one_mask,
)
from regard.lens.token_rows import as_token_lists, fit_tokens

# Kind of the finding about an empty recording. It is an error, since nothing was checked, and not one of the model.
NOTHING_RECORDED = "nothing recorded"

EMPTY = Finding(
    NOTHING_RECORDED,
    "error",
    "The recording is empty, so no attention was checked.",
    hint="Run the model inside the block of regard.watch(model), without layers= or with layers that compute "
    "attention. If the model did run, it has no attention that the lens can read, as in state-space models or models "
    "with Fourier transforms.",
)

# Why positions cannot be checked.
NO_POSITIONS = "no positions were looked up or passed"

# Padding tokens of common vocabularies.
_PADDING_TOKENS = ("[PAD]", "<pad>", "<|pad|>", "<PAD>")


def run_checks(
    layer_calls: Sequence[LayerCall],
    joined_calls: Mapping[str, list[JoinedCalls]],
    module_hints: ModuleHints,
    uncaptured: Mapping[str, Uncaptured],
    cache_faults: Mapping[str, Sequence[CacheFault]],
    *,
    tokens: Any = None,
    attention_mask: Any = None,
    causal: bool | None = None,
) -> Findings:
    """Run the checks of `Recording.diagnose`.

    Args:
        attention_mask: (batch, n), 1 = token, 0 = padding, or None.
    """
    is_token = _find_tokens(tokens, attention_mask)
    layers = list_layers(layer_calls, module_hints, causal)
    with_weights = [layer for layer in layers if _has_weights(layer)]
    for layer in with_weights:
        layer.is_token = _fit_to_layer(is_token, layer, with_weights)
    if attention_mask is not None and with_weights and all(layer.is_token is None for layer in with_weights):
        raise _mask_fit_error(is_token, with_weights)
    _set_image_runs(layers, layer_calls, module_hints)
    findings, finite = _check_finite(with_weights)
    usual_scales = _find_usual_scales(with_weights)
    runs: dict[str, list[CheckRun]] = {check.name: [] for check in LAYER_CHECKS}
    for layer in layers:
        layer.is_finite = layer in finite
        if layer in with_weights:
            layer.usual_scale = usual_scales.get(_scale_group(layer))
        for check in LAYER_CHECKS:
            found, run = run_check(check, layer)
            # A wrong polarity, form or order of a mask explains what the other checks of the mask would find.
            layer.has_wrong_mask |= bool(found) and check in MASK_FORM_CHECKS
            findings += found
            runs[check.name].append(run)
    findings += _check_positions(joined_calls, module_hints)
    findings += check_padded_positions(with_weights)
    findings += _check_caches(joined_calls, cache_faults)
    for number, (name, failure) in enumerate(uncaptured.items(), len(layers)):
        findings.append(_build_uncaptured(name, number, failure))
    if not layers and all(finding.severity != "error" for finding in findings):
        findings.append(EMPTY)
    heads = sum(layer.shape[1] for layer in layers)
    scope = f"{len(layers)} layer{'s' * (len(layers) != 1)}, {heads} head{'s' * (heads != 1)}"
    checks = _list_recording_checks(joined_calls, module_hints)
    for name, of_layers in runs.items():
        not_run = of_layers[0] if of_layers else CheckRun(name, "no layer was recorded")
        checks.append(next((run for run in of_layers if not run.reason), not_run))
    return Findings(findings, scope, checks)


def _list_recording_checks(
    joined_calls: Mapping[str, list[JoinedCalls]], module_hints: ModuleHints
) -> list[CheckRun]:
    """List the checks across layers: of NaN and inf, and of the steps of a cache."""
    has_steps = any(len(joined.steps) > 1 for groups in joined_calls.values() for joined in groups)
    no_steps = "" if has_steps else "only one pass was recorded, without cached steps"
    no_positions = "" if module_hints.lookups else NO_POSITIONS
    return [
        CheckRun("NaN or inf"),
        CheckRun("cache: keys and values of each step", no_steps),
        CheckRun("positions of cached steps", no_steps or no_positions),
        CheckRun("positions of padded tokens", no_positions),
    ]


def list_layers(
    layer_calls: Sequence[LayerCall], module_hints: ModuleHints, causal: bool | None
) -> list[CheckedLayer]:
    """Build a layer to check for each call, and decide which should be causal; `causal` is what the user stated."""
    layers = [CheckedLayer(entry.layer, entry.module, entry.call) for entry in layer_calls]
    with_weights = [layer for layer in layers if _has_weights(layer)]
    for layer in with_weights:
        layer.module_hints = module_hints
        layer.causal = _should_be_causal(layer, with_weights, causal)
    return layers


def _has_weights(layer: CheckedLayer) -> bool:
    return layer.call.query is not None and bool(min(layer.shape))


def _build_uncaptured(name: str, number: int, failure: Uncaptured) -> Finding:
    """Build the finding of a layer that was not captured; a softmax over the wrong axis is an error of its own."""
    if failure.reason.endswith(OVER_QUERIES):
        message = "The softmax is over the queries, so the weights of a query do not sum to 1."
        hint = "Use softmax(dim=-1) on scores of shape (…, q_len, kv_len)."
        evidence = {"reason": failure.reason}
        return Finding("softmax axis", "error", message, name, number, evidence=evidence, hint=hint)
    if failure.is_intended:
        message = f"The layer was not recorded: {failure.reason}."
        return Finding("left out", "note", message, name, number, hint=failure.hint)
    message = f"The layer was not captured: {failure.reason}."
    return Finding("not captured", "warning", message, name, number, hint=failure.hint)


# Expectations


def _find_tokens(tokens: Any, attention_mask: Any) -> Any:
    """Return which tokens are not padding, (batch, n), by the mask or the texts of the tokens; None if unknown."""
    if attention_mask is not None:
        mask = np.asarray(attention_mask.cpu() if hasattr(attention_mask, "cpu") else attention_mask)
        if mask.ndim not in (1, 2) or not np.isin(mask, (0, 1)).all():
            raise ArgumentError(
                "recording.diagnose",
                received=f"attention_mask as {describe_argument(mask)}",
                expected="(batch, n), 1 for a token and 0 for padding",
                hint="Pass the attention_mask that the tokenizer returns with input_ids.",
            )
        return np.atleast_2d(mask != 0)
    if tokens is None:
        return None
    token_lists = as_token_lists(tokens, "recording.diagnose")
    if len({len(row) for row in token_lists}) > 1:
        return None
    is_token = np.array([[token not in _PADDING_TOKENS for token in row] for row in token_lists])
    return None if is_token.all() else is_token


def _mask_fit_error(is_token: Any, layers: list[CheckedLayer]) -> ArgumentError:
    """Build the error for an `attention_mask` that fits no layer."""
    sizes = sorted({(batch, kv_len) for batch, _, _, kv_len in (layer.shape for layer in layers)})
    return ArgumentError(
        "recording.diagnose",
        received=f"attention_mask of shape {is_token.shape}",
        expected="(batch, keys) of a layer: " + " or ".join(map(str, sizes[:3])) + ", …" * (len(sizes) > 3),
        hint="Pass the attention_mask that you passed to the model, including special tokens and padding.",
    )


def _fit_to_layer(is_token: Any, layer: CheckedLayer, layers: list[CheckedLayer]) -> Any:
    """Return which keys of a layer are tokens; None if its keys are another sequence. Generated tokens count."""
    batch, _, _, kv_len = layer.shape
    if is_token is None or len(is_token) not in (1, batch):
        return None
    is_self_attention = layer.token_rows.query_offset is not None
    has_encoder = any("encoder" in other.module for other in layers)
    if has_encoder and "decoder" in layer.module and is_self_attention:
        return None
    missing = kv_len - is_token.shape[1]
    if missing > 0 and layer.call.steps > 1 and is_self_attention:
        is_token = np.concatenate([is_token, np.ones((len(is_token), missing), bool)], 1)
    fitted = fit_tokens(is_token.tolist(), batch, kv_len)
    return None if fitted is None else np.array(fitted, bool).reshape(batch, kv_len)


def _set_image_runs(
    layers: list[CheckedLayer], layer_calls: Sequence[LayerCall], module_hints: ModuleHints
) -> None:
    """Set the images of each layer: those of the pass of its call."""
    num_calls = Counter(entry.module for entry in layer_calls)
    for layer, entry in zip(layers, layer_calls, strict=True):
        if num_calls[entry.module] == len(module_hints.image_runs):
            image_runs = module_hints.image_runs[entry.call_index]
            if len(image_runs) == layer.shape[0]:
                layer.image_runs = image_runs


def _should_be_causal(layer: CheckedLayer, layers: list[CheckedLayer], causal: bool | None) -> bool:
    """Decide whether a layer should be causal: by the argument, by its module, or by most layers of its stack."""
    if layer.token_rows.query_offset is None:
        return False
    if causal is not None:
        return causal
    if layer.module_hints.causal.get(layer.module):
        return True
    stack = [
        other
        for other in layers
        if find_place(other.module).stack == find_place(layer.module).stack
        and other.token_rows.query_offset is not None
    ]
    return sum(map(_is_causal, stack)) > len(stack) / 2


def _is_causal(layer: CheckedLayer) -> bool:
    """Return whether the mask is triangular, or so nearly that it was meant to be: `check_future` reports the rest."""
    mask, kv_len = layer.call.compact_mask, layer.shape[3]
    if mask.dense_mask is not None or layer.shape[2] < 2:
        return False
    start, stop = layer.intervals
    ahead = int((stop - layer.token_rows.own_keys - 1).max())
    grows = np.diff(stop, axis=-1) > 0
    is_staircase = grows.mean() > 0.5 and (stop < kv_len).mean() > 0.5 and not np.ptp(start, axis=-1).any()
    return ahead <= 0 or (is_staircase and ahead <= max(1, kv_len // 8))


def _scale_group(layer: CheckedLayer) -> tuple[Any, ...]:
    """Return the key of the layers that should share a scale."""
    is_cross_attention = layer.token_rows.query_offset is None
    return find_place(layer.module).stack, layer.call.query.shape[-1], is_cross_attention


def _find_usual_scales(layers: list[CheckedLayer]) -> dict[Any, float]:
    """Find the scale of most layers of each group, if at least three agree."""
    scales: dict[Any, list[float]] = {}
    for layer in layers:
        scales.setdefault(_scale_group(layer), []).append(float(f"{layer.call.scale:.6g}"))
    most_common = {group: Counter(values).most_common(1)[0] for group, values in scales.items()}
    return {group: scale for group, (scale, count) in most_common.items() if count >= 3}


# Checks across layers


def _check_finite(layers: list[CheckedLayer]) -> tuple[list[Finding], list[CheckedLayer]]:
    """Report where NaN and inf began, as one finding; also return the layers without them."""
    affected = [(layer, found) for layer in layers if (found := _find_not_finite(layer)) is not None]
    finite = [layer for layer in layers if all(layer is not other for other, _ in affected)]
    if not affected:
        return [], finite
    layer, (where, tensors, counts) = affected[0]
    all_heads = where.any((0, 2)).all()
    position = next(i for i, other in enumerate(layers) if other is layer)
    evidence: dict[str, Any] = {name: f"{count:,} numbers" for name, count in counts.items()}
    evidence |= {"in": " and ".join(tensors), "later layers with NaN or inf": len(affected) - 1}
    hint = "regard.doctor(model, inputs) names the module in which they first appear."
    if "weights" in tensors and len(tensors) == 1:
        message = "The weights have NaN or inf. Query and key are unknown, since the layer computes its own softmax: "
        message += "its input, projections, scores or mask may be the cause."
    elif tensors == ["mask"]:
        message = "The mask has NaN or inf, but query and key are finite."
        hint = "Check how the mask is built: −inf − −inf and 0 · inf are NaN. Use torch.finfo(dtype).min or booleans."
    elif len(tensors) == 1 or not all_heads:
        others = "other heads" if not all_heads else "the key" if tensors == ["query"] else "the query"
        have = "have" if not all_heads else "has"
        message = f"NaN or inf began in this layer's projections, since {others} {have} none."
        hint = (
            f"Check the weights of {' and '.join(tensors)} of these heads, and half precision for overflow."
        )
    elif position:
        message = (
            "Query and key of all heads have NaN or inf: the input has them, or both projections overflow."
        )
        message += f" The attention of {layers[position - 1].module} had none."
    else:
        message = "Query and key of the first recorded layer have NaN or inf."
        hint = "Check the inputs, the embeddings and this layer's projections: isnan(weight).any()."
    return [layer.build_finding("NaN or inf", "error", message, evidence, hint, where)], finite


def _find_not_finite(layer: CheckedLayer) -> tuple[Any, list[str], dict[str, int]] | None:
    """Find NaN and inf in query, key and bias: where, (batch, heads, rows); in which tensors; and how many."""
    batch, heads, q_len, _ = layer.shape
    where, tensors, counts = np.zeros((batch, heads, q_len), bool), [], {"NaN": 0, "inf": 0}
    weights = layer.call.weights
    named = [("query", layer.call.query), ("key", layer.call.key), ("weights", weights)]
    for name, tensor in named[: 2 if weights is None else 3]:
        finite = tensor.isfinite()
        if bool(finite.all()):
            continue
        tensors.append(name)
        counts["NaN"] += int(tensor.isnan().sum())
        counts["inf"] += int(tensor.isinf().sum())
        hit = (~finite.all(-1)).cpu().numpy().reshape(batch, -1, tensor.shape[-2])
        hit = hit.repeat(heads // hit.shape[1], 1)
        offset = layer.token_rows.query_offset
        if name == "key":  # the affected rows depend on the mask; the key's own row is one of them
            hit = hit[:, :, offset : offset + q_len] if offset is not None else hit.any(-1, keepdims=True)
        where = where | hit
    bias = getattr(layer.call.compact_mask.bias, "array", None)
    if bias is not None and bool((bias.isnan() | (bias == torch.inf)).any()):
        tensors.append("mask")
        counts["NaN"] += int(bias.isnan().sum())
        counts["inf"] += int((bias == torch.inf).sum())
        where |= True
    if not tensors:
        return None
    return where, tensors, {name: count for name, count in counts.items() if count}


def _check_caches(
    joined_calls: Mapping[str, list[JoinedCalls]], cache_faults: Mapping[str, Sequence[CacheFault]]
) -> list[Finding]:
    """Report the calls of each layer that do not extend its cache as they should."""
    findings = []
    numbers = {name: number for number, name in enumerate(joined_calls)}
    hint = "Compare with a pass without cache, and append each key and value once. If the cache was cropped or copied "
    hint += "on purpose, watch each sequence in its own block."
    for name, faults in cache_faults.items():
        for kind, message in CACHE_FAULTS.items():
            of_kind = [fault for fault in faults if fault.kind == kind]
            if of_kind:
                calls, first = format_numbers("call", tuple(fault.call for fault in of_kind)), of_kind[0]
                evidence = {"in": calls, "tokens of the first": first.tokens, "added by it": first.added}
                place = (name, numbers[name])
                findings.append(
                    Finding(f"cache: {kind}", "error", message, *place, evidence=evidence, hint=hint)
                )
    return findings


def _check_positions(
    joined_calls: Mapping[str, list[JoinedCalls]], module_hints: ModuleHints
) -> list[Finding]:
    """Check that the positions of each cached step follow those of the last one."""
    by_module: dict[str, list[Any]] = {}
    for lookup in module_hints.lookups:
        by_module.setdefault(lookup.module, []).append(lookup.positions.cpu().numpy())
    for layer, (name, groups) in enumerate(joined_calls.items()):
        for joined in groups:
            lengths = [step.query.shape[-2] for step in joined.steps]
            if len(lengths) < 2 or joined.is_cross_attention or joined.speculative_mode:
                continue
            for module, lookups in by_module.items():
                if [positions.shape[1] for positions in lookups] != lengths:
                    continue
                jumps = _find_jumps(lookups, joined.steps)
                if jumps:
                    row, position, expected = jumps[0]
                    evidence: dict[str, Any] = {"position": position, "expected": expected}
                    evidence |= {"calls with a jump": len(jumps), "looked up by": module}
                    message = "The positions of a cached step do not continue after the positions of the cached keys."
                    hint = "Omit position_ids, or pass cache length + arange(new tokens) without padding."
                    place: dict[str, Any] = {"module": name, "layer": layer, "rows": (row,)}
                    return [Finding("positions", "error", message, **place, evidence=evidence, hint=hint)]
    return []


def _find_jumps(lookups: list[Any], steps: list[CallRows]) -> list[tuple[int, int, int]]:
    """Find the calls whose positions do not follow: first row, position and expected position of each."""
    jumps = []
    row = steps[0].query.shape[-2]
    for before, positions, step in zip(lookups, lookups[1:], steps[1:], strict=False):
        length = step.query.shape[-2]
        if step.entries is not None and len(before) > 1:
            before = before[step.entries]
        expected = before[:, -1:] + 1 + np.arange(length)
        if (positions != expected).any():
            first_expected = int(np.broadcast_to(expected, positions.shape).flat[0])
            jumps.append((row, int(positions.flat[0]), first_expected))
        row += length
    return jumps


# The checks of a layer


def _lacks_weights(layer: CheckedLayer) -> str:
    """Say why the weights of a layer cannot be checked."""
    return "" if _has_weights(layer) else "query and key were not recorded"


def _lacks_numbers(layer: CheckedLayer) -> str:
    return _lacks_weights(layer) or ("" if layer.is_finite else "the layer has NaN or inf")


def _lacks_mask(layer: CheckedLayer) -> str:
    return _lacks_numbers(layer) or ("the mask has a different error" if layer.has_wrong_mask else "")


def _lacks_causality(layer: CheckedLayer) -> str:
    return _lacks_mask(layer) or ("" if layer.causal else "no layer is causal")


def _lacks_padding(layer: CheckedLayer) -> str:
    if layer.is_token is None:
        return _lacks_mask(layer) or "no attention_mask was passed"
    return _lacks_mask(layer) or ("there is no padding" if layer.is_token.all() else "")


def _lacks_documents(layer: CheckedLayer) -> str:
    return _lacks_mask(layer) or ("" if layer.module_hints.lookups else NO_POSITIONS)


# The form of the mask, first: what it gets wrong explains the findings of the checks after it.
MASK_FORM_CHECKS: tuple[Check[CheckedLayer], ...] = (
    Check("polarity of the mask", check_inverted_mask, _lacks_weights),
    Check("mask of 0 and 1", check_zero_one_mask, _lacks_weights),
    Check("padding of another batch entry", check_padding_order, _lacks_weights),
    Check("padding on the axis of the heads", check_padding_axis, _lacks_weights),
)

LAYER_CHECKS: tuple[Check[CheckedLayer], ...] = (
    Check("dropout in eval mode", check_dropout),
    Check("kernel", check_kernel),
    Check("sinks, soft cap and window of the module", check_settings, _lacks_weights),
    *MASK_FORM_CHECKS,
    Check("alignment of is_causal", check_causal_alignment, _lacks_mask),
    Check("own key", check_own_key, _lacks_causality),
    Check("weight on the future", check_future, _lacks_causality),
    Check("weight on padding", check_padding, _lacks_padding),
    Check("fully masked rows", check_empty_rows, _lacks_mask),
    Check("direction of the position bias", check_bias_direction, _lacks_mask),
    Check("packed documents", check_documents, _lacks_documents),
    Check("scale and entropy of the heads", check_heads, _lacks_numbers),
)
