"""The model of a job: pickled for a worker process, and loaded there to turn one text at a time into rows."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NotRequired, Protocol, TypedDict

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.options import RunOptions
from regard.models import EncodedText, LoadedModel, load

if TYPE_CHECKING:
    import torch

TRIAL_TEXT = "One sentence, to see that the model runs. One sentence, to see that it runs."


class ModelInfo(TypedDict):
    """What the driver records of a model: fingerprints of weights and tokenizer, sizes, and settings of the job."""

    name: str
    weights: str
    tokenizer: str
    layers: int
    heads: list[int]
    notes: list[str]
    settings: NotRequired[dict[str, Any]]


class TextMeasurer(Protocol):
    """An object that measures texts, such as a `ModelRunner`, or a stand-in for it that needs no torch."""

    def describe(self) -> ModelInfo:
        """Return the properties of the model."""

    def measure(self, text: str) -> dict[str, Any]:
        """Return the rows of a text as columns. If the corpus has a prompt field, the prompt is a second argument."""


class NotFiniteError(ValueError):
    """Attention weights that are NaN or infinite: the model fails on this text."""


class PickledModel(NamedTuple):
    """A model as pickled bytes, which only the worker process loads."""

    name: str
    data: bytes

    @classmethod
    def dump(cls, model: object, operation: str) -> PickledModel:
        """Pickle a `LoadedModel` or a `TextMeasurer`, or raise an `ArgumentError`."""
        own = type(getattr(model, "model", model))
        try:
            if own.__module__ == "__main__":
                raise TypeError(f"its class {own.__name__} is defined in __main__")
            return cls(str(getattr(model, "name", own.__name__)), pickle.dumps(model))
        except Exception as error:  # pickle raises many kinds of errors
            raise ArgumentError(
                operation,
                received=f"a model that cannot be pickled for a worker: {' '.join(str(error).split())[:200]}",
                expected="a name, module:function, or a model that can be pickled",
                hint="Put a function that builds it in a module, and pass its name: 'my_models:load'.",
            ) from None


@dataclass(frozen=True)
class ModelSpec:
    """The model to run on every text and how; a kind of job adds what it measures, and builds its runner."""

    operation: ClassVar[str]  # the function that runs the job, as errors name it
    model: str | PickledModel  # a name for `regard.models.load`, or pickled
    options: RunOptions = field(default_factory=RunOptions, kw_only=True)

    def load(self) -> TextMeasurer:
        """Load the model in the worker process; a pickled `TextMeasurer` is used as it is."""
        options = self.options
        loaded: Any = None
        if isinstance(self.model, PickledModel):
            loaded = pickle.loads(self.model.data)
        if hasattr(loaded, "measure"):
            return loaded  # type: ignore[no-any-return]
        import torch

        torch.set_num_threads(options.threads)
        if loaded is None:
            name = str(self.model)
            loaded = load(name, trust_remote_code=options.trust_remote_code, dtype=options.dtype)
        if options.device is not None:
            loaded.model.to(options.device)
        return self.build_runner(loaded)

    def build_runner(self, loaded: LoadedModel) -> ModelRunner:
        """Return the object that measures texts with the loaded model."""
        raise NotImplementedError


def as_source(model: str | Path | LoadedModel | TextMeasurer, operation: str) -> str | PickledModel:
    """Return a model as a `ModelSpec` holds it."""
    return str(model) if isinstance(model, str | Path) else PickledModel.dump(model, operation)


class ModelRunner:
    """A loaded model that records and measures runs on texts; a kind of job implements `measure`."""

    def __init__(self, loaded: LoadedModel, options: RunOptions) -> None:
        self.loaded, self.options = loaded, options

    def measure(self, text: str) -> dict[str, Any]:
        """Return the rows of a text as columns."""
        raise NotImplementedError

    def describe(self) -> ModelInfo:
        """Run the model on one sentence and return its properties and fingerprints."""
        heads = np.bincount(self.measure(TRIAL_TEXT)["layer"]).tolist()
        return {
            "name": self.loaded.name,
            "weights": hash_weights(self.loaded.model),
            "tokenizer": hash_tokenizer(self.loaded.tokenizer),
            "layers": len(heads),
            "heads": heads,
            "notes": list(self.loaded.notes),
        }

    def encode(self, text: str) -> EncodedText:
        """Encode a text, on the device of the model."""
        encoded = self.loaded.encode(text, self.options.max_tokens)
        return (
            encoded
            if self.options.device is None
            else replace(encoded, ids=encoded.ids.to(self.options.device))
        )


def build_head_columns(encoded: EncodedText, layers: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """Build the columns that identify the rows of a text, from name, heads and heads per kv head of each layer."""
    counts = [heads for _, heads, _ in layers]
    return {
        "layer": np.repeat(np.arange(len(layers), dtype=np.int16), counts),
        "head": np.concatenate([np.arange(heads, dtype=np.int16) for heads in counts]),
        "kv_head": np.concatenate([np.arange(heads, dtype=np.int16) // group for _, heads, group in layers]),
        "module": [name for name, heads, _ in layers for _ in range(heads)],
        "tokens": len(encoded),
        "truncated": encoded.full_length > len(encoded),
    }


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
