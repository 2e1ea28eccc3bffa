"""How large a value is after the output projection: the factor by which a weight counts."""

from __future__ import annotations

from typing import Any

from regard.errors import ArgumentError
from regard.lens.capture.call import Call
from regard.lens.capture.output_projections import OutputProjection, OutputProjections

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


def _compute_norms(value: Tensor, projection: OutputProjection) -> Tensor:
    """Compute the norms from the Gram matrix W_O W_Oᵀ of each head, which is as small as the head."""
    weight = projection.weight.to(value.device).double()  # (heads, value_dim, width)
    gram = weight @ weight.mT
    value = value.detach().double()
    if value.ndim > 2:
        value = value.repeat_interleave(len(gram) // value.shape[-3], -3)
    return ((value @ gram) * value).sum(-1).clamp(min=0.0).sqrt()
