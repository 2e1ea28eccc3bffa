"""pytest plugin for mutation runs: mutmut 3.8 reads `item._nodeid`, which pytest 9.2 calls `nodeid`."""

from __future__ import annotations

import pytest

pytest.Item._nodeid = property(lambda item: item.nodeid)
