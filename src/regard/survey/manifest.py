"""The directory of a survey: one driver at a time, settings that do not change, and a manifest of what is committed.

A shard counts when the manifest names it, and not before. The manifest is lines of JSON that are only ever added, each
with a checksum of its own; the last word on a shard holds. Only the driver that holds the lock renames and adds.
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
from operator import itemgetter
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.survey.shard_writer import name_of, sha256_of
from regard.survey.worker_client import SurveyError

SETTINGS, MANIFEST, LOCK = "settings.json", "manifest.jsonl", "lock"


class Manifest:
    """The directory while a driver has it."""

    def __init__(self, out: Path) -> None:
        self.out, self.run = out, secrets.token_hex(8)
        self._lock: Any = None
        self._manifest: Any = None

    # One driver at a time

    def __enter__(self) -> Manifest:
        try:
            import fcntl
        except ImportError:
            raise SurveyError(
                "survey",
                received="a system without fcntl",
                expected="one whose files can be locked",
                hint="Run it on Linux or macOS.",
            ) from None
        known = {SETTINGS, MANIFEST, LOCK}
        if self.out.exists() and not (self.out / SETTINGS).exists():
            strange = [each.name for each in self.out.iterdir() if each.name.split(".tmp-")[0] not in known]
            if strange:
                raise ArgumentError(
                    "survey",
                    received=f"the directory {str(self.out)!r}, which holds {strange[0]!r} and no survey",
                    expected="a new directory, an empty one, or one that a survey began",
                    hint="Give another name after --out.",
                )
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.out / LOCK, "a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            who = self._lock.read().strip() or "another process"
            self._lock.close()
            raise SurveyError(
                "survey",
                received=f"{str(self.out)!r}, which is being written by {who}",
                expected="one driver at a time",
                hint="Wait for it, or end it; then the same command goes on where it stopped.",
            ) from None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"process {os.getpid()} on {socket.gethostname()}, run {self.run}\n")
        self._lock.flush()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._manifest is not None:
            self._manifest.close()
        with contextlib.suppress(OSError):
            self.sweep()
        self._lock.truncate(0)
        self._lock.close()

    # Settings that do not change

    def settle(self, settings: dict[str, Any]) -> None:
        """Write the settings of a new survey; refuse to go on with one whose settings were others."""
        path = self.out / SETTINGS
        if path.exists():
            before = json.loads(path.read_text())
            changed = list(differences(before, settings))
            if changed:
                raise ArgumentError(
                    "survey",
                    received=f"{str(self.out)!r}, begun otherwise: " + "; ".join(changed),
                    expected="what it was begun with, so that its rows can be compared",
                    hint="Go on as it was begun, or begin another survey in a new directory.",
                )
            return
        beside = self.out / f"{SETTINGS}.tmp-{self.run}"
        with open(beside, "x") as file:
            json.dump(settings, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        self._flush_names()

    # The manifest

    def recover(self) -> tuple[dict[int, dict[str, Any]], list[str]]:
        """What is committed and whole, by shard, and what was found amiss; that will be measured again."""
        path = self.out / MANIFEST
        notes = []
        with open(path, "ab") as file:
            torn = torn_tail(path)
            if torn:
                file.truncate(file.tell() - torn)
                os.fsync(file.fileno())
                notes.append("the manifest's last line was not written whole; it was taken off")
        self._manifest = open(path, "ab")  # noqa: SIM115 - closed by __exit__
        committed, bad = read_manifest(path)
        if bad:
            notes.append(f"{bad} lines of the manifest are damaged; their shards are measured again")
        for entry, why in damaged(self.out, sorted(committed.values(), key=itemgetter("shard"))):
            notes.append(f"shard {entry['shard']} is broken ({why}); it is measured again")
            self._add({"shard": entry["shard"], "withdrawn": why})
            del committed[entry["shard"]]
        self.sweep({entry["file"] for entry in committed.values()})
        return committed, notes

    def commit(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Give a shard's file its name, and only then name it in the manifest."""
        name = name_of(receipt["shard"])
        os.replace(self.out / receipt["written"], self.out / name)
        self._flush_names()
        entry = {"shard": receipt["shard"], "file": name}
        entry |= {key: value for key, value in receipt.items() if key not in ("shard", "written")}
        self._add(entry)
        return entry

    def _add(self, entry: dict[str, Any]) -> None:
        end = self._manifest.tell()
        try:
            self._manifest.write(line_of(entry))
            self._manifest.flush()
            os.fsync(self._manifest.fileno())
        except OSError:
            # What got through of the line is taken off again, if it can be; the next run would do it.
            with contextlib.suppress(OSError):
                os.truncate(self.out / MANIFEST, end)
            raise

    def discard(self, receipt: dict[str, Any]) -> None:
        """Throw away what a worker wrote a second time."""
        with contextlib.suppress(OSError):
            (self.out / receipt["written"]).unlink(missing_ok=True)

    def sweep(self, named: set[str] | None = None) -> None:
        """Remove what was not finished, and, if those that count are given, files that the manifest does not name."""
        for path in self.out.iterdir():
            unfinished = ".tmp-" in path.name
            stray = named is not None and path.name.startswith("shard-") and path.name not in named
            if unfinished or stray:
                path.unlink(missing_ok=True)

    def _flush_names(self) -> None:
        number = os.open(self.out, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def line_of(entry: dict[str, Any]) -> bytes:
    """A line of the manifest, with its checksum."""
    text = json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def entries(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a manifest, None for one that is damaged; a last line without its end is left out."""
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            checksum, _, text = line[:-1].partition(b" ")
            try:
                right = int(checksum, 16) == zlib.crc32(text)
                yield json.loads(text) if right else None
            except ValueError:
                yield None


def read_manifest(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """The last word on each shard that is committed, and how many lines are damaged."""
    committed: dict[int, dict[str, Any]] = {}
    bad = 0
    for entry in entries(path):
        if entry is None:
            bad += 1
        elif "withdrawn" in entry:
            committed.pop(entry["shard"], None)
        else:
            committed[entry["shard"]] = entry
    return committed, bad


def damaged(out: Path, committed: Collection[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries whose files are not what was written, and why. Files are read side by side."""

    def why(entry: dict[str, Any]) -> str:
        path = out / entry["file"]
        if not path.exists():
            return "its file is gone"
        if path.stat().st_size != entry["bytes"]:
            return f"{path.stat().st_size:,} bytes where {entry['bytes']:,} were written"
        return "" if sha256_of(path) == entry["sha256"] else "its sha256 is another"

    with ThreadPoolExecutor() as pool:
        yield from (
            (entry, said) for entry, said in zip(committed, pool.map(why, committed), strict=True) if said
        )


def torn_tail(path: Path) -> int:
    """How many bytes stand after the last whole line."""
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


def differences(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """What differs between two settings, in words.

    >>> list(differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}))
    ['b.c was 2 and is 3']
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key in NOT_COMPARED:
                continue
            yield from differences(before.get(key), after.get(key), f"{name}.{key}" if name else key)
    elif before != after:
        yield f"{name} was {_brief(before)} and is {_brief(after)}"


# A name may change while what it names stays; the fingerprints tell.
NOT_COMPARED = ("name", "path", "notes", "began")


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 24 else f"{text[:10]}…"
