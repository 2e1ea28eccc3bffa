"""`CheckedLayer`: one call with what is expected of it, as the checks of `Recording.diagnose` read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from regard.capture.call import Call
from regard.capture.module_hints import ImageRuns, ModuleHints
from regard.findings import Finding, Severity
from regard.lens.token_rows import TokenRows, find_visible


@dataclass(eq=False)
class CheckedLayer:
    """A call and what is expected of it.

    Args:
        layer: Number of the layer.
        module: Name of the module.
        call: The call.
        causal: No token should attend to later ones.
        is_token: (batch, kv_len), False for padding; None if unknown.
        image_runs: First key and end of each image whose tokens may attend to each other, for each batch entry.
        module_hints: Settings of the modules, and the positions that were looked up.
        usual_scale: The scale of most layers of the same kind, or None.
        is_finite: Query, key and bias have no NaN or inf.
        has_wrong_mask: The mask has another form than it should: inverted, of 0 and 1, of another entry.
    """

    layer: int
    module: str
    call: Call
    causal: bool = False
    is_token: Any = None
    image_runs: ImageRuns = field(default_factory=list)
    module_hints: ModuleHints = field(default_factory=ModuleHints)
    usual_scale: float | None = None
    is_finite: bool = True
    has_wrong_mask: bool = False

    @cached_property
    def token_rows(self) -> TokenRows:
        """The rows and keys that are not padding."""
        return TokenRows.from_call(self.call)

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape, (batch, heads, q_len, kv_len)."""
        *lead, q_len, kv_len = self.call.shape
        return math.prod(lead[:-1]), lead[-1] if lead else 1, q_len, kv_len

    @cached_property
    def rows(self) -> Any:
        """Rows that are tokens, as far as is known, (batch, q_len)."""
        batch, _, q_len, _ = self.shape
        offset = self.token_rows.query_offset
        if offset is None:
            return np.ones((batch, q_len), bool)
        is_token = self.keys if self.is_token is None else self.is_token
        return is_token[:, offset : offset + q_len]

    @cached_property
    def keys(self) -> Any:
        """Keys that some row attends to, (batch, kv_len)."""
        return self.token_rows.keys.reshape(self.shape[0], -1)

    @cached_property
    def live_rows(self) -> Any:
        """Rows that attend to some key, by head: (batch, heads or 1, q_len)."""
        batch, _, q_len, kv_len = self.shape
        rows, _ = find_visible(self.call.compact_mask, q_len, kv_len)
        rows = as_batch_heads(rows)
        return np.broadcast_to(rows, (batch, *rows.shape[1:]))

    @cached_property
    def intervals(self) -> tuple[Any, Any]:
        """First key and end of each row's interval, (batch or 1, heads or 1, q_len) each."""
        mask = self.call.compact_mask
        start, stop = np.broadcast_arrays(mask.start, mask.stop)
        return as_batch_heads(start), as_batch_heads(stop)

    @cached_property
    def allowed_stop(self) -> Any:
        """End of the keys that each row of a causal layer may attend to, (batch or 1, 1, q_len)."""
        own = self.token_rows.own_keys
        allowed = np.repeat(own[None] + 1, max(len(self.image_runs), 1), 0)
        for row, runs in zip(allowed, self.image_runs, strict=False):
            for start, stop in runs:
                row[(own >= start) & (own < stop)] = stop
        return allowed[:, None]

    @cached_property
    def attends_beyond(self) -> Any:
        """Rows that attend to a key past `allowed_stop`, (batch or 1, heads or 1, q_len)."""
        mask = self.call.compact_mask
        if not mask.stored_arrays:
            return self.intervals[1] > self.allowed_stop
        visible = mask.dense_mask
        if visible is None:
            bias = mask.stored_arrays[0]
            visible = bias > float(torch.finfo(bias.dtype).min)
        keys = torch.arange(self.shape[3], device=visible.device)
        last = torch.where(visible, keys, -1).amax(-1).cpu().numpy()
        return as_batch_heads(last) >= self.allowed_stop

    def flatten_batch(self, result: Any) -> Any:
        """Return a result (…, heads, n) as float64 NumPy, (batch, heads, n)."""
        batch, heads, *_ = self.shape
        return result.detach().cpu().double().numpy().reshape(batch, heads, -1)

    def build_finding(
        self, kind: str, severity: Severity, message: str, where: Any, evidence: dict[str, Any], hint: str
    ) -> Finding:
        """Build a finding at a location.

        Args:
            kind: Short name of the problem.
            severity: "error", "warning" or "note".
            message: One sentence that describes it.
            where: Booleans, (batch, heads or 1, q_len or 1). An axis along which all are True is not listed.
            evidence: The measured numbers by name.
            hint: How to fix it.

        Returns:
            The finding.
        """
        indices: dict[str, tuple[int, ...]] = {}
        for axis, name in enumerate(("batch", "heads", "rows")):
            others = tuple(other for other in range(3) if other != axis)
            hit = where.any(others)
            indices[name] = () if hit.all() else tuple(int(i) for i in np.flatnonzero(hit))
        return Finding(
            kind, severity, message, self.module, self.layer, evidence=evidence, hint=hint, **indices
        )

    @property
    def everywhere(self) -> Any:
        """The location of a finding about the whole call, (batch, 1, 1)."""
        return np.ones((self.shape[0], 1, 1), bool)


def as_batch_heads(array: Any) -> Any:
    """Reshape (…, heads, n) or (n,) to (batch, heads, n)."""
    array = np.asarray(array)
    while array.ndim < 3:
        array = array[None]
    return array.reshape(-1, *array.shape[-2:])
