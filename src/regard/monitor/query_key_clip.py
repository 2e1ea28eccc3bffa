"""`qk_clip`: rescale the query and key weights of heads whose largest score exceeds a limit.

A factor γ = tau / max_score of the scores is divided between the rows of the projections that belong to one head:

- √γ for its query and √γ for its key, if the head has a key of its own;
- γ for its query, if several heads share a key (grouped heads), since a change of the key would change those heads;
- in latent attention (MLA), √γ for the query and key parts without positions, and γ for the rotated part of the query,
  whose key all heads share.

That is exact only if the scores are scaled products of the projections. Modules that compute something else, or may
compute something else, are refused by name.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regard.capture.own_softmax import count_heads
from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.families import ATTENTION_MODULES, FUSED_PROJECTIONS, SEPARATE_PROJECTIONS, AttentionModule
from regard.monitor.training_monitor import Monitor

__all__ = ["ClippedHead", "qk_clip"]

Tensor = Any  # the types of torch are not followed
FusedLayout = Literal["stacked", "by_head"]

# Parts of an attention module that cannot change its scores: value, output, gates of the output, sinks.
# fmt: off
_WITHOUT_SCORES = frozenset({
    "v_proj", "value", "wv", "o_proj", "out_proj", "output_proj", "out", "wo", "Wo", "dense", "c_proj", "proj",
    "g_proj", "gate_proj", "sinks", "sink",
})
# fmt: on
# Before the latent projections of MLA.
_BEFORE_LATENT = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"})
# Classes of transformers that compute what nn.Linear does, with a forward of their own.
_LINEAR_CLASSES = ("Conv1D", "FalconLinear")
# Functions between projections and scores that keep a factor from reaching the scores.
_NOT_LINEAR = re.compile(r"norm|clamp|clip|tanh|soft_?cap", re.IGNORECASE)
_SOFTCAP = re.compile(r"(?!final).*(soft_?cap|logits?_cap)", re.IGNORECASE)

# Step in which a monitor's numbers were last used; the same numbers must not clip twice.
_used_steps: WeakKeyDictionary[Monitor, int] = WeakKeyDictionary()


class ClippedHead(NamedTuple):
    """A head that `qk_clip` rescaled.

    Attributes:
        module: Name of the attention module.
        head: Number of the head in the layer.
        factor: By what its scores were multiplied: tau / max_score.
    """

    module: str
    head: int
    factor: float


def qk_clip(
    model: nn.Module, monitor: Monitor, tau: float = 100.0, *, fused: FusedLayout | None = None
) -> list[ClippedHead]:
    """Rescale the query and key weights of each head whose largest score exceeds `tau`, so that it becomes `tau`.

    Call it after `optimizer.step()`. It uses the numbers of the step that has just ended, once; if that step was not
    monitored, it changes nothing, so use `Monitor(model, every=1)` to limit the scores in every step. Other heads keep
    their weights, bit for bit. Weights are changed in place; the state of the optimiser is not.

    Let γ = tau / max_score. The rows of the query and of the key are multiplied by √γ, also those of biases. If several
    heads share a key (grouped heads), the rows of the query are multiplied by γ. In latent attention (MLA), the query
    and key parts without positions are multiplied by √γ, and the rotated part of the query by γ. This is the QK-clip of
    MuonClip (Kimi K2, arXiv:2507.20534).

    The attention modules of Llama, Mistral, Qwen2, OPT, GPT-2, GPT-NeoX, Phi-3, Falcon, BERT, DeepSeek-V2 and -V3 and
    similar families are supported, and `torch.nn.MultiheadAttention` and `regard.nn.MultiheadAttention`. Other modules
    need one linear projection for queries and one for keys, named q_proj and k_proj, query and key, or wq and wk, or
    one for both with `fused`. The scores must be products of these projections, rotated or not. `qk_clip` cannot
    see a bias that a call passes as a float mask.

    With torch.distributed, call it in every process. Parameters may be DTensors (tensor parallelism, FSDP2): each
    process changes its own shard.

    Args:
        model: The model of the monitor.
        monitor: The monitor, which must measure every head of the layers.
        tau: The largest score to allow, after the scale of the scores.
        fused: How a class that is not listed above orders the rows of a projection that computes query, key and value:
            "stacked" for all queries, then all keys, then all values, as in GPT-2; "by_head" for the queries, the key
            and the value of each key head, as in GPT-NeoX.

    Returns:
        The heads that were rescaled, each with its module, its number and the factor γ; empty if none was.

    Raises:
        ArgumentTypeError: If the model is not a module, or the monitor not a `Monitor`.
        ArgumentError: If `tau` is not above 0, if the scores of a head are not known (NaN), or if a layer is not
            supported: a norm of queries or keys, a softcap, a position bias in the scores (ALiBi, T5), unknown
            projections, and shared, frozen, quantised or parametrised weights. Nothing is changed then.

    >>> import torch
    >>> from regard.monitor import Monitor, qk_clip
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> with torch.no_grad():
    ...     model.self_attn.in_proj_weight[:4] = 1.0  # the query of head 0
    ...     model.self_attn.in_proj_weight[8:12] = 1.0  # its key
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.0)
    >>> with Monitor(model, every=1, alarms=()) as monitor:
    ...     for _ in range(2):
    ...         model(torch.ones(1, 4, 8)).sum().backward()
    ...         optimizer.step()
    ...         [(clipped.head, round(clipped.factor, 4)) for clipped in qk_clip(model, monitor, tau=64)]
    [(0, 0.5)]
    []
    """
    if not isinstance(model, nn.Module) or not isinstance(monitor, Monitor):
        raise ArgumentTypeError(
            "qk_clip",
            received=f"model as {describe_argument(model)}, monitor as {describe_argument(monitor)}",
            expected="a torch.nn.Module and the Monitor that measures it",
            hint="For example: qk_clip(model, monitor, tau=100).",
        )
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau < math.inf:
        raise ArgumentError(
            "qk_clip",
            received=f"tau={tau!r}",
            expected="a finite number above 0",
            hint="MuonClip uses tau=100.",
        )
    if fused not in (None, "stacked", "by_head"):
        raise ArgumentError(
            "qk_clip",
            received=f"fused={fused!r}",
            expected='"stacked", "by_head" or None',
            hint='"stacked" is the order of GPT-2, "by_head" the order of GPT-NeoX.',
        )
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    step = monitor.num_steps - 1
    scores: dict[str, dict[int, float]] = {}
    for row in monitor.last_rows:
        if row["step"] == step and row["rows"]:  # a layer that did not run has rows without numbers
            scores.setdefault(row["module"], {})[row["head"]] = row["max_score"]
            _check_known(row)
    if not scores or _used_steps.get(monitor) == step:
        return []
    layers = {
        name: _LayerReader(model, name, fused).list_blocks(sorted(by_head))
        for name, by_head in scores.items()
    }
    _check_not_shared(model, layers)
    clipped = [
        ClippedHead(name, head, tau / score)
        for name, by_head in scores.items()
        for head, score in by_head.items()
        if score > tau
    ]
    _used_steps[monitor] = step
    with torch.no_grad():
        for name in dict.fromkeys(found.module for found in clipped):
            factors = {found.head: found.factor for found in clipped if found.module == name}
            for block in layers[name]:
                _scale_block(block, factors)
    return clipped


class _Slot(NamedTuple):
    """A parameter with rows of heads along one axis."""

    tensor: Tensor
    axis: int
    name: str


class _RowBlock(NamedTuple):
    """Rows of parameters that belong to single heads.

    Args:
        slots: The parameters, a weight and its bias.
        starts: First row of each head.
        size: Number of rows of each head.
        power: The rows are multiplied by the factor to this power.
    """

    slots: tuple[_Slot, ...]
    starts: Sequence[int]
    size: int
    power: float


def _scale_block(block: _RowBlock, factors: dict[int, float]) -> None:
    """Multiply the rows of some heads by powers of their factors, and all other rows by 1."""
    for tensor, axis, _ in block.slots:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        by_row = torch.ones(tensor.shape[axis], dtype=dtype, device=tensor.device)
        for head, factor in factors.items():
            by_row[block.starts[head] : block.starts[head] + block.size] = factor**block.power
        by_row = by_row.reshape(-1, *[1] * (tensor.ndim - axis - 1))
        if _is_distributed(tensor):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = tensor.device_mesh
            by_row = DTensor.from_local(by_row, mesh, [Replicate()] * mesh.ndim, run_check=False)
        tensor.mul_(by_row)


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _check_known(row: dict[str, Any]) -> None:
    if math.isnan(row["max_score"]):
        is_broken = row["nonfinite"] == row["rows"]
        raise ArgumentError(
            "qk_clip",
            received=f"a monitored step in which the scores of {row['module']!r}, head {row['head']}, are "
            + ("NaN or infinite" if is_broken else "not known"),
            expected="the largest score of every head",
            hint="Go back to a checkpoint before the first NaN, with a smaller learning rate or tau."
            if is_broken
            else "The layer computes its own softmax: call F.scaled_dot_product_attention, or torch.softmax with the "
            "scores themselves. Or monitor other layers only: Monitor(…, layers=…).",
        )


def _check_not_shared(model: nn.Module, layers: dict[str, list[_RowBlock]]) -> None:
    """Refuse a parameter that two modules hold, or one module twice: one of them would be changed by mistake."""
    holders = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    for name, blocks in layers.items():
        for slot in (slot for block in blocks for slot in block.slots):
            if holders[id(slot.tensor)] > 1:
                _refuse(
                    name, f"whose parameter {slot.name!r} is shared with another module", "Untie the weights."
                )


def _refuse(name: str, reason: str, hint: str) -> NoReturn:
    raise ArgumentError(
        "qk_clip",
        received=f"layer {name!r}, {reason}",
        expected="a layer whose scores are products of its query and key projections, and nothing else",
        hint=f"{hint} Or monitor the other layers only: Monitor(…, layers=…).",
    )


class _LayerReader:
    """Find the rows of each head in the parameters of an attention module.

    Args:
        model: The model.
        name: Name of the module in the monitor's rows.
        fused: The order of a fused projection in classes that are not known.
    """

    def __init__(self, model: nn.Module, name: str, fused: FusedLayout | None) -> None:
        self.name, self.fused = name, fused
        try:
            self.module = model.get_submodule(name)
        except AttributeError:
            raise ArgumentError(
                "qk_clip",
                received=f"a {type(model).__name__} without the module {name!r}",
                expected="the model that the monitor measures",
                hint="Pass the same model to Monitor and qk_clip.",
            ) from None
        # A module without parameters, such as one that holds only the kernel, belongs to the module around it.
        while name and not any(True for _ in self.module.parameters()):
            name = name.rpartition(".")[0]
            self.module = model.get_submodule(name)
        self.model, self.path = model, name

    def refuse(self, reason: str, hint: str) -> NoReturn:
        _refuse(self.name, f"a {type(self.module).__name__} {reason}", hint)

    def list_blocks(self, heads: list[int]) -> list[_RowBlock]:
        """List the rows of each head, given the heads that the monitor has measured."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention):
            return self._read_torch(heads)
        classes = [known.__name__ for known in type(module).__mro__]  # FSDP2 derives classes
        spec = next((ATTENTION_MODULES[known] for known in classes if known in ATTENTION_MODULES), None)
        self._check_scores(spec)
        if self._has("kv_b_proj", "kv_a_proj_with_mqa"):
            last = "q_b_proj" if self._has("q_b_proj") else "q_proj"
            self._check_parts({last, "kv_b_proj"} | _BEFORE_LATENT)
            return self._read_latent(self._read_linear(last), self._read_linear("kv_b_proj"), heads)
        if spec is not None and len(spec.projections) == 1:
            self._check_parts({*spec.projections, spec.out})
            return self._read_fused(spec.projections[0], spec.by_head, heads)
        pair = next((names for names in SEPARATE_PROJECTIONS if self._has(*names)), None)
        if pair is not None:
            self._check_parts({*pair, "bias_k", "bias_v"})
            return self._split_separate(self._read_linear(pair[0]), self._read_linear(pair[1]), heads)
        names = [name for name in FUSED_PROJECTIONS if self._has(name)]
        if len(names) == 1 and self.fused is not None:
            self._check_parts({names[0]})
            return self._read_fused(names[0], self.fused == "by_head", heads)
        if names:
            self.refuse(
                f"with a fused projection {names[0]!r} whose order of rows is not known",
                'Pass fused="stacked" if its rows are all queries, then all keys, then all values, as in GPT-2; '
                'fused="by_head" if they are query, key and value of each head, as in GPT-NeoX.',
            )
        self.refuse(
            "whose query and key projections are not known",
            "Name them q_proj and k_proj in your own class.",
        )

    # Checks

    def _has(self, *names: str) -> bool:
        return all(isinstance(getattr(self.module, name, None), nn.Module) for name in names)

    def _check_scores(self, spec: AttentionModule | None) -> None:
        """Refuse a module that changes its scores, or its queries and keys after the projection."""
        config = getattr(self.module, "config", None)
        if getattr(config, "alibi", False) is True or (spec is not None and spec.bias is not None):
            self.refuse(
                "that adds a position bias to its scores (ALiBi, T5), so that max_score is not a product",
                "QK-clip is not exact for it; use a lower learning rate or QK-norm.",
            )
        for owner in (self.module, config):
            for attribute, value in getattr(owner, "__dict__", {}).items():
                if _SOFTCAP.match(attribute) and isinstance(value, int | float) and value:
                    self.refuse(
                        f"whose scores a softcap limits already ({attribute}={value})",
                        "It needs no QK-clip; remove the softcap to use it.",
                    )
                if attribute == "clip_qkv" and value is not None:
                    self.refuse("that clips its queries and keys (clip_qkv)", "Set clip_qkv to None.")
        forward = inspect.unwrap(type(self.module).forward)
        names = list(_list_names(getattr(forward, "__code__", None)))
        if forward.__module__.startswith("transformers."):
            if spec is None and "ALL_ATTENTION_FUNCTIONS" not in names:  # it computes its scores itself
                self.refuse(
                    "whose way to compute its scores is not known",
                    "Rescale such a layer in your own code, from monitor.last_rows.",
                )
        elif not forward.__module__.startswith(("torch.", "regard.")):
            found = next(filter(_NOT_LINEAR.search, names), None)
            if found is not None:
                self.refuse(
                    f"whose forward uses {found!r}, so that its scores may not be products of its projections",
                    "With QK-norm or a softcap, scores are limited already. Call what is not part of the scores in a "
                    "module of its own.",
                )

    def _check_parts(self, projections: Iterable[str]) -> None:
        """Refuse a module with parts that are neither projections nor known to leave the scores alone."""
        known = {*projections} | _WITHOUT_SCORES
        for part, _ in self.module.named_children():
            if "norm" in part.lower() and part not in known:
                self.refuse(
                    f"with a norm, {part!r}, that undoes or shares a factor of its projections",
                    "With a norm of queries and keys, scores are limited already; remove the layer from the monitor.",
                )
        for name, _ in self.module.named_parameters():
            if name.split(".")[0] not in known:
                self.refuse(
                    f"with a parameter {name!r} that may change its scores",
                    "Rescale such a layer in your own code, from monitor.last_rows.",
                )

    # Parameters

    def _read_slot(self, owner: nn.Module, path: str, axis: int = 0) -> _Slot:
        """Read a parameter of a module by its path below the attention module."""
        name = path.rpartition(".")[2]
        tensor = owner._parameters.get(name)
        if tensor is None:
            self.refuse(
                f"whose {path!r} is computed from other parameters",
                "Remove the parametrization of the weight.",
            )
        if not (type(tensor) is nn.Parameter or _is_distributed(tensor)) or tensor.dtype not in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            self.refuse(
                f"whose {path!r} is {type(tensor).__name__} of {tensor.dtype}",
                "Weights must be floating point and not quantised.",
            )
        if not tensor.requires_grad:
            self.refuse(f"whose {path!r} is frozen (requires_grad=False)", "Set requires_grad to change it.")
        return _Slot(tensor, axis, f"{self.path}.{path}".lstrip("."))

    def _read_linear(self, name: str) -> tuple[_Slot, ...]:
        """Read weight and bias of a linear layer."""
        linear = self.module.get_submodule(name)
        is_known = type(linear).__name__ in _LINEAR_CLASSES
        if not is_known and not (isinstance(linear, nn.Linear) and type(linear).forward is nn.Linear.forward):
            self.refuse(
                f"whose {name!r} is a {type(linear).__module__}.{type(linear).__name__}",
                "It must be an nn.Linear; merge adapters into it first (merge_and_unload() of peft).",
            )
        weight = self._read_slot(linear, f"{name}.weight", int(type(linear).__name__ == "Conv1D"))
        if weight.tensor.ndim != 2:
            self.refuse(
                f"whose '{name}.weight' has {weight.tensor.ndim} axes",
                "Use fully_shard (FSDP2), which keeps the shapes of parameters.",
            )
        if getattr(linear, "bias", None) is None:
            return (weight,)
        return weight, self._read_slot(linear, f"{name}.bias")

    def _read_head_dim(self, heads: list[int]) -> int | None:
        """Read the width of a query head; None if the module states it only by its number of heads."""
        for name in ("head_dim", "attention_head_size", "head_size", "qk_head_dim"):
            value = getattr(self.module, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if count_heads(self.module) is None:
            self.refuse(
                "without the number of its heads or their width",
                "Give the module an attribute num_heads or head_dim.",
            )
        return None

    def _find_head_dim(self, query_rows: int, heads: list[int]) -> int:
        """Return the width of a query head, checked against the heads of the monitor."""
        head_dim, stated = self._read_head_dim(heads), count_heads(self.module)
        count = len(heads) if head_dim is None else query_rows // head_dim
        if heads != list(range(count)) or query_rows % count or (head_dim is None and stated != count):
            self.refuse(
                f"with {query_rows} rows of queries"
                + (f" of width {head_dim}" if head_dim else f" and {stated} heads")
                + f", of which the monitor has {len(heads)} heads",
                "The monitor must measure every head: its process group must hold them all, and a module that "
                "merges batch and heads needs an attribute num_heads.",
            )
        return query_rows // count

    # Layouts

    def _read_torch(self, heads: list[int]) -> list[_RowBlock]:
        """Read `torch.nn.MultiheadAttention`, whose projections are parameters of its own."""
        module = self.module
        if type(module).forward is not nn.MultiheadAttention.forward:
            self.refuse("with a forward of its own", "Use torch.nn.MultiheadAttention itself.")
        width, head_dim = module.embed_dim, self._find_head_dim(module.embed_dim, heads)
        starts = [head * head_dim for head in heads]
        key_starts = [width + start for start in starts]
        blocks = []
        if module.in_proj_weight is not None:
            weight = self._read_slot(module, "in_proj_weight")
            self._check_not_split(weight)
            blocks += [_RowBlock((weight,), first, head_dim, 0.5) for first in (starts, key_starts)]
        else:
            pair = self._read_slot(module, "q_proj_weight"), self._read_slot(module, "k_proj_weight")
            blocks.append(_RowBlock(pair, starts, head_dim, 0.5))
        if module.in_proj_bias is not None:
            bias = self._read_slot(module, "in_proj_bias")
            blocks += [_RowBlock((bias,), first, head_dim, 0.5) for first in (starts, key_starts)]
        if module.bias_k is not None:
            blocks.append(_RowBlock((self._read_slot(module, "bias_k", 2),), starts, head_dim, 0.5))
        return blocks

    def _split_separate(
        self, query: tuple[_Slot, ...], key: tuple[_Slot, ...], heads: list[int]
    ) -> list[_RowBlock]:
        """Divide the rows of two projections."""
        query_rows, key_rows = (slots[0].tensor.shape[slots[0].axis] for slots in (query, key))
        head_dim = self._find_head_dim(query_rows, heads)
        starts = [head * head_dim for head in heads]
        kv_heads = key_rows // head_dim
        if key_rows % head_dim or not kv_heads or len(heads) % kv_heads:
            self.refuse(
                f"with {query_rows} rows of queries and {key_rows} of keys",
                "Heads must be of one width, and groups of one size.",
            )
        if kv_heads < len(heads):
            return [_RowBlock(query, starts, head_dim, 1.0)]
        if isinstance(getattr(self.module, "bias_k", None), nn.Parameter):
            key = (*key, self._read_slot(self.module, "bias_k"))
        return [_RowBlock(slots, starts, head_dim, 0.5) for slots in (query, key)]

    def _read_fused(self, name: str, by_head: bool, heads: list[int]) -> list[_RowBlock]:
        """Divide the rows of one projection of query, key and value."""
        slots = self._read_linear(name)
        rows, count = slots[0].tensor.shape[slots[0].axis], len(heads)
        head_dim = self._read_head_dim(heads)
        if head_dim is None:
            if rows % (3 * count):
                self.refuse(
                    f"with {rows} rows of {name!r} and {count} heads", "Give it an attribute head_dim."
                )
            head_dim = rows // (3 * count)
        kv_heads = (rows // head_dim - count) // 2
        if (count + 2 * kv_heads) * head_dim != rows or kv_heads < 1 or count % kv_heads:
            self.refuse(
                f"with {rows} rows of {name!r}, which are not those of {count} query heads of width {head_dim} and "
                "their keys and values",
                "The monitor must measure every head.",
            )
        self._find_head_dim(count * head_dim, heads)
        group = count // kv_heads
        if by_head:
            starts = [(head // group * (group + 2) + head % group) * head_dim for head in heads]
            key_starts = [start + head_dim for start in starts]
        else:
            self._check_not_split(slots[0])
            starts = [head * head_dim for head in heads]
            key_starts = [count * head_dim + start for start in starts]
        if kv_heads < count:
            return [_RowBlock(slots, starts, head_dim, 1.0)]
        return [_RowBlock(slots, first, head_dim, 0.5) for first in (starts, key_starts)]

    def _read_latent(
        self, query: tuple[_Slot, ...], key: tuple[_Slot, ...], heads: list[int]
    ) -> list[_RowBlock]:
        """Divide the rows of latent attention: the query of a head is (nope, rope), `kv_b_proj` has (nope, value)."""
        nope, rope = (getattr(self.module, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
        if not isinstance(nope, int) or not isinstance(rope, int):
            self.refuse("without qk_nope_head_dim and qk_rope_head_dim", "Give it these attributes.")
        count = len(heads)
        query_rows, key_rows = (slots[0].tensor.shape[slots[0].axis] for slots in (query, key))
        if heads != list(range(count)) or query_rows != count * (nope + rope) or key_rows % count:
            self.refuse(
                f"with {query_rows} rows of queries of width {nope + rope}, of which the monitor has {count} heads",
                "The monitor must measure every head.",
            )
        starts = [head * (nope + rope) for head in heads]
        return [
            _RowBlock(query, starts, nope, 0.5),
            _RowBlock(query, [start + nope for start in starts], rope, 1.0),
            _RowBlock(key, [head * (key_rows // count) for head in heads], nope, 0.5),
        ]

    def _check_not_split(self, slot: _Slot) -> None:
        """Refuse tensor parallelism of stacked projections: the rows of a process are not those of whole heads."""
        if _is_distributed(slot.tensor):
            splits = sum(not placement.is_replicate() for placement in slot.tensor.placements)
            if splits > _is_in_fsdp(self.model, self.path):
                self.refuse(
                    f"whose stacked projection {slot.name!r} is split by tensor parallelism",
                    "Use separate projections for query, key and value.",
                )


def _list_names(code: Any) -> Iterator[str]:
    """Yield the names that a function uses, also in functions and comprehensions inside it."""
    yield from getattr(code, "co_names", ())
    for constant in getattr(code, "co_consts", ()):
        yield from _list_names(constant)


def _is_in_fsdp(model: nn.Module, name: str) -> bool:
    """Return whether FSDP2 shards a module, or a module around it: it gathers the parameters before they are used."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    parts = name.split(".")
    return any(
        isinstance(model.get_submodule(".".join(parts[:count])), FSDPModule)
        for count in range(len(parts) + 1)
    )
