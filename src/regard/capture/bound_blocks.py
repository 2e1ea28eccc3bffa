"""Blocks of `with` that concern the thread or task that entered them, and the passes that checkpointing repeats for it.

A watch records the calls of all threads. An intervention changes what a model returns, so it must not change what other
threads compute with the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Protocol

from torch.utils import checkpoint

from regard.capture.patching import class_namespace

Function = Callable[..., Any]


class BoundBlock(Protocol):
    """A block that concerns the context that entered it."""

    def rejoin(self) -> AbstractContextManager[None]:
        """Return a block in which this one concerns the present context, also if it has ended."""


# The blocks that are entered now by key, in any context, and the keys of those that the present context has entered.
_blocks: dict[object, BoundBlock] = {}
_entered: ContextVar[frozenset[object]] = ContextVar("_entered", default=frozenset())


def enter_block(block: BoundBlock) -> object:
    """Bind a block to the present context; return its key."""
    key = object()
    _blocks[key] = block
    _entered.set(_entered.get() | {key})
    return key


def leave_block(key: object) -> None:
    """Release a block, in any context."""
    _blocks.pop(key, None)
    _entered.set(_entered.get() - {key})


def is_entered(key: object) -> bool:
    """Return whether the present context has entered a block, or is a copy of one that has."""
    return key in _entered.get()


@contextmanager
def join_block(key: object) -> Iterator[None]:
    """Let a block concern the present context, too."""
    before = _entered.get()
    _entered.set(before | {key})
    try:
        yield
    finally:
        _entered.set(before)


def find_checkpoint_targets() -> Iterator[
    tuple[MutableMapping[str, Any], str, Callable[[Function], Function]]
]:
    """Yield namespace, name and wrapper of the functions of torch that run a module again in a backward pass."""
    yield class_namespace(checkpoint.CheckpointFunction), "forward", _wrap_reentrant
    name = "_checkpoint_without_reentrant_generator"
    if name in vars(checkpoint):
        yield vars(checkpoint), name, _wrap_generator


def _wrap_reentrant(original: Function) -> Function:
    """Wrap `CheckpointFunction.forward`, which keeps the function for the backward pass."""

    @wraps(original)
    def forward(ctx: Any, function: Function, *args: Any) -> Any:
        return original(ctx, _keep_blocks(function), *args)

    return forward


def _wrap_generator(original: Function) -> Function:
    """Wrap the generator of non-reentrant checkpoints, which keeps the function for the backward pass."""

    @wraps(original)
    def checkpoint_without_reentrant(function: Function, *args: Any, **kwargs: Any) -> Any:
        return original(_keep_blocks(function), *args, **kwargs)

    return checkpoint_without_reentrant


def _keep_blocks(function: Function) -> Function:
    """Return a function that runs in the blocks of the present context, whenever and in whatever thread it runs."""
    kept = [block for key, block in _blocks.items() if is_entered(key)]

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for block in kept:
                stack.enter_context(block.rejoin())
            return function(*args, **kwargs)

    return run if kept else function
