"""Train one small model, split between processes in the ways of large runs, and return what the monitor measured."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from regard import Distance, causal, distributed
from regard.distributed.layouts import build_layout, split_evenly
from regard.errors import ArgumentError
from regard.masks import document
from regard.monitor import Monitor

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, BATCH, TOKENS, STEPS = 16, 4, 2, 4, 2, 4, 16, 3


class Way(NamedTuple):
    """How many processes share the batch, the layers, the tokens and the heads, and options by name."""

    data: int = 1
    layers: int = 1
    tokens: int = 1
    heads: int = 1
    options: str = ""

    @property
    def size(self) -> int:
        return math.prod(self[:4])

    @property
    def num_tokens(self) -> int:
        return 13 if "uneven" in self.options else 14 if "contiguous" in self.options else TOKENS

    @property
    def num_steps(self) -> int:
        # The gradients of what each process computes for its own heads alone are not added up here.
        return 1 if self.options in ("whole keys", "one key", "seven heads") else STEPS


class Attention(nn.Module):
    """Causal attention with grouped heads, by the options of a way.

    Args:
        way: The way.
        mesh: The processes; None for one.
    """

    def __init__(self, way: Way, mesh: Any = None) -> None:
        super().__init__()
        self.way, self.mesh = way, mesh
        heads, kv_heads, self.head_dim = HEADS, KV_HEADS, HEAD_DIM
        if "seven heads" in way.options:  # of which the last of four processes has one
            heads, kv_heads, self.head_dim = 7, 7, 2
        if "one key" in way.options:
            kv_heads = 1
        self.num_heads = heads
        self.q_proj = nn.Linear(WIDTH, heads * self.head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * self.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        way, mesh = self.way, self.mesh
        parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if "whole keys" in way.options and mesh is not None:
            per_process = self.num_heads // way.heads
            first = mesh["heads"].get_local_rank() * per_process
            used = [(first + head) * KV_HEADS // self.num_heads for head in range(per_process)]
            key, value = key[:, used], value[:, used]
        if "exchange heads" in way.options and mesh is not None:  # DeepSpeed-Ulysses
            key, value = (part.repeat_interleave(2, 1) for part in (key, value))
            query, key, value = (
                exchange_heads(part, mesh["tokens"].get_group()) for part in (query, key, value)
            )
        elif way.tokens > 1 and "torch" not in way.options and mesh is not None:
            matrix = distributed.attention(
                query,
                key,
                group=mesh["tokens"].get_group(),
                mask=make_mask(way, mesh),
                enable_gqa=True,
                layout="zigzag" if "zigzag" in way.options else "contiguous",
            )
            return self.o_proj((matrix @ value).transpose(1, 2).flatten(2))
        groups = query.shape[1] // key.shape[1]
        if "documents" in way.options:
            output = regard.attention(query, key, mask=make_mask(way, mesh), enable_gqa=True) @ value
        else:
            key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
            if "own softmax" in way.options:
                scores = query @ key.mT / math.sqrt(self.head_dim)
                allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
                output = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value
            else:
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if "seven heads" in way.options or ("exchange heads" in way.options and mesh is not None):
            return torch.zeros_like(
                x
            )  # torch does not join heads that are not split evenly, or exchanged by hand
        return self.o_proj(output.transpose(1, 2).flatten(2))


def make_mask(way: Way, mesh: Any) -> Any:
    if "documents" not in way.options:
        return causal()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, -1, -1], [0] * 12 + [-1] * 4])
    ids = ids.repeat_interleave(BATCH // 2, 0)
    return causal() & document(ids if mesh is None else ids.chunk(way.data)[mesh["data"].get_local_rank()])


def exchange_heads(part: Tensor, group: Any) -> Tensor:
    """Give up half of the heads for the tokens of the other process."""
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, 2).chunk(2, 1)[dist.get_rank(group)]


class Layer(nn.Module):
    def __init__(self, way: Way, mesh: Any = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(way, mesh)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Layers by their numbers in the whole model."""

    def __init__(self, way: Way, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(number): Layer(way, mesh) for number in range(LAYERS)}).double()
        with torch.no_grad():
            for number, layer in self.layers.items():
                layer.attention.q_proj.weight *= 3 + int(number)  # so that heads differ clearly

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def draw_tokens(way: Way, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, way.num_tokens, WIDTH, generator=generator, dtype=torch.float64).unbind()


def make_monitor(watched: nn.Module, group: Any = None) -> Monitor:
    return Monitor(watched, every=1, alarms=(), measures={"distance": Distance()}, process_group=group)


def train_in_one_process(way: Way) -> list[dict[str, Any]]:
    """Train the whole model on whole batches, and return the rows of the monitor."""
    model = Model(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with make_monitor(model) as monitor:
        for step in range(way.num_steps):
            x, target = draw_tokens(way, step)
            (model(x) - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(monitor.history)


def train_part(world: Any, way: Way) -> dict[str, Any] | None:
    """Train this process's part; every process of the world calls it, and those that have no part return None."""
    from torch.distributed.device_mesh import DeviceMesh

    names = ("data", "layers", "tokens", "heads")
    mesh = DeviceMesh("cpu", torch.arange(way.size).view(way[:4]), mesh_dim_names=names)
    group = dist.new_group(list(range(way.size)))
    # Slices of a mesh are groups that every process makes.
    if dist.get_rank() >= way.size:
        return None
    model = Model(way, mesh)
    if way.heads > 1:
        split_heads(model, mesh["heads"], way)
    optimized: Any = model
    if "fsdp" in way.options:
        shard_parameters(model, mesh, way)
    elif "ddp" in way.options:
        optimized = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())
    own = build_layout(
        "zigzag" if "zigzag" in way.options else "contiguous", split_evenly(way.num_tokens, way.tokens)
    )
    positions = torch.as_tensor(own.positions(mesh["tokens"].get_local_rank()))
    rank, calls = mesh["data"].get_local_rank(), Counter()
    run = make_pipeline(model, mesh, way) if way.layers > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    result: dict[str, Any] = {"error": "", "rows": [], "calls": calls}
    with count_all_reduces(calls), make_monitor(optimized, group) as monitor:
        try:
            for step in range(way.num_steps):
                whole = draw_tokens(way, step)
                x, target = (part.chunk(way.data)[rank] for part in whole)
                factor = way.data * way.tokens / whole[0].numel()
                if run is not None:
                    run(x, target, factor)
                elif "torch" in way.options:
                    with split_tokens(mesh["tokens"], x, target):
                        ((model(x) - target).square().sum() * factor).backward()
                else:
                    x, target = x[:, positions], target[:, positions]
                    ((optimized(x) - target).square().sum() * factor).backward()
                average_gradients(model, mesh, way)
                optimizer.step()
                optimizer.zero_grad()
        except ArgumentError as error:
            result["error"] = str(error)
    result["rows"] = list(monitor.history)
    return result


def average_gradients(model: nn.Module, mesh: Any, way: Way) -> None:
    """Average what neither DDP nor FSDP averages."""
    if "fsdp" in way.options:
        return
    for name in ("tokens",) if "ddp" in way.options else ("data", "tokens"):
        for parameter in model.parameters():
            grad = parameter.grad
            if mesh[name].size() > 1 and grad is not None:
                grad = grad.to_local() if hasattr(grad, "to_local") else grad
                dist.all_reduce(grad, group=mesh[name].get_group())
                grad /= mesh[name].size()


def split_heads(model: Model, mesh: Any, way: Way) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    is_sequence = "sequence" in way.options
    rows: dict[str, Any] = {"output_layouts": Shard(1)} if is_sequence else {}
    attention: dict[str, Any] = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    attention["o_proj"] = RowwiseParallel(**rows)
    if "whole keys" in way.options or "one key" in way.options:
        del attention["k_proj"], attention["v_proj"]
    if "gathered" in way.options:
        attention = {
            name: ColwiseParallel(output_layouts=Replicate()) for name in attention if name != "o_proj"
        }
    plan = {f"attention.{name}": style for name, style in attention.items()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel(**rows)}
    if is_sequence:
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        for name in ("attention", "up"):
            whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan[name] = whole if name == "attention" else ColwiseParallel(input_layouts=Shard(1))
    for number, layer in enumerate(model.layers.values()):
        own = dict(plan)
        if is_sequence and number == 0:
            own[""] = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            )
        parallelize_module(layer, mesh, {name: style for name, style in own.items() if name})
        if "" in own:
            parallelize_module(layer, mesh, own[""])
    if is_sequence:
        model.register_forward_hook(lambda module, args, output: gather_tokens(output, mesh))


def gather_tokens(output: Tensor, mesh: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(output, mesh, [Shard(1)], run_check=False).full_tensor()


def shard_parameters(model: Model, mesh: Any, way: Way) -> None:
    from torch.distributed.fsdp import fully_shard

    if way.tokens > 1:
        shards = mesh["data", "tokens"]._flatten() if way.data > 1 else mesh["tokens"]
    elif "hybrid" in way.options:  # replicas of shards
        from torch.distributed.device_mesh import DeviceMesh

        shards = DeviceMesh("cpu", torch.arange(way.size).view(2, -1), mesh_dim_names=("replicas", "shards"))
    else:
        shards = mesh["data"]
    for layer in model.layers.values():
        if "every linear" in way.options:
            for part in layer.attention.children():
                fully_shard(part, mesh=shards)
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)


def make_pipeline(model: Model, mesh: Any, way: Way) -> Any:
    """Keep this process's layers, and return a function that runs a batch through the stages."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    number, microbatches = mesh["layers"].get_local_rank(), 2
    for name in list(model.layers):
        if int(name) * way.layers // LAYERS != number:
            del model.layers[name]
    factors = [1.0]
    example = torch.empty(
        BATCH // way.data // microbatches, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True
    )
    stage = PipelineStage(
        model, number, way.layers, torch.device("cpu"), input_args=example, output_args=example,
        group=mesh["layers"].get_group(),
    )  # fmt: skip

    def compute_loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum() * factors[0] * microbatches

    schedule = Schedule1F1B(stage, microbatches, loss_fn=compute_loss)

    def run(x: Tensor, target: Tensor, factor: float) -> None:
        factors[0] = factor
        is_last = number == way.layers - 1
        schedule.step(*([x] if number == 0 else []), **({"target": target} if is_last else {}))

    return run


@contextmanager
def split_tokens(mesh: Any, *parts: Tensor) -> Iterator[None]:
    """Context parallelism of torch, for which this adds the one function that it lacks: the kernel of the CPU."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as experimental

    aten = torch.ops.aten

    def run(function: Any, *names: str) -> Any:
        def handle(_: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = torch.utils._pytree.tree_map_only(
                DTensor, lambda part: part.to_local(), (args, kwargs)
            )
            results = function(mesh.get_group(), 2, *names, *args, **kwargs)
            return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in results)

        return handle

    def run_forward(group: Any, axis: int, query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
                    is_causal: bool = False, **kwargs: Any) -> Any:  # fmt: skip
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return experimental._templated_ring_attention(
            group,
            axis,
            kernel,
            query=query,
            key=key,
            value=value,
            is_causal=is_causal,
            dropout_p=dropout_p,
            **kwargs,
        )

    def run_backward(group: Any, axis: int, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                     logsumexp: Tensor, dropout_p: float, is_causal: bool, **kwargs: Any) -> Any:  # fmt: skip
        def differentiate(*, grad_out: Tensor, **options: Any) -> Any:
            names = "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal"
            ordered = [options.pop(name) for name in names]
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, *ordered, **options)

        return experimental._templated_ring_attention_backward(
            group, axis, differentiate, grad_out=grad, grad_out_name="grad_out", query=query, key=key, value=value,
            out=out, logsumexp=logsumexp, is_causal=is_causal, dropout_p=dropout_p, **kwargs,
        )  # fmt: skip

    experimental._cp_options.convert_to_f32 = False  # results of double precision stay so
    experimental.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = run(run_forward)
    experimental.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = run(
        run_backward
    )
    with context_parallel(mesh, buffers=list(parts), buffer_seq_dims=[1] * len(parts)):
        yield


@contextmanager
def count_all_reduces(calls: Counter[str]) -> Iterator[None]:
    """Count the all-reduces of the monitor by their operation."""
    original = dist.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("regard.monitor"):
            calls[f"{op} of {dist.get_world_size(group)}"] += 1
        return original(tensor, op=op, group=group, async_op=async_op)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original
