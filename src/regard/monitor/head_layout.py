"""Which heads of each layer a process holds, and how a group of processes agrees on the heads of the whole model."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from regard.capture.call import Call
from regard.capture.own_softmax import count_heads
from regard.errors import ArgumentError
from regard.families import FUSED_PROJECTIONS, SEPARATE_PROJECTIONS

if TYPE_CHECKING:
    from regard.distributed.matrix import DistributedMatrix

Tensor = Any  # the types of torch are not followed


# Names of projections that compute queries alone.
_QUERY_NAMES = (*(query for query, _ in SEPARATE_PROJECTIONS), "to_q", "q_b_proj")


class HeadSizes(NamedTuple):
    """Heads of a call.

    Args:
        heads: Number of heads of the query.
        kv_heads: Number of heads of the key.
        head_dims: Widths of query and value, as far as they are known.
    """

    heads: int
    kv_heads: int
    head_dims: frozenset[int]

    @classmethod
    def from_call(cls, call: Call) -> HeadSizes:
        """Return the heads of a call in this process."""
        dims = {int(tensor.shape[-1]) for tensor in (call.query, call.cached) if tensor is not None}
        kv_heads = call.key.shape[-3] if call.key.ndim > 2 else 1
        return cls(call.shape[-3] if len(call.shape) > 2 else 1, kv_heads, frozenset(dims - {0}))

    @classmethod
    def from_shards(cls, matrix: DistributedMatrix) -> HeadSizes:
        """Return the heads of a call whose tokens are on several processes."""
        query, key = matrix._spec.query, matrix._spec.key
        heads, kv_heads = (tensor.shape[-3] if tensor.ndim > 2 else 1 for tensor in (query, key))
        return cls(heads, kv_heads, frozenset({int(query.shape[-1])}))

    @property
    def query_widths(self) -> set[int]:
        """Numbers of rows that a projection of queries may have."""
        return {self.heads * head_dim for head_dim in self.head_dims}

    @property
    def fused_widths(self) -> set[int]:
        """Numbers of rows that a projection of queries, keys and values may have."""
        counts = self.heads + 2 * self.kv_heads, 3 * self.heads
        return {count * head_dim for head_dim in self.head_dims for count in counts}


class LayerPart(NamedTuple):
    """The heads of a layer that one process holds.

    Args:
        heads: Number of heads.
        part: Which part of the heads they are, from 0.
        num_parts: Number of parts.
        first_head: Number of the first of the heads.
        fingerprint: A hash of some of the layer's weights; the same in all processes that hold the same part.
    """

    heads: int
    part: int
    num_parts: int
    first_head: int
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


def find_layer_part(model: nn.Module, name: str, sizes: HeadSizes) -> LayerPart:
    """Find out which heads of a layer this process holds; to be called while the layer runs.

    Parameters that FSDP shards are whole then, and those that are still sharded belong to tensor parallelism. A
    projection of which this process has as many rows as the call has heads tells that the heads are split.
    """
    owner = _find_owner(model, name)
    split, is_whole, has_splits = _find_split(owner, sizes)
    if split is not None:
        first_head = split.start * sizes.heads // split.size
        fingerprint = _hash_parameters(owner, with_shards=True)
        return LayerPart(sizes.heads, split.part, split.num_parts, first_head, fingerprint)
    if has_splits and not is_whole:
        raise ArgumentError(
            "Monitor",
            received=f"{name!r} with sharded parameters, which do not tell which heads of the layer the {sizes.heads} "
            "heads of this process are",
            expected="heads that are split by the rows of the query's projection, or not at all",
            hint="Shard query, key and value with ColwiseParallel and the output with RowwiseParallel of "
            "torch.distributed.tensor.parallel, and name the query's projection q_proj. Or monitor other layers only, "
            "with layers=.",
        )
    total = count_heads(owner) or sizes.heads
    factor = total // sizes.heads
    whole_sizes = {size for parameter in owner.parameters() for size in parameter.shape}
    if not has_splits and factor > 1 and any(factor * width in whole_sizes for width in sizes.query_widths):
        raise ArgumentError(
            "Monitor",
            received=f"{name!r} with {sizes.heads} of its {total} heads, and parameters of all heads",
            expected="a call with all heads of the layer, or parameters that are sharded with the heads",
            hint="The processes exchange heads for tokens (Ulysses), or split heads by hand, so that the monitor "
            "cannot number them. Use context parallelism of torch, or regard.distributed.attention. Or monitor other "
            "layers only, with layers=.",
        )
    return LayerPart(sizes.heads, 0, 1, 0, _hash_parameters(owner, with_shards=False))


def _find_split(owner: nn.Module, sizes: HeadSizes) -> tuple[_SplitAxis | None, bool, bool]:
    """Return how the heads of a layer are split, whether they are known to be whole, and whether anything is split."""
    queries: list[tuple[set[int], set[int], list[_SplitAxis]]] = []  # by name: widths, whole sizes, splits
    whole_sizes: set[int] = set()
    splits: list[_SplitAxis] = []
    for path, parameter in owner.named_parameters():
        own = list(_list_split_axes(parameter))
        splits += own
        if parameter.ndim != 2:
            continue
        whole = {split.whole_size for split in own} if own else set(map(int, parameter.shape))
        whole_sizes |= whole
        projection = path.removesuffix(".weight").rpartition(".")[2]
        if projection in _QUERY_NAMES:
            queries.append((sizes.query_widths, whole, own))
        elif projection in FUSED_PROJECTIONS:
            queries.append((sizes.fused_widths, whole, own))
    candidates = [
        *queries,  # the name of a projection tells most
        (sizes.query_widths, whole_sizes, splits),
        (sizes.fused_widths, whole_sizes, splits),
    ]
    for widths, whole, own in candidates:
        matching, is_whole = [split for split in own if split.size in widths], not widths.isdisjoint(whole)
        if matching and not is_whole:
            return matching[0], False, True
        if is_whole and not matching:
            return None, True, bool(splits)
    if splits and not sizes.head_dims and count_heads(owner) == sizes.heads * splits[0].num_parts:
        return splits[0], False, True  # the layer computes its own softmax
    return None, False, bool(splits)


def agree_on_layout(parts: dict[str, LayerPart], group: Any) -> Layout:
    """Exchange the layers and heads that each process of a group holds, once, in the order in which they run."""
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
        # By their numbers, and layers of different lists in the order given.
        lists = list(dict.fromkeys(re.split(r"\d", name, maxsplit=1)[0] for name in names))
        names.sort(
            key=lambda name: (
                lists.index(re.split(r"\d", name, maxsplit=1)[0]),
                [int(number) for number in re.findall(r"\d+", name)],
            )
        )
    return {name: _join_parts(name, found[name]) for name in names}


def _join_parts(name: str, parts: dict[int, LayerPart]) -> LayerHeads:
    heads = {number: parts[number].heads for number in sorted(parts)}
    first, *others = parts.values()
    if len(parts) == first.num_parts:
        return LayerHeads(heads)
    if others:
        _raise_different(name, f"{len(parts)} of the {first.num_parts} parts of its heads")
    return LayerHeads(heads, first.first_head)


def _raise_different(name: str, received: str) -> None:
    raise ArgumentError(
        "Monitor",
        received=f"{name!r} in {received}",
        expected="replicas of one model, shards of its heads, or pipeline stages whose layers have different names",
        hint="Give the layers of pipeline stages their names in the whole model. Or pass the processes that hold the "
        "same layers: Monitor(…, process_group=group).",
    )


def _find_owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module of a layer, or the nearest one around it that has parameters."""
    while name:
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()):
            return module
        name = name.rpartition(".")[0]
    return model


class _SplitAxis(NamedTuple):
    """One axis of a parameter that is split.

    Args:
        size: Its size here.
        whole_size: Its size in all processes together.
        start: Index of the first entry here.
        part: Which part is here.
        num_parts: Number of parts.
    """

    size: int
    whole_size: int
    start: int
    part: int
    num_parts: int


def _list_split_axes(parameter: Tensor) -> Iterator[_SplitAxis]:
    """Yield the axes of a parameter that are split between processes, as DTensor states them."""
    if not _is_distributed(parameter):
        return
    coordinate = parameter.device_mesh.get_coordinate() or []
    for axis, size in enumerate(parameter.to_local().shape):
        part, num_parts = 0, 1
        start, stop = 0, int(parameter.shape[axis])
        for place, position, length in zip(
            parameter.placements, coordinate, parameter.device_mesh.shape, strict=True
        ):
            if place.is_shard(axis):
                part, num_parts = part * length + position, num_parts * length
                chunk = -(-(stop - start) // length)  # the last chunks may be shorter, as in torch.chunk
                start, stop = min(start + position * chunk, stop), min(start + (position + 1) * chunk, stop)
        if num_parts > 1:
            yield _SplitAxis(int(size), int(parameter.shape[axis]), start, part, num_parts)


def _is_distributed(parameter: Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # no parameter is a DTensor before it is imported
    return tensors is not None and isinstance(parameter, tensors.DTensor)


def _hash_parameters(module: nn.Module, with_shards: bool) -> str:
    """Hash the ends of each parameter: replicas of a layer have the same, different layers do not.

    Parameters that are split, included `with_shards`, differ between processes with the same heads.
    """
    digest = hashlib.sha256()
    for parameter in module.parameters():
        if with_shards or not any(_list_split_axes(parameter)):
            local = parameter.to_local() if _is_distributed(parameter) else parameter
            flat = local.detach().reshape(-1)
            digest.update(repr((tuple(local.shape), flat[:8].tolist(), flat[-8:].tolist())).encode())
    return digest.hexdigest()
