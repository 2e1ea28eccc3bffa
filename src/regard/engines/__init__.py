"""Engines: the operations that differ between NumPy, torch and other array libraries; all other code is shared.

`find_engine` returns the engine of some arrays, without importing a library that the caller has not imported;
`register` adds an engine. This package may import masks, score_mods and the modules below them.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.engines.array_api import ArrayEngine
from regard.engines.protocol import Engine
from regard.engines.registry import find_engine, get_engine, register

__all__ = ["ArrayEngine", "Engine", "find_engine", "get_engine", "register"]

set_public_module(globals())
