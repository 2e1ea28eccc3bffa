"""Files that a command reads: matrices from JSON or NPZ, and texts. Nothing in them is run."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import ArgumentError
from regard.masks import Mask, causal, dense

NAMES = ("query", "key", "value", "tokens", "mask", "scale")


def matrices(path: Path, operation: str) -> dict[str, Any]:
    """What a file holds under the names query, key, value, tokens, mask and scale, as `regard.attention` takes it."""
    found = _npz(path, operation) if path.suffix.lower() == ".npz" else _json(path, operation)
    if not isinstance(found, dict) or not {"query", "key"} <= found.keys() or found.keys() - set(NAMES):
        has = ", ".join(map(str, found)) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ArgumentError(
            operation,
            received=f"{str(path)!r} with {has or 'nothing'}",
            expected="query and key, and perhaps value, tokens, mask (True = attend, or the text causal), scale",
            hint='As in {"query": [[1, 0]], "key": [[1, 0], [0, 1]], "tokens": ["a", "b"]}.',
        )
    given: dict[str, Any] = {name: None for name in NAMES}
    for name in ("query", "key", "value"):
        if name in found:
            given[name] = _array(found[name], name, path, operation)
    if "tokens" in found:
        given["tokens"] = [str(each) for each in np.ravel(np.asarray(found["tokens"], dtype=object))]
    if "scale" in found:
        given["scale"] = float(_array(found["scale"], "scale", path, operation))
    if "mask" in found:
        given["mask"] = _mask(found["mask"], path, operation)
    return given


def one_head(given: dict[str, Any], head: str | None, operation: str) -> dict[str, Any]:
    """The matrices of one head: `head` says which, as in "0,3" for head 3 of batch entry 0."""
    try:
        index = () if head is None else tuple(int(each) for each in head.split(","))
        picked = {name: given[name][index] for name in ("query", "key", "value") if given[name] is not None}
    except (ValueError, IndexError) as error:
        shape = tuple(given["query"].shape[:-2])
        raise ArgumentError(
            operation,
            received=f"--head {head}",
            expected=f"an index into the leading axes, here {shape}",
            hint="Write --head 3, or --head 0,3 for head 3 of batch entry 0; they count from 0.",
        ) from error
    for name, array in picked.items():
        if array.ndim != 2:
            raise ArgumentError(
                operation,
                received=f"{name} with shape {given[name].shape}" + (f" and --head {head}" if head else ""),
                expected="one head, with 2 axes",
                hint="Leave --head out: this is one head already."
                if given[name].ndim == 2
                else "Choose one with --head 3, or --head 0,3 for head 3 of batch entry 0.",
            )
    return given | picked


def text_of(text: str | None, file: Path | None, operation: str) -> str:
    """The text that was given, or that of a file, or of standard input for `-`."""
    if (text is None) == (file is None):
        raise ArgumentError(
            operation,
            received="no text" if text is None else "--text and --file",
            expected="one text",
            hint='Give --text "…", --file FILE, or --file - for standard input.',
        )
    words = _words(file, operation) if file is not None else str(text)
    if not words.strip():  # a tokenizer would make its special tokens of it, and the model read those
        raise ArgumentError(
            operation,
            received="an empty text" if file is None else f"{str(file)!r}, which has no text in it",
            expected="at least a word",
            hint='Give --text "…", --file FILE, or --file - for standard input.',
        )
    return words


def _words(file: Path, operation: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise _unread(file, operation, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            operation,
            received=f"{str(file)!r}, whose byte {error.start:,} is no UTF-8",
            expected="a text in UTF-8",
            hint="Convert it first: iconv -f LATIN1 -t UTF-8.",
        ) from error


def _json(path: Path, operation: str) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise _unread(path, operation, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unread(path, operation, f"no JSON: {error}") from error


def _npz(path: Path, operation: str) -> dict[str, Any]:
    try:
        # Pickled arrays could run code when they are read.
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except OSError as error:
        raise _unread(path, operation, error.strerror or str(error)) from error
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise _unread(path, operation, "no NPZ of plain arrays, or pickled: " + str(error)) from error


def _array(thing: Any, name: str, path: Path, operation: str) -> Any:
    try:
        array = np.asarray(thing)
        if not np.issubdtype(array.dtype, np.number):
            array = np.asarray(thing, dtype=np.float64)
        return array if np.issubdtype(array.dtype, np.floating) else array.astype(np.float64)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            operation,
            received=f"{name} in {str(path)!r} that is no array of numbers ({error})",
            expected="rows of equal length",
            hint="Look at the rows: each has head_dim numbers.",
        ) from error


def _mask(thing: Any, path: Path, operation: str) -> Mask:
    array = np.asarray(thing)
    if array.ndim == 0 and str(array) == "causal":
        return causal()
    if array.dtype == bool or (array.size and np.isin(array, (0, 1)).all()):
        return dense(array.astype(bool))
    raise ArgumentError(
        operation,
        received=f"mask in {str(path)!r} that is neither true and false nor the text causal",
        expected="True where a query may attend to a key",
        hint='Write [[true, false], [true, true]], or "causal".',
    )


def _unread(path: Path, operation: str, why: str) -> ArgumentError:
    return ArgumentError(
        operation,
        received=f"{str(path)!r} ({why})",
        expected="a file that can be read",
        hint="Check its name and what is in it.",
    )
