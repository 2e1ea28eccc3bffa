"""Count the calls of functions of this package."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import regard

SOURCE = str(Path(regard.__file__).parent)


def count_own_calls(run) -> Counter[str]:
    """Count the calls of functions of this package by their name."""
    calls: Counter[str] = Counter()

    def profile(frame, event, _) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
