"""Many numbers for a page: rounded, compressed and written as text that can stand in a script element."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.types import Array, IntArray

# How many decades the levels of a picture span.
DECADES = 8


@dataclass(frozen=True, eq=False)
class Part:
    """Numbers that a page carries beside its record; in the record their place, kind and shape stand for them.

    `text` is base64 of the compressed numbers. A page that is drawn before it is read to its end has the parts that
    come `first` before its script.
    """

    text: str
    kind: str
    shape: tuple[int, ...]
    first: bool = False

    def __repr__(self) -> str:
        return f"<{self.kind} {self.shape}, {len(self.text) / 1000:.0f} kB>"


def part(array: Array, *, first: bool = False) -> Part:
    """An array as a part: float16, float32, float64 and uint8 as they are, whole numbers as differences.

    >>> part(np.arange(1_000_000))
    <steps (1000000,), 5 kB>
    >>> part(np.ones((512, 64), np.float16))
    <half (512, 64), ... kB>
    """
    array = np.asarray(array)
    strategy, planes = zlib.Z_DEFAULT_STRATEGY, 1
    if array.dtype == np.float16:
        # The bytes of a half apart: one holds sign, exponent and little else, the other is noise. Nothing repeats.
        kind, dtype, planes, strategy = "half", "<f2", 2, zlib.Z_RLE
    elif array.dtype.kind in "iu" and array.dtype != np.uint8:
        kind, dtype = "steps", "<i4"
        array = np.diff(array.ravel(), prepend=0).reshape(array.shape)
    else:
        kind, dtype = {"f4": ("float", "<f4"), "f8": ("double", "<f8"), "u1": ("byte", "u1")}[
            array.dtype.str[1:]
        ]
    numbers = np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(-1)
    columns = numbers.view(np.uint8).reshape(-1, planes) if planes > 1 else numbers.view(np.uint8)[:, None]
    packer = zlib.compressobj(6, zlib.DEFLATED, 15, 9, strategy)
    packed = []
    for plane in columns.T:
        # A flush between them gives each plane a code of its own.
        packed += [packer.compress(np.ascontiguousarray(plane).data), packer.flush(zlib.Z_FULL_FLUSH)]
    packed.append(packer.flush())
    text = base64.b64encode(b"".join(packed)).decode("ascii")
    return Part(text, kind, tuple(map(int, array.shape)), first)


class Halves(NamedTuple):
    """Numbers in half precision: `numbers` · 2^−exponent is what was rounded."""

    numbers: Array
    exponent: int

    def widened(self, dtype: Any) -> Array:
        """The rounded numbers, in a wider dtype."""
        return np.ldexp(self.numbers.astype(dtype), -self.exponent)


def halves(array: Array, live: Array) -> Halves:
    """An array (n, width) in half precision, by the power of two that uses its range best; 0 in rows not `live`.

    >>> halves(np.array([[1e9], [1.0], [1e30]]), live=np.array([True, True, False])).widened(np.float64).tolist()
    [[999817216.0], [1.0], [0.0]]
    """
    kept = np.where(live[:, None], array, array.dtype.type(0))
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(kept), where=np.isfinite(kept), initial=0))
    exponent = 15 - math.frexp(largest)[1] if largest else 0
    with np.errstate(under="ignore"):
        return Halves(np.ldexp(kept, exponent).astype(np.float16), exponent)


def levels(means: Array, seen: Array) -> dict[str, Any]:
    """A picture of numbers from 0 on as bytes on a logarithmic scale: a record with a part, its `floor` and its `top`.

    Level 0 is where nothing is `seen`, 1 whatever is below the floor, and 2 … 255 go in equal ratios from the floor,
    1e-8 of the top, to the top.

    >>> record = levels(np.array([[0.5, 0.0]]), np.array([[True, False]]))
    >>> record["floor"], record["top"], record["levels"].shape
    (5e-09, 0.5, (1, 2))
    """
    means = np.asarray(means, np.float64)
    top = float(np.max(means, where=np.isfinite(means), initial=0)) or 1.0
    floor = top / 10**DECADES
    with np.errstate(all="ignore"):
        place = np.round(np.log(means / floor) / math.log(top / floor) * 253) + 2
    place = np.clip(np.nan_to_num(place, nan=255.0, neginf=1.0, posinf=255.0), 1, 255)
    return {
        "levels": part(np.where(seen, place, 0).astype(np.uint8), first=True),
        "floor": floor,
        "top": top,
    }


def covered(offsets: IntArray, edges: IntArray, shape: tuple[int, int], cells: tuple[int, int]) -> Array:
    """Which cells of a picture hold anything that a mask lets through: booleans (rows, columns) of the picture.

    `edges` are the first key and the one after the last of each run, those of row i from `offsets[i]` on.

    >>> covered(np.array([0, 1, 2]), np.array([[0, 1], [0, 2]]), (2, 4), (2, 2)).astype(int)
    array([[1, 0],
           [1, 0]])
    """
    rows = np.repeat(np.arange(shape[0]), np.diff(offsets)) * cells[0] // max(shape[0], 1)
    first, last = edges[:, 0] * cells[1] // shape[1], (edges[:, 1] - 1) * cells[1] // shape[1]
    change = np.zeros((cells[0], cells[1] + 1), np.int64)
    np.add.at(change, (rows, first), 1)
    np.add.at(change, (rows, last + 1), -1)
    return change.cumsum(1)[:, :-1] > 0
