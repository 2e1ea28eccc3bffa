"""The file of a cache policy: a small JSON document, validated when it is read.

    {"format": "regard.cache_policy", "version": 1,
     "layers": [{"name": "model.layers.0.self_attn", "windows": [256, null], "sinks": [4, 0]}, …],
     "about": {"model": {…}, "survey": {…}, "settings": {…}, "head_dim": 64, …}}

A window of null keeps every key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError

FORMAT, VERSION = "regard.cache_policy", 1
# Larger files are refused unread; the policy of a model with 1,000 layers of 100 heads takes about 2 MB.
MAX_BYTES = 1 << 24
MAX_HEADS = 1 << 20
MAX_COUNT = 1 << 40
MAX_NAME = 1000  # characters
SIZES = ("num_heads", "head_dim", "value_dim", "bytes_per_number")


def write_policy(
    path: Path,
    layers: Sequence[str],
    windows: list[list[int | None]],
    sinks: list[list[int]],
    about: dict[str, Any],
) -> Path:
    """Write a policy beside its path and rename it, so that a file is whole or absent.

    Args:
        path: The file.
        layers: Names of the layers.
        windows: Latest keys kept by each head of each layer; None is every key.
        sinks: First keys kept by each head of each layer.
        about: Facts that JSON can hold.

    Returns:
        The path.
    """
    rows = [
        {"name": name, "windows": own_windows, "sinks": own_sinks}
        for name, own_windows, own_sinks in zip(layers, windows, sinks, strict=True)
    ]
    # ASCII alone: a lone surrogate, which JSON may hold, is not valid in any file.
    head = json.dumps({"format": FORMAT, "version": VERSION}, allow_nan=False)[1:-1]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    facts = json.dumps(about, allow_nan=False)
    text = f'{{{head},\n "layers": [\n  {lines}],\n "about": {facts}}}\n'
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_policy(path: Path) -> tuple[list[str], list[list[int | None]], list[list[int]], dict[str, Any]]:
    """Read and validate the file of a policy.

    Args:
        path: The file.

    Returns:
        Names of the layers, windows, sinks and the facts.

    Raises:
        ArgumentError: If the file is not a policy, is damaged or has another version.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _build_error(path, f"more than {MAX_BYTES:,} bytes")
    try:
        record = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _build_error(path, f"no valid JSON ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _build_error(path, f'no "format": "{FORMAT}"')
    if record.get("version") != VERSION or isinstance(record["version"], bool):
        raise ArgumentError(
            "CachePolicy.load",
            received=f"{path.name!r}, a policy of version {str(record.get('version'))[:20]}",
            expected=f"version {VERSION}",
            hint="Read it with the version of regard that wrote it.",
        )
    rows, about = record.get("layers"), record.get("about")
    if not isinstance(about, dict) or not isinstance(rows, list) or not rows:
        raise _build_error(path, 'no list "layers" or no object "about"')
    for size in SIZES:
        if size in about and not _is_count(about[size], 1):
            raise _build_error(path, f"a {size} that is not a positive whole number")
    layers: list[str] = []
    windows: list[list[int | None]] = []
    sinks: list[list[int]] = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("name"), str) or len(row["name"]) > MAX_NAME:
            raise _build_error(path, f"a layer {number} without a name")
        for key, minimum in (("windows", 1), ("sinks", 0)):
            counts = row.get(key)
            if not isinstance(counts, list):
                counts = []
            valid = all(_is_count(count, minimum) or (count is None and key == "windows") for count in counts)
            if not valid or not 0 < len(counts) <= MAX_HEADS or len(counts) != len(rows[0]["windows"]):
                raise _build_error(path, f"a layer {number} whose {key} are not counts, one for each kv head")
        layers.append(row["name"])
        windows.append(row["windows"])
        sinks.append(row["sinks"])
    heads = about.get("num_heads", len(windows[0]))
    if heads % len(windows[0]):
        raise _build_error(path, f"{heads} query heads for {len(windows[0])} kv heads")
    return layers, windows, sinks, about


def _is_count(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_COUNT


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _build_error(path: Path, fault: str) -> ArgumentError:
    return ArgumentError(
        "CachePolicy.load",
        received=f"{path.name!r}, which holds {fault}",
        expected="a file that policy.save wrote",
        hint="Make the policy again: regard policy make SURVEY -o policy.json",
    )
