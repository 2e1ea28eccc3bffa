"""`Delivery`: write records in background threads, so that a slow disk or collector never delays a request.

Every writer has a thread and a bounded queue of its own. If the disk or the collector does not take a record, it is
tried again; a record that is at fault itself is dropped. If the queue is full, further records are dropped. All are
counted.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from regard.types import Array
from regard.vllm.layers import MeasuredLayer
from regard.vllm.record_files import FORMAT, FileWriter, Record
from regard.vllm.settings import Settings

__all__ = ["Delivery", "SpanWriter", "open_delivery", "summarise_for_span"]

logger = logging.getLogger("vllm.regard")

RETRY_SECONDS = 1.0
CLOSE_SECONDS = 10.0  # how long `close` waits for the writers


class Writer(Protocol):
    """Writes records; an `OSError` means that a record was not written and can be tried again."""

    def write(self, record: Record, rows: Mapping[str, Array]) -> None: ...

    def close(self) -> None: ...


class Delivery:
    """Passes records to writers, each in a thread of its own.

    Args:
        worker: What describes the worker: the model, its layers and its rank.
        writers: The writers by name.
        waiting: How many records may wait for each writer.
    """

    def __init__(self, worker: Record, writers: Mapping[str, Writer], waiting: int) -> None:
        self.worker = worker
        self._threads = [_WriterThread(name, writer, waiting) for name, writer in writers.items()]

    def put(self, record: Record, rows: Mapping[str, Array] | None = None) -> None:
        """Pass a record to the writers; never blocks."""
        for thread in self._threads:
            thread.put({"time": time.time(), **record}, rows or {})

    @property
    def counts(self) -> dict[str, int]:
        """Of each writer: records written, dropped and waiting, and attempts that failed."""
        return {
            f"{thread.name}_{name}": count
            for thread in self._threads
            for name, count in {**thread.counts, "waiting": thread.waiting}.items()
        }

    def close(self) -> None:
        """Wait until the writers are done, for a limited time, and close them."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


class _WriterThread(threading.Thread):
    def __init__(self, name: str, writer: Writer, waiting: int) -> None:
        super().__init__(name=name, daemon=True)
        self._writer, self._queue = writer, queue.Queue[tuple[Record, Mapping[str, Array]]](waiting)
        self._stopped = threading.Event()
        self._logged = False
        self._busy = 0
        self.counts = {"written": 0, "dropped": 0, "errors": 0}
        self.start()

    @property
    def waiting(self) -> int:
        return self._queue.qsize() + self._busy

    def put(self, record: Record, rows: Mapping[str, Array]) -> None:
        try:
            self._queue.put_nowait((record, rows))
        except queue.Full:
            self.counts["dropped"] += 1

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not (self._stopped.is_set() and self._queue.empty()):
            try:
                record, rows = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            self._busy = 1
            self._write(record, rows)
            self._busy = 0
        try:
            self._writer.close()
        except Exception as error:
            self._log(error)

    def _write(self, record: Record, rows: Mapping[str, Array]) -> None:
        """Write a record; while the disk or the collector is at fault, try again until the worker ends."""
        while True:
            try:
                self._writer.write(record, rows)
                self.counts["written"] += 1
                return
            except Exception as error:
                self.counts["errors"] += 1
                self._log(error)
                can_wait = isinstance(error, OSError)
            if self._stopped.is_set() or not can_wait:
                self.counts["dropped"] += 1
                return
            self._stopped.wait(RETRY_SECONDS)

    def _log(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            logger.error("regard cannot write its records to %s, and goes on: %s", self.name, error)


def open_delivery(
    settings: Settings,
    vllm_config: Any,
    layers: Sequence[MeasuredLayer],
    refused: Mapping[str, str],
    rank: int,
) -> Delivery:
    """Open the writers that the settings name.

    Args:
        settings: The settings of the server.
        vllm_config: The engine's `VllmConfig`.
        layers: The layers that are measured.
        refused: Why each other layer is not.
        rank: Rank of the worker.
    """
    import vllm

    parallel = vllm_config.parallel_config
    tensor_rank = rank % parallel.tensor_parallel_size
    worker = {
        "kind": "worker",
        "format": FORMAT,
        "model": vllm_config.model_config.model,
        "served_names": vllm_config.model_config.served_model_name,
        "vllm": vllm.__version__,
        "regard": importlib.metadata.version("regard"),
        "pid": os.getpid(),
        "rank": rank,
        "ranks": parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        "engine": vllm_config.instance_id,
        "data_rank": parallel.data_parallel_rank,
        "started": time.time(),
        "layers": [layer.name for layer in layers],
        "heads": [layer.heads for layer in layers],
        "first_heads": [tensor_rank * layer.heads for layer in layers],
        "not_measured": dict(refused),
    }
    writers: dict[str, Writer] = {
        "file": FileWriter(Path(settings.folder).expanduser(), worker, settings.format)
    }
    if settings.otlp_endpoint is not None:
        writers["otlp"] = SpanWriter(settings.otlp_endpoint, worker)
    return Delivery(worker, writers, settings.queue)


class SpanWriter:
    """Exports a span for each measured request, with the means over all heads, to an OpenTelemetry collector.

    Args:
        endpoint: Address of the collector. As in vLLM, the variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL selects
            "grpc", the default, or "http/protobuf".
        worker: What describes the worker.

    Raises:
        ImportError: If the SDK of OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, worker: Record) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            self._exporter: Any = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            self._exporter = HttpExporter(endpoint=endpoint)
        self._tracer = TracerProvider(
            resource=Resource.create(
                {"service.name": "regard.vllm", "gen_ai.request.model": worker["model"]}
            ),
            shutdown_on_exit=False,
        ).get_tracer("regard.vllm")
        self._rank = worker["rank"]

    def write(self, record: Record, rows: Mapping[str, Array]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if record["kind"] == "asked":
            return
        span: Any = self._tracer.start_span(
            "attention",
            start_time=int((record.get("started") or record["time"]) * 1e9),
            attributes=summarise_for_span(record) | {"regard.rank": self._rank},
        )
        span.end(int((record.get("finished") or record["time"]) * 1e9))
        if self._exporter.export([span]) is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector did not accept a span")

    def close(self) -> None:
        self._exporter.shutdown()


def summarise_for_span(record: Record) -> dict[str, str | int | float]:
    """Return the attributes of a span: means over all heads and generated tokens."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.response.id": record["id"],
        "regard.child": record["child"],
        "regard.kind": record["kind"],
    }
    if record["kind"] == "failed":
        return attributes | {"regard.reason": record["reason"]}
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "measured_tokens"):
        attributes[f"regard.{name}"] = record[name]
    heads = record["heads"]
    if heads["rows"]:
        columns = {
            f"share.{name}": [head[number] for layer in heads["shares"] for head in layer]
            for number, name in enumerate(record["names"])
        }
        columns |= {name: [head for layer in heads[name] for head in layer] for name in ("entropy", "first")}
        attributes |= {
            f"regard.{name}": float(np.mean(column)) for name, column in columns.items() if None not in column
        }
        largest = [head for layer in heads["max_score"] for head in layer if head is not None]
        attributes |= {"regard.max_score": max(largest)} if largest else {}
    return attributes
