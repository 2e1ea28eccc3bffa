"""Capture layers that compute their matrix with `regard.distributed.attention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from regard.capture import wrappers


def wrap_distributed_attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `regard.distributed.attention`: its matrix is recorded as it is, without gradients."""

    @wraps(original)
    def attention(*args: Any, **options: Any) -> Any:
        matrix = original(*args, **options)
        module = wrappers.find_running_module()
        if module is not None:
            wrappers.notify_matrix(module, matrix)
        return matrix

    return attention
