"""A stand-in for a model that needs no torch, and documents that harm the process that measures them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from regard.jobs.model_runner import ModelInfo
from regard.survey.schema import list_columns

LAYERS, HEADS = 2, 3


class Stub:
    """Returns rows that depend on the text alone."""

    name = "stub"

    def describe(self) -> ModelInfo:
        return {
            "name": self.name,
            "weights": "none",
            "tokenizer": "none",
            "layers": LAYERS,
            "heads": [HEADS] * LAYERS,
            "notes": [],
        }

    def measure(self, text: str) -> dict[str, Any]:
        obey(text)
        random = np.random.default_rng(zlib.crc32(text.encode()))
        count = LAYERS * HEADS
        rows: dict[str, Any] = {
            "layer": np.repeat(np.arange(LAYERS, dtype=np.int16), HEADS),
            "head": np.tile(np.arange(HEADS, dtype=np.int16), LAYERS),
            "kv_head": np.zeros(count, np.int16),
            "module": [f"layers.{layer}" for layer in range(LAYERS) for _ in range(HEADS)],
            "tokens": len(text),
            "truncated": False,
        }
        for name, width in list_columns().items():
            shape = count if width == 1 else (count, width)
            rows[name] = random.random(shape, np.float32)
        return rows


class UnstableStub(Stub):
    """Has other weights in every process."""

    def describe(self) -> ModelInfo:
        return {**super().describe(), "weights": str(os.getpid())}


class KilledStub(Stub):
    """Kills its process before it is ready, the first `times` times; `starts` is a file that counts them."""

    def __init__(self, starts: Path, times: int) -> None:
        self.starts, self.times = starts, times

    def describe(self) -> ModelInfo:
        with self.starts.open("a") as file:
            file.write("x")
        if self.starts.stat().st_size <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().describe()


def obey(text: str) -> None:
    """Do what a document that begins with POISON says: raise, hang, kill, segfault or kill-worker.

    If its last word is a path, the document does so once: only while no file exists there. `kill-worker` kills the
    parent of this process, the given number of milliseconds after the answer.
    """
    if not text.startswith("POISON"):
        return
    _, action, *once = text.split()
    wait = int(once.pop(0)) / 1000 if action == "kill-worker" else 0.0
    if once:
        if Path(once[0]).exists():
            return
        Path(once[0]).touch()
    if action == "raise":
        raise RuntimeError("this document cannot be read")
    if action == "hang":
        time.sleep(3600)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "kill-worker":
        subprocess.Popen(["sh", "-c", f"sleep {wait}; kill -9 {os.getppid()}"], start_new_session=True)
        time.sleep(0.0 if wait else 3600)
