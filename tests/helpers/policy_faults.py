"""Inject the faults of a survey into a verification, in a driver process of its own.

python tests/helpers/policy_faults.py CORPUS OUT FAULT COUNT
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from regard.jobs.model_runner import ModelInfo
from regard.policy import FULL, CachePolicy, Verification
from regard.policy.model_runner import COLUMNS
from tests.helpers.survey_faults import FAULTS
from tests.helpers.survey_stub import HEADS, LAYERS, Stub

POLICY = CachePolicy(
    [[4, FULL, 8]] * LAYERS, [[1, 0, 0]] * LAYERS, [f"layers.{layer}" for layer in range(LAYERS)]
)


class PolicyStub(Stub):
    """Returns rows of a verification that depend on the text alone."""

    def describe(self) -> ModelInfo:
        return {**super().describe(), "settings": {"tests": []}}

    def measure(self, text: str) -> dict[str, Any]:
        rows = {name: value for name, value in super().measure(text).items() if name not in COLUMNS}
        random = np.random.default_rng(zlib.crc32(text.encode()))
        for name, width in COLUMNS.items():
            shape = LAYERS * HEADS if width == 1 else (LAYERS * HEADS, width)
            rows[name] = random.random(shape, np.float32)
        return rows


def verify(corpus: Path, out: Path, **options: Any) -> Verification:
    """Verify the policy with the stand-in for a model."""
    return POLICY.verify(PolicyStub(), corpus, out, shard_size=5, timeout=60.0, **options)


def run_driver(corpus: Path, out: Path, fault: str, count: int) -> subprocess.CompletedProcess[str]:
    """Run a driver process in which a fault happens."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root / "src", root)))}
    command = [sys.executable, __file__, str(corpus), str(out), fault, str(count)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


if __name__ == "__main__":
    from tests.helpers import policy_faults  # so that the stand-in can be pickled

    corpus, out, fault, count = sys.argv[1:]
    FAULTS[fault](int(count))
    policy_faults.verify(Path(corpus), Path(out))
