"""Widen the heads that are responsible for what a policy costs, until a bound holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.row_schema import EVICTION_WINDOWS
from regard.policy.verification import Verification, verify_policy
from regard.policy.window_sizes import FULL, WIDENED_SINKS
from regard.types import Array

if TYPE_CHECKING:
    from regard.policy.policy import CachePolicy

# A head whose effect is at least this share of the largest is widened in the same round.
SHARE = 0.5
# A widened head loses at most this share of the weight that it lost before; otherwise it keeps every key.
REMAINING = 0.1


def tighten_policy(
    policy: CachePolicy,
    bound: float,
    model: Any,
    corpus: str | Path,
    out: str | Path | None,
    max_rounds: int,
    options: dict[str, Any],
) -> CachePolicy:
    """Widen the responsible heads round by round; see `CachePolicy.tighten`."""
    history: list[dict[str, Any]] = []
    for number in range(max_rounds + 1):
        folder = None if out is None else Path(out).expanduser() / f"round-{number:02}"
        verification = verify_policy(policy, model, corpus, folder, bound=bound, effects=True, **options)
        if verification.holds:
            about = policy.about | {"tightened": {"bound": bound, "kl": verification.kl, "changes": history}}
            return replace(policy, about=about)
        if number < max_rounds:
            policy, changes = widen(verification)
            history += [{"round": number, **change} for change in changes]
    raise ArgumentError(
        "policy.tighten",
        received=f"a policy that still fails after {max_rounds} rounds: {verification.verdict}",
        expected="a bound that holds",
        hint="Pass a larger bound, or more rounds: max_rounds=64. Finished rounds are not run again.",
    )


def widen(verification: Verification) -> tuple[CachePolicy, list[dict[str, Any]]]:
    """Widen the heads with the largest measured effect, until their effects cover what exceeds the bound.

    Args:
        verification: A verification with effects that does not hold.

    Returns:
        The policy, and what was changed: layer, kv_head, effect, and window and sinks before and after.
    """
    policy = verification.policy
    effects, excess = _sum_by_kv_head(policy, verification.effects), verification.kl - verification.bound
    if excess <= 0:  # a synthetic test fails: its own effects count
        failed = verification.failed_tests
        effects = sum(_sum_by_kv_head(policy, np.array(test["effects"])) for test in failed)
        excess = sum(test["kl"] for test in failed)
    effects = np.where(policy.windows == FULL, -np.inf, effects)
    order = np.argsort(effects, axis=None)[::-1]
    windows, sinks = policy.windows.copy(), policy.sinks.copy()
    changes: list[dict[str, Any]] = []
    covered, largest = 0.0, float(effects.max())
    for place in order:
        layer, head = (int(number) for number in np.unravel_index(place, effects.shape))
        effect = float(effects[layer, head])
        if changes and (effect < SHARE * largest or covered >= excess):
            break
        window, count = choose_wider(verification, layer, head)
        changes.append(
            {
                "layer": layer,
                "kv_head": head,
                "effect": effect,
                "before": [int(windows[layer, head]), int(sinks[layer, head])],
                "after": [window, count],
            }
        )
        windows[layer, head], sinks[layer, head] = window, count
        covered += effect
    about = dict(policy.about)
    about.pop("predicted", None)  # it was predicted for other windows
    return replace(policy, windows=windows, sinks=sinks, about=about), changes


def choose_wider(verification: Verification, layer: int, kv_head: int) -> tuple[int, int]:
    """Choose the fewest keys with which a head loses a tenth of the weight that it loses now, on the same documents.

    Args:
        verification: The verification.
        layer: Number of the layer.
        kv_head: The key/value head.

    Returns:
        Window and sinks; FULL and 0 if no window that some document is longer than is enough.
    """
    policy = verification.policy
    group = policy.num_heads // policy.num_kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)

    def sum_over_heads(name: str) -> Array:
        total = np.asarray(verification._sums[name])
        return total.reshape(policy.num_layers, policy.num_heads, *total.shape[1:])[layer, heads].sum(0)

    window, sinks = int(policy.windows[layer, kv_head]), int(policy.sinks[layer, kv_head])
    limit = REMAINING * float(sum_over_heads("lost"))
    longest = max(verification.documents.column("tokens"))
    more = max(sinks, WIDENED_SINKS)
    candidates = [
        (int(size) + count, int(size), count, float(lost))
        for name, count in (("evicted", sinks), ("evicted_widened", more))
        for size, lost in zip(EVICTION_WINDOWS, sum_over_heads(name), strict=True)
        if size >= window and (size, count) != (window, sinks) and size + count < longest
    ]
    for _, size, count, lost in sorted(candidates):
        if lost <= limit:
            return size, count
    return FULL, 0


def _sum_by_kv_head(policy: CachePolicy, effects: Array) -> Array:
    group = policy.num_heads // policy.num_kv_heads
    return effects.reshape(policy.num_layers, policy.num_kv_heads, group).sum(-1)
