"""Rows and shards: the Parquet rows of documents, and the worker that writes the file of a shard and reads it back.

A row is one (document, layer, head) with measured columns of fixed width.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.jobs.corpus import Corpus, CorpusDocument, Shard
from regard.jobs.model_runner import ModelInfo, ModelSpec
from regard.jobs.worker import Rejected, SurveyError, WorkerClient
from regard.types import Array

if TYPE_CHECKING:
    import pyarrow as pa


SCHEMA_VERSION = 1
# Windows of the columns of evicted weight, from which a cache policy is chosen.
EVICTION_WINDOWS = tuple(2**power for power in range(17))
METADATA_KEY = "regard.survey"
INDEX_COLUMNS = ("layer", "head", "kv_head")
ID_COLUMNS = ("document", "name", "tokens", "truncated", *INDEX_COLUMNS, "module")


def build_schema(widths: Mapping[str, int]) -> pa.Schema:
    """Build the Arrow schema of a table whose measured columns have these widths."""
    import pyarrow as pa

    types = {"tokens": pa.int32(), "truncated": pa.bool_()} | dict.fromkeys(INDEX_COLUMNS, pa.int16())
    fields = [pa.field(name, types.get(name, pa.string()), nullable=name == "name") for name in ID_COLUMNS]
    for name, width in widths.items():
        fields.append(pa.field(name, pa.float32() if width == 1 else pa.list_(pa.float32(), width)))
    return pa.schema(fields)


class RowBatch(NamedTuple):
    """The rows of one document: `columns` as its worker process returned them, an entry for each layer and head."""

    document: str
    name: str | None
    columns: Mapping[str, Any]


def build_record_batch(documents: Sequence[RowBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Concatenate the rows of several documents into one Arrow record batch."""
    import pyarrow as pa

    counts = [len(document.columns["layer"]) for document in documents]

    def concatenate(name: str) -> Any:
        if name in ("document", "name"):
            values = [getattr(document, name) for document in documents]
        elif name in ("tokens", "truncated"):
            values = [document.columns[name] for document in documents]
        elif name == "module":
            return [module for document in documents for module in document.columns[name]]
        else:
            return np.concatenate([document.columns[name] for document in documents])
        return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]

    arrays = []
    for field in schema:
        values = concatenate(field.name)
        is_measured = field.name not in ID_COLUMNS
        arrays.append(build_column(values) if is_measured else pa.array(values, field.type))
    return pa.record_batch(arrays, schema=schema)


def build_column(values: Array) -> pa.Array:
    """Convert numbers, (rows,) or (rows, bins), to an Arrow column; NaN, an undefined value, becomes null."""
    import pyarrow as pa

    flat = pa.array(values.reshape(-1), mask=(values != values).reshape(-1))
    # Older pyarrow writes no list that is null, so the numbers in it are.
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def build_footer(shard: int, quarantined: Collection[Mapping[str, str]]) -> dict[str, str]:
    """Build the key-value metadata of a shard's file."""
    metadata = {"version": SCHEMA_VERSION, "shard": shard, "quarantined": list(quarantined)}
    return {METADATA_KEY: json.dumps(metadata)}


def column_to_numpy(column: pa.Array) -> Any:
    """Convert an Arrow column to float64, (rows,) or (rows, bins); null becomes NaN."""
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy(zero_copy_only=False).astype(float)
    width = column.type.list_size
    numbers = column.values.slice(column.offset * width, len(column) * width)
    return numbers.to_numpy(zero_copy_only=False).astype(float).reshape(-1, width)


# Rows buffered before they are written.
BUFFERED_ROWS = 1 << 15
# Workers that may be lost at one document before it is rejected: a machine can also fail by chance.
MAX_LOST_WORKERS = 3

# Called with the numbers of documents, tokens and quarantined documents that were added.
OnProgress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class ShardJob:
    """Everything a worker needs, on any machine."""

    spec: ModelSpec
    corpus: Corpus
    out: str
    run: str  # the token in the driver's lock file
    widths: dict[str, int]
    info: ModelInfo  # the model as the driver loaded it


@dataclass(frozen=True)
class ShardResult:
    """A shard whose temporary file is complete and on disk, but not yet committed."""

    shard: int
    temp_file: str
    sha256: str
    bytes: int
    rows: int
    documents: int
    tokens: int
    ids_sha256: str
    quarantined: list[dict[str, str]]


class ShardWorker:
    """Measures shards and writes their files; all executors use it.

    A call returns a `SurveyError` instead of a result if the run must stop: a full disk, or a model that does not run
    on this machine, is not the fault of a document.
    """

    def __init__(self, job: ShardJob, client: WorkerClient | None = None) -> None:
        self.job, self.client = job, client or WorkerClient(job.spec)
        self._checked = client is not None

    def __call__(self, shard: Shard, on_progress: OnProgress | None = None) -> ShardResult | SurveyError:
        try:
            if not self._checked:
                self._check_model(self.client.describe())
                self._checked = True
            return self._write_shard(shard, on_progress or (lambda *_: None))
        except SurveyError as error:
            return error
        except OSError as error:
            return build_write_error(self.job.spec.operation, shard.number, error)

    def close(self) -> None:
        """Kill the worker process."""
        self.client.close()

    def _check_model(self, info: ModelInfo) -> None:
        for name in ("weights", "tokenizer"):
            if info[name] != self.job.info[name]:
                raise SurveyError(
                    self.job.spec.operation,
                    received=f"a worker whose {name} differ from the driver's",
                    expected="the same model on every machine",
                    hint="Copy the same files to each machine, or pass a path that all machines share.",
                )

    def _write_shard(self, shard: Shard, on_progress: OnProgress) -> ShardResult:
        job = self.job
        path = Path(job.out) / f"{format_shard_name(shard.number)}.tmp-{job.run}-{secrets.token_hex(4)}"
        schema, ids, measured = build_schema(job.widths), hashlib.sha256(), []
        quarantined: list[dict[str, str]] = []
        tokens = rows = 0
        try:
            with ProgressMarker(path, job.run) as marker, ShardFile(path, schema) as file:
                for document in self._read(shard):
                    ids.update(f"{document.id}\n".encode())
                    columns = marker.update(document.id) or self._measure(document)
                    if isinstance(columns, Rejected):
                        quarantined.append({"document": document.id, **columns._asdict()})
                        on_progress(0, 0, 1)
                        continue
                    file.write(RowBatch(document.id, document.name, columns))
                    measured.append(document.id)
                    tokens, rows = tokens + columns["tokens"], rows + len(columns["layer"])
                    on_progress(1, columns["tokens"], 0)
                self._check_lock()
                file.finish(build_footer(shard.number, quarantined))
            digest = verify_file(path, rows, measured)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise
        return ShardResult(
            shard=shard.number,
            temp_file=path.name,
            sha256=digest,
            bytes=path.stat().st_size,
            rows=rows,
            documents=len(measured),
            tokens=tokens,
            ids_sha256=ids.hexdigest(),
            quarantined=quarantined,
        )

    def _read(self, shard: Shard) -> Iterator[CorpusDocument]:
        try:
            yield from self.job.corpus.iter_documents(shard)
        except OSError as error:
            raise SurveyError(
                self.job.spec.operation,
                received=f"shard {shard.number}, whose documents could not be read: {error}",
                expected="a corpus that can be read",
                hint="Run the same command again to resume. Committed shards are kept.",
            ) from error

    def _measure(self, document: CorpusDocument) -> dict[str, Any] | Rejected:
        if document.problem is not None:
            return Rejected(*document.problem)
        return self.client.measure(document.text, document.prompt)

    def _check_lock(self) -> None:
        """Refuse to write if a worker has outlived its driver and another run owns the directory."""
        try:
            owner = (Path(self.job.out) / "lock").read_text("utf-8")
        except FileNotFoundError:
            owner = ""
        if self.job.run not in owner:
            raise SurveyError(
                self.job.spec.operation,
                received="a directory that another run has taken over",
                expected="one run at a time",
                hint="Nothing is lost: the other run continues.",
            )


class ProgressMarker:
    """A file that records which document a worker is measuring, next to the shard's temporary file.

    A document can crash the worker instead of the model's process, for example when memory runs out. If
    `MAX_LOST_WORKERS` workers of this run were lost at the same document, the document is rejected.
    """

    def __init__(self, path: Path, run: str) -> None:
        shard = path.name.split(".tmp-")[0]
        self._lost_at: list[str] = []
        for marker in path.parent.glob(f"{shard}.tmp-{run}-*.at"):
            with contextlib.suppress(OSError):
                self._lost_at.append(marker.read_text("utf-8").strip())
        self._path = path.with_name(f"{path.name}.at")

    def __enter__(self) -> ProgressMarker:
        self._file = open(self._path, "w", encoding="utf-8")
        return self

    def update(self, document: str) -> Rejected | None:
        """Record the current document; reject it if too many workers were lost at it."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(document)
        self._file.flush()
        if self._lost_at.count(document) >= MAX_LOST_WORKERS:
            return Rejected("crash", f"{MAX_LOST_WORKERS} workers were lost while they measured it")
        return None

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


def build_write_error(operation: str, shard: int, error: OSError) -> SurveyError:
    """Build the error for a shard that could not be written."""
    return SurveyError(
        operation,
        received=f"shard {shard}, which could not be written: {error}",
        expected="a writable directory with enough free space",
        hint="Free some space, then run the same command again to resume. Committed shards are kept.",
    )


class ShardFile:
    """A Parquet file that is written a few documents at a time."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        from pyarrow import parquet

        self._file = open(path, "xb")  # noqa: SIM115 - closed by __exit__
        self._writer = parquet.ParquetWriter(
            self._file,
            schema,
            compression="none",
            use_dictionary=["document", "name", "module"],
            write_statistics=["document", "layer"],
        )
        self._buffer: list[RowBatch] = []
        self._rows = 0
        self._schema = schema

    def __enter__(self) -> ShardFile:
        return self

    def write(self, rows: RowBatch) -> None:
        """Buffer the rows of a document, and write the buffer when it is full."""
        self._buffer.append(rows)
        self._rows += len(rows.columns["layer"])
        if self._rows >= BUFFERED_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._writer.write_batch(build_record_batch(self._buffer, self._schema))
            self._buffer.clear()
            self._rows = 0

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the remaining rows and the footer, and flush the file to disk."""
        self._flush()
        self._writer.add_key_value_metadata(metadata)
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        # An unfinished file is deleted, so an error while closing it does not matter.
        with contextlib.suppress(Exception):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._file.close()


def verify_file(path: Path, rows: int, documents: list[str]) -> str:
    """Read a file back from disk, compare it with what was written, and return its sha256."""
    from pyarrow import parquet

    digest = compute_sha256(path, from_disk=True)
    try:
        column = parquet.read_table(path, columns=["document"]).column(0)
        valid = len(column) == rows and column.unique().to_pylist() == documents
    except Exception:  # a damaged file can raise anything
        valid = False
    if not valid:
        raise OSError(f"{path.name} does not read back as it was written")
    return digest


def compute_sha256(path: Path, from_disk: bool = False) -> str:
    """Compute the sha256 of a file; `from_disk` drops it from the page cache first, if the system supports that."""
    with open(path, "rb") as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_shard_name(shard: int) -> str:
    """Format the file name of a shard.

    >>> format_shard_name(123)
    'shard-000123.parquet'
    """
    return f"shard-{shard:06}.parquet"
