"""The driver of a job: runs a model over a corpus, resumes an interrupted run, and commits each shard once.

Workers are threads of this process with a worker process each, or actors of Ray Data.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import ArgumentError, RegardError
from regard.jobs.corpus import Corpus, Shard
from regard.jobs.manifest import LOCK_FILE, MANIFEST_FILE, SETTINGS_FILE, Manifest
from regard.jobs.model_runner import ModelInfo, ModelSpec
from regard.jobs.shards import (
    SCHEMA_VERSION,
    OnProgress,
    ShardJob,
    ShardResult,
    ShardWorker,
    build_write_error,
    format_shard_name,
)
from regard.jobs.worker import SurveyError, WorkerClient, format_python_path

logger = logging.getLogger("regard.survey")

# The callback is called at most this often while documents are measured, in seconds.
INTERVAL = 0.1


class Progress(NamedTuple):
    """Progress of a run. Counts include the shards committed by earlier runs.

    Attributes:
        documents: Documents measured.
        tokens: Tokens measured.
        quarantined: Documents that could not be measured.
        shards: Shards committed.
        total_shards: Shards of the corpus.
        elapsed: Seconds since this run started.
        tokens_per_second: Rate of this run.
        remaining: Estimated seconds left; None before this run has committed a shard.
        note: A message for the user, or "".
    """

    documents: int
    tokens: int
    quarantined: int
    shards: int
    total_shards: int
    elapsed: float
    tokens_per_second: float
    remaining: float | None
    note: str = ""


class ProgressTracker:
    """The counts of a run, updated from several threads and passed to a callback."""

    def __init__(
        self,
        committed: Iterable[dict[str, Any]],
        total_shards: int,
        callback: Callable[[Progress], None] | None,
    ) -> None:
        self.total_shards, self._callback = total_shards, callback
        self.documents = self.tokens = self.quarantined = self.shards = 0
        for entry in committed:
            self.documents += entry["documents"]
            self.tokens += entry["tokens"]
            self.quarantined += len(entry["quarantined"])
            self.shards += 1
        self._before = self.shards, self.tokens
        self._start = time.monotonic()
        self._last_report = 0.0
        self._lock = threading.Lock()

    def add(self, documents: int, tokens: int, quarantined: int) -> None:
        """Add documents that a worker has finished."""
        with self._lock:
            self.documents += documents
            self.tokens += tokens
            self.quarantined += quarantined
        if time.monotonic() - self._last_report > INTERVAL:
            self._report()

    def add_shard(self) -> None:
        """Add a committed shard."""
        self.shards += 1
        self._report()

    def warn(self, note: str) -> None:
        """Log a message and pass it to the callback."""
        logger.warning(note)
        self._report(note)

    def _report(self, note: str = "") -> None:
        if self._callback is None:
            return
        with self._lock:
            self._last_report = time.monotonic()
            elapsed = self._last_report - self._start
            new_shards = self.shards - self._before[0]
            remaining = elapsed / new_shards * (self.total_shards - self.shards) if new_shards else None
            self._callback(
                Progress(
                    self.documents,
                    self.tokens,
                    self.quarantined,
                    self.shards,
                    self.total_shards,
                    elapsed,
                    tokens_per_second=(self.tokens - self._before[1]) / max(elapsed, 1e-9),
                    remaining=remaining,
                    note=note,
                )
            )


class LocalExecutor:
    """Runs `workers` threads in this process, each with a worker process that holds the model."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._first: WorkerClient | None = None

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._first.close()

    def describe_model(self, spec: ModelSpec) -> ModelInfo:
        """Load the model in a process, which the first worker then uses, and return its properties."""
        self._first = WorkerClient(spec)
        return self._first.describe()

    def run(
        self, job: ShardJob, shards: Iterator[Shard], on_progress: OnProgress
    ) -> Generator[ShardResult | SurveyError, None, None]:
        """Yield the result of every shard, in the order in which they finish."""
        results: queue.Queue[ShardResult | BaseException | None] = queue.Queue(2 * self.workers)
        stop, lock = threading.Event(), threading.Lock()
        workers = [ShardWorker(job, self._first if n == 0 else None) for n in range(self.workers)]

        def work(worker: ShardWorker) -> None:
            try:
                while not stop.is_set():
                    with lock:
                        shard = next(shards, None)
                    if shard is None:
                        break
                    results.put(worker(shard, on_progress))
                results.put(None)
            except BaseException as error:  # raised in the thread that takes the results
                results.put(error)

        threads = [threading.Thread(target=work, args=[worker], daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                result = results.get()
                if result is None:
                    running -= 1
                elif isinstance(result, ShardResult | SurveyError):
                    yield result
                else:
                    raise result
        finally:
            stop.set()
            for worker in workers:
                worker.client.stop()
            while any(thread.is_alive() for thread in threads):
                with contextlib.suppress(queue.Empty):
                    results.get(timeout=0.01)
            for worker in workers:
                worker.close()


class RayExecutor:
    """Runs `workers` actors of Ray Data, on the current Ray cluster or on this machine.

    Ray schedules the shards and restarts one whose actor or machine is lost. A shard that returns twice is committed
    once.
    """

    def __init__(self, workers: int) -> None:
        import ray
        import ray.data

        self.workers, self._ray, self._started = workers, ray, False

    def __enter__(self) -> RayExecutor:
        if not self._ray.is_initialized():
            self._started = True
            start_ray(self.workers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._ray.shutdown()

    def describe_model(self, spec: ModelSpec) -> ModelInfo:
        """Load the model on a machine of the cluster and return its properties."""

        def describe(spec: ModelSpec) -> ModelInfo | RegardError:
            client = WorkerClient(spec)
            try:
                return client.describe()
            except RegardError as error:
                return error
            finally:
                client.close()

        remote = self._ray.remote(max_retries=0, **get_worker_resources(spec.options.device))(describe)
        info: ModelInfo | RegardError = self._ray.get(remote.remote(spec))
        if isinstance(info, RegardError):
            raise info
        return info

    def run(
        self, job: ShardJob, shards: Iterator[Shard], on_progress: OnProgress
    ) -> Generator[ShardResult | SurveyError, None, None]:
        """Yield the result of every shard, in the order in which they finish."""
        ray_data = self._ray.data
        items = [{"shard": pickle.dumps(shard)} for shard in shards]
        counted: set[int] = set()
        with silence_ray_data(ray_data):
            batches = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(
                ShardActor,
                fn_constructor_args=(job,),
                batch_size=1,
                compute=ray_data.ActorPoolStrategy(size=self.workers),
                **get_worker_resources(job.spec.options.device),
            )
            # Without prefetching: a result that waits for the next one is lost if the driver is killed.
            for batch in batches.iter_batches(batch_size=None, prefetch_batches=0):
                for data in batch["result"]:
                    result: ShardResult | SurveyError = pickle.loads(data)
                    if isinstance(result, ShardResult) and result.shard not in counted:
                        counted.add(result.shard)
                        on_progress(result.documents, result.tokens, len(result.quarantined))
                    yield result


@contextlib.contextmanager
def silence_ray_data(ray_data: Any) -> Iterator[None]:
    """Turn off the progress bars and messages of Ray Data; a run has its own display."""
    context, log = ray_data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.print_on_execution_start, log.level
    context.enable_progress_bars = context.print_on_execution_start = False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before[:2]
        log.setLevel(before[2])


def start_ray(workers: int, **options: Any) -> None:
    """Start Ray on this machine, or join the cluster at RAY_ADDRESS, without usage statistics."""
    import ray

    if "RAY_ADDRESS" not in os.environ:
        options = {"num_cpus": workers, "include_dashboard": False, **options}
    before = dict(os.environ)
    # Ray's processes search the same paths as this one.
    settings = {"PYTHONPATH": format_python_path(), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(settings)
    try:
        ray.init(log_to_driver=False, logging_level="error", **options)
    finally:
        for name in settings:
            del os.environ[name]
            os.environ.update({name: before[name]} if name in before else {})


class ShardActor:
    """A worker in the form that Ray Data calls."""

    def __init__(self, job: ShardJob) -> None:
        self.worker = ShardWorker(job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = [self.worker(pickle.loads(data)) for data in batch["shard"]]
        return {"result": [pickle.dumps(result) for result in results]}


def get_worker_resources(device: str | None) -> dict[str, float]:
    """Return the resources of a machine that one worker takes."""
    return {"num_cpus": 1, "num_gpus": 1} if device and device.startswith("cuda") else {"num_cpus": 1}


EXECUTORS: dict[str, type[LocalExecutor] | type[RayExecutor]] = {"local": LocalExecutor, "ray": RayExecutor}


def require_package(operation: str, name: str) -> None:
    """Raise an ImportError that names the extra if pyarrow or ray is not installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{operation}: {name} is not installed. pip install 'regard[survey]'") from error


def run_job(
    spec: ModelSpec,
    corpus: Corpus,
    out: Path,
    columns: dict[str, int],
    settings: dict[str, Any],
    progress: Callable[[Progress], None] | None,
) -> None:
    """Run a job, or what is left of it, until every shard is committed."""
    operation, options = spec.operation, spec.options
    if options.executor not in EXECUTORS:
        raise ArgumentError(
            operation,
            received=f"executor {options.executor!r}",
            expected=" or ".join(map(repr, EXECUTORS)),
            hint='"local" needs only this machine.',
        )
    if options.executor == "ray":
        require_package(operation, "ray")
    written = (SETTINGS_FILE, MANIFEST_FILE, LOCK_FILE, format_shard_name(0))
    if any(corpus.includes(out / name) for name in written):
        raise ArgumentError(
            operation,
            received=f"out {str(out)!r} inside the corpus {corpus.path!r}",
            expected="a directory whose files are not part of the corpus",
            hint="Write to another directory, or pass a pattern for the documents: 'texts/*.txt'.",
        )
    executor = EXECUTORS[options.executor](options.workers)
    with Manifest(out, operation) as manifest, executor:
        total = sum(1 for _ in corpus.iter_shards())
        info = executor.describe_model(spec)
        manifest.write_settings(
            {
                "schema_version": SCHEMA_VERSION,
                "regard_version": metadata.version("regard"),
                "model": {name: info[name] for name in ("name", "weights", "tokenizer")},
                "layers": info["layers"],
                "heads": info["heads"],
                **info.get("settings", {}),
                **settings,
                "columns": columns,
                "corpus": {"path": corpus.path, **corpus.compute_fingerprint()},
                "shards": total,
                "notes": info["notes"],
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        committed, notes = manifest.recover()
        tracker = ProgressTracker(committed.values(), total, progress)
        for note in [*info["notes"], *notes]:
            tracker.warn(note)
        done = set(committed)
        committed.clear()
        if len(done) == total:
            return
        job = ShardJob(spec, corpus, str(out), manifest.run, columns, info)
        remaining = (shard for shard in corpus.iter_shards() if shard.number not in done)
        # Closed in any case, so that no worker writes while the lock is released.
        with contextlib.closing(executor.run(job, remaining, tracker.add)) as results:
            for result in results:
                if isinstance(result, SurveyError):
                    raise result
                if result.shard in done:  # an executor may rerun a finished shard
                    manifest.discard(result)
                    continue
                try:
                    manifest.commit(result)
                except OSError as error:
                    raise build_write_error(operation, result.shard, error) from error
                done.add(result.shard)
                tracker.add_shard()
