"""Which layers and heads each process holds, so that every head has one row: tensor parallelism and pipeline stages."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from regard.capture.call import Call
from regard.capture.own_softmax import count_heads
from regard.errors import ArgumentError

Tensor = Any  # the types of torch are not followed


class LayerPart(NamedTuple):
    """The heads of a layer that one process holds.

    Args:
        heads: Number of heads.
        part: Which part of the heads they are, from 0.
        num_parts: Number of parts.
        fingerprint: A hash of some of the layer's weights; the same in all processes that hold the same part.
    """

    heads: int
    part: int
    num_parts: int
    fingerprint: str


class LayerHeads(NamedTuple):
    """The heads of a layer in a group of processes.

    Args:
        heads: Number of heads of each part, by its number; all parts, or one if the group has no other.
        first_head: Number of the first head.
    """

    heads: dict[int, int]
    first_head: int = 0


Layout = dict[str, LayerHeads]  # by module name, in the order in which the layers run


def find_layer_part(model: nn.Module, call: Call) -> LayerPart:
    """Find out which heads of a layer this process holds; to be called while the layer runs.

    Parameters that FSDP shards are whole then, and those that are still sharded belong to tensor parallelism.

    Args:
        model: The model.
        call: A call of the layer.

    Returns:
        The part.

    Raises:
        ArgumentError: If the layer's parameters are sharded, and it is not clear whether its heads are.
    """
    owner = _find_owner(model, call.name)
    heads = call.shape[-3] if len(call.shape) > 2 else 1
    part, num_parts = 0, 1
    sharded = [shard for parameter in owner.parameters() for shard in _list_shards(parameter)]
    if sharded:
        widths = _list_widths(call, heads)
        whole = {size for parameter in owner.parameters() for size in _list_whole_sizes(parameter)}
        matching = [shard for shard in sharded if shard.size in widths]
        total = count_heads(owner)
        if matching and not whole & widths:
            part, num_parts = matching[0].part, matching[0].num_parts
        elif not widths and total == heads * sharded[0].num_parts:  # the layer computes its own softmax
            part, num_parts = sharded[0].part, sharded[0].num_parts
        elif not whole & widths and total != heads:
            raise ArgumentError(
                "Monitor",
                received=f"{call.name!r} with sharded parameters, of which none has the size of its {heads} heads",
                expected="heads that are split evenly by the rows of the query's projection, or not at all",
                hint="Shard query, key and value with ColwiseParallel and the output with RowwiseParallel of "
                "torch.distributed.tensor.parallel. Or omit the layer: layers= selects those to monitor.",
            )
    return LayerPart(heads, part, num_parts, _hash_parameters(owner, with_shards=num_parts > 1))


def agree_on_layout(parts: dict[str, LayerPart], group: Any) -> Layout:
    """Exchange the layers and heads that each process holds, once.

    Args:
        parts: The parts of the layers that this process has run, in order.
        group: The process group, or None for all processes.

    Returns:
        The layers of all processes, in the order in which they run.

    Raises:
        ArgumentError: In every process, if two hold different layers by the same name, or the group has some of the
            parts of a layer only.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, parts, group=group)
    found: dict[str, dict[int, LayerPart]] = {}
    for other in gathered:
        for name, part in other.items():
            known = found.setdefault(name, {}).setdefault(part.part, part)
            if known != part:
                _raise_different(name, "processes that hold different layers by that name")
    names = list(found)
    if any(list(other) != names for other in gathered if other):
        names.sort(key=_make_sort_key(names))
    return {name: _join_parts(name, found[name]) for name in names}


def _join_parts(name: str, parts: dict[int, LayerPart]) -> LayerHeads:
    heads = {number: parts[number].heads for number in sorted(parts)}
    first, *others = parts.values()
    if len(parts) == first.num_parts:
        return LayerHeads(heads)
    if others:
        _raise_different(name, f"{len(parts)} of the {first.num_parts} parts of its heads")
    return LayerHeads(heads, first.part * first.heads)


def _raise_different(name: str, received: str) -> None:
    raise ArgumentError(
        "Monitor",
        received=f"{name!r} in {received}",
        expected="replicas of one model, the parts of its heads, or stages whose layers have different names",
        hint="Give the layers of pipeline stages their names in the whole model. Or pass the processes that hold the "
        "same layers: Monitor(…, process_group=group).",
    )


def _make_sort_key(names: Iterable[str]) -> Any:
    """Return a key that sorts layers by their numbers, and those of different lists in the order given."""
    prefixes: dict[str, int] = {}
    for name in names:
        prefixes.setdefault(re.split(r"\d", name, maxsplit=1)[0], len(prefixes))

    def sort_key(name: str) -> tuple[int, list[int]]:
        return prefixes[re.split(r"\d", name, maxsplit=1)[0]], [
            int(part) for part in re.findall(r"\d+", name)
        ]

    return sort_key


def _find_owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a layer, or the nearest one around it that has parameters."""
    while name:
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):
            return module
        name = name.rpartition(".")[0]
    return model


class _Shard(NamedTuple):
    """One axis of a parameter that is split: its size here, and which part of how many it is."""

    size: int
    part: int
    num_parts: int


def _list_shards(parameter: Tensor) -> Iterator[_Shard]:
    """Yield the axes of a parameter that are split between processes, as DTensor states them."""
    if not _is_distributed(parameter):
        return
    coordinate = parameter.device_mesh.get_coordinate() or []
    for axis, size in enumerate(parameter.to_local().shape):
        part, num_parts = 0, 1
        for place, position, length in zip(
            parameter.placements, coordinate, parameter.device_mesh.shape, strict=True
        ):
            if place.is_shard(axis):
                part, num_parts = part * length + position, num_parts * length
        if num_parts > 1:
            yield _Shard(int(size), part, num_parts)


def _list_whole_sizes(parameter: Tensor) -> tuple[int, ...]:
    """Return the sizes of a matrix that is not split."""
    if parameter.ndim != 2 or any(True for _ in _list_shards(parameter)):
        return ()
    return tuple(parameter.shape)


def _is_distributed(parameter: Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # no parameter is a DTensor before it is imported
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def _list_widths(call: Call, heads: int) -> set[int]:
    """Return the number of rows that projections of this call's heads have: query alone, and query, key and value."""
    head_dims = {int(tensor.shape[-1]) for tensor in (call.query, call.cached) if tensor is not None} - {0}
    kv_heads = call.key.shape[-3] if call.key.ndim > 2 else 1
    return {count * head_dim for head_dim in head_dims for count in (heads, heads + 2 * kv_heads, 3 * heads)}


def _hash_parameters(module: nn.Module, with_shards: bool) -> str:
    """Hash the ends of each parameter: replicas of a layer have the same, different layers do not.

    Args:
        module: The layer.
        with_shards: Whether to include parameters that are split; they differ between processes with the same heads.
    """
    digest = hashlib.sha256()
    for parameter in module.parameters():
        if with_shards or not any(True for _ in _list_shards(parameter)):
            local = parameter.to_local() if _is_distributed(parameter) else parameter
            flat = local.detach().reshape(-1)
            digest.update(repr((tuple(local.shape), flat[:8].tolist(), flat[-8:].tolist())).encode())
    return digest.hexdigest()
