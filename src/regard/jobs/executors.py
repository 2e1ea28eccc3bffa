"""Executors run the workers: threads of this process with a worker process each, or actors of Ray Data."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from regard.jobs.corpus import Shard
from regard.jobs.errors import SurveyError
from regard.jobs.shard_writer import OnProgress, ShardJob, ShardResult, ShardWorker
from regard.jobs.worker_client import WorkerClient, format_python_path
from regard.jobs.worker_process import JobSpec, ModelInfo


class Executor(Protocol):
    """Runs the shards of a survey on several workers; used as a context manager."""

    def __enter__(self) -> Executor: ...

    def __exit__(self, *_: object) -> None: ...

    def describe_model(self, spec: JobSpec, timeout: float) -> ModelInfo:
        """Load the model on a worker and return its properties."""

    def run(
        self, job: ShardJob, shards: Iterator[Shard], on_progress: OnProgress
    ) -> Generator[ShardResult | SurveyError, None, None]:
        """Yield the result of every shard, in the order in which they finish."""


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

    def describe_model(self, spec: JobSpec, timeout: float) -> ModelInfo:
        """Load the model in a process, which the first worker then uses, and return its properties."""
        self._first = WorkerClient(spec, timeout)
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
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ImportError("survey.run: ray is not installed. pip install 'regard[survey]'") from error
        self.workers, self._ray, self._started = workers, ray, False

    def __enter__(self) -> RayExecutor:
        if not self._ray.is_initialized():
            self._started = True
            start_ray(self.workers)
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._ray.shutdown()

    def describe_model(self, spec: JobSpec, timeout: float) -> ModelInfo:
        """Load the model on a machine of the cluster and return its properties."""

        def describe(spec: JobSpec, timeout: float) -> ModelInfo | SurveyError:
            client = WorkerClient(spec, timeout)
            try:
                return client.describe()
            except SurveyError as error:
                return error
            finally:
                client.close()

        remote = self._ray.remote(max_retries=0, **get_worker_resources(spec.device))(describe)
        info: ModelInfo | SurveyError = self._ray.get(remote.remote(spec, timeout))
        if isinstance(info, SurveyError):
            raise info
        return info

    def run(
        self, job: ShardJob, shards: Iterator[Shard], on_progress: OnProgress
    ) -> Generator[ShardResult | SurveyError, None, None]:
        """Yield the result of every shard, in the order in which they finish."""
        ray_data = self._ray.data
        items = [{"shard": shard.dumps()} for shard in shards]
        with silence_ray_data(ray_data):
            batches = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(
                ShardActor,
                fn_constructor_args=(job,),
                batch_size=1,
                compute=ray_data.ActorPoolStrategy(size=self.workers),
                **get_worker_resources(job.spec.device),
            )
            # Without prefetching: a result that waits for the next one is lost if the driver is killed.
            for batch in batches.iter_batches(batch_size=None, prefetch_batches=0):
                for data in batch["result"]:
                    result: ShardResult | SurveyError = pickle.loads(data)
                    if isinstance(result, ShardResult):
                        on_progress(result.documents, result.tokens, len(result.quarantined))
                    yield result


@contextlib.contextmanager
def silence_ray_data(ray_data: Any) -> Iterator[None]:
    """Turn off the progress bars and messages of Ray Data; the survey has its own display."""
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
    """Start Ray on this machine, or join the cluster at RAY_ADDRESS, without usage statistics.

    Args:
        workers: Number of CPUs that a local Ray offers.
        **options: Arguments of `ray.init`.
    """
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
        results = [self.worker(Shard.loads(str(line))) for line in batch["shard"]]
        return {"result": [pickle.dumps(result) for result in results]}


def get_worker_resources(device: str | None) -> dict[str, float]:
    """Return the resources of a machine that one worker takes."""
    return {"num_cpus": 1, "num_gpus": 1} if device and device.startswith("cuda") else {"num_cpus": 1}


EXECUTORS: dict[str, type[LocalExecutor] | type[RayExecutor]] = {"local": LocalExecutor, "ray": RayExecutor}
