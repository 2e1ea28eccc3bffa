"""A corpus: its documents in order, split into shards that are the same on every machine and in every run.

A document is a text file, a line of a JSON lines file, or a row of a Parquet file. Its id is its position, which is
unique: `guide/intro.txt`, `pages.jsonl@18034` (the byte offset of the line), `pages.parquet@17`. Splitting the corpus
reads only the names and sizes of its files, the footers of Parquet files, and the beginning of one JSON lines file.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from pyarrow import fs


LINE_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst", ".lz4")
# The average line length is estimated from this much of the first JSON lines file; compressed files use the default.
SAMPLE_BYTES, DEFAULT_LINE_BYTES = 1 << 18, 4096
BLOCK_BYTES = 1 << 20  # read at once


class CorpusDocument(NamedTuple):
    """A document of a corpus; if it cannot be measured, `problem` holds (kind, reason)."""

    id: str
    text: str = ""
    name: str | None = None
    prompt: str | None = None  # what comes before the text, if the corpus has a prompt field
    problem: tuple[str, str] | None = None


class FileRange(NamedTuple):
    """A range of a file: a whole text file, the lines that begin in bytes start … stop, or the rows start … stop.

    A compressed file cannot be read from the middle, so it is one range (stop −1).
    """

    path: str
    kind: str
    start: int = 0
    stop: int = -1


class Shard(NamedTuple):
    """The documents that are measured and committed together."""

    number: int
    ranges: tuple[FileRange, ...]


@dataclass(frozen=True)
class Corpus:
    """A file, a directory, or a pattern with `*`, on a local path or any that pyarrow opens (`s3://`, `gs://`, …).

    Attributes:
        path: The file, directory or pattern.
        text_field: Field of JSON lines, or column of Parquet, that holds the text.
        name_field: Field or column that holds the name of a document, if there is one.
        shard_size: Approximate number of documents in a shard.
        max_bytes: Documents with more bytes are rejected.
        prompt_field: Field or column that holds the prompt that a text answers, if there is one.
        operation: The function that reads the corpus, as errors name it.

    >>> Corpus("pages/*.txt").root
    'pages'
    """

    path: str
    text_field: str = "text"
    name_field: str | None = None
    shard_size: int = 64
    max_bytes: int = 1 << 24
    prompt_field: str | None = None
    operation: str = "survey.run"

    def __reduce__(self) -> Any:
        """Pickle the settings only; the file listing stays with the driver."""
        return Corpus, tuple(asdict(self).values())

    @property
    def root(self) -> str:
        """The directory that document ids are relative to; for a single file, the file itself."""
        fixed = []
        for part in self.path.split("/"):
            if any(wildcard in part for wildcard in "*?["):
                break
            fixed.append(part)
        return "/".join(fixed) or ("/" if self.path.startswith("/") else ".")

    @property
    def _pattern(self) -> str:
        return self.path[len(self.root) :].lstrip("/")

    def includes(self, path: Path) -> bool:
        """Return whether the corpus would read a local file, if there were one at this path."""
        if "://" in self.root and not self.root.startswith("file://"):
            return False
        root, file = Path(self._filesystem[1]).resolve(), path.resolve()
        if root.is_file() or not file.is_relative_to(root):
            return False
        return self._selects(file.relative_to(root).as_posix())

    def _selects(self, name: str) -> bool:
        """Return whether a file below the root belongs to the corpus."""
        is_hidden = any(part.startswith(".") for part in name.split("/"))
        return not is_hidden and (not self._pattern or _matches(name, self._pattern))

    @cached_property
    def _filesystem(self) -> tuple[fs.FileSystem, str]:
        """The pyarrow file system, and the root on it."""
        from pyarrow import fs

        if "://" in self.root:
            filesystem, base = fs.FileSystem.from_uri(self.root)
            return filesystem, str(base)
        return fs.LocalFileSystem(), Path(self.root).expanduser().resolve().as_posix()

    @cached_property
    def files(self) -> list[tuple[str, int]]:
        """Paths relative to the root, with sizes, sorted; dotfiles and dot-directories are skipped."""
        from pyarrow import fs

        filesystem, base = self._filesystem
        info = filesystem.get_file_info(base)
        if info.type == fs.FileType.File:
            return [("", int(info.size))]
        if info.type == fs.FileType.NotFound:
            raise self._error(
                "which does not exist",
                "Check the path, and put a pattern in quotes so that the shell keeps it.",
            )
        entries = filesystem.get_file_info(fs.FileSelector(base, recursive=True))
        files = [(entry.path[len(base) :].lstrip("/"), int(entry.size)) for entry in entries if entry.is_file]
        files = [(name, size) for name, size in files if self._selects(name)]
        if not files:
            raise self._error(
                "which contains no files", "Pass a directory with files, or a pattern that matches some."
            )
        return sorted(files)

    def _error(self, problem: str, hint: str) -> ArgumentError:
        return ArgumentError(
            self.operation,
            received=f"the corpus {self.path!r}, {problem}",
            expected="text files, JSON lines (.jsonl) or Parquet",
            hint=hint,
        )

    def compute_fingerprint(self) -> dict[str, Any]:
        """Return the facts that must not change when a run is resumed: files, sizes and the split."""
        digest = hashlib.sha256()
        for name, size in self.files:
            digest.update(f"{name}\0{size}\n".encode())
        settings = {key: value for key, value in asdict(self).items() if key not in ("path", "operation")}
        return {"files": len(self.files), "bytes": sum(size for _, size in self.files), **settings,
                "line_bytes": self._line_bytes, "sha256": digest.hexdigest()}  # fmt: skip

    # Splitting

    def iter_shards(self) -> Iterator[Shard]:
        """Yield the shards in order."""
        number, documents, ranges = 0, 0.0, []
        for name, size in self.files:
            for file_range, count in self._split(name, size):
                ranges.append(file_range)
                documents += count
                if documents >= self.shard_size:
                    yield Shard(number, tuple(ranges))
                    number, documents, ranges = number + 1, 0.0, []
        if ranges:
            yield Shard(number, tuple(ranges))

    def _split(self, name: str, size: int) -> Iterator[tuple[FileRange, float]]:
        """Yield the ranges of a file, each with its approximate number of documents."""
        kind, compressed = _detect_format(name or self.path)
        if kind == "text":
            yield FileRange(name, kind), 1
        elif compressed and kind == "table":
            raise self._error(
                f"whose {name or 'file'} is Parquet inside a compressed file",
                "Decompress it: Parquet compresses its columns itself.",
            )
        elif compressed:
            yield FileRange(name, kind), max(1.0, size / DEFAULT_LINE_BYTES)
        else:
            documents = self.shard_size
            if kind == "lines":
                total, step = size, documents * self._line_bytes
            else:
                total, step = self._count_rows(name), documents
            for start in range(0, total, step):
                stop = min(start + step, total)
                yield FileRange(name, kind, start, stop), documents * (stop - start) / step

    @cached_property
    def _line_bytes(self) -> int:
        """The approximate length of a line."""
        for name, size in self.files:
            if size and _detect_format(name or self.path) == ("lines", False):
                try:
                    with self._filesystem[0].open_input_file(self._full_path(name)) as file:
                        block = bytes(file.read(SAMPLE_BYTES))
                except OSError as error:
                    if not self._is_unreadable(error):
                        raise
                    continue
                return max(64, len(block) // max(1, block.count(b"\n")))
        return DEFAULT_LINE_BYTES

    def _count_rows(self, name: str) -> int:
        from pyarrow import ArrowInvalid, parquet

        filesystem, _ = self._filesystem
        try:
            with filesystem.open_input_file(self._full_path(name)) as file:
                table = parquet.ParquetFile(file)
                columns, rows = table.schema_arrow.names, int(table.metadata.num_rows)
        except (ArrowInvalid, UnicodeDecodeError, OSError) as error:
            if not self._is_unreadable(error):
                raise
            raise self._error(
                f"whose {name or 'file'} is not valid Parquet ({error})", "Repair the file or remove it."
            ) from None
        missing = [
            field
            for field in (self.text_field, self.name_field, self.prompt_field)
            if field is not None and field not in columns
        ]
        if missing:
            raise self._error(
                f"whose {name or 'file'} has no column {missing[0]!r}",
                f"Its columns are {', '.join(columns[:8])}. Pass the one with the text as text_field.",
            )
        return rows

    def _full_path(self, name: str) -> str:
        base = self._filesystem[1]
        return f"{base}/{name}" if name else base

    # Reading

    def iter_documents(self, shard: Shard) -> Iterator[CorpusDocument]:
        """Yield the documents of a shard in order."""
        readers = {"text": self._read_text, "lines": self._read_lines, "table": self._read_table}
        for file_range in shard.ranges:
            name = file_range.path or self._filesystem[1].rsplit("/", 1)[-1]
            yield from readers[file_range.kind](file_range, name)

    def _read_text(self, file_range: FileRange, name: str) -> Iterator[CorpusDocument]:
        path = self._full_path(file_range.path)
        try:
            with self._filesystem[0].open_input_stream(path, compression="detect") as file:
                data = read_up_to(file, self.max_bytes + 1)
        except (OSError, ValueError) as error:
            if not self._is_unreadable(error):
                raise
            yield CorpusDocument(name, problem=("unreadable", _first_line(error)))
        else:
            yield self._build_document(name, data, None)

    def _is_unreadable(self, error: Exception) -> bool:
        """Return whether an error is about one file: it is missing, closed to us or damaged.

        A disk or a network that fails is not the fault of a file.
        """
        from pyarrow import ArrowInvalid

        # A name of a column that is not UTF-8 is decoded by pyarrow itself.
        if isinstance(error, FileNotFoundError | PermissionError | ArrowInvalid | UnicodeDecodeError):
            return True
        is_local = self._filesystem[0].type_name == "local"
        return is_local and isinstance(error, OSError) and error.errno is None

    def _read_lines(self, file_range: FileRange, name: str) -> Iterator[CorpusDocument]:
        filesystem, path = self._filesystem[0], self._full_path(file_range.path)
        start, stop = file_range.start, file_range.stop
        end = start  # of the last line that was read
        try:
            if stop < 0:
                file, stop = filesystem.open_input_stream(path, compression="detect"), 1 << 62
            else:
                file = filesystem.open_input_file(path)
            with file:
                for offset, line in iter_lines(file, start, stop, self.max_bytes):
                    yield self._parse_line(f"{name}@{offset}", line)
                    end = offset + 1
        except (OSError, ValueError) as error:
            if not self._is_unreadable(error):
                raise
            problem = "unreadable", f"the rest of the file cannot be read: {_first_line(error)}"
            yield CorpusDocument(f"{name}@{end}", problem=problem)

    def _parse_line(self, name: str, line: bytes | None) -> CorpusDocument:
        if line is None:
            return CorpusDocument(name, problem=self._too_long)
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:  # the second for thousands of brackets
            return CorpusDocument(
                name, problem=("not text", f"the line is not valid JSON: {_first_line(error)}")
            )
        if not isinstance(fields, dict):
            kind = type(fields).__name__
            return CorpusDocument(
                name, problem=("not text", f"the line is a JSON {kind}, expected an object")
            )
        own_name, prompt = (
            fields.get(field) if field else None for field in (self.name_field, self.prompt_field)
        )
        return self._build_document(name, fields.get(self.text_field), own_name, prompt)

    def _read_table(self, file_range: FileRange, name: str) -> Iterator[CorpusDocument]:
        from pyarrow import parquet

        fields = (self.text_field, self.name_field, self.prompt_field)
        columns = list(dict.fromkeys(field for field in fields if field))
        start, stop = file_range.start, file_range.stop
        end = start  # of the last row that was read
        try:
            with self._filesystem[0].open_input_file(self._full_path(file_range.path)) as file:
                table = parquet.ParquetFile(file)
                sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
                offsets = np.cumsum([0, *sizes]).tolist()
                groups = [
                    g for g, size in enumerate(sizes) if offsets[g] < stop and offsets[g] + size > start
                ]
                offset = offsets[groups[0]] if groups else stop
                for batch in table.iter_batches(256, row_groups=groups, columns=columns):
                    for row in range(max(start - offset, 0), min(stop - offset, len(batch))):
                        found = {column: _read_value(batch.column(column)[row]) for column in columns}
                        values = (found[field] if field else None for field in fields)
                        yield self._build_document(f"{name}@{offset + row}", *values)
                        end = offset + row + 1
                    offset += len(batch)
                    if offset >= stop:
                        break
        except (OSError, ValueError) as error:
            if not self._is_unreadable(error):
                raise
            problem = "unreadable", f"the row cannot be read: {_first_line(error)}"
            yield from (CorpusDocument(f"{name}@{row}", problem=problem) for row in range(end, stop))

    def _build_document(self, document_id: str, text: Any, name: Any, prompt: Any = None) -> CorpusDocument:
        problem = None
        try:
            if isinstance(text, bytes) and len(text) <= self.max_bytes:
                text = text.decode("utf-8-sig")
            elif isinstance(text, str):
                text.encode()
            if isinstance(prompt, str):
                prompt.encode()
            if not isinstance(text, str | bytes):
                problem = "not text", f"the text field is of type {type(text).__name__}"
            elif self.prompt_field is not None and not isinstance(prompt, str):
                problem = "not text", f"the prompt field is of type {type(prompt).__name__}"
            elif len(text) + len(prompt or "") > self.max_bytes:
                problem = self._too_long
            elif not text.strip():
                problem = "not text", "the text is empty or white space"
        except UnicodeError as error:
            problem = "not text", f"not valid UTF-8: {_first_line(error)}"
        # A lone surrogate, which JSON may hold, is not valid in any file.
        name = None if name is None else str(name).encode(errors="replace").decode()
        if problem:
            return CorpusDocument(document_id, "", name, problem=problem)
        return CorpusDocument(document_id, text, name, prompt)

    @property
    def _too_long(self) -> tuple[str, str]:
        return "too long", f"more than {self.max_bytes:,} bytes"


def _read_value(scalar: Any) -> Any:
    """Return a value of a table; a string that is not UTF-8 as bytes."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path below the root matches a pattern, in which `**/` is any number of directories."""
    if pattern.startswith("**/"):
        parts = name.split("/")
        return any(_matches("/".join(parts[i:]), pattern[3:]) for i in range(len(parts)))
    parts, patterns = name.split("/"), pattern.split("/")
    if len(patterns) > 1:
        return len(parts) > 1 and fnmatch.fnmatchcase(parts[0], patterns[0]) and _matches(
            "/".join(parts[1:]), "/".join(patterns[1:])
        )  # fmt: skip
    return len(parts) == 1 and fnmatch.fnmatchcase(name, pattern)


def _detect_format(name: str) -> tuple[str, bool]:
    """Return the format of a file by its name, and whether it is compressed.

    >>> [_detect_format(name) for name in ("a.txt", "b.jsonl", "b.json.gz", "c.parquet", "README")]
    [('text', False), ('lines', False), ('lines', True), ('table', False), ('text', False)]
    """
    name, compressed = name.lower(), False
    for suffix in COMPRESSED_SUFFIXES:
        if name.endswith(suffix):
            name, compressed = name.removesuffix(suffix), True
    kind = "lines" if name.endswith(LINE_SUFFIXES) else "table" if name.endswith(TABLE_SUFFIXES) else "text"
    return kind, compressed


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def iter_lines(file: BinaryIO, start: int, stop: int, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    r"""Yield the lines that begin in bytes start … stop, each with its byte offset.

    A line longer than `max_bytes` is None. Blank lines are skipped. Consecutive ranges yield every line once.

    >>> import io
    >>> [list(iter_lines(io.BytesIO(b"ab\n\ncdef\ng"), *bounds, 3)) for bounds in ((0, 3), (3, 5), (5, 10))]
    [[(0, b'ab')], [(4, None)], [(9, b'g')]]
    """
    # `in_range` is False until the first line that begins at or after `start`.
    offset, in_range = start, start == 0
    if start:
        offset = start - 1  # if a line ends there, the next one begins at `start`
        file.seek(offset)
    begin, pieces, size = offset, [], 0
    while block := file.read(BLOCK_BYTES):
        position = 0
        while position < len(block):
            end = block.find(b"\n", position)
            piece = block[position : len(block) if end < 0 else end]
            size += len(piece)
            if in_range and size <= max_bytes:
                pieces.append(piece)
            if end < 0:
                break
            if in_range and size:
                line = b"".join(pieces) if size <= max_bytes else None
                if line is None or line.strip():
                    yield begin, line
            position, begin, in_range = end + 1, offset + end + 1, True
            pieces, size = [], 0
            if begin >= stop:
                return
        offset += len(block)
    if in_range and size:
        line = b"".join(pieces) if size <= max_bytes else None
        if line is None or line.strip():
            yield begin, line


def read_up_to(file: BinaryIO, count: int) -> bytes:
    """Read at most `count` bytes; a stream may return them in pieces."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, BLOCK_BYTES))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
