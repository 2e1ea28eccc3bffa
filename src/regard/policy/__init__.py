"""Cache policies: how many keys each key/value head of a model keeps.

`Survey.cache_policy` derives a `CachePolicy` from a survey; `CachePolicy.load` reads one from a file. May import
`regard.plot` and everything below it; `regard.survey` and `regard.cli` are above.

Design notes:
- A policy's cache hands out only new keys, and its attention function stores them. Only there the mask is known, and
  with it the first token of a padded row, whose sinks must stay. A layer whose keys do not arrive raises an error in
  the same forward pass.
- Stores of heads without a window grow by a 64th: doubling would miss the predicted bytes by half.
- transformers' own sliding layers are used only if the configuration says what the policy says. They keep no sinks
  and one window size, and the masks of a model follow its configuration; changing that of a loaded model would change
  more than its cache.
- A policy's window is chosen by the weight lost by tokens that have evicted keys, not by all tokens. The share does
  not depend on how many tokens are shorter than the window, so halves of a corpus with other lengths agree.
- `tighten` ranks heads by integrated gradients from the masked to the plain run. The parts add up to the KL
  divergence and cost four passes for any number of heads; at the plain run its gradient is zero, and ablating each
  head costs one pass per head.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.policy.masking import FULL
from regard.policy.policy import CachePolicy, Verification

__all__ = ["FULL", "CachePolicy", "Verification"]

set_public_module(globals())
