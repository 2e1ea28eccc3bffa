"""Direct logit attribution: what each head, MLP, embedding and bias adds to a logit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from regard.capture.output_projections import find_weight
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.interventions.model_inputs import find_tolerance, run_model
from regard.interventions.residual_stream import (
    Block,
    LinearNorm,
    StreamTrace,
    are_close,
    find_factor,
    list_blocks,
    split_block,
)
from regard.lens.recording import Recording
from regard.lens.table import Table
from regard.lens.watch import watch

Tensor = Any  # the types of torch are not followed
OPERATION = "logit_attribution"


@dataclass(frozen=True)
class LogitAttribution:
    """What the parts of a model add to a logit, or to the difference of two; `logit_attribution` returns it.

    Attributes:
        logit: The logit, or the difference. If the model limits its logits by a soft cap, it is the one before the cap.
        parts: One row for each part, in the order in which they run: `part` ("embedding", "head", "mlp" for what a
            block adds beside its attention, "bias"), `module`, `layer` and `head` (None for a part without one), and
            `logit`, what it adds. The column adds up to `logit`.

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
    of what every part added. Effects of a part through later layers are not counted; `attribution` and `effects` count
    them. The output projections, the norms and the unembedding are found by their numbers. If the parts do not add up,
    the model is refused.

    Args:
        model: A causal language model in eval mode, whose blocks add to a stream (pre-norm).
        inputs: Token ids (batch, n), or a mapping with the keyword arguments of the model.
        answer: Id of the token.
        wrong: Id of another token; its logit is subtracted.
        position: The position whose logits are split.
        batch: The batch entry.

    Returns:
        The parts. They add up to the logit, up to rounding.

    Raises:
        ArgumentTypeError: If `inputs` has the wrong type.
        ArgumentError: If the model cannot be split into parts; the message says why.
        IndexOutOfRangeError: If there is no such token, position or batch entry.
        NotCapturedError: If a layer was not captured.

    >>> import torch, transformers
    >>> from regard.interventions import logit_attribution
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    >>> found = logit_attribution(transformers.GPT2LMHeadModel(config).eval(), torch.arange(5)[None], answer=3)
    >>> len(found.heads), abs(sum(found.parts.column("logit")) - found.logit) < 1e-5
    (4, True)
    """
    size, length = _find_size(inputs)
    for name, index, count in (("position", position, length), ("batch", batch, size)):
        if not -count <= index < count:
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"{name}={index}",
                expected=f"a number from 0 to {count - 1}, or negative from the end",
                hint="Positions count all tokens, padding included.",
            )
    trace = StreamTrace(size, length, position)
    watching = watch(model, values=True)
    watching.binds_context = True
    with torch.no_grad(), watching as recording, trace.attach(model):
        output = run_model(model, inputs, OPERATION)
    logits = trace.pick(getattr(output, "logits", output))
    with torch.no_grad():
        return _split(model, trace, recording, logits, answer, wrong, position, batch % size)


def _find_size(inputs: Any) -> tuple[int, int]:
    """Return batch size and number of tokens."""
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
    return int(tokens.shape[0]), int(tokens.shape[1])


def _refuse(model: nn.Module, reason: str) -> NoReturn:
    raise ArgumentError(
        OPERATION,
        received=f"a {type(model).__name__}: {reason}",
        expected="a causal model whose logits are a linear layer of a norm of a sum of parts",
        hint="interventions.attribution and interventions.effects need no such structure.",
    )


def _split(
    model: nn.Module,
    trace: StreamTrace,
    recording: Recording,
    logits: Tensor | None,
    answer: int,
    wrong: int | None,
    position: int,
    batch: int,
) -> LogitAttribution:
    if logits is None:
        _refuse(model, "it returns no logits of shape (batch, n, vocabulary)")
    blocks = _split_blocks(model, trace, recording)
    unembedding = _find_unembedding(model, trace, logits)
    stream = trace.get(blocks[-1].name)
    assert stream is not None and stream.output is not None
    norm, factor = _find_final_norm(model, trace, unembedding, stream.output)
    for name, token in (("answer", answer), ("wrong", wrong)):
        if token is not None and not 0 <= token < logits.shape[-1]:
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"{name}={token}",
                expected=f"the id of one of {logits.shape[-1]:,} tokens",
                hint="With a tokenizer: tokenizer.convert_tokens_to_ids(token).",
            )
    module = model.get_submodule(unembedding.module)
    direction, constant = _read_direction(module, answer, wrong, unembedding.factor)

    def project(vectors: Tensor) -> Tensor:
        """Return what vectors (…, batch, width) in the stream add to the logit, (…)."""
        mapped = vectors if norm is None else norm.apply(vectors)
        return factor * mapped[..., batch, :] @ direction

    rows = Table()
    first = trace.get(blocks[0].name)
    assert first is not None and first.input is not None
    _add(rows, "embedding", "", None, None, project(first.input))
    for layer, block in enumerate(blocks):
        _add_block(rows, layer, block, recording, position, project)
    if norm is not None and bool(norm.bias.any()):
        _add(rows, "bias", "final norm", None, None, factor * norm.bias @ direction)
    if constant:
        _add(rows, "bias", unembedding.module, None, None, constant)
    found = trace.get(unembedding.module)
    assert found is not None and found.output is not None
    target = unembedding.factor * (
        found.output[batch, answer] - (0 if wrong is None else found.output[batch, wrong])
    )
    total, size = sum(rows.column("logit")), sum(abs(value) for value in rows.column("logit"))
    if not abs(total - float(target)) <= find_tolerance(model) * max(size, 1e-30):
        _refuse(model, f"its parts add up to {total:.6g}, and the logit is {float(target):.6g}")
    return LogitAttribution(float(target), rows)


def _split_blocks(model: nn.Module, trace: StreamTrace, recording: Recording) -> list[Block]:
    """Split every block of the model, and check that each reads what the last one wrote."""
    tolerance, blocks, last = find_tolerance(model), [], None
    for name in recording:
        if name not in recording._projections:
            _refuse(model, f"{name!r} has no output projection: {recording._projections.find_fault(name)}")
    for name in list_blocks(model, list(recording), OPERATION):
        inside = {
            layer: recording._projections[layer] for layer in recording if f"{layer}.".startswith(f"{name}.")
        }
        block = split_block(model, trace, name, inside, tolerance)
        if isinstance(block, str):
            _refuse(model, block)
        vectors = trace.get(name)
        assert vectors is not None and vectors.input is not None
        if last is not None and not are_close(vectors.input, last, tolerance):
            _refuse(model, f"{name!r} does not read what the block before it wrote")
        last = vectors.output
        blocks.append(block)
    return blocks


@dataclass(frozen=True)
class _Unembedding:
    module: str
    factor: float  # of the logits, after the layer


def _find_unembedding(model: nn.Module, trace: StreamTrace, logits: Tensor) -> _Unembedding:
    """Find the linear layer that computes the logits, up to a factor or a soft cap."""
    tolerance = find_tolerance(model)
    own = getattr(model, "get_output_embeddings", lambda: None)()
    for name in reversed(list(trace.calls)):
        module, vectors = model.get_submodule(name), trace.get(name)
        if vectors is None or vectors.output is None or find_weight(module) is None:
            continue
        factor = find_factor(vectors.output, logits, tolerance)
        if factor is not None:
            return _Unembedding(name, factor)
        if module is own and vectors.output.shape == logits.shape:
            return _Unembedding(name, 1.0)
    _refuse(model, "no linear layer computes its logits")


def _find_final_norm(
    model: nn.Module, trace: StreamTrace, unembedding: _Unembedding, stream: Tensor
) -> tuple[LinearNorm | None, float]:
    """Find the norm between the stream and the unembedding, and the factor after it."""
    tolerance = find_tolerance(model)
    read = trace.get(unembedding.module)
    if read is None or read.input is None:
        _refuse(model, "its unembedding runs several times")
    factor = find_factor(stream, read.input, tolerance)
    if factor is not None:
        return None, factor
    for name in reversed(list(trace.calls)):
        vectors = trace.get(name)
        if vectors is None or vectors.input is None or vectors.output is None:
            continue
        if are_close(vectors.input, stream, tolerance):
            factor = find_factor(vectors.output, read.input, tolerance)
            norm = None if factor is None else LinearNorm.fit(model.get_submodule(name), vectors, tolerance)
            if norm is not None and factor is not None:
                return norm, factor
    _refuse(model, "no LayerNorm or RMSNorm leads from its last block to its unembedding")


def _read_direction(module: nn.Module, answer: int, wrong: int | None, factor: float) -> tuple[Tensor, float]:
    """Return the direction in the stream of the logit, (width,), and its constant."""
    weight, bias = find_weight(module), getattr(module, "bias", None)
    assert weight is not None
    direction, constant = weight[:, answer].cpu().double(), 0.0 if bias is None else float(bias[answer])
    if wrong is not None:
        direction = direction - weight[:, wrong].cpu().double()
        constant -= 0.0 if bias is None else float(bias[wrong])
    return factor * direction, factor * constant


def _add(rows: Table, part: str, module: str, layer: int | None, head: int | None, logit: Any) -> None:
    rows.append({"part": part, "module": module, "layer": layer, "head": head, "logit": float(logit)})


def _add_block(
    rows: Table, layer: int, block: Block, recording: Recording, position: int, project: Any
) -> None:
    for attention in block.attentions:
        (call,) = recording.calls(attention.module)
        assert call.output is not None
        output = call.output[:, :, position].cpu().double()  # (batch, heads, value_dim)
        weight, bias = attention.projection.weight.cpu().double(), attention.projection.bias
        by_head = project(attention.map(torch.einsum("bhd,hdw->hbw", output, weight)))
        for head, logit in enumerate(by_head):
            _add(rows, "head", attention.module, layer, head, logit)
        constant = 0.0
        if bias is not None:
            constant += float(project(attention.map(bias.cpu().double().expand(len(output), -1))))
        if attention.norm is not None and bool(attention.norm.bias.any()):
            added = attention.factor * attention.norm.bias.expand(len(output), -1)
            constant += float(project(added))
        if constant:
            _add(rows, "bias", attention.projection.module, layer, None, constant)
    if block.rest is not None:
        name, vectors = block.rest
        _add(rows, "mlp", name, layer, None, project(vectors))
