"""These tests need tools that do not share an environment: scripts/setup --tools, and scripts/setup --older-tools."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Files that cannot run here, so that nothing is skipped in the environment that has the tool.
NEEDED = {
    "test_inseq.py": "inseq",
    "test_kvpress.py": "kvpress",
    "test_nnsight.py": "nnsight",
    "test_transformer_lens.py": "transformer_lens",
}
collect_ignore = [name for name, package in NEEDED.items() if not importlib.util.find_spec(package)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # the tools and their dependencies warn
