"""The worker process that holds the model: it receives one text at a time and returns the rows of each.

The model runs in a separate process, so that a document that hangs or crashes it does not stop the survey.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Protocol, TypedDict

from regard.errors import ArgumentError, RegardError

if TYPE_CHECKING:
    import torch

    from regard.models import LoadedModel

TRIAL_TEXT = "One sentence, to see that the model runs. One sentence, to see that it runs."


class ModelInfo(TypedDict):
    """The properties of a model that the driver records.

    `weights` and `tokenizer` are fingerprints. `cache` has the sizes of keys and values; see `describe_cache`.
    """

    name: str
    weights: str
    tokenizer: str
    layers: int
    heads: list[int]
    notes: list[str]
    cache: NotRequired[dict[str, Any]]
    tests: NotRequired[dict[str, Any]]


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


class JobSpec(Protocol):
    """The model to run on every text and how, in a form that can be pickled for a worker.

    Attributes:
        model: A name for `regard.models.load`, or a pickled model.
        device: Device to run on, e.g. "cuda:0"; None for the CPU.
    """

    @property
    def model(self) -> str | PickledModel: ...

    @property
    def device(self) -> str | None: ...

    def load(self) -> TextMeasurer:
        """Load the model; called in the worker process."""


class LoadSpec(JobSpec, Protocol):
    """A `JobSpec` that says how `load_model` loads its model.

    Attributes:
        threads: Number of threads of torch.
        dtype: Dtype of the weights.
        trust_remote_code: Whether code that a model repository contains may run.
    """

    @property
    def threads(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def trust_remote_code(self) -> bool: ...


def unpickle_measurer(model: str | PickledModel) -> TextMeasurer | None:
    """Return the pickled `TextMeasurer`; None if it is a name or another model, for `load_model`."""
    found = pickle.loads(model.data) if isinstance(model, PickledModel) else None
    return found if hasattr(found, "measure") else None


def load_model(spec: LoadSpec) -> LoadedModel:
    """Load the model of a job in the worker process, with its threads, dtype and device."""
    import torch

    from regard.models import load

    torch.set_num_threads(spec.threads)
    if isinstance(spec.model, str):
        loaded = load(spec.model, trust_remote_code=spec.trust_remote_code, dtype=spec.dtype)
    else:
        loaded = pickle.loads(spec.model.data)
    if spec.device is not None:
        loaded.model.to(spec.device)
    return loaded


class NotFiniteError(ValueError):
    """Attention weights that are NaN or infinite: the model fails on this text."""


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

    The first two messages are a `JobSpec` and whether to describe the model. Every later one is a tuple: a text, and
    its prompt if it has one.

    Args:
        channel: File descriptor of the connection.
        parent: Process id of the parent.
    """
    _exit_with_parent(parent)
    _prefer_for_oom_kill()
    connection = Connection(channel)
    try:
        measurer = connection.recv().load()
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
