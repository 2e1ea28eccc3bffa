"""What a model states about itself: causal modules, the positions it looks up, and the tokens of images."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.capture.module_names import read_attribute, walk_modules
from regard.capture.patching import Guard
from regard.capture.watchers import find_obstacle
from regard.errors import RegardError
from regard.families import get_family
from regard.images.grid_reading import Grids, has_patch_embedding, read_grids
from regard.images.patch_grid import PatchGrid

Tensor = Any  # the types of torch are not followed


class PositionLookup(NamedTuple):
    """The positions that one forward pass looked up or was passed, (batch or 1, n).

    Args:
        module: Name of the module that looked them up; "position_ids" if they were passed to the model.
        positions: (batch or 1, n).
        is_table: Whether the module is a table with one vector for each position.
    """

    module: str
    positions: Tensor
    is_table: bool = False


class ModuleSettings(NamedTuple):
    """What an attention module and its configuration state.

    Args:
        has_sinks: It has learnt sinks.
        softcap: Soft cap of its scores, or None.
        windows: Number of keys that each token attends to, by where that is stated; None for all keys.
    """

    has_sinks: bool
    softcap: float | None
    windows: dict[str, int | None]

    @classmethod
    def read(cls, module: nn.Module) -> ModuleSettings:
        """Read the settings of a module."""
        config = getattr(module, "config", None)
        softcap = read_setting(config, "attn_logit_softcapping")
        return cls(
            isinstance(getattr(module, "sinks", None), torch.Tensor),
            float(softcap) if isinstance(softcap, int | float) else None,
            _read_windows(module, config),
        )


def read_setting(config: Any, name: str) -> Any:
    """Return an attribute of a configuration; None without it, or if it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers: the layers have configurations of their own
        return None


def _read_windows(module: nn.Module, config: Any) -> dict[str, int | None]:
    """Read the window of an attention module, by its configuration and by itself; what is not stated is left out."""
    types, index = read_setting(config, "layer_types"), getattr(module, "layer_idx", None)
    configured, own = read_setting(config, "sliding_window"), getattr(module, "sliding_window", None)
    found: dict[str, Any] = {}
    # Without layers of either type, the configuration distinguishes something else, such as linear attention.
    has_types = isinstance(types, list | tuple) and "sliding_attention" in types
    if has_types and isinstance(index, int) and index < len(types):
        if types[index] == "full_attention":
            found["layer_types of the configuration"] = None
        elif types[index] == "sliding_attention":
            found["layer_types of the configuration"] = configured or 0
    elif types is None and not hasattr(module, "sliding_window"):
        found["sliding_window of the configuration"] = configured or 0
    if has_types and getattr(module, "layer_type", "") == "full_attention":
        found["layer_type of the layer"] = None
    elif getattr(module, "is_sliding", None) is False:
        found["is_sliding of the layer"] = None
    else:
        found["sliding_window of the layer"] = own or 0
    is_number = {name: isinstance(value, int) and value > 0 for name, value in found.items()}
    return {name: value for name, value in found.items() if value is None or is_number[name]}


# First token and end, exclusive, of each image, for each batch entry.
ImageRuns = list[list[tuple[int, int]]]


class ModuleHints:
    """`causal` has the `is_causal` attribute of modules by name, `lookups` every position lookup in order.

    `settings` has the settings of attention modules by name.
    `image_runs` has the images of each forward pass that was passed token types. In models such as Gemma 3, the tokens
    of an image attend to each other.
    `image_passes` has the patch grids of each forward pass of the models that read images, by name.
    """

    def __init__(self) -> None:
        self.causal: dict[str, bool] = {}
        self.settings: dict[str, ModuleSettings] = {}
        self.lookups: list[PositionLookup] = []
        self.image_runs: list[ImageRuns] = []
        self.image_passes: ImagePasses = {}
        self._last: Tensor = None
        self._last_types: Tensor = None

    def attach(self, model: nn.Module, guard: Guard) -> Iterator[Any]:
        """Read `is_causal` of the modules, and register hooks on position embeddings and models that read images."""
        yield from attach_image_hooks(model, self.image_passes, guard)
        for name, module in walk_modules(model):
            is_causal = read_attribute(module, "is_causal")
            if isinstance(is_causal, bool):
                self.causal[name] = is_causal
            config = read_attribute(module, "config")
            if config is not None and getattr(config, "vision_config", None) is not None:
                yield module.register_forward_pre_hook(guard(self._record_images, 3), with_kwargs=True)
            class_name = type(module).__name__.lower()
            if "attention" in class_name or "attn" in class_name:
                self.settings[name] = ModuleSettings.read(module)
            is_table = is_position_table(name, module)
            if is_table or "rotaryembedding" in class_name:
                hook = guard(self._make_hook(name, is_table), 3)
                yield module.register_forward_pre_hook(hook, with_kwargs=True)
        if "position_ids" in _list_parameters(model):
            yield model.register_forward_pre_hook(guard(self._record_position_ids, 3), with_kwargs=True)

    def _record_images(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name in ("token_type_ids", "mm_token_type_ids"):
            types = kwargs.get(name)
            # A model passes the same tensor on to its parts. A step of generate() may pass the type of its one token.
            is_pass = isinstance(types, torch.Tensor) and types.ndim == 2 and types.shape[1] > 1
            if is_pass and types is not self._last_types:
                self.image_runs.append(find_image_runs(types))
                self._last_types = types

    def _record_position_ids(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.ndim == 2 and find_obstacle(positions) is None:
            self.lookups.append(PositionLookup("position_ids", positions.detach().clone()))

    def _make_hook(self, name: str, is_table: bool) -> Any:
        def record_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for argument in (kwargs.get("position_ids"), *args, *kwargs.values()):
                if (
                    isinstance(argument, torch.Tensor)
                    and argument.dtype == torch.int64
                    and argument.ndim in (1, 2)
                ):
                    if find_obstacle(argument) is not None:
                        return
                    if argument is not self._last:  # a model may look up the same positions several times
                        positions = argument.detach().reshape(-1, argument.shape[-1]).clone()
                        self.lookups.append(PositionLookup(name, positions, is_table))
                    self._last = argument
                    return

        return record_positions


def _list_parameters(module: nn.Module) -> tuple[str, ...]:
    """List the parameters of a module's forward pass."""
    forward = module.forward
    function = getattr(forward, "__func__", None)
    if function is None or "forward" in vars(module):
        return tuple(inspect.signature(forward).parameters)
    return _list_parameters_of_function(function)[1:]


@lru_cache(maxsize=64)
def _list_parameters_of_function(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def is_position_table(name: str, module: nn.Module) -> bool:
    """Return whether a module is a table with one vector for each position, by its attribute."""
    attribute = name.rpartition(".")[2]
    is_named = attribute in ("wpe", "embed_positions") or "position_embedding" in attribute
    return isinstance(module, nn.Embedding) and is_named


def find_image_runs(types: Tensor) -> ImageRuns:
    """Find first token and end of each image, from types of tokens, (batch, n): 1 is an image, 2 a video."""
    is_image = ((types == 1) | (types == 2)).long()
    changes = nn.functional.pad(is_image, (1, 1)).diff(dim=-1)
    return [
        list(zip((row == 1).nonzero()[:, 0].tolist(), (row == -1).nonzero()[:, 0].tolist(), strict=True))
        for row in changes
    ]


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
    """Register hooks on a vision model, and on a model with a vision model in it; yield their handles."""
    pixels: dict[str, Any] = {}  # inputs of the vision model that ran last
    for name, module in walk_modules(model):
        config = read_attribute(module, "config")
        if read_attribute(module, "patch_embed") is not None and has_patch_embedding(module):
            hook = partial(_record_embedding, passes.setdefault(name, []))
            yield module.register_forward_pre_hook(guard(hook, 3), with_kwargs=True)
            continue
        if config is None:
            continue
        reads_images = hasattr(config, "patch_size") or getattr(config, "image_token_id", None) is not None
        if not reads_images or not hasattr(
            module, "main_input_name"
        ):  # the latter is a model of transformers
            continue
        if not {"pixel_values", "grid_thw"}.isdisjoint(_list_parameters(module)):
            hook = partial(_record_pass, passes.setdefault(name, []), pixels)
            yield module.register_forward_pre_hook(guard(hook, 3), with_kwargs=True)


def _record_embedding(
    passes: list[ImagePass], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add a forward pass of a model of timm."""
    images = [value for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0) == 4]
    if images:
        passes.append(ImagePass(read_grids(module, {"pixel_values": images[0]})))


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
    is_split = not is_text and get_family(module.config.model_type).patches == "blocks"
    try:
        found = ImagePass(read_grids(module.config, inputs), is_text, is_split)
    except RegardError as error:  # raised if the images are asked for
        found = ImagePass([], is_text, is_split, str(error))
    passes.append(found)


def find_passes(passes: ImagePasses, module: str) -> list[ImagePass]:
    """Return the passes of the innermost model around a module that read images; none if there is no such model."""
    names = [name for name, own in passes.items() if own and (not name or module.startswith(f"{name}."))]
    return passes[max(names, key=len)] if names else []
