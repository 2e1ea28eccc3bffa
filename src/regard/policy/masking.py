"""What a cache policy keeps, and the policy as masks: edits that let each head attend to the keys that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.masks import first, sliding_window
from regard.types import Array

if TYPE_CHECKING:
    from regard.interventions import Edit

# The value in `windows` of a head that keeps every key.
FULL = -1


class KeptKeys(Protocol):
    """The part of a `CachePolicy` that says which keys each head keeps, for the modules that it imports itself."""

    @property
    def windows(self) -> NDArray[np.int64]: ...

    @property
    def sinks(self) -> NDArray[np.int64]: ...

    @property
    def layers(self) -> tuple[str, ...]: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def groups(self) -> int: ...


def build_edits(policy: KeptKeys) -> list[Edit]:
    """Return the edits that restrict a model to a policy; see `CachePolicy.edits`."""
    from regard.interventions import restrict

    edits = []
    for layer, name in enumerate(policy.layers):
        kept: dict[tuple[int, int], list[int]] = {}
        pairs = zip(policy.windows[layer].tolist(), policy.sinks[layer].tolist(), strict=True)
        for kv_head, pair in enumerate(pairs):
            kept.setdefault(pair, []).extend(range(kv_head * policy.groups, (kv_head + 1) * policy.groups))
        for (window, sinks), heads in kept.items():
            if window != FULL:
                # Combined with the causal mask of the layer.
                mask = sliding_window(window) | first(sinks) if sinks else sliding_window(window)
                edits.append(restrict(name, heads=heads, mask=mask))
    return edits


def count_affected_rows(policy: KeptKeys, num_tokens: int) -> Array:
    """Count the tokens of a sequence for which each head has evicted a key, (num_layers, num_kv_heads)."""
    affected = np.maximum(0, num_tokens - policy.windows - policy.sinks)
    return np.where(policy.windows == FULL, 0, affected)
