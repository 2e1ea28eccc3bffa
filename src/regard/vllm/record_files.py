"""The files of a worker: lines of JSON or Parquet, and the rows of requests that keep them as .npz files."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regard.types import Array

__all__ = ["FORMAT", "FileWriter", "Record", "read_lines", "read_records", "write_parquet"]

logger = logging.getLogger("vllm.regard")

FORMAT = 1  # of the files
MAX_FILE_BYTES = 64_000_000
BATCH = 10  # records that are converted to Parquet at a time

Record = dict[str, Any]


class FileWriter:
    """Writes records as lines of JSON, and the rows of requests that keep them as .npz files.

    A line is written whole or not at all, unless the process is killed; then a reader ignores the last line. Each
    process writes files of its own.

    Args:
        folder: Directory of the files; it is created.
        worker: The first line of each file.
        format: "parquet" converts a file when it is complete.

    Raises:
        OSError: If the directory cannot be created.
    """

    def __init__(self, folder: Path, worker: Record, format: str) -> None:
        self._folder, self._worker, self._format = folder, worker, format
        if format == "parquet":
            import pyarrow  # noqa: F401 - fails when the engine starts, not when a file is complete
        folder.mkdir(parents=True, exist_ok=True)
        self._file: int | None = None
        self._path = Path()
        self._number = 0

    def write(self, record: Record, rows: Mapping[str, Array]) -> None:
        if self._file is None:
            self._open()
        assert self._file is not None
        if rows:
            name = record["engine_id"]
            digest = hashlib.blake2b(
                f"{self._worker['engine']} {name}".encode(errors="replace"), digest_size=8
            )
            file = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:80]}-{digest.hexdigest()}-rank{self._worker['rank']}.npz"
            _write_whole(self._folder / "rows" / file, rows)
            record = {**record, "rows": file}
        self._append(record)
        if os.fstat(self._file).st_size > MAX_FILE_BYTES:
            self.close()

    def _open(self) -> None:
        started = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._worker["started"]))
        engine, rank = self._worker["engine"][:8], self._worker["rank"]
        name = f"requests-{started}-{engine}-{self._worker['pid']}-rank{rank}-{self._number}.jsonl"
        path = self._folder / name
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        self._path = path
        if os.fstat(self._file).st_size == 0:
            self._append(self._worker)

    def _append(self, record: Record) -> None:
        """Append a line; if it does not fit on the disk, remove its beginning."""
        assert self._file is not None
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, size)
            if size == 0:  # not even the first line: the next attempt opens the file again
                os.close(self._file)
                self._file = None
            raise

    def close(self) -> None:
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        self._number += 1
        if self._format == "parquet":
            try:
                write_parquet(self._path, self._path.with_suffix(".parquet"))
                self._path.unlink()
            except Exception as error:  # its lines can be read as they are
                logger.error("regard cannot convert %s to Parquet: %s", self._path.name, error)


def _write_whole(path: Path, rows: Mapping[str, Array]) -> None:
    """Write arrays to a file that appears only when it is complete."""
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **rows)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> list[Record]:
    """Read the records of a file of lines; a line that is damaged, or not complete at the end, is left out."""
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and "kind" in record:
            records.append(record)
    return records


# Columns of a Parquet file; what is in none of them is JSON in the column "other".
def _list_columns() -> Any:
    import pyarrow as pa

    number, text = pa.float32(), pa.string()
    heads = {
        name: pa.list_(pa.list_(pa.list_(number) if name == "shares" else number))
        for name in ("shares", "entropy", "first", "max_score")
    }
    return pa.schema(
        [
            *((name, text) for name in ("kind", "id", "engine_id", "finish_reason", "rows")),
            *((name, pa.int32()) for name in ("child", "prompt_tokens", "cached_tokens")),
            *((name, pa.int32()) for name in ("generated_tokens", "measured_tokens", "preemptions")),
            *((name, pa.float64()) for name in ("time", "started", "finished")),
            ("names", pa.list_(text)),
            ("heads", pa.struct([("rows", pa.int32()), *heads.items()])),
            (
                "tokens",
                pa.struct(
                    [
                        ("shares", pa.list_(pa.list_(number))),
                        ("entropy", pa.list_(number)),
                        ("first", pa.list_(number)),
                    ]
                ),
            ),
            ("other", text),
        ]
    )


def write_parquet(source: Path, target: Path) -> None:
    """Convert a file of lines to Parquet; the description of the worker is metadata of the file.

    Args:
        source: File of lines of JSON.
        target: Path of the Parquet file, which appears when it is complete.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _list_columns()
    known = set(schema.names) - {"other"}
    with source.open("rb") as lines:
        worker = json.loads(next(lines))
        schema = schema.with_metadata({"worker": json.dumps(worker)})
        batches = []
        while part := list(
            itertools.islice(lines, BATCH)
        ):  # a few at a time: other threads wait for each call
            rows = [
                {name: record.get(name) for name in known}
                | {"other": json.dumps({name: own for name, own in record.items() if name not in known})}
                for record in map(json.loads, part)
            ]
            batches.append(pa.RecordBatch.from_pylist(rows, schema=schema))
    table = pa.Table.from_batches(batches, schema=schema)
    temporary = target.with_name(f".{target.name}.part")
    try:
        pq.write_table(table, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_records(file: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Read a file: the description of the worker that wrote it, None if there is none, and the records."""
    if file.suffix == ".jsonl":
        lines = read_lines(file)
        return (lines[0], lines[1:]) if lines else (None, [])
    import pyarrow.parquet as pq

    table = pq.read_table(file)
    rows = [
        {name: part for name, part in row.items() if part is not None} | json.loads(row.pop("other"))
        for row in table.to_pylist()
    ]
    for row in rows:
        row.pop("other", None)
    return json.loads(table.schema.metadata[b"worker"]), rows
