"""Run command lines in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INDUCTION = "examples.induction:load"


def run_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m regard` with these arguments."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "regard", *map(str, arguments)]
    options = {"timeout": 120} | options
    return subprocess.run(command, env=env, capture_output=True, encoding="utf-8", **options)
