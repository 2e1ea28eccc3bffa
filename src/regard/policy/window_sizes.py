"""The value that stands for no window."""

from __future__ import annotations

# The value in `windows` of a head that keeps every key.
FULL = -1
