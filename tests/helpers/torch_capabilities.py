"""Ask the installed torch what its attention function can do, for tests that hold for every release."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# What the conformance kit finds in F.scaled_dot_product_attention of every release.
NAN_CAPABILITIES = (
    "masked NaN or inf in key", "masked NaN or inf in value", "masked NaN or inf in value, causal", "live NaN",
    "gradients, masked NaN",
)  # fmt: skip


def list_rejected() -> tuple[str, ...]:
    """Return the capabilities of the kit that F.scaled_dot_product_attention rejects: since 2.15, causal and mask."""
    query, mask = torch.ones(1, 1, 2, 2), torch.ones(2, 2, dtype=torch.bool)
    try:
        F.scaled_dot_product_attention(query, query, query, attn_mask=mask, is_causal=True)
    except RuntimeError:
        return ("causal and mask",)
    return ()


class OperatorLog(TorchDispatchMode):
    """List the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def runs_fused(query: torch.Tensor, key: torch.Tensor, **options: object) -> bool:
    """Whether F.scaled_dot_product_attention runs a fused CPU kernel on these shapes; since 2.15 it does on more."""
    with torch.no_grad(), OperatorLog() as log:
        F.scaled_dot_product_attention(query, key, key, **options)
    return any("flash" in name for name in log.names)
