"""Read images as pixels: files, Pillow images, arrays, and what a processor made of them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from regard.errors import ArgumentError, ArgumentTypeError, describe_argument
from regard.types import Array
from regard.validation import as_array

ACCEPTED = "a path, a Pillow image, or an array of (height, width, 3) with bytes, or numbers from 0 to 1"


def load_pixels(image: Any, operation: str = "load_pixels") -> Array:
    """Return an image as an array of bytes.

    Args:
        image: Path of an image file, a Pillow image, or an array or a tensor of (height, width), (height, width,
            channels) or (channels, height, width), with 1, 3 or 4 channels. Integers go from 0 to 255, other numbers
            from 0 to 1. Of a file, the orientation that its camera stored is applied. A fourth channel is dropped.
        operation: Name of the calling function, for error messages.

    Returns:
        (height, width, 3), uint8, red, green and blue.

    Raises:
        ArgumentError: If the file cannot be read, or an array has another shape or other numbers.
        ArgumentTypeError: If `image` is of another type.
        ImportError: If a file is to be read, and Pillow is not installed.

    >>> import numpy as np
    >>> load_pixels(np.array([[0.0, 1.0]])).tolist()
    [[[0, 0, 0], [255, 255, 255]]]
    """
    if isinstance(image, str | os.PathLike):
        return _read_file(image, operation)
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # a Pillow image
        return np.asarray(image.convert("RGB"), np.uint8)
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        raise ArgumentTypeError(
            operation,
            received=f"image as {describe_argument(image)}",
            expected=ACCEPTED,
            hint="Pass the image that you passed to the processor.",
        )
    array = as_array(image.detach() if hasattr(image, "detach") else image, operation, "image")
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or not array.size:
        raise ArgumentError(
            operation,
            received=f"image as {describe_argument(image)}",
            expected=ACCEPTED,
            hint="Pass one image; for a batch, image[0].",
        )
    array = np.broadcast_to(array[..., :3], (*array.shape[:2], 3))
    return np.ascontiguousarray(_to_bytes(array, operation))


def _to_bytes(array: Array, operation: str) -> Array:
    is_float = array.dtype.kind == "f"
    largest = 1 if is_float or array.dtype == bool else 255
    low, high = (float(bound) for bound in (array.min(), array.max()))
    if not (low >= 0 and high <= largest):  # NaN, too
        raise ArgumentError(
            operation,
            received=f"image with numbers from {low:.4g} to {high:.4g} ({array.dtype})",
            expected="integers from 0 to 255, or floats from 0 to 1",
            hint="If it is the pixel_values of a processor, pass "
            "regard.images.undo_normalisation(pixel_values[0], processor).",
        )
    return np.round(array * (255 / largest)).astype(np.uint8) if largest == 1 else array.astype(np.uint8)


def _read_file(path: str | os.PathLike[str], operation: str) -> Array:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError(
            f"{operation}: Pillow, which reads images, is not installed. pip install pillow"
        ) from error
    try:
        with Image.open(path) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"), np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # An error of the file system has a text of its own; others, such as a damaged file, have their name.
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ArgumentError(
            operation,
            received=f"image={os.path.basename(path)!r}, which cannot be read ({reason})",
            expected="the path of an image that Pillow reads, such as PNG or JPEG",
            hint="Check the path, or pass the pixels as an array.",
        ) from None


def undo_normalisation(pixel_values: Any, processor: Any) -> Array:
    """Return the picture that a model saw: what its processor resized and cropped, before normalisation.

    Many processors crop, and a map belongs to the part that is left: CLIP's takes the square in the middle.

    Args:
        pixel_values: One image of the processor's output, (3, height, width): `inputs["pixel_values"][0]`.
        processor: The processor or image processor, with `image_mean` and `image_std`.

    Returns:
        (height, width, 3), uint8.

    Raises:
        ArgumentError: If `pixel_values` is not one image, or the processor has no mean and standard deviation.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> processor = SimpleNamespace(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    >>> undo_normalisation(np.full((3, 1, 2), 1.0), processor).tolist()
    [[[255, 255, 255], [255, 255, 255]]]
    """
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    values = pixel_values.detach() if hasattr(pixel_values, "detach") else pixel_values
    array = as_array(values, "undo_normalisation", "pixel_values")
    if mean is None or std is None or array.ndim != 3 or array.shape[0] != len(mean):
        raise ArgumentError(
            "undo_normalisation",
            received=f"pixel_values as {describe_argument(array)}, image_mean={mean}, image_std={std}",
            expected="one image of (channels, height, width), and a processor with image_mean and image_std",
            hint="Pass pixel_values[0] and the processor. If the processor does not crop, use the image itself.",
        )
    if getattr(processor, "do_normalize", True):
        array = array * np.reshape(std, (-1, 1, 1)) + np.reshape(mean, (-1, 1, 1))
    # Resampling overshoots at edges by a little.
    return load_pixels(np.clip(array.astype(np.float64), 0, 1), "undo_normalisation")


def shrink(pixels: Array, max_edge: int) -> Array:
    """Reduce an image by the mean of blocks of pixels, so that no edge is longer than `max_edge`.

    Args:
        pixels: (height, width, 3), uint8.
        max_edge: Largest height and width.

    Returns:
        The smaller image, or `pixels` if it is small enough; uint8.

    >>> shrink(np.arange(12, dtype=np.uint8).reshape(2, 2, 3), 1).tolist()
    [[[4, 6, 6]]]
    """
    edge = max(pixels.shape[:2])
    if edge <= max_edge:
        return pixels
    reduced = pixels.astype(np.float64)
    for axis in (0, 1):
        length = reduced.shape[axis]
        count = max(1, round(length * max_edge / edge))
        starts = np.arange(count) * length // count
        sizes = np.diff(starts, append=length).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        reduced = np.add.reduceat(reduced, starts, axis) / sizes
    return np.round(reduced).astype(np.uint8)
