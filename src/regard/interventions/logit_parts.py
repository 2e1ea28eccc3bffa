"""Direct logit attribution: what each head, MLP, embedding and bias adds to a logit.

Nothing is looked up by name. A part is recognised by its numbers: the output of a block must be its input plus the
outputs of its attention layers and of one more module, each times a constant, up to rounding. Models in which that
does not hold are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from regard.capture.output_projections import OutputProjection, find_weight
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.interventions.model_runs import find_tolerance, record_run, run_model
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.watch import check_model

Tensor = Any  # the types of torch are not followed
OPERATION = "logit_attribution"


@dataclass(frozen=True)
class LogitAttribution:
    """What each part of a model adds to a logit or logit difference; `logit_attribution` returns it.

    Attributes:
        logit: The logit, or the difference. If the model has a soft cap on its logits, it is the value before the cap.
        parts: One row for each part, in the order in which they run: `part` ("embedding", "head", "mlp" for everything
            else that a block adds, "bias"), `module`, `layer` and `head` (None where they do not apply), and `logit`,
            what the part adds. The column adds up to `logit`.

    >>> from regard.interventions import LogitAttribution
    >>> from regard.lens import Table
    >>> rows = [("embedding", "", 0, 0, 0.5), ("head", "attn", 0, 0, -1.0), ("head", "attn", 0, 1, 2.0)]
    >>> columns = ("part", "module", "layer", "head", "logit")
    >>> found = LogitAttribution(1.5, Table(dict(zip(columns, row)) for row in rows))
    >>> found.heads.column("logit"), sum(found.parts.column("logit")) == found.logit
    ([2.0, -1.0], True)
    """

    logit: float
    parts: Table = field(repr=False)

    @property
    def heads(self) -> Table:
        """The rows of the heads, largest |logit| first."""
        return Table(sorted(self.parts.filter(part="head"), key=lambda row: -abs(row["logit"])))

    def __str__(self) -> str:
        return f"logit {self.logit:.4g}\n\n{self.parts}"


def logit_attribution(
    model: nn.Module,
    inputs: Any,
    answer: int,
    wrong: int | None = None,
    *,
    position: int = -1,
    batch: int = 0,
) -> LogitAttribution:
    """Split a logit into what each head, MLP, embedding and bias adds to it directly.

    The logit is linear in the last residual stream if the scale of the final norm is fixed, and the stream is the sum
    of what all parts added. Effects of a part through later layers are not counted; `attribution` and `effects` include
    them. The output projections, the norms and the unembedding are identified by their values. If the parts do not add
    up, an error is raised.

    Args:
        model: A causal language model in eval mode, whose blocks add to a stream (pre-norm).
        inputs: Token ids (batch, n), or a mapping with the keyword arguments of the model.
        answer: Id of the token whose logit is split.
        wrong: Id of another token; its logit is subtracted.
        position: The position whose logits are split.
        batch: The batch entry.

    Returns:
        The parts. They add up to the logit, up to rounding.

    Raises:
        ArgumentTypeError: If `inputs` has the wrong type.
        ArgumentError: If the model cannot be split into parts, or the parts do not add up; the message says why.
        IndexOutOfRangeError: If there is no such token, position or batch entry.
        NotCapturedError: If a layer was not captured.

    >>> import torch, transformers
    >>> from regard.interventions import logit_attribution
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    >>> found = logit_attribution(transformers.GPT2LMHeadModel(config).eval(), torch.arange(5)[None], answer=3)
    >>> len(found.heads), abs(sum(found.parts.column("logit")) - found.logit) < 1e-5
    (4, True)
    """
    model = check_model(model, OPERATION)
    tokens = inputs
    if isinstance(inputs, Mapping):
        names = ("input_ids", "inputs_embeds", *inputs)
        tokens = next((inputs[name] for name in names if isinstance(inputs.get(name), torch.Tensor)), None)
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2:
        raise ArgumentError(
            OPERATION,
            received="inputs without tokens of shape (batch, n)",
            expected="token ids (batch, n), or a mapping with input_ids",
            hint='With a tokenizer: tokenizer(text, return_tensors="pt").',
        )
    size, length = tokens.shape[:2]
    for name, index, count in (("position", position, length), ("batch", batch, size)):
        if not -count <= index < count:
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"{name}={index}",
                expected=f"a number from 0 to {count - 1}, or negative from the end",
                hint="Positions count all tokens, including padding.",
            )
    trace = _StreamTrace(size, length, position)

    def run() -> Any:
        with torch.no_grad(), trace.attach(model):
            return run_model(model, inputs, OPERATION)

    output, recording = record_run(model, run, values=True)
    logits = trace.pick(getattr(output, "logits", output))
    if logits is None:
        _refuse(model, "it returns no logits of shape (batch, n, vocabulary)")
    with torch.no_grad():
        blocks = _split_blocks(model, trace, recording)
        unembedding, logit_factor = _find_unembedding(model, trace, logits)
        norm, factor = _find_final_norm(model, trace, unembedding, blocks[-1].output)
        for name, token in (("answer", answer), ("wrong", wrong)):
            if token is not None and not 0 <= token < logits.shape[-1]:
                raise IndexOutOfRangeError(
                    OPERATION,
                    received=f"{name}={token}",
                    expected=f"the id of one of {logits.shape[-1]:,} tokens",
                    hint="With a tokenizer: tokenizer.convert_tokens_to_ids(token).",
                )

        def subtract(by_token: Tensor) -> Tensor:
            """Return the logit of the answer, less that of the wrong token, from numbers (…, vocabulary)."""
            chosen = by_token[..., answer].cpu().double()
            chosen = chosen if wrong is None else chosen - by_token[..., wrong].cpu().double()
            return logit_factor * chosen

        module = model.get_submodule(unembedding)
        direction = subtract(find_weight(module))  # (width,), in the stream after the norm

        def project(vectors: Tensor) -> Tensor:
            """Return what vectors (…, batch, width) in the stream add to the logit, (…)."""
            mapped = vectors if norm is None else norm.apply(vectors)
            return factor * mapped[..., batch, :] @ direction

        rows = Table()

        def add(part: str, module: str, layer: int | None, head: int | None, logit: Any) -> None:
            row = {"part": part, "module": module, "layer": layer, "head": head, "logit": float(logit)}
            rows.append(row)

        add("embedding", "", None, None, project(blocks[0].input))
        for layer, block in enumerate(blocks):
            _add_block(add, layer, block, recording, position, project)
        if norm is not None and bool(norm.bias.any()):
            add("bias", "final norm", None, None, factor * norm.bias @ direction)
        bias = getattr(module, "bias", None)
        constant = 0.0 if bias is None else float(subtract(bias))
        if constant:
            add("bias", unembedding, None, None, constant)
        target = float(subtract(trace.get(unembedding).output[batch % size]))
    total, magnitude = sum(rows.column("logit")), sum(abs(value) for value in rows.column("logit"))
    if not abs(total - target) <= find_tolerance(model) * max(magnitude, 1e-30):
        _refuse(model, f"its parts add up to {total:.6g}, but the logit is {target:.6g}")
    return LogitAttribution(target, rows)


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ArgumentError(
        OPERATION,
        received=f"a {type(model).__name__}: {reason}",
        expected="a causal model that computes its logits from a sum of parts, with a norm and a linear layer",
        hint="Use interventions.attribution or interventions.effects, which do not need this structure.",
    )


class _ModuleVectors(NamedTuple):
    """What one call of a module read and wrote at the position, (batch, width) each; None for other shapes."""

    input: Tensor = None
    output: Tensor = None


class _StreamTrace:
    """The vectors at one position that go into and come out of every module, in the order in which the modules end."""

    def __init__(self, batch: int, length: int, position: int) -> None:
        self.calls: dict[str, list[_ModuleVectors]] = {}
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
                vectors = _ModuleVectors(starts[name].pop(), self.pick(output))
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

    def get(self, name: str) -> _ModuleVectors:
        """Return the vectors of a module that ran once; no vectors otherwise."""
        calls = self.calls.get(name, ())
        return calls[0] if len(calls) == 1 else _ModuleVectors()


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
    def fit(cls, module: nn.Module, vectors: Sequence[Tensor], tolerance: float) -> LinearNorm | None:
        """Read a norm from what it returns for probes; None if the module is not such a norm.

        Args:
            vectors: What the module read and returned, (…, width) each, or None.
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
        return norm if _are_close(norm.apply(x) + bias, y, tolerance) else None


def _are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether vectors agree relative to the length of the second."""
    return a.shape == b.shape and bool(((a - b).norm(dim=-1) <= tolerance * b.norm(dim=-1)).all())


def _find_factor(a: Tensor, b: Tensor, tolerance: float) -> float | None:
    """Return the number c with b = c · a; None if there is none."""
    if a.shape != b.shape or not bool(a.any()):
        return None
    factor = float((a * b).sum() / a.square().sum())
    return factor if _are_close(factor * a, b, tolerance) else None


class _AddedAttention(NamedTuple):
    """An attention layer as a block adds it: its projection, a norm after it or None, and a constant factor."""

    module: str
    projection: OutputProjection
    norm: LinearNorm | None
    factor: float

    def map(self, vectors: Tensor) -> Tensor:
        """Map vectors after the output projection, (…, batch, width), to what they add to the stream."""
        return self.factor * (vectors if self.norm is None else self.norm.apply(vectors))


class _Block(NamedTuple):
    """What one block reads, writes, (batch, width) each, and adds to the stream.

    Attributes:
        input: The stream before it.
        output: The stream after it.
        attentions: Its attention layers.
        rest: Name and vectors of the module that adds the rest, such as the MLP; None if attention is all.
    """

    input: Tensor
    output: Tensor
    attentions: list[_AddedAttention]
    rest: tuple[str, Tensor] | None


def _split_blocks(model: nn.Module, trace: _StreamTrace, recording: Recording) -> list[_Block]:
    """Split every block of the stack that the attention layers are in, each of which reads what the last one wrote."""
    tolerance, projections = find_tolerance(model), recording._projections
    for name in recording:
        if name not in projections:
            _refuse(model, f"{name!r} has no output projection: {projections.find_fault(name)}")
    stacks = {match[1] if (match := re.match(r"(.*?)\.?\b\d+(?:\.|$)", name)) else None for name in recording}
    if len(stacks) != 1 or None in stacks:
        raise ArgumentError(
            OPERATION,
            received=f"attention layers in {len(stacks)} stacks ({', '.join(map(str, stacks))})"
            if None not in stacks
            else "attention layers that are not in a list of blocks",
            expected="one stack of blocks, such as model.layers",
            hint="Encoder-decoder models are not supported.",
        )
    stack = str(*stacks)
    blocks: list[_Block] = []
    for child, _ in model.get_submodule(stack).named_children():
        name = f"{stack}.{child}" if stack else child
        inside = {layer: projections[layer] for layer in recording if f"{layer}.".startswith(f"{name}.")}
        block = _split_block(model, trace, name, inside, tolerance)
        if blocks and not _are_close(block.input, blocks[-1].output, tolerance):
            _refuse(model, f"{name!r} does not read the output of the previous block")
        blocks.append(block)
    return blocks


def _split_block(
    model: nn.Module,
    trace: _StreamTrace,
    name: str,
    projections: Mapping[str, OutputProjection],
    tolerance: float,
) -> _Block:
    """Find what a block adds to the stream, from the output projection of each attention layer inside it."""
    whole = trace.get(name)
    if whole.input is None or whole.output is None or whole.input.shape != whole.output.shape:
        _refuse(model, f"{name!r} does not map a stream (batch, n, width) to another once")
    added, size = whole.output - whole.input, whole.output.norm() + whole.input.norm()
    choices = [
        list(_list_readings(model, trace, name, projection, tolerance)) for projection in projections.values()
    ]
    others = [
        (other, output)
        for other in trace.calls
        if other.startswith(f"{name}.")
        and not any(other == layer or other.startswith(f"{layer}.") for layer in projections)
        and (output := trace.get(other).output) is not None
        and output.shape == added.shape
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
                _AddedAttention(module, projection, norm, float(factor))
                for (module, projection), (norm, _), factor in zip(
                    projections.items(), readings, factors, strict=False
                )
            ]
            return _Block(*whole, attentions, rest and (rest[0], float(factors[-1]) * rest[1]))
    _refuse(
        model,
        f"the output of {name!r} is not its input plus the outputs of its attention and of another module",
    )


def _list_readings(
    model: nn.Module, trace: _StreamTrace, block: str, projection: OutputProjection, tolerance: float
) -> Iterator[tuple[LinearNorm | None, Tensor]]:
    """Yield what an attention layer may add to the stream: its projection, or a norm of it."""
    written = trace.get(projection.module).output
    if written is None:
        return
    yield None, written
    for name in trace.calls:
        after = trace.get(name)
        is_next = name.startswith(f"{block}.") and after.input is not None
        if is_next and _are_close(after.input, written, 0.0):
            norm = LinearNorm.fit(model.get_submodule(name), after, tolerance)
            if norm is not None:
                yield norm, after.output


def _find_unembedding(model: nn.Module, trace: _StreamTrace, logits: Tensor) -> tuple[str, float]:
    """Find the linear layer that computes the logits, up to a factor or a soft cap; return its name and the factor."""
    tolerance = find_tolerance(model)
    own = getattr(model, "get_output_embeddings", lambda: None)()
    for name in reversed(list(trace.calls)):
        module, output = model.get_submodule(name), trace.get(name).output
        if output is None or find_weight(module) is None:
            continue
        factor = _find_factor(output, logits, tolerance)
        if factor is not None:
            return name, factor
        if module is own and output.shape == logits.shape:
            return name, 1.0
    _refuse(model, "no linear layer computes its logits")


def _find_final_norm(
    model: nn.Module, trace: _StreamTrace, unembedding: str, stream: Tensor
) -> tuple[LinearNorm | None, float]:
    """Find the norm between the stream and the unembedding, and the factor after it."""
    tolerance, read = find_tolerance(model), trace.get(unembedding).input
    if read is None:
        _refuse(model, "its unembedding runs several times")
    factor = _find_factor(stream, read, tolerance)
    if factor is not None:
        return None, factor
    for name in reversed(list(trace.calls)):
        vectors = trace.get(name)
        if vectors.input is None or vectors.output is None:
            continue
        if _are_close(vectors.input, stream, tolerance):
            factor = _find_factor(vectors.output, read, tolerance)
            norm = None if factor is None else LinearNorm.fit(model.get_submodule(name), vectors, tolerance)
            if norm is not None and factor is not None:
                return norm, factor
    _refuse(model, "no LayerNorm or RMSNorm leads from its last block to its unembedding")


def _add_block(
    add: Callable[..., None], layer: int, block: _Block, recording: Recording, position: int, project: Any
) -> None:
    """Add the rows of the heads, biases and the rest of a block."""
    for attention in block.attentions:
        (call,) = recording.calls(attention.module)
        assert call.output is not None
        output = call.output[:, :, position].cpu().double()  # (batch, heads, value_dim)
        weight, bias = attention.projection.weight.cpu().double(), attention.projection.bias
        by_head = project(attention.map(torch.einsum("bhd,hdw->hbw", output, weight)))
        for head, logit in enumerate(by_head):
            add("head", attention.module, layer, head, logit)
        constant = 0.0
        if bias is not None:
            constant += float(project(attention.map(bias.cpu().double().expand(len(output), -1))))
        if attention.norm is not None and bool(attention.norm.bias.any()):
            added = attention.factor * attention.norm.bias.expand(len(output), -1)
            constant += float(project(added))
        if constant:
            add("bias", attention.projection.module, layer, None, constant)
    if block.rest is not None:
        name, vectors = block.rest
        add("mlp", name, layer, None, project(vectors))
