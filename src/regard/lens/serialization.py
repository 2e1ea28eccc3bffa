"""Write calls to a file and read them: arrays as safetensors, the rest as JSON in the header. Nothing is pickled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from regard.capture.cache_store import CacheFault
from regard.capture.call import Call
from regard.capture.compact_mask import CompactMask
from regard.capture.module_hints import ImagePass, ImagePasses, ImageRuns
from regard.capture.module_trace import MAX_ROWS, ModuleEvent, find_token_axis
from regard.errors import ArgumentError
from regard.measures import TopKResult
from regard.score_mods import AlibiMod, BiasMod, RelativeBiasMod, ScoreMod, SoftcapMod

MAX_LENGTH = 1 << 40  # of an axis
TEXTS = ("name", "layer_class", "kernel", "speculative_mode")
FLAGS = ("is_causal", "is_broadcast", "training")
COUNTS = ("query_offset", "steps", "prompt_len", "forward_pass")


class HeaderError(ValueError):
    """A part of a header that `recording.save` cannot have written."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise HeaderError(problem)


def check_call(call: Call) -> None:
    """Check the types and shapes of a call."""
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
    for name, bounds in (("visible_keys", (*shape[:-2], shape[-1])), ("dense_mask", shape)):
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
    """Check the types and shapes of a call of a module."""
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
    """Check what a header says about modules, caches and images."""
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


Tensor = Any  # the types of torch are not followed

FORMAT = "regard.lens 1"
# Fields of a call that are written as JSON, and as arrays.
_JSON_FIELDS = (
    "name",
    "layer_class",
    "scale",
    "kernel",
    "dropout_p",
    "is_causal",
    "is_broadcast",
    "training",
    "query_offset",
    "steps",
    "prompt_len",
    "forward_pass",
    "speculative_mode",
)
_EVENT_FIELDS = (
    "name",
    "index",
    "class_name",
    "num_parts",
    "is_input_finite",
    "is_output_finite",
    "has_weights",
)
_EVENT_ARRAYS, _EVENT_SHAPES = ("input", "output", "ids"), ("input_shape", "output_shape")
_ARRAY_FIELDS = ("query", "key", "lse", "value", "output", "sink", "weights")
# Entries of a mask that is evaluated in tiles, and written as an array.
MAX_MASK_ENTRIES = 1 << 28
_MASK_FIELDS = ("start", "stop", "visible_keys", "uniform_keys", "dense_mask")


class RecordingWriter:
    """Collects the arrays of calls by name, and encodes the rest for JSON. Arrays that calls share are stored once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}

    def add_array(self, array: Any, name: str) -> str | None:
        """Add an array, and return the name it is stored under; None for None."""
        if array is None:
            return None
        tensor = torch.as_tensor(array).detach()
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        # Arrays of NumPy may be temporary, and their memory used again.
        may_be_shared = isinstance(array, torch.Tensor)
        if may_be_shared and identity in self._names:
            return self._names[identity]
        self.arrays[name] = tensor.cpu().contiguous().clone()
        if may_be_shared:
            self._names[identity] = name
        return name

    def encode_score_mod(self, mod: ScoreMod | None, name: str) -> Any:
        """Encode a score modification."""
        if mod is None:
            return None
        if isinstance(mod, SoftcapMod):
            return {"kind": "softcap", "cap": mod.cap}
        if isinstance(mod, BiasMod):
            return {"kind": "bias", "array": self.add_array(mod.array, name)}
        if isinstance(mod, AlibiMod):
            slopes = None if mod.slopes is None else mod.slopes.tolist()
            return {"kind": "alibi", "slopes": slopes, "align": mod.align}
        if isinstance(mod, RelativeBiasMod):
            return {
                "kind": "relative_bias",
                "table": self.add_array(mod.table, name),
                "bidirectional": mod.bidirectional,
                "max_distance": mod.max_distance,
                "align": mod.align,
            }
        raise _cannot_write(
            f"the score modification {mod!r}",
            "regard.score_mods.bias(array) has the same effect, and can be written.",
        )

    def encode_result(self, result: Any, name: str) -> Any:
        """Encode a result of a measure: an array, or the pair that `TopK` returns."""
        if isinstance(result, TopKResult):
            names = [self.add_array(array, f"{name}.{i}") for i, array in enumerate(result)]
            return {"kind": "top", "arrays": names}
        if isinstance(result, torch.Tensor | np.ndarray):
            return {"kind": "array", "arrays": [self.add_array(result, name)]}
        raise _cannot_write(
            f"{name.split('.')[-1]!r}, a measure that returned a {type(result).__name__}",
            "Let its finish return an array, or write recording.calls(name)[0].measures yourself.",
        )

    def encode_call(self, call: Call, name: str) -> dict[str, Any]:
        """Encode a call; its arrays are stored under names that begin with `name`."""
        record = {field: getattr(call, field) for field in _JSON_FIELDS}
        record |= {field: self.add_array(getattr(call, field), f"{name}.{field}") for field in _ARRAY_FIELDS}
        record |= {"stored_shape": list(call.stored_shape)}
        record["softcap"] = self.encode_score_mod(call.softcap, f"{name}.softcap")
        mask = _store_tiled_mask(call)
        record["compact_mask"] = {
            field: self.add_array(_make_writable(getattr(mask, field)), f"{name}.{field}")
            for field in _MASK_FIELDS
        } | {"bias": self.encode_score_mod(mask.bias, f"{name}.bias")}
        record["mask"] = None if call.query is None else repr(call.mask)  # for reading the file by eye
        if call.measures is not None:
            record["measures"] = {
                measure: self.encode_result(result, f"{name}.{measure}")
                for measure, result in call.measures.items()
            }
        return record

    def encode_event(self, event: ModuleEvent, name: str) -> dict[str, Any]:
        """Encode a call of a module; its arrays are stored under names that begin with `name`."""
        record = {field: getattr(event, field) for field in _EVENT_FIELDS}
        record |= {field: self.add_array(getattr(event, field), f"{name}.{field}") for field in _EVENT_ARRAYS}
        return record | {field: list(getattr(event, field)) for field in _EVENT_SHAPES}


def _store_tiled_mask(call: Call) -> CompactMask:
    """Return the mask of a call; one that is evaluated in tiles becomes an array."""
    mask, tiled = call.compact_mask, call.compact_mask.tiled_mask
    if call.edits is not None and call.weights is None and call.query is not None:
        added = call.edits.edit_score_mods(())
        if added:
            raise _cannot_write(
                f"the edit of the scores by {added[0]!r}", "Record measures, or save before it."
            )
        tiled = call.mask
    if tiled is None:
        return mask
    entries = math.prod(call.shape)
    if entries > MAX_MASK_ENTRIES:
        raise _cannot_write(
            f"the mask {tiled!r} of {entries:,} entries",
            f"Up to {MAX_MASK_ENTRIES:,} entries are written. Record measures instead: watch(model, measures=…).",
        )
    dense_mask = torch.from_numpy(tiled.to_dense(*call.shape))
    start, stop = np.zeros_like(mask.start), np.full_like(mask.stop, call.shape[-1])
    return CompactMask(start, stop, dense_mask=dense_mask, bias=mask.bias)


def _make_writable(array: Any) -> Any:
    """Copy a NumPy array, which may be read-only; torch warns about those."""
    return array.copy() if isinstance(array, np.ndarray) else array


def _cannot_write(received: str, hint: str) -> ArgumentError:
    return ArgumentError(
        "recording.save",
        received=received,
        expected="arrays, and masks and score modifications of regard",
        hint=hint,
    )


def write_calls(
    path: str | Path,
    calls: Sequence[Call],
    causal: dict[str, bool],
    cache_faults: Mapping[str, Sequence[CacheFault]],
    image_runs: Sequence[ImageRuns] = (),
    image_passes: Mapping[str, Sequence[ImagePass]] | None = None,
    events: Sequence[ModuleEvent] = (),
) -> None:
    """Write calls to a file."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("recording.save: safetensors is not installed. pip install 'regard[hf]'") from error
    writer = RecordingWriter()
    records = [writer.encode_call(call, str(i)) for i, call in enumerate(calls)]
    header = json.dumps(
        {
            "format": FORMAT,
            "causal": causal,
            "cache_faults": cache_faults,
            "image_runs": list(image_runs),
            "image_passes": {
                name: [image_pass.to_record() for image_pass in own]
                for name, own in (image_passes or {}).items()
            },
            "calls": records,
            "events": [writer.encode_event(event, f"event {i}") for i, event in enumerate(events)],
        },
        ensure_ascii=False,
        allow_nan=False,
    )
    save_file(writer.arrays, str(path), metadata={"regard": header})


class RecordingReader:
    """Decodes what `RecordingWriter` encoded."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self.arrays = arrays

    def get_array(self, name: str | None) -> Tensor:
        """Return an array by the name it is stored under; None for None."""
        return None if name is None else self.arrays[name]

    def decode_score_mod(self, record: Any) -> ScoreMod | None:
        """Decode a score modification."""
        if record is None:
            return None
        decoders: dict[str, Callable[..., ScoreMod]] = {
            "softcap": lambda: SoftcapMod(record["cap"]),
            "bias": lambda: BiasMod(self.arrays[record["array"]]),
            "alibi": lambda: AlibiMod(
                None if record["slopes"] is None else np.array(record["slopes"]), record["align"]
            ),
            "relative_bias": lambda: RelativeBiasMod(
                self.arrays[record["table"]],
                record["bidirectional"],
                record["max_distance"],
                record["align"],
            ),
        }
        return decoders[record["kind"]]()

    def decode_result(self, record: Any) -> Any:
        """Decode a result of a measure."""
        arrays = [self.get_array(name) for name in record["arrays"]]
        return TopKResult(*arrays) if record["kind"] == "top" else arrays[0]

    def decode_call(self, record: dict[str, Any]) -> Call:
        """Decode a call."""
        mask = record["compact_mask"]
        parts = {field: self.get_array(mask[field]) for field in _MASK_FIELDS}
        numpy_parts: dict[str, Any] = {
            field: None if array is None else array.numpy()
            for field, array in parts.items()
            if field != "dense_mask"
        }
        measures = record.get("measures")
        return Call(
            compact_mask=CompactMask(
                **numpy_parts, dense_mask=parts["dense_mask"], bias=self.decode_score_mod(mask["bias"])
            ),
            softcap=self.decode_score_mod(record["softcap"]),
            stored_shape=tuple(record["stored_shape"]),
            measures=None
            if measures is None
            else {name: self.decode_result(result) for name, result in measures.items()},
            **{field: record[field] for field in _JSON_FIELDS if field in record},
            **{field: self.get_array(record.get(field)) for field in _ARRAY_FIELDS},
        )

    def decode_event(self, record: dict[str, Any]) -> ModuleEvent:
        """Decode a call of a module."""
        fields = {field: record[field] for field in _EVENT_FIELDS}
        fields |= {field: self.get_array(record[field]) for field in _EVENT_ARRAYS}
        fields |= {field: tuple(record[field]) for field in _EVENT_SHAPES}
        return ModuleEvent(**fields)


class SavedCalls(NamedTuple):
    """What a file holds.

    Args:
        calls: The calls in order.
        causal: `is_causal` of the modules by name.
        cache_faults: The faults of caches by name.
        image_runs: The images of each forward pass.
        image_passes: The patch grids of the models that read images, by name.
        events: The calls of all modules in the first pass; empty if they were not recorded.
    """

    calls: list[Call]
    causal: dict[str, bool]
    cache_faults: dict[str, list[CacheFault]]
    image_runs: list[ImageRuns]
    image_passes: ImagePasses
    events: list[ModuleEvent]


def read_calls(path: str | Path) -> SavedCalls:
    """Read the calls of a file that `write_calls` wrote."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get("regard", "{}")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise _cannot_read(path, f"which is not a safetensors file ({error})") from None
    try:
        return _decode_header(json.loads(text), RecordingReader(arrays))
    except _WrongFormatError as error:
        raise _cannot_read(path, f"a file of format {str(error)[:80]}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
        raise _cannot_read(path, f"a recording whose header is damaged ({problem})") from error


class _WrongFormatError(Exception):
    """The format of a file that `write_calls` did not write."""


def _decode_header(header: Any, reader: RecordingReader) -> SavedCalls:
    """Decode the header of a file and check it; a damaged one raises an error of any type."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise _WrongFormatError(repr(header.get("format") if isinstance(header, dict) else header))
    cache_faults = {
        name: [CacheFault(*fault) for fault in faults]
        for name, faults in header.get("cache_faults", {}).items()
    }
    calls = [reader.decode_call(record) for record in header["calls"]]
    for call in calls:
        check_call(call)
    image_passes = {
        name: [ImagePass.from_record(record) for record in records]
        for name, records in header.get("image_passes", {}).items()
    }
    causal, image_runs = header["causal"], header.get("image_runs", [])
    check_hints(causal, cache_faults, image_runs)
    events = [reader.decode_event(record) for record in header.get("events", [])]
    for event in events:
        check_event(event)
    return SavedCalls(calls, causal, cache_faults, image_runs, image_passes, events)


def _cannot_read(path: str | Path, received: str) -> ArgumentError:
    return ArgumentError(
        "load_recording",
        received=f"{Path(path).name!r}, {received}",
        expected=f"a file that recording.save wrote ({FORMAT})",
        hint="recording.save(path) writes one. To load model weights, use the library that saved them.",
    )
