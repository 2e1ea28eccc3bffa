"""The ranks of the tests: processes that are started once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Three processes, four in the nightly suite; the first two and the first three are groups of their own."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or sys.platform == "win32":
        pytest.skip("torch.distributed with gloo is not available")
    from tests.helpers.rank_processes import RankProcesses

    started = RankProcesses(4 if request.config.getoption("--nightly") else 3)
    yield started
    started.stop()
