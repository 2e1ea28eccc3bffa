"""Who watches a model: the blocks that are entered, the module that is running, and the notification of its watchers.

The running module is read from the Python stack: the nearest caller whose first argument is a module of a watched
model (`iter_running_modules`). Hooks would disable the fast paths of `nn.TransformerEncoderLayer`, and so change its
output.

A watch records the calls of all threads. An intervention changes what a model returns, so it applies only to the
thread or task that entered its block, and to the passes that checkpointing repeats for it.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import checkpoint

from regard.capture.cache_store import RowSteps
from regard.capture.call import CapturedArgs
from regard.capture.module_names import walk_modules
from regard.capture.patching import Target, class_namespace, patch, unpatch

Function = Callable[..., Any]


class Watcher(ABC):
    """A block that is notified of the calls of a model's modules, by the functions that it patches.

    Args:
        model: The model.
        selected: Names of the modules whose calls it is notified of.
    """

    # Whether the block concerns the thread or task that enters it, and no others.
    binds_context: bool = False

    def __init__(self, model: nn.Module, selected: set[str]) -> None:
        self._model = model
        self._selected = selected
        self._targets: list[Target] = []
        self._patches: list[Any] = []
        self._watched_ids: list[int] = []
        self._key: object | None = None  # of the block, if it is bound to a context
        self._rejoin_lock, self._is_rejoined = threading.RLock(), False

    @abstractmethod
    def _enter(self) -> None:
        """Find the functions to patch, and start."""

    @abstractmethod
    def _restore(self) -> None:
        """Undo what `_enter` did."""

    @abstractmethod
    def record(self, module: nn.Module, name: str, args: CapturedArgs) -> None:
        """Record a call."""

    @abstractmethod
    def record_matrix(self, name: str, matrix: Any) -> None:
        """Record the matrix of a layer whose tokens are on several ranks."""

    @abstractmethod
    def report_uncaptured(self, name: str, reason: str, hint: str) -> None:
        """Report a call that cannot be recorded."""

    @abstractmethod
    def notice_softmax(self, name: str, module: nn.Module, trace: Any) -> None:
        """Notice a softmax that may be attention, a `SoftmaxTrace`."""

    @abstractmethod
    def drop_channels(self, name: str) -> None:
        """Drop the calls of a layer whose rows are channels and not tokens."""

    @property
    def keeps_grad(self) -> bool:
        """Whether calls are recorded with their graph."""
        return False

    def replaces_output(self, name: str, args: CapturedArgs) -> bool:
        """Return whether `edit` computes the output of a call without the function that the model called."""
        return False

    def edit(self, module: nn.Module, name: str, args: CapturedArgs) -> CapturedArgs:
        """Return the arguments of a call after the changes by this watcher; a watch changes nothing."""
        return args

    def resume(self) -> None:
        """Patch the functions; a watch that was entered calls it, and may after `suspend`."""
        row_steps.clear()  # the watchers of a module change
        with watchers_lock:
            for name, module in walk_modules(self._model):
                selected_name = name if name in self._selected else None
                watched.setdefault(id(module), []).append((self, selected_name))
                self._watched_ids.append(id(module))
        for target in self._targets:
            self._patches.append(patch(*target))

    def suspend(self) -> None:
        """Restore every function that was patched, until `resume`; hooks on the model remain, but do nothing."""
        while self._patches:
            unpatch(self._patches.pop())
        with watchers_lock:
            for module_id in self._watched_ids:
                entries = watched.pop(module_id)
                if len(entries) > 1:
                    watched[module_id] = [entry for entry in entries if entry[0] is not self]
        self._watched_ids.clear()
        row_steps.clear()

    def bind_context(self) -> None:
        """Apply the block only in the current context, and in the passes that checkpointing repeats for it."""
        self._key = object()
        _bound_blocks[self._key] = self
        _entered.set(_entered.get() | {self._key})
        self._targets.append(
            (class_namespace(checkpoint.CheckpointFunction), "forward", partial(_wrap_checkpoint, 1))
        )
        name = "_checkpoint_without_reentrant_generator"
        if name in vars(checkpoint):
            self._targets.append((vars(checkpoint), name, partial(_wrap_checkpoint, 0)))

    def release_context(self) -> None:
        """Undo `bind_context`; this may be called in any context."""
        _bound_blocks.pop(self._key, None)
        _entered.set(_entered.get() - {self._key})
        self._key = None

    @property
    def applies_here(self) -> bool:
        """Whether the block applies to the running thread or task, or to a context from which it was copied."""
        return not self.binds_context or self._key in _entered.get()

    @contextmanager
    def rejoin(self) -> Iterator[None]:
        """Let the block concern the present context, also if it has ended: a backward pass runs a part of it again."""
        if self._targets and not self._is_rejoined:
            before = _entered.get()
            _entered.set(before | {self._key})
            try:
                yield
            finally:
                _entered.set(before)
            return
        with self._rejoin_lock:  # of the threads of a backward pass
            if self._is_rejoined:
                yield
                return
            self._is_rejoined = True
            try:
                self._enter()
                yield
            finally:
                self._restore()
                self._is_rejoined = False


class _ThreadState(threading.local):
    """What each thread is doing.

    Attributes:
        captures: How many calls it has captured, so that an outer wrapper knows whether an inner one did.
        is_probing: Whether `probe` runs a function.
        probe: The arguments that it passed to `F.scaled_dot_product_attention`.
        is_notifying: Whether watchers are notified of a call, and may compute attention themselves.
        intercept: What is passed calls in the place of watchers; None for no such function.
    """

    captures = 0
    is_probing = False
    probe: CapturedArgs | None = None
    is_notifying = False
    intercept: Callable[[nn.Module, CapturedArgs, str], None] | None = None


thread_state = _ThreadState()
# For the id of each module of a watched model: its watchers, and its name there, None if it is not selected.
watched: dict[int, list[tuple[Watcher, str | None]]] = {}
watchers_lock = threading.RLock()  # held by those who change it
# For the id of a module with one watcher: what collects steps of `generate()` on the fast path.
row_steps: dict[int, RowSteps] = {}
# The blocks that are bound to a context by their key, and the keys of those that the present context has entered.
_bound_blocks: dict[object, Watcher] = {}
_entered: ContextVar[frozenset[object]] = ContextVar("_entered", default=frozenset())

# Functions of transformers that propose tokens and may discard them.
_SPECULATIVE = {"_beam_search": "beam search", "_assisted_decoding": "speculative decoding"}


def _wrap_checkpoint(position: int, original: Function) -> Function:
    """Wrap a function of torch that keeps the function at a position of its arguments for the backward pass."""

    @wraps(original)
    def run_checkpoint(*args: Any, **kwargs: Any) -> Any:
        kept = _keep_blocks(args[position])
        return original(*args[:position], kept, *args[position + 1 :], **kwargs)

    return run_checkpoint


def _keep_blocks(function: Function) -> Function:
    """Return a function that runs in the blocks of the present context, whenever and in whatever thread it runs."""
    kept = [watcher for key, watcher in _bound_blocks.items() if key in _entered.get()]

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for watcher in kept:
                stack.enter_context(watcher.rejoin())
            return function(*args, **kwargs)

    return run if kept else function


def speculative_mode() -> str:
    """Return how the caller proposes tokens that it may discard, such as "beam search"; "" if it does not."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SPECULATIVE:
            return _SPECULATIVE[frame.f_code.co_name]
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_recomputing() -> bool:
    """Return whether this thread is inside `backward()`, where activation checkpointing runs layers again."""
    return bool(torch._C._current_graph_task_id() != -1)


def find_running_module() -> nn.Module | None:
    """Return the module of a watched model that is nearest on the stack, if it is selected."""
    # In most calls, the module is nearby, and no other is on the way to it: no generator is needed.
    frame: Any = None if thread_state.is_notifying else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if issubclass(type(module), nn.Module):
            entries = watched.get(id(module), ())
            if len(entries) != 1 or entries[0][0].binds_context:
                break
            return module if entries[0][1] is not None else None
        frame = frame.f_back
    module = next(iter_running_modules(), None)
    return module if module is not None and list_watchers(module) else None


def iter_running_modules() -> Iterator[nn.Module]:
    """Yield the modules of watched models that are running, the innermost first.

    What another module computes belongs to the watched module in whose forward pass it runs. If a method of a watched
    model calls it outside of a forward pass, as `generate()` calls an assistant model, it belongs to none.
    """
    if thread_state.is_notifying:
        return
    frame, in_other = sys._getframe(1), False
    while frame is not None:
        code = frame.f_code
        module = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if issubclass(type(module), nn.Module):
            for watcher, _ in watched.get(id(module), ()):
                if watcher.applies_here:
                    break
            else:
                in_other, module = True, None
            if module is not None and in_other and not _is_in_forward(module, frame):
                return
            if module is not None:
                in_other = False
                yield module
        frame = frame.f_back  # type: ignore[assignment]


def _is_in_forward(module: nn.Module, frame: Any) -> bool:
    """Return whether a frame of a module, or one that called it, is the module's forward pass."""
    while frame is not None:
        code = frame.f_code
        is_forward = code.co_name in ("forward", "_call_impl") and code.co_argcount
        if is_forward and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back
    return False


def list_watchers(module: nn.Module) -> list[tuple[Watcher, str]]:
    """List the watchers that select a module in the running thread, each with the name of the module."""
    selecting = []
    for watcher, name in watched.get(id(module), ()):
        if name is not None and watcher.applies_here:
            selecting.append((watcher, name))
    return selecting


def find_obstacle(*tensors: Any) -> tuple[str, str] | None:
    """Find out why a call with these arguments has no numbers that could be recorded: reason and hint, or None."""
    if torch.jit.is_tracing():
        return "it ran inside torch.jit.trace", "Trace the model outside the watch."
    if torch._C._functorch.peek_interpreter_stack() is not None:
        hint = "Run the model without torch.func inside the watch, on a batch or in a loop over samples."
        return "it ran inside a transform of torch.func, such as vmap or grad", hint
    for tensor in tensors:
        if tensor is None or (type(tensor) is torch.Tensor and not tensor.is_meta):
            continue
        if isinstance(tensor, torch.Tensor) and (
            tensor.is_meta
            or isinstance(tensor, FakeTensor | FunctionalTensor)
            or torch._is_functional_tensor(tensor)
        ):
            hint = "Watch the model with its weights loaded, and export it outside the watch."
            return "it ran on meta or fake tensors, which have no numbers", hint
        if hasattr(tensor, "device_mesh"):
            hint = "Let the projections return local tensors: ColwiseParallel(use_local_output=True), the default."
            return "its tensors are distributed (DTensor)", hint
    return None


def notify(module: nn.Module, args: CapturedArgs, submodule: str = "") -> CapturedArgs:
    """Pass a call to the watchers of a module; return it with `edited_output` if an intervention changes the output.

    `submodule` is the name of the module inside it whose call was fused into this one.
    """
    obstacle = find_obstacle(*args[:4])
    if obstacle is not None:
        report_uncaptured(module, *obstacle, submodule)
        return args
    if thread_state.intercept is not None:
        thread_state.intercept(module, args.expand_query(), submodule)
        return args
    thread_state.captures += 1
    entries, args = list_watchers(module), args.expand_query()
    before, thread_state.is_notifying = thread_state.is_notifying, True
    try:
        for watcher, name in entries:
            args = watcher.edit(module, join_names(name, submodule), args)
        for watcher, name in entries:
            watcher.record(module, join_names(name, submodule), args)
    finally:
        thread_state.is_notifying = before
    return args


class _Stopped(BaseException):
    """Ends a function at its first attention call."""


def run_to_attention(function: Function) -> tuple[nn.Module, CapturedArgs, str] | None:
    """Call a function up to its first attention call, of which watchers are not notified; they may call this.

    Returns:
        The module of that call, its arguments, and the name of the module inside it as in `notify`; None if the
        function made no call.
    """
    found: list[tuple[nn.Module, CapturedArgs, str]] = []

    def stop(*call: Any) -> None:
        found.append(call)
        raise _Stopped

    before = thread_state.is_notifying, thread_state.intercept
    thread_state.is_notifying, thread_state.intercept = False, stop
    try:
        function()
    except _Stopped:
        pass
    finally:
        thread_state.is_notifying, thread_state.intercept = before
        thread_state.captures += 1  # hooks of modules that started here have not ended
    return found[0] if found else None


def find_arguments(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the positional and keyword arguments of the running call of a module; None if it does not run."""
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals if frame.f_code.co_name == "_call_impl" else {}
        if names.get("self") is module and "args" in names and "kwargs" in names:
            return names["args"], names["kwargs"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def notify_matrix(module: nn.Module, matrix: Any) -> None:
    """Pass the matrix of a layer whose tokens are on several ranks to the watchers of a module."""
    thread_state.captures += 1
    entries = list_watchers(module)
    before, thread_state.is_notifying = thread_state.is_notifying, True
    try:
        for watcher, name in entries:
            watcher.record_matrix(name, matrix)
    finally:
        thread_state.is_notifying = before


def report_uncaptured(module: nn.Module, reason: str, hint: str, submodule: str = "") -> None:
    """Report a call that cannot be recorded to the watchers of a module."""
    thread_state.captures += 1
    for watcher, name in list_watchers(module):
        watcher.report_uncaptured(join_names(name, submodule), reason, hint)


def join_names(name: str, submodule: str) -> str:
    """Return the name of a submodule in the model, given the name of the module around it."""
    return f"{name}.{submodule}" if name and submodule else name or submodule
