"""The model of a survey in a worker process: it measures the heads on one text at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.jobs.worker_process import (
    TRIAL_TEXT,
    ModelInfo,
    NotFiniteError,
    PickledModel,
    TextMeasurer,
    hash_tokenizer,
    hash_weights,
    load_model,
    unpickle_measurer,
)

if TYPE_CHECKING:
    from regard.capture.call import Call
    from regard.models import LoadedModel


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

    def load(self) -> TextMeasurer:
        """Load the model; a pickled `TextMeasurer` is used as it is."""
        return unpickle_measurer(self.model) or ModelRunner(self)


class ModelRunner:
    """A loaded model that measures texts under the lens."""

    def __init__(self, spec: ModelSpec) -> None:
        self.loaded, self.spec = load_model(spec), spec

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
            "cache": self._describe_cache(),
        }

    def _describe_cache(self) -> dict[str, Any]:
        """Return the sizes of keys and values: kv_heads, head_dim and value_dim of each layer, and bytes_per_number."""
        from regard.lens.watch import watch

        encoded = self.loaded.encode(TRIAL_TEXT, self.spec.max_tokens)
        if self.spec.device is not None:
            encoded = replace(encoded, ids=encoded.ids.to(self.spec.device))
        with watch(self.loaded.model, values=True) as recording:
            self.loaded.forward(encoded)
        sizes: list[tuple[int, int, int, int]] = []
        for call in (recording.calls(name)[0] for name in recording):
            kv_heads = call.shape[-3] // call.groups if len(call.shape) > 2 else 1
            head_dim = int(call.key.shape[-1])
            value_dim = head_dim if call.value is None else int(call.value.shape[-1])
            sizes.append((kv_heads, head_dim, value_dim, int(call.key.element_size())))
        columns = (list(column) for column in list(zip(*sizes, strict=True))[:3])
        return {
            **dict(zip(("kv_heads", "head_dim", "value_dim"), columns, strict=True)),
            "bytes_per_number": max(size[-1] for size in sizes),
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
