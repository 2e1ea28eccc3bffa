"""Tiny versions of every base model of the installed transformers, and inputs with which they run."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_MAPPING

MAX_PARAMETERS = 100_000_000  # of a model that counts as tiny

# Sizes of a tiny model, and the names they have in configurations.
SIZES = (
    (32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim emb_dim image_size"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth layers",
    ),
    (2, "num_encoder_layers num_key_value_heads num_kv_heads"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (2, "num_experts_per_tok top_k moe_topk moe_top_k num_experts_per_token"),
    (4, "num_local_experts num_experts n_routed_experts"),
    (64, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size"),
    (8, "head_dim d_kv"),
    (16, "mamba_chunk_size"),
    (99, "vocab_size"),
    (128, "max_position_embeddings n_positions"),
)


# What some models need in addition, by name of the variant. None leaves an attribute as it is.
VARIANTS: dict[str, dict[str, int | None]] = {
    "as above": {},
    "heads of 64": {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 256),
        **dict.fromkeys(("head_dim", "d_kv"), 64),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    },
    "own head_dim": {"head_dim": None, "d_kv": None, "num_key_value_heads": 4, "num_kv_heads": 4},
    "more layers": dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 6),
    "own widths": dict.fromkeys(("embed_dim", "dim", "hidden_dim", "depth", "num_heads", "image_size")),
}


def find_sizes(variant: str) -> Iterator[tuple[str, int]]:
    """Yield name and size of every attribute that a variant sets."""
    changes = VARIANTS[variant]
    for size, names in SIZES:
        yield from ((name, size) for name in names.split() if name not in changes)
    yield from ((name, size) for name, size in changes.items() if size is not None)


def shrink(config: Any, variant: str) -> None:
    """Set the sizes of a configuration, and of those inside it, to small ones."""
    for name, size in find_sizes(variant):
        try:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, size)
        except Exception:  # computed from others, or different between layers
            continue
    with contextlib.suppress(Exception):
        if getattr(config, "head_dim", 0) is None:
            config.head_dim = dict(find_sizes(variant)).get("head_dim", 8)
        if isinstance(getattr(config, "layer_types", None), list):
            # Hybrid models have attention in their last layers.
            config.layer_types = (
                config.layer_types[:6] if variant == "more layers" else config.layer_types[-2:]
            )
    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > 98:
            setattr(config, name, 1)
    for value in vars(config).values():
        if isinstance(value, hf.PreTrainedConfig):
            shrink(value, variant)


def list_models() -> Iterator[tuple[str, type, Any]]:
    """Yield model type, model class and configuration class of every base model."""
    for config_class in sorted(MODEL_MAPPING, key=lambda config_class: config_class.__name__):
        try:
            models = MODEL_MAPPING[config_class]
        except (ImportError, ValueError):  # listed, but not installed
            continue
        model_class = models[0] if isinstance(models, tuple) else models
        yield config_class.model_type, model_class, config_class


def list_inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs to try, by the parameter names of a model's forward."""
    parameters = inspect.signature(model.forward).parameters
    size = getattr(model.config, "image_size", None) or getattr(
        getattr(model.config, "vision_config", None), "image_size", 32
    )
    height, width = (
        size if isinstance(size, list | tuple) else (size, size) if isinstance(size, int) else (32, 32)
    )
    channels = getattr(model.config, "num_channels", 3)
    tokens = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    bins = next(
        (
            bins
            for config in (
                model.config,
                getattr(model.config, "encoder_config", None),
                getattr(model.config, "audio_config", None),
            )
            for name in ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim")
            if isinstance(bins := getattr(config, name, None), int)
        ),
        80,
    )
    frames = 3000 if "whisper" in model.config.model_type else 64
    inputs = {
        "input_ids": tokens,
        "pixel_values": torch.randn(2, channels if isinstance(channels, int) else 3, height, width),
        "input_features": torch.randn(2, bins, frames),
        "input_values": torch.randn(2, 4000),
        "decoder_input_ids": tokens[:, :7],
        "attention_mask": torch.ones_like(tokens),
        "bbox": torch.zeros(2, 11, 4, dtype=torch.long),
    }
    main = (
        model.main_input_name
        if model.main_input_name in inputs
        else next((name for name in inputs if name in parameters), "input_ids")
    )
    names = {main, *(("decoder_input_ids",) if getattr(model.config, "is_encoder_decoder", False) else ())}
    if (
        {"input_ids", "pixel_values"} <= parameters.keys()
        and hasattr(model.config, "text_config")
        and "clip" in model.config.model_type
    ):
        names |= {"input_ids", "pixel_values"}
    yield {name: inputs[name] for name in names if name in parameters}
    if main in ("input_features", "input_values"):
        features = inputs["input_features"].mT
        with_mask = (
            {"attention_mask": torch.ones(2, frames, dtype=torch.long)}
            if "attention_mask" in parameters
            else {}
        )
        yield {main: features, **{name: inputs[name] for name in names - {main} if name in parameters}}
        yield {main: features, **with_mask}
        yield {main: torch.randn(2, 1, 3840)}
    else:
        every = ("input_ids", "pixel_values", "attention_mask", "bbox", "decoder_input_ids")
        yield {name: inputs[name] for name in every if name in parameters}
        yield {name: inputs[name] for name in every[:2] if name in parameters}


def flatten_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from flatten_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from flatten_tensors(value)


def list_attentions(output: Any) -> list[torch.Tensor]:
    """List the weights that `output_attentions=True` returned."""
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    return [
        weights
        for name in names
        for weights in (getattr(output, name, None) or ())
        if isinstance(weights, torch.Tensor)
    ]


def build_model(
    model_class: type, config_class: Any, variant: str, window: int | None = None
) -> tuple[Any, Any, dict[str, Any], Any]:
    """Build one model; return it with its configuration, inputs with which it runs, and its output.

    Args:
        model_class: Class of the model.
        config_class: Class of its configuration.
        variant: Key of `VARIANTS`.
        window: Number of keys of sliding windows, if it has any; None leaves it.
    """
    config = config_class()
    shrink(config, variant)
    for part in (
        config,
        *(value for value in vars(config).values() if isinstance(value, hf.PreTrainedConfig)),
    ):
        if window is not None and isinstance(getattr(part, "sliding_window", None), int):
            part.sliding_window = window
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    first_error: Exception | None = None
    for inputs in list_inputs(model):
        try:
            torch.manual_seed(1)
            return model, config, inputs, model(**inputs)
        except Exception as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error
