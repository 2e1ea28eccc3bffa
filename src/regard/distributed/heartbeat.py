"""The heartbeat of a group: each rank counts in the group's store, and notices which ranks have stopped.

A neighbour that does not answer may itself wait for another rank, so an operation that fails or waits asks here which
rank stopped. The first rank that finds out writes it into the store, and all others read it there: all name the same.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from typing import Any, NamedTuple

# Seconds between two beats, and without a beat until a rank counts as stopped: while others wait for it, and after a
# connection was lost. A busy machine may not run the thread for seconds.
INTERVAL, SILENCE, SILENCE_AFTER_LOSS = 1.0, 20.0, 8.0
# Seconds that a rank waits until the others can read what it reports.
PUBLISH_TIMEOUT = 3.0
FAULT_KEY = "fault"


class GroupFault(NamedTuple):
    """What is wrong with a group, for good.

    Attributes:
        ranks: The ranks at fault.
        reason: What they did, as in "rank 2 died or was stopped".
    """

    ranks: tuple[int, ...]
    reason: str


class Heartbeat:
    """Beats for this rank in a thread of its own, and watches the beats of the others.

    Args:
        store: Store of the group; used by the thread alone.
        rank: Rank within the group.
        size: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock = threading.Lock()
        self._joined = False
        self._operation = 0  # the operation that runs; 0 for none
        self._lost_connection = False
        self._report: GroupFault | None = None
        self._wake, self._published = threading.Event(), threading.Event()
        self._beats: list[tuple[bytes, float]] = []
        self._answered = time.monotonic()
        self._is_store_lost = False
        self._is_stopping = False
        self._serving_rank: int | None = None
        self.fault: GroupFault | None = None
        self._thread = threading.Thread(target=self._run, name="regard heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first beat and start the thread."""
        self._store.set(f"beat/{self._rank}", "0")
        self._thread.start()
        # A thread that the interpreter ends inside a request to the store aborts the process.
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join(2 * INTERVAL)

    def join(self, serving_rank: int | None) -> None:
        """Start to watch the others; called once all ranks have started their heartbeats.

        Args:
            serving_rank: The rank whose process runs the store; None if none does.
        """
        with self._lock:
            self._joined, self._serving_rank = True, serving_rank

    def enter(self, operation: int) -> None:
        """Note that an operation begins, by its number."""
        with self._lock:
            self._operation, self._lost_connection = operation, False

    def leave(self) -> None:
        """Note that the operation is over."""
        with self._lock:
            self._operation = 0

    def lose_connection(self) -> None:
        """Note that a transfer failed: a rank that is silent now has stopped."""
        with self._lock:
            self._lost_connection = True

    def report(self, fault: GroupFault) -> None:
        """Publish a fault that this rank noticed by itself."""
        with self._lock:
            self._report = self._report or fault
        self._wake.set()
        self._published.wait(PUBLISH_TIMEOUT)  # the process may end now

    def find_fault(self, since: float) -> GroupFault | None:
        """Return what is wrong with the group, if anything is known; asks nothing of the store.

        Args:
            since: When the caller began to wait, by `time.monotonic`.
        """
        if self.fault is not None:
            return self.fault
        with self._lock:
            silence = SILENCE_AFTER_LOSS if self._lost_connection else SILENCE
            if self._is_store_lost and self._lost_connection:
                silence = 0.0  # nothing more will be heard
            # A main thread that kept the interpreter's lock has stopped this rank's own heartbeat, too.
            if time.monotonic() - max(self._answered, since) <= silence + INTERVAL:
                return None
            if self._serving_rank is None:
                return GroupFault((), "the store of the process group does not answer")
            rank = self._serving_rank
            return GroupFault((rank,), f"rank {rank}, whose process runs the store, died or was stopped")

    # The thread

    def _run(self) -> None:
        count = 0
        while self.fault is None and not self._is_stopping:
            count += 1
            try:
                self._beat(count)
            except RuntimeError:  # torch's errors of a store: its process is gone, or the group was destroyed
                self._is_store_lost = True
                return
            self._answered = time.monotonic()
            self._wake.wait(INTERVAL)
            self._wake.clear()

    def _beat(self, count: int) -> None:
        store = self._store
        store.set(f"beat/{self._rank}", str(count))
        if self._report is not None:
            text = json.dumps(self._report)
            store.compare_set(FAULT_KEY, "", text)
        if store.check([FAULT_KEY]):
            ranks, reason = json.loads(store.get(FAULT_KEY))
            self.fault = GroupFault(tuple(ranks), reason)
            self._published.set()
            return
        if self._joined:
            self._watch(store.multi_get([f"beat/{rank}" for rank in range(self._size)]))

    def _watch(self, beats: list[bytes]) -> None:
        """Compare the beats of all ranks with the last ones; publish the rank that stopped while others wait for it."""
        now = time.monotonic()
        if not self._beats:
            self._beats = [(beat, now) for beat in beats]
        self._beats = [
            before if before[0] == beat else (beat, now)
            for before, beat in zip(self._beats, beats, strict=True)
        ]
        with self._lock:
            operation, silence = self._operation, SILENCE_AFTER_LOSS if self._lost_connection else SILENCE
        silent = [rank for rank, (_, heard) in enumerate(self._beats) if now - heard > silence]
        if not operation or not silent:
            return
        # A rank that has finished the operation may have ended its process.
        done = [int(number) for number in self._store.multi_get([f"done/{rank}" for rank in silent])]
        stopped = [rank for rank, last in zip(silent, done, strict=True) if last < operation]
        if stopped and self._report is None:
            # The one that fell silent first: others may have ended because of it.
            first = min(stopped, key=lambda rank: self._beats[rank][1])
            heard = self._beats[first][1]
            together = tuple(rank for rank in stopped if self._beats[rank][1] - heard < 2 * INTERVAL)
            names = " and ".join(f"rank {rank}" for rank in together)
            self._report = GroupFault(together, f"{names} died or was stopped")
            self._wake.set()
