"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=5000, help="cases of the case matrix to run against the definition"
    )
    parser.addoption("--case-seed", type=int, default=20261114, help="the seed they are drawn with")
