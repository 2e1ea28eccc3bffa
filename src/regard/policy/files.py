"""The file of a cache policy, a small JSON document that is validated when it is read, and the formats of other tools.

    {"format": "regard.cache_policy", "version": 1,
     "layers": [{"name": "model.layers.0.self_attn", "windows": [256, null], "sinks": [4, 0]}, …],
     "about": {"model": {…}, "survey": {…}, "settings": {…}, "head_dim": 64, …}}

A window of null keeps every key.

DuoAttention's format is that of its public repository (mit-han-lab/duo-attention, folder `attn_patterns`):
`full_attention_heads.tsv` has a row for each layer and a column for each kv head, with 1 for heads that keep every key,
and `config.json` has `sink_size` and `recent_size` for all others. The recent tokens include the current one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.families import get_family
from regard.policy.masking import FULL, KeptKeys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    """Write a policy beside its path and rename it, so that a file is whole or absent."""
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
    """Read and validate the file of a policy."""
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
    if fault := find_wrong_size(about, len(windows[0])):
        raise _build_error(path, fault)
    return layers, windows, sinks, about


def find_wrong_size(about: dict[str, Any], num_kv_heads: int) -> str:
    """Describe a size in the facts about a policy that it cannot have; "" if there is none."""
    for name in SIZES:
        if name in about and not _is_count(about[name], 1):
            return f"a {name} that is not a positive integer"
    heads = about.get("num_heads", num_kv_heads)
    return f"{heads} query heads for {num_kv_heads} kv heads" if heads % num_kv_heads else ""


def _is_count(value: object, minimum: int) -> bool:
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_whole and minimum <= value <= MAX_COUNT  # type: ignore[operator]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _build_error(path: Path, fault: str) -> ArgumentError:
    return ArgumentError(
        "CachePolicy.load",
        received=f"{path.name!r}, which holds {fault}",
        expected="a file that policy.save wrote",
        hint="Create the policy again: regard policy make SURVEY -o policy.json",
    )


def write_duo_attention(policy: KeptKeys, folder: Path, widen: bool, model_name: str | None) -> Path:
    """Write the two files of an attention pattern of DuoAttention, and return the folder."""
    is_full = policy.windows == FULL
    windows, sinks = policy.windows[~is_full], policy.sinks[~is_full]
    if not widen and (len(set(windows.tolist())) > 1 or len(set(sinks.tolist())) > 1):
        raise ArgumentError(
            "policy.export",
            received=f"windows of {windows.min()} to {windows.max()} and {sinks.min()} to {sinks.max()} sinks",
            expected="one window and one number of sinks: DuoAttention has one of each for all heads",
            hint="Pass widen=True to export the largest; it keeps all keys of the policy, and more.",
        )
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["\t".join(f"{float(full):.1f}" for full in row) for row in is_full]
    (folder / "full_attention_heads.tsv").write_text("\n".join(rows) + "\n")
    sizes = {
        "sink_size": int(sinks.max(initial=0)),
        # Without a windowed head any size will do; readers expect one.
        "recent_size": int(windows.max(initial=1)),
    }
    (folder / "config.json").write_text(json.dumps({"model_name": model_name, **sizes}, indent=2) + "\n")
    return folder


def change_config(policy: KeptKeys, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """Return a configuration whose layers have the windows of a policy.

    A model loaded with it masks as the policy does, and transformers' own cache layers evict.
    """
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise ArgumentTypeError(
            "policy.export",
            received=f"config as {describe_argument(config)}",
            expected="the configuration of the model",
            hint='policy.export(path, "transformers", config=model.config)',
        )
    stated = get_family(config.model_type).windows
    if stated is None:
        raise _refuse(
            f"a configuration of {config.model_type}", "a family whose layers differ in their windows only"
        )
    if len(policy.layers) != config.num_hidden_layers:
        raise _refuse(f"{len(policy.layers)} layers for {config.num_hidden_layers}", "a policy of this model")
    if (policy.sinks > 0).any():
        raise _refuse("a policy with sinks", "windows without sinks: a configuration has none")
    if (policy.windows != policy.windows[:, :1]).any():
        raise _refuse(
            "a layer whose heads differ",
            'one window for each layer: survey.cache_policy(granularity="layer")',
        )
    own = _read_windows(config)
    windows = policy.windows[:, 0]
    # What the model masks itself stays masked.
    windows = np.where(own == FULL, windows, np.where(windows == FULL, own, np.minimum(windows, own)))
    sizes = sorted(set(windows.tolist()) - {FULL})
    if len(sizes) > 1:
        raise _refuse(
            f"windows of {', '.join(map(str, sizes))} tokens", "one window for all layers that have one"
        )
    # Some families need a size even if no layer has a window.
    changes: dict[str, Any] = {"sliding_window": sizes[0] if sizes else config.sliding_window}
    if stated == "by layer":
        types = ["full_attention" if window == FULL else "sliding_attention" for window in windows]
        changes["layer_types"] = types
        if hasattr(config, "use_sliding_window"):
            changes["use_sliding_window"] = bool(sizes)
    elif sizes and (windows == FULL).any():
        raise _refuse(
            f"layers with and without a window in {config.model_type}", "a window for all layers, or for none"
        )
    return type(config).from_dict(config.to_dict() | changes)


def _read_windows(config: PreTrainedConfig) -> np.ndarray:
    """Return the window of each layer, FULL for none."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    is_sliding = np.array([layer_type == "sliding_attention" for layer_type in types])
    return np.where(is_sliding, FULL if window is None else window, FULL)


def _refuse(received: str, expected: str) -> ArgumentError:
    return ArgumentError(
        "policy.export",
        received=received,
        expected=expected,
        hint="A configuration cannot express this policy. Use policy.cache(model), or export as "
        '"duo_attention" or "json".',
    )
