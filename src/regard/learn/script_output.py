"""Print results in scripts, where an expression on a line of its own shows nothing."""

from __future__ import annotations

import sys
from typing import TypeVar

Result = TypeVar("Result")


def print_in_script(result: Result) -> Result:
    """Print a result, unless the Python prompt or the notebook shows it in full by itself.

    >>> print_in_script("a result")
    a result
    'a result'

    Args:
        result: The result.

    Returns:
        The result.
    """
    is_prompt = hasattr(sys, "ps1")  # only an interactive interpreter has one, and notebooks are interactive
    shows_itself = repr(result) == str(result) or (
        "ipykernel" in sys.modules and hasattr(result, "_repr_html_")
    )
    if not (is_prompt and shows_itself):
        print(result)
    return result
