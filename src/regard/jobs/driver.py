"""The driver of a job: runs a model over a corpus, resumes an interrupted run, and commits each shard once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.jobs.corpus import Corpus, Shard
from regard.jobs.errors import SurveyError
from regard.jobs.executors import EXECUTORS, Executor
from regard.jobs.manifest import Manifest
from regard.jobs.progress import Progress, ProgressTracker
from regard.jobs.row_schema import SCHEMA_VERSION
from regard.jobs.shard_writer import ShardJob, ShardResult, build_write_error
from regard.jobs.worker_process import JobSpec, ModelInfo


@dataclass(frozen=True)
class CorpusJob:
    """What a run measures and where it is written.

    Args:
        spec: The model and how to run it.
        corpus: The documents.
        out: The output directory.
        columns: The measured columns, each with its width.
        settings: Settings of the kind of job, recorded and compared when the job is resumed. A function of the model's
            properties.
    """

    spec: JobSpec
    corpus: Corpus
    out: Path
    columns: dict[str, int]
    settings: Callable[[ModelInfo], dict[str, Any]]


def run_job(
    job: CorpusJob, executor: Executor, timeout: float, progress: Callable[[Progress], None] | None
) -> None:
    """Run a job, or what is left of it, until every shard is committed.

    Args:
        job: The job.
        executor: Runs the workers.
        timeout: Seconds that a document may take.
        progress: Called with a `Progress`, at most ten times a second and after every shard.
    """
    with Manifest(job.out) as manifest, executor:
        total = sum(1 for _ in job.corpus.iter_shards())
        info = executor.describe_model(job.spec, timeout)
        manifest.write_settings(
            {
                "schema_version": SCHEMA_VERSION,
                "regard_version": metadata.version("regard"),
                "model": {
                    "name": info["name"],
                    "weights": info["weights"],
                    "tokenizer": info["tokenizer"],
                },
                "layers": info["layers"],
                "heads": info["heads"],
                **job.settings(info),
                "columns": job.columns,
                "corpus": {"path": job.corpus.path, **job.corpus.compute_fingerprint()},
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
        shard_job = ShardJob(job.spec, job.corpus, str(job.out), manifest.run, job.columns, timeout, info)
        if len(done) < total:
            # Closed in any case, so that no worker writes while the lock is released.
            with closing(executor.run(shard_job, _iter_remaining(job.corpus, done), tracker.add)) as results:
                for result in results:
                    _commit(result, manifest, done, tracker)


def check_run(operation: str, corpus: Corpus, out: Path, executor: str, **counts: int) -> None:
    """Check the arguments that every kind of run has.

    Args:
        operation: The function that the caller called, for error messages.
        corpus: The documents.
        out: The output directory.
        executor: Name of the executor.
        **counts: Numbers that must be at least 1, by name.

    Raises:
        ArgumentError: If one is invalid.
    """
    for name, value in counts.items():
        if value < 1:
            raise ArgumentError(
                operation,
                received=f"{name} {value}",
                expected="at least 1",
                hint=f"Omit {name} for the default.",
            )
    if executor not in EXECUTORS:
        raise ArgumentError(
            operation,
            received=f"executor {executor!r}",
            expected=" or ".join(map(repr, EXECUTORS)),
            hint='"local" needs only this machine.',
        )
    if corpus.includes(out):
        raise ArgumentError(
            operation,
            received=f"out {str(out)!r} inside the corpus {corpus.path!r}",
            expected="a directory whose files are not part of the corpus",
            hint="Write to another directory, or pass a pattern for the documents: 'texts/*.txt'.",
        )


def _commit(
    result: ShardResult | SurveyError, manifest: Manifest, done: set[int], tracker: ProgressTracker
) -> None:
    """Commit a shard, unless it is committed already: an executor may rerun a finished shard."""
    if isinstance(result, SurveyError):
        raise result
    if result.shard in done:
        manifest.discard(result)
        return
    try:
        manifest.commit(result)
    except OSError as error:
        raise build_write_error(result.shard, error) from error
    done.add(result.shard)
    tracker.add_shard()


def _iter_remaining(corpus: Corpus, done: set[int]) -> Iterator[Shard]:
    return (shard for shard in corpus.iter_shards() if shard.number not in done)
