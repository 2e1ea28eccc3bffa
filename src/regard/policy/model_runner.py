"""The model of a verification in a worker process: it runs each text with the policy and without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.row_schema import EVICTION_WINDOWS
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
from regard.lens.eviction import Offsets, build_first_masses, compute_evicted
from regard.policy.comparison import compare_logits
from regard.policy.window_sizes import FULL, WIDENED_SINKS
from regard.types import Array

if TYPE_CHECKING:
    from regard.capture.call import Call
    from regard.models import LoadedModel
    from regard.policy.policy import CachePolicy

# Values of a document, repeated in the rows of its heads.
DOCUMENT_COLUMNS = ("kl", "kl_max", "agreement", "loss", "policy_loss")
COLUMNS = {
    **dict.fromkeys(DOCUMENT_COLUMNS, 1),
    "lost": 1,
    "effect": 1,
    "evicted": len(EVICTION_WINDOWS),
    "evicted_widened": len(EVICTION_WINDOWS),
}

Tensor = Any  # the types of torch are not followed


@dataclass(frozen=True)
class VerificationSpec:
    """The model to verify a policy on, and how; `model` is a name for `regard.models.load`, or pickled."""

    model: str | PickledModel
    policy: CachePolicy
    max_tokens: int
    device: str | None = None
    threads: int = 1
    dtype: str = "float32"
    trust_remote_code: bool = False
    effects: bool = False

    def load(self) -> TextMeasurer:
        """Load the model; a pickled `TextMeasurer` is used as it is."""
        return unpickle_measurer(self.model) or PolicyRunner(self)


class PolicyRunner:
    """A loaded model that compares its outputs with those under a policy."""

    def __init__(self, spec: VerificationSpec) -> None:
        self._prepare(load_model(spec), spec)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, spec: VerificationSpec) -> PolicyRunner:
        """Return a runner for a model that this process has loaded."""
        runner = cls.__new__(cls)
        runner._prepare(loaded, spec)
        return runner

    def _prepare(self, loaded: LoadedModel, spec: VerificationSpec) -> None:
        from regard.policy.masking import build_edits

        loaded.model.requires_grad_(False)
        self.loaded, self.spec, self.policy = loaded, spec, spec.policy
        self.edits = build_edits(spec.policy)

    def describe(self) -> ModelInfo:
        """Run the model on one sentence and on synthetic tests, and return its properties and fingerprints."""
        from regard.policy.synthetic_tests import run_tests

        rows = self.measure(TRIAL_TEXT)
        return {
            "name": self.loaded.name,
            "weights": hash_weights(self.loaded.model),
            "tokenizer": hash_tokenizer(self.loaded.tokenizer),
            "layers": self.policy.num_layers,
            "heads": [self.policy.num_heads] * self.policy.num_layers,
            "notes": list(self.loaded.notes),
            "tests": {"results": run_tests(self), "tokens": rows["tokens"]},
        }

    def run(self, ids: Tensor) -> Tensor:
        """Run the model on ids (1, n) and return the logits of every token, (n, vocabulary)."""
        from regard.interventions.model_runs import get_logits, run_model

        return get_logits(run_model(self.loaded.model, ids, "policy.verify"))[0]

    def run_policy(self, ids: Tensor) -> Tensor:
        """Run the model under the policy, like `run`."""
        import torch

        from regard.interventions.intervene import intervene

        with torch.no_grad(), intervene(self.loaded.model, self.edits):
            return self.run(ids)

    def measure(self, text: str, prompt: str = "") -> dict[str, Any]:
        """Return the rows of a text as columns, one for each layer and head.

        Args:
            text: The text.
            prompt: What the model reads before it.
        """
        import torch

        from regard.lens.watch import watch

        encoded = self.loaded.encode(prompt + text, self.spec.max_tokens)
        ids = encoded.ids if self.spec.device is None else encoded.ids.to(self.spec.device)
        evicted: dict[str, tuple[Array, Array, Array]] = {}

        def collect(call: Call) -> dict[str, Any]:
            evicted[call.name] = self._measure_evicted(call)
            return {}

        with torch.no_grad(), watch(self.loaded.model, measures=collect):
            plain = self.run(ids)
        self._check_layers(evicted)
        logits = self.run_policy(ids) if self.edits else plain
        document = compare_logits(plain, logits, ids[0])
        if not np.isfinite(document["kl"]):
            raise NotFiniteError("the logits of the model are not finite")
        layers, heads = self.policy.num_layers, self.policy.num_heads
        effects = np.zeros((layers, heads))
        if self.spec.effects and self.edits:
            effects = self.attribute(ids, plain)
        lost, ladder, widened = (
            np.concatenate([evicted[name][part] for name in self.policy.layers]) for part in range(3)
        )
        group = heads // self.policy.num_kv_heads
        return {
            "layer": np.repeat(np.arange(layers, dtype=np.int16), heads),
            "head": np.tile(np.arange(heads, dtype=np.int16), layers),
            "kv_head": np.tile(np.arange(heads, dtype=np.int16) // group, layers),
            "module": [name for name in self.policy.layers for _ in range(heads)],
            "tokens": len(encoded),
            "truncated": encoded.full_length > len(encoded),
            **{name: np.full(layers * heads, value, np.float32) for name, value in document.items()},
            "lost": lost.astype(np.float32),
            "effect": effects.reshape(-1).astype(np.float32),
            "evicted": ladder.astype(np.float32),
            "evicted_widened": widened.astype(np.float32),
        }

    def attribute(self, ids: Tensor, plain: Tensor) -> Array:
        """Attribute the mean KL divergence of a text to the heads, (num_layers, heads), in nats per token."""
        import torch

        from regard.interventions.gradient_attribution import attribute_restriction

        expected = plain.float().log_softmax(-1)

        def run() -> Tensor:
            found = self.run(ids).float().log_softmax(-1)
            return (expected.exp() * (expected - found)).sum(-1).mean()

        parts = attribute_restriction(self.loaded.model, run, self.edits)
        heads = self.policy.num_heads
        none = torch.zeros(heads)
        return np.stack([parts.get(name, none).double().cpu().numpy() for name in self.policy.layers])

    def _measure_evicted(self, call: Call) -> tuple[Array, Array, Array]:
        """Measure the weight that the policy evicts in a call, and windows with its sinks and with more sinks would."""
        from regard.lens.head_table import as_numpy_per_head
        from regard.lens.token_rows import TokenRows

        layer = self.policy.layers.index(call.name) if call.name in self.policy.layers else None
        heads = call.shape[-3] if len(call.shape) > 2 else 1
        token_rows = TokenRows.from_call(call)
        if layer is None or token_rows.query_offset is None or heads != self.policy.num_heads:
            raise _build_mismatch(self.policy, call.name, heads)
        group = heads // self.policy.num_kv_heads
        windows, sinks = (
            np.repeat(counts[layer], group) for counts in (self.policy.windows, self.policy.sinks)
        )
        most = max(WIDENED_SINKS, int(sinks.max()))
        found = call.matrix.measure(
            offsets=Offsets(None if token_rows.rows.all() else token_rows.rows),
            first=build_first_masses(token_rows, most),
        )
        offsets, first = as_numpy_per_head(found.offsets), as_numpy_per_head(found.first)
        by_sinks = {
            count: compute_evicted(offsets, first, token_rows, count)
            for count in {*sinks.tolist(), *np.maximum(sinks, WIDENED_SINKS).tolist()}
        }
        last = next(iter(by_sinks.values())).shape[1] - 1
        ladder = np.minimum(EVICTION_WINDOWS, last)
        own = np.stack([by_sinks[count][head] for head, count in enumerate(sinks.tolist())])
        more = np.stack(
            [by_sinks[count][head] for head, count in enumerate(np.maximum(sinks, WIDENED_SINKS).tolist())]
        )
        lost = own[np.arange(heads), np.where(windows == FULL, last, np.minimum(windows, last))]
        return np.where(windows == FULL, 0.0, lost), own[:, ladder], more[:, ladder]

    def _check_layers(self, found: dict[str, Any]) -> None:
        missing = [name for name in self.policy.layers if name not in found]
        if missing:
            raise ArgumentError(
                "policy.verify",
                received=f"a model without the layer {missing[0]!r}",
                expected="the model that the policy was made for",
                hint=f"The model has {', '.join(map(repr, list(found)[:3]))}, …: make a policy from its own survey.",
            )


def _build_mismatch(policy: CachePolicy, name: str, heads: int) -> ArgumentError:
    return ArgumentError(
        "policy.verify",
        received=f"a model with the layer {name!r} of {heads} heads",
        expected=f"{policy.num_layers} layers such as {policy.layers[0]!r}, each with {policy.num_heads} heads",
        hint="Verify a policy on the model that it was made for.",
    )
