"""Split the residual stream of a model at one position into what its parts added, and verify that they add up to it.

Nothing is looked up by name. A part is recognised by its numbers: the output of a block must be its input plus the
outputs of its attention layers and of one more module, each times a constant, up to rounding. Models in which that
does not hold are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.output_projections import OutputProjection
from regard.errors import ArgumentError

Tensor = Any  # the types of torch are not followed


class ModuleVectors(NamedTuple):
    """What one call of a module read and wrote at the position, (batch, width) each; None for other shapes."""

    input: Tensor | None
    output: Tensor | None


class StreamTrace:
    """The vectors at one position that go into and come out of every module, in the order in which the modules end.

    Args:
        batch: Number of batch entries.
        length: Number of tokens.
        position: The position.
    """

    def __init__(self, batch: int, length: int, position: int) -> None:
        self.calls: dict[str, list[ModuleVectors]] = {}
        self._batch, self._length, self._position = batch, length, position

    @contextmanager
    def attach(self, model: nn.Module) -> Iterator[None]:
        """Trace the modules of a model inside a block."""
        handles: list[Any] = []
        starts: dict[str, list[Tensor | None]] = {}
        try:
            for name, module in model.named_modules():
                handles += self._register(name, module, starts)
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _register(self, name: str, module: nn.Module, starts: dict[str, list[Tensor | None]]) -> list[Any]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Copied before the call: some layers add to their input in place.
            starts.setdefault(name, []).append(
                self.pick(kwargs.get("hidden_states", args[0] if args else None))
            )

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if starts.get(name):
                vectors = ModuleVectors(starts[name].pop(), self.pick(output))
                self.calls.setdefault(name, []).append(vectors)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def pick(self, value: Any) -> Tensor | None:
        """Return the vectors of a tensor at the position, (batch, width), float64 on the CPU; None if it has none.

        Args:
            value: (batch, n, width), (batch · n, width), or a tuple or mapping that begins with such a tensor.
        """
        if isinstance(value, Mapping):
            value = next(iter(value.values()), None)
        if isinstance(value, tuple | list):
            value = value[0] if value else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        if value.ndim == 2 and len(value) == self._batch * self._length:
            value = value.reshape(self._batch, self._length, -1)
        if value.ndim != 3 or tuple(value.shape[:2]) != (self._batch, self._length):
            return None
        return value[:, self._position].detach().cpu().to(torch.float64, copy=True)

    def get(self, name: str) -> ModuleVectors | None:
        """Return the vectors of a module that ran once; None otherwise."""
        calls = self.calls.get(name, ())
        return calls[0] if len(calls) == 1 else None


@dataclass(frozen=True)
class LinearNorm:
    """A LayerNorm or an RMSNorm at one position, with its scale fixed: a linear map, and a bias.

    Args:
        gain: (width,).
        bias: (width,).
        scale: 1/σ of each batch entry, (batch, 1).
        is_centred: Whether the mean is subtracted.
    """

    gain: Tensor
    bias: Tensor
    scale: Tensor
    is_centred: bool

    def apply(self, x: Tensor) -> Tensor:
        """Map vectors, (…, batch, width), without the bias."""
        centred = x - x.mean(-1, keepdim=True) if self.is_centred else x
        return centred * self.gain * self.scale

    @classmethod
    def fit(cls, module: nn.Module, vectors: ModuleVectors, tolerance: float) -> LinearNorm | None:
        """Read a norm from what it returns for probes; None if the module is not such a norm.

        Args:
            module: The module.
            vectors: Its input and output at the position.
            tolerance: Relative difference up to which numbers agree.
        """
        x, y = vectors
        if x is None or y is None or x.shape != y.shape:
            return None
        like = next(module.parameters(), torch.zeros((), dtype=torch.float32))
        signs = 1.0 - 2.0 * (torch.arange(x.shape[-1]) % 2)
        probes = torch.stack([torch.zeros_like(signs), 1000 * signs, 1000 * signs + 3000])[None]
        try:
            with torch.no_grad():
                bias, plain, shifted = module(probes.to(like))[0].cpu().double()
        except (TypeError, ValueError, IndexError, RuntimeError):
            return None
        is_centred = bool(torch.allclose(plain, shifted, rtol=1e-2, atol=1e-6))
        unit = signs.double() - (signs.double().mean() if is_centred else 0.0)
        gain = (plain - bias) / (unit / unit.square().mean().sqrt())
        direction = cls(gain, bias, torch.ones((), dtype=gain.dtype, device=gain.device), is_centred).apply(x)
        scale = (direction * (y - bias)).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True)
        norm = cls(gain, bias, scale, is_centred)
        return norm if are_close(norm.apply(x) + bias, y, tolerance) else None


def are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether vectors agree relative to the length of the second."""
    return a.shape == b.shape and bool(((a - b).norm(dim=-1) <= tolerance * b.norm(dim=-1)).all())


def find_factor(a: Tensor, b: Tensor, tolerance: float) -> float | None:
    """Return the number c with b = c · a; None if there is none."""
    if a.shape != b.shape or not bool(a.any()):
        return None
    factor = float((a * b).sum() / a.square().sum())
    return factor if are_close(factor * a, b, tolerance) else None


class AddedAttention(NamedTuple):
    """An attention layer as a block adds it.

    Attributes:
        module: Name of the attention layer.
        projection: Its output projection.
        norm: The norm between the projection and the stream, or None.
        factor: Constant factor.
    """

    module: str
    projection: OutputProjection
    norm: LinearNorm | None
    factor: float

    def map(self, vectors: Tensor) -> Tensor:
        """Map vectors after the output projection, (…, batch, width), to what they add to the stream."""
        return self.factor * (vectors if self.norm is None else self.norm.apply(vectors))


class Block(NamedTuple):
    """One block: what it adds to the stream.

    Attributes:
        name: Name of the module.
        attentions: Its attention layers.
        rest: Name and vectors of the module that adds the rest, such as the MLP; None if attention is all.
    """

    name: str
    attentions: list[AddedAttention]
    rest: tuple[str, Tensor] | None


def list_blocks(model: nn.Module, attention_names: Sequence[str], operation: str) -> list[str]:
    """List the blocks of the stack that the attention layers are in, in order.

    Raises:
        ArgumentError: If the layers are in no list of modules, or in several.
    """
    stacks = {
        match[1] if (match := re.match(r"(.*?)\.?\b\d+(?:\.|$)", name)) else None for name in attention_names
    }
    if len(stacks) != 1 or None in stacks:
        raise ArgumentError(
            operation,
            received=f"attention layers in {len(stacks)} stacks ({', '.join(map(str, stacks))})"
            if None not in stacks
            else "attention layers that are not in a list of blocks",
            expected="one stack of blocks, such as model.layers",
            hint="Encoder-decoder models are not split into parts.",
        )
    (stack,) = stacks
    assert stack is not None
    return [f"{stack}.{name}" if stack else name for name, _ in model.get_submodule(stack).named_children()]


def split_block(
    model: nn.Module,
    trace: StreamTrace,
    name: str,
    projections: Mapping[str, OutputProjection],
    tolerance: float,
) -> Block | str:
    """Find what a block adds to the stream.

    Args:
        model: The model.
        trace: The vectors of its modules.
        name: Name of the block.
        projections: The output projection of each attention layer inside the block.
        tolerance: Relative difference up to which numbers agree.

    Returns:
        The block, or why it cannot be split.
    """
    whole = trace.get(name)
    if (
        whole is None
        or whole.input is None
        or whole.output is None
        or whole.input.shape != whole.output.shape
    ):
        return f"{name!r} does not map a stream (batch, n, width) to another once"
    added, size = whole.output - whole.input, whole.output.norm() + whole.input.norm()
    choices = [
        list(_list_readings(model, trace, name, projection, tolerance)) for projection in projections.values()
    ]
    others = [
        (other, vectors.output)
        for other in trace.calls
        if other.startswith(f"{name}.")
        and not any(other == layer or other.startswith(f"{layer}.") for layer in projections)
        and (vectors := trace.get(other)) is not None
        and vectors.output is not None
        and vectors.output.shape == added.shape
    ]
    rests: list[tuple[str, Tensor] | None] = [None, *others]
    for readings, rest in product(product(*choices), rests):
        terms = [vectors for _, vectors in readings] + ([] if rest is None else [rest[1]])
        if not terms:
            continue
        columns = torch.stack([term.flatten() for term in terms], -1)
        factors = torch.linalg.lstsq(columns, added.flatten()[:, None]).solution[:, 0]
        if bool((columns @ factors - added.flatten()).norm() <= tolerance * size):
            attentions = [
                AddedAttention(module, projection, norm, float(factor))
                for (module, projection), (norm, _), factor in zip(
                    projections.items(), readings, factors, strict=False
                )
            ]
            return Block(name, attentions, None if rest is None else (rest[0], float(factors[-1]) * rest[1]))
    return f"the output of {name!r} is not its input plus the outputs of its attention and of another module"


def _list_readings(
    model: nn.Module, trace: StreamTrace, block: str, projection: OutputProjection, tolerance: float
) -> Iterator[tuple[LinearNorm | None, Tensor]]:
    """Yield what an attention layer may add to the stream: its projection, or a norm of it."""
    vectors = trace.get(projection.module)
    if vectors is None or vectors.output is None:
        return
    yield None, vectors.output
    for name in trace.calls:
        after = trace.get(name) if name.startswith(f"{block}.") else None
        if after is not None and after.input is not None and are_close(after.input, vectors.output, 0.0):
            norm = LinearNorm.fit(model.get_submodule(name), after, tolerance)
            if norm is not None and after.output is not None:
                yield norm, after.output
