"""Numbers of keys with a meaning of their own."""

from __future__ import annotations

# The value in `windows` of a head that keeps every key.
FULL = -1
# The number of first keys that a head gets when it is widened.
WIDENED_SINKS = 4
