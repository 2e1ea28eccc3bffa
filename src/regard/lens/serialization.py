"""What was seen, written to one file: arrays by safetensors, the rest as JSON in its header. Nothing that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import ArgumentError
from regard.lens.call import Call
from regard.lens.capture.mask_recognition import Rules
from regard.measures import Top
from regard.score_mods import AlibiMod, BiasMod, RelativeBiasMod, ScoreMod, SoftcapMod

Tensor = Any  # the types of torch are not followed

FORMAT = "regard.lens 1"
# The fields of a call by how they are written.
_PLAIN = (
    "name",
    "layer",
    "scale",
    "kernel",
    "dropout_p",
    "is_causal",
    "training",
    "first",
    "steps",
    "trying",
)
_ARRAYS = ("query", "key", "lse", "value", "output", "sink")


class _Writer:
    """Arrays under names of their own; an array that several calls share is written once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Tensor] = {}
        self._known: dict[Any, str] = {}

    def array(self, array: Any, name: str) -> str | None:
        if array is None:
            return None
        tensor = torch.as_tensor(array).detach()
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        shared = isinstance(
            array, torch.Tensor
        )  # others are made for the purpose, and their memory is used again
        if shared and same in self._known:
            return self._known[same]
        self.arrays[name] = tensor.cpu().contiguous().clone()
        if shared:
            self._known[same] = name
        return name

    def score_mod(self, mod: ScoreMod | None, name: str) -> Any:
        if mod is None:
            return None
        if isinstance(mod, SoftcapMod):
            return {"kind": "softcap", "cap": mod.cap}
        if isinstance(mod, BiasMod):
            return {"kind": "bias", "array": self.array(mod.array, name)}
        if isinstance(mod, AlibiMod):
            slopes = None if mod.slopes is None else np.asarray(mod.slopes).tolist()
            return {"kind": "alibi", "slopes": slopes, "align": mod.align}
        if isinstance(mod, RelativeBiasMod):
            table = self.array(mod.table, name)
            rest = {"bidirectional": mod.bidirectional, "max_distance": mod.max_distance, "align": mod.align}
            return {"kind": "relative_bias", "table": table, **rest}
        raise _refuse(
            f"the score modification {mod!r}", "regard.bias(array) has the same effect, and can be written."
        )

    def result(self, result: Any, name: str) -> Any:
        """A result of a measure: an array, or the pair that `TopK` gives."""
        if isinstance(result, Top):
            return {
                "kind": "top",
                "arrays": [self.array(each, f"{name}.{i}") for i, each in enumerate(result)],
            }
        if isinstance(result, torch.Tensor | np.ndarray):
            return {"kind": "array", "arrays": [self.array(result, name)]}
        raise _refuse(
            f"{name.split('.')[-1]!r}, a measure that gave a {type(result).__name__}",
            "Let its finish return an array, or take its result from recording.calls(name)[0].measured by hand.",
        )

    def rules(self, rules: Rules, name: str) -> dict[str, Any]:
        arrays = ("low", "high", "keys", "flat", "kept")
        parts = {each: self.array(_whole(getattr(rules, each)), f"{name}.{each}") for each in arrays}
        return {**parts, "added": self.score_mod(rules.added, f"{name}.added")}

    def call(self, call: Call, name: str) -> dict[str, Any]:
        written = {each: getattr(call, each) for each in _PLAIN}
        written |= {each: self.array(getattr(call, each), f"{name}.{each}") for each in _ARRAYS}
        written |= {"extent": list(call.extent), "softcap": self.score_mod(call.softcap, name)}
        written["rules"] = self.rules(call.rules, name)
        written["mask"] = None if call.query is None else repr(call.mask)  # for who reads the file by eye
        if call.measured is not None:
            parts = {each: self.result(got, f"{name}.{each}") for each, got in call.measured.items()}
            written["measured"] = parts
        return written


def _whole(array: Any) -> Any:
    """An array as torch takes it: its own memory, which may be written to."""
    return array.copy() if isinstance(array, np.ndarray) else array


def _refuse(what: str, hint: str) -> ArgumentError:
    return ArgumentError(
        "recording.save",
        received=what,
        expected="arrays, and masks and score modifications of regard",
        hint=hint,
    )


def save(layers: list[tuple[int, str, int, Call]], causal: dict[str, bool], path: Any) -> None:
    """Write calls to a file, and which modules said that they are causal."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("recording.save: safetensors is not installed. pip install 'regard[hf]'") from error
    writer = _Writer()
    calls = [writer.call(call, str(i)) for i, (_, _, _, call) in enumerate(layers)]
    about = json.dumps(
        {"format": FORMAT, "causal": causal, "calls": calls}, ensure_ascii=False, allow_nan=False
    )
    save_file(writer.arrays, str(path), metadata={"regard": about})


class _Reader:
    def __init__(self, arrays: dict[str, Tensor]) -> None:
        self.arrays = arrays

    def array(self, name: str | None) -> Tensor:
        return None if name is None else self.arrays[name]

    def numpy(self, name: str | None) -> Any:
        return None if name is None else self.arrays[name].numpy()

    def score_mod(self, written: Any) -> ScoreMod | None:
        if written is None:
            return None
        makers: dict[str, Callable[..., ScoreMod]] = {
            "softcap": lambda: SoftcapMod(written["cap"]),
            "bias": lambda: BiasMod(self.array(written["array"])),
            "alibi": lambda: AlibiMod(
                None if written["slopes"] is None else np.array(written["slopes"]), written["align"]
            ),
            "relative_bias": lambda: RelativeBiasMod(
                self.array(written["table"]),
                written["bidirectional"],
                written["max_distance"],
                written["align"],
            ),
        }
        return makers[written["kind"]]()

    def result(self, written: Any) -> Any:
        arrays = [self.array(each) for each in written["arrays"]]
        return Top(*arrays) if written["kind"] == "top" else arrays[0]

    def call(self, written: dict[str, Any]) -> Call:
        rules = written["rules"]
        ends = {each: self.numpy(rules[each]) for each in ("low", "high", "keys", "flat")}
        measured = written.get("measured")
        return Call(
            rules=Rules(**ends, kept=self.array(rules["kept"]), added=self.score_mod(rules["added"])),
            softcap=self.score_mod(written["softcap"]),
            extent=tuple(written["extent"]),
            measured=None if measured is None else {key: self.result(each) for key, each in measured.items()},
            **{each: written[each] for each in _PLAIN},
            **{each: self.array(written[each]) for each in _ARRAYS},
        )


def read(path: str | Path) -> tuple[list[Call], dict[str, bool]]:
    """Read the calls of a file that `save` wrote, and which modules call themselves causal."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("regard", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise _unread(path, f"a file that is no safetensors file ({error})") from None
    if about.get("format") != FORMAT:
        raise _unread(path, f"a file of format {about.get('format')!r}")
    reader = _Reader(arrays)
    calls = []
    for written in about["calls"]:
        call = reader.call(written)
        call.first = written["first"]
        calls.append(call)
    return calls, about["causal"]


def _unread(path: Any, received: str) -> ArgumentError:
    return ArgumentError(
        "load_recording",
        received=f"{Path(path).name!r}, {received}",
        expected=f"a file that recording.save wrote ({FORMAT})",
        hint="recording.save(path) writes one; the weights of a model are loaded by its own library.",
    )
