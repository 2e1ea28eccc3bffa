"""Measure the memory of a tool in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def measure(tool, implementation, length):
    """Run a tool in a process of its own; return its peak in MiB above a short run."""
    command = [sys.executable, "-m", "tests.tools.long_context", tool, implementation, str(length)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    line = result.stdout.strip().splitlines()[-1]
    print(line)
    return int(line.split(", ")[-1].split()[0])
