"""Write a policy in the formats of other tools.

DuoAttention's format is that of its public repository (mit-han-lab/duo-attention, folder `attn_patterns`):
`full_attention_heads.tsv` has a row for each layer and a column for each kv head, with 1 for heads that keep every key,
and `config.json` has `sink_size` and `recent_size` for all others. The recent tokens include the current one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.policy.window_sizes import FULL

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from regard.policy.policy import CachePolicy

Format = Literal["duo_attention", "transformers", "json"]

# Families whose configuration has the type of each layer, and whose layers differ in their mask and nothing else.
MIXED_FAMILIES = ("gemma2", "gpt_oss", "ministral", "qwen2", "qwen2_moe", "qwen3")

# Families whose configuration has one window for all layers.
UNIFORM_FAMILIES = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")


def export_policy(
    policy: CachePolicy,
    path: str | Path,
    format: Format,
    *,
    config: PreTrainedConfig | None = None,
    widen: bool = False,
) -> Path:
    """Write a policy in the format of another tool; see `CachePolicy.export`."""
    folder = Path(path).expanduser()
    if format == "json":
        return policy.save(folder)
    if format == "duo_attention":
        return _write_duo_attention(policy, folder, widen)
    if format == "transformers":
        changed = change_config(policy, config)
        changed.save_pretrained(folder)
        return folder
    raise ArgumentError(
        "policy.export",
        received=f"format={format!r}",
        expected='"duo_attention", "transformers" or "json"',
        hint="Check the name.",
    )


def _write_duo_attention(policy: CachePolicy, folder: Path, widen: bool) -> Path:
    """Write the two files of an attention pattern of DuoAttention."""
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
    model = policy.about.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    (folder / "config.json").write_text(json.dumps({"model_name": name, **sizes}, indent=2) + "\n")
    return folder


def change_config(policy: CachePolicy, config: PreTrainedConfig | None) -> PreTrainedConfig:
    """Return a configuration whose layers have the windows of a policy.

    Args:
        policy: The policy.
        config: Configuration of the model.

    Returns:
        A changed copy. A model loaded with it masks as the policy does, and transformers' own cache layers evict.

    Raises:
        ArgumentError: If the configuration cannot say it.
        ArgumentTypeError: If there is no configuration.
    """
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise ArgumentTypeError(
            "policy.export",
            received=f"config as {describe_argument(config)}",
            expected="the configuration of the model",
            hint='policy.export(path, "transformers", config=model.config)',
        )
    family = config.model_type
    if family not in (*MIXED_FAMILIES, *UNIFORM_FAMILIES):
        raise _refuse(f"a configuration of {family}", "a family whose layers differ in their windows only")
    if policy.num_layers != config.num_hidden_layers:
        raise _refuse(f"{policy.num_layers} layers for {config.num_hidden_layers}", "a policy of this model")
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
    if family in MIXED_FAMILIES:
        types = ["full_attention" if window == FULL else "sliding_attention" for window in windows]
        changes["layer_types"] = types
        if hasattr(config, "use_sliding_window"):
            changes["use_sliding_window"] = bool(sizes)
    elif sizes and (windows == FULL).any():
        raise _refuse(f"layers with and without a window in {family}", "a window for all layers, or for none")
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
        hint='A configuration cannot say more. Use policy.cache(model), or export as "duo_attention" or "json".',
    )
