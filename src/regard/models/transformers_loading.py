"""Load a transformers model from a folder or the Hugging Face Hub; safetensors only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError
from regard.models.loaded_model import LoadedModel, find_token_embedding, model_info
from regard.models.optional_imports import first_line, import_optional, silence_transformers


def check_folder(path: Path) -> None:
    """Check that a folder has a configuration and weights that are not pickled.

    Raises:
        ArgumentError: If the folder has no config.json, or no *.safetensors.
    """
    if not (path / "config.json").is_file():
        raise ArgumentError(
            "load",
            received=f"the folder {str(path)!r}, which has no config.json",
            expected="a model as save_pretrained writes it: config.json, *.safetensors, the tokenizer's files",
            hint="Pass the folder that holds them, or module:function for your own model.",
        )
    if any(path.glob("*.safetensors")):
        return
    pickled = sorted(
        file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in path.glob(f"*.{suffix}")
    )
    found = f"{pickled[0]} and no *.safetensors" if pickled else "no weights"
    hint = "Pass the folder that holds them. If it is a git checkout, fetch its large files."
    if pickled:
        hint = (
            "If you trust its source, convert it once: "
            "AutoModel.from_pretrained(folder).save_pretrained(new_folder) writes safetensors."
        )
    raise ArgumentError(
        "load",
        received=f"the folder {str(path)!r} with {found}",
        expected="weights in *.safetensors, since reading a pickled file can run any code",
        hint=hint,
    )


def load_with_transformers(
    name: str, source: str, *, trust_remote_code: bool, dtype: str, local_files_only: bool, part: str
) -> LoadedModel:
    """Load a model and its tokenizer with transformers.

    Args:
        name: The name that the user gave.
        source: A folder, or a name on the Hub.
        trust_remote_code: Run code that comes with the model.
        dtype: Name of a dtype, or "auto" for the stored one.
        local_files_only: Read the cache only.
        part: "whole", or "text" for the part that reads a text alone: of an encoder-decoder model, the encoder, or the
            decoder if the encoder reads audio or images; of a model with a text encoder and an image encoder such as
            CLIP, the text encoder.

    Returns:
        The model in eval mode.

    Raises:
        ArgumentError: If transformers cannot load the model.
    """
    transformers = import_optional("transformers", "hf")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    with silence_transformers(transformers):
        with _translate_errors(name):
            config = transformers.AutoConfig.from_pretrained(source, **options)
            model_class = _find_model_class(transformers, config, trust_remote_code)
        with _translate_errors(name, loads_weights=True):
            model, loading_info = model_class.from_pretrained(
                source, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        try:
            tokenizer, tokenizer_error = transformers.AutoTokenizer.from_pretrained(source, **options), ""
        except Exception as error:  # the model is usable without its tokenizer
            tokenizer, tokenizer_error = None, first_line(error)
    notes = []
    if tokenizer is None and find_token_embedding(model) is not None:
        notes.append(f"The tokenizer could not be loaded ({tokenizer_error}).")
    if missing := sorted(loading_info["missing_keys"]):
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        notes.append(
            f"{len(missing)} weights are missing in the file and were initialised at random: {some}."
        )
    info = model_info(model, getattr(config, "dtype", None))
    loaded = LoadedModel(name, model.eval(), tokenizer, tuple(notes), info, source, options)
    return loaded if part == "whole" else select_part(loaded, *find_text_part(model))


def select_part(loaded: LoadedModel, model: Any, note: str) -> LoadedModel:
    """Return a part of a model in its place.

    Args:
        loaded: The model.
        model: The part, or the model itself.
        note: A remark about it; "" for none.

    Returns:
        The part, with the notes of the model and this one.
    """
    if model is loaded.model:
        return loaded
    info = model_info(model, loaded.info.get("stored_dtype"))
    return replace(loaded, model=model, notes=(*loaded.notes, note), info=info)


def find_text_part(model: Any) -> tuple[Any, str]:
    """Return the part of a model that reads a text alone, and a note about it; the model and "" if it does itself."""
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        if find_token_embedding(encoder) is not None:
            return encoder, "The model has an encoder and a decoder; only the encoder is used."
        note = (
            f"The encoder reads {encoder.main_input_name}; only the decoder is used, without cross-attention."
        )
        return model.get_decoder(), note
    text_model = getattr(model, "text_model", None)
    if text_model is not None and getattr(model, "vision_model", None) is not None:
        return text_model, "The model has a text encoder and an image encoder; only the text encoder is used."
    return model, ""


def is_hub_reachable() -> bool:
    """Return whether the Hub's host name resolves; otherwise transformers would retry for half a minute."""
    import socket
    from urllib.parse import urlsplit

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


def _find_model_class(transformers: Any, config: Any, trust_remote_code: bool) -> Any:
    """Return the class that the configuration names, which uses every weight; else the base model."""
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_map:
        name = "AutoModelForCausalLM" if "AutoModelForCausalLM" in auto_map else "AutoModel"
        return getattr(transformers, name)
    for architecture in config.architectures or ():
        candidate = getattr(transformers, architecture, None)
        if isinstance(candidate, type) and issubclass(candidate, transformers.PreTrainedModel):
            return candidate
    return transformers.AutoModel


@contextmanager
def _translate_errors(name: str, loads_weights: bool = False) -> Iterator[None]:
    """Raise errors of transformers as one-line `ArgumentError`s with a hint."""
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        message, reason = str(error), first_line(error)
        on_hub = isinstance(error, OSError) and not Path(name).expanduser().is_dir()
        expected = "a model that transformers can load"
        hint = "Check the folder, or the name on the Hub."
        if "trust_remote_code" in message:
            reason = "it needs its own code, which would run here"
            expected = "a model whose class is part of transformers"
            hint = "If you have read that code and trust it: --trust-remote-code, or trust_remote_code=True."
        elif on_hub and loads_weights:
            reason, expected = "it has no *.safetensors", "weights that can be read without running code"
            hint = "Use a copy in safetensors, or convert one you trust: model.save_pretrained(folder)."
        elif on_hub and ("connect" in message or "cache" in message or "offline" in message):
            reason, expected = "not cached, and the Hub is unreachable", "a model that is available locally"
            hint = "Download it once with a network, or pass a folder with config.json and *.safetensors."
        raise ArgumentError("load", received=f"{name!r} ({reason})", expected=expected, hint=hint) from error
