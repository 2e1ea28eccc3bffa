"""A cache policy as masks: the edits that let each head attend to the keys that the policy keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.masks import Mask, first, sliding_window
from regard.policy.window_sizes import FULL
from regard.types import Array

if TYPE_CHECKING:
    from regard.interventions import Edit
    from regard.policy.policy import CachePolicy


def build_mask(window: int, sinks: int) -> Mask:
    """Return the mask of a head, to be combined with a causal one.

    Args:
        window: Number of latest keys.
        sinks: Number of first keys.
    """
    return sliding_window(window) | first(sinks) if sinks else sliding_window(window)


def build_edits(policy: CachePolicy, layers: Sequence[str] | None = None) -> list[Edit]:
    """Return the edits that restrict a model to a policy; heads that keep the same keys share one.

    Args:
        policy: The policy.
        layers: Names of the layers in the model. Default: those of the policy.

    Returns:
        Edits for `regard.intervene`; none if every head keeps every key.
    """
    from regard.interventions import restrict

    group = policy.num_heads // policy.num_kv_heads
    edits = []
    for layer, name in enumerate(layers or policy.layers):
        kept: dict[tuple[int, int], list[int]] = {}
        pairs = zip(policy.windows[layer], policy.sinks[layer], strict=True)
        for kv_head, (window, sinks) in enumerate(pairs):
            if window != FULL:
                heads = range(kv_head * group, (kv_head + 1) * group)
                kept.setdefault((int(window), int(sinks)), []).extend(heads)
        for (window, sinks), query_heads in kept.items():
            edits.append(restrict(name, heads=query_heads, mask=build_mask(window, sinks)))
    return edits


def count_affected_rows(policy: CachePolicy, num_tokens: int) -> Array:
    """Count the tokens of a sequence for which each head has evicted a key, (num_layers, num_kv_heads).

    Args:
        policy: The policy.
        num_tokens: Length of the sequence.
    """
    affected = np.maximum(0, num_tokens - policy.windows - policy.sinks)
    return np.where(policy.windows == FULL, 0, affected)
