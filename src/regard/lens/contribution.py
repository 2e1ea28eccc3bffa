"""How large a value is after the output projection: the factor by which a weight counts."""

from __future__ import annotations

from typing import Any

from regard.capture.call import Call
from regard.capture.output_projections import OutputProjection, OutputProjections
from regard.engines.torch_precision import widen
from regard.errors import ArgumentError

Tensor = Any  # the types of torch are not followed


def compute_value_norms(call: Call, projections: OutputProjections, operation: str) -> Tensor:
    """Compute ‖v_j W_O‖ of each key and head.

    Args:
        call: The call, recorded with its value.
        projections: The output projections of the recording.
        operation: Name of the calling function, for error messages.

    Returns:
        (…, heads, kv_len), float64.

    Raises:
        ArgumentError: If the value was not recorded, or the output projection is unknown.
    """
    fault = ""
    if call.value is None:
        fault = "its value was not recorded"
    elif call.name not in projections:
        fault = f"its output projection was not found: {projections.find_fault(call.name)}"
    elif call.value.shape[-1] != projections[call.name].weight.shape[-2]:
        fault = "its output projection has another width than its values"
    if fault:
        raise ArgumentError(
            operation,
            received=f"{call.name!r}: {fault}",
            expected="layers with values and an output projection, which a contribution is computed from",
            hint="Record them: regard.watch(model, values=True). A file of a recording does not have them.",
        )
    return _compute_norms(call.value, projections[call.name])


def compute_output_norms(call: Call, projections: OutputProjections) -> Tensor | None:
    """Compute ‖o_i W_O‖, the length of what each head adds to the stream at each query.

    Args:
        call: The call.
        projections: The output projections of the recording.

    Returns:
        (…, heads, q_len), float64 if the device has it; None if the output was not recorded, or the projection is
        unknown.
    """
    if call.output is None or call.name not in projections:
        return None
    return _compute_norms(call.output, projections[call.name])


def _compute_norms(vectors: Tensor, projection: OutputProjection) -> Tensor:
    """Compute norms after the projection from the Gram matrix W_O W_Oᵀ of each head, which is as small as the head."""
    weight = widen(projection.weight.to(vectors.device))  # (heads, value_dim, width)
    gram = weight @ weight.mT
    vectors = widen(vectors.detach())
    if vectors.ndim > 2:
        vectors = vectors.repeat_interleave(len(gram) // vectors.shape[-3], -3)
    return ((vectors @ gram) * vectors).sum(-1).clamp(min=0.0).sqrt()
