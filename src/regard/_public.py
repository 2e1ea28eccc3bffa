"""Give exported objects the path under which users import them."""

from __future__ import annotations

from typing import Any

# Packages and modules without public names: their objects are exported by other packages.
_PRIVATE = (
    "regard.accumulators",
    "regard.capture.",
    "regard.core.",
    "regard.findings",
    "regard.jobs.",
    "regard.pages.",
    "regard.problem",
    "regard.render.",
)


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of the objects that a package exports, so that tracebacks, reprs and `help` show its path.

    Objects of the package's own modules and of private packages are changed; objects of another public package keep
    that package's path.

    Args:
        namespace: The `globals()` of the package's `__init__`, with `__name__` and `__all__`.
    """
    package = namespace["__name__"]
    for name in namespace["__all__"]:
        exported = namespace.get(name)
        if str(getattr(exported, "__module__", "")).startswith((f"{package}.", *_PRIVATE)):
            exported.__module__ = package
