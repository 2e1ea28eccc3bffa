"""`run`: measure the heads of a model over a corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.errors import ArgumentError
from regard.jobs.corpus import Corpus
from regard.jobs.driver import CorpusJob, check_run, run_job
from regard.jobs.executors import EXECUTORS
from regard.jobs.progress import Progress
from regard.jobs.worker_process import ModelInfo, PickledModel, TextMeasurer
from regard.survey.dataset import Survey
from regard.survey.dataset import open as open_survey
from regard.survey.model_runner import ModelSpec
from regard.survey.schema import MEASURES, PROMPT_MEASURES, list_columns

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
    folder = Path(out).expanduser().absolute()
    check_run(
        "survey.run",
        documents,
        folder,
        executor,
        max_tokens=max_tokens,
        workers=workers,
        shard_size=shard_size,
        threads=threads,
    )

    def build_settings(info: ModelInfo) -> dict[str, Any]:
        sizes = {"cache": info["cache"]} if "cache" in info else {}
        return {**sizes, "measures": list(selected), "max_tokens": max_tokens, "dtype": dtype}

    job = CorpusJob(spec, documents, folder, list_columns(selected), build_settings)
    run_job(job, EXECUTORS[executor](workers), timeout, progress)
    return open_survey(folder)


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
