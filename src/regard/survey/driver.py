"""The job: a model over a corpus, resumed where it stopped, each shard committed once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from regard.errors import ArgumentError
from regard.survey import dataset
from regard.survey.corpus import Corpus, Shard
from regard.survey.dataset import Survey
from regard.survey.executors import Local, Ray
from regard.survey.manifest import Manifest
from regard.survey.schema import KINDS, VERSION, widths
from regard.survey.shard_writer import Work, unwritten
from regard.survey.worker_client import Measurer
from regard.survey.worker_process import PickledModel, Task

log = logging.getLogger("regard.survey")


class Progress(NamedTuple):
    """How far a survey is, for a display: counts of this run and of what was there before it.

    `left` is the time left in seconds, None before anything is known; `note` is something to tell, or "".
    """

    documents: int
    tokens: int
    quarantined: int
    shards: int
    of: int
    seconds: float
    rate: float  # tokens of this run, by second
    left: float | None
    note: str = ""


def run(
    model: Any,
    corpus: str | Path,
    out: str | Path,
    *,
    measures: Iterable[str] | None = None,
    max_tokens: int = 1024,
    workers: int = 1,
    engine: Literal["local", "ray"] = "local",
    text: str = "text",
    label: str | None = None,
    shard: int = 64,
    timeout: float = 600.0,
    max_bytes: int = 1 << 24,
    device: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
    trust_remote_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Survey:
    """A model's heads measured over a corpus, as Parquet in the directory `out`; see `regard.survey.open`.

    `model` is a folder, a name on the hub, `module:function`, or what `regard.models.load` returned; `corpus` a
    file, a directory or a pattern of text files, JSON lines or Parquet, whose field `text` is read, and `label` if the
    documents have names. A document is read up to `max_tokens` tokens. `measures` are some of "entropy", "distance",
    "first", "heavy", "copies"; all by default.

    Rows have the same size whatever the length of a document. About `shard` documents are committed together, once or
    not at all: the same call in the same directory goes on where a run stopped, however it stopped. A document that
    raises, takes longer than `timeout` seconds, kills its process, is not text or has more than `max_bytes` bytes is
    set aside with the reason, and the run goes on. `engine="ray"` takes Ray Data's actors, here or on the cluster that
    `ray.init` was told of; `out` must then be a directory that all machines see. A worker is a process with `threads`
    threads. `progress` is called now and then with a `Progress`.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("survey.run: pyarrow is not installed. pip install 'regard[survey]'") from error
    kinds = _kinds(measures)
    model = str(model) if isinstance(model, str | Path) else PickledModel.of(model)
    task = Task(model, kinds, max_tokens, device, threads, dtype, trust_remote_code)
    source = Corpus(str(corpus), text, label, shard, max_bytes)
    for name, value in {
        "max_tokens": max_tokens,
        "workers": workers,
        "shard": shard,
        "threads": threads,
    }.items():
        if value < 1:
            raise ArgumentError(
                "survey", received=f"{name} {value}", expected="at least 1", hint=f"Leave {name} out."
            )
    if engine not in ENGINES:
        raise ArgumentError(
            "survey",
            received=f"engine {engine!r}",
            expected=" or ".join(map(repr, ENGINES)),
            hint='"local" needs nothing but this machine.',
        )
    folder = Path(out).expanduser().absolute()
    if source.holds(folder):
        raise ArgumentError(
            "survey",
            received=f"out {str(out)!r} inside the corpus {str(corpus)!r}",
            expected="a directory whose files are not taken for documents",
            hint="Write elsewhere, or give a pattern for the documents: 'texts/*.txt'.",
        )
    return _drive(task, source, folder, ENGINES[engine](workers), timeout, progress)


ENGINES: dict[str, Callable[[int], Any]] = {"local": Local, "ray": Ray}


def _drive(task: Task, corpus: Corpus, out: Path, engine: Any, timeout: float, progress: Any) -> Survey:
    columns = widths(task.measures)
    with Manifest(out) as ledger, engine:
        total = sum(1 for _ in corpus.shards())
        about = engine.about(Measurer(task, timeout))
        ledger.settle(
            {
                "schema": VERSION,
                "regard": metadata.version("regard"),
                "model": {
                    "name": about["model"],
                    "weights": about["weights"],
                    "tokenizer": about["tokenizer"],
                },
                "layers": about["layers"],
                "heads": about["heads"],
                "measures": list(task.measures),
                "columns": columns,
                "max_tokens": task.max_tokens,
                "dtype": task.dtype,
                "corpus": {"path": corpus.path, **corpus.facts()},
                "shards": total,
                "notes": about["notes"],
                "began": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        committed, notes = ledger.recover()
        count = Count(committed.values(), total, progress)
        for note in [*about["notes"], *notes]:
            count.say(note)
        done = set(committed)
        committed.clear()
        work = Work(task, corpus, str(out), ledger.run, columns, timeout, about)
        if len(done) < total:
            # Closed whatever happens, so that nobody writes while the ledger is being put away.
            with closing(engine.run(work, _left(corpus, done), count.tell)) as receipts:
                for receipt in receipts:
                    _take(receipt, ledger, done, count)
    return dataset.open(out)


def _take(receipt: dict[str, Any], ledger: Manifest, done: set[int], count: Count) -> None:
    """Commit what a worker wrote, unless it is there already: an engine may start a shard again that was done."""
    if "error" in receipt:
        raise receipt["error"]
    if receipt["shard"] in done:
        ledger.discard(receipt)
        return
    try:
        ledger.commit(receipt)
    except OSError as error:
        raise unwritten(receipt["shard"], error) from error
    done.add(receipt["shard"])
    count.shard()


def _left(corpus: Corpus, done: set[int]) -> Iterator[Shard]:
    return (shard for shard in corpus.shards() if shard.number not in done)


class Count:
    """What has been done so far; told by threads, and to whoever shows it at most ten times a second."""

    def __init__(self, committed: Iterable[dict[str, Any]], of: int, progress: Any) -> None:
        self.of, self._progress = of, progress
        self.documents = self.tokens = self.quarantined = self.shards = 0
        for entry in committed:
            self.documents += entry["documents"]
            self.tokens += entry["tokens"]
            self.quarantined += len(entry["quarantined"])
            self.shards += 1
        self._before = self.shards, self.tokens
        self._start = time.monotonic()
        self._told = 0.0
        self._lock = threading.Lock()

    def tell(self, documents: int, tokens: int, quarantined: int) -> None:
        """So many more."""
        with self._lock:
            self.documents += documents
            self.tokens += tokens
            self.quarantined += quarantined
        if self._progress is not None and time.monotonic() - self._told > 0.1:
            self._show()

    def shard(self) -> None:
        """One more is committed."""
        self.shards += 1
        if self._progress is not None:
            self._show()

    def say(self, note: str) -> None:
        """Something that should be known."""
        log.warning(note)
        if self._progress is not None:
            self._show(note)

    def _show(self, note: str = "") -> None:
        with self._lock:
            seconds = self._told = time.monotonic()
            seconds -= self._start
            fresh = self.shards - self._before[0]
            left = seconds / fresh * (self.of - self.shards) if fresh else None
            rate = (self.tokens - self._before[1]) / max(seconds, 1e-9)
            self._progress(
                Progress(
                    self.documents,
                    self.tokens,
                    self.quarantined,
                    self.shards,
                    self.of,
                    seconds,
                    rate,
                    left,
                    note,
                )
            )


def _kinds(measures: Iterable[str] | None) -> tuple[str, ...]:
    asked = KINDS if measures is None else tuple([measures] if isinstance(measures, str) else measures)
    wrong = [each for each in asked if each not in KINDS]
    if wrong or not asked:
        raise ArgumentError(
            "survey",
            received=f"measures with {wrong[0]!r}" if wrong else "no measures",
            expected="some of " + ", ".join(map(repr, KINDS)),
            hint="Leave it out for all of them.",
        )
    return tuple(each for each in KINDS if each in asked)
