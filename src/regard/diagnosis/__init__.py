"""Find out why a model is broken: `regard.doctor` runs it on changed inputs, `regard.compare` beside one that works.

Both report `Findings`. What a single recording shows without running the model again is `Recording.diagnose`, in
`regard.lens`. The package imports `regard.lens`, `regard.models` and below, and torch.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.diagnosis.compare import Comparison

__all__ = ["Comparison"]

set_public_module(globals())
