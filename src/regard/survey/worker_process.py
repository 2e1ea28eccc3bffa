"""The worker process that holds the model: it receives one text at a time and returns the rows of each.

The model runs in a separate process, so that a document that hangs or crashes it does not stop the survey.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import numpy as np

from regard.errors import ArgumentError, RegardError

if TYPE_CHECKING:
    import torch

    from regard.lens.capture.call import Call
    from regard.models import LoadedModel

TRIAL_TEXT = "One sentence, to see that the model runs. One sentence, to see that it runs."


class ModelInfo(TypedDict):
    """The properties of a model that the driver records; `weights` and `tokenizer` are fingerprints."""

    name: str
    weights: str
    tokenizer: str
    layers: int
    heads: list[int]
    notes: list[str]


class TextMeasurer(Protocol):
    """An object that measures texts, such as `ModelRunner`, or a stand-in for it that needs no torch."""

    def describe(self) -> ModelInfo:
        """Return the properties of the model."""

    def measure(self, text: str) -> dict[str, Any]:
        """Return the rows of a text as columns. If the corpus has a prompt field, the prompt is a second argument."""


class PickledModel(NamedTuple):
    """A model as pickled bytes, which only the worker process loads."""

    name: str
    data: bytes

    @classmethod
    def dump(cls, model: object) -> PickledModel:
        """Pickle a `LoadedModel` or a `TextMeasurer`.

        Raises:
            ArgumentError: If the model cannot be pickled, or its class is defined in `__main__`.
        """
        own = type(getattr(model, "model", model))
        try:
            if own.__module__ == "__main__":
                raise TypeError(f"its class {own.__name__} is defined in __main__")
            return cls(str(getattr(model, "name", own.__name__)), pickle.dumps(model))
        except Exception as error:  # pickle raises many kinds of errors
            raise ArgumentError(
                "survey.run",
                received=f"a model that cannot be pickled for a worker: {' '.join(str(error).split())[:200]}",
                expected="a name, module:function, or a model that can be pickled",
                hint="Put a function that builds it in a module, and pass its name: run('my_models:load', …).",
            ) from None


@dataclass(frozen=True)
class ModelSpec:
    """The model to run on every text and how; `model` is a name for `regard.models.load`, or pickled."""

    model: str | PickledModel
    measures: tuple[str, ...]
    max_tokens: int
    device: str | None = None
    threads: int = 1
    dtype: str = "float32"
    trust_remote_code: bool = False


class NotFiniteError(ValueError):
    """Attention weights that are NaN or infinite: the model fails on this text."""


class ModelRunner:
    """A loaded model that measures texts under the lens."""

    def __init__(self, spec: ModelSpec) -> None:
        import torch

        from regard.models import load

        torch.set_num_threads(spec.threads)
        if isinstance(spec.model, str):
            loaded = load(spec.model, trust_remote_code=spec.trust_remote_code, dtype=spec.dtype)
        else:
            loaded = pickle.loads(spec.model.data)
        if spec.device is not None:
            loaded.model.to(spec.device)
        self.loaded, self.spec = loaded, spec

    def describe(self) -> ModelInfo:
        """Run the model on one sentence and return its properties and fingerprints."""
        rows = self.measure(TRIAL_TEXT)
        layers = int(rows["layer"].max()) + 1
        return {
            "name": self.loaded.name,
            "weights": hash_weights(self.loaded.model),
            "tokenizer": hash_tokenizer(self.loaded.tokenizer),
            "layers": layers,
            "heads": [int((rows["layer"] == layer).sum()) for layer in range(layers)],
            "notes": list(self.loaded.notes),
        }

    def measure(self, text: str, prompt: str = "") -> dict[str, Any]:
        """Return the rows of a text as columns: layer, head, kv_head, module, then the measures as float32.

        Args:
            text: The text.
            prompt: What the model reads before it.
        """
        from regard.lens.watch import watch
        from regard.survey.head_stats import measure_call

        encoded = self.loaded.encode(prompt + text, self.spec.max_tokens)
        prompt_len = count_prompt_tokens(self.loaded, prompt, text) if prompt else 0
        tokens = [encoded.ids[0].tolist()]
        copies: dict[Any, Any] = {}
        if self.spec.device is not None:
            encoded = replace(encoded, ids=encoded.ids.to(self.spec.device))
        layers: list[tuple[str, int, dict[str, Any]]] = []

        def collect(call: Call) -> dict[str, Any]:
            columns = measure_call(call, tokens, copies, self.spec.measures, prompt_len)
            for name in ("entropy", "first", "heavy"):
                if not np.isfinite(columns.get(name, 0.0)).all():
                    raise NotFiniteError(f"the attention weights of {call.name} are not finite")
            layers.append((call.name, call.groups, columns))
            return {}

        with watch(self.loaded.model, measures=collect):
            self.loaded.forward(encoded)
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
            "tokens": len(encoded),
            "truncated": encoded.full_length > len(encoded),
        }
        for name in layers[0][2]:
            rows[name] = np.concatenate([columns[name] for _, _, columns in layers]).astype(np.float32)
        return rows


def count_prompt_tokens(loaded: LoadedModel, prompt: str, text: str) -> int:
    """Count the tokens of a prompt in the encoding of prompt and text, special tokens before it included.

    Args:
        loaded: The model and its tokenizer.
        prompt: The prompt.
        text: The text after it.

    Returns:
        The number of tokens that begin in the prompt. Without offsets of the tokenizer, tokens at its end that merge
        with the text do not count.
    """
    if getattr(loaded.tokenizer, "is_fast", False):
        offsets = loaded.tokenizer(prompt + text, return_offsets_mapping=True, truncation=False)[
            "offset_mapping"
        ]
        return next(
            (i for i, (start, stop) in enumerate(offsets) if stop > start >= len(prompt)), len(offsets)
        )
    alone, both = (loaded.encode(part).ids[0].tolist() for part in (prompt, prompt + text))
    pairs = enumerate(zip(alone, both, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(alone), len(both)))


def hash_weights(model: torch.nn.Module) -> str:
    """Return the sha256 of a model's class name, configuration and weights."""
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


def hash_tokenizer(tokenizer: Any) -> str:
    """Return the sha256 of a tokenizer's vocabulary, or its qualified name if it is a plain function."""
    if tokenizer is None:
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = backend.to_str()
    elif hasattr(tokenizer, "get_vocab"):
        vocabulary = repr(sorted(tokenizer.get_vocab().items()))
    else:
        return f"{tokenizer.__module__}:{getattr(tokenizer, '__qualname__', type(tokenizer).__name__)}"
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def main(channel: int, parent: int) -> None:
    """Answer the requests on a connection until it closes or the parent process exits.

    The first two messages are a `ModelSpec` and whether to describe the model. Every later one is a tuple: a text, and
    its prompt if it has one.

    Args:
        channel: File descriptor of the connection.
        parent: Process id of the parent.
    """
    _exit_with_parent(parent)
    _prefer_for_oom_kill()
    connection = Connection(channel)
    try:
        measurer = _load_measurer(connection.recv())
        connection.send(("ready", measurer.describe() if connection.recv() else None))
    except Exception as error:  # any failure to load the model is reported to the parent
        connection.send(("failed", format_error(error)))
        return
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("rows", measurer.measure(*request))
        except Exception as error:  # a document may raise anything; it is reported, and the next one is read
            answer = ("not finite" if isinstance(error, NotFiniteError) else "error", format_error(error))
        connection.send(answer)


def _load_measurer(spec: ModelSpec) -> TextMeasurer:
    if isinstance(spec.model, PickledModel):
        model = pickle.loads(spec.model.data)
        if hasattr(model, "measure"):
            return model  # type: ignore[no-any-return]
    return ModelRunner(spec)


def format_error(error: Exception) -> str:
    """Format an error on one line of at most 500 characters."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, RegardError | NotFiniteError) else f"{type(error).__name__}: {text}"


def _exit_with_parent(parent: int) -> None:
    """Exit with the parent process, even if the parent is killed while the model runs."""

    def poll_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=poll_parent, daemon=True).start()


def _prefer_for_oom_kill() -> None:
    """Let the system kill this process before its parent when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return
