"""`run`: measure the heads of a model over a corpus, one text at a time in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.corpus import Corpus
from regard.jobs.driver import Progress, require_package, run_job
from regard.jobs.model_runner import (
    TRIAL_TEXT,
    ModelInfo,
    ModelRunner,
    ModelSpec,
    NotFiniteError,
    TextMeasurer,
    as_source,
    build_head_columns,
)
from regard.jobs.options import RunKeywords, RunOptions
from regard.models import LoadedModel
from regard.survey.dataset import Survey
from regard.survey.dataset import load as load_survey
from regard.survey.schema import MEASURES, PROMPT_MEASURES, list_columns

if TYPE_CHECKING:
    from regard.capture.call import Call


# Layers of a short text that are measured together.
MAX_WAITING = 16


def run(
    model: str | Path | LoadedModel | TextMeasurer,
    corpus: str | Path,
    out: str | Path,
    *,
    measures: Iterable[str] | None = None,
    prompt_field: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[RunKeywords],
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
        prompt_field: Field or column that holds the prompt that a text answers. The model reads both, and the lookback
            ratio is the share of the answer's attention on the prompt.
        progress: Called with a `Progress`, at most ten times a second and after every shard.
        **options: How the model is run, such as `max_tokens`, `workers`, `device` and `text_field`: the fields of
            `RunOptions`.

    Returns:
        The finished survey, as `regard.survey.load(out)` returns it.

    Raises:
        ArgumentError: If an argument or the corpus is invalid, or `out` holds a survey with other settings.
        SurveyError: If the run cannot continue: the model does not run, `out` is locked, or the disk is full.
        ImportError: If pyarrow, or ray with `executor="ray"`, is not installed.
    """
    require_package(SurveySpec.operation, "pyarrow")
    selected = _check_measures(measures, has_prompts=prompt_field is not None)
    run = RunOptions(**options)
    spec = SurveySpec(as_source(model, SurveySpec.operation), selected, options=run)
    folder = Path(out).expanduser().absolute()
    documents = Corpus(str(corpus), *run.corpus_fields, prompt_field)
    settings = {
        "measures": list(selected),
        "max_tokens": run.max_tokens,
        "dtype": run.dtype,
    }
    run_job(spec, documents, folder, list_columns(selected), settings, progress)
    return load_survey(folder)


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


@dataclass(frozen=True)
class SurveySpec(ModelSpec):
    """The model of a survey, and some of `MEASURES` and `PROMPT_MEASURES`."""

    operation: ClassVar[str] = "survey.run"
    measures: tuple[str, ...] = MEASURES

    def build_runner(self, loaded: LoadedModel) -> SurveyRunner:
        """Return the object that measures texts with the loaded model."""
        return SurveyRunner(loaded, self.options, self.measures)


class SurveyRunner(ModelRunner):
    """A loaded model that measures the heads on texts."""

    def __init__(
        self, loaded: LoadedModel, options: RunOptions, measures: tuple[str, ...] = MEASURES
    ) -> None:
        super().__init__(loaded, options)
        self.measures = measures

    def describe(self) -> ModelInfo:
        """Describe the model, with the sizes of keys and values that a cache policy needs."""
        return {**super().describe(), "settings": {"cache": self._describe_cache()}}

    def _describe_cache(self) -> dict[str, Any]:
        """Return the sizes of keys and values: kv_heads, head_dim and value_dim of each layer, and bytes_per_number."""
        from regard.lens.watch import watch

        with watch(self.loaded.model, values=True) as recording:
            self.loaded.forward(self.encode(TRIAL_TEXT))
        calls = [recording.calls(name)[0] for name in recording]
        return {
            "kv_heads": [call.shape[-3] // call.groups if len(call.shape) > 2 else 1 for call in calls],
            "head_dim": [int(call.key.shape[-1]) for call in calls],
            "value_dim": [int((call.key if call.value is None else call.value).shape[-1]) for call in calls],
            "bytes_per_number": max(int(call.key.element_size()) for call in calls),
        }

    def measure(self, text: str, prompt: str = "") -> dict[str, Any]:
        """Return the rows of a text, read after its prompt: the columns of the heads, and the measures as float32."""
        from regard.lens.joined_layers import copy_tensors, is_joinable, measure_layers
        from regard.lens.watch import watch
        from regard.survey.head_stats import measure_call

        encoded = self.encode(prompt + text)
        prompt_len = count_prompt_tokens(self.loaded, prompt, text) if prompt else 0
        tokens = [encoded.ids[0].tolist()]
        copies: dict[Any, Any] = {}
        waiting: list[Call] = []
        measured: list[dict[str, Any]] = []
        layers: list[tuple[str, int, int]] = []

        def measure_waiting() -> None:
            calls, waiting[:] = waiting[:], []
            results = measure_layers(
                calls, lambda call: measure_call(call, tokens, copies, self.measures, prompt_len)
            )
            for call, columns in zip(calls, results, strict=True):
                for name in ("entropy", "first", "heavy"):
                    if not np.isfinite(columns.get(name, 0.0)).all():
                        raise NotFiniteError(f"the attention weights of {call.name} are not finite")
                layers.append((call.name, len(next(iter(columns.values()))), call.groups))
                measured.append(columns)

        def collect(call: Call) -> dict[str, Any]:
            # Layers of a short text are measured together, and those of a long one as they run, to save memory.
            waits = is_joinable(call)
            waiting.append(copy_tensors(call) if waits else call)
            if not waits or len(waiting) == MAX_WAITING:
                measure_waiting()
            return {}

        with watch(self.loaded.model, measures=collect):
            self.loaded.forward(encoded)
        measure_waiting()
        return build_head_columns(encoded, layers) | {
            name: np.concatenate([columns[name] for columns in measured]).astype(np.float32)
            for name in measured[0]
        }


def count_prompt_tokens(loaded: LoadedModel, prompt: str, text: str) -> int:
    """Count the tokens that begin in the prompt, in the encoding of prompt and text, special tokens included.

    Without offsets of the tokenizer, tokens at the end of the prompt that merge with the text do not count.
    """
    if getattr(loaded.tokenizer, "is_fast", False):
        encoded = loaded.tokenizer(prompt + text, return_offsets_mapping=True, truncation=False)
        offsets = encoded["offset_mapping"]
        return next(
            (i for i, (start, stop) in enumerate(offsets) if stop > start >= len(prompt)), len(offsets)
        )
    alone, both = (loaded.encode(part).ids[0].tolist() for part in (prompt, prompt + text))
    pairs = enumerate(zip(alone, both, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(alone), len(both)))
