"""Load a model and its tokenizer by name: `regard.models.load(name)` returns a `LoadedModel`.

A name is a folder, a name on the Hugging Face Hub, or `module:function`. May import `regard.images`
and everything below it; torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.models.loaded_model import EncodedText, LoadedModel
from regard.models.loading import load

__all__ = ["EncodedText", "LoadedModel", "load"]

set_public_module(globals())
