"""`load`: resolve a name to a folder, a function or a name on the Hugging Face Hub, and load the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from regard.errors import ArgumentError
from regard.models.function_loading import load_from_function
from regard.models.loaded_model import LoadedModel
from regard.models.transformers_loading import check_folder, is_hub_reachable, load_with_transformers

DTYPES = ("float32", "bfloat16", "float16", "auto")
PARTS = ("text", "whole")


def load(
    name: str,
    *,
    trust_remote_code: bool = False,
    dtype: str | None = None,
    part: Literal["text", "whole"] = "text",
) -> LoadedModel:
    """Load a model and its tokenizer by name, in eval mode.

    Weights are read from safetensors only, since reading a pickled file can run any code. The class is the one that
    config.json names.

    Args:
        name: A folder (config.json, *.safetensors, the tokenizer's files); a name on the Hugging Face Hub, through
            the cache and settings of transformers; or `module:function`, which returns a model or
            (model, tokenizer). The module may lie in the current directory.
        trust_remote_code: Run code that comes with the model. By default such a model is refused.
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype the weights are stored in. The default is
            float32, except that the weights of a model from `module:function` stay as they are.
        part: "text" for the part of the model that reads a text alone: of an encoder-decoder model the encoder, of CLIP
            the text encoder. "whole" for all of it. A model from `module:function` stays as it is.

    Returns:
        The model, its tokenizer, and notes about both.

    Raises:
        ArgumentError: If the name, the dtype, the folder or the model cannot be used.
        ArgumentTypeError: If `module:function` returns something other than a model or (model, tokenizer).
        ImportError: If torch or transformers is not installed.

    >>> import regard
    >>> model = regard.models.load("examples.induction:load")
    >>> text = model.encode("the cat, the ")
    >>> text.tokens[:3], model.forward(text).shape
    (['t', 'h', 'e'], torch.Size([1, 13, 128]))
    """
    if dtype not in (*DTYPES, None):
        raise ArgumentError(
            "load",
            received=f"dtype {dtype!r}",
            expected=", ".join(DTYPES),
            hint="The default is float32.",
        )
    if part not in PARTS:
        raise ArgumentError(
            "load",
            received=f"part {part!r}",
            expected=" or ".join(PARTS),
            hint='The default is "text".',
        )
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return load_with_transformers(
            name,
            str(path),
            trust_remote_code=trust_remote_code,
            dtype=dtype or "float32",
            local_files_only=True,
            part=part,
        )
    if path.exists() or name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ArgumentError(
            "load",
            received=f"{name!r}, " + ("which is a file" if path.exists() else "which does not exist"),
            expected="a folder with config.json and *.safetensors, a name on the Hub, or module:function",
            hint="Pass the folder the model was saved to.",
        )
    if ":" in name:
        return load_from_function(name, dtype)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ArgumentError(
            "load",
            received=repr(name),
            expected="a folder, a name on the Hub such as gpt2 or owner/model, or module:function",
            hint="Check the name.",
        )
    return load_with_transformers(
        name,
        name,
        trust_remote_code=trust_remote_code,
        dtype=dtype or "float32",
        local_files_only=not is_hub_reachable(),
        part=part,
    )
