"""Collect what the page of attention over images shows: the layers that read them, and where their patches are."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from regard.capture.call import LayerCall
from regard.capture.image_passes import ImagePasses
from regard.errors import (
    ArgumentError,
    ArgumentTypeError,
    IndexOutOfRangeError,
    RegardError,
    describe_argument,
)
from regard.images.patch_grid import PatchGrid
from regard.images.pixels import load_pixels
from regard.lens.find import select_batch_entry
from regard.lens.layer_images import LayerImages, find_layer_images
from regard.lens.page_data import OPERATION, select_calls
from regard.lens.token_rows import TokenRows, as_token_lists, fit_tokens, token_count_error
from regard.pages.html import Page
from regard.pages.picture_page import Picture, PictureLayer, build_picture_page

MAX_BYTES = 10_000_000  # of a page, by default


def build_image_page(
    layer_calls: Sequence[LayerCall],
    passes: ImagePasses,
    *,
    image: Any,
    grid: PatchGrid | Sequence[PatchGrid] | None,
    tokens: Any,
    batch: int,
    layers: str | Sequence[str] | None,
    heads: Sequence[int] | None,
    title: str | None,
    max_bytes: int | None,
) -> Page:
    """Build the page that `Recording.page` returns for an image.

    Args:
        layer_calls: The calls of the recording.
        passes: The images that the model read.
        image: One image, or a list of all images of the batch entry.
        grid: One grid, or one for each image; None for those that were recorded.
        tokens: Tokens of the sequence, or None.
        batch: The batch entry to show.
        layers: Names of modules or patterns; None for all.
        heads: The heads to show; None for all.
        title: Title of the page.
        max_bytes: Largest size of the page.

    Returns:
        The page.

    Raises:
        ArgumentError: If no layer reads an image, the grid does not fit, or the number of images is wrong.
        IndexOutOfRangeError: If there is no such head or batch entry.
    """
    pictures = _load_pictures(image)
    selected = select_calls(layer_calls, layers)
    notes: list[str] = []
    if grid is None:
        found = _find_recorded(selected, passes, batch, notes)
    else:
        found = _apply_grids(selected, [grid] if isinstance(grid, PatchGrid) else list(grid), batch)
    count = 1 + max(number for images in found for number in images.grids)
    if count != len(pictures):
        raise ArgumentError(
            OPERATION,
            received=f"{len(pictures)} image{'s' * (len(pictures) != 1)} for batch entry {batch}, which has {count}",
            expected=f"{count}, in the order in which the processor was given them",
            hint="Pass a list, image=[first, second], or choose another batch entry with batch=.",
        )
    shown = _build_layers(found, tokens, heads)
    return build_picture_page(
        shown,
        pictures,
        title=title or "Attention over an image",
        notes=notes,
        max_bytes=MAX_BYTES if max_bytes is None else max_bytes,
        operation=OPERATION,
    )


def _load_pictures(image: Any) -> list[Picture]:
    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise ArgumentError(
            OPERATION,
            received="an empty list of images",
            expected="the images of the batch entry",
            hint="Pass image=path, or image=[first, second].",
        )
    pictures = []
    for number, given in enumerate(images):
        is_path = isinstance(given, str | os.PathLike)
        name = (
            os.path.basename(os.fspath(given))
            if is_path
            else f"image {number}"
            if len(images) > 1
            else "image"
        )
        pictures.append(Picture(os.fsdecode(name), load_pixels(given, OPERATION)))
    return pictures


def _find_recorded(
    selected: Sequence[LayerCall], passes: ImagePasses, batch: int, notes: list[str]
) -> list[LayerImages]:
    """Return the layers whose grids were recorded; those of models without images are omitted, and a note says so."""
    by_module: dict[str, list[LayerCall]] = {}
    for entry in selected:
        by_module.setdefault(entry.module, []).append(entry)
    found: list[LayerImages] = []
    refused: list[RegardError] = []
    for calls in by_module.values():
        try:
            found += find_layer_images(calls, passes, batch, OPERATION)
        except (ArgumentError, KeyError) as error:
            refused.append(error)  # type: ignore[arg-type]  # NotCapturedError is a KeyError
    found = [images for images in found if images.grids]
    if not found:
        if refused:
            raise refused[0]
        raise ArgumentError(
            OPERATION,
            received=f"an image for batch entry {batch}, which has none",
            expected="a batch entry with an image",
            hint="Choose another one with batch=.",
        )
    if refused:
        names = {error.received.split(",")[0] for error in refused}
        notes.append(
            f"{len(names)} layers are not shown: they read no image, or their patch grid is unknown."
        )
    return found


def _apply_grids(selected: Sequence[LayerCall], grids: list[PatchGrid], batch: int) -> list[LayerImages]:
    """Return the layers that have as many keys as the grids that the caller stated."""
    wrong = [grid for grid in grids if not isinstance(grid, PatchGrid)]
    if wrong or not grids:
        raise ArgumentTypeError(
            OPERATION,
            received=f"grid as {describe_argument(wrong[0]) if wrong else 'an empty list'}",
            expected="a regard.images.PatchGrid, or one for each image",
            hint="regard.images.read_grids(model.config, inputs)[batch] lists those of a batch entry.",
        )
    fitting = [entry for entry in selected if all(entry.call.shape[-1] == grid.length for grid in grids)]
    if not fitting:
        keys = sorted({entry.call.shape[-1] for entry in selected})
        raise ArgumentError(
            OPERATION,
            received=f"a grid of {grids[0].length} tokens ({grids[0]}) "
            f"for layers of {' or '.join(map(str, keys))} keys",
            expected="a layer with one key for each token of the grid",
            hint="Count the class token, registers, text and padding as before= or after=.",
        )
    return [LayerImages(entry, batch, dict(enumerate(grids))) for entry in fitting]


def _fit_tokens(tokens: list[list[Any]] | None, batch: int, entry: int, length: int) -> list[Any] | None:
    """Return the tokens of a batch entry, None if their number does not fit."""
    fitted = None if tokens is None else fit_tokens(tokens, batch, length)
    return None if fitted is None else fitted[entry]


def _build_layers(
    found: Sequence[LayerImages], tokens: Any, heads: Sequence[int] | None
) -> list[PictureLayer]:
    token_lists = None if tokens is None else as_token_lists(tokens, OPERATION)
    shown, has_tokens = [], False
    for (layer, module, _, call), entry, grids, is_vision in found:
        matrix = select_batch_entry(call, entry, OPERATION)
        q_len, kv_len = call.shape[-2:]
        all_heads = range(call.shape[-3] if len(call.shape) > 2 else 1)
        chosen = list(all_heads) if heads is None else [head for head in heads if head in all_heads]
        if not chosen:
            continue
        first = TokenRows.from_call(call).query_offset
        if is_vision and q_len != kv_len:  # a pooling head, whose query looks like the last token of a text
            first = None
        batch_size = math.prod(call.shape[:-3])
        key_tokens, query_tokens = (
            _fit_tokens(token_lists, batch_size, entry, length) for length in (kv_len, q_len)
        )
        has_tokens = has_tokens or key_tokens is not None or query_tokens is not None
        shown.append(
            PictureLayer(
                module=module,
                layer=layer,
                shape=(q_len, kv_len),
                heads=chosen,
                first=first,
                grids=grids,
                is_split=len(grids) == 1 and sum(other.layer_call.module == module for other in found) > 1,
                key_tokens=key_tokens,
                query_tokens=query_tokens if first is None else None,
                matrix=matrix,
                head_dim=int(call.query.shape[-1]),
                groups=call.groups,
            )
        )
    if not shown:
        raise IndexOutOfRangeError(
            OPERATION,
            received=f"heads={list(heads or ())}",
            expected=f"numbers from 0 to {max(images.layer_call.call.shape[-3] for images in found) - 1}",
            hint="Heads are counted from 0.",
        )
    if token_lists is not None and not has_tokens:
        raise token_count_error(OPERATION, token_lists, {layer.shape[1] for layer in shown})
    return shown
