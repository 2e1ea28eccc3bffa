"""The names of modules: which ones a pattern selects, and the number of a layer in its stack."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

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


def walk_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of a model with their names, as `named_modules` does in several times the time."""
    known: dict[int, Any] | None = getattr(_walks, "known", None)
    if known is None:
        return _walk(model)
    if id(model) not in known:
        known[id(model)] = _walk(model)
    return list(known[id(model)])


@contextmanager
def walk_once() -> Iterator[None]:
    """Let `walk_modules` walk through each model once inside the block, in which no model changes."""
    before = getattr(_walks, "known", None)
    _walks.known = {} if before is None else before
    try:
        yield
    finally:
        _walks.known = before


_walks = threading.local()


def _walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if type(model).named_modules is not nn.Module.named_modules:
        return list(model.named_modules())
    found, seen, pending = [], set(), [("", model)]
    while pending:
        name, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        prefix = f"{name}." if name else ""
        children = reversed(list(module._modules.items()))
        pending += [(prefix + own, child) for own, child in children if child is not None]
    return found


def read_attribute(module: nn.Module, name: str, default: Any = None) -> Any:
    """Return an attribute of a module, which may be absent: torch would build an error, which takes longer."""
    kind: Any = type(module)
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if not is_plain or hasattr(kind, name):
        return getattr(module, name, default)
    fields = module.__dict__
    for held in (fields, fields["_modules"], fields["_parameters"], fields["_buffers"]):
        if name in held:
            return held[name]
    return default


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
