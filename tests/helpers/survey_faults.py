"""Inject faults into a survey, in a driver process of its own.

python tests/helpers/survey_faults.py CORPUS OUT FAULT COUNT [EXECUTOR]
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regard
from regard.jobs import shards
from regard.jobs.corpus import Corpus
from regard.jobs.manifest import Manifest, format_entry
from regard.jobs.shards import ShardFile
from tests.helpers.survey_checks import run


def run_driver(
    corpus: Path, out: Path, fault: str, count: int, *executor: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a driver process in which a fault happens."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(map(str, (root / "src", root)))
    command = [sys.executable, __file__, str(corpus), str(out), fault, str(count), *executor]
    env = {**os.environ, "PYTHONPATH": paths, **env}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def interrupt(chance: random.Random, corpus: Path, out: Path, max_shards: int) -> None:
    """Run a driver that is killed at a random place, after one to `max_shards` shards."""
    fault = chance.choice(sorted(KILLS.keys() - {"before the settings"}))
    assert run_driver(corpus, out, fault, 1 + chance.randrange(1, max_shards)).returncode == -9


class CallHook:
    """Calls `action` before or after the `count`-th call of a function."""

    def __init__(
        self, owner: Any, name: str, count: int, action: Callable[..., None], after: bool = False
    ) -> None:
        self.remaining, self.action, self.after = count, action, after
        self.original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self.call(*args, **kwargs))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.remaining -= 1
        if self.remaining == 0 and not self.after:
            self.action(*args)
        result = self.original(*args, **kwargs)
        if self.remaining == 0 and self.after:
            self.action(*args)
        return result


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_half_a_line(manifest: Any, entry: dict[str, Any]) -> None:
    line = format_entry(entry)
    os.write(manifest._manifest.fileno(), line[: len(line) // 2])
    die()


def write_half_a_file(then: Callable[..., None]) -> Callable[..., None]:
    def action(file: Any, *_: Any) -> None:
        file._flush()
        file._file.flush()
        then()

    return action


def kill_workers(*_: Any) -> None:
    """Kill the child processes of this one, and print their ids."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    for process in (int(child) for ids in children for child in ids):
        os.kill(process, signal.SIGKILL)
        print("killed", process)


def fill_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Places where a worker can be interrupted; each takes the number of the shard and the action.
WRITES: dict[str, Any] = {
    "before a write": lambda n, action: CallHook(ShardFile, "__init__", n, action),
    "during a write": lambda n, action: CallHook(ShardFile, "finish", n, write_half_a_file(action)),
    "after a write": lambda n, action: CallHook(shards, "verify_file", n, action, after=True),
}
KILLS = {
    "before a write": lambda n: WRITES["before a write"](n, die),
    "during a write": lambda n: WRITES["during a write"](n, die),
    "after a write": lambda n: CallHook(Manifest, "commit", n, die),
    "between rename and manifest": lambda n: CallHook(Manifest, "_append", n, die),
    "during the manifest": lambda n: CallHook(Manifest, "_append", n, write_half_a_line),
    "after the manifest": lambda n: CallHook(Manifest, "_append", n, die, after=True),
    "before the settings": lambda n: CallHook(Manifest, "write_settings", 1, die),
}
RESUMING = {
    "before resuming": lambda n: CallHook(Manifest, "recover", 1, die),
    "while resuming": lambda n: CallHook(Manifest, "remove_uncommitted", 1, die),
    "after resuming": lambda n: CallHook(Manifest, "recover", 1, die, after=True),
}
DISKS = {
    "full for rows": lambda n: CallHook(ShardFile, "write", 5 * n, fill_disk),
    "full for a footer": lambda n: CallHook(ShardFile, "finish", n, fill_disk),
    "full for the manifest": lambda n: CallHook(Manifest, "_append", n, fill_disk),
    "full by limit": lambda n: resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * n, -1)),
}
WORKERS = {
    f"worker killed {place}": lambda n, hook=hook: hook(n, kill_workers)  # type: ignore[misc]
    for place, hook in WRITES.items()
}
FAULTS = {**KILLS, **RESUMING, **DISKS, **WORKERS}


class FaultyCorpus(Corpus):
    """A corpus that installs faults in every process it is sent to; each fault kills one process.

    A fault is (place, number of the shard, a file that is created when it happens).
    """

    def __init__(self, faults: list[tuple[str, int, Path]], *settings: Any) -> None:
        super().__init__(*settings)
        object.__setattr__(self, "_faults", faults)

    def __reduce__(self) -> Any:
        return _install_faults, (os.getpid(), self._faults, super().__reduce__()[1])  # type: ignore[attr-defined]


def _install_faults(sender: int, faults: list[tuple[str, int, Path]], settings: tuple[Any, ...]) -> Corpus:
    def die_once(happened: Path) -> None:
        try:
            happened.touch(exist_ok=False)
        except FileExistsError:
            return
        die()

    if os.getpid() != sender:
        for place, count, happened in faults:
            WRITES[place](count, lambda *_, happened=happened: die_once(happened))
    return Corpus(*settings)


if __name__ == "__main__":
    corpus, out, fault, count, *executor = sys.argv[1:]
    FAULTS[fault](int(count))
    try:
        run(Path(corpus), Path(out), **{"executor": executor[0], "workers": 2} if executor else {})
    except regard.survey.SurveyError as error:
        print(error)
        sys.exit(3)
