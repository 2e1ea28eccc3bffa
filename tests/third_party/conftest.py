"""These tests need an environment of their own: scripts/setup --third-party."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("diffusers") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "third_party" in item.path.parts:
            item.add_marker(
                pytest.mark.filterwarnings("default")
            )  # these packages and their dependencies warn
