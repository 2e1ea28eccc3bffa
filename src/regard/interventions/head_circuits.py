"""Circuits of heads: what a head attends to and what it writes, as products of its weights (QK and OV).

Nothing is looked up by name. In one run, the linear layer is sought whose outputs are the queries, keys or values of a
call, rotated or not, and the layer that reads the outputs of the heads. A circuit whose vectors are not those of one
linear layer is refused, for example if a norm of queries and keys comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import nn

from regard.capture.output_projections import find_weight
from regard.diagnosis.projections import find_head_rows
from regard.diagnosis.subject import CallLog, LoggedCall, is_norm, log_calls
from regard.errors import ArgumentError, IndexOutOfRangeError
from regard.interventions.factored_matrix import FactoredMatrix
from regard.interventions.intervene import find_layers
from regard.interventions.logit_parts import LinearNorm
from regard.interventions.model_runs import find_tolerance, run_model
from regard.lens.watch import check_model

Tensor = Any  # the types of torch are not followed
OPERATION = "circuits"
MIN_TOKENS = 4  # fewer vectors may agree by chance


def circuits(
    model: nn.Module,
    inputs: Any,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    fold_norms: bool = False,
) -> Circuits:
    """Find the query, key, value and output weights of every head, for its QK and OV circuits.

    The model runs once, to see which rows of which linear layers compute the queries, keys and values of each head.
    That holds for fused projections in any order, grouped heads and `nn.MultiheadAttention`. The weights are not
    copied.

    Args:
        model: The model, as in `regard.watch`.
        inputs: Any inputs with 4 or more tokens: a tensor, or a mapping with the keyword arguments of the model.
        layers: Numbers of attention layers in the order in which they run, names of modules, or patterns with `*`.
            Default: all.
        fold_norms: Multiply the query, key and value weights by the gain of the norm before them. If that norm is a
            LayerNorm, also subtract the mean that it removes, from these weights and from the output weights. This is
            what TransformerLens does with fold_ln and center_writing_weights.

    Returns:
        The circuits.

    Raises:
        ArgumentTypeError: If `inputs` has the wrong type.
        ArgumentError: If `layers` matches nothing, the inputs have fewer than 4 tokens, or `fold_norms` is set and the
            norm before a layer is not known. If a circuit cannot be computed, its method raises the error.
        NotCapturedError: If the model has no attention that is captured.

    >>> import torch, transformers
    >>> config = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> found = circuits(model, torch.arange(5)[None])
    >>> found
    Circuits(2 layers, 4 heads)
    >>> found.ov(1, 0), found.qk(1)
    (FactoredMatrix(8 × 8, rank 4), FactoredMatrix(2 × 8 × 8, rank 4))
    >>> embedding = model.get_input_embeddings().weight
    >>> embedding @ found.ov(1, 0) @ model.lm_head.weight.T  # from the token that is read to the logits
    FactoredMatrix(9 × 9, rank 4)
    >>> found.composition("K").shape
    torch.Size([2, 2, 2, 2])
    """
    model = check_model(model, OPERATION)
    with torch.no_grad(), log_calls(model, modules=True) as log:
        run_model(model, inputs, OPERATION)
    recording = log.recording
    names = find_layers(layers, recording, OPERATION)
    calls = {logged.module: logged for logged in reversed(log.calls)}  # the first call of each
    tolerance = find_tolerance(model)
    with torch.no_grad():
        found = {name: _read_layer(model, log, name, calls.get(name), tolerance) for name in names}
        if fold_norms:
            found = {name: _fold_norm(model, log, name, layer, tolerance) for name, layer in found.items()}
    return Circuits(found)


class HeadWeights(NamedTuple):
    """The weights of the heads of a layer, or of one head, without the first axis; `Circuits.weights` returns them.

    If heads share keys and values, each has a copy.

    Attributes:
        W_Q: (heads, d_model, head_dim).
        W_K: (heads, d_model, head_dim).
        W_V: (heads, d_model, value_dim).
        W_O: (heads, value_dim, d_model).
        scale: What query · key is multiplied with, also by the layer before the call.
        is_rotated: Whether queries and keys are rotated by their positions before the product.
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    scale: float
    is_rotated: bool


@dataclass(frozen=True)
class _Projection:
    """The weights of all heads of a layer for their queries, keys or values.

    Args:
        weight: (in, out), of the linear layer.
        starts: First column of each query head.
        dim: Number of columns of a head.
        factor: What the vectors are multiplied with after the layer.
        is_rotated: Whether they are rotated after it.
        input: What the layer read, (batch, n, in); None if that is not known.
        norm: The norm to fold into the weights; None for none.
    """

    weight: Tensor
    starts: list[int]
    dim: int
    factor: float = 1.0
    is_rotated: bool = False
    input: Tensor | None = None
    norm: LinearNorm | None = None

    def select(self, heads: Sequence[int]) -> Tensor:
        """Return the weights of some heads, (heads, in, dim)."""
        columns = [self.weight[:, self.starts[head] : self.starts[head] + self.dim] for head in heads]
        weights = torch.stack(columns)
        if self.norm is not None:
            weights = weights * self.norm.gain.to(weights)[:, None]
            weights = weights - weights.mean(1, keepdim=True) if self.norm.is_centred else weights
        return weights


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer.

    Args:
        heads: Number of query heads.
        scale: Scale of the call.
        parts: The projections, by "query", "key" and "value"; or why one is not known.
        out: (heads, value_dim, d_model); or why it is not known.
    """

    heads: int
    scale: float
    parts: dict[str, _Projection | str]
    out: Tensor | str

    @property
    def is_cross_attention(self) -> bool:
        """Whether query and key are computed from different vectors."""
        query, key = (getattr(self.parts[name], "input", None) for name in ("query", "key"))
        return query is not None and key is not None and not torch.equal(query, key)


class Circuits:
    """The QK and OV circuits of the heads of a model; `regard.interventions.circuits` returns them.

    Vectors are rows: what a head writes for vectors x (n, d_model) is `x @ found.ov(layer, head)`, and the scores
    before the scale are `x @ found.qk(layer, head) @ x.T`. Biases are not included, and rotary positions are not
    applied: a score of a rotated head is that of a query and a key at the same position.

    Attributes:
        modules: Names of the attention layers, in the order in which they ran.
    """

    def __init__(self, layers: dict[str, _Layer]) -> None:
        self._layers = layers
        self.modules = list(layers)

    def __repr__(self) -> str:
        heads = sum(layer.heads for layer in self._layers.values())
        return f"Circuits({len(self.modules)} layer{'s' * (len(self.modules) != 1)}, {heads} heads)"

    def qk(self, layer: int | str, head: int | None = None) -> FactoredMatrix:
        """Return W_Q W_Kᵀ: how a residual vector as the query scores one as the key.

        Args:
            layer: Number of the layer in `modules`, or its name.
            head: The query head. Default: all, as a leading axis.

        Returns:
            (d_model, d_model), or (heads, d_model, d_model), of rank head_dim.

        Raises:
            ArgumentError: If queries or keys of the layer are not those of a linear layer; the message says why.
            IndexOutOfRangeError: If there is no such layer or head.
        """
        return FactoredMatrix(self._select(layer, head, "query"), self._select(layer, head, "key").mT)

    def ov(self, layer: int | str, head: int | None = None) -> FactoredMatrix:
        """Return W_V W_O: what the head writes to the residual stream for a residual vector that it attends to.

        Args:
            layer: Number of the layer in `modules`, or its name.
            head: The query head. Default: all, as a leading axis.

        Returns:
            (d_model, d_model), or (heads, d_model, d_model), of rank value_dim.

        Raises:
            ArgumentError: If values or outputs of the layer are not those of a linear layer; the message says why.
            IndexOutOfRangeError: If there is no such layer or head.
        """
        return FactoredMatrix(self._select(layer, head, "value"), self._select(layer, head, "out"))

    def weights(self, layer: int | str, head: int | None = None) -> HeadWeights:
        """Return the weights of the heads of a layer, or of one head.

        Args:
            layer: Number of the layer in `modules`, or its name.
            head: The query head. Default: all, as a leading axis.

        Returns:
            The weights, copies for each head.

        Raises:
            ArgumentError: If one of them is not known; the message says why.
            IndexOutOfRangeError: If there is no such layer or head.
        """
        W_Q, W_K, W_V, W_O = (self._select(layer, head, part) for part in ("query", "key", "value", "out"))
        held = self._layers[self._name(layer)]
        query, key = held.parts["query"], held.parts["key"]
        assert isinstance(query, _Projection) and isinstance(key, _Projection)
        is_rotated = query.is_rotated or key.is_rotated
        return HeadWeights(W_Q, W_K, W_V, W_O, held.scale * query.factor * key.factor, is_rotated)

    def composition(self, mode: Literal["Q", "K", "V"]) -> Tensor:
        """Return how much of what each head writes is read by the queries, keys or values of each later head.

        The score of two heads is ‖M₁ M₂‖ / (‖M₁‖ ‖M₂‖) in Frobenius norms, where M₁ is the OV circuit of the earlier
        head, and M₂ of the later one is its QK circuit ("Q"), the transpose of it ("K") or its OV circuit ("V"), as in
        "A Mathematical Framework for Transformer Circuits". Random matrices have scores near 1/√d_model.

        Args:
            mode: "Q", "K" or "V".

        Returns:
            (layers, heads, layers, heads): writing layer and head, then reading layer and head. It is 0 where the
            reading layer is not later, and for heads that a layer does not have.

        Raises:
            ArgumentError: If `mode` has another value, a circuit is not known, or layers do not read one residual
                stream: cross-attention, or another width. For a model with two streams of one width, such as an encoder
                and a decoder, select the layers of one of them with `circuits(layers=…)`.
        """
        if mode not in ("Q", "K", "V"):
            raise ArgumentError(
                "circuits.composition",
                received=f"mode={mode!r}",
                expected='"Q", "K" or "V"',
                hint='"K" is the composition of an induction head with a previous-token head.',
            )
        writers, readers = [], []
        for name, layer in self._layers.items():
            if layer.is_cross_attention:
                _refuse(name, "it is cross-attention, which reads another stream than it writes to")
            ov = self.ov(name)
            right = ov if mode == "V" else self.qk(name) if mode == "Q" else self.qk(name).T
            # (heads, rank, d_model) and (heads, d_model, rank), each with the norms of the whole products
            writers.append(ov.T.reduce_columns().mT)
            readers.append(right.reduce_columns())
            if writers[-1].shape[-1] != writers[0].shape[-1]:
                _refuse(
                    name, f"it writes vectors of {writers[-1].shape[-1]} numbers, not {writers[0].shape[-1]}"
                )
        heads = max(layer.heads for layer in self._layers.values())
        scores = writers[0].new_zeros(len(writers), heads, len(writers), heads)
        for i, writer in enumerate(writers):
            for j, reader in enumerate(readers[i + 1 :], i + 1):
                sizes = torch.linalg.matrix_norm(reader.to(writer))
                flat = reader.to(writer).transpose(0, 1).flatten(1)  # (d_model, heads · rank)
                for head, left in enumerate(writer):
                    product = (left @ flat).unflatten(1, (len(reader), -1)).transpose(0, 1)
                    score = torch.linalg.matrix_norm(product) / (torch.linalg.matrix_norm(left) * sizes)
                    scores[i, head, j, : len(reader)] = score
        return scores

    def _name(self, layer: int | str) -> str:
        if isinstance(layer, str) and layer in self._layers:
            return layer
        if isinstance(layer, int) and -len(self.modules) <= layer < len(self.modules):
            return self.modules[layer]
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"layer={layer!r}",
            expected=f"a number from 0 to {len(self.modules) - 1}, or a name in circuits.modules",
            hint="Numbers count the layers that were selected, in the order in which they ran.",
        )

    def _select(self, layer: int | str, head: int | None, part: str) -> Tensor:
        """Return the weights of one part, of all heads or of one."""
        name = self._name(layer)
        held = self._layers[name]
        if head is not None and not -held.heads <= head < held.heads:
            raise IndexOutOfRangeError(
                OPERATION,
                received=f"head={head}",
                expected=f"a number from 0 to {held.heads - 1}",
                hint="Heads are query heads; heads that share keys and values have numbers of their own.",
            )
        found = held.out if part == "out" else held.parts[part]
        if isinstance(found, str):
            _refuse(name, found)
        heads = range(held.heads) if head is None else [head % held.heads]
        weights = found.select(heads) if isinstance(found, _Projection) else found[list(heads)]
        return weights if head is None else weights[0]


def _refuse(name: str, reason: str) -> NoReturn:
    raise ArgumentError(
        OPERATION,
        received=f"layer {name!r}: {reason}",
        expected="queries, keys and values that linear layers compute, and a linear layer that reads the outputs",
        hint="Select other layers with layers=, or another circuit: a norm of queries and keys leaves ov() as it is.",
    )


def _read_layer(
    model: nn.Module, log: CallLog, name: str, logged: LoggedCall | None, tolerance: float
) -> _Layer:
    """Find the weights of a layer from the log of a run."""
    projections = log.recording._projections
    call = log.recording.calls(name)[0]
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    out = projections[name].weight if name in projections else projections.find_fault(name)
    native = model.get_submodule(name)
    native = getattr(native, "self_attn", native)
    parts: dict[str, _Projection | str]
    if isinstance(native, nn.MultiheadAttention):
        parts = dict(_read_native(native))
    elif logged is None:
        parts = dict.fromkeys(
            ("query", "key", "value"), "it computes its own softmax, so its query is not known"
        )
    else:
        vectors = {"query": logged.call.query, "key": logged.key, "value": logged.value}
        parts = {
            part: _read_projection(model, logged, part, x, heads, tolerance) for part, x in vectors.items()
        }
    return _Layer(heads, call.scale, parts, out)


def _read_native(module: nn.MultiheadAttention) -> Iterator[tuple[str, _Projection]]:
    """Yield the projections of torch's own layer, whose weights are parameters of its own."""
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    starts = [head * module.head_dim for head in range(module.num_heads)]
    for part, weight in zip(("query", "key", "value"), weights, strict=True):
        yield part, _Projection(weight.detach().T, starts, module.head_dim)


def _read_projection(
    model: nn.Module, logged: LoggedCall, part: str, vectors: Tensor, heads: int, tolerance: float
) -> _Projection | str:
    """Find the linear layer of the queries, keys or values of a call; return why there is none."""
    if vectors.ndim != 4 or heads % vectors.shape[1]:
        return f"its {part} has the shape {tuple(vectors.shape)}, without an axis of heads"
    if vectors.shape[0] * vectors.shape[2] < MIN_TOKENS:
        raise ArgumentError(
            OPERATION,
            received=f"inputs with {vectors.shape[0] * vectors.shape[2]} tokens",
            expected=f"at least {MIN_TOKENS} tokens, to recognise the layers that compute queries and keys",
            hint="Any text will do: the circuits do not depend on it.",
        )
    rows = find_head_rows(logged, vectors, tolerance, may_rotate=part != "value")
    if rows is None:
        return f"its {part} is not the output of a linear layer, up to a rotation and a factor"
    weight = find_weight(model.get_submodule(rows.name))
    if weight is None:
        return f"the weight of {rows.name!r} is quantised"
    groups = heads // len(rows.starts)
    starts = [start for start in rows.starts for _ in range(groups)]
    return _Projection(
        weight.detach(), starts, vectors.shape[-1], rows.factor, rows.is_rotated, rows.event.input
    )


def _fold_norm(model: nn.Module, log: CallLog, name: str, layer: _Layer, tolerance: float) -> _Layer:
    """Fold the norm before a layer into its weights, as `circuits(fold_norms=True)` says."""
    parts: dict[str, _Projection | str] = {}
    out = layer.out
    for part, found in layer.parts.items():
        if isinstance(found, _Projection):
            norm = _find_norm(model, log, found.input, tolerance)
            if norm is None:
                _refuse(name, f"its {part} is not computed from the output of a LayerNorm or RMSNorm")
            found = replace(found, norm=norm)
            if part == "query" and norm.is_centred and not isinstance(out, str):
                out = out - out.mean(-1, keepdim=True)
        parts[part] = found
    return replace(layer, parts=parts, out=out)


def _find_norm(model: nn.Module, log: CallLog, x: Tensor | None, tolerance: float) -> LinearNorm | None:
    """Find the norm whose output is x."""
    assert log.recording._trace is not None
    for event in log.recording._trace.events:
        if x is None or event.input is None or event.output is None or event.output.shape != x.shape:
            continue
        module = model.get_submodule(event.name)
        if is_norm(event.name, module) and torch.equal(event.output, x):
            vectors = [tensor.cpu().double() for tensor in (event.input, event.output)]
            norm = LinearNorm.fit(module, vectors, tolerance)
            if norm is not None:
                return norm
    return None
