"""Record which tokens of a forward pass are patches of which image: hooks on the models that read pixels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from regard.capture.patching import Guard
from regard.errors import RegardError
from regard.images.grid_reading import BLOCK_TYPES, Grids, read_grids
from regard.images.patch_grid import PatchGrid


class ImagePass(NamedTuple):
    """The images that one forward pass of a model read.

    Args:
        grids: The images of each batch entry, in order; see `regard.images.read_grids`.
        is_text: The tokens are those of a language model. Its sequence may grow.
        is_split: Each image is a call of its own.
        fault: Why the grids are unknown, or "".
    """

    grids: Grids
    is_text: bool = False
    is_split: bool = False
    fault: str = ""

    def to_record(self) -> dict[str, Any]:
        """Return the pass as JSON data."""
        return self._asdict() | {"grids": [[grid.to_record() for grid in entry] for entry in self.grids]}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> ImagePass:
        """Read what `to_record` returned."""
        return cls(**record | {"grids": [[PatchGrid(**grid) for grid in entry] for entry in record["grids"]]})


# The passes of each model that reads images, by the name of its module.
ImagePasses = dict[str, list[ImagePass]]


def attach_image_hooks(model: nn.Module, passes: ImagePasses, guard: Guard) -> Iterator[Any]:
    """Register hooks on the models that read images: a vision model, and a model with a vision model in it.

    Args:
        model: The model that is watched.
        passes: To which passes are added.
        guard: Makes each hook.

    Yields:
        The handle of each hook, which removes it.
    """
    pixels: dict[str, Any] = {}  # inputs of the vision model that ran last
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        reads_images = hasattr(config, "patch_size") or getattr(config, "image_token_id", None) is not None
        if not reads_images or not hasattr(
            module, "main_input_name"
        ):  # the latter is a model of transformers
            continue
        if {"pixel_values", "grid_thw"} & inspect.signature(module.forward).parameters.keys():
            hook = partial(_record_pass, passes.setdefault(name, []), pixels)
            yield module.register_forward_pre_hook(guard(hook, 3), with_kwargs=True)


def _record_pass(
    passes: list[ImagePass],
    pixels: dict[str, Any],
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Add a forward pass of a module if it reads images."""
    try:
        inputs = dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    except TypeError:  # the model will raise it
        return
    inputs = {name: value for name, value in inputs.items() if value is not None}
    is_text = getattr(module.config, "vision_config", None) is not None
    if is_text and not {"pixel_values", "mm_encoder_outputs"} & inputs.keys():
        return  # a step of generate(), or a text without images
    if is_text:
        inputs = pixels | inputs  # generate() runs the vision model first, and passes on its outputs
    else:
        if "grid_thw" in inputs:  # the name that vision models of Qwen have for it
            inputs["image_grid_thw"] = inputs["grid_thw"]
        pixels.clear()
        pixels.update({name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs})
    is_split = not is_text and module.config.model_type in BLOCK_TYPES
    try:
        found = ImagePass(read_grids(module.config, inputs), is_text, is_split)
    except RegardError as error:  # raised if the images are asked for
        found = ImagePass([], is_text, is_split, str(error))
    passes.append(found)


def find_passes(passes: ImagePasses, module: str) -> list[ImagePass]:
    """Return the passes of the innermost model around a module that read images; none if there is no such model."""
    names = [name for name, own in passes.items() if own and (not name or module.startswith(f"{name}."))]
    return passes[max(names, key=len)] if names else []
