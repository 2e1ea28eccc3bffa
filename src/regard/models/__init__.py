"""Load a model and its tokenizer by name: `regard.models.load(name)` returns a `LoadedModel`.

A name is a folder, a name on the Hugging Face Hub, `module:function`, or the model that comes with regard:
"stories". May import `regard.images`
and everything below it; torch and transformers are imported when a model is loaded.

Design notes:
- Sound is read by `wave` and resampled by a windowed sinc filter of our own. No dependency: SciPy or soundfile would
  be one for thirty lines. Tones up to 0.42 of the lower rate stay equal to 1e-5, and what would alias is removed.
- `look` takes a processor from the model's folder and the grid from its inputs. Sizes, rates and marks of images in a
  text belong to the model; guessed ones would shift every map.
"""

from __future__ import annotations

from regard._public import set_public_module
from regard.models.loaded_model import EncodedText, LoadedModel
from regard.models.loading import load

__all__ = ["EncodedText", "LoadedModel", "load"]

set_public_module(globals())
