"""Where numbers leave the range of their dtype: NaN and inf, and what the model's dtype changes against float32."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from regard.capture.module_trace import Origin, is_around, match_events
from regard.diagnosis.subject import Subject
from regard.engines.torch_precision import widen
from regard.findings import Finding, Findings
from regard.lens.recording import Recording

Tensor = Any  # the types of torch are not followed

# A copy in float32 that takes more bytes is not made.
MAX_COPY_BYTES = 4 << 30
# Share of a tensor's norm above which the model's dtype differs from float32 by more than rounding.
BEYOND_ROUNDING = 0.5
# Kinds of findings about a call that explain why its output is not finite.
EXPLAINS_NAN = ("fully masked rows", "inverted mask", "padding mask of another batch entry", "own key masked")


def explain_not_finite(
    subject: Subject, origin: Origin, recording: Recording, diagnosed: Findings
) -> Finding:
    """Report the module in which NaN or inf began, and why, as far as it is known.

    Args:
        subject: The model.
        origin: Where they began.
        recording: The attention of that pass.
        diagnosed: The findings about the recording.

    Returns:
        The finding.
    """
    names = list(recording)
    inside = [name for name in names if not origin.module or is_around(name, origin.module)]
    for finding in diagnosed:
        if finding.kind in EXPLAINS_NAN and finding.module in inside:
            return finding
    inside = [] if origin.is_inside else inside
    layer = names.index(inside[0]) if inside else -1
    module = dict(subject.model.named_modules())[origin.module]
    evidence: dict[str, Any] = {"input" if origin.is_inside else "modules before": "finite"}
    message = f"They begin {origin.describe()}"
    broken = {
        name: int((~weight.isfinite()).sum()) for name, weight in module.named_parameters(recurse=False)
    }
    if origin.is_inside and any(broken.values()):
        name = max(broken, key=broken.__getitem__)
        message += f", whose {name} has NaN or inf."
        evidence[f"in {name}"] = f"{broken[name]:,} of {getattr(module, name).numel():,}"
        hint = "Load the weights again, or look for the training step that broke them."
        return Finding("NaN or inf", "error", message, origin.module, layer, evidence=evidence, hint=hint)
    message += ", whose input is finite." if origin.is_inside else "; everything before is finite."
    hint = (
        "Check this step: a division by zero, a logarithm or root of zero, an overflow, a row without keys."
    )
    dtype = _find_dtype(subject)
    if dtype.itemsize == 2 and not why_no_float32(subject):
        is_finite = bool(_make_float32(subject).run_inputs().isfinite().all())
        subject.num_passes += 1
        evidence["the same run in float32"] = "finite" if is_finite else "not finite"
        if is_finite:
            what = "The scores, or the softmax, overflow" if inside else "It overflows"
            message += f" {what} {str(dtype).removeprefix('torch.')}, since float32 gives finite numbers."
            hint = f"The largest number of this dtype is {torch.finfo(dtype).max:.3g}. Use bfloat16, or compute this "
            hint += "step in float32."
            if inside:
                hint += " F.scaled_dot_product_attention does; or scale the query before the product."
    if inside and any(recording.calls(name)[0].weights is not None for name in inside):
        evidence["unknown"] = "query and key, since the layer computes its own softmax"
    return Finding("NaN or inf", "error", message, origin.module, layer, evidence=evidence, hint=hint)


def why_no_float32(subject: Subject) -> str:
    """Say why the model cannot be run in float32; empty if it can."""
    weights = list(subject.model.parameters())
    if all(weight.dtype.itemsize >= 4 for weight in weights if weight.is_floating_point()):
        return "the model is in float32 or wider"
    if subject.user_forward is not None:
        return "forward= calls the model itself, and not a copy"
    if any(hasattr(weight, "device_mesh") for weight in weights):
        return "the weights are split over ranks"
    nbytes = 4 * sum(weight.numel() for weight in weights)
    return f"a copy in float32 takes {nbytes / 2**30:.0f} GiB" if nbytes > MAX_COPY_BYTES else ""


def _find_dtype(subject: Subject) -> torch.dtype:
    return next((weight.dtype for weight in subject.model.parameters()), torch.float32)


def _make_float32(subject: Subject) -> Subject:
    """Return a copy of the model in float32, with the same inputs."""
    inputs = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in subject.inputs.items()
    }
    copied: nn.Module = deepcopy(subject.model).float()
    wide = Subject(copied, inputs)
    wide.keeps_inputs = subject.keeps_inputs
    return wide


def check_dtype(subject: Subject, tokens: Tensor) -> list[Finding]:
    """Run tokens in float32 too: find the first module that the model's dtype changes by more than rounding.

    Args:
        subject: The model, in half precision.
        tokens: (1, n).

    Returns:
        The findings.
    """
    traces = []
    for each in (subject, _make_float32(subject)):
        with each.trace() as trace:
            each.run(tokens)
        traces.append(trace)
    subject.num_passes += 1
    for event, wide in match_events(traces[0].events, traces[1].events):
        sizes = [_compare(a, b) for a, b in ((event.input, wide.input), (event.output, wide.output))]
        if sizes[1] > BEYOND_ROUNDING and sizes[0] < BEYOND_ROUNDING / 10:
            dtype = str(_find_dtype(subject)).removeprefix("torch.")
            message = f"The output of {event.name} ({event.class_name}) differs in {dtype} from that in float32, by "
            message += "more than rounding, and its input does not."
            evidence = {"input": sizes[0], "output": sizes[1]}
            hint = (
                "Compute positions, norms, scores and sums of this module in float32, and convert the result."
            )
            return [Finding("dtype", "warning", message, event.name, evidence=evidence, hint=hint)]
    return []


def _compare(a: Tensor | None, b: Tensor | None) -> float:
    """Return the norm of a difference relative to that of `b`; 0 if they cannot be compared."""
    if a is None or b is None or a.shape != b.shape:
        return 0.0
    a, b = widen(a), widen(b)
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
