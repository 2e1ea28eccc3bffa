"""Find the names under which modules imported a function: `from torch.nn.functional import softmax`."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from regard.capture.patching import list_wrappers

# Modules of torch and regard call functions by attribute, or must keep the originals. The standard library imports
# nothing from torch.
_SKIPPED = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "regard"}
# It compiles the function at its first call, and would keep a compiled wrapper. Its caller is wrapped.
_SKIPPED_MODULE = "transformers.integrations.flex_attention"

# Installed modules without any of the functions, by name: identity and size of the globals when they were read. Reading
# all takes milliseconds, and installed modules rarely rebind a name after import, so they are read once.
_clean: dict[str, tuple[int, int]] = {}
_clean_of: frozenset[int] = frozenset()


def find_imported(
    function_ids: frozenset[int], is_compiled: Callable[[Any], bool]
) -> Iterator[MutableMapping[str, Any]]:
    """Yield the globals of the imported modules that hold one of some functions, or a wrapper of it that is in place.

    Args:
        function_ids: The `id` of each function.
        is_compiled: Returns whether a value is a compiled form of one.
    """
    global _clean_of
    if function_ids != _clean_of:
        _clean.clear()
        _clean_of = function_ids
    sought = function_ids | {
        id(wrapper) for wrapper, original in list_wrappers() if id(original) in function_ids
    }
    for name, module in tuple(sys.modules.items()):
        is_skipped = name.partition(".")[0] in _SKIPPED or name == _SKIPPED_MODULE
        if is_skipped or not isinstance(module, types.ModuleType):
            continue
        namespace = vars(module)
        state = id(namespace), len(namespace)
        if _clean.get(name) == state:
            continue
        values = tuple(namespace.values())
        if not sought.isdisjoint(map(id, values)) or any(map(is_compiled, values)):
            yield namespace
        elif "-packages" in str(namespace.get("__file__")):
            _clean[name] = state
