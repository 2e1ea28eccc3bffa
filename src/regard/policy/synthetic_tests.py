"""Synthetic tests of long-range attention: copy a block of tokens, and find a needle in a haystack.

Both use random tokens, so a model passes them by attention alone. A test counts only if the model passes it without
the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.policy.comparison import compare_logits
from regard.types import Array, IntArray

if TYPE_CHECKING:
    from regard.policy.model_runner import PolicyRunner

# Lengths of the sequences, in tokens; those above `max_tokens` are left out.
LENGTHS = (64, 256, 1024, 4096)
SEQUENCES = 4
# The needle: so many tokens, and how many of them are shown again at the end.
NEEDLE, SHOWN = 12, 4
# Where the needle lies, as a share of the haystack.
DEPTHS = (0.05, 0.35, 0.65, 0.9)
# A model can do a test if it predicts this share of the tokens; a policy that loses more than this share fails it.
ABLE, MAX_LOSS = 0.5, 0.05
SEED = 20


class Sequence(NamedTuple):
    """Tokens (n,), and the positions whose next token is to be predicted."""

    tokens: IntArray
    positions: IntArray


def draw_copy(random: np.random.Generator, length: int, vocabulary: int) -> Sequence:
    """Draw a random block twice; the second copy is to be predicted, except for its first tokens."""
    half = length // 2
    block = random.integers(vocabulary, size=half)
    return Sequence(np.concatenate([block, block]), np.arange(half + SHOWN, 2 * half - 1))


def draw_needle(random: np.random.Generator, length: int, vocabulary: int, depth: float) -> Sequence:
    """Draw a haystack with a needle, which starts again at the end; the rest of the needle is to be predicted."""
    tokens = random.integers(vocabulary, size=length)
    needle = random.integers(vocabulary, size=NEEDLE)
    start = int(depth * (length - 2 * NEEDLE))
    tokens[start : start + NEEDLE] = needle
    tokens[-NEEDLE:] = needle
    return Sequence(tokens, np.arange(length - NEEDLE + SHOWN - 1, length - 1))


def run_tests(runner: PolicyRunner) -> list[dict[str, Any]]:
    """Run the tests that fit into the length of the texts.

    Args:
        runner: The model and the policy.

    Returns:
        For each test and length: `test`, `length`; `plain` and `policy`, the share of tokens predicted without and
        with the policy; `able`, whether the model can do it; if it can, `kl` and, if effects are measured, `effects`
        (num_layers, heads).
    """
    import torch

    from regard.models.loaded_model import find_token_embedding

    embedding = find_token_embedding(runner.loaded.model)
    vocabulary = 0 if embedding is None else int(embedding.num_embeddings)
    limit = min(runner.spec.max_tokens, runner.loaded.max_positions)
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
                ids = torch.as_tensor(sequence.tokens)[None].to(runner.spec.device or "cpu")
                with torch.no_grad():
                    plain = runner.run(ids)
                right[0] += _count_right(plain, sequence)
                count += len(sequence.positions)
                runs.append((ids, plain, sequence))
            able = bool(right[0] >= ABLE * count)
            result: dict[str, Any] = {"test": test, "length": length, "able": able, "plain": right[0] / count}
            for ids, plain, sequence in runs if able else []:
                logits = runner.run_policy(ids) if runner.edits else plain
                right[1] += _count_right(logits, sequence)
                divergence += compare_logits(plain, logits, ids[0])["kl"] / len(runs)
                if runner.spec.effects and runner.edits:
                    effects = effects + runner.attribute(ids, plain) / len(runs)
            if able:
                result |= {"policy": right[1] / count, "kl": divergence}
                result["passed"] = bool(right[1] >= right[0] - MAX_LOSS * count)
                if runner.spec.effects and runner.edits:
                    result["effects"] = np.asarray(effects).tolist()
            results.append(result)
    return results


def _count_right(logits: Any, sequence: Sequence) -> int:
    found = logits.argmax(-1).cpu().numpy()[sequence.positions]
    return int((found == sequence.tokens[sequence.positions + 1]).sum())
