"""The plugin inside a worker of vLLM: which requests are measured, and when.

`register` is the entry point that vLLM calls in each of its processes. It replaces two functions that run once when an
engine starts. Nothing else changes unless the settings ask for it. Then one object for each worker reads what the
scheduler sends. In steps with a measured request, and in no other, it sees the queries that the layers receive.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from regard.vllm.delivery import Delivery, open_delivery
from regard.vllm.layers import MeasuredLayer, UnsupportedEngineError, find_layers
from regard.vllm.measured_request import WAITING_ROWS, MeasuredRequest, StepQueries
from regard.vllm.settings import (
    RequestOptions,
    Settings,
    asks_for_nothing,
    find_settings,
    is_sampled,
    select_ids,
    split_request_id,
)

__all__ = ["RequestEnd", "StepReader", "WorkerMeasurements", "check_engine", "register"]

logger = logging.getLogger("vllm.regard")  # vLLM shows the messages of loggers below its own


def register() -> None:
    """Prepare an engine of vLLM to be measured; the entry point of the group `vllm.general_plugins`."""
    try:
        _wrap_engine()
    except Exception as error:  # vLLM would not start
        logger.error("regard does not know this version of vLLM, and measures nothing: %r", error)


def _wrap_engine() -> None:
    """Wrap the two functions that run once when an engine starts."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if hasattr(WorkerWrapperBase, "_regard_registered"):
        return
    WorkerWrapperBase._regard_registered = True
    initialize, initialize_scheduler = WorkerWrapperBase.initialize_from_config, Scheduler.__init__

    @functools.wraps(initialize)
    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> None:
        initialize(self, kv_cache_configs)
        _try_to_install(self, kv_cache_configs[self.global_rank])

    @functools.wraps(initialize_scheduler)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize_scheduler(self, *args, **kwargs)
        settings = _find_settings_or_log(self.vllm_config)
        if settings is not None:
            _send_ends(self, settings.token_ids)

    WorkerWrapperBase.initialize_from_config = initialize_from_config
    Scheduler.__init__ = init


def _find_settings_or_log(vllm_config: Any) -> Settings | None:
    try:
        return find_settings(vllm_config)
    except Exception as error:
        logger.error("regard measures nothing: %s", error)
        return None


class RequestEnd(NamedTuple):
    """What the scheduler knows of a request that has ended, and the workers do not.

    Attributes:
        generated: Number of tokens that were generated; None if the scheduler did not say.
        reason: "stop", "length", "abort" or "error"; "unknown" if the scheduler did not say.
        token_ids: Tokens of the answer, if they are stored.
    """

    generated: int | None = None
    reason: str = "unknown"
    token_ids: list[int] | None = None


def _send_ends(scheduler: Any, with_tokens: bool) -> None:
    """Make a scheduler send a `RequestEnd` of each finished request to the workers."""
    free, schedule, ends = scheduler._free_request, scheduler.schedule, dict[str, RequestEnd]()

    def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            tokens = list(request.output_token_ids) if with_tokens else None
            reason = str(request.get_finished_reason())
            ends[request.request_id] = RequestEnd(request.num_output_tokens, reason, tokens)
        except Exception as error:
            logger.error("regard does not know the end of a request: %r", error)
        return free(request, *args, **kwargs)

    def schedule_with_ends(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        output.regard_ends = {name: ends.pop(name) for name in output.finished_req_ids if name in ends}
        return output

    scheduler._free_request, scheduler.schedule = free_request, schedule_with_ends


def _try_to_install(wrapper: Any, kv_cache_config: Any) -> None:
    """Measure a worker if the settings ask for it; log the reason if it cannot be measured."""
    settings = _find_settings_or_log(wrapper.vllm_config)
    if settings is None:
        return
    try:
        runner = wrapper.worker.model_runner
        check_engine(wrapper.vllm_config)
        with torch.inference_mode():
            modules = runner.compilation_config.static_forward_context
            layers, refused = find_layers(modules, kv_cache_config)
        if not layers:
            reasons = "; ".join(dict.fromkeys(refused.values())) or "the model has no attention layer"
            raise UnsupportedEngineError(reasons)
        rank = getattr(wrapper.worker, "rank", 0)
        delivery = open_delivery(settings, wrapper.vllm_config, layers, refused, rank)
        WorkerMeasurements(runner, layers, settings, delivery).install(wrapper)
    except Exception as error:
        reason = str(error) or type(error).__name__
        logger.error("regard measures nothing on this engine: %s. The engine serves as without it.", reason)
        wrapper.regard_status = lambda: json.dumps({"off": reason})
        wrapper.regard_records = lambda _: "[]"
        return
    for name, reason in refused.items():
        logger.warning("regard does not measure the layer %s: %s", name, reason)
    logger.info(
        "regard measures %d layers: every request that asks, and %g of the others. Records go to %s",
        len(layers),
        settings.rate,
        settings.folder,
    )


def check_engine(vllm_config: Any) -> None:
    """Refuse an engine whose steps this module cannot follow."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    graphs = vllm_config.compilation_config.cudagraph_mode
    on_cpu = vllm_config.device_config.device_type == "cpu"
    reasons = {
        "speculative decoding is not supported": vllm_config.speculative_config is not None,
        "encoder-decoder models are not supported": model.is_encoder_decoder,
        "pooling models generate no tokens": model.runner_type == "pooling",
        "kv_sharing_fast_prefill skips rows": vllm_config.cache_config.kv_sharing_fast_prefill,
        "micro-batches are not supported": getattr(parallel, "use_ubatching", False),
        "context parallelism is not supported": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "full CUDA graphs replay attention without calling it; set cudagraph_mode to PIECEWISE": not on_cpu
        and graphs is not None
        and graphs.has_full_cudagraphs(),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise UnsupportedEngineError("; ".join(found))


class WorkerMeasurements:
    """The measured requests of one worker.

    Args:
        runner: The worker's model runner.
        layers: The layers that are measured.
        settings: The settings of the server.
        delivery: Where the records go.
    """

    def __init__(
        self, runner: Any, layers: list[MeasuredLayer], settings: Settings, delivery: Delivery
    ) -> None:
        self.runner, self.layers, self.settings, self.delivery = runner, layers, settings, delivery
        self.requests: dict[str, MeasuredRequest] = {}
        self.records: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.counts = {"seen": 0, "asked": 0, "measured": 0, "failed": 0}
        self._logged: set[str] = set()
        self._batch: Any = None  # of the V2 runner, which keeps none

    def install(self, wrapper: Any) -> None:
        """Follow the steps of a worker: replace `execute_model` and `shutdown` of this one object."""
        execute_model, shutdown = wrapper.execute_model, wrapper.shutdown
        if not hasattr(self.runner, "input_batch"):
            prepare_inputs = self.runner.prepare_inputs

            def prepare(*args: Any, **kwargs: Any) -> Any:
                self._batch = prepare_inputs(*args, **kwargs)
                return self._batch

            self.runner.prepare_inputs = prepare

        def execute(scheduler_output: Any) -> Any:
            with torch.inference_mode():
                rows = self._protect(None, self.begin_step, scheduler_output) or {}
            if not rows:
                return execute_model(scheduler_output)
            with self._read_queries(rows, scheduler_output.num_scheduled_tokens):
                return execute_model(scheduler_output)

        def close() -> None:
            self.close()
            shutdown()

        wrapper.execute_model, wrapper.shutdown = execute, close
        wrapper.regard_records, wrapper.regard_status = self.find_records, self.get_status

    # Steps

    def begin_step(self, scheduler_output: Any) -> dict[str, range]:
        """Read what the scheduler says before a step, while the cache is as the last step left it.

        Args:
            scheduler_output: The `SchedulerOutput` of the step.

        Returns:
            For each measured request of the step, the positions of the rows to measure.
        """
        self._end_requests(scheduler_output)
        cached, starts = scheduler_output.scheduled_cached_reqs, dict[str, int]()
        for name, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in self.requests:
                starts[name] = start
        new = {entry.req_id: entry for entry in scheduler_output.scheduled_new_reqs}
        # Rows that wait are measured before blocks change hands. A request may be preempted and resumed in one step.
        for name, request in list(self.requests.items()):
            start = None if name in cached.resumed_req_ids else starts.get(name)
            self._protect(name, self._measure_waiting, request, start)
        for entry in new.values():
            self._protect(entry.req_id, self._begin_request, entry)
            if entry.req_id in self.requests:
                starts[entry.req_id] = entry.num_computed_tokens
        for name, blocks, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            if name not in self.requests:
                continue
            if name in cached.resumed_req_ids:
                self.requests[name].resume(blocks, outputs)
            elif blocks is not None:
                self.requests[name].add_blocks(blocks)
        counts = scheduler_output.num_scheduled_tokens
        rows = {
            name: self.requests[name].find_new_rows(start, counts[name])
            for name, start in starts.items()
            if name in self.requests and counts.get(name)
        }
        return {name: own for name, own in rows.items() if own}

    def _measure_waiting(self, request: MeasuredRequest, start: int | None) -> None:
        """Measure the rows of a request that wait, if there are enough or if they cannot wait any longer.

        Args:
            request: The request.
            start: Where its next rows start; None if it has none in this step, or if its blocks change.
        """
        if start is None or request.waiting >= WAITING_ROWS or request.loses_keys(start):
            request.measure_waiting()

    def _begin_request(self, entry: Any) -> None:
        """Decide whether a request that is scheduled for the first time is measured."""
        prompt_len = _count_prompt(entry)
        known = self.requests.get(entry.req_id)
        if known is not None and known.prompt_len == prompt_len:
            # The V2 runner receives a resumed request as a new one.
            known.resume(entry.block_ids, len(entry.prefill_token_ids or ()) - prompt_len)
            return
        if known is not None:
            raise NotImplementedError("prompts that arrive in parts are not supported")
        parameters = entry.sampling_params
        if parameters is None or not prompt_len:
            return
        self.counts["seen"] += 1
        extra = parameters.extra_args or {}
        given = extra.get("regard")
        if asks_for_nothing(given) or (
            "regard" not in extra and not is_sampled(entry.req_id, self.settings.rate)
        ):
            return
        self.counts["asked"] += 1
        client_id, child = split_request_id(entry.req_id)
        self.delivery.put({"kind": "asked", "id": client_id, "child": child, "engine_id": entry.req_id})
        request = MeasuredRequest(
            entry.req_id,
            RequestOptions.parse(given, self.settings),
            prompt_len,
            entry.block_ids,
            entry.num_computed_tokens,
            self.layers,
            self.settings.keep_bytes,
        )
        if self.settings.token_ids:
            request.token_ids = entry.prompt_token_ids
        self.requests[entry.req_id] = request

    def _end_requests(self, scheduler_output: Any) -> None:
        ends = getattr(scheduler_output, "regard_ends", {})
        for name in scheduler_output.finished_req_ids:
            if name in self.requests:
                self._protect(name, self._write_record, name, ends.get(name, RequestEnd()))

    def _write_record(self, name: str, end: RequestEnd) -> None:
        request = self.requests[name]
        record, rows = request.finish(end.generated)
        record["finish_reason"] = end.reason
        if request.token_ids is not None:
            record["token_ids"] = [*request.token_ids, *(end.token_ids or [])]
        del self.requests[name]
        client_id, child = split_request_id(name)
        record = {"kind": "request", "id": client_id, "child": child, "engine_id": name, **record}
        self.counts["measured"] += 1
        self._remember(record)
        self.delivery.put(record, rows)

    def _remember(self, record: dict[str, Any]) -> None:
        """Keep a record for the route, and forget the oldest ones."""
        self.records[record["engine_id"]] = record
        while len(self.records) > self.settings.recent:
            self.records.popitem(last=False)

    @contextmanager
    def _read_queries(self, rows: dict[str, range], counts: dict[str, int]) -> Iterator[None]:
        """Read the queries of a step: each layer's `forward` is wrapped on its object, and unwrapped afterwards."""
        step = StepReader(self, rows, counts)
        self._protect(None, self._wrap_layers, step)
        try:
            yield
        finally:
            for layer in self.layers:
                vars(layer.implementation).pop("forward", None)
        self._protect(None, step.end)

    def _wrap_layers(self, step: StepReader) -> None:
        for number, layer in enumerate(self.layers):
            layer.implementation.forward = self._wrap(number, layer, step)

    def _wrap(self, number: int, layer: MeasuredLayer, step: StepReader) -> Any:
        forward = type(layer.implementation).forward

        def read(*args: Any, **kwargs: Any) -> Any:
            output = forward(layer.implementation, *args, **kwargs)
            self._protect(None, lambda: step.read(number, kwargs["query"] if "query" in kwargs else args[1]))
            return output

        return read

    def get_batch_ids(self) -> list[str]:
        """Return the requests of the current step in the order of its rows."""
        batch = getattr(self.runner, "input_batch", None) or self._batch
        return [name for name in batch.req_ids if name is not None]

    # Errors and status

    def _protect(self, name: str | None, function: Any, *args: Any) -> Any:
        """Call a function; if it fails, the request is not measured any further, and the server goes on.

        Args:
            name: The request that the call belongs to; None for all measured requests.
            function: The function.
            args: Its arguments.
        """
        try:
            return function(*args)
        except Exception as error:
            try:
                self._fail(list(self.requests) if name is None else [name], error)
            except Exception:
                logger.exception("regard could not count a failure")
            return None

    def _fail(self, names: list[str], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._logged and len(self._logged) < 100:
            self._logged.add(reason)
            logger.error(
                "regard does not measure the requests %s: %s", ", ".join(names), reason, exc_info=error
            )
        for name in names:
            self.requests.pop(name, None)
            self.counts["failed"] += 1
            client_id, child = split_request_id(name)
            record = {"kind": "failed", "id": client_id, "child": child, "engine_id": name, "reason": reason}
            self._remember(record)
            self.delivery.put(record)

    def find_records(self, response_id: str) -> str:
        """Return the records of a response of the server as JSON: a list, one for each child of n > 1.

        JSON, because an object that vLLM cannot send between its processes would stop the server.
        """
        ids = select_ids((record["id"] for record in self.records.values()), response_id)
        found = [record for record in self.records.values() if record["id"] in ids]
        return json.dumps([self.delivery.worker | record for record in found])

    def get_status(self) -> str:
        """Return what was counted since the start, as JSON."""
        counts = self.counts | self.delivery.counts | {"running": len(self.requests)}
        return json.dumps(self.delivery.worker | {"counts": counts})

    def close(self) -> None:
        """Write the records of requests that the engine did not report as finished, and wait for the writers."""
        with torch.inference_mode():
            for name in list(self.requests):
                self._protect(name, self._write_record, name, RequestEnd())
        self._protect(None, self.delivery.close)


def _count_prompt(entry: Any) -> int:
    """Return the number of tokens of a request's prompt, which may be given as embeddings."""
    prompt = entry.prompt_embeds if entry.prompt_token_ids is None else entry.prompt_token_ids
    return 0 if prompt is None else len(prompt)


class StepReader:
    """The rows of one step that are read.

    Args:
        measurements: The worker's.
        rows: For each measured request, the positions of its rows.
        counts: Rows of each request of the step.
    """

    def __init__(
        self, measurements: WorkerMeasurements, rows: dict[str, range], counts: dict[str, int]
    ) -> None:
        self.measurements, self.rows, self.counts = measurements, rows, counts
        self.queries = StepQueries()
        self._index: Any = None
        self._row_count = 0
        self._prompt: list[tuple[str, int, slice]] = []
        self._waiting: list[tuple[str, range]] = []

    def read(self, number: int, query: torch.Tensor) -> None:
        """Read the queries of a layer, (rows, heads, head_dim)."""
        if self._index is None:
            self._find_rows(query.device)
        if len(query) < self._row_count:
            raise RuntimeError(f"a layer computed {len(query)} rows of {self._row_count}")
        with torch.inference_mode():
            self.queries.layers[number] = query[self._index]
            requests = self.measurements.requests
            for name, position, rows in self._prompt:
                if name in requests:
                    self.measurements._protect(
                        name, requests[name].add_prompt_rows, number, position, query[rows]
                    )

    def _find_rows(self, device: torch.device) -> None:
        """Find the rows of the requests in the batch, whose order is known once its inputs are prepared."""
        first, index = 0, list[int]()
        for name in self.measurements.get_batch_ids():
            count = self.counts.get(name, 0)
            own = self.rows.get(name)
            if own is not None:
                shift = first + count - own.stop  # the rows of a step are the last ones
                last_of_prompt = self.measurements.requests[name].prompt_len - 1
                if own.start < last_of_prompt:
                    stop = min(own.stop, last_of_prompt)
                    self._prompt.append((name, own.start, slice(own.start + shift, stop + shift)))
                    own = range(stop, own.stop)
                if own:
                    index += [position + shift for position in own]
                    self._waiting.append((name, own))
            first += count
        self._row_count = first
        self._index = torch.tensor(index, dtype=torch.int64, device=device)

    def end(self) -> None:
        """Hand the rows to their requests; a step whose layers did not run is an error."""
        requests, start = self.measurements.requests, 0
        if self._index is None:
            raise RuntimeError("the layers did not call the forward of their implementation")
        for name, own in self._waiting:
            if name in requests and len(self.queries.layers) == len(self.measurements.layers):
                requests[name].add_rows(own, self.queries, start)
            elif name in requests:
                raise RuntimeError("some layers did not run")
            start += len(own)
        for name, own in self.rows.items():
            if name in requests:
                requests[name].next_row = own.stop
