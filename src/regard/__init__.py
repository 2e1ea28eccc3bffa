"""Scaled dot-product attention that can be inspected.

`attention(query, key)` returns a lazy `AttentionMatrix`. Optional subpackages (`regard.lens`, `regard.survey`, …) and
functions that need them (`watch`, `compare`, `doctor`, …) are imported on first access, so `import regard` loads
NumPy only. `dir(regard)` lists all names; `from regard import *` imports only the names that need nothing but NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard._public import set_public_module
from regard.core.attention import attention, linear_attention
from regard.core.matrix import AttentionMatrix
from regard.core.products import merge_states
from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    IndexOutOfRangeError,
    NotCapturedError,
    RegardError,
    TooLargeError,
)
from regard.masks import Mask, causal, mask, padding, sliding_window
from regard.measures import (
    Coarse,
    Distance,
    Entropy,
    Mass,
    MaxScore,
    MaxWeight,
    Measure,
    Output,
    Position,
    Received,
    Spread,
    TopK,
)
from regard.positions import rope
from regard.score_mods import ScoreMod, alibi, relative_bias, softcap

if TYPE_CHECKING:
    from regard import diagnosis as diagnosis
    from regard import distributed as distributed
    from regard import engines as engines
    from regard import explore as explore
    from regard import feature_maps as feature_maps
    from regard import images as images
    from regard import interventions as interventions
    from regard import learn as learn
    from regard import lens as lens
    from regard import masks as masks
    from regard import measures as measures
    from regard import models as models
    from regard import monitor as monitor
    from regard import nn as nn
    from regard import plot as plot
    from regard import policy as policy
    from regard import positions as positions
    from regard import score_mods as score_mods
    from regard import survey as survey
    from regard import testing as testing
    from regard import transformers as transformers
    from regard import vllm as vllm
    from regard.core.explanation import Explanation as Explanation
    from regard.diagnosis.compare import compare as compare
    from regard.diagnosis.doctor import doctor as doctor
    from regard.interventions.effect_sweep import effects as effects
    from regard.interventions.intervene import intervene as intervene
    from regard.lens.look_page import look as look
    from regard.lens.recording import load_recording as load_recording
    from regard.lens.watch import watch as watch

    __version__: str

# The names that `import regard` loads: `from regard import *` imports no optional package.
__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionMatrix",
    "Coarse",
    "Distance",
    "Entropy",
    "IndexOutOfRangeError",
    "Mask",
    "Mass",
    "MaxScore",
    "MaxWeight",
    "Measure",
    "NotCapturedError",
    "Output",
    "Position",
    "Received",
    "RegardError",
    "ScoreMod",
    "Spread",
    "TooLargeError",
    "TopK",
    "alibi",
    "attention",
    "causal",
    "engines",
    "linear_attention",
    "mask",
    "masks",
    "measures",
    "merge_states",
    "padding",
    "positions",
    "relative_bias",
    "rope",
    "score_mods",
    "sliding_window",
    "softcap",
]

_LAZY_PACKAGES = (
    "diagnosis",
    "distributed",
    "explore",
    "feature_maps",
    "images",
    "interventions",
    "learn",
    "lens",
    "models",
    "monitor",
    "nn",
    "plot",
    "policy",
    "survey",
    "testing",
    "transformers",
    "vllm",
)
_LAZY_NAMES = {
    "Explanation": "regard.core.explanation",
    "compare": "regard.diagnosis.compare",
    "doctor": "regard.diagnosis.doctor",
    "effects": "regard.interventions.effect_sweep",
    "intervene": "regard.interventions.intervene",
    "load_recording": "regard.lens.recording",
    "look": "regard.lens.look_page",
    "watch": "regard.lens.watch",
}


def __getattr__(name: str) -> Any:
    """Import an optional subpackage or function on first access; `__version__` is read from the metadata."""
    if name in _LAZY_PACKAGES:
        return importlib.import_module(f"regard.{name}")
    if name in _LAZY_NAMES:
        lazy_object = getattr(importlib.import_module(_LAZY_NAMES[name]), name)
        lazy_object.__module__ = __name__
        globals()[name] = lazy_object
        return lazy_object
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("regard")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, including those imported on first access."""
    return sorted([*__all__, *_LAZY_PACKAGES, *_LAZY_NAMES, "__version__"])


set_public_module(globals())
