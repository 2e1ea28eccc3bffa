"""Read the input files of commands: matrices from JSON or NPZ, and texts. No code in them is run."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.masks import Mask, causal, dense
from regard.types import Array

MAX_ARCHIVE_BYTES = 1 << 32  # of the arrays of an NPZ file, so that a small file cannot fill the memory
NAMES = ("query", "key", "value", "tokens", "mask", "scale")


def read_matrices(path: Path, operation: str) -> dict[str, Any]:
    """Read query, key, value, tokens, mask and scale from a file, in the form that `regard.attention` accepts."""
    content = _read_npz(path, operation) if path.suffix.lower() == ".npz" else _read_json(path, operation)
    if not isinstance(content, dict) or not {"query", "key"} <= content.keys() or content.keys() - set(NAMES):
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise ArgumentError(
            operation,
            received=f"{str(path)!r} with {keys or 'nothing'}",
            expected="query and key; optionally value, tokens, mask (True = attend, or the text causal) and scale",
            hint='Example: {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "tokens": ["a", "b"]}.',
        )
    inputs: dict[str, Any] = {name: None for name in NAMES}
    for name in ("query", "key", "value"):
        if name in content:
            inputs[name] = _parse_array(content[name], name, path, operation)
    if "tokens" in content:
        inputs["tokens"] = [str(token) for token in np.ravel(np.asarray(content["tokens"], dtype=object))]
    if "scale" in content:
        inputs["scale"] = _parse_scale(content["scale"], path, operation)
    if "mask" in content:
        inputs["mask"] = _parse_mask(content["mask"], path, operation)
    return inputs


def select_head(inputs: dict[str, Any], head: str | None, operation: str) -> dict[str, Any]:
    """Select the matrices of one head.

    Returns:
        The inputs with query, key and value of shape (length, width).
    """
    try:
        index = () if head is None else tuple(int(number) for number in head.split(","))
        selected = {
            name: inputs[name][index] for name in ("query", "key", "value") if inputs[name] is not None
        }
    except (ValueError, IndexError) as error:
        shape = tuple(inputs["query"].shape[:-2])
        raise ArgumentError(
            operation,
            received=f"--head {head}",
            expected=f"an index into the leading axes, here {shape}",
            hint="Write --head 3, or --head 0,3 for head 3 of batch entry 0. Indices start at 0.",
        ) from error
    for name, array in selected.items():
        if array.ndim != 2:
            raise ArgumentError(
                operation,
                received=f"{name} with shape {inputs[name].shape}" + (f" and --head {head}" if head else ""),
                expected="one head, with 2 axes",
                hint="Omit --head: the arrays already have one head."
                if inputs[name].ndim == 2
                else "Select one with --head 3, or --head 0,3 for head 3 of batch entry 0.",
            )
    return inputs | selected


def read_text(text: str | None, file: Path | None, operation: str) -> str:
    """Return the text of --text, of a file, or of standard input."""
    hint = 'Pass --text "…", --file FILE, or --file - for standard input.'
    if (text is None) == (file is None):
        raise ArgumentError(
            operation,
            received="no text" if text is None else "--text and --file",
            expected="either --text or --file",
            hint=hint,
        )
    content = _read_utf8(file, operation) if file is not None else str(text)
    if not content.strip():  # a tokenizer would return its special tokens only
        raise ArgumentError(
            operation,
            received="an empty text" if file is None else f"{str(file)!r}, which is empty",
            expected="at least one word",
            hint=hint,
        )
    return content


def _read_utf8(file: Path, operation: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise _build_error(file, operation, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            operation,
            received=f"{str(file)!r}, which is not valid UTF-8 at byte {error.start:,}",
            expected="a text file in UTF-8",
            hint="Convert it first: iconv -f LATIN1 -t UTF-8.",
        ) from error


def _read_json(path: Path, operation: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _build_error(path, operation, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _build_error(path, operation, f"not valid JSON: {error}") from error


def _read_npz(path: Path, operation: str) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_ARCHIVE_BYTES:
            raise ValueError(f"its arrays take {size:,} bytes, of at most {MAX_ARCHIVE_BYTES:,}")
        # Reading a pickled array could run code.
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise _build_error(path, operation, error.strerror or str(error)) from error
    except (
        Exception
    ) as error:  # a damaged archive can raise anything: errors of zlib, of the tokenizer, of memory
        raise _build_error(path, operation, f"not an NPZ file of plain arrays: {error}") from error


def _parse_array(value: Any, name: str, path: Path, operation: str) -> Array:
    try:
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.number):
            array = np.asarray(value, dtype=np.float64)
        return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ArgumentError(
            operation,
            received=f"{name} in {str(path)!r}, which is not an array of numbers ({error})",
            expected="rows of equal length",
            hint="Check the rows: each needs head_dim numbers.",
        ) from error


def _parse_scale(value: Any, path: Path, operation: str) -> float:
    array = _parse_array(value, "scale", path, operation)
    if array.ndim:
        raise ArgumentError(
            operation,
            received=f"scale in {str(path)!r} with shape {array.shape}",
            expected="one number",
            hint="Omit scale for the default, 1/√head_dim.",
        )
    return float(array)


def _parse_mask(value: Any, path: Path, operation: str) -> Mask:
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray("rows of different lengths")
    if array.ndim == 0 and str(array) == "causal":
        return causal()
    if array.dtype == bool or (array.size and np.isin(array, (0, 1)).all()):
        return dense(array.astype(bool))
    raise ArgumentError(
        operation,
        received=f"mask in {str(path)!r}, which is neither boolean nor the text causal",
        expected="True where a query may attend to a key",
        hint='Write [[true, false], [true, true]], or "causal".',
    )


def _build_error(path: Path, operation: str, problem: str) -> ArgumentError:
    return ArgumentError(
        operation,
        received=f"{str(path)!r} ({problem})",
        expected="a readable file",
        hint="Check its name and content.",
    )
