"""Spans: named parts of a prompt, as ranges of tokens, or found by their characters."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, IndexOutOfRangeError, describe_argument
from regard.types import IntArray

__all__ = ["SpanRanges", "Spans", "parse_spans", "require_spans", "token_spans"]

# First token and end, exclusive; an end of None is the end of the prompt.
TokenRange = tuple[int, int | None]
# What users pass: ranges by name, or one such mapping for each batch entry.
SpanRanges = Mapping[str, Any] | Sequence[Mapping[str, Any]]

OTHER, GENERATED = "other", "generated"
# Names of other columns in tables of spans.
RESERVED_NAMES = (OTHER, GENERATED, "lookback", "module", "layer", "call", "head", "position", "token")

_RANGE_HINT = "Write (start, stop) or slice(start, stop), counted from 0; stop is the token after the last."


@dataclass(frozen=True)
class Spans:
    """Named parts of a prompt, for all batch entries or for each.

    Args:
        names: The names, in order.
        entries: The ranges of each name, one mapping for all batch entries or one for each. An entry may lack a name.
    """

    names: tuple[str, ...]
    entries: tuple[dict[str, tuple[TokenRange, ...]], ...]

    def label_keys(self, batch: int, length: int, what: str, operation: str) -> IntArray:
        """Return the index of the span that each token of the prompt is in; `len(names)` for tokens in none.

        Returns:
            (batch or 1, length).
        """
        if len(self.entries) not in (1, batch):
            raise ArgumentError(
                operation,
                received=f"spans for {len(self.entries)} batch entries",
                expected=f"one mapping, or one for each of {batch} batch entries",
                hint="A single mapping applies to all entries.",
            )
        labels = np.full((len(self.entries), length), len(self.names), np.int64)
        for row, ranges in zip(labels, self.entries, strict=True):
            for index, name in enumerate(self.names):
                for start, stop in ranges.get(name, ()):
                    stop = length if stop is None else stop
                    if max(start, stop) > length:
                        raise IndexOutOfRangeError(
                            operation,
                            received=f"span {name!r} of tokens {start} to {stop}",
                            expected=f"a range within the {length} tokens of {what}",
                            hint="Spans are counted in tokens, including special tokens and padding; "
                            "regard.lens.token_spans converts characters.",
                        )
                    if start == stop:
                        raise _empty_span(operation, name, start, stop)
                    taken = row[start:stop][row[start:stop] < len(self.names)]
                    if len(taken):
                        raise _overlap(operation, self.names[int(taken[0])], name)
                    row[start:stop] = index
        return labels


def parse_spans(spans: Any, operation: str) -> Spans:
    """Check spans and bring them into one form.

    Args:
        spans: A mapping from names to ranges, or one for each batch entry. A range is (start, stop) or
            slice(start, stop) in tokens; a list of ranges is one span.
        operation: Name of the calling function, for error messages.
    """
    given = [spans] if isinstance(spans, Mapping) else spans
    if not isinstance(given, list | tuple) or not given or not all(isinstance(x, Mapping) for x in given):
        raise ArgumentTypeError(
            operation,
            received=f"spans as {describe_argument(spans)}",
            expected="a mapping from names to ranges of tokens, or a list with one mapping for each batch entry",
            hint='For example spans={"system": (0, 12), "document": (12, 80)}.',
        )
    names = tuple(dict.fromkeys(name for entry in given for name in entry))
    for name in names:
        if not isinstance(name, str) or not name or name in RESERVED_NAMES:
            raise ArgumentError(
                operation,
                received=f"a span named {name!r}",
                expected="a non-empty string other than " + ", ".join(map(repr, RESERVED_NAMES)),
                hint="These are names of other columns. Choose another name.",
            )
    if not names:
        raise ArgumentError(
            operation,
            received="no spans",
            expected="at least one",
            hint='For example spans={"prompt": slice(0, None)}.',
        )
    entries = tuple(
        {name: _parse_ranges(name, ranges, operation) for name, ranges in entry.items()} for entry in given
    )
    for entry in entries:
        _check_overlaps(entry, operation)
    return Spans(names, entries)


def require_spans(spans: SpanRanges | None, default: Spans | None) -> Spans:
    """Return the spans passed to `Recording.span_mass`, or else to `watch`."""
    if spans is not None:
        return parse_spans(spans, "recording.span_mass")
    if default is None:
        raise ArgumentError(
            "recording.span_mass",
            received="no spans",
            expected="spans passed to regard.watch, or here",
            hint='For example recording.span_mass({"system": (0, 12), "document": (12, 80)}).',
        )
    return default


def _parse_ranges(name: str, ranges: Any, operation: str) -> tuple[TokenRange, ...]:
    several = isinstance(ranges, list) or (
        isinstance(ranges, tuple) and any(isinstance(part, slice | tuple | list | range) for part in ranges)
    )
    parts = tuple(_parse_range(name, part, operation) for part in (ranges if several else [ranges]))
    if not parts:
        raise _empty_span(operation, name, 0, 0)
    return parts


def _parse_range(name: str, given: Any, operation: str) -> TokenRange:
    if isinstance(given, slice | range):
        edges: tuple[Any, ...] = (given.start or 0, given.stop)
        is_range = given.step in (None, 1)
    else:
        is_range = isinstance(given, tuple | list) and len(given) == 2
        edges = tuple(given) if is_range else ()
    if not is_range or not _is_index(edges[0]) or not (edges[1] is None or _is_index(edges[1])):
        raise ArgumentTypeError(
            operation,
            received=f"span {name!r} as {given!r}",
            expected="a range of tokens, or a list of them",
            hint=f"{_RANGE_HINT} regard.lens.token_spans finds texts.",
        )
    start, stop = int(edges[0]), None if edges[1] is None else int(edges[1])
    if start < 0 or (stop is not None and stop < 0):
        raise IndexOutOfRangeError(
            operation,
            received=f"span {name!r} of tokens {start} to {stop}",
            expected="positions from 0",
            hint="Spans are counted from the beginning of the prompt, including padding.",
        )
    if stop is not None and stop <= start:
        raise _empty_span(operation, name, start, stop)
    return start, stop


def _is_index(number: Any) -> bool:
    return isinstance(number, numbers.Integral) and not isinstance(number, bool)


def _check_overlaps(entry: Mapping[str, tuple[TokenRange, ...]], operation: str) -> None:
    parts = sorted(
        (start, float("inf") if stop is None else stop, name)
        for name, ranges in entry.items()
        for start, stop in ranges
    )
    for (_, stop, name), (start, _, other) in itertools.pairwise(parts):
        if start < stop:
            raise _overlap(operation, name, other)


def _empty_span(operation: str, name: str, start: int, stop: int | None) -> ArgumentError:
    return ArgumentError(
        operation,
        received=f"span {name!r} of tokens {start} to {stop}, which is empty",
        expected="spans with at least one token",
        hint=f"{_RANGE_HINT} Omit spans that have no tokens.",
    )


def _overlap(operation: str, name: str, other: str) -> ArgumentError:
    which = f"two ranges of span {name!r}" if name == other else f"spans {name!r} and {other!r}"
    return ArgumentError(
        operation,
        received=f"{which} that share tokens",
        expected="spans that do not overlap, so that their shares add up",
        hint="Make the shared tokens a separate span, or compute one of the spans in a second call of span_mass.",
    )


def token_spans(text: Any, spans: SpanRanges, offsets: Any) -> Any:
    """Convert spans of characters to spans of tokens, for `regard.watch(model, spans=…)`.

    A token that two spans share belongs to the one that contains more of its characters.

    Args:
        text: The text, or a list with one text for each batch entry.
        spans: A mapping from names to texts, which must occur once, or to (start, stop) in characters. For a list of
            texts, pass one mapping for all texts or a list with one mapping for each text; a mapping may omit spans
            that its text lacks.
        offsets: `tokenizer(text, return_offsets_mapping=True)["offset_mapping"]`: (n, 2) or (batch, n, 2), first
            character and end of each token. Special tokens and padding have (0, 0).

    Returns:
        A mapping from names to ranges of tokens, or a list with one mapping for each text.

    Raises:
        ArgumentError: If a text does not occur or occurs several times, or no token is inside a span.
        IndexOutOfRangeError: If a range exceeds the text.
        ArgumentTypeError: If an argument has the wrong type.

    >>> from regard.lens import token_spans
    >>> token_spans("The cat sat", {"animal": "cat"}, [(0, 3), (4, 7), (8, 11)])
    {'animal': (1, 2)}
    """
    texts = [text] if isinstance(text, str) else list(text)
    array = np.asarray(offsets.tolist() if hasattr(offsets, "tolist") else offsets)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or array.shape[-1] != 2 or len(array) != len(texts):
        raise ArgumentError(
            "token_spans",
            received=f"offsets of shape {tuple(array.shape)} for {len(texts)} texts",
            expected="(n, 2), or (batch, n, 2) with one row for each text",
            hint='Pass tokenizer(text, return_offsets_mapping=True)["offset_mapping"], which needs a fast tokenizer.',
        )
    mappings = [spans] * len(texts) if isinstance(spans, Mapping) else list(spans)
    if len(mappings) != len(texts) or not all(isinstance(entry, Mapping) for entry in mappings):
        raise ArgumentTypeError(
            "token_spans",
            received=f"spans as {describe_argument(spans)} for {len(texts)} texts",
            expected="a mapping from names to texts or ranges of characters, or one for each text",
            hint='For example {"document": document} or {"document": (20, 300)}.',
        )
    found = [
        _find_tokens(own_text, entry, edges)
        for own_text, entry, edges in zip(texts, mappings, array, strict=True)
    ]
    return found[0] if isinstance(text, str) else found


def _find_tokens(text: str, spans: Mapping[str, Any], offsets: IntArray) -> dict[str, Any]:
    characters = np.array([_find_characters(text, name, part) for name, part in spans.items()]).reshape(-1, 2)
    shared = np.minimum(characters[:, 1:], offsets[:, 1]) - np.maximum(characters[:, :1], offsets[:, 0])
    owner = np.where(shared.max(0, initial=0) > 0, shared.argmax(0) if len(shared) else 0, -1)
    return {name: _join_tokens(name, np.flatnonzero(owner == i)) for i, name in enumerate(spans)}


def _find_characters(text: str, name: str, part: Any) -> tuple[int, int]:
    if isinstance(part, str):
        count = text.count(part) if part else 0
        if count != 1:
            raise ArgumentError(
                "token_spans",
                received=f"span {name!r}, a text that occurs {count} times",
                expected="a text that occurs once",
                hint="Pass (start, stop) in characters: start = text.index(part), stop = start + len(part).",
            )
        return text.index(part), text.index(part) + len(part)
    ((start, stop),) = _parse_ranges(name, part, "token_spans")[:1]
    stop = len(text) if stop is None else stop
    if stop > len(text):
        raise IndexOutOfRangeError(
            "token_spans",
            received=f"span {name!r} of characters {start} to {stop}",
            expected=f"a range within the {len(text)} characters of the text",
            hint="Offsets count characters, not bytes.",
        )
    return start, stop


def _join_tokens(name: str, tokens: IntArray) -> Any:
    """Return the range of some tokens, or a list of ranges if they are not contiguous."""
    if not len(tokens):
        raise ArgumentError(
            "token_spans",
            received=f"span {name!r}, which contains no token",
            expected="spans with at least one token",
            hint="The text may have been truncated; compare the last offset with the length of the text.",
        )
    parts = np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1)
    ranges = [(int(part[0]), int(part[-1]) + 1) for part in parts]
    return ranges[0] if len(ranges) == 1 else ranges
