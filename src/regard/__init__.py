"""regard: scaled dot-product attention you can look at."""

from __future__ import annotations

from typing import Any

from regard._attention import attention, linear_attention
from regard._errors import ArgumentError, KindError, OutOfRange, RegardError, TooLarge
from regard._explain import Explanation
from regard._matrix import AttentionMatrix
from regard._products import merge
from regard.masks import (
    Mask,
    causal,
    dense,
    document,
    first,
    padding,
    prefix,
    sliding_window,
    true_means_ignore,
)
from regard.measures import Coarse, Distance, Entropy, Mass, Measure, Output, Position, Received, Spread, TopK
from regard.positions import rope, sinusoidal
from regard.scores import ScoreMod, alibi, bias, relative_bias, softcap

__all__ = [
    "ArgumentError",
    "AttentionMatrix",
    "Coarse",
    "Distance",
    "Entropy",
    "Explanation",
    "KindError",
    "Mask",
    "Mass",
    "Measure",
    "OutOfRange",
    "Output",
    "Position",
    "Received",
    "RegardError",
    "ScoreMod",
    "Spread",
    "TooLarge",
    "TopK",
    "alibi",
    "attention",
    "bias",
    "causal",
    "dense",
    "document",
    "first",
    "linear_attention",
    "merge",
    "padding",
    "prefix",
    "relative_bias",
    "rope",
    "sinusoidal",
    "sliding_window",
    "softcap",
    "true_means_ignore",
]


def __getattr__(name: str) -> Any:
    """Rooms that are opened when somebody asks for them, and the version."""
    import importlib

    if name in ("explore", "features", "learn", "lens", "nn", "plot", "testing"):
        return importlib.import_module(f"regard.{name}")
    if name in ("load", "watch"):
        return getattr(importlib.import_module("regard.lens"), name)
    if name in ("open_survey", "survey"):
        return getattr(importlib.import_module("regard._survey"), name)
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("regard")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
