"""`load`: resolve a name to a model of the package, a folder, a function or a name on the Hugging Face Hub.

Weights are read from safetensors only.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.models.loaded_model import LoadedModel, find_token_embedding, model_info
from regard.models.optional_imports import first_line, import_optional, silence_transformers

DTYPES = ("float32", "bfloat16", "float16", "auto")
PARTS = ("text", "whole")
# The models that come with regard, and the functions that load them; `./stories` is a folder of that name.
BUILT_IN = {"stories": "regard.learn.gpt:load_stories"}
# What `look` shows without arguments: a sentence that repeats a name.
DEMO_MODEL = "stories"
DEMO_TEXT = (
    "There was a fox named Max. He had a red kite. "
    'A bird asked, "What is your name?" "My name is Max," said the fox.'
)


def load(
    name: str,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    part: Literal["text", "whole"] = "text",
) -> LoadedModel:
    r"""Load a model and its tokenizer by name, in eval mode.

    Weights are read from safetensors only, because unpickling a file can run arbitrary code. The model class is read
    from config.json.

    Args:
        name: One of:

            - "stories", a GPT of 3.9 million parameters that comes with regard, trained on children's stories;
            - a folder (config.json, *.safetensors, the tokenizer's files);
            - a name on the Hugging Face Hub, through the cache and settings of transformers;
            - `module:function`, which returns a model or (model, tokenizer). The module may be in the current
              directory.
        trust_remote_code: Run code that comes with the model. By default, such a model is rejected.
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype the weights are stored in. The default is
            float32; a model from `module:function` keeps its dtype.
        part: "text" for the part of the model that reads only text: the encoder of an encoder-decoder model, the text
            encoder of CLIP. "whole" for the whole model. A model from `module:function` is not changed.

    Returns:
        The model, its tokenizer, and notes about both.

    Raises:
        ArgumentError: If the name, the dtype, the folder or the model cannot be used.
        ArgumentTypeError: If `module:function` returns something other than a model or (model, tokenizer).
        ImportError: If torch or transformers is not installed.

    >>> import regard
    >>> loaded = regard.models.load("stories")
    >>> text = loaded.encode("Once upon a time")
    >>> text.tokens, loaded.forward(text).shape
    (['\n', ' Once', ' upon', ' a', ' time'], torch.Size([1, 5, 2560]))
    """
    if dtype not in (*DTYPES, None):
        expected, hint = ", ".join(DTYPES), "The default is float32."
        raise ArgumentError("load", received=f"dtype {dtype!r}", expected=expected, hint=hint)
    if part not in PARTS:
        expected, hint = " or ".join(PARTS), 'The default is "text".'
        raise ArgumentError("load", received=f"part {part!r}", expected=expected, hint=hint)
    if name in BUILT_IN:
        return replace(load_from_function(BUILT_IN[name], dtype), name=name)
    path = Path(name).expanduser()
    is_folder = path.is_dir()
    if is_folder:
        check_folder(path)
    elif path.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ArgumentError(
            "load",
            received=f"{name!r}, " + ("which is a file" if path.exists() else "which does not exist"),
            expected="a folder with config.json and *.safetensors, a name on the Hub, or module:function",
            hint="Pass the folder the model was saved to.",
        )
    elif ":" in name:
        return load_from_function(name, dtype)
    elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ArgumentError(
            "load",
            received=repr(name),
            expected="a folder, a name on the Hub such as gpt2 or owner/model, or module:function",
            hint="Check the spelling of the name.",
        )
    return load_with_transformers(
        name,
        str(path) if is_folder else name,
        trust_remote_code=trust_remote_code,
        dtype=dtype or "float32",
        local_files_only=is_folder or not is_hub_reachable(),
        part=part,
    )


def check_folder(path: Path) -> None:
    """Check that a folder has a configuration and weights that are not pickled."""
    if not (path / "config.json").is_file():
        raise ArgumentError(
            "load",
            received=f"the folder {str(path)!r}, which has no config.json",
            expected="a model as save_pretrained writes it: config.json, *.safetensors, the tokenizer's files",
            hint="Pass the folder that holds them, or module:function for your own model.",
        )
    if any(path.glob("*.safetensors")):
        return
    pickled = _find_pickled(path)
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
        expected="weights in *.safetensors, because reading a pickled file can run arbitrary code",
        hint=hint,
    )


def _find_pickled(path: Path) -> list[str]:
    """List the files of a folder that may be pickled weights."""
    return sorted(file.name for suffix in ("bin", "pt", "pth", "ckpt") for file in path.glob(f"*.{suffix}"))


def _find_snapshot(name: str) -> Path:
    """Return the folder of a model in the cache of the Hub, whose config.json is there."""
    import huggingface_hub

    return Path(str(huggingface_hub.try_to_load_from_cache(name, "config.json"))).parent


def load_with_transformers(
    name: str, source: str, *, trust_remote_code: bool, dtype: str, local_files_only: bool, part: str
) -> LoadedModel:
    """Load a model and its tokenizer with transformers."""
    transformers = import_optional("transformers", "hf")
    options = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
    with silence_transformers(transformers):
        with _translate_errors(name):
            config = transformers.AutoConfig.from_pretrained(source, **options)
            model_class = _find_model_class(transformers, config, trust_remote_code)
        with _translate_errors(name, loads_weights=True, is_offline=local_files_only):
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
    """Return a part of a model in its place."""
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
def _translate_errors(name: str, loads_weights: bool = False, is_offline: bool = False) -> Iterator[None]:
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
        elif on_hub and loads_weights and not (is_offline and not _find_pickled(_find_snapshot(name))):
            reason, expected = "it has no *.safetensors", "weights that can be read without running code"
            hint = "Use a copy in safetensors, or convert one you trust: model.save_pretrained(folder)."
        elif on_hub and (loads_weights or any(word in message for word in ("connect", "cache", "offline"))):
            missing = "its weights are not cached" if loads_weights else "not cached"
            reason, expected = f"{missing}, and the Hub is unreachable", "a model that is available locally"
            hint = "Download it once while online, or pass a folder with config.json and *.safetensors."
        raise ArgumentError("load", received=f"{name!r} ({reason})", expected=expected, hint=hint) from error


def import_function(path: str, operation: str = "load") -> Callable[..., Any]:
    """Import the function that `module:function` names; the module may be in the current directory.

    >>> import_function("regard:attention").__name__
    'attention'
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ArgumentError(
            operation,
            received=repr(path),
            expected="module:function, e.g. my_package.attention:forward",
            hint="Write the module path, a colon and the name of the function.",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(
            operation,
            received=f"{path!r} ({error})",
            expected="a module that can be imported",
            hint="Run from the directory that contains it, omit .py, and install its dependencies.",
        ) from error
    try:
        return functools.reduce(getattr, name.split("."), module)  # type: ignore[no-any-return]
    except AttributeError:
        public = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise ArgumentError(
            operation,
            received=repr(path),
            expected=f"a function of {module_name}, which has {', '.join(public[:12]) or 'none'}",
            hint="Check the name after the colon.",
        ) from None


def load_from_function(name: str, dtype: str | None) -> LoadedModel:
    """Call `module:function`, which returns a model or (model, tokenizer)."""
    torch = import_optional("torch", "torch")
    function = import_function(name)
    try:
        returned = function()
    except Exception as error:
        raise ArgumentError(
            "load",
            received=f"{name}, which raised {type(error).__name__}: {first_line(error)}",
            expected="a function without arguments that returns a model, or (model, tokenizer)",
            hint="Call it in Python to see where it fails.",
        ) from error
    model, tokenizer = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            "load",
            received=f"{describe_argument(model)} from {name}()",
            expected="a torch.nn.Module, or (model, tokenizer)",
            hint="Return the model itself; for a pipeline, return pipeline.model.",
        )
    if tokenizer is not None and not callable(tokenizer) and not hasattr(tokenizer, "encode"):
        raise ArgumentTypeError(
            "load",
            received=f"a tokenizer that is {describe_argument(tokenizer)} from {name}()",
            expected="a transformers tokenizer, an object with encode and decode, or a function that maps text to ids",
            hint="Return (model, tokenizer), or the model alone if it reads bytes.",
        )
    if dtype not in ("auto", None):
        model = model.to(getattr(torch, dtype))
    return LoadedModel(name, model.eval(), tokenizer, (), model_info(model))
