"""Patch functions only while a model runs, so that nothing stays patched if an exception ends a run."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from regard.capture.patching import exclude_from_compile


class Suspendable(Protocol):
    """A watch whose patches can be restored for a while."""

    def resume(self) -> None:
        """Patch."""

    def suspend(self) -> None:
        """Restore what was patched."""


class ForwardScope:
    """Resume a watch in the outermost forward pass of any module of a model, and suspend it when the pass ends.

    It also ends with an exception, except KeyboardInterrupt and SystemExit, for which torch calls no hooks. The hooks
    are those for all modules: hooks of a module itself would disable the fast paths of torch's own layers, and a
    training loop may call parts of the model instead of the model.

    Args:
        model: The model.
        watch: What to resume and suspend.
        include_eval: Whether to resume it while the model is in eval mode, too.
        on_compiled: Called before a compiled form of one of the modules runs, whose hooks are not called.
    """

    def __init__(
        self, model: nn.Module, watch: Suspendable, include_eval: bool, on_compiled: Callable[[], None]
    ) -> None:
        self._model, self._watch, self._include_eval, self._on_compiled = (
            model,
            watch,
            include_eval,
            on_compiled,
        )
        self._module_ids = {id(module) for module in model.modules()}
        self._lock = threading.RLock()
        self._running: dict[int, list[int]] = defaultdict(list)  # ids of the running modules of each thread
        self._is_resumed = False
        self._hooks = [
            register_module_forward_pre_hook(exclude_from_compile(self._before_forward)),
            register_module_forward_hook(exclude_from_compile(self._after_forward), always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks, and suspend the watch if a module is running."""
        for hook in self._hooks:
            hook.remove()
        with self._lock:
            self._running.clear()
            self._suspend()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        is_counted = self._model.training or self._include_eval
        if id(module) not in self._module_ids:
            if is_counted and id(getattr(module, "_orig_mod", None)) in self._module_ids:
                self._on_compiled()
            return
        with self._lock:
            self._running[threading.get_ident()].append(id(module))
            if not self._is_resumed and is_counted:
                self._is_resumed = True
                self._watch.resume()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._module_ids:
            return
        with self._lock:
            thread = threading.get_ident()
            running = self._running[thread]
            if running and running[-1] == id(module):  # else another hook failed before this one ran
                running.pop()
            if not running:
                del self._running[thread]
            if not self._running:
                self._suspend()

    def _suspend(self) -> None:
        if self._is_resumed:
            self._is_resumed = False
            self._watch.suspend()
