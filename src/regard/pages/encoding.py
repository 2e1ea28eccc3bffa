"""Encode arrays for a page: rounded, compressed, and written as text that can stand in a script element."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.render.table import format_bytes
from regard.types import Array, IntArray

LEVEL_DECADES = 8  # powers of ten between level 2 and level 255 of a picture


@dataclass(frozen=True, eq=False)
class EncodedArray:
    """An array that a page stores beside its record.

    Attributes:
        text: Base64 of the compressed numbers.
        encoding: How the numbers are stored: "half", "float", "double", "byte", "int8" or "differences".
        shape: Shape of the array.
        early: Store the array before the script, because the page draws it before the whole file is loaded.
    """

    text: str
    encoding: str
    shape: tuple[int, ...]
    early: bool = False

    def __repr__(self) -> str:
        return f"<{self.encoding} {self.shape}, {format_bytes(len(self.text))}>"


def encode_array(array: Array, *, early: bool = False) -> EncodedArray:
    """Compress an array.

    >>> encode_array(np.arange(1_000_000))
    <differences (1000000,), ... kB>
    >>> encode_array(np.ones((512, 64), np.float16))
    <half (512, 64), ...B>

    Args:
        array: Numbers of any shape. float16, float32, float64, uint8 and int8 are stored exactly, other integers as
            differences in int32.
        early: Store the array before the script of the page.
    """
    array = np.asarray(array)
    strategy, planes = zlib.Z_DEFAULT_STRATEGY, 1
    if array.dtype == np.float16:
        # One byte of a half holds sign, exponent and few digits, the other is noise: compress each plane by itself.
        encoding, dtype, planes, strategy = "half", "<f2", 2, zlib.Z_RLE
    elif array.dtype.kind in "iu" and array.dtype.itemsize > 1:
        encoding, dtype = "differences", "<i4"
        array = np.diff(array.ravel(), prepend=0).reshape(array.shape)
    else:
        encodings = {
            "f4": ("float", "<f4"),
            "f8": ("double", "<f8"),
            "u1": ("byte", "u1"),
            "i1": ("int8", "i1"),
        }
        encoding, dtype = encodings[array.dtype.str[1:]]
    numbers = np.ascontiguousarray(array.astype(dtype, copy=False)).reshape(-1)
    columns = numbers.view(np.uint8).reshape(-1, planes) if planes > 1 else numbers.view(np.uint8)[:, None]
    compressor = zlib.compressobj(6, zlib.DEFLATED, 15, 9, strategy)
    chunks = []
    for plane in columns.T:
        # A flush gives each plane its own Huffman code.
        chunks += [compressor.compress(np.ascontiguousarray(plane).data), compressor.flush(zlib.Z_FULL_FLUSH)]
    chunks.append(compressor.flush())
    text = base64.b64encode(b"".join(chunks)).decode("ascii")
    return EncodedArray(text, encoding, tuple(map(int, array.shape)), early)


class ScaledHalves(NamedTuple):
    """An array in half precision with a common exponent: `numbers` · 2^−exponent are the rounded values."""

    numbers: Array
    exponent: int

    def to_dtype(self, dtype: Any) -> Array:
        """Return the rounded values in a wider dtype.

        Returns:
            The values, in the shape of `numbers`.
        """
        return np.ldexp(self.numbers.astype(dtype), -self.exponent)


def round_to_half(array: Array, live: Array) -> ScaledHalves:
    """Round an array to half precision, scaled by the power of two that uses the range of a half best.

    >>> rounded = round_to_half(np.array([[1e9], [1.0], [1e30]]), live=np.array([True, True, False]))
    >>> rounded.to_dtype(np.float64).tolist()
    [[999817216.0], [1.0], [0.0]]

    Args:
        array: Vectors, `(n, width)`.
        live: Which vectors matter, `(n,)`. The others become 0, so that they do not limit the precision.
    """
    values = np.where(live[:, None], array, array.dtype.type(0))
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0))
    exponent = 15 - math.frexp(largest)[1] if largest else 0
    with np.errstate(under="ignore"):
        return ScaledHalves(np.ldexp(values, exponent).astype(np.float16), exponent)


def encode_levels(values: Array, live: Array, *, early: bool = True) -> dict[str, Any]:
    """Encode a picture as bytes on a logarithmic scale.

    Level 0 is masked, level 1 is below `floor`, and levels 2 to 255 go in equal ratios from `floor` to `top`.

    >>> record = encode_levels(np.array([[0.5, 0.0]]), np.array([[True, False]]))
    >>> record["floor"], record["top"], record["levels"].shape
    (5e-09, 0.5, (1, 2))

    Args:
        values: Numbers that are not negative, of any shape.
        live: Which of them are not masked, the same shape.
        early: Store the array before the script of the page.
    """
    values = np.asarray(values, np.float64)
    top = float(np.max(values, where=np.isfinite(values), initial=0)) or 1.0
    floor = top / 10**LEVEL_DECADES
    with np.errstate(all="ignore"):
        level = np.round(np.log(values / floor) / math.log(top / floor) * 253) + 2
    level = np.clip(np.nan_to_num(level, nan=255.0, neginf=1.0, posinf=255.0), 1, 255)
    levels = encode_array(np.where(live, level, 0).astype(np.uint8), early=early)
    return {"levels": levels, "floor": floor, "top": top}


def encode_overview(means: Array, maxima: Array, live: Array, shape: tuple[int, int]) -> dict[str, Any]:
    """Encode the picture of a matrix: the maximum and the mean of each cell.

    >>> record = encode_overview(np.full((2, 2), 0.1), np.full((2, 2), 0.4), np.ones((2, 2), bool), (4, 6))
    >>> record["size"], record["block"], record["max"]["top"], record["mean"]["top"]
    ((2, 2), [2.0, 3.0], 0.4, 0.1)

    Args:
        means: Mean weight of each cell, `(…, rows, columns)`.
        maxima: Largest weight of each cell, the same shape.
        live: Which cells contain a pair that is not masked, the same shape.
        shape: `(q_len, kv_len)`.

    Returns:
        A record with `size`, the rows and columns of the picture, `block`, the weights along each side of a cell, and
        the encoded `max` and `mean`. `mean` is None if each cell is a single weight.
    """
    size = tuple(map(int, np.shape(maxima)[-2:]))
    block = [length / count for length, count in zip(shape, size, strict=True)]
    mean = (
        None if block == [1, 1] else encode_levels(means, live, early=False)
    )  # the page shows the maxima first
    return {"size": size, "block": block, "max": encode_levels(maxima, live), "mean": mean}


def live_cells(offsets: IntArray, edges: IntArray, shape: tuple[int, int], cells: tuple[int, int]) -> Array:
    """Return which cells of a picture contain a pair that is not masked.

    >>> live_cells(np.array([0, 1, 2]), np.array([[0, 1], [0, 2]]), (2, 4), (2, 2)).astype(int)
    array([[1, 0],
           [1, 0]])

    Args:
        offsets: The intervals of row i are `edges[offsets[i]:offsets[i + 1]]`, `(q_len + 1,)`.
        edges: First key of each interval and the key after its last, `(intervals, 2)`.
        shape: `(q_len, kv_len)`.
        cells: Rows and columns of the picture.

    Returns:
        Booleans of the shape `cells`.
    """
    rows = np.repeat(np.arange(shape[0]), np.diff(offsets)) * cells[0] // max(shape[0], 1)
    first, last = edges[:, 0] * cells[1] // shape[1], (edges[:, 1] - 1) * cells[1] // shape[1]
    change = np.zeros((cells[0], cells[1] + 1), np.int64)
    np.add.at(change, (rows, first), 1)
    np.add.at(change, (rows, last + 1), -1)
    return change.cumsum(1)[:, :-1] > 0
