"""The model of a verification in a worker process: it runs each text, and synthetic tests, with the policy and without.

The synthetic tests are to copy a block of tokens, and to find a needle in a haystack. Both use random tokens, so a
model passes them by attention alone. A test counts only if the model passes it without the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from regard.errors import ArgumentError
from regard.jobs.model_runner import ModelInfo, ModelRunner, ModelSpec, NotFiniteError, build_head_columns
from regard.jobs.shards import EVICTION_WINDOWS
from regard.lens.eviction import Offsets, build_first_masses, compute_evicted
from regard.policy.masking import FULL, KeptKeys, build_edits
from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.capture.call import Call
    from regard.models import LoadedModel


# Values of a document, repeated in the rows of its heads.
DOCUMENT_COLUMNS = ("kl", "kl_max", "agreement", "loss", "policy_loss")
COLUMNS = {
    **dict.fromkeys(DOCUMENT_COLUMNS, 1),
    "lost": 1,
    "effect": 1,
    "evicted": len(EVICTION_WINDOWS),
    "evicted_widened": len(EVICTION_WINDOWS),
}
# The number of first keys that a head gets when it is widened.
WIDENED_SINKS = 4
# Rows of logits that are compared together.
ROWS = 512
# Lengths of the synthetic tests, in tokens; those above `max_tokens` are left out.
LENGTHS = (64, 256, 1024, 4096)
SEQUENCES = 4
# The needle: so many tokens, and how many of them are shown again at the end.
NEEDLE, SHOWN = 12, 4
# Where the needle lies, as a share of the haystack.
DEPTHS = (0.05, 0.35, 0.65, 0.9)
# A model can do a test if it predicts this share of the tokens; a policy that loses more than this share fails it.
ABLE, MAX_LOSS = 0.5, 0.05
SEED = 20

Tensor = Any  # the types of torch are not followed


def compare_logits(plain: Tensor, logits: Tensor, ids: Tensor) -> dict[str, float]:
    """Compare two runs of a text.

    Args:
        plain: Logits without the policy, (n, vocabulary).
        logits: Logits with it, alike.
        ids: The tokens, (n,).

    Returns:
        `kl`, the mean over tokens of the KL divergence of the prediction, in nats, and `kl_max`, the largest;
        `agreement`, the share of tokens with the same most likely prediction; `loss` and `policy_loss`, the mean
        cross-entropy of the next token, in nats, NaN for a text of one token.
    """
    import torch

    divergences, agrees, losses = [], [], []
    targets = torch.cat([ids[1:], ids[:1]])
    for start in range(0, len(ids), ROWS):
        rows = slice(start, start + ROWS)
        expected, found = (logs[rows].detach().float().log_softmax(-1) for logs in (plain, logits))
        divergences.append((expected.exp() * (expected - found)).sum(-1).double().clamp(min=0))
        agrees.append(expected.argmax(-1) == found.argmax(-1))
        picked = targets[rows, None]
        losses.append(-torch.stack([logs.gather(1, picked)[:, 0] for logs in (expected, found)]).double())
    kl, agreement, loss = torch.cat(divergences), torch.cat(agrees), torch.cat(losses, 1)[:, : len(ids) - 1]
    return {
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "agreement": float(agreement.double().mean()),
        "loss": float(loss[0].mean()) if len(ids) > 1 else float("nan"),
        "policy_loss": float(loss[1].mean()) if len(ids) > 1 else float("nan"),
    }


@dataclass(frozen=True)
class PolicySpec(ModelSpec):
    """The model that a policy is verified on, and whether the divergence is attributed to the heads."""

    operation: ClassVar[str] = "policy.verify"
    policy: KeptKeys
    effects: bool = False

    def build_runner(self, loaded: LoadedModel) -> PolicyRunner:
        """Return the object that compares the outputs of the loaded model."""
        return PolicyRunner(loaded, self)


class PolicyRunner(ModelRunner):
    """A loaded model that compares its outputs with those under a policy."""

    def __init__(self, loaded: LoadedModel, spec: PolicySpec) -> None:
        super().__init__(loaded, spec.options)
        loaded.model.requires_grad_(False)
        self.policy, self.edits = spec.policy, build_edits(spec.policy)
        self.effects = spec.effects and bool(self.edits)

    def describe(self) -> ModelInfo:
        """Describe the model, with the results of the synthetic tests."""
        return {**super().describe(), "settings": {"tests": run_tests(self)}}

    def run(self, ids: Tensor) -> Tensor:
        """Run the model on ids (1, n) and return the logits of every token, (n, vocabulary)."""
        from regard.interventions.model_runs import get_logits, run_model

        return get_logits(run_model(self.loaded.model, ids, "policy.verify"))[0]

    def run_policy(self, ids: Tensor, plain: Tensor) -> Tensor:
        """Run the model under the policy, like `run`; `plain` is the result without."""
        import torch

        from regard.interventions.intervene import intervene

        if not self.edits:
            return plain
        with torch.no_grad(), intervene(self.loaded.model, self.edits):
            return self.run(ids)

    def measure(self, text: str) -> dict[str, Any]:
        """Return the rows of a text as columns, one for each layer and head."""
        import torch

        from regard.lens.watch import watch

        encoded = self.encode(text)
        ids = encoded.ids
        evicted: dict[str, tuple[Array, Array, Array]] = {}

        def collect(call: Call) -> dict[str, Any]:
            evicted[call.name] = self._measure_evicted(call)
            return {}

        with torch.no_grad(), watch(self.loaded.model, measures=collect):
            plain = self.run(ids)
        if missing := [name for name in self.policy.layers if name not in evicted]:
            raise ArgumentError(
                "policy.verify",
                received=f"a model without the layer {missing[0]!r}",
                expected="the model that the policy was made for",
                hint=f"The model has {', '.join(map(repr, list(evicted)[:3]))}, …: make a policy from its own survey.",
            )
        document = compare_logits(plain, self.run_policy(ids, plain), ids[0])
        if not np.isfinite(document["kl"]):
            raise NotFiniteError("the logits of the model are not finite")
        layers, heads = self.policy.layers, self.policy.num_heads
        effects = self.attribute(ids, plain) if self.effects else np.zeros((len(layers), heads))
        lost, ladder, widened = (
            np.concatenate([evicted[name][part] for name in layers]) for part in range(3)
        )
        measured = {
            **{name: np.full(len(layers) * heads, value) for name, value in document.items()},
            "lost": lost,
            "effect": effects.reshape(-1),
            "evicted": ladder,
            "evicted_widened": widened,
        }
        columns = build_head_columns(encoded, [(name, heads, self.policy.groups) for name in layers])
        return columns | {name: values.astype(np.float32) for name, values in measured.items()}

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
            layers, expected = self.policy.layers, self.policy.num_heads
            raise ArgumentError(
                "policy.verify",
                received=f"a model with the layer {call.name!r} of {heads} heads",
                expected=f"{len(layers)} layers such as {layers[0]!r}, each with {expected} heads",
                hint="Verify a policy on the model that it was made for.",
            )
        windows, sinks = (
            np.repeat(counts[layer], self.policy.groups)
            for counts in (self.policy.windows, self.policy.sinks)
        )
        most = max(WIDENED_SINKS, int(sinks.max()))
        found = call.matrix.measure(
            offsets=Offsets(None if token_rows.rows.all() else token_rows.rows),
            first=build_first_masses(token_rows, most),
        )
        offsets, first = as_numpy_per_head(found.offsets), as_numpy_per_head(found.first)
        counts = sinks.tolist(), np.maximum(sinks, WIDENED_SINKS).tolist()
        by_sinks = {
            count: compute_evicted(offsets, first, token_rows, count) for count in {*counts[0], *counts[1]}
        }
        own, more = (
            np.stack([by_sinks[count][head] for head, count in enumerate(heads_sinks)])
            for heads_sinks in counts
        )
        last = own.shape[1] - 1
        ladder = np.minimum(EVICTION_WINDOWS, last)
        lost = own[np.arange(heads), np.where(windows == FULL, last, np.minimum(windows, last))]
        return np.where(windows == FULL, 0.0, lost), own[:, ladder], more[:, ladder]


class TokenSequence(NamedTuple):
    """Tokens (n,), and the positions whose next token is to be predicted."""

    tokens: IntArray
    positions: IntArray


def draw_copy(random: np.random.Generator, length: int, vocabulary: int) -> TokenSequence:
    """Draw a random block twice; the second copy is to be predicted, except for its first tokens."""
    half = length // 2
    block = random.integers(vocabulary, size=half)
    return TokenSequence(np.concatenate([block, block]), np.arange(half + SHOWN, 2 * half - 1))


def draw_needle(random: np.random.Generator, length: int, vocabulary: int, depth: float) -> TokenSequence:
    """Draw a haystack with a needle, which starts again at the end; the rest of the needle is to be predicted."""
    tokens = random.integers(vocabulary, size=length)
    needle = random.integers(vocabulary, size=NEEDLE)
    start = int(depth * (length - 2 * NEEDLE))
    tokens[start : start + NEEDLE] = needle
    tokens[-NEEDLE:] = needle
    return TokenSequence(tokens, np.arange(length - NEEDLE + SHOWN - 1, length - 1))


def run_tests(runner: PolicyRunner) -> list[dict[str, Any]]:
    """Run the tests that fit into the length of the texts.

    Returns:
        For each test and length: `test`, `length`; `plain` and `policy`, the share of tokens predicted without and
        with the policy; `able`, whether the model can do it; if it can, `kl` and, if effects are measured, `effects`
        (num_layers, heads).
    """
    import torch

    from regard.models.loaded_model import find_token_embedding

    embedding = find_token_embedding(runner.loaded.model)
    vocabulary = 0 if embedding is None else int(embedding.num_embeddings)
    limit = min(runner.options.max_tokens, runner.loaded.max_positions)
    results: list[dict[str, Any]] = []
    for length in [length for length in LENGTHS if length <= limit] if vocabulary else []:
        random = np.random.default_rng(SEED)
        drawn = {
            "copy": [draw_copy(random, length, vocabulary) for _ in range(SEQUENCES)],
            "needle": [draw_needle(random, length, vocabulary, depth) for depth in DEPTHS],
        }
        for test, sequences in drawn.items():
            right = np.zeros(2)
            divergence, count = 0.0, 0
            effects: Array = np.zeros(())
            runs = []
            for sequence in sequences:
                ids = torch.as_tensor(sequence.tokens)[None].to(runner.options.device or "cpu")
                with torch.no_grad():
                    plain = runner.run(ids)
                right[0] += _count_right(plain, sequence)
                count += len(sequence.positions)
                runs.append((ids, plain, sequence))
            able = bool(right[0] >= ABLE * count)
            result: dict[str, Any] = {"test": test, "length": length, "able": able, "plain": right[0] / count}
            for ids, plain, sequence in runs if able else []:
                logits = runner.run_policy(ids, plain)
                right[1] += _count_right(logits, sequence)
                divergence += compare_logits(plain, logits, ids[0])["kl"] / len(runs)
                if runner.effects:
                    effects = effects + runner.attribute(ids, plain) / len(runs)
            if able:
                result |= {"policy": right[1] / count, "kl": divergence}
                result["passed"] = bool(right[1] >= right[0] - MAX_LOSS * count)
                if runner.effects:
                    result["effects"] = np.asarray(effects).tolist()
            results.append(result)
    return results


def _count_right(logits: Any, sequence: TokenSequence) -> int:
    found = logits.argmax(-1).cpu().numpy()[sequence.positions]
    return int((found == sequence.tokens[sequence.positions + 1]).sum())
