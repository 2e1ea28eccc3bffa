"""Who does the work: threads of this process, each with a model's process, or actors of Ray Data."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from regard.survey.corpus import Shard
from regard.survey.shard_writer import Work, Worker
from regard.survey.worker_client import Measurer, SurveyError, python_path

Tell = Callable[[int, int, int], None]


class Local:
    """The laptop's way: `workers` threads here, each with a process that has the model."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._first: Measurer | None = None

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._first is not None:
            self._first.close()

    def about(self, measurer: Measurer) -> dict[str, Any]:
        """What the model is. The process that told it is the first worker's."""
        self._first = measurer
        return measurer.about()

    def run(self, work: Work, shards: Iterator[Shard], tell: Tell) -> Iterator[dict[str, Any]]:
        """A receipt for every shard, in the order in which they are done."""
        done: queue.Queue[Any] = queue.Queue(2 * self.workers)
        stop, turn = threading.Event(), threading.Lock()
        workers = [Worker(work, self._first if n == 0 else None) for n in range(self.workers)]

        def serve(worker: Worker) -> None:
            try:
                while not stop.is_set():
                    with turn:
                        shard = next(shards, None)
                    if shard is None:
                        break
                    done.put(worker(shard, tell))
                done.put(None)
            except BaseException as error:  # it is raised where the receipts are taken
                done.put(error)

        threads = [threading.Thread(target=serve, args=[worker], daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        left = len(threads)
        try:
            while left:
                receipt = done.get()
                if isinstance(receipt, BaseException):
                    raise receipt
                if receipt is None:
                    left -= 1
                else:
                    yield receipt
        finally:
            stop.set()
            for worker in workers:
                worker.measurer.stop()
            while any(thread.is_alive() for thread in threads):
                with contextlib.suppress(queue.Empty):
                    done.get(timeout=0.01)
            for worker in workers:
                worker.close()


class Ray:
    """Actors of Ray Data, as many as `workers`, on the cluster that is there or on this machine.

    Ray schedules, and starts a shard again whose actor or machine is gone; a shard that comes twice is committed once.
    """

    def __init__(self, workers: int) -> None:
        try:
            import ray
            import ray.data
        except ImportError as error:
            raise ImportError("survey: ray is not installed. pip install 'regard[survey]'") from error
        self.workers, self._ray, self._ours = workers, ray, False

    def __enter__(self) -> Ray:
        if not self._ray.is_initialized():
            self._ours = True
            start(self.workers)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._ours:
            self._ray.shutdown()

    def about(self, measurer: Measurer) -> dict[str, Any]:
        """What the model is, told by a machine that would run it."""

        def ask(task: Any, timeout: float) -> Any:
            own = Measurer(task, timeout)
            try:
                return own.about()
            except SurveyError as error:
                return error
            finally:
                own.close()

        remote = self._ray.remote(max_retries=0, **resources(measurer.task.device))(ask)
        about = self._ray.get(remote.remote(measurer.task, measurer.timeout))
        if isinstance(about, SurveyError):
            raise about
        return dict(about)

    def run(self, work: Work, shards: Iterator[Shard], tell: Tell) -> Iterator[dict[str, Any]]:
        """A receipt for every shard, in the order in which they are done."""
        ray_data = self._ray.data
        items = [{"shard": shard.dumps()} for shard in shards]
        with quiet(ray_data):
            receipts = ray_data.from_items(items, override_num_blocks=len(items)).map_batches(
                Actor,
                fn_constructor_args=(work,),
                batch_size=1,
                compute=ray_data.ActorPoolStrategy(size=self.workers),
                **resources(work.task.device),
            )
            # As each comes: one that waited for the next would be lost with a driver that is killed.
            for batch in receipts.iter_batches(batch_size=None, prefetch_batches=0):
                for data in batch["receipt"]:
                    receipt = pickle.loads(data)
                    tell(
                        receipt.get("documents", 0),
                        receipt.get("tokens", 0),
                        len(receipt.get("quarantined", ())),
                    )
                    yield receipt


@contextlib.contextmanager
def quiet(data: Any) -> Iterator[None]:
    """No bars and no lines of Ray Data meanwhile: the survey has a display of its own."""
    context, log = data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.print_on_execution_start, log.level
    context.enable_progress_bars = context.print_on_execution_start = False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start = before[:2]
        log.setLevel(before[2])


def start(workers: int, **options: Any) -> None:
    """Start Ray on this machine, or join the cluster that RAY_ADDRESS names, quietly; nothing is told to anyone."""
    import ray

    if "RAY_ADDRESS" not in os.environ:
        options = {"num_cpus": workers, "include_dashboard": False, **options}
    before = dict(os.environ)
    # Its processes find what is found here.
    found = {"PYTHONPATH": python_path(), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update(found)
    try:
        ray.init(log_to_driver=False, logging_level="error", **options)
    finally:
        for name in found:
            del os.environ[name]
            os.environ.update({name: before[name]} if name in before else {})


class Actor:
    """A worker, as Ray Data calls it."""

    def __init__(self, work: Work) -> None:
        self.worker = Worker(work)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = [self.worker(Shard.loads(str(line))) for line in batch["shard"]]
        return {"receipt": [pickle.dumps(receipt) for receipt in done]}


def resources(device: str | None) -> dict[str, float]:
    """What one worker takes of a machine."""
    return {"num_cpus": 1, "num_gpus": 1} if device and device.startswith("cuda") else {"num_cpus": 1}
