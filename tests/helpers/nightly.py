"""Parameters of which CI runs some, and the nightly suite all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def keep_in_ci(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Mark the parameters of a test nightly, but for those that CI runs."""
    values = list(values)
    assert all(value in values for value in kept), "a parameter that does not exist"
    arguments = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        value if value in kept else pytest.param(*parts, marks=pytest.mark.nightly)
        for value, parts in zip(values, arguments, strict=True)
    ]
