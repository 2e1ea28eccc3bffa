"""The arguments of one attention call, as the wrappers pass them to the watchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from regard.capture.dense_attention import DenseAttention

if TYPE_CHECKING:
    from regard.capture.call import CallEdits

Tensor = Any  # the types of torch are not followed


class CapturedArgs(NamedTuple):
    """The arguments of one attention call, in the order and with the names of `F.scaled_dot_product_attention`.

    A layer that computes its own softmax has no query and key (None), and its weights in `dense`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    # Arguments and results of other attention functions.
    softcap: float | None = None
    sink: Tensor | None = None
    position_bias: Tensor | None = None
    score_mod: Callable[..., Tensor] | None = None
    lse: Tensor | None = None
    output: Tensor | None = None
    weights: Tensor | None = None  # as the function returned them, to verify the recorded matrix
    kernel: str = ""
    dense: DenseAttention | None = (
        None  # read from the function's own softmax, in case its arguments do not explain it
    )
    has_run: bool = True  # False if the function was left out, because an edit computes the output without it
    # What an intervention changed; `output` and `weights` stay those of the function.
    edits: CallEdits | None = None
    edited_output: Tensor | None = None
    edited_weights: Tensor | None = None

    @property
    def sdpa_args(self) -> tuple[Any, ...]:
        """The arguments of `F.scaled_dot_product_attention`."""
        return self[:8]


# Dtypes that NumPy has, too: for single numbers and comparisons, its functions take a fraction of the time.
NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16)


def read_number(tensor: Tensor, row: int) -> float:
    """Read one number of a row: the last of the last head.

    Args:
        tensor: (…, length, dim), not empty.
        row: The row, from 0.
    """
    if tensor.is_cpu and tensor.dtype in NUMPY_DTYPES and not tensor.requires_grad:
        return float(tensor.numpy()[(-1,) * (tensor.ndim - 2) + (row, -1)])
    return float(tensor.detach()[(-1,) * (tensor.ndim - 2) + (row, -1)])
