"""Read the patch grids of a model from its configuration and its inputs; nothing is derived from a number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.errors import ArgumentError, describe_argument
from regard.families import FAMILIES, get_family
from regard.images.patch_grid import PatchGrid
from regard.validation import as_array

OPERATION = "read_grids"
Grids = list[list[PatchGrid]]


def read_grids(config: Any, inputs: Mapping[str, Any] | None = None) -> Grids:
    """Read where the patches of each image are among the tokens that a model's attention reads.

    Supported are ViT, DeiT, DINOv2 (with registers, too), DINOv3, CLIP, SigLIP and SigLIP 2, and the language models of
    Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, PaliGemma and Gemma 3. The vision models of these have grids of their own:
    pass `config.vision_config`. Models of timm with one size of patches and class tokens or registers before them, such
    as `VisionTransformer`, `Beit` and `Eva`, are read from their patch embedding. For another model, build a
    `PatchGrid` yourself.

    Args:
        config: Configuration of the model, or the model; for timm, the model. A configuration with `vision_config` and
            `image_token_id` means the language model.
        inputs: What the processor returned. For a language model `input_ids`, with `image_grid_thw` or `pixel_values`;
            for SigLIP 2 `spatial_shapes`. For other vision models, the size of `pixel_values` replaces the image size
            of the configuration.

    Returns:
        `grids[entry]` lists the images of a batch entry in order. Vision models read one image in each entry; those of
        Qwen2-VL and Qwen3-VL attend within each image, so there an entry is an image.

    Raises:
        ArgumentError: If the model is not one of these, an input is missing, or the number of image tokens is not the
            number of patches.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(model_type="dinov3_vit", image_size=56, patch_size=14, num_register_tokens=4)
    >>> print(read_grids(config)[0][0])
    4 × 4 patches, 5 tokens before
    """
    inputs = {} if inputs is None else inputs
    if has_patch_embedding(config):
        return _read_embedding(config, inputs)
    config = getattr(config, "config", config)
    model_type = getattr(config, "model_type", None)
    if getattr(config, "vision_config", None) is not None:
        return _place_images(config, inputs)
    patches = get_family(model_type).patches
    if patches == "fixed":
        return _read_fixed(config, inputs)
    if patches == "blocks":
        block = int(config.spatial_merge_size)
        return [
            [PatchGrid(rows, columns, block=block)] for rows, columns in _read_sizes(inputs, "image_grid_thw")
        ]
    if patches == "padded":
        sizes, length = _read_sizes(inputs, "spatial_shapes"), _shape_of(inputs, "pixel_values")[1]
        return [[PatchGrid(rows, columns).extend(length)] for rows, columns in sizes]
    known = ", ".join(name for name, family in FAMILIES.items() if family.patches)
    raise _unknown(f"model_type={model_type!r}", f"a vision model of {known}")


def _unknown(received: str, expected: str) -> ArgumentError:
    return ArgumentError(
        OPERATION,
        received=f"a configuration with {received}",
        expected=expected,
        hint="State the grid yourself: regard.images.PatchGrid(rows, columns, before=…, after=…).",
    )


# Vision models


def has_patch_embedding(model: Any) -> bool:
    """Return whether a model says in the terms of timm how it makes tokens of an image."""
    embedding = getattr(model, "patch_embed", None)
    return isinstance(getattr(model, "num_prefix_tokens", None), int) and hasattr(
        embedding, "dynamic_feat_size"
    )


def _read_embedding(model: Any, inputs: Mapping[str, Any]) -> Grids:
    """Return the grid of a model of timm, one for each batch entry."""
    embedding = model.patch_embed
    batch, size = 1, embedding.grid_size
    if inputs.get("pixel_values") is not None:
        batch, _, *pixels = _shape_of(inputs, "pixel_values")
        size = embedding.dynamic_feat_size(tuple(pixels))
    tokens = {"class": "cls_token", "distillation": "dist_token"}
    names = tuple(name for name, attribute in tokens.items() if getattr(model, attribute, None) is not None)
    before = model.num_prefix_tokens
    names += tuple(f"register {i + 1}" for i in range(before - len(names)))
    rows, columns = map(int, size)
    return [[PatchGrid(rows, columns, before=before, names=names)] for _ in range(batch)]


def _read_fixed(config: Any, inputs: Mapping[str, Any]) -> Grids:
    """Return the grid of images that all have the same size, one for each batch entry."""
    names = get_family(config.model_type).patch_tokens
    names += tuple(f"register {i + 1}" for i in range(getattr(config, "num_register_tokens", 0) or 0))
    batch, *size = (1, *_pair(config.image_size))
    if inputs.get("pixel_values") is not None:
        batch, _, *size = _shape_of(inputs, "pixel_values")
    rows, columns = (edge // patch for edge, patch in zip(size, _pair(config.patch_size), strict=True))
    return [[PatchGrid(rows, columns, before=len(names), names=names)] for _ in range(batch)]


def _pair(size: Any) -> tuple[int, int]:
    """Return (height, width) of a size that may be one number."""
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _shape_of(inputs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(map(int, _require(inputs, name).shape))


def _require(inputs: Mapping[str, Any], name: str) -> Any:
    if inputs.get(name) is None:
        present = ", ".join(sorted(inputs)) or "none"
        raise ArgumentError(
            OPERATION,
            received=f"inputs without {name} (present: {present})",
            expected=f"{name}, as the processor returned it",
            hint="Pass the complete output of the processor: read_grids(model.config, inputs).",
        )
    return inputs[name]


def _read_sizes(inputs: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    """Return rows and columns of each image from an input of (images, 2), or of (images, 3) with frames first."""
    sizes = as_array(_require(inputs, name), OPERATION, name)
    if sizes.ndim != 2 or sizes.shape[1] not in (2, 3):
        raise ArgumentError(
            OPERATION,
            received=f"{name} as {describe_argument(sizes)}",
            expected="one row for each image: (frames, rows, columns) or (rows, columns)",
            hint="Pass it as the processor returned it.",
        )
    if sizes.shape[1] == 3 and (sizes[:, 0] != 1).any():
        raise ArgumentError(
            OPERATION,
            received=f"{name} with {int(sizes[:, 0].max())} frames",
            expected="images with one frame",
            hint="Pages do not support video. Pass one frame as an image.",
        )
    return [(int(rows), int(columns)) for rows, columns in sizes[:, -2:]]


# Language models


def _image_grids(config: Any, inputs: Mapping[str, Any]) -> list[PatchGrid]:
    """Return the grid of each image in the language model, as if nothing were beside it."""
    vision, family = config.vision_config, get_family(config.model_type)
    if family.image_sizes == "image_grid_thw":
        merge = int(vision.spatial_merge_size)
        return [
            PatchGrid(rows // merge, columns // merge)
            for rows, columns in _read_sizes(inputs, "image_grid_thw")
        ]
    if family.image_sizes is None or get_family(vision.model_type).patches != "fixed":
        known = ", ".join(name for name, family in FAMILIES.items() if family.image_sizes)
        raise _unknown(
            f"model_type={config.model_type!r} and a vision model of {vision.model_type!r}",
            f"a language model of {known}",
        )
    _require(inputs, "pixel_values")
    grids = [grid for [grid] in _read_fixed(vision, inputs)]
    if family.pools_images:
        edge = math.isqrt(config.mm_tokens_per_image)
        return [PatchGrid(edge, edge) for _ in grids]
    return [PatchGrid(grid.rows, grid.columns) for grid in grids]  # without the class token


def _place_images(config: Any, inputs: Mapping[str, Any]) -> Grids:
    """Give each image its tokens: a model fills the image tokens of all batch entries in the order of the images."""
    if getattr(config, "image_token_id", None) is None:
        raise _unknown(
            f"model_type={config.model_type!r}, whose text has no image tokens",
            "a vision model, or a language model with image tokens",
        )
    ids = np.atleast_2d(as_array(_require(inputs, "input_ids"), OPERATION, "input_ids"))
    grids, length = _image_grids(config, inputs), ids.shape[1]
    tokens = ids == config.image_token_id
    found, wanted = int(tokens.sum()), sum(grid.num_patches for grid in grids)
    if found != wanted:
        sizes = ", ".join(f"{grid.rows} × {grid.columns}" for grid in grids)
        raise ArgumentError(
            OPERATION,
            received=f"{found} image tokens in input_ids for {wanted} patches ({sizes})",
            expected="one image token for each patch",
            hint=f"Image tokens have the id {config.image_token_id}. Pass the processor's output unchanged.",
        )
    placed: Grids = []
    left = list(grids)
    for row in tokens:
        positions, start = np.flatnonzero(row), 0
        placed.append([])
        while start < len(positions):
            grid = left.pop(0)
            own = positions[start : start + grid.num_patches]
            if len(own) < grid.num_patches or own[-1] - own[0] + 1 != grid.num_patches:
                raise ArgumentError(
                    OPERATION,
                    received=f"an image of {grid} whose tokens are not consecutive in input_ids",
                    expected="consecutive tokens for each image, in one batch entry",
                    hint="Pass the processor's output unchanged.",
                )
            start += grid.num_patches
            placed[-1].append(replace(grid, before=int(own[0])).extend(length))
    return placed
