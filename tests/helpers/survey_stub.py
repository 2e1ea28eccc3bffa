"""A stand-in for a model that needs no torch, and what poison documents do to whoever reads them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from regard.survey.schema import widths

LAYERS, HEADS = 2, 3


class Stub:
    """Rows that depend on the text alone."""

    name = "stub"

    def about(self) -> dict[str, Any]:
        heads = [HEADS] * LAYERS
        return {
            "model": self.name,
            "weights": "none",
            "tokenizer": "none",
            "layers": LAYERS,
            "heads": heads,
            "notes": [],
        }

    def measure(self, text: str) -> dict[str, Any]:
        suffer(text)
        random = np.random.default_rng(zlib.crc32(text.encode()))
        count = LAYERS * HEADS
        rows: dict[str, Any] = {
            "layer": np.repeat(np.arange(LAYERS, dtype=np.int16), HEADS),
            "head": np.tile(np.arange(HEADS, dtype=np.int16), LAYERS),
            "kv_head": np.zeros(count, np.int16),
            "module": [f"layers.{layer}" for layer in range(LAYERS) for _ in range(HEADS)],
            "tokens": len(text),
            "cut": False,
        }
        for name, width in widths().items():
            shape = count if width == 1 else (count, width)
            rows[name] = random.random(shape, np.float32)
        return rows


class Unsteady(Stub):
    """Another model in every process."""

    def about(self) -> dict[str, Any]:
        return {**super().about(), "weights": str(os.getpid())}


def suffer(text: str) -> None:
    """What a document that begins with POISON does; with a path as its last word, only if nothing is there yet.

    `kill-worker` kills who started this process, so many milliseconds after it answered.
    """
    if not text.startswith("POISON"):
        return
    _, what, *once = text.split()
    wait = int(once.pop(0)) / 1000 if what == "kill-worker" else 0.0
    if once:
        if Path(once[0]).exists():
            return
        Path(once[0]).touch()
    if what == "raise":
        raise RuntimeError("this document cannot be read")
    if what == "hang":
        time.sleep(3600)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "kill-worker":
        subprocess.Popen(["sh", "-c", f"sleep {wait}; kill -9 {os.getppid()}"], start_new_session=True)
        time.sleep(0.0 if wait else 3600)
