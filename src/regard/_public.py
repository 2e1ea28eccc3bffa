"""Give exported objects their public path."""

from __future__ import annotations

from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of the objects that a package defines and exports, as tracebacks, reprs and `help` show it.

    Args:
        namespace: The `globals()` of the package's `__init__`, with `__name__` and `__all__`.
    """
    package = namespace["__name__"]
    for name in namespace["__all__"]:
        exported = namespace.get(name)
        if str(getattr(exported, "__module__", "")).startswith(f"{package}."):
            exported.__module__ = package
