"""Derive a cache policy from the weights that a survey measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.row_schema import EVICTION_WINDOWS, column_to_numpy
from regard.policy import FULL, CachePolicy
from regard.survey.schema import SINKS
from regard.types import Array

if TYPE_CHECKING:
    from regard.survey.dataset import Survey

OPERATION = "survey.cache_policy"


def derive_policy(
    survey: Survey, keep: float, sinks: int, granularity: Literal["kv_head", "layer"]
) -> CachePolicy:
    """Choose the smallest window that keeps enough weight; see `Survey.cache_policy`."""
    _check(survey, keep, sinks, granularity)
    cache, heads = survey.settings["cache"], survey.settings["heads"]
    layers, kv_heads, groups = len(heads), cache["kv_heads"][0], heads[0] // cache["kv_heads"][0]
    evicted, modules = measure_evicted(survey, sinks)
    evicted = evicted.reshape(layers, heads[0], -1)
    enough = evicted <= 1 - keep  # NaN, where no document is longer than the window, is not enough
    chosen = np.where(enough.any(-1), enough.argmax(-1), len(EVICTION_WINDOWS))
    chosen = chosen.reshape(layers, kv_heads, groups).max(-1)  # the widest need of the query heads
    if granularity == "layer":
        chosen = np.broadcast_to(chosen.max(-1, keepdims=True), chosen.shape)
    windows = np.array([*EVICTION_WINDOWS, FULL])[chosen]
    padded = np.concatenate([evicted, np.zeros((layers, heads[0], 1))], -1)
    lost = np.take_along_axis(padded, np.repeat(chosen, groups, 1)[..., None], -1)[..., 0]
    about = {
        "model": survey.settings["model"],
        "survey": {
            "corpus": survey.settings["corpus"],
            "documents": survey.documents,
            "tokens": survey.tokens,
            "max_tokens": survey.settings["max_tokens"],
        },
        "settings": {"keep": keep, "sinks": sinks, "granularity": granularity},
        "num_heads": heads[0],
        "head_dim": cache["head_dim"][0],
        "value_dim": cache["value_dim"][0],
        "bytes_per_number": cache["bytes_per_number"],
        "predicted": {"lost": np.nan_to_num(lost).round(9).tolist()},
    }
    return CachePolicy(windows, np.full(windows.shape, sinks), tuple(modules), about)


def measure_evicted(survey: Survey, sinks: int) -> tuple[Array, list[str]]:
    """Measure the share of the weight that each window evicts, among the tokens that have keys to evict.

    Args:
        survey: The survey.
        sinks: Number of first keys that are kept.

    Returns:
        The shares, (heads of all layers, windows), NaN where no document is longer than the window; and the names of
        the layers.
    """
    heads = survey.settings["heads"]
    starts = np.concatenate([[0], np.cumsum(heads)])
    lost, rows = np.zeros((2, int(starts[-1]), len(EVICTION_WINDOWS)))
    modules = [""] * len(heads)
    measured = f"evicted_{sinks}" if sinks else "distance_histogram"
    for batch in survey.iter_batches(["tokens", "layer", "head", "module", measured]):
        layer = batch.column("layer").to_numpy()
        index = starts[layer] + batch.column("head").to_numpy()
        tokens = batch.column("tokens").to_numpy().astype(float)[:, None]
        shares = column_to_numpy(batch.column(measured))
        if not sinks:
            shares = np.maximum(0.0, 1 - np.cumsum(shares, -1)[:, : len(EVICTION_WINDOWS)])
        affected = np.maximum(0.0, tokens - np.array(EVICTION_WINDOWS) - sinks)
        np.add.at(lost, index, shares * tokens)
        np.add.at(rows, index, affected)
        for row in np.unique(layer, return_index=True)[1]:
            modules[layer[row]] = batch.column("module")[int(row)].as_py()
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rows > 0, lost / rows, np.nan), modules


def _check(survey: Survey, keep: float, sinks: int, granularity: str) -> None:
    def refuse(received: str, expected: str, hint: str) -> Any:
        raise ArgumentError(OPERATION, received=received, expected=expected, hint=hint)

    if not 0 < keep <= 1:
        refuse(f"keep {keep}", "a share above 0 and at most 1", "keep=0.99 keeps 99 % of the weight.")
    if sinks not in (0, *SINKS):
        measured = ", ".join(map(str, (0, *SINKS)))
        refuse(f"sinks {sinks}", f"one of {measured}", "The survey measures these numbers of first keys.")
    if granularity not in ("kv_head", "layer"):
        refuse(f"granularity {granularity!r}", '"kv_head" or "layer"', 'Omit it for "kv_head".')
    if not survey.documents:
        refuse("a survey without a measured document", "at least one", "Resume the survey first.")
    settings = survey.settings
    if "cache" not in settings or f"evicted_{SINKS[0]}" not in settings["columns"]:
        refuse(
            "a survey without distances, or without the sizes of keys and values",
            'a survey that measured "distance"',
            'Run the survey again in a new directory, with measures=["distance"] or all of them.',
        )
    for name, counts in (("heads", settings["heads"]), *settings["cache"].items()):
        if isinstance(counts, list) and len(set(counts)) > 1:
            refuse(
                f"a model whose layers differ in {name}: {sorted(set(counts))}",
                "the same number in every layer",
                "A policy is an array of layers and heads; models whose layers differ in shape have none.",
            )
