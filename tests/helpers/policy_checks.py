"""Corpora for the models of this repository, and verification in this process, without workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.induction import draw_repeats, load
from examples.induction.data import build_text
from regard.jobs.options import RunOptions
from regard.jobs.shards import RowBatch
from regard.models import LoadedModel
from regard.policy import FULL, CachePolicy, Verification
from regard.policy.model_runner import PolicyRunner, PolicySpec, run_tests
from regard.policy.policy import build_verification, widen_heads

TEXT_MODEL, INDUCTION_MODEL = "examples.induction:load_text", "examples.induction:load"
# The lengths that the models were trained on.
TEXT_TOKENS, INDUCTION_TOKENS = 128, 64


def draw_texts(half: int, count: int) -> list[str]:
    """Return held-out texts of 300 characters; the two halves alternate in the source."""
    text = build_text().held_out.decode(errors="ignore")
    return [text[start : start + 300] for start in range(1000 * half, len(text) - 300, 2000)][:count]


def draw_repeated(half: int, count: int) -> list[str]:
    """Return texts of 64 random characters with a repeated block; the two halves differ by their seed."""
    tokens = draw_repeats(count, seed=50 + half, vocabulary=94).tokens + 33
    return [bytes(row.tolist()).decode() for row in tokens]


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    """Write texts as JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build_policy(model: str, windows: dict[tuple[int, int], tuple[int, int]]) -> CachePolicy:
    """Build a policy that keeps everything except for some heads: {(layer, head): (window, sinks)}."""
    layers, heads = (3, 4) if model == TEXT_MODEL else (2, 4)
    counts = np.full((2, layers, heads), 0)
    counts[0] = FULL
    for place, own in windows.items():
        counts[(slice(None), *place)] = own
    head_dim = 32 if model == TEXT_MODEL else 16
    about = {"num_heads": heads, "head_dim": head_dim, "bytes_per_number": 4}
    return CachePolicy(counts[0], counts[1], tuple(f"layers.{i}.attention" for i in range(layers)), about)


class LocalVerifier:
    """Verifies policies in this process, with one copy of the model."""

    def __init__(self, model: str, texts: Sequence[str], *, tests: bool = False) -> None:
        own = load("text" if model == TEXT_MODEL else "induction")
        self.loaded, self.texts, self.tests = LoadedModel(model, own), texts, tests
        self.max_tokens = TEXT_TOKENS if model == TEXT_MODEL else INDUCTION_TOKENS

    def verify(self, policy: CachePolicy, bound: float, *, effects: bool = False) -> Verification:
        spec = PolicySpec("", policy, effects, options=RunOptions(max_tokens=self.max_tokens))
        runner = PolicyRunner(self.loaded, spec)
        rows = (RowBatch(str(i), None, runner.measure(text)) for i, text in enumerate(self.texts))
        settings = {"model": {"name": self.loaded.name}, "max_tokens": self.max_tokens}
        if self.tests:
            settings["tests"] = run_tests(runner)
        return build_verification(policy, bound, settings, rows, [])

    def tighten(self, policy: CachePolicy, bound: float) -> tuple[CachePolicy, int]:
        """Tighten a policy; return it and the number of rounds."""
        for rounds in range(8):
            verification = self.verify(policy, bound, effects=True)
            if verification.holds:
                return policy, rounds
            policy, _ = widen_heads(verification)
        raise AssertionError(f"{verification.verdict} after {rounds} rounds")


def list_changes(before: CachePolicy, after: CachePolicy) -> list[tuple[int, int]]:
    """List the heads in which two policies differ."""
    assert dataclasses.replace(after, about={}).layers == before.layers
    changed = (before.windows != after.windows) | (before.sinks != after.sinks)
    return [(int(layer), int(head)) for layer, head in np.argwhere(changed)]
