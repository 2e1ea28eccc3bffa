"""These tests need vLLM, which has an environment of its own: scripts/setup --vllm."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "serving" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and its dependencies warn
