"""Which tokens of a recorded call are patches of which image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from regard.capture.call import LayerCall
from regard.capture.image_passes import ImagePass, ImagePasses, find_passes
from regard.errors import ArgumentError, IndexOutOfRangeError, NotCapturedError
from regard.images.grid_reading import Grids
from regard.images.patch_grid import PatchGrid


class LayerImages(NamedTuple):
    """A call of a layer whose keys include patches.

    Args:
        layer_call: The call.
        entry: Batch entry of the call.
        grids: Images by their number in the batch entry of the model, each with its grid among the keys.
        is_vision: The layer belongs to a vision model, whose tokens all attend at once.
    """

    layer_call: LayerCall
    entry: int
    grids: dict[int, PatchGrid]
    is_vision: bool = False


def find_layer_images(
    calls: Sequence[LayerCall], passes: ImagePasses, batch: int, operation: str
) -> list[LayerImages]:
    """Find the images among the keys of a layer.

    Args:
        calls: All calls of the layer.
        passes: The images that the model read.
        batch: Batch entry of the model.
        operation: Name of the calling function, for error messages.

    Returns:
        One entry for a layer of a language model, and one for each image for a layer of a vision model.

    Raises:
        NotCapturedError: If the layer is no part of a model that reads images.
        ArgumentError: If the grids are unknown, do not fit the layer, or belong to several passes.
        IndexOutOfRangeError: If there is no such batch entry.
    """
    module = calls[0].module
    found = find_passes(passes, module)
    if not found:
        raise NotCapturedError(
            operation,
            received=f"{module!r}, which is no part of a model that read an image",
            expected="a layer of a vision model, or of a language model that reads images",
            hint="State the grid: page(image=…, grid=regard.images.PatchGrid(rows, columns, before=…)).",
        )
    if len(found) > 1:
        raise ArgumentError(
            operation,
            received=f"{len(found)} passes of {module!r} with images",
            expected="one pass",
            hint="Record each pass by itself: with regard.watch(model) as recording: model(**inputs).",
        )
    [image_pass] = found
    if image_pass.fault:
        raise ArgumentError(
            operation,
            received=f"{module!r}, whose patch grid is unknown: {image_pass.fault}",
            expected="a model whose grid can be read",
            hint="State the grid: page(image=…, grid=regard.images.PatchGrid(rows, columns, before=…)).",
        )
    if image_pass.is_text:
        _check_calls(calls, 1, operation)
        length = calls[0].call.shape[-1]
        grids = _entry_of(image_pass.grids, batch, operation)
        return [LayerImages(calls[0], batch, {i: grid.extend(length) for i, grid in enumerate(grids)})]
    _check_calls(calls, len(image_pass.grids) if image_pass.is_split else 1, operation)
    images = []
    for image, sequence in enumerate(_find_sequences(image_pass, passes, module, batch, operation)):
        layer_call = calls[sequence if image_pass.is_split else 0]
        [grid] = image_pass.grids[sequence]
        grid.check_length(layer_call.call.shape[-1], operation, f"keys of {module!r}")
        entry = 0 if image_pass.is_split else sequence
        images.append(LayerImages(layer_call, entry, {image: grid}, is_vision=True))
    return images


def _entry_of(grids: Grids, batch: int, operation: str) -> list[PatchGrid]:
    if not -len(grids) <= batch < len(grids):
        raise IndexOutOfRangeError(
            operation,
            received=f"batch={batch}",
            expected=f"one of {len(grids)} batch entries",
            hint="Batch entries are counted from 0.",
        )
    return grids[batch]


def _find_sequences(
    image_pass: ImagePass, passes: ImagePasses, module: str, batch: int, operation: str
) -> Sequence[int]:
    """Return which sequences of a vision model are the images of a batch entry of the model around it."""
    for name, around in passes.items():
        if len(around) == 1 and around[0].is_text and (not name or module.startswith(f"{name}.")):
            counts = [len(entry) for entry in around[0].grids]
            if sum(counts) == len(image_pass.grids):
                _entry_of(around[0].grids, batch, operation)
                first = sum(counts[: batch % len(counts)])
                return range(first, first + counts[batch])
    _entry_of(image_pass.grids, batch, operation)
    return [batch % len(image_pass.grids)]


def _check_calls(calls: Sequence[LayerCall], expected: int, operation: str) -> None:
    if len(calls) != expected:
        raise ArgumentError(
            operation,
            received=f"{len(calls)} calls of {calls[0].module!r} for {expected} read with images",
            expected="calls that belong to the images",
            hint="Record one pass by itself: with regard.watch(model) as recording: model(**inputs).",
        )
