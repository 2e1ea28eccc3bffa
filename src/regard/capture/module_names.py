"""The names of modules: which ones a pattern selects, and the number of a layer in its stack."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from regard.errors import ArgumentTypeError, describe_argument


def is_selected(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a module, or one that contains it.

    >>> is_selected("model.layers.0.self_attn", "model.layers.0"), is_selected("model.layers.10", "model.layers.1")
    (True, False)
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:i]), pattern) for i in range(len(parts) + 1))


def list_patterns(layers: Any, operation: str) -> list[str]:
    """List the names and patterns that a user passed as `layers`; all modules by default."""
    is_one = isinstance(layers, str | bytes) or not isinstance(layers, Iterable)
    patterns = ["*"] if layers is None else [layers] if is_one else list(layers)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(
                operation,
                received=f"layers with {describe_argument(pattern)}",
                expected="a module name, a pattern with *, or a list of these",
                hint='For example layers="*.layers.3", or layers=["encoder", "decoder.layers.0"].',
            )
    return patterns


class LayerPlace(NamedTuple):
    """The place of a module in a model.

    Args:
        stack: Its name up to the first number, which the layers of one stack share; "" without a number.
        number: The first number in its name; None without one.
    """

    stack: str
    number: int | None


def find_place(name: str) -> LayerPlace:
    """Find the place of a module by its name.

    >>> find_place("encoder.layer.3.attention"), find_place("attention")
    (LayerPlace(stack='encoder.layer', number=3), LayerPlace(stack='', number=None))
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return LayerPlace("", None) if at is None else LayerPlace(".".join(parts[:at]), int(parts[at]))
