"""How far a survey is: the counts for a display, and the object that keeps them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

logger = logging.getLogger("regard.survey")

# The callback is called at most this often while documents are measured, in seconds.
INTERVAL = 0.1


class Progress(NamedTuple):
    """How far a survey is. Counts include the shards committed by earlier runs.

    Attributes:
        documents: Documents measured.
        tokens: Tokens measured.
        quarantined: Documents that could not be measured.
        shards: Shards committed.
        total_shards: Shards of the corpus.
        elapsed: Seconds since this run started.
        tokens_per_second: Rate of this run.
        remaining: Estimated seconds left; None before this run has committed a shard.
        note: A message for the user, or "".
    """

    documents: int
    tokens: int
    quarantined: int
    shards: int
    total_shards: int
    elapsed: float
    tokens_per_second: float
    remaining: float | None
    note: str = ""


class ProgressTracker:
    """The counts of a survey, updated from several threads and passed to a callback."""

    def __init__(
        self,
        committed: Iterable[dict[str, Any]],
        total_shards: int,
        callback: Callable[[Progress], None] | None,
    ) -> None:
        self.total_shards, self._callback = total_shards, callback
        self.documents = self.tokens = self.quarantined = self.shards = 0
        for entry in committed:
            self.documents += entry["documents"]
            self.tokens += entry["tokens"]
            self.quarantined += len(entry["quarantined"])
            self.shards += 1
        self._before = self.shards, self.tokens
        self._start = time.monotonic()
        self._last_report = 0.0
        self._lock = threading.Lock()

    def add(self, documents: int, tokens: int, quarantined: int) -> None:
        """Add documents that a worker has finished."""
        with self._lock:
            self.documents += documents
            self.tokens += tokens
            self.quarantined += quarantined
        if time.monotonic() - self._last_report > INTERVAL:
            self._report()

    def add_shard(self) -> None:
        """Add a committed shard."""
        self.shards += 1
        self._report()

    def warn(self, note: str) -> None:
        """Log a message and pass it to the callback."""
        logger.warning(note)
        self._report(note)

    def _report(self, note: str = "") -> None:
        if self._callback is None:
            return
        with self._lock:
            self._last_report = time.monotonic()
            elapsed = self._last_report - self._start
            new_shards = self.shards - self._before[0]
            remaining = elapsed / new_shards * (self.total_shards - self.shards) if new_shards else None
            self._callback(
                Progress(
                    self.documents,
                    self.tokens,
                    self.quarantined,
                    self.shards,
                    self.total_shards,
                    elapsed,
                    tokens_per_second=(self.tokens - self._before[1]) / max(elapsed, 1e-9),
                    remaining=remaining,
                    note=note,
                )
            )
