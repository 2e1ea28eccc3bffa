"""Load a model and its tokenizer by name: `regard.models.load(name)` returns a `LoadedModel`.

A name is a folder, a name on the Hugging Face Hub, `module:function`, or the model that comes with regard:
"stories". The package may import `regard.images` and everything below it; torch and transformers are imported when a
model is loaded.

Design notes:
- Sound is read with `wave` and resampled with our own windowed sinc filter. SciPy or soundfile would be a dependency
  that saves only thirty lines. Tones up to 0.42 of the lower rate stay equal to 1e-5, and frequencies that would alias
  are removed.
- `look` takes a processor from the model's folder and the grid from its inputs. Sizes, rates and marks of images in a
  text belong to the model; guessed values would shift every map.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.models.loaded_model import EncodedText, LoadedModel
from regard.models.loading import load

__all__ = ["EncodedText", "LoadedModel", "load"]

set_public_module(globals())
