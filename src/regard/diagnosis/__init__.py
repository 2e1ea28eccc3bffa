"""Find out why a model is broken: `doctor` runs it on changed inputs, `compare` compares it with a model that works.

Both report `Findings`. `Recording.diagnose` in `regard.lens` checks a single recording without running the model again.
The package imports `regard.lens`, `regard.models` and below, and torch.

Design notes:
- `doctor` compares a model with itself on changed inputs. Its checks hold for every model: no output depends on the
  future, on padding, on other batch entries or on how a sequence is split into pieces. So it needs no reference, and
  faults that do not violate these rules are left to `compare`.
- `doctor` runs every experiment, and drops a symptom only if an error explains it. Each fault changes most outputs,
  and a list of consequences would hide the fault; but one cause must not hide another. A symptom is located by the
  first module whose tokens change. The symptom is explained by an error in that place, or by an error of a kind listed
  with the symptom.
- NaN or inf ends an examination, because comparisons of outputs with NaN are misleading. The report names the first
  module that returns NaN or inf and says whether its input was finite.
- A model that returns a cache is causal, unless its configuration or a mask says otherwise. A cache is useful only if
  later tokens do not change earlier outputs. Masks alone would call a broken causal mask bidirectional.
- Rotary positions are measured with the same token at every position. A mean of equal values is that value, so every
  layer gets the same hidden state at each position, and queries and keys differ only by their rotation.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.diagnosis.compare import Comparison

__all__ = ["Comparison"]

set_public_module(globals())
