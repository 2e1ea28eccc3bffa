"""One shard: its documents are measured, its rows written beside their place, flushed, and read back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.survey.corpus import Corpus, Document, Shard
from regard.survey.schema import Rows, batch_of, footer, schema_of
from regard.survey.worker_client import Measurer, Refused, SurveyError
from regard.survey.worker_process import Task

# Rows that are held before they are written.
HELD = 1 << 15
# Workers that may be lost at one document: machines are lost by chance, too.
LOST = 3


@dataclass(frozen=True)
class Work:
    """All that a worker is told, wherever it runs."""

    task: Task
    corpus: Corpus
    out: str
    run: str  # the token of the driver's lock
    widths: dict[str, int]
    timeout: float
    about: dict[str, Any]  # what the driver found the model to be


class Worker:
    """Takes shards, gives receipts; a receipt's file is complete and on the disk, but nobody has committed it.

    It is the same for every engine. A receipt may hold an `error` instead, which stops the run: a full disk, or a model
    that does not run on this machine, is no fault of any document.
    """

    def __init__(self, work: Work, measurer: Measurer | None = None) -> None:
        self.work, self.measurer = work, measurer or Measurer(work.task, work.timeout)
        self._known = measurer is not None

    def __call__(self, shard: Shard, tell: Callable[[int, int, int], None] | None = None) -> dict[str, Any]:
        try:
            if not self._known:
                self._compare(self.measurer.about())
                self._known = True
            return self._made(shard, tell or (lambda *_: None))
        except SurveyError as error:
            return {"shard": shard.number, "error": error}
        except OSError as error:
            return {"shard": shard.number, "error": unwritten(shard.number, error)}

    def close(self) -> None:
        """End the model's process."""
        self.measurer.close()

    def _compare(self, about: dict[str, Any]) -> None:
        for name in ("weights", "tokenizer"):
            if about[name] != self.work.about[name]:
                raise SurveyError(
                    "survey",
                    received=f"a worker whose {name} differ from the driver's",
                    expected="the same model on every machine",
                    hint="Put the same files on each, or give a path that all of them see.",
                )

    def _made(self, shard: Shard, tell: Callable[[int, int, int], None]) -> dict[str, Any]:
        work = self.work
        path = Path(work.out) / f"{name_of(shard.number)}.tmp-{work.run}-{secrets.token_hex(4)}"
        schema, ids, measured = schema_of(work.widths), hashlib.sha256(), []
        quarantined: list[dict[str, str]] = []
        tokens = rows = 0
        try:
            with Trail(path, work.run) as trail, Writer(path, schema) as writer:
                for document in work.corpus.documents(shard):
                    ids.update(f"{document.id}\n".encode())
                    found = trail.lost(document.id) or self._rows(document)
                    if isinstance(found, Refused):
                        quarantined.append({"document": document.id, **found._asdict()})
                        tell(0, 0, 1)
                        continue
                    writer.write(Rows(document.id, document.label, found))
                    measured.append(document.id)
                    tokens, rows = tokens + found["tokens"], rows + len(found["layer"])
                    tell(1, found["tokens"], 0)
                self._still_ours()
                writer.finish(footer(shard.number, quarantined))
            digest = checked(path, rows, measured)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return {
            "shard": shard.number,
            "written": path.name,
            "sha256": digest,
            "bytes": path.stat().st_size,
            "rows": rows,
            "documents": len(measured),
            "tokens": tokens,
            "ids": ids.hexdigest(),
            "quarantined": quarantined,
        }

    def _rows(self, document: Document) -> dict[str, Any] | Refused:
        if document.problem is not None:
            return Refused(*document.problem)
        return self.measurer.measure(document.text)

    def _still_ours(self) -> None:
        """A worker that outlived its driver must leave the directory to the next one."""
        try:
            held = (Path(self.work.out) / "lock").read_text()
        except FileNotFoundError:
            held = ""
        if self.work.run not in held:
            raise SurveyError(
                "survey",
                received="a directory that another run has taken over",
                expected="one run at a time",
                hint="Nothing is lost: that run goes on.",
            )


class Trail:
    """Which document a worker is at, beside its file, for whoever starts the shard again when that worker is gone.

    A document may take its worker along rather than its own process: a machine that runs out of memory kills whom it
    likes. Where `LOST` workers of this run were last seen at the same document, it is not tried again.
    """

    def __init__(self, path: Path, run: str) -> None:
        shard = path.name.split(".tmp-")[0]
        self._before: list[str] = []
        for each in path.parent.glob(f"{shard}.tmp-{run}-*.at"):
            with contextlib.suppress(OSError):
                self._before.append(each.read_text().strip())
        self._path = path.with_name(f"{path.name}.at")

    def __enter__(self) -> Trail:
        self._file = open(self._path, "w")
        return self

    def lost(self, document: str) -> Refused | None:
        """Note that this document is next; refuse it if it was the end of others."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(document)
        self._file.flush()
        if self._before.count(document) >= LOST:
            return Refused("kills", f"{LOST} workers were lost while they measured it")
        return None

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def unwritten(shard: int, error: OSError) -> SurveyError:
    """The error where a shard finds no place."""
    return SurveyError(
        "survey",
        received=f"shard {shard}, which could not be written: {error}",
        expected="a directory that can be written to",
        hint="Make room, then run the same again: what is committed stays.",
    )


class Writer:
    """A Parquet file that is written a few documents at a time, flushed to the disk when it is finished."""

    def __init__(self, path: Path, schema: Any) -> None:
        from pyarrow import parquet

        self._file = open(path, "xb")  # noqa: SIM115 - closed by __exit__
        strings = ["document", "label", "module"]
        self._writer = parquet.ParquetWriter(
            self._file,
            schema,
            compression="none",
            use_dictionary=strings,
            write_statistics=["document", "layer"],
        )
        self._held: list[Rows] = []
        self._rows = 0
        self._schema = schema

    def __enter__(self) -> Writer:
        return self

    def write(self, rows: Rows) -> None:
        """Take a document's rows; they may wait for others."""
        self._held.append(rows)
        self._rows += len(rows.columns["layer"])
        if self._rows >= HELD:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_batch(batch_of(self._held, self._schema))
            self._held.clear()
            self._rows = 0

    def finish(self, about: dict[str, str]) -> None:
        """The last rows, the footer, and all of it on the disk."""
        self._flush()
        self._writer.add_key_value_metadata(about)
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, *_: Any) -> None:
        # A file that was not finished is thrown away: what its writer would still like to add does not matter.
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()


def checked(path: Path, rows: int, documents: list[str]) -> str:
    """The sha256 of a file, after it was read back from the disk and found to be what was written."""
    from pyarrow import parquet

    digest = sha256_of(path, fresh=True)
    try:
        column = parquet.read_table(path, columns=["document"]).column(0)
        found = column.unique().to_pylist()
        right = len(column) == rows and found == documents
    except Exception as error:  # whatever a broken file makes of its reader
        right, found = False, [str(error)]
    if not right:
        raise OSError(f"{path.name} does not read back as it was written")
    return digest


def sha256_of(path: Path, fresh: bool = False) -> str:
    """The sha256 of a file; `fresh` from the disk rather than from memory, where the system can."""
    with open(path, "rb") as file:
        if fresh and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_of(shard: int) -> str:
    """The name of a shard's file.

    >>> name_of(123)
    'shard-000123.parquet'
    """
    return f"shard-{shard:06}.parquet"
