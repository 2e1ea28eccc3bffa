"""A stand-in for an engine of vLLM: a scheduler that chunks, preempts and reuses blocks at random, and layers without a
model, whose queries and keys are drawn for each position."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from regard.vllm.delivery import Delivery
from regard.vllm.layers import find_layers
from regard.vllm.settings import Settings
from regard.vllm.worker import RequestEnd, WorkerMeasurements

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 8


class Implementation:
    """An `AttentionImpl` whose cache has keys and values side by side; its output is the query."""

    def __init__(self, **more: Any) -> None:
        self.scale, self.alibi_slopes, self.sinks, self.logits_soft_cap = DIM**-0.5, None, None, 0
        vars(self).update(more)

    def forward(self, module: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any) -> Any:
        return query

    def do_kv_cache_update(self, module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        keys, values = cache.transpose(1, 2).split(DIM, dim=-1)
        keys[slots // BLOCK, slots % BLOCK] = key
        values[slots // BLOCK, slots % BLOCK] = value


class FullAttentionSpec(SimpleNamespace):
    """vLLM's class of this name: a cache that holds every key."""


class SlidingWindowSpec(SimpleNamespace):
    """vLLM's class of this name: blocks that the window has passed are freed."""


class Writer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[tuple[dict[str, Any], Any]] = []

    def write(self, record: dict[str, Any], rows: Any) -> None:
        self.records.append((record, dict(rows)))

    def close(self) -> None:
        pass


class StandIn:
    """Runs requests until all have ended.

    Args:
        settings: The settings of the plugin.
        kinds: For each layer, what its implementation has beside the defaults; a "window" frees blocks.
        blocks: Blocks of the cache.
        keeps_batch: Whether the runner keeps its batch, as the V1 runner does; else `prepare_inputs` returns it.
        ahead: Whether steps are scheduled before the last token is known: one row past the end.
        seed: Of all that is random.
    """

    def __init__(
        self,
        settings: Settings,
        kinds: list[dict[str, Any]],
        *,
        blocks: int = 40,
        keeps_batch: bool = True,
        ahead: bool = False,
        seed: int = 0,
    ) -> None:
        self.random, self.ahead = random.Random(seed), ahead
        self.generator = torch.Generator().manual_seed(seed)
        self.modules, groups = {}, []
        for number, kind in enumerate(kinds):
            kind = dict(kind)
            window = kind.pop("window", None)
            name = f"layers.{number}.attn"
            self.modules[name] = SimpleNamespace(
                impl=Implementation(**kind),
                kv_cache=torch.zeros(blocks, KV_HEADS, BLOCK, 2 * DIM),
                layer_name=name,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_size=DIM,
                sliding_window=window,
            )
            spec = FullAttentionSpec if window is None else SlidingWindowSpec
            groups.append(SimpleNamespace(layer_names=[name], kv_cache_spec=spec(block_size=BLOCK)))
        self.free = [list(range(1, blocks)) for _ in kinds]
        layers, refused = find_layers(
            self.modules, SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)
        )
        assert not refused, refused
        self.runner = SimpleNamespace()
        if keeps_batch:
            self.runner.input_batch = SimpleNamespace(req_ids=[])
        else:
            self.runner.prepare_inputs = lambda names: SimpleNamespace(req_ids=names)
        self.keeps_batch = keeps_batch
        self.writer = Writer()
        self.measurements = WorkerMeasurements(
            self.runner, layers, settings, Delivery({"kind": "worker"}, {"file": self.writer}, 1000)
        )
        self.worker = SimpleNamespace(execute_model=self._execute, shutdown=lambda: None)
        self.measurements.install(self.worker)
        self.requests: dict[str, Any] = {}
        self.finished: dict[str, RequestEnd] = {}
        self.poison: list[tuple[int, int]] = []  # layer and block that others overwrite in this step

    def add(self, name: str, prompt: int, tokens: int, cached: int = 0, **options: Any) -> None:
        """Add a request; its first `cached` tokens have keys from before."""
        length = prompt + tokens + 1
        draw = [
            (
                torch.randn(length, HEADS, DIM, generator=self.generator),
                torch.randn(length, KV_HEADS, DIM, generator=self.generator),
            )
            for _ in self.modules
        ]
        self.requests[name] = SimpleNamespace(
            name=name, prompt=prompt, tokens=tokens, computed=0, cached=cached, blocks=None, draw=draw,
            options=options, known=False, done=False,
        )  # fmt: skip

    def run(self) -> dict[str, tuple[dict[str, Any], Any]]:
        """Run all requests, and return the record and the rows of each."""
        for _ in range(10_000):
            self._step()
            if not self.requests and not self.finished:
                break
        self._step()
        self.worker.shutdown()
        return {
            record["id"]: (record, rows) for record, rows in self.writer.records if record["kind"] != "asked"
        }

    def _step(self) -> None:
        new, cached, counts = [], [], dict[str, int]()
        resumed, new_blocks = set(), []
        self.poison = []
        for request in list(self.requests.values()):
            if request.done:
                continue
            if request.known and self.random.random() < 0.05:
                if request.blocks is not None and self.random.random() < 0.7:  # preempted
                    self._release(request)
                    if getattr(request, "generated", 0) > 1 and self.random.random() < 0.5:
                        self._discard(request)
                if self.random.random() < 0.6:  # or else resumed in the same step
                    continue
            chunk = self.random.choice([1, 5, 13, 40])
            total = request.prompt + request.tokens - 1 + self.ahead
            known = request.prompt + getattr(request, "generated", 0)
            count = min(chunk, max(known, request.computed + 1) - request.computed, total - request.computed)
            was_out = request.blocks is None
            start = request.computed
            if was_out:
                request.blocks, request.freed = [[] for _ in self.modules], 0
                start = request.cached if not request.known else 0
            added = self._grow(request, start, start + count)
            if added is None:
                continue
            if was_out and request.cached and not request.known:
                self._write_keys(request, 0, start)
            request.computed = start
            counts[request.name] = count
            if not request.known or (was_out and not self.keeps_batch):
                new.append(self._describe(request))
            else:
                cached.append((request.name, start))
                if was_out:
                    resumed.add(request.name)
                    new_blocks.append(tuple(list(own) for own in request.blocks))
                else:
                    new_blocks.append(added if any(added) else None)
            request.known = True
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _ in cached],
                num_computed_tokens=[start for _, start in cached],
                new_block_ids=new_blocks,
                num_output_tokens=[getattr(self.requests[name], "generated", 0) for name, _ in cached],
                resumed_req_ids=resumed,
            ),
            num_scheduled_tokens=counts,
            finished_req_ids=set(self.finished),
            regard_ends=self.finished,
        )
        self.finished = {}
        self.worker.execute_model(output)

    def _describe(self, request: Any) -> Any:
        extra = {"regard": request.options.pop("regard")} if "regard" in request.options else {}
        request.options.update(extra)
        return SimpleNamespace(
            req_id=request.name,
            prompt_token_ids=list(range(request.prompt)),
            prefill_token_ids=list(range(request.prompt + getattr(request, "generated", 0))),
            block_ids=tuple(list(own) for own in request.blocks),
            num_computed_tokens=request.computed,
            sampling_params=SimpleNamespace(extra_args=dict(request.options)),
        )

    def _grow(self, request: Any, start: int, stop: int) -> Any:
        """Give a request blocks up to a token, and free those that a window has passed; None if there are none."""
        needed = -(-stop // BLOCK)
        if any(len(free) < needed - len(own) for free, own in zip(self.free, request.blocks, strict=True)):
            if not any(request.blocks):
                request.blocks = None
            return None
        added = []
        for layer, (module, own) in enumerate(zip(self.modules.values(), request.blocks, strict=True)):
            self.random.shuffle(self.free[layer])
            fresh = [self.free[layer].pop() for _ in range(needed - len(own))]
            own += fresh
            added.append(fresh)
            if module.sliding_window is not None:
                for index in range(max(start - module.sliding_window + 1, 0) // BLOCK):
                    if own[index]:
                        self.free[layer].append(own[index])
                        self.poison.append((layer, own[index]))
                        own[index] = 0
        return tuple(added)

    def _release(self, request: Any) -> None:
        for layer, own in enumerate(request.blocks):
            kept = [block for block in own if block]
            self.free[layer] += kept
            self.poison += [(layer, block) for block in kept]
        request.blocks, request.computed = None, 0

    def _discard(self, request: Any) -> None:
        """Take back two tokens, as a reset of the prefix cache does; the row of the first has run."""
        request.generated -= 2
        start = request.prompt + request.generated
        for query, key in request.draw:
            query[start:] = torch.randn(query[start:].shape, generator=self.generator)
            key[start:] = torch.randn(key[start:].shape, generator=self.generator)

    def _write_keys(self, request: Any, start: int, stop: int) -> None:
        for layer, module in enumerate(self.modules.values()):
            keys = request.draw[layer][1][start:stop]
            slots = torch.tensor(
                [request.blocks[layer][t // BLOCK] * BLOCK + t % BLOCK for t in range(start, stop)],
                dtype=torch.int64,
            )
            module.impl.do_kv_cache_update(module, keys, torch.zeros_like(keys), module.kv_cache, slots)

    def _execute(self, output: Any) -> str:
        """Run the layers on the rows of a step, in an order that only the batch tells."""
        for layer, block in self.poison:
            list(self.modules.values())[layer].kv_cache[block] = torch.nan
        names = list(output.num_scheduled_tokens)
        self.random.shuffle(names)
        if self.keeps_batch:
            self.runner.input_batch.req_ids = names
        elif names:
            self.runner.prepare_inputs(names)
        rows = {name: (self.requests[name].computed, output.num_scheduled_tokens[name]) for name in names}
        for name, (start, count) in rows.items():
            self._write_keys(self.requests[name], start, start + count)
        for layer, module in enumerate(self.modules.values()):
            if names:
                query = torch.cat(
                    [
                        self.requests[name].draw[layer][0][start : start + count]
                        for name, (start, count) in rows.items()
                    ]
                )
                padded = torch.cat([query, torch.full((3, HEADS, DIM), torch.nan)])
                assert module.impl.forward(module, padded, None, None, module.kv_cache, None) is padded
        for name, (start, count) in rows.items():
            request = self.requests[name]
            request.computed = start + count
            request.generated = max(
                request.computed - request.prompt + 1, getattr(request, "generated", 0), 0
            )
            if request.computed >= request.prompt + request.tokens - 1 + self.ahead:
                self._release(request)
                del self.requests[name]
                self.finished[name] = RequestEnd(request.tokens, "stop")
        return "done"


def compute_dense(stand_in_draw: Any, kind: dict[str, Any], stop: int) -> torch.Tensor:
    """Return the weights of the first `stop` positions in float64, (heads, stop, stop)."""
    query, key = (part[:stop].double().transpose(0, 1) for part in stand_in_draw)
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2) * DIM**-0.5
    if kind.get("logits_soft_cap"):
        scores = kind["logits_soft_cap"] * torch.tanh(scores / kind["logits_soft_cap"])
    distance = torch.arange(stop)[:, None] - torch.arange(stop)[None]
    if kind.get("alibi_slopes") is not None:
        scores = scores - torch.tensor(kind["alibi_slopes"]).double()[:, None, None] * distance
    allowed = distance >= 0
    if kind.get("window") is not None:
        allowed &= distance < kind["window"]
    scores = scores.masked_fill(~allowed, -torch.inf)
    if kind.get("sinks") is not None:
        sink = kind["sinks"].double()[:, None, None].expand(-1, stop, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return scores.softmax(-1)
