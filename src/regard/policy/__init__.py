"""Cache policies: how many keys each key/value head of a model keeps.

`Survey.cache_policy` derives a `CachePolicy` from a survey; `CachePolicy.load` reads one from a file. May import
`regard.plot` and everything below it; `regard.survey` and `regard.cli` are above.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.policy.masking import FULL
from regard.policy.policy import CachePolicy, Verification

__all__ = ["FULL", "CachePolicy", "Verification"]

set_public_module(globals())
