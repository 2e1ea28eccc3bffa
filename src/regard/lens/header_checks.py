"""Check what a saved recording says about itself, so that a damaged or hostile file is refused when it is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.capture.cache_joining import CacheFault
from regard.capture.call import Call
from regard.capture.module_trace import MAX_ROWS, ModuleEvent, find_token_axis

MAX_LENGTH = 1 << 40  # of an axis
TEXTS = ("name", "layer_class", "kernel", "speculative_mode")
FLAGS = ("is_causal", "is_broadcast", "training")
COUNTS = ("query_offset", "steps", "prompt_len")


class HeaderError(ValueError):
    """A part of a header that `recording.save` cannot have written."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise HeaderError(problem)


def check_call(call: Call) -> None:
    """Check the types and shapes of a call.

    Args:
        call: A call as it was decoded.

    Raises:
        HeaderError: If a field has another type, or an array another shape than the matrix allows.
    """
    for names, is_valid in (
        (TEXTS, lambda value: isinstance(value, str)),
        (FLAGS, lambda value: isinstance(value, bool)),
        (COUNTS, lambda value: type(value) is int and 0 <= value < MAX_LENGTH),
        (("scale", "dropout_p"), _is_number),
    ):
        _check_fields(call, names, is_valid)
    if call.query is None or call.key is None:
        _require(call.query is call.key and call.measures is not None, "query without key")
    else:
        _check_vectors(call)
    shape = call.shape
    is_shape = all(type(length) is int and 0 <= length < MAX_LENGTH for length in shape)
    _require(len(shape) >= 2 and is_shape, f"shape {shape}")
    mask = call.compact_mask
    for name, limit in (("start", shape[-1]), ("stop", shape[-1]), ("uniform_keys", MAX_LENGTH)):
        array = getattr(mask, name)
        if array is None and name == "uniform_keys":
            continue
        _require(isinstance(array, np.ndarray) and array.dtype.kind == "i", f"{name} of another type")
        _check_broadcast(array, shape[:-1], name)
        _require(not array.size or (array.min() >= 0 and array.max() <= limit), f"{name} outside the keys")
    for name, bounds in (("visible_keys", (*shape[:-3], shape[-1])), ("dense_mask", shape)):
        array = getattr(mask, name)
        if array is not None:
            _require(str(array.dtype).endswith("bool"), f"{name} of another type")
            _check_broadcast(array, bounds, name)
    for name, bounds in (("lse", shape[:-1]), ("weights", shape)):
        array = getattr(call, name)
        if array is not None:
            _require(array.dtype.is_floating_point, f"{name} of another type")
            _require(tuple(array.shape) == tuple(bounds), f"{name} of shape {tuple(array.shape)}")


def _check_fields(call: Call, names: tuple[str, ...], is_valid: Callable[[Any], bool]) -> None:
    for name in names:
        _require(is_valid(getattr(call, name)), f"{name} {str(getattr(call, name))[:40]!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_vectors(call: Call) -> None:
    """Check query, key and what has their length."""
    query, key = call.query, call.key
    for name, array in (("query", query), ("key", key), ("value", call.value), ("output", call.output)):
        if array is not None:
            _require(array.dtype.is_floating_point and array.ndim >= 2, f"{name} of another type or shape")
    _require(query.shape[-1] == key.shape[-1], "query and key of different widths")
    _require(query.dtype == key.dtype, "query and key of different types")
    if query.ndim > 2 < key.ndim:
        _require(key.shape[-3] > 0 and query.shape[-3] % key.shape[-3] == 0, "heads that keys do not divide")
    if call.value is not None:
        _require(call.value.shape[-2] == key.shape[-2], "values of another length")


def _check_broadcast(array: Any, shape: tuple[int, ...], name: str) -> None:
    """Check that an array broadcasts to a shape."""
    lengths = tuple(array.shape)
    fits = len(lengths) <= len(shape) and all(
        length in (1, bound) for length, bound in zip(lengths[::-1], shape[::-1], strict=False)
    )
    _require(fits, f"{name} of shape {lengths}")


def check_event(event: ModuleEvent) -> None:
    """Check the types and shapes of a call of a module.

    Args:
        event: The call as it was decoded.

    Raises:
        HeaderError: If a field has another type, or an array another shape.
    """
    for names, kind in (
        (("name", "class_name"), str),
        (("index", "num_parts"), int),
        (("is_input_finite", "is_output_finite", "has_weights"), bool),
    ):
        for name in names:
            _require(type(getattr(event, name)) is kind, f"{name} of a module of another type")
    for name in ("input", "output"):
        array, shape = getattr(event, name), getattr(event, f"{name}_shape")
        _require(all(type(length) is int and 0 <= length < MAX_LENGTH for length in shape), f"shape {shape}")
        if array is not None:
            _require(array.dtype.is_floating_point and len(shape) > 1, f"{name} of a module of another type")
            kept = list(shape)
            kept[find_token_axis(shape)] = min(shape[find_token_axis(shape)], MAX_ROWS)
            _require(list(array.shape) == kept, f"{name} of a module of shape {tuple(array.shape)}")
    if event.ids is not None:
        _require(not event.ids.dtype.is_floating_point, "ids of a module of another type")


def check_hints(causal: Any, cache_faults: dict[str, list[CacheFault]], image_runs: Any) -> None:
    """Check what a header says about modules, caches and images.

    Args:
        causal: `is_causal` of the modules by name.
        cache_faults: Faults of caches by name.
        image_runs: For each forward pass and batch entry, first token and end of each image.

    Raises:
        HeaderError: If a part has another type.
    """
    is_causal = isinstance(causal, dict) and all(isinstance(value, bool) for value in causal.values())
    _require(is_causal, "causal of another type")
    for fault in (fault for faults in cache_faults.values() for fault in faults):
        counts = (fault.call, fault.tokens, fault.added)
        is_fault = isinstance(fault.kind, str) and all(type(count) is int for count in counts)
        _require(is_fault, "a fault of another type")
    _require(isinstance(image_runs, list), "images of another type")
    runs = [run for passes in image_runs for entry in passes for run in entry]
    _require(
        all(len(run) == 2 and all(type(end) is int for end in run) for run in runs), "images of another type"
    )
