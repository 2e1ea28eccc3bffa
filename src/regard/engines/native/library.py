"""Load the compiled library, and choose the instruction set that it runs with."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from regard.engines.native.build import LIBRARY_NAME, SOURCE_FOLDER, hash_sources

LIBRARY_FILE = SOURCE_FOLDER / LIBRARY_NAME

# As in measures.c.
BLOCK_ROWS, BLOCK_KEYS = 256, 64
# Keys that a row may attend to for its exponentials to be kept, so that its scores are computed once.
MAX_KEPT_KEYS = 16 * 1024

# Names in the order of the numbers in measures.c.
INSTRUCTION_SETS = ("baseline", "AVX2", "AVX-512")


class Grid(Structure):
    """`Grid` of measures.c."""

    _fields_ = [
        ("rows", c_int64), ("columns", c_int64), ("first_row", c_int64), ("is_max", c_int64), ("cells", c_void_p),
    ]  # fmt: skip


class Job(Structure):
    """`Job` of measures.c, which documents the fields."""

    _fields_ = [
        ("query", c_void_p), ("key", c_void_p),
        ("query_stride", c_int64), ("key_stride", c_int64), ("rows", c_int64), ("kv_len", c_int64), ("dim", c_int64),
        ("scale", c_double),
        ("positions", c_void_p), ("offsets", c_void_p), ("segments", c_void_p), ("tiles", c_void_p),
        ("first_block", c_int64), ("last_block", c_int64),
        ("is_known", c_int64), ("is_lse", c_int64), ("has_sink", c_int64), ("keeps", c_int64), ("sink", c_double),
        ("max", c_void_p), ("sum", c_void_p),
        ("has_measures", c_int64),
        ("one", c_void_p), ("surprisal", c_void_p), ("position", c_void_p), ("max_score", c_void_p),
        ("moments", c_void_p),
        ("num_distances", c_int64), ("distance_offsets", c_void_p), ("distances", c_void_p),
        ("num_shares", c_int64), ("share_starts", c_void_p), ("intervals", c_void_p), ("shares", c_void_p),
        ("num_bands", c_int64), ("bands", c_void_p),
        ("columns", c_void_p), ("diagonals", c_void_p),
        ("num_grids", c_int64), ("grids", POINTER(Grid)),
        ("top_k", c_int64), ("top_values", c_void_p), ("top_indices", c_void_p),
        ("value", c_void_p), ("value_stride", c_int64), ("value_dim", c_int64), ("output", c_void_p),
    ]  # fmt: skip


@cache
def load_library() -> Any:
    """Load the compiled library; return None if there is none, it is truncated, or it was built from other sources."""
    if not LIBRARY_FILE.exists():
        return None
    try:
        if not _is_whole(LIBRARY_FILE):
            return None
        library = ctypes.CDLL(str(LIBRARY_FILE))
        library.regard_source_hash.restype = c_char_p
        is_current = library.regard_source_hash().decode() == hash_sources()
        library.regard_run.argtypes = [c_int, c_int, POINTER(Job)]
        library.regard_is_sound.argtypes = [c_int, c_void_p, c_int64, c_void_p, c_int64]
        library.regard_have_same_bytes.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64]
        library.regard_exp.argtypes = [c_int, c_int, c_void_p, c_void_p, c_int64]
    except (OSError, AttributeError):
        return None
    return library if is_current else None


def _is_whole(file: Path) -> bool:
    """Return whether a library has all the bytes that its header counts: Linux maps the rest and dies reading it."""
    with file.open("rb") as stream:
        header = stream.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True  # every loader refuses so short a file, and those of other systems truncated ones
    # The table of sections is the end of a file: its offset, the size of an entry, and how many there are.
    offset_at, size_at, kind = (40, 58, "Q") if header[4] == 2 else (32, 46, "I")
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(order + kind, header, offset_at)
    size, count = struct.unpack_from(f"{order}HH", header, size_at)
    return bool(file.stat().st_size >= offset + size * count)


@cache
def list_instruction_sets() -> tuple[str, ...]:
    """List the instruction sets that the library and this processor have, the best one last."""
    library = load_library()
    if library is None:
        return ()
    return tuple(name for i, name in enumerate(INSTRUCTION_SETS) if library.regard_has_set(i))


_UNSET = "the best one"
_CHOSEN: ContextVar[str | None] = ContextVar("instruction_set", default=_UNSET)


def find_instruction_set() -> str | None:
    """Return the instruction set of the compiled pass; None if the block loop must do the work."""
    chosen = _CHOSEN.get()
    if chosen != _UNSET:
        return chosen
    available = list_instruction_sets()
    return available[-1] if available else None


@contextmanager
def use_instruction_set(name: str | None) -> Iterator[None]:
    """Force an instruction set inside a `with` block, for tests and benchmarks; for this thread or task only.

    Args:
        name: One of `list_instruction_sets()`; None for the block loop.

    Raises:
        ValueError: If this processor or this build does not have it.
    """
    if name is not None and name not in list_instruction_sets():
        raise ValueError(
            f"no instruction set {name!r}; this build and processor have {list_instruction_sets()}"
        )
    token = _CHOSEN.set(name)
    try:
        yield
    finally:
        _CHOSEN.reset(token)
