"""The directory of a run: a lock for one driver at a time, fixed settings, and a manifest of committed shards.

A shard is committed once the manifest lists it. The manifest is an append-only file of JSON lines, each with a checksum
of its own; the last entry of a shard is the valid one. Only the driver that holds the lock renames files and appends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from regard.errors import ArgumentError
from regard.jobs.shards import ShardResult, compute_sha256, format_shard_name
from regard.jobs.worker import SurveyError

SETTINGS_FILE, MANIFEST_FILE, LOCK_FILE = "settings.json", "manifest.jsonl", "lock"
# A name can change while the thing it names stays the same; fingerprints are compared instead.
UNCOMPARED_SETTINGS = ("name", "path", "notes", "started_at", "tests")

QUARANTINE_FIELDS = ("document", "kind", "reason")

# One line of the manifest, parsed.
Entry = dict[str, Any]


class Manifest:
    """The directory of a run while a driver holds its lock."""

    def __init__(self, out: Path, operation: str) -> None:
        self.out, self.operation, self.run = out, operation, secrets.token_hex(8)
        self._lock: IO[str]
        self._manifest: IO[bytes] | None = None

    # The lock

    def __enter__(self) -> Manifest:
        try:
            import fcntl
        except ImportError:
            raise SurveyError(
                self.operation,
                received="a system without fcntl",
                expected="a system with file locks",
                hint="Run it on Linux or macOS.",
            ) from None
        known = {SETTINGS_FILE, MANIFEST_FILE, LOCK_FILE}
        if self.out.exists() and not (self.out / SETTINGS_FILE).exists():
            foreign = [path.name for path in self.out.iterdir() if path.name.split(".tmp-")[0] not in known]
            if foreign:
                raise ArgumentError(
                    self.operation,
                    received=f"the directory {str(self.out)!r}, which contains {foreign[0]!r} but no {SETTINGS_FILE}",
                    expected="a new directory, an empty directory, or the directory of an unfinished run",
                    hint="Pass another output directory.",
                )
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.out / LOCK_FILE, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            self._lock.close()
            raise SurveyError(
                self.operation,
                received=f"{str(self.out)!r}, which is locked by {owner}",
                expected="one driver at a time",
                hint="Wait for that run or stop it, then run the same command again to resume.",
            ) from None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, run {self.run}\n")
        self._lock.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manifest is not None:
            self._manifest.close()
        with contextlib.suppress(OSError):
            self.remove_uncommitted()
        self._lock.truncate(0)
        self._lock.close()

    # The settings

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Write the settings of a new run, or compare them with those of the run that is resumed."""
        path = self.out / SETTINGS_FILE
        if path.exists():
            changes = list(find_differences(read_settings(path, self.operation), settings))
            if changes:
                raise ArgumentError(
                    self.operation,
                    received=f"{str(self.out)!r}, started with other settings: " + "; ".join(changes),
                    expected="the settings it was started with, so that its rows can be compared",
                    hint="Resume with those settings, or start another run in a new directory.",
                )
            return
        temporary = self.out / f"{SETTINGS_FILE}.tmp-{self.run}"
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(settings, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self._sync_directory()

    # The manifest

    def recover(self) -> tuple[dict[int, Entry], list[str]]:
        """Return the committed, intact shards by number, and notes about the damaged ones, which are withdrawn."""
        path = self.out / MANIFEST_FILE
        notes = []
        with open(path, "ab") as file:
            partial = count_partial_bytes(path)
            if partial:
                file.truncate(file.tell() - partial)
                os.fsync(file.fileno())
                notes.append("the last line of the manifest is incomplete; it was removed")
        self._manifest = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        committed, damaged_lines = read_manifest(path)
        if damaged_lines:
            notes.append(
                f"{damaged_lines} lines of the manifest are damaged; their shards are measured again"
            )
        for entry, problem in find_damaged(self.out, sorted(committed.values(), key=itemgetter("shard"))):
            notes.append(f"shard {entry['shard']} is damaged ({problem}); it is measured again")
            self._append({"shard": entry["shard"], "withdrawn": problem})
            del committed[entry["shard"]]
        self.remove_uncommitted({entry["file"] for entry in committed.values()})
        return committed, notes

    def commit(self, result: ShardResult) -> None:
        """Rename the temporary file of a shard, then list it in the manifest."""
        name = format_shard_name(result.shard)
        os.replace(self.out / result.temp_file, self.out / name)
        self._sync_directory()
        entry = {"shard": result.shard, "file": name}
        entry |= {key: value for key, value in asdict(result).items() if key not in ("shard", "temp_file")}
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        assert self._manifest is not None
        end = self._manifest.tell()
        try:
            self._manifest.write(format_entry(entry))
            self._manifest.flush()
            os.fsync(self._manifest.fileno())
        except OSError:
            # Remove a partially written line now if possible; otherwise the next run does.
            with contextlib.suppress(OSError):
                os.truncate(self.out / MANIFEST_FILE, end)
            raise

    def discard(self, result: ShardResult) -> None:
        """Delete the temporary file of a shard that is already committed."""
        with contextlib.suppress(OSError):
            (self.out / result.temp_file).unlink(missing_ok=True)

    def remove_uncommitted(self, committed: set[str] | None = None) -> None:
        """Delete temporary files and, if the committed file names are passed, every other shard file."""
        for path in self.out.iterdir():
            temporary = ".tmp-" in path.name
            unlisted = committed is not None and path.name.startswith("shard-") and path.name not in committed
            if temporary or unlisted:
                path.unlink(missing_ok=True)

    def _sync_directory(self) -> None:
        descriptor = os.open(self.out, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_settings(path: Path, operation: str) -> dict[str, Any]:
    """Read the settings of a run."""
    problem = "is not a JSON object"
    try:
        settings = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        settings, problem = None, f"is not valid JSON: {str(error)[:200]}"
    if not isinstance(settings, dict):
        raise ArgumentError(
            operation,
            received=f"{str(path)!r}, which {problem}",
            expected="the settings that a run wrote",
            hint="Restore the file from a copy, or start another run in a new directory.",
        )
    return settings


def format_entry(entry: Entry) -> bytes:
    """Format a line of the manifest: the CRC-32 of the JSON, then the JSON."""
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def iter_entries(path: Path) -> Iterator[Entry | None]:
    """Yield the entries of a manifest, None for a damaged line; an incomplete last line is skipped."""
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            checksum, _, text = line[:-1].partition(b" ")
            try:
                entry = json.loads(text) if int(checksum, 16) == zlib.crc32(text) else None
            except (ValueError, RecursionError):
                entry = None
            yield entry if _is_entry(entry) else None


def _is_entry(entry: Any) -> bool:
    """Return whether a line has the fields that `Manifest` writes; a file is named after its shard."""
    if not isinstance(entry, dict) or type(entry.get("shard")) is not int or entry["shard"] < 0:
        return False
    if "withdrawn" in entry:
        return True
    counts = (entry.get(name) for name in ("bytes", "rows", "documents", "tokens"))
    quarantined = entry.get("quarantined")
    return (
        entry.get("file") == format_shard_name(entry["shard"])
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(entry.get(name), str) for name in ("sha256", "ids_sha256"))
        and isinstance(quarantined, list)
        and all(isinstance(document, dict) for document in quarantined)
        and all(isinstance(document.get(name), str) for document in quarantined for name in QUARANTINE_FIELDS)
    )


def read_manifest(path: Path) -> tuple[dict[int, Entry], int]:
    """Return the last entry of each committed shard, and the number of damaged lines."""
    committed: dict[int, Entry] = {}
    damaged_lines = 0
    for entry in iter_entries(path):
        if entry is None:
            damaged_lines += 1
        elif "withdrawn" in entry:
            committed.pop(entry["shard"], None)
        else:
            committed[entry["shard"]] = entry
    return committed, damaged_lines


def find_damaged(out: Path, committed: Collection[Entry]) -> Iterator[tuple[Entry, str]]:
    """Yield the entries whose files differ from what was written, each with the problem; files are read in parallel."""

    def check(entry: Entry) -> str:
        path = out / entry["file"]
        if not path.exists():
            return "its file is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path.stat().st_size:,} bytes, expected {entry['bytes']:,}"
        return "" if compute_sha256(path) == entry["sha256"] else "its sha256 differs"

    with ThreadPoolExecutor() as pool:
        for entry, problem in zip(committed, pool.map(check, committed), strict=True):
            if problem:
                yield entry, problem


def count_partial_bytes(path: Path) -> int:
    """Count the bytes after the last complete line."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        back = 0
        while back < size:
            back = min(size, back + 4096)
            file.seek(size - back)
            end = file.read(4096 if back < size else back).rfind(b"\n")
            if end >= 0:
                return back - end - 1
    return size


def find_differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """Yield the differences between two settings as text.

    >>> list(find_differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    ['b.c was 2 and is 3']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key in UNCOMPARED_SETTINGS:
                continue
            yield from find_differences(before.get(key), after.get(key), f"{name}.{key}" if name else key)
    elif before != after:
        yield f"{name} was {_abbreviate(before)} and is {_abbreviate(after)}"


def _abbreviate(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 24 else f"{text[:10]}…"
