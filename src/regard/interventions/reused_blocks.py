"""Run a model without computing its first blocks again: their outputs are those of an earlier run.

A block is a module of a list, such as `model.layers.3`, that contains attention. An edit of one block cannot change the
blocks that finished before it began, so their outputs are returned instead of computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Tensor = Any  # the types of torch are not followed

_lock = threading.RLock()


def find_block(name: str) -> str | None:
    """Return the name of the block that contains a module: up to the first number in it; None if there is none.

    >>> find_block("model.layers.3.self_attn"), find_block("attention")
    ('model.layers.3', None)
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else None


class BlockOutputs:
    """The outputs of the blocks of a model in one run.

    Args:
        model: The model.
        blocks: Names of its blocks.
        batch: Number of batch entries of the run.
    """

    def __init__(self, model: nn.Module, blocks: Iterable[str], batch: int) -> None:
        self._modules = {name: model.get_submodule(name) for name in dict.fromkeys(blocks)}
        self._batch = batch
        self._outputs: dict[str, list[Any]] = {name: [] for name in self._modules}
        self._before: dict[str, tuple[str, ...]] = {}  # blocks that had finished when each one began

    @contextmanager
    def record(self) -> Iterator[None]:
        """Keep the output of every block that runs inside."""

        def wrap(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self._before.setdefault(name, tuple(block for block, kept in self._outputs.items() if kept))
                output = forward(*args, **kwargs)
                self._outputs[name].append(output)
                return output

            return run

        with _replace_forward({module: partial(wrap, name) for name, module in self._modules.items()}):
            yield

    def list_before(self, blocks: Iterable[str | None]) -> list[str]:
        """List the blocks that ran once, and had finished before any of some blocks began.

        Args:
            blocks: Names of blocks; None for a module outside of blocks, before which nothing counts as finished.
        """
        finished = [set(self._before.get(name, ())) if name is not None else set() for name in blocks]
        shared = set.intersection(*finished) if finished else set()
        return [name for name in self._outputs if name in shared and len(self._outputs[name]) == 1]

    @contextmanager
    def reuse(self, blocks: Iterable[str], copies: int) -> Iterator[None]:
        """Return the kept output of some blocks instead of running them.

        Args:
            blocks: Names of the blocks.
            copies: How many copies of the batch the run has.
        """

        def wrap(name: str, _: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._repeat(self._outputs[name][0], copies)

        with _replace_forward({self._modules[name]: partial(wrap, name) for name in blocks}):
            yield

    def _repeat(self, output: Any, copies: int) -> Any:
        """Repeat the batch of every tensor of an output; copies, since models may write to them in place."""
        if isinstance(output, torch.Tensor):
            if output.ndim and output.shape[0] == self._batch:
                return output.repeat(copies, *(1,) * (output.ndim - 1))
            return output
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            return tuple(self._repeat(entry, copies) for entry in output)
        if isinstance(output, list):
            return [self._repeat(entry, copies) for entry in output]
        if isinstance(output, dict):
            return type(output)((name, self._repeat(entry, copies)) for name, entry in output.items())
        return output


@contextmanager
def _replace_forward(
    make_forwards: dict[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Iterator[None]:
    """Replace the `forward` of modules in this thread, without hooks: they would disable fast paths of torch's layers.

    Threads take turns, since each restores what it found.

    Args:
        make_forwards: For each module, a function from its `forward` to the new one.
    """
    owner = threading.get_ident()

    def choose(own: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (own if threading.get_ident() == owner else original)(*args, **kwargs)

    with _lock:
        saved = {module: vars(module).get("forward") for module in make_forwards}
        try:
            for module, make_forward in make_forwards.items():
                module.forward = choose(make_forward(module.forward), module.forward)
            yield
        finally:
            for module, forward in saved.items():
                if forward is not None:
                    module.forward = forward
                else:
                    vars(module).pop("forward", None)
