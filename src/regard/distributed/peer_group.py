"""The ranks of a process group as peers: they compare their arguments, pass tensors, and name a rank that fails.

All waiting happens in a worker thread, while the caller looks for faults: neither a transfer of gloo nor a request to a
store can be interrupted, and both wait for minutes if the other side has stopped. A neighbour that does not answer may
itself wait for another rank, so an operation that fails or waits asks the heartbeat which rank stopped. The first rank
that finds out writes it into the store, and all others read it there: all name the same.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch.distributed as dist

from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument


class RankError(RegardError, RuntimeError):
    """A rank that died, hangs, failed, or called with other arguments than the rest of its group.

    Every rank of the group raises it, with the same ranks.

    Args:
        operation: The method that was called.
        received: What the named ranks did.
        expected: What all ranks must do.
        hint: How to go on.
        ranks: The ranks at fault, within the group.

    >>> error = RankError("A @ value", received="rank 2 died", expected="all ranks", hint="Restart.", ranks=(2,))
    >>> error.ranks
    (2,)
    """

    def __init__(
        self, operation: str, *, received: str, expected: str, hint: str, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(operation, received=received, expected=expected, hint=hint)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> Any:
        parts = {"received": self.received, "expected": self.expected, "hint": self.hint, "ranks": self.ranks}
        return partial(type(self), **parts), (self.operation,)  # type: ignore[arg-type]


def describe_argument_content(argument: object) -> str:
    """Describe an argument by its repr and a hash of everything that it holds, arrays included.

    >>> from regard import causal
    >>> describe_argument_content(causal()) == describe_argument_content(causal("upper_left"))
    False
    """
    if argument is None:
        return "none"
    digest = hashlib.sha256()
    for part in _list_parts(argument, set()):
        digest.update(part)
    return f"{argument!r} #{digest.hexdigest()[:12]}"


def _list_parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield the bytes that identify a value: type, and numbers, text, arrays and attributes in it."""
    yield f"<{type(value).__module__}.{type(value).__qualname__}>".encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | slice | range):
        yield repr(value).encode()
        return
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() and value.itemsize < 4 else value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        yield f"{array.dtype}{array.shape}".encode()
        yield array.tobytes()
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        items: Any = sorted(value.items(), key=lambda item: str(item[0]))
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, type) or not hasattr(value, "__dict__"):
        yield str(getattr(value, "__qualname__", value)).encode()
        return
    else:
        # Attributes with an underscore are caches.
        items = sorted((name, held) for name, held in vars(value).items() if not name.startswith("_"))
    for name, held in items:
        yield str(name).encode()
        yield from _list_parts(held, seen)


# Seconds between two beats, and without a beat until a rank counts as stopped: while others wait for it, and after a
# connection was lost. A busy machine may not run the thread for seconds.
INTERVAL, SILENCE, SILENCE_AFTER_LOSS = 1.0, 20.0, 8.0
# Seconds that a rank waits until the others can read what it reports.
PUBLISH_TIMEOUT = 3.0


class GroupFault(NamedTuple):
    """What is wrong with a group, for good.

    Attributes:
        ranks: The ranks at fault.
        reason: What they did, as in "rank 2 died or was stopped".
    """

    ranks: tuple[int, ...]
    reason: str


class Heartbeat:
    """Beats for this rank in a thread of its own, which alone uses the store, and watches the beats of the others."""

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
        """Start to watch the others, once all ranks have started; one rank may run the store in its process."""
        with self._lock:
            self._joined, self._serving_rank = True, serving_rank

    def enter(self, operation: int) -> None:
        """Note that an operation begins, by its number; 0 if one is over."""
        with self._lock:
            self._operation, self._lost_connection = operation, False

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
        """Return what is wrong with the group, if anything is known, since the caller began to wait."""
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
            store.compare_set("fault", "", json.dumps(self._report))
        if store.check(["fault"]):
            ranks, reason = json.loads(store.get("fault"))
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


Tensor = Any  # torch's types are not checked

# Seconds that a rank waits for the others to call the same operation.
ARRIVAL_TIMEOUT = 30.0
# Messages of user code on the same group must not be taken for ours.
TAG = 7_200_000
_POLL = 0.2


class Transfer(NamedTuple):
    """Messages under way.

    Attributes:
        works: Their handles.
        tensors: The tensors that are sent and received, kept alive.
    """

    works: list[Any]
    tensors: list[Tensor]


class PeerGroup:
    """A process group whose ranks compute one matrix together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._count, self._operation = 0, ""
        self._has_joined = False
        if self.size == 1:
            return  # nothing is compared or sent
        store = dist.PrefixStore("regard.distributed", group.get_group_store())
        self._store = store.clone()
        self._heartbeat = Heartbeat(store.clone(), self.rank, self.size)
        threading.Thread(target=_serve, args=(self._requests,), name="regard transfers", daemon=True).start()
        self._heartbeat.start()
        self._store.set(f"done/{self.rank}", "0")

    # Operations

    @contextmanager
    def operate(
        self, operation: str, same: Mapping[str, Any], own: Mapping[str, Any] | None = None, *,
        error: RegardError | None = None,
    ) -> Iterator[list[Any]]:  # fmt: skip
        """Begin an operation that all ranks take part in, and compare their arguments before anything is sent."""
        if self._operation:
            raise RuntimeError(f"{operation} inside {self._operation}")
        self._operation = operation
        try:
            if self.size == 1:
                if error is not None:
                    raise error
                yield [dict(own or {})]
                return
            if self._heartbeat.fault is not None:
                self._raise_fault(self._heartbeat.fault)
            self._count += 1
            self._heartbeat.enter(self._count)
            replies = self._compare(operation, same, own or {}, error)
            try:
                yield replies
            except RankError:
                raise
            except BaseException as failure:
                # The others wait for this rank; its transfers cannot be taken up again.
                reason = f"rank {self.rank} failed with {type(failure).__name__}: {failure}"
                self._heartbeat.report(GroupFault((self.rank,), reason[:500]))
                raise
            self._store.set(f"done/{self.rank}", str(self._count))
        finally:
            self._operation = ""
            if self.size > 1:
                self._heartbeat.enter(0)

    def _compare(
        self, operation: str, same: Mapping[str, Any], own: Mapping[str, Any], error: RegardError | None
    ) -> list[Any]:
        """Exchange the arguments of all ranks through the store; raise a `RankError` if they differ."""
        text = None if error is None else str(error)
        message: dict[str, Any] = {"operation": operation, "same": same, "own": own, "error": text}
        if not self._has_joined:
            message["serves"] = self._serves_store()
        keys = [f"call/{self._count}/{rank}" for rank in range(self.size)]
        started = time.monotonic()

        def exchange() -> list[bytes] | None:
            self._store.set(keys[self.rank], json.dumps(message))
            pause = 0.0002
            while not self._store.check(keys):
                if time.monotonic() - started > ARRIVAL_TIMEOUT or self._heartbeat.fault is not None:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            # The others may have given up before this rank came, which its heartbeat has not read yet.
            if self._store.check(["fault"]):
                return None
            messages: list[bytes] = self._store.multi_get(keys)
            if self._count > 2:  # all ranks have read it: they are at this operation
                self._store.delete_key(f"call/{self._count - 2}/{self.rank}")
            return messages

        messages = self._wait_for(exchange)
        if messages is None:
            self._report_missing(operation, keys)
        replies = [json.loads(text) for text in messages]
        if not self._has_joined:
            serving = [rank for rank, reply in enumerate(replies) if reply["serves"]]
            self._heartbeat.join(serving[0] if serving else None)
            self._has_joined = True
        if error is not None:
            raise error
        _check_equal(operation, replies)
        return [reply["own"] for reply in replies]

    def _report_missing(self, operation: str, keys: Sequence[str]) -> NoReturn:
        """Raise a `RankError` for the ranks that have not called an operation in time."""
        missing = self._wait_for(lambda: [i for i, key in enumerate(keys) if not self._store.check([key])])
        names = " and ".join(f"rank {rank}" for rank in missing) or "a rank"
        reason = f"{names} did not call {operation} within {ARRIVAL_TIMEOUT:.0f} s of the others"
        self._heartbeat.report(GroupFault(tuple(missing), reason))
        # The heartbeat may know better: a rank that has stopped is named as such, on all ranks alike.
        self._wait_for_verdict(reason)

    def _serves_store(self) -> bool:
        """Return whether the store of the group runs in this process; may take seconds."""
        store = self._group.get_group_store()  # a clone is a client only
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        # Only the text tells it, which asks the name server for the names of addresses.
        return isinstance(store, dist.TCPStore) and "server=<nullptr>" not in repr(store)

    # Transfers

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Transfer:
        """Start to send and receive tensors; `finish` waits for them."""
        messages = [
            dist.P2POp(function, tensor, group=self._group, tag=TAG, group_peer=peer)
            for function, batch in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in batch
            if tensor.numel()
        ]
        tensors = [tensor for tensor, _ in (*sends, *receives)]
        if not messages:
            return Transfer([], tensors)
        try:
            return Transfer(dist.batch_isend_irecv(messages), tensors)
        except RuntimeError as error:
            self._raise_lost(error)

    def finish(self, transfer: Transfer) -> None:
        """Wait until tensors were sent and received."""
        if not transfer.works:
            return
        if transfer.tensors[0].device.type == "cpu":
            self._wait_for(lambda: [work.wait() for work in transfer.works])
            return
        # On a device, `wait` makes the stream of the calling thread wait, and transfers tell whether they are done.
        started = time.monotonic()
        while not all(work.is_completed() for work in transfer.works):
            self._check_fault(started)
            time.sleep(0.0001)
        for work in transfer.works:
            work.wait()

    def exchange_all(
        self, tensors: Sequence[Tensor], lengths: Sequence[int] | None = None
    ) -> list[list[Tensor]]:
        """Send tensors to all ranks, and return those of each rank, in the order of the ranks."""
        own = [tensor.contiguous() for tensor in tensors]
        others = [rank for rank in range(self.size) if rank != self.rank]
        gathered = [own for _ in range(self.size)]
        for rank in others:
            gathered[rank] = [
                x.new_empty(x.shape if lengths is None else (lengths[rank], *x.shape[1:])) for x in own
            ]
        sends = [(tensor, rank) for rank in others for tensor in own]
        self.finish(self.start(sends, [(tensor, rank) for rank in others for tensor in gathered[rank]]))
        return gathered

    # Waiting

    def _wait_for(self, function: Callable[[], Any]) -> Any:
        """Call a function in the worker thread, and look for faults until it returns."""
        future: futures.Future[Any] = futures.Future()
        self._requests.put((future, function))
        started = time.monotonic()
        while not futures.wait([future], _POLL).done:
            self._check_fault(started)
        error = future.exception()
        if isinstance(error, RuntimeError):
            self._raise_lost(error)
        return future.result()

    def _check_fault(self, since: float) -> None:
        fault = self._heartbeat.find_fault(since)
        if fault is not None:
            self._raise_fault(fault)

    def _raise_lost(self, error: BaseException) -> NoReturn:
        """Find out which rank stopped after a transfer or a request failed, and raise a `RankError`."""
        self._heartbeat.lose_connection()
        self._wait_for_verdict(f"a connection was lost: {str(error)[:300]}", error)

    def _wait_for_verdict(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Wait until the heartbeat names a fault, and raise it; raise the reason given if it names none."""
        started = time.monotonic()
        while time.monotonic() - started < SILENCE_AFTER_LOSS + 4.0:
            fault = self._heartbeat.find_fault(started)
            if fault is not None:
                self._raise_fault(fault, cause)
            time.sleep(_POLL)
        self._raise_fault(GroupFault((), reason), cause)

    def _raise_fault(self, fault: GroupFault, cause: BaseException | None = None) -> NoReturn:
        raise RankError(
            self._operation,
            received=f"a group of {self.size} ranks in which {fault.reason}",
            expected="all ranks alive, in the same operation",
            hint="Restart the processes from the last checkpoint; this group cannot be used again.",
            ranks=fault.ranks,
        ) from cause


def _serve(requests: queue.SimpleQueue[Any]) -> None:
    """Call functions, one after the other."""
    while True:
        future, function = requests.get()
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del future, function  # it holds the tensors of a transfer


def _check_equal(operation: str, replies: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `RankError` that names the ranks whose arguments are wrong, or differ from those of most ranks."""
    failed = [rank for rank, reply in enumerate(replies) if reply["error"] is not None]
    if failed:
        raise RankError(
            operation,
            received="; ".join(f"on rank {rank}: {replies[rank]['error']}" for rank in failed[:4]),
            expected="arguments that fit together on all ranks",
            hint="The named rank raises the same error with its own traceback.",
            ranks=tuple(failed),
        )
    arguments = {"the call": [reply["operation"] for reply in replies]}
    for name in replies[0]["same"]:
        arguments[name] = [str(reply["same"].get(name)) for reply in replies]
    for name, texts in arguments.items():
        if len(set(texts)) == 1:
            continue
        (most, _), *_ = Counter(texts).most_common(1)
        # Of two halves, the one with rank 0 counts as right.
        most = texts[0] if Counter(texts)[texts[0]] == Counter(texts)[most] else most
        others = [rank for rank, text in enumerate(texts) if text != most]
        raise RankError(
            operation,
            received="; ".join(f"{name} {texts[rank]} on rank {rank}" for rank in others[:4]),
            expected=f"{name} {most}, as on the other ranks",
            hint="All ranks must make the same calls in the same order; only their own tokens may differ.",
            ranks=tuple(others),
        )


_PEERS: dict[Any, PeerGroup] = {}


def find_peers(group: Any, operation: str) -> PeerGroup:
    """Return the peers of a process group, or of the default group; made at the first call for a group."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            operation,
            received="no process group",
            expected="a group that torch.distributed has initialised",
            hint='Call torch.distributed.init_process_group("gloo") first, or start the script with torchrun.',
        )
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            operation,
            received="a group without this rank",
            expected="a group that this rank belongs to",
            hint="Ranks outside the group must not call it.",
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            operation,
            received=f"group as {describe_argument(group)}",
            expected="a process group",
            hint="Pass the group from torch.distributed.new_group, or mesh.get_group() for a device mesh.",
        )
    try:
        if group not in _PEERS:
            _PEERS[group] = PeerGroup(group)
        return _PEERS[group]
    except RuntimeError as error:
        if isinstance(error, RegardError):
            raise
        raise RankError(
            operation,
            received=f"a process group whose store fails: {error}",
            expected="a store that all ranks can reach",
            hint="Restart the processes.",
        ) from error
