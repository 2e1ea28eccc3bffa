"""Errors of a recording whose layer has no matrix: not captured, several calls, or discarded rows; and a warning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from regard.capture.cache_joining import CacheFault, JoinedCalls
from regard.capture.record import Uncaptured
from regard.errors import ArgumentError, NotCapturedError, format_named_shape


class EmptyRecordingWarning(UserWarning):
    """Nothing was captured in the block of a `regard.watch`; the message says what did not run, and what to do.

    >>> import regard, torch, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     with regard.watch(torch.nn.Linear(2, 2)) as recording:
    ...         pass
    >>> recording, caught[0].category.__name__
    (Recording(empty), 'EmptyRecordingWarning')
    """


def build_join_error(name: str, groups: Sequence[JoinedCalls], faults: Sequence[CacheFault]) -> ArgumentError:
    """Build the error for a layer whose calls are not the steps of one cache.

    Args:
        name: Name of the module.
        groups: Its calls.
        faults: What is wrong with its cache.

    Returns:
        The error.
    """
    reason = "keys do not extend one another's"
    if any(joined.last.measures is None and joined.last.compact_mask.nbytes for joined in groups):
        reason = "masks are stored as arrays, which are not joined"
    if faults:
        reason = f"keys do not extend one another's (call {faults[0].call}: {faults[0].kind})"
    hint = (
        f"Choose one: recording.calls({name!r})[-1].matrix is the latest. A cache that was cut back or shared by "
        "several continuations has one call for each. If steps do not join (some caches change old keys, broken ones "
        "lose some: see recording.diagnose()), run the model once on the generated sequence and watch that run."
    )
    if _grow_without_cache(groups):
        hint = (
            "Each call reads the whole sequence again (use_cache=False), so the last one has every token: "
            f"recording.calls({name!r})[-1].matrix."
        )
    return ArgumentError(
        f"recording[{name!r}]",
        received=f"{len(groups)} calls whose {reason}: " + format_shapes(groups),
        expected="one call, or the steps of one cache",
        hint=hint,
    )


def build_speculative_error(name: str, joined: JoinedCalls) -> ArgumentError:
    """Build the error for a layer whose rows include proposed tokens.

    Args:
        name: Name of the module.
        joined: Its calls.

    Returns:
        The error.
    """
    return ArgumentError(
        f"recording[{name!r}]",
        received=f"{len(joined.steps)} calls of {joined.speculative_mode}, which discards proposed tokens",
        expected="calls whose rows are the generated tokens",
        hint="Run the model once on the generated sequence and watch that run; "
        f"recording.calls({name!r}) contains the rows as they were proposed.",
    )


def build_not_captured_error(
    name: object, captured: Mapping[str, object], uncaptured: Mapping[str, Uncaptured]
) -> NotCapturedError:
    """Build the error for a name without a recorded call.

    Args:
        name: What was looked up.
        captured: The layers that were recorded, by name.
        uncaptured: The layers that ran and could not be recorded, by name.

    Returns:
        The error.
    """
    if isinstance(name, str) and name in uncaptured:
        failure = uncaptured[name]
        return NotCapturedError(
            f"recording[{name!r}]",
            received=f"a layer that was not captured: {failure.reason}",
            expected="a layer that the lens can capture",
            hint=failure.hint,
        )
    near = difflib.get_close_matches(str(name), captured, n=1, cutoff=0.0)
    return NotCapturedError(
        f"recording[{name!r}]",
        received="a name that no attention layer has" if captured else "an empty recording",
        expected=f"one of {len(captured)}, such as {near[0]!r}" if near else "a layer that ran",
        hint="list(recording) lists all names." if captured else "Run the model inside the with block.",
    )


def format_shapes(groups: Sequence[JoinedCalls]) -> str:
    """Format the shapes of the calls of a layer; of more than three, the first three and the number of others."""
    shown = [format_named_shape(joined.shape, "q_len", "kv_len") for joined in groups[:3]]
    return ", ".join(shown) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")


def _grow_without_cache(groups: Sequence[JoinedCalls]) -> bool:
    """Return whether each call has one query and one key more than the last: `generate(use_cache=False)`."""
    lengths = [joined.shape[-2:] for joined in groups]
    first = lengths[0][0]
    return lengths == [(first + i, first + i) for i in range(len(lengths))]
