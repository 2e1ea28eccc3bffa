"""Find out why a model is broken: `regard.doctor` runs it on changed inputs, `regard.compare` beside one that works.

Both report `Findings`. What a single recording shows without running the model again is `Recording.diagnose`, in
`regard.lens`. The package imports `regard.lens`, `regard.models` and below, and torch.

Design notes:
- `doctor` compares a model with itself on changed inputs. What it checks holds for every model: no output depends on
  the future, on padding, on other entries or on how a sequence is cut into pieces. So it needs no reference, and
  faults that keep these laws are left to `compare`.
- `doctor` runs every experiment, and drops a symptom only if an error explains it. Each fault changes most outputs,
  and a list of its consequences hides it; but a cause may not hide another. A symptom is located by the first module
  whose tokens change. An error in that place explains it, or one of the kinds listed with the symptom.
- NaN or inf end an examination. Every comparison of outputs with NaN says something wrong. The first module that
  returns one is named, with whether its input was finite.
- A model that returns a cache is causal, unless its configuration or a mask says otherwise. A cache is of use only if
  later tokens change nothing before them. Masks alone would call a broken causal mask bidirectional.
- Rotary positions are measured on one token everywhere. A mean of equal values is that value, so every layer gets the
  same hidden state at each position, and queries and keys differ by their turn alone.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.diagnosis.compare import Comparison

__all__ = ["Comparison"]

set_public_module(globals())
