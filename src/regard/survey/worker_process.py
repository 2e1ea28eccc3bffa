"""The process that has the model: it is sent texts, one at a time, and answers each with its rows.

It runs apart so that a document that hangs or kills it takes nothing else along.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from regard.errors import ArgumentError, RegardError

TRIAL = "One sentence, to see that the model runs. One sentence, to see that it runs."


class PickledModel(NamedTuple):
    """A model as bytes, which only the process that runs it opens."""

    name: str
    data: bytes

    @classmethod
    def of(cls, model: Any) -> PickledModel:
        """Seal what `load` returned, or a stand-in that answers `about()` and `measure(text)` as `Model` does."""
        own = type(getattr(model, "model", model))
        try:
            if own.__module__ == "__main__":
                raise TypeError(f"its class {own.__name__} is defined in the script that runs")
            return cls(str(getattr(model, "name", own.__name__)), pickle.dumps(model))
        except Exception as error:  # pickle raises what it likes
            raise ArgumentError(
                "survey",
                received=f"a model that cannot be sent to another process: {' '.join(str(error).split())[:200]}",
                expected="a name, module:function, or a model that pickle takes",
                hint="Write a function that makes it into a module, and give its name: survey('my_models:load', …).",
            ) from None


@dataclass(frozen=True)
class Task:
    """What is done with every text; `model` is a name for `load`, or sealed."""

    model: str | PickledModel
    measures: tuple[str, ...]
    max_tokens: int
    device: str | None = None
    threads: int = 1
    dtype: str = "float32"
    trust_remote_code: bool = False


class NotFinite(ValueError):
    """Weights that are NaN: the model broke down on this text."""


class Model:
    """A model that is asked for rows."""

    def __init__(self, task: Task) -> None:
        import torch

        from regard.models import load

        torch.set_num_threads(task.threads)
        if isinstance(task.model, str):
            opened = load(task.model, trust_remote_code=task.trust_remote_code, dtype=task.dtype)
        else:
            opened = pickle.loads(task.model.data)
        if task.device is not None:
            opened.model.to(task.device)
        self.opened, self.task = opened, task

    def about(self) -> dict[str, Any]:
        """What is to be known of the model before it is asked, its fingerprints among it."""
        tried = self.measure(TRIAL)
        layers = int(tried["layer"].max()) + 1
        return {
            "model": self.opened.name,
            "weights": weights_of(self.opened.model),
            "tokenizer": tokenizer_of(self.opened.tokenizer),
            "layers": layers,
            "heads": [int((tried["layer"] == each).sum()) for each in range(layers)],
            "notes": list(self.opened.notes),
        }

    def measure(self, text: str) -> dict[str, Any]:
        """The rows of a text as columns: layer, head, kv_head, module, then what was measured, float32."""
        from regard.lens.watch import watch
        from regard.survey.head_stats import profile

        read = self.opened.encode(text, self.task.max_tokens)
        tokens, copies = [read.ids[0].tolist()], {}  # type: ignore[var-annotated]
        if self.task.device is not None:
            read = replace(read, ids=read.ids.to(self.task.device))
        layers: list[tuple[str, int, dict[str, Any]]] = []

        def keep(call: Any) -> dict[str, Any]:
            columns = profile(call, tokens, copies, self.task.measures)
            for name in ("entropy", "first", "heavy"):
                if not np.isfinite(columns.get(name, 0.0)).all():
                    raise NotFinite(f"{call.name} has weights that are not finite")
            layers.append((call.name, call.groups, columns))
            return {}

        with watch(self.opened.model, keep="measures", measures=keep):
            self.opened.forward(read)
        counts = [len(next(iter(columns.values()))) for _, _, columns in layers]
        rows: dict[str, Any] = {
            "layer": np.repeat(np.arange(len(layers), dtype=np.int16), counts),
            "head": np.concatenate([np.arange(count, dtype=np.int16) for count in counts]),
            "kv_head": np.concatenate(
                [
                    np.arange(count, dtype=np.int16) // group
                    for count, (_, group, _) in zip(counts, layers, strict=True)
                ]
            ),
            "module": [
                name for count, (name, _, _) in zip(counts, layers, strict=True) for _ in range(count)
            ],
            "tokens": len(read),
            "cut": read.full_length > len(read),
        }
        for name in layers[0][2]:
            rows[name] = np.concatenate([columns[name] for _, _, columns in layers]).astype(np.float32)
        return rows


def weights_of(model: Any) -> str:
    """A fingerprint of a model: its class, its configuration, and every weight."""
    import torch

    digest = hashlib.sha256(type(model).__name__.encode())
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        config = {
            key: value
            for key, value in sorted(config.to_dict().items())
            if key not in ("_name_or_path", "transformers_version", "_attn_implementation_internal")
        }
    digest.update(repr(config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


def tokenizer_of(tokenizer: Any) -> str:
    """A fingerprint of a tokenizer; of a function only its name is known."""
    if tokenizer is None:
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        told = backend.to_str()
    elif hasattr(tokenizer, "get_vocab"):
        told = repr(sorted(tokenizer.get_vocab().items()))
    else:
        return f"{tokenizer.__module__}:{getattr(tokenizer, '__qualname__', type(tokenizer).__name__)}"
    return hashlib.sha256(told.encode()).hexdigest()


def main(channel: int, parent: int) -> None:
    """Answer what comes through a connection until it ends, or its other end is gone."""
    _die_with(parent)
    _first_to_die()
    connection = Connection(channel)
    try:
        model = _answering(connection.recv())
        connection.send(("ready", model.about() if connection.recv() else {}))
    except Exception as error:  # whatever keeps the model from being opened is told to whoever asked
        connection.send(("refused", said(error)))
        return
    while True:
        try:
            text = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("rows", model.measure(text))
        except Exception as error:  # a document may do anything; it is told, and the next one comes
            answer = ("not finite" if isinstance(error, NotFinite) else "raises", said(error))
        connection.send(answer)


def _answering(task: Task) -> Any:
    """Who answers: the model, or a stand-in for one."""
    if isinstance(task.model, PickledModel):
        opened = pickle.loads(task.model.data)
        if hasattr(opened, "measure"):
            return opened
    return Model(task)


def said(error: Exception) -> str:
    """An error in a line or two."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, RegardError | NotFinite) else f"{type(error).__name__}: {text}"


def _die_with(parent: int) -> None:
    """End with the process that started this one, even where that is killed while the model runs."""

    def watch_over() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch_over, daemon=True).start()


def _first_to_die() -> None:
    """Where memory runs out, the system is to take this process rather than the one that watches it."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return
