"""Engines: the operations that differ between NumPy, torch and other array libraries; all other code is shared.

`find_engine` returns the engine of some arrays, without importing a library that the caller has not imported;
`register` adds an engine. The abstract `Engine` is in `regard.problem`, which this package may import.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.engines.array_api import ArrayEngine
from regard.engines.registry import find_engine, get_engine, register
from regard.problem import Engine

__all__ = ["ArrayEngine", "Engine", "find_engine", "get_engine", "register"]

set_public_module(globals())
