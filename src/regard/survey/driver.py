"""The driver: runs a model over a corpus, resumes an interrupted run, and commits each shard once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from regard.errors import ArgumentError
from regard.survey.corpus import Corpus, Shard
from regard.survey.dataset import Survey
from regard.survey.dataset import open as open_survey
from regard.survey.errors import SurveyError
from regard.survey.executors import EXECUTORS, Executor
from regard.survey.manifest import Manifest
from regard.survey.progress import Progress, ProgressTracker
from regard.survey.schema import MEASURES, PROMPT_MEASURES, SCHEMA_VERSION, list_columns
from regard.survey.shard_writer import ShardJob, ShardResult, build_write_error
from regard.survey.worker_process import ModelSpec, PickledModel, TextMeasurer

if TYPE_CHECKING:
    from regard.models import LoadedModel


def run(
    model: str | Path | LoadedModel | TextMeasurer,
    corpus: str | Path,
    out: str | Path,
    *,
    measures: Iterable[str] | None = None,
    max_tokens: int = 1024,
    workers: int = 1,
    executor: Literal["local", "ray"] = "local",
    text_field: str = "text",
    name_field: str | None = None,
    prompt_field: str | None = None,
    shard_size: int = 64,
    timeout: float = 600.0,
    max_bytes: int = 1 << 24,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Survey:
    """Measure the heads of a model over a corpus, and write the rows as Parquet to the directory `out`.

    A row has the same size for a document of any length. A shard of about `shard_size` documents is committed as a
    whole or not at all: after an interruption of any kind, the same call resumes the survey. A document that raises an
    error, times out, crashes its process, is not text or is too long is quarantined with the reason, and the run
    continues.

    Args:
        model: A folder, a name on the Hub, `module:function`, or the result of `regard.models.load`.
        corpus: A file, a directory or a pattern of text files, JSON lines or Parquet.
        out: The output directory: new, empty, or that of the survey to resume. With `executor="ray"`, all machines
            must share it.
        measures: Some of "entropy", "distance", "first", "heavy" and "copies", and with `prompt_field` "lookback"; all
            by default.
        max_tokens: Documents are truncated to this many tokens.
        workers: Number of worker processes, each with its own copy of the model.
        executor: "local" runs the workers on this machine, "ray" as actors of Ray Data, on this machine or on the
            cluster that `ray.init` connected to.
        text_field: Field of JSON lines, or column of Parquet, that holds the text.
        name_field: Field or column that holds the name of a document.
        prompt_field: Field or column that holds the prompt that a text answers. The model reads both, and the lookback
            ratio says how much of the attention of the answer is on the prompt.
        shard_size: Approximate number of documents that are committed together.
        timeout: Seconds that a document may take.
        max_bytes: Longer documents are quarantined.
        device: Device to run on, e.g. "cuda:0".
        dtype: "float32", "bfloat16", "float16" or "auto"; see `regard.models.load`.
        threads: Number of torch threads in each worker.
        trust_remote_code: Run the code that comes with a model.
        progress: Called with a `Progress`, at most ten times a second and after every shard.

    Returns:
        The finished survey, as `regard.survey.open(out)` returns it.

    Raises:
        ArgumentError: If an argument or the corpus is invalid, or `out` holds a survey with other settings.
        SurveyError: If the run cannot continue: the model does not run, `out` is locked, or the disk is full.
        ImportError: If pyarrow, or ray with `executor="ray"`, is not installed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("survey.run: pyarrow is not installed. pip install 'regard[survey]'") from error
    source = str(model) if isinstance(model, str | Path) else PickledModel.dump(model)
    selected = _check_measures(measures, has_prompts=prompt_field is not None)
    spec = ModelSpec(source, selected, max_tokens, device, threads, dtype, trust_remote_code)
    documents = Corpus(str(corpus), text_field, name_field, shard_size, max_bytes, prompt_field)
    for name, value in {
        "max_tokens": max_tokens,
        "workers": workers,
        "shard_size": shard_size,
        "threads": threads,
    }.items():
        if value < 1:
            raise ArgumentError(
                "survey.run",
                received=f"{name} {value}",
                expected="at least 1",
                hint=f"Omit {name} for the default.",
            )
    if executor not in EXECUTORS:
        raise ArgumentError(
            "survey.run",
            received=f"executor {executor!r}",
            expected=" or ".join(map(repr, EXECUTORS)),
            hint='"local" needs only this machine.',
        )
    folder = Path(out).expanduser().absolute()
    if documents.includes(folder):
        raise ArgumentError(
            "survey.run",
            received=f"out {str(out)!r} inside the corpus {str(corpus)!r}",
            expected="a directory whose files are not part of the corpus",
            hint="Write to another directory, or pass a pattern for the documents: 'texts/*.txt'.",
        )
    return _run_survey(spec, documents, folder, EXECUTORS[executor](workers), timeout, progress)


def _run_survey(
    spec: ModelSpec,
    corpus: Corpus,
    out: Path,
    executor: Executor,
    timeout: float,
    progress: Callable[[Progress], None] | None,
) -> Survey:
    columns = list_columns(spec.measures)
    with Manifest(out) as manifest, executor:
        total = sum(1 for _ in corpus.iter_shards())
        info = executor.describe_model(spec, timeout)
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
                "measures": list(spec.measures),
                "columns": columns,
                "max_tokens": spec.max_tokens,
                "dtype": spec.dtype,
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
        job = ShardJob(spec, corpus, str(out), manifest.run, columns, timeout, info)
        if len(done) < total:
            # Closed in any case, so that no worker writes while the lock is released.
            with closing(executor.run(job, _iter_remaining(corpus, done), tracker.add)) as results:
                for result in results:
                    _commit(result, manifest, done, tracker)
    return open_survey(out)


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


def _check_measures(measures: Iterable[str] | None, *, has_prompts: bool) -> tuple[str, ...]:
    known = MEASURES + (PROMPT_MEASURES if has_prompts else ())
    selected = known if measures is None else tuple([measures] if isinstance(measures, str) else measures)
    unknown = [measure for measure in selected if measure not in known]
    if unknown or not selected:
        needs_prompts = bool(unknown) and unknown[0] in PROMPT_MEASURES
        raise ArgumentError(
            "survey.run",
            received=f"measures with {unknown[0]!r}" if unknown else "no measures",
            expected="some of " + ", ".join(map(repr, known)),
            hint="Pass prompt_field, the field that holds the prompt of each text."
            if needs_prompts
            else "Omit measures to compute all of them.",
        )
    return tuple(measure for measure in known if measure in selected)
