"""Load a model by name, with its tokenizer: `regard.models.load(name)`."""

from __future__ import annotations

from regard._public import set_public_module
from regard.models.loading import LoadedModel, Text, load

__all__ = ["LoadedModel", "Text", "load"]

set_public_module(globals())
