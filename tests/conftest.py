"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=7000, help="draws of the case matrix, each a case for every engine"
    )
    parser.addoption("--case-seed", type=int, default=20261114, help="the seed they are drawn with")
