"""The fixture that builds the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    # Without a compiler the wheel is pure; its metadata is the same.
    environ = {**os.environ, "CC": "no-compiler"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environ)
    (path,) = folder.glob("regard-*.whl")
    return path
