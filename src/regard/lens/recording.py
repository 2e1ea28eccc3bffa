"""What was seen: a mapping from the names of a model's attention layers to their matrices."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from regard.core.matrix import AttentionMatrix
from regard.errors import ArgumentError, NotCapturedError, format_named_shape
from regard.lens import serialization
from regard.lens._asked import Asked
from regard.lens.call import Call
from regard.lens.capture.cache_joining import Run
from regard.lens.capture.module_hints import Hints

__all__ = ["Recording", "load_recording"]


class Recording(Asked):
    """The attention matrices of a model's layers by module name, in the order in which the layers ran.

    `recording[name]` is an `AttentionMatrix`, lazy. Where a layer was called several times, calls whose keys extend the last
    one's (prefill and steps of `generate()`) are one matrix whose rows are tokens in order; otherwise `recording[name]`
    raises, and `recording.calls(name)` has each. What the other measures are made from is the record `Call`.

    >>> import regard, torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(torch.nn.ModuleDict({"attn": layer})) as recording:
    ...     _ = layer(*[torch.ones(1, 3, 8)] * 3)
    >>> list(recording), recording["attn"].shape
    (['attn'], (1, 2, 3, 3))
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[Run]] = {}
        self._missed: dict[str, tuple[str, str]] = {}
        self._hints = Hints()
        self._lock = threading.Lock()

    def _add(self, call: Call) -> None:
        """One more call; the run that it goes on, if there is one, takes it."""
        with self._lock:
            runs = self._runs.setdefault(call.name, [])
            if call.measured is None:
                # The latest first: a layer that is shared by several depths has a run for each.
                for run in reversed(runs):
                    if run.takes(call):
                        return
            runs.append(Run(call))

    def __getitem__(self, name: str) -> AttentionMatrix:
        runs = self._runs.get(name)
        if not runs:
            self._refuse(name)
        if len(runs) > 1:
            why = "keys do not extend one another's"
            if any(run.last.measured is None and run.last.rules.nbytes for run in runs):
                why = "masks had to be kept as they are, so that they are not joined"
            raise ArgumentError(
                f"recording[{name!r}]",
                received=f"{len(runs)} calls whose {why}: " + _shapes(runs),
                expected="one call, or the steps of one cache",
                hint=f"Take one: recording.calls({name!r})[0].matrix. Where steps do not join (beam search "
                "reorders its cache, some caches change old keys), run the model once, watched, on the sequence "
                "that was generated.",
            )
        run = runs[0]
        if run.trying:
            raise ArgumentError(
                f"recording[{name!r}]",
                received=f"{len(run.steps)} calls of {run.trying}, which takes back tokens that it tried",
                expected="calls whose rows are the tokens that were generated",
                hint="Run the model once, watched, on the sequence that was generated; "
                f"recording.calls({name!r}) has the rows as they were tried.",
            )
        return run.call.matrix

    def calls(self, name: str) -> tuple[Call, ...]:
        """The record of each call of a layer, calls that one cache joins as one; see `regard.lens.Call`."""
        if name not in self._runs:
            self._refuse(name)
        return tuple(run.call for run in self._runs[name])

    def _refuse(self, name: object) -> NoReturn:
        if isinstance(name, str) and name in self._missed:
            why, hint = self._missed[name]
            raise NotCapturedError(
                f"recording[{name!r}]", received=why, expected="a layer that can be read", hint=hint
            )
        near = difflib.get_close_matches(str(name), self._runs, n=1, cutoff=0.0)
        raise NotCapturedError(
            f"recording[{name!r}]",
            received="a name that no attention layer has" if self._runs else "nothing seen so far",
            expected=f"one of {len(self._runs)}, such as {near[0]!r}" if near else "a layer that ran",
            hint="list(recording) has them all." if self._runs else "Run the model inside the with block.",
        )

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._runs))

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, name: object) -> bool:
        return name in self._runs

    @property
    def nbytes(self) -> int:
        """The bytes of all that is held: queries, keys, lse, and masks of q_len × kv_len that had to be kept."""
        return sum(run.nbytes for runs in self._runs.values() for run in runs) + self._kept()

    def _kept(self) -> int:
        """The bytes of masks and biases, those that layers share counted once."""
        arrays = {}
        for runs in self._runs.values():
            for run in runs:
                rules = run.last.rules
                for array in (rules.kept, getattr(rules.added, "array", None)):
                    if array is not None:
                        arrays[array.data_ptr()] = int(array.nbytes)
        return sum(arrays.values())

    def __repr__(self) -> str:
        return "\n".join(
            [self._about(), *(f"  {name}: {_shapes(runs)}" for name, runs in self._runs.items())]
        )

    def _about(self) -> str:
        if not self._runs:
            return "Recording(nothing)"
        layers = "1 layer" if len(self) == 1 else f"{len(self)} layers"
        return f"Recording({layers}, {self.nbytes:,} bytes held)"

    def _repr_html_(self) -> str:
        from regard.render import notebook

        shown = list(self._runs.items())[: notebook.MAX_ROWS]
        rows = [
            [
                str(number),
                name,
                _shapes(runs),
                runs[-1].last.kernel,
                f"{sum(run.nbytes for run in runs):,}",
            ]
            for number, (name, runs) in enumerate(shown)
        ]
        more = len(self) - len(shown)
        closing = f"… and {more:,} more layers. " if more else ""
        if self._missed:
            closing += (
                f"Not seen: {', '.join(list(self._missed)[:8])}{' …' if len(self._missed) > 8 else ''}."
            )
        names = ["layer", "module", "shape", "kernel", "bytes"]
        left = [False, True, True, True, False]
        return notebook.render_table(self._about(), names, rows if rows else [], left, closing)


def _shapes(runs: list[Run]) -> str:
    shown = [format_named_shape(run.shape, "q_len", "kv_len") for run in runs[:3]]
    return ", ".join(shown) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")


def load_recording(path: str | Path) -> Recording:
    """Read a recording that `Recording.save` wrote.

    Args:
        path: A safetensors file written by `recording.save(path)`.

    Returns:
        The recording: `recording[name]`, `recording.heads()` and the rest work as before it was saved.

    Raises:
        ArgumentError: The file is not a saved recording.

    >>> import regard, tempfile, torch
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    >>> with regard.watch(layer) as recording:
    ...     _ = layer(torch.ones(1, 3, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recording.save(f"{folder}/recording.safetensors")
    ...     again = regard.load_recording(f"{folder}/recording.safetensors")
    >>> again
    Recording(1 layer, 216 bytes held)
      self_attn: (batch 1, heads 2, q_len 3, kv_len 3)
    """
    calls, causal = serialization.read(path)
    recording = Recording()
    recording._hints.causal = causal
    for call in calls:
        first = call.first  # a new Run would derive it again, and cannot for joined calls
        recording._runs.setdefault(call.name, []).append(Run(call))
        call.first = first
    return recording
