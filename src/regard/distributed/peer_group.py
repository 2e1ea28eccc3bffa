"""The ranks of a process group as peers: they compare their arguments, pass tensors, and name a rank that fails.

All waiting happens in a worker thread, while the caller looks for faults: neither a transfer of gloo nor a request to a
store can be interrupted, and both wait for minutes if the other side has stopped.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from regard.distributed.errors import RankError
from regard.distributed.heartbeat import SILENCE_AFTER_LOSS, GroupFault, Heartbeat
from regard.errors import ArgumentError, ArgumentTypeError, RegardError, describe_argument

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
    """A process group whose ranks compute one matrix together.

    Args:
        group: The process group.
    """

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
        """Begin an operation that all ranks take part in, and compare their arguments before anything is sent.

        Args:
            operation: Name of the operation, as the caller wrote it.
            same: What must be equal on all ranks, by name; values that JSON can hold.
            own: What every rank tells the others.
            error: What is wrong with the arguments of this rank alone; raised here, and named by the others.

        Yields:
            What each rank told.

        Raises:
            RankError: If a rank died, stopped, failed, or called with other arguments. All ranks name the same one.
            RegardError: `error`.
        """
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
            told = self._compare(operation, same, own or {}, error)
            try:
                yield told
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
                self._heartbeat.leave()

    def _compare(
        self, operation: str, same: Mapping[str, Any], own: Mapping[str, Any], error: RegardError | None
    ) -> list[Any]:
        """Exchange the arguments of all ranks through the store; raise a `RankError` if they differ."""
        text = None if error is None else str(error)
        told_others: dict[str, Any] = {"operation": operation, "same": same, "own": own, "error": text}
        if not self._has_joined:
            told_others["serves"] = self._serves_store()
        message = json.dumps(told_others)
        keys = [f"call/{self._count}/{rank}" for rank in range(self.size)]
        started = time.monotonic()

        def exchange() -> list[bytes] | None:
            self._store.set(keys[self.rank], message)
            pause = 0.0002
            while not self._store.check(keys):
                if time.monotonic() - started > ARRIVAL_TIMEOUT or self._heartbeat.fault is not None:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            messages: list[bytes] = self._store.multi_get(keys)
            if self._count > 2:  # all ranks have read it: they are at this operation
                self._store.delete_key(f"call/{self._count - 2}/{self.rank}")
            return messages

        messages = self._wait_for(exchange)
        if messages is None:
            self._report_missing(operation, keys)
        told = [json.loads(text) for text in messages]
        if not self._has_joined:
            serving = [rank for rank, other in enumerate(told) if other["serves"]]
            self._heartbeat.join(serving[0] if serving else None)
            self._has_joined = True
        if error is not None:
            raise error
        _check_equal(operation, told)
        return [other["own"] for other in told]

    def _report_missing(self, operation: str, keys: Sequence[str]) -> None:
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
        """Start to send and receive tensors; `finish` waits for them.

        Args:
            sends: Contiguous tensors and the rank that each is sent to.
            receives: Contiguous tensors to fill and the rank that each comes from. Tensors between two ranks arrive in
                the order in which they are sent; empty ones are not sent.
        """
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
        raise AssertionError("not reached")

    def finish(self, transfer: Transfer) -> None:
        """Wait until tensors were sent and received.

        Raises:
            RankError: If a rank died, stopped or failed.
        """
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

    def exchange_all(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Send tensors of equal shapes to all ranks, and return those of each rank, in the order of the ranks."""
        own = [tensor.contiguous() for tensor in tensors]
        others = [rank for rank in range(self.size) if rank != self.rank]
        gathered = [
            own if rank == self.rank else [torch.empty_like(x) for x in own] for rank in range(self.size)
        ]
        self.finish(
            self.start(
                [(tensor, rank) for rank in others for tensor in own],
                [(tensor, rank) for rank in others for tensor in gathered[rank]],
            )
        )
        return gathered

    # Waiting

    def _wait_for(self, function: Callable[[], Any]) -> Any:
        """Call a function in the worker thread, and look for faults until it returns."""
        request = _Request(function)
        self._requests.put(request)
        started = time.monotonic()
        while not request.done.wait(_POLL):
            self._check_fault(started)
        if isinstance(request.error, RuntimeError):
            self._raise_lost(request.error)
        if request.error is not None:
            raise request.error
        return request.result

    def _check_fault(self, since: float) -> None:
        fault = self._heartbeat.find_fault(since)
        if fault is not None:
            self._raise_fault(fault)

    def _raise_lost(self, error: BaseException) -> None:
        """Find out which rank stopped after a transfer or a request failed, and raise a `RankError`."""
        self._heartbeat.lose_connection()
        self._wait_for_verdict(f"a connection was lost: {str(error)[:300]}", error)

    def _wait_for_verdict(self, reason: str, cause: BaseException | None = None) -> None:
        """Wait until the heartbeat names a fault, and raise it; raise the reason given if it names none."""
        started = time.monotonic()
        while time.monotonic() - started < SILENCE_AFTER_LOSS + 4.0:
            fault = self._heartbeat.find_fault(started)
            if fault is not None:
                self._raise_fault(fault, cause)
            time.sleep(_POLL)
        self._raise_fault(GroupFault((), reason), cause)

    def _raise_fault(self, fault: GroupFault, cause: BaseException | None = None) -> None:
        raise RankError(
            self._operation,
            received=f"a group of {self.size} ranks in which {fault.reason}",
            expected="all ranks alive, in the same operation",
            hint="Restart the processes from the last checkpoint; this group cannot be used again.",
            ranks=fault.ranks,
        ) from cause


class _Request:
    """A function that the worker thread calls, and its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function: Callable[[], Any] | None = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


def _serve(requests: queue.SimpleQueue[Any]) -> None:
    """Call the functions of requests, one after the other, until one is None."""
    while (request := requests.get()) is not None:
        try:
            request.result = request.function()
        except BaseException as error:
            request.error = error
        # This thread holds the request until the next one, and its function the tensors of a transfer.
        request.function = None
        request.done.set()


def _check_equal(operation: str, told: Sequence[Mapping[str, Any]]) -> None:
    """Raise a `RankError` that names the ranks whose arguments are wrong, or differ from those of most ranks."""
    failed = [rank for rank, other in enumerate(told) if other["error"] is not None]
    if failed:
        raise RankError(
            operation,
            received="; ".join(f"on rank {rank}: {told[rank]['error']}" for rank in failed[:4]),
            expected="arguments that fit together on all ranks",
            hint="The named rank raises the same error with its own traceback.",
            ranks=tuple(failed),
        )
    for name, texts in _list_arguments(told):
        if len(set(texts)) == 1:
            continue
        (most, _), *_ = Counter(texts).most_common(1)
        # Of two halves, the one with rank 0 counts as right.
        most = texts[0] if Counter(texts)[texts[0]] == Counter(texts)[most] else most
        others = [rank for rank, text in enumerate(texts) if text != most]
        received = "; ".join(f"{name} {texts[rank]} on rank {rank}" for rank in others[:4])
        raise RankError(
            operation,
            received=received,
            expected=f"{name} {most}, as on the other ranks",
            hint="All ranks must make the same calls in the same order; only their own tokens may differ.",
            ranks=tuple(others),
        )


def _list_arguments(told: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the operation and each argument by name, with its text on every rank."""
    yield "the call", [other["operation"] for other in told]
    for name in told[0]["same"]:
        yield name, [str(other["same"].get(name)) for other in told]


_PEERS: dict[Any, PeerGroup] = {}


def find_peers(group: Any, operation: str) -> PeerGroup:
    """Return the peers of a process group; made at the first call for a group.

    Args:
        group: A process group of `torch.distributed`; None for the default group.
        operation: Operation that an error message names.

    Raises:
        ArgumentError: If there is no default group, or this process is not in the group.
        ArgumentTypeError: If `group` is not a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            operation,
            received="no process group",
            expected="one that torch.distributed has initialised",
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
            hint="Pass what torch.distributed.new_group returned; of a device mesh, mesh.get_group().",
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
            received=f"a store of the process group that fails: {error}",
            expected="a store that all ranks reach",
            hint="Restart the processes.",
        ) from error
