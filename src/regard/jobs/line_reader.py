"""Read lines of a file by byte ranges, so that a large file can be split into shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20


def iter_lines(file: BinaryIO, start: int, stop: int, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    r"""Yield the lines that begin in bytes start … stop, each with its byte offset.

    A line longer than `max_bytes` is None. Blank lines are skipped. Consecutive ranges yield every line once.

    >>> import io
    >>> [list(iter_lines(io.BytesIO(b"ab\n\ncdef\ng"), *bounds, 3)) for bounds in ((0, 3), (3, 5), (5, 10))]
    [[(0, b'ab')], [(4, None)], [(9, b'g')]]
    """
    # `in_range` is False until the first line that begins at or after `start`.
    offset, in_range = start, start == 0
    if start:
        offset = start - 1  # if a line ends there, the next one begins at `start`
        file.seek(offset)
    begin, pieces, size = offset, [], 0
    while block := file.read(BLOCK_BYTES):
        position = 0
        while position < len(block):
            end = block.find(b"\n", position)
            piece = block[position : len(block) if end < 0 else end]
            size += len(piece)
            if in_range and size <= max_bytes:
                pieces.append(piece)
            if end < 0:
                break
            if in_range and size:
                line = b"".join(pieces) if size <= max_bytes else None
                if line is None or line.strip():
                    yield begin, line
            position, begin, in_range = end + 1, offset + end + 1, True
            pieces, size = [], 0
            if begin >= stop:
                return
        offset += len(block)
    if in_range and size:
        line = b"".join(pieces) if size <= max_bytes else None
        if line is None or line.strip():
            yield begin, line


def read_up_to(file: BinaryIO, count: int) -> bytes:
    """Read at most `count` bytes; a stream may return them in pieces."""
    pieces = []
    while count > 0 and (piece := file.read(min(count, BLOCK_BYTES))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
