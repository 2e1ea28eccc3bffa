"""Documents in order: what a corpus holds, cut into shards that are the same on every machine and every run.

A document is a text file, a line of a JSON lines file, or a row of a Parquet file. Its id is where it stands, so that
no two have the same: `guide/intro.txt`, `pages.jsonl@18034` (the byte at which the line begins), `pages.parquet@17`.
To cut the corpus, only the names and sizes of its files are read, the footers of Parquet files, and the beginning of
one file of lines.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import ArgumentError

LINES, TABLES = (".jsonl", ".ndjson", ".json"), (".parquet", ".pq")
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
# So much of the first file of lines is read to see how long they are; of compressed ones it is taken for granted.
SAMPLE, LINE = 1 << 18, 4096
BLOCK = 1 << 20


class Document(NamedTuple):
    """A document, or why there is none: `problem` is (kind, reason) where it cannot be measured."""

    id: str
    text: str = ""
    label: str | None = None
    problem: tuple[str, str] | None = None


class Part(NamedTuple):
    """A stretch of a file: all of a text, the lines that begin in bytes start … stop, or rows start … stop.

    A compressed file cannot be entered in the middle, and is one stretch (stop −1).
    """

    path: str
    kind: str
    start: int = 0
    stop: int = -1


class Shard(NamedTuple):
    """What is measured and committed together."""

    number: int
    parts: tuple[Part, ...]

    def dumps(self) -> str:
        """As one line of text."""
        return json.dumps([self.number, self.parts])

    @classmethod
    def loads(cls, line: str) -> Shard:
        """Back again."""
        number, parts = json.loads(line)
        return cls(number, tuple(Part(*part) for part in parts))


@dataclass(frozen=True)
class Corpus:
    """A file, a directory, or a pattern with `*`, on a local path or any that pyarrow opens (`s3://`, `gs://`, …).

    `text` and `label` are the fields of JSON lines, or the columns of Parquet, that hold the text and, if there is
    one, the documents' own name. A shard has about `per_shard` documents.

    >>> Corpus("pages/*.txt").root
    'pages'
    """

    path: str
    text: str = "text"
    label: str | None = None
    per_shard: int = 64
    max_bytes: int = 1 << 24

    def __reduce__(self) -> Any:
        """Its settings alone: what was listed stays with the driver."""
        return Corpus, tuple(asdict(self).values())

    @property
    def root(self) -> str:
        """The directory that ids are counted from; of one file, the file."""
        fixed = []
        for part in self.path.split("/"):
            if any(each in part for each in "*?["):
                break
            fixed.append(part)
        return "/".join(fixed) or ("/" if self.path.startswith("/") else ".")

    @property
    def _pattern(self) -> str:
        return self.path[len(self.root) :].lstrip("/")

    def holds(self, folder: Path) -> bool:
        """Whether files of a local directory would be taken for documents."""
        root = Path(self.root).expanduser().resolve()
        if "://" in self.root or not folder.resolve().is_relative_to(root) or root.is_file():
            return False
        name = (folder.resolve().relative_to(root) / "shard-000000.parquet").as_posix()
        return not self._pattern or _matches(name, self._pattern)

    @cached_property
    def _system(self) -> tuple[Any, str]:
        """The file system, and the root on it."""
        from pyarrow import fs

        if "://" in self.root:
            system, base = fs.FileSystem.from_uri(self.root)
            return system, str(base)
        return fs.LocalFileSystem(), Path(self.root).expanduser().resolve().as_posix()

    @cached_property
    def files(self) -> list[tuple[str, int]]:
        """Names below the root and sizes, in order; hidden files and directories are left out."""
        from pyarrow import fs

        system, base = self._system
        info = system.get_file_info(base)
        if info.type == fs.FileType.File:
            return [("", int(info.size))]
        if info.type == fs.FileType.NotFound:
            raise self._refused("where nothing is", "Check the path; a pattern is written in quotes.")
        found = system.get_file_info(fs.FileSelector(base, recursive=True))
        names = [(each.path[len(base) :].lstrip("/"), each.size) for each in found if each.is_file]
        shown = [(name, int(size)) for name, size in names if not any(p[0] == "." for p in name.split("/"))]
        if self._pattern:
            shown = [(name, size) for name, size in shown if _matches(name, self._pattern)]
        if not shown:
            raise self._refused(
                "in which no file is", "Give a directory of files, or a pattern that matches some."
            )
        return sorted(shown)

    def _refused(self, what: str, hint: str) -> ArgumentError:
        return ArgumentError(
            "survey",
            received=f"the corpus {self.path!r}, {what}",
            expected="text files, JSON lines (.jsonl) or Parquet",
            hint=hint,
        )

    def facts(self) -> dict[str, Any]:
        """What must be the same for a survey to go on: names, sizes, and how they are cut."""
        digest = hashlib.sha256()
        for name, size in self.files:
            digest.update(f"{name}\0{size}\n".encode())
        settings = {key: value for key, value in asdict(self).items() if key != "path"}
        return {"files": len(self.files), "bytes": sum(size for _, size in self.files), **settings,
                "line": self._line_bytes, "sha256": digest.hexdigest()}  # fmt: skip

    # How it is cut

    def shards(self) -> Iterator[Shard]:
        """Every shard, in order."""
        number, held, parts = 0, 0.0, []
        for name, size in self.files:
            for part, weight in self._parts(name, size):
                parts.append(part)
                held += weight
                if held >= self.per_shard:
                    yield Shard(number, tuple(parts))
                    number, held, parts = number + 1, 0.0, []
        if parts:
            yield Shard(number, tuple(parts))

    def _parts(self, name: str, size: int) -> Iterator[tuple[Part, float]]:
        """The stretches of a file, and about how many documents each has."""
        kind, packed = _kind(name or self.path)
        if kind == "text":
            yield Part(name, kind), 1
        elif packed:
            yield Part(name, kind), max(1.0, size / LINE)
        else:
            step = self.per_shard
            total, weight = (size, step * self._line_bytes) if kind == "lines" else (self._rows(name), step)
            for start in range(0, total, weight):
                stop = min(start + weight, total)
                yield Part(name, kind, start, stop), step * (stop - start) / weight

    @cached_property
    def _line_bytes(self) -> int:
        """About how long a line is."""
        for name, size in self.files:
            if size and _kind(name or self.path) == ("lines", False):
                with self._system[0].open_input_file(self._at(name)) as file:
                    block = bytes(file.read(SAMPLE))
                return max(64, len(block) // max(1, block.count(b"\n")))
        return LINE

    def _rows(self, name: str) -> int:
        from pyarrow import ArrowInvalid, parquet

        system, _ = self._system
        try:
            with system.open_input_file(self._at(name)) as file:
                opened = parquet.ParquetFile(file)
                columns, rows = opened.schema_arrow.names, int(opened.metadata.num_rows)
        except ArrowInvalid as error:
            raise self._refused(
                f"whose {name or 'file'} is no Parquet ({error})", "Take the file out, or mend it."
            ) from None
        missing = [each for each in (self.text, self.label) if each is not None and each not in columns]
        if missing:
            raise self._refused(
                f"whose {name or 'file'} has no column {missing[0]!r}",
                f"It has {', '.join(columns[:8])}: name the one that holds the text, survey(…, text=…).",
            )
        return rows

    def _at(self, name: str) -> str:
        base = self._system[1]
        return f"{base}/{name}" if name else base

    # How it is read

    def documents(self, shard: Shard) -> Iterator[Document]:
        """The documents of a shard, in order."""
        read = {"text": self._text, "lines": self._lines, "table": self._table}
        for part in shard.parts:
            yield from read[part.kind](part, part.path or self._system[1].rsplit("/", 1)[-1])

    def _text(self, part: Part, name: str) -> Iterator[Document]:
        try:
            with self._system[0].open_input_stream(self._at(part.path), compression="detect") as file:
                data = _upto(file, self.max_bytes + 1)
        except (FileNotFoundError, PermissionError) as error:
            yield Document(name, problem=("unread", _short(error)))
        else:
            yield self._document(name, data, None)

    def _lines(self, part: Part, name: str) -> Iterator[Document]:
        system, path = self._system[0], self._at(part.path)
        if part.stop < 0:
            file, start, stop = system.open_input_stream(path, compression="detect"), 0, 1 << 62
        else:
            file, (start, stop) = system.open_input_file(path), part[2:]
        with file:
            for at, line in lines(file, start, stop, self.max_bytes):
                yield self._line(f"{name}@{at}", line)

    def _line(self, name: str, line: bytes | None) -> Document:
        if line is None:
            return Document(name, problem=self._long())
        try:
            fields = json.loads(line)
        except ValueError as error:
            return Document(name, problem=("not text", f"a line that is not JSON: {_short(error)}"))
        if not isinstance(fields, dict):
            return Document(name, problem=("not text", f"a line of JSON that is a {type(fields).__name__}"))
        return self._document(name, fields.get(self.text), fields.get(self.label) if self.label else None)

    def _table(self, part: Part, name: str) -> Iterator[Document]:
        from pyarrow import parquet

        columns = [self.text] + ([self.label] if self.label else [])
        with self._system[0].open_input_file(self._at(part.path)) as file:
            opened = parquet.ParquetFile(file)
            first, groups, at = None, [], 0
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if at < part.stop and at + rows > part.start:
                    groups.append(group)
                    first = at if first is None else first
                at += rows
            at = first or 0
            for batch in opened.iter_batches(256, row_groups=groups, columns=columns):
                low, high = max(part.start - at, 0), min(part.stop - at, len(batch))
                for row in range(low, high):
                    text, *label = (batch.column(column)[row].as_py() for column in columns)
                    yield self._document(f"{name}@{at + row}", text, label[0] if label else None)
                at += len(batch)
                if at >= part.stop:
                    return

    def _document(self, name: str, text: Any, label: Any) -> Document:
        problem = None
        try:
            if isinstance(text, bytes) and len(text) <= self.max_bytes:
                text = text.decode("utf-8-sig")
            elif isinstance(text, str):
                text.encode()
            if not isinstance(text, str | bytes):
                problem = "not text", f"a {type(text).__name__} where a text is expected"
            elif len(text) > self.max_bytes:
                problem = self._long()
            elif not text.strip():
                problem = "not text", "nothing but white space"
        except UnicodeError as error:
            problem = "not text", f"no UTF-8: {_short(error)}"
        label = None if label is None else str(label)
        return Document(name, "", label, problem) if problem else Document(name, text, label)

    def _long(self) -> tuple[str, str]:
        return "too long", f"more than {self.max_bytes:,} bytes"


def _matches(name: str, pattern: str) -> bool:
    """Whether a name below the root fits a pattern, in which `**/` is any number of directories."""
    if pattern.startswith("**/"):
        rest = name.split("/")
        return any(_matches("/".join(rest[i:]), pattern[3:]) for i in range(len(rest)))
    parts, wanted = name.split("/"), pattern.split("/")
    if len(wanted) > 1:
        return len(parts) > 1 and fnmatch.fnmatchcase(parts[0], wanted[0]) and _matches(
            "/".join(parts[1:]), "/".join(wanted[1:])
        )  # fmt: skip
    return len(parts) == 1 and fnmatch.fnmatchcase(name, pattern)


def _kind(name: str) -> tuple[str, bool]:
    """What a file's name says that it holds, and whether it is compressed.

    >>> [_kind(name) for name in ("a.txt", "b.jsonl", "b.json.gz", "c.parquet", "README")]
    [('text', False), ('lines', False), ('lines', True), ('table', False), ('text', False)]
    """
    name, packed = name.lower(), False
    for suffix in COMPRESSED:
        if name.endswith(suffix):
            name, packed = name.removesuffix(suffix), True
    kind = "lines" if name.endswith(LINES) else "table" if name.endswith(TABLES) else "text"
    return kind, packed


def lines(file: Any, start: int, stop: int, most: int) -> Iterator[tuple[int, bytes | None]]:
    r"""The lines that begin in bytes start … stop, with the byte at which each begins; None for one longer than `most`.

    Blank lines are left out. Stretches that follow each other give every line once.

    >>> import io
    >>> [list(lines(io.BytesIO(b"ab\n\ncdef\ng"), *each, 3)) for each in ((0, 3), (3, 5), (5, 10))]
    [[(0, b'ab')], [(4, None)], [(9, b'g')]]
    """
    at, ours = start, start == 0
    if start:
        at = start - 1  # if a line ends there, the next one is ours
        file.seek(at)
    begin, held, size = at, [], 0
    while block := file.read(BLOCK):
        here = 0
        while here < len(block):
            end = block.find(b"\n", here)
            piece = block[here : len(block) if end < 0 else end]
            size += len(piece)
            if ours and size <= most:
                held.append(piece)
            if end < 0:
                break
            if ours and size:
                line = b"".join(held) if size <= most else None
                if line is None or line.strip():
                    yield begin, line
            here, begin, ours = end + 1, at + end + 1, True
            held, size = [], 0
            if begin >= stop:
                return
        at += len(block)
    if ours and size:
        line = b"".join(held) if size <= most else None
        if line is None or line.strip():
            yield begin, line


def _upto(file: Any, count: int) -> bytes:
    pieces = []
    while count > 0 and (piece := file.read(min(count, BLOCK))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
